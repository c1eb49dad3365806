"""Conformance suites for plugins: subclass one in your tests, and every law and every claim is checked.

The suites use pytest only where it runs them. Nothing of decodekit imports this package.
"""

from __future__ import annotations

from .adapters import AdapterContract
from .caches import CacheContract
from .criteria import CriterionContract
from .installed import Installed, installed
from .models import ScriptedLM, TinyLM
from .preparers import PreparerContract
from .processors import ProcessorContract
from .strategies import StrategyContract
from .streamers import StreamerContract
from .support import Letters, context, results, score_cases

__all__ = [
    "AdapterContract",
    "CacheContract",
    "CriterionContract",
    "Installed",
    "Letters",
    "PreparerContract",
    "ProcessorContract",
    "ScriptedLM",
    "StrategyContract",
    "StreamerContract",
    "TinyLM",
    "context",
    "installed",
    "results",
    "score_cases",
]
