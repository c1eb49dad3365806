"""Watermarks in generated text."""
