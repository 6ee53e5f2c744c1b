"""The trace of a request whose client sends `X-Trace: 1`, as `benchmarks/profile_latency.py` does.

Every process on the way reads the same clock at certain moments (`common/wire/messages.py` has those of the others).
A stage is the time between two moments, so stages neither overlap nor leave a gap. The answer's `Server-Timing` tells
how long each stage took. Its `X-Trace` tells as JSON when each moment was, in nanoseconds of CLOCK_MONOTONIC since
`start_ns`.

The pieces of a long request take several ways through the scheduler and the workers. The stages are those of the piece
that came back last.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from common.wire.messages import PIECE_MOMENTS, Trace
from common.wire.transport import now_ns

if TYPE_CHECKING:
    import numpy.typing as npt

_BEFORE = ("accepted", "read", "parsed", "tokenized")
_AFTER = ("heard", "resumed", "rendered")
MOMENTS = (*_BEFORE, *PIECE_MOMENTS, *_AFTER)

# The stage between each moment and the next.
STAGES = (
    "body",  # key and limits, reading the body
    "parse",
    "tokenize",
    "send",  # into the ledger; for a long request, until the scheduler had room
    "to_scheduler",  # encoded, sent, the scheduler woken, decoded
    "queue",
    "to_worker",  # packed, encoded, sent, the worker woken, decoded
    "batch_wait",  # in the worker, until the batch before is launched
    "stage",
    "launch",
    "device_wait",  # behind the step before
    "device",
    "copy_back",
    "answer",  # from the thread that has the rows to the socket's
    "from_worker",  # encoded, sent, the scheduler woken, decoded
    "relay",  # rows divided and sent, the gateway woken
    "resume",  # rows taken in, the request's task woken
    "render",
)
assert len(STAGES) == len(MOMENTS) - 1

# An answer's header has room for this many.
_MAX_PIECES = 16


class FollowedPiece(msgspec.Struct):
    """A piece's way through the scheduler and a worker."""

    batch: Annotated[int, Meta(description="The batch that it ran in.")]
    worker: str
    sequences: Annotated[int, Meta(description="How many the whole batch has.")]
    tokens: Annotated[int, Meta(description="How many the whole batch has.")]
    times_ns: Annotated[list[int], Meta(description=f"When it was {', '.join((*PIECE_MOMENTS, _AFTER[0]))}.")]


class FollowedRequest(msgspec.Struct):
    """The moments of a request, in nanoseconds since `start_ns`: the content of `X-Trace`."""

    pid: Annotated[int, Meta(description="The gateway's process.")]
    start_ns: Annotated[int, Meta(description="When it was accepted, by the server's CLOCK_MONOTONIC.")]
    before_ns: Annotated[list[int], Meta(description=f"When it was {', '.join(_BEFORE)}.")]
    after_ns: Annotated[list[int], Meta(description=f"When the answer was {', '.join(_AFTER[1:])}.")]
    pieces: Annotated[list[FollowedPiece], Meta(description="Those that came back last; a long request has more.")]


class RequestTrace:
    """The moments of one request, as they come."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[Trace, int]] = deque(maxlen=_MAX_PIECES)  # with the time of arrival, in ns

    def sent(self) -> npt.NDArray[np.int64]:
        """The moment at which a Request is sent, which is now: int64 [1]."""
        return np.array([now_ns()])

    def add(self, trace: Trace, heard_ns: int) -> None:
        self._pieces.append((trace, heard_ns))

    def headers(self, before_ns: tuple[int, int, int, int], after_ns: tuple[int, int], timing: str) -> dict[str, str]:
        """`Server-Timing` and `X-Trace` of the answer; nothing if no model has run.

        Args:
            before_ns: when the request was accepted, read, parsed and tokenized.
            after_ns: when rendering began and ended.
            timing: the `Server-Timing` that any answer has.
        """
        if not self._pieces or not all((*before_ns, *after_ns)):
            return {}
        start_ns = before_ns[0]
        last, heard_ns = self._pieces[-1]
        times_ns = [*before_ns, *last.times_ns.tolist(), heard_ns, *after_ns]
        stages = [
            f"{name};dur={(end_ns - begin_ns) / 1e6:.3f}"
            for name, (begin_ns, end_ns) in zip(STAGES, pairwise(times_ns), strict=True)
            if f"{name};" not in timing
        ]
        pieces = [
            FollowedPiece(
                batch=trace.batch_id,
                worker=trace.worker,
                sequences=trace.num_sequences,
                tokens=trace.num_tokens,
                times_ns=[time_ns - start_ns for time_ns in (*trace.times_ns.tolist(), heard)],
            )
            for trace, heard in self._pieces
        ]
        followed = FollowedRequest(
            pid=os.getpid(),
            start_ns=start_ns,
            before_ns=[time_ns - start_ns for time_ns in before_ns],
            after_ns=[time_ns - start_ns for time_ns in after_ns],
            pieces=pieces,
        )
        return {"Server-Timing": ", ".join((timing, *stages)), "X-Trace": msgspec.json.encode(followed).decode()}
