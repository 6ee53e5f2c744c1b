"""What is let in, and what a refused client is told. Pure: time is an argument.

A queue limit is a predicted wait, not a count of requests: under it a client waits, above it the refusal is immediate
and says when to come back. What waits in lanes below a request's own is not before it, nor what another tenant has
waiting beyond as much as its own (batching.py): so the limit is split between those who are there.

Who is refused is told to the gateways, which then refuse by themselves what would be refused here: before its text is
tokenized, and without a hop. What they know is good for a moment only, and a request in doubt comes here: this is what
decides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable
from common.lanes import LANES
from common.wire.messages import NONE_FULL, Request

# Until the first step has told how long one takes: this many tokens are let in, some seconds of a slow CPU.
_BLIND_TOKENS = 20_000

# The most that waits whatever its predicted time, 256 MiB of ids: a bound of memory, should a prediction be wrong. What
# belongs to requests that were let in comes on top; gateways bound how many these are, and how much of each is here.
_MAX_QUEUED_TOKENS = 64 * 1024 * 1024

# How long requests are held while no worker is there: a restart takes about 5 s; a fleet that stays away longer is
# down, and a client is better told so.
RECOVERY_NS = 15_000_000_000

# A gateway refuses until there is room again for this part of the limit, lest the next request fill it at once; and no
# longer than so, since much may change meanwhile.
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
        """Whether any new request is let in whose deadline is no sooner, and behind no more than what waits in all.

        Then nobody has to ask for the `refusal` of each of those that have come together: it would be None.

        Args:
            queued_tokens: of whatever may be before any of them.
            wait_ms: how long the ready workers will take for these; None: nothing is known of that.
        """
        return (
            workers_ready > 0
            and queued_tokens < _MAX_QUEUED_TOKENS
            and wait_ms is not None
            and wait_ms <= self._max_queue_ms
            and deadline_ns - now_ns > wait_ms * 1e6
        )

    def refusal(
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
        """Why a new request is not let in; None when it is.

        Args:
            queued_tokens: in all lanes, of all tenants.
            tokens_before: those that run before it.
            wait_ms: how long the ready workers will take for the latter; None: nothing is known of that.
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
        """For whom the queue is full, as a Ping has it: int64 [refused, 4]."""
        if not self._full:
            return NONE_FULL
        self._full = {whose: times_ns for whose, times_ns in self._full.items() if times_ns[0] > now_ns}
        rows = [(LANES.index(lane), tenant, *times_ns) for (lane, tenant), times_ns in self._full.items()]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


def no_capacity() -> Unavailable:
    return Unavailable("No worker is ready. They are restarted by themselves; try again.", retry_after_s=5)
