"""What is let in, and what a refused client is told. Pure: time is an argument.

The unit is the token, since that is what a worker's time goes to. A queue limit is a predicted wait, not a count of
requests: under it a client waits, above it the refusal is immediate and says when to come back.
"""

from __future__ import annotations

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable

# A smoothed rate follows a change of load within some ten batches, and one odd step does not sway it.
_SMOOTHING = 0.2

# Until the first full batch there is no rate: this many tokens are let in, some seconds of a slow CPU.
_BLIND_TOKENS = 20_000

# How long requests are held while no worker is there: a restart takes about 5 s; a fleet that stays away longer is
# down, and a client is better told so.
RECOVERY_NS = 15_000_000_000

_MAX_RETRY_AFTER_S = 30.0


class ServiceRate:
    """How long the workers take for a token, learned from their results.

    Only from batches of at least half a budget: a small one costs mostly what any step costs (5 tokens 7 ms where 512
    took 59), so a server that had only seen short queries would take a burst for ten times the work that it is. What
    queues runs in full batches.
    """

    def __init__(self) -> None:
        self._us_per_token: float | None = None

    def observe(self, num_tokens: int, step_us: int, max_batch_tokens: int) -> None:
        if 2 * num_tokens < max_batch_tokens:
            return
        sample = step_us / num_tokens
        if self._us_per_token is None:
            self._us_per_token = sample
        else:
            self._us_per_token += _SMOOTHING * (sample - self._us_per_token)

    def predict_ms(self, num_tokens: int, num_workers: int = 1) -> float | None:
        """Milliseconds for this many queued tokens, shared by so many workers; None before anything was observed."""
        if self._us_per_token is None:
            return None
        return num_tokens * self._us_per_token / 1000 / max(num_workers, 1)


class Admission:
    def __init__(self, max_queue_ms: int) -> None:
        self._max_queue_ms = max_queue_ms

    def refusal(
        self,
        *,
        queued_tokens: int,
        deadline_ns: int,
        rate: ServiceRate,
        workers_ready: int,
        without_workers_ns: int,
        now_ns: int,
    ) -> ServiceError | None:
        """Why a new request is not let in; None when it is.

        `without_workers_ns`: for how long no worker has been ready.
        """
        if deadline_ns <= now_ns:
            return DeadlineExceeded("The deadline passed before the request could be queued. Allow more time.")
        if workers_ready == 0 and without_workers_ns >= RECOVERY_NS:
            return no_capacity()
        wait_ms = rate.predict_ms(queued_tokens, workers_ready)
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
