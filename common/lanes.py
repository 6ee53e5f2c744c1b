"""The lanes that requests wait in, most urgent first.

A lane runs when the lanes before it are empty. It also has a share of the workers' time (`scheduler/batching.py`).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Lane: TypeAlias = Literal["online", "score", "backfill"]

ONLINE: Final = "online"
SCORE: Final = "score"
BACKFILL: Final = "backfill"

LANES: tuple[str, ...] = get_args(Lane)
