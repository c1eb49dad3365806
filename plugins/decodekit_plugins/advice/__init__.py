"""Advice before a run: settings that cannot have an effect, or that contradict each other."""
