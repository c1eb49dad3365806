"""Schedulers of continuous batching, each a plugin of kind ``schedulers``."""
