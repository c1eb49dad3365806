"""Conformance suites for plugins: subclass one in your tests, and every law and every claim is checked.

The suites use pytest only where it runs them. Nothing of decodekit imports this package.
"""

from __future__ import annotations

from .adapters import AdapterContract
from .caches import CacheContract
from .models import ScriptedLM, TinyLM
from .processors import ProcessorContract
from .strategies import StrategyContract
from .support import context, results, score_cases

__all__ = [
    "AdapterContract",
    "CacheContract",
    "ProcessorContract",
    "ScriptedLM",
    "StrategyContract",
    "TinyLM",
    "context",
    "results",
    "score_cases",
]
