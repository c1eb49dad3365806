"""Prompts that were run before: their keys and values in files."""
