"""Streamers: text while it is generated, printed or handed to another thread."""
