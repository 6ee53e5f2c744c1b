"""Which requests are let in, and what a refused client is told. Pure: time is an argument.

The queue's limit is a predicted wait, not a number of requests. Under it a request waits; above it the refusal is
immediate and says when to come back. Work in lanes below the request's own does not count, nor what another tenant has
waiting beyond as much as its own (`batching.py`): so the tenants that are there share the limit.

Gateways are told which lanes and tenants are full. They refuse by themselves what would be refused here, before its
text is tokenized. What they know is good for a moment only; a request in doubt comes here, and this decides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable
from common.lanes import LANES
from common.wire.messages import NONE_FULL, Request

# This many tokens are let in until the first step has told how long one takes: some seconds of a slow CPU.
_BLIND_TOKENS = 20_000

# The most tokens that wait, whatever their predicted time: 256 MiB of ids, a bound of memory should a prediction be
# wrong. Later parts of requests that were let in come on top; gateways bound these.
_MAX_QUEUED_TOKENS = 64 * 1024 * 1024

# How long requests are held while there is no worker. A restart takes about 5 s; a fleet that stays away longer is
# down, and clients are told.
RECOVERY_NS = 15_000_000_000

# A gateway refuses until there is room for this share of the limit, so that the next request does not fill it at once;
# and for a second at most, since much may change meanwhile.
_ROOM = 0.02
_MAX_FULL_NS = 1_000_000_000
_MAX_DONE_NS = 86_400_000_000_000  # what is predicted to take longer than a day has not been predicted well


class Admission:
    def __init__(self, max_queue_ms: int) -> None:
        self._max_queue_ms = max_queue_ms
        self._full: dict[tuple[str, int], tuple[int, int]] = {}  # by lane and tenant, the times of `full`

    def is_open(
        self,
        *,
        queued_tokens: int,
        wait_ms: float | None,
        deadline_ns: int,
        workers_ready: int,
        now_ns: int,
    ) -> bool:
        """Whether each of some requests is let in, so that `admit` need not be called for any: it would say None.

        Args:
            queued_tokens: the tokens that may be before any of them.
            wait_ms: how long the ready workers will take for these; None: nothing is known yet.
            deadline_ns: the soonest of their deadlines.
        """
        return (
            workers_ready > 0
            and queued_tokens < _MAX_QUEUED_TOKENS
            and wait_ms is not None
            and wait_ms <= self._max_queue_ms
            and deadline_ns - now_ns > wait_ms * 1e6
        )

    def admit(
        self,
        request: Request,
        *,
        queued_tokens: int,
        tokens_before: int,
        wait_ms: float | None,
        least_wait_ms: Callable[[], float | None],
        workers_ready: int,
        without_workers_ns: int,
        now_ns: int,
    ) -> ServiceError | None:
        """Let a new request in: None, or why it is not. What is full is noted for the gateways (`full`).

        Args:
            queued_tokens: in all lanes, of all tenants.
            tokens_before: the tokens that run before it.
            wait_ms: how long the ready workers will take for `tokens_before`; None: nothing is known yet.
            least_wait_ms: the same for the smallest request of its tenant in its lane, before which less may run.
            without_workers_ns: for how long no worker has been ready.
        """
        if request.deadline_ns <= now_ns:
            return DeadlineExceeded("The deadline passed before the request could be queued. Allow more time.")
        if workers_ready == 0 and without_workers_ns >= RECOVERY_NS:
            return no_capacity()
        if queued_tokens >= _MAX_QUEUED_TOKENS:
            return Overloaded("As many tokens wait as the server can hold. Try again later.", retry_after_s=1)
        if wait_ms is None:
            if tokens_before > _BLIND_TOKENS:
                return Overloaded("The server is still measuring itself and its queue is full.", retry_after_s=1)
            return None
        if wait_ms > self._max_queue_ms:
            until_ns = int((wait_ms - (1 - _ROOM) * self._max_queue_ms) * 1e6)
            least_ms = least_wait_ms()
            if least_ms is not None and least_ms > self._max_queue_ms:
                times_ns = (now_ns + min(until_ns, _MAX_FULL_NS), now_ns + min(int(wait_ms * 1e6), _MAX_DONE_NS))
                self._full[request.lane, request.tenant] = times_ns
            return Overloaded.queue_full(wait_ms)
        if request.deadline_ns - now_ns < wait_ms * 1e6:
            return DeadlineExceeded(
                f"The work that waits takes {wait_ms / 1000:.1f} s, longer than this request's deadline allows."
            )
        return None

    def full(self, now_ns: int) -> npt.NDArray[np.int64]:
        """The lanes and tenants whose queue is full, as in a Ping: int64 [refused, 4]."""
        if not self._full:
            return NONE_FULL
        self._full = {whose: times_ns for whose, times_ns in self._full.items() if times_ns[0] > now_ns}
        rows = [(LANES.index(lane), tenant, *times_ns) for (lane, tenant), times_ns in self._full.items()]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


def no_capacity() -> Unavailable:
    return Unavailable("No worker is ready. They are restarted by themselves; try again.", retry_after_s=5)
