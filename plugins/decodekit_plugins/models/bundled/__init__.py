"""The small language model that ships with decodekit, and its draft model."""
