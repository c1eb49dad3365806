"""Stopping criteria: length, time, end-of-sequence tokens, stop strings."""
