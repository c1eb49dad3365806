"""Models of the transformers library: an adapter for model objects, and an opener for checkpoints."""

from __future__ import annotations

from .adapter import TransformersAdapter
from .plugin import Transformers

__all__ = ["Transformers", "TransformersAdapter"]
