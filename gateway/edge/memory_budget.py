"""What a gateway holds of requests, all together, is bounded; and what happens as it comes near its bound.

Two things of a request are large: its body, and the texts that are parsed from it (4,096 of 16 MiB would be 64 GiB),
and its token ids with the rows that it waits for (2,048 inputs of 4,096 dimensions have 32 MiB of them). Both count
until its answer is made. A declared length counts from the beginning, so that a body is refused before it is sent and
not in its middle; a request's rows count before there is any of them. Small bodies do not count.

    from 85 %    no large body is read, and answers close their connections: who comes again may come to another gateway
    from 95 %    no new request is let in
    at 100 %     what was let in, and turns out to be larger than what is left, is refused as well

So those who declare large bodies and send nothing keep other large bodies out, and never a short query. A request that
is larger than all of it is let in when nothing else is there: to refuse it as "try again later" would be for ever. Not
here: windows, which bound what waits at the scheduler and would free nothing of this; answers on their way out, which
the number of connections and `--write-timeout-s` bound.
"""

from __future__ import annotations

from common.errors import Overloaded

_SHORT = 0.85
_FULL = 0.95
_UNCOUNTED_BYTES = 16 * 1024  # of a small body; 64 MiB of as many requests as a gateway holds unless told otherwise


class MemoryBudget:
    """The bytes that all requests of one gateway hold."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @property
    def is_short(self) -> bool:
        return self.num_bytes >= _SHORT * self._max_bytes

    def hold(self) -> RequestMemory:
        """Count a request: as a context, until that ends. Raises Overloaded: there is no room for any."""
        if self.num_bytes >= _FULL * self._max_bytes:
            raise _full()
        return RequestMemory(self)

    def grow(self, num_bytes: int, part: float) -> None:
        """Count so many more. Raises Overloaded: then there would be more than this part of what there may be."""
        if self.num_bytes and self.num_bytes + num_bytes > part * self._max_bytes:
            raise _full()
        self.num_bytes += num_bytes


class RequestMemory:
    """What one request holds."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.num_bytes = 0
        self._budget = budget

    def __enter__(self) -> RequestMemory:
        return self

    def __exit__(self, *raised: object) -> None:
        self._budget.num_bytes -= self.num_bytes

    def grow_body_to(self, num_bytes: int) -> None:
        """Its body, of which nothing is parsed, has so many bytes now. Raises Overloaded: there is no room for them."""
        if num_bytes > max(self.num_bytes, _UNCOUNTED_BYTES):
            self._budget.grow(num_bytes - self.num_bytes, _SHORT)
            self.num_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """It holds so many more bytes, until it is answered. Raises Overloaded: there is no room for them."""
        self._budget.grow(num_bytes, 1)
        self.num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """So many of them are given back before the request ends."""
        self._budget.num_bytes -= num_bytes
        self.num_bytes -= num_bytes


def _full() -> Overloaded:
    return Overloaded("This gateway holds as many bytes as it may. Try again a little later.", retry_after_s=1)
