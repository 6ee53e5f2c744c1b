"""The bound on the memory of all requests in one gateway, and what happens as it fills.

Two parts of a request are large. One is its body with the texts parsed from it: 4,096 bodies of 16 MiB would be 64 GiB.
The other is its token ids and the rows that it waits for: 32 MiB for 2,048 inputs of 4,096 dimensions. Both count until
the answer is made. A declared length counts at once, so that a body is refused before it is sent and not halfway. Rows
count before they exist. Small bodies do not count.

    from 85 %    large bodies are refused, and answers close their connections: a client that connects again may reach
                 another gateway
    from 95 %    new requests are refused
    at 100 %     a running request that needs more than is left is refused, too

So clients that declare large bodies and send nothing can keep out other large bodies, but never a short query. A
request that is larger than the whole budget is accepted when no other is there: "try again later" would never end.
Bounded elsewhere: the work that waits at the scheduler (a window in client.py, which would free none of this memory),
and answers that are being sent (the number of connections, and `--write-timeout-s`).
"""

from __future__ import annotations

from common.errors import Overloaded

_SHORT = 0.85
_FULL = 0.95
_UNCOUNTED_BYTES = 16 * 1024  # of a small body: 64 MiB in all, with the default number of requests


class MemoryBudget:
    """The bytes that all requests of one gateway may hold, and do hold."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @property
    def is_short(self) -> bool:
        return self.num_bytes >= _SHORT * self._max_bytes

    def hold(self) -> RequestMemory:
        """A context in which a request is counted. Raises Overloaded: there is no room for another request."""
        if self.num_bytes >= _FULL * self._max_bytes:
            raise _full()
        return RequestMemory(self)

    def grow(self, num_bytes: int, part: float) -> None:
        """Count more bytes. Raises Overloaded: the total would exceed this part of the budget."""
        if self.num_bytes and self.num_bytes + num_bytes > part * self._max_bytes:
            raise _full()
        self.num_bytes += num_bytes


class RequestMemory:
    """The bytes that one request holds."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.num_bytes = 0
        self._budget = budget

    def __enter__(self) -> RequestMemory:
        return self

    def __exit__(self, *raised: object) -> None:
        self._budget.num_bytes -= self.num_bytes

    def grow_body_to(self, num_bytes: int) -> None:
        """The body, which is not parsed yet, now has this many bytes. Raises Overloaded: there is no room for them."""
        if num_bytes > max(self.num_bytes, _UNCOUNTED_BYTES):
            self._budget.grow(num_bytes - self.num_bytes, _SHORT)
            self.num_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """Count more bytes until the request is answered. Raises Overloaded: there is no room for them."""
        self._budget.grow(num_bytes, 1)
        self.num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Give bytes back before the request ends."""
        self._budget.num_bytes -= num_bytes
        self.num_bytes -= num_bytes


def _full() -> Overloaded:
    return Overloaded(
        "The requests in this gateway take all the memory that they may. Try again a little later.", retry_after_s=1
    )
