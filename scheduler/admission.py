"""What is let in, and what a refused client is told. Pure: time is an argument.

A queue limit is a predicted wait, not a count of requests: under it a client waits, above it the refusal is immediate
and says when to come back. What waits in lanes below a request's own is not before it.
"""

from __future__ import annotations

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable

# Until the first step has told how long one takes: this many tokens are let in, some seconds of a slow CPU.
_BLIND_TOKENS = 20_000

# How long requests are held while no worker is there: a restart takes about 5 s; a fleet that stays away longer is
# down, and a client is better told so.
RECOVERY_NS = 15_000_000_000

_MAX_RETRY_AFTER_S = 30.0


class Admission:
    def __init__(self, max_queue_ms: int) -> None:
        self._max_queue_ms = max_queue_ms

    def refusal(
        self,
        *,
        queued_tokens: int,
        wait_ms: float | None,
        deadline_ns: int,
        workers_ready: int,
        without_workers_ns: int,
        now_ns: int,
    ) -> ServiceError | None:
        """Why a new request is not let in; None when it is.

        Args:
            queued_tokens: that come before it.
            wait_ms: how long the ready workers will take for them; None: nothing is known of that.
            without_workers_ns: for how long no worker has been ready.
        """
        if deadline_ns <= now_ns:
            return DeadlineExceeded("The deadline passed before the request could be queued. Allow more time.")
        if workers_ready == 0 and without_workers_ns >= RECOVERY_NS:
            return no_capacity()
        if wait_ms is None:
            if queued_tokens > _BLIND_TOKENS:
                return Overloaded("The server is still measuring itself and its queue is full.", retry_after_s=1)
            return None
        if wait_ms > self._max_queue_ms:
            return Overloaded(
                f"The queue is full: {wait_ms / 1000:.1f} s of work wait. Try again later, or send less at once.",
                retry_after_s=min(wait_ms / 1000, _MAX_RETRY_AFTER_S),
            )
        if deadline_ns - now_ns < wait_ms * 1e6:
            return DeadlineExceeded(
                f"The work that waits takes {wait_ms / 1000:.1f} s, longer than this request's deadline allows."
            )
        return None


def no_capacity() -> Unavailable:
    return Unavailable("No worker is ready. They are restarted by themselves; try again.", retry_after_s=5)
