"""``python -m decodekit`` is the ``decodekit`` command."""

from __future__ import annotations

from .cli import main

raise SystemExit(main())
