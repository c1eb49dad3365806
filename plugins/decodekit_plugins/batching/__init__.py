"""Continuous batching: requests that join and leave a running batch."""
