"""The lanes that requests wait in. What waits in a lane comes after all that waits in the lanes before it, but for its
share of the workers' time (`scheduler/batching.py`)."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Lane: TypeAlias = Literal["online", "score", "backfill"]

ONLINE: Final = "online"
SCORE: Final = "score"
BACKFILL: Final = "backfill"

LANES: tuple[Lane, ...] = get_args(Lane)
