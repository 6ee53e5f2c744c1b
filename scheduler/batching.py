"""What runs next: first come, first served, up to a token budget. Pure: no clock, no socket.

Latency follows the number of tokens, hardly that of sequences, so a batch is a token budget, and a batch is formed
when a worker has a free slot, from what waits: no timer, no minimum. Nothing overtakes: a sequence that does not fit
closes the batch, and one longer than the whole budget runs alone. A request may be split over several batches; work
that comes back from a lost worker returns to its old place in the order of arrival. Requests in the backfill lane
come after all others.

Sequences that were in a worker's hands when it died are suspects: after one loss they run again among suspects only,
at most 8 at once, after two alone, and after three they are given up. So one input that kills a worker cannot take
its neighbours down with it, and costs three deaths at most. (Bisecting would need a worker restart, about 5 s, for each
halving; running each alone at once would serialise 64 innocents after every ordinary crash.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from common.protocol import Request, cu_seqlens

MAX_LOSSES = 3
_SUSPECTS_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class Pending:
    """A request in the scheduler's hands. `settled` once it was answered, failed or cancelled: what is still queued
    or running of it has no taker any more."""

    gateway: bytes
    request: Request
    arrival: int  # the order of arrival, never reused
    arrived_ns: int
    unanswered: int  # sequences
    settled: bool = False
    offsets: np.ndarray = field(init=False)  # int32 [sequences + 1]

    def __post_init__(self) -> None:
        self.offsets = cu_seqlens(self.request.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The sequences [start, stop) of a request, which wait or run together."""

    pending: Pending
    start: int
    stop: int
    losses: int = 0  # how many workers died with it

    @property
    def num_tokens(self) -> int:
        return int(self.pending.offsets[self.stop] - self.pending.offsets[self.start])

    @property
    def num_sequences(self) -> int:
        return self.stop - self.start

    def __lt__(self, other: Span) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[bool, int, int]:
        return self.pending.request.lane == "backfill", self.pending.arrival, self.start


class BatchQueue:
    """What waits, in order of arrival. Unbounded by itself: `admission.py` decides what is let in."""

    def __init__(self) -> None:
        self._heap: list[Span] = []
        self.num_tokens = 0
        self.num_sequences = 0
        self._earliest_deadline_ns: int | None = None

    def push(self, span: Span) -> None:
        """Add new work, or give returned work its old place."""
        heapq.heappush(self._heap, span)
        self.num_tokens += span.num_tokens
        self.num_sequences += span.num_sequences
        deadline_ns = span.pending.request.deadline_ns
        if self._earliest_deadline_ns is None or deadline_ns < self._earliest_deadline_ns:
            self._earliest_deadline_ns = deadline_ns

    def next_batch(self, max_tokens: int) -> list[Span]:
        """The spans to run now, taken off the queue; empty when nothing waits.

        Never more than `max_tokens` tokens, unless the oldest sequence alone is longer: then just that one.
        """
        batch: list[Span] = []
        room_tokens = max_tokens
        num_sequences = 0
        while self._heap:
            head = self._heap[0]
            if head.pending.settled:
                self._pop()
                continue
            if batch and head.losses != batch[0].losses:
                break  # suspects run among suspects
            fitting = min(_fitting(head, room_tokens), _sequences_at_once(head.losses) - num_sequences)
            if fitting <= 0:
                if batch:
                    break
                fitting = 1
            self._pop()
            taken = Span(head.pending, head.start, min(head.start + fitting, head.stop), head.losses)
            batch.append(taken)
            room_tokens -= taken.num_tokens
            num_sequences += taken.num_sequences
            if taken.stop < head.stop:
                self.push(Span(head.pending, taken.stop, head.stop, head.losses))
                break
        return batch

    def expired(self, now_ns: int) -> list[Pending]:
        """The waiting requests whose deadline has passed; the caller settles them."""
        if self._earliest_deadline_ns is None or now_ns < self._earliest_deadline_ns:
            return []
        late: dict[int, Pending] = {}
        earliest: int | None = None
        for span in self._heap:
            pending = span.pending
            if pending.settled:
                continue
            deadline_ns = pending.request.deadline_ns
            if deadline_ns <= now_ns:
                late[pending.arrival] = pending
            elif earliest is None or deadline_ns < earliest:
                earliest = deadline_ns
        self._earliest_deadline_ns = earliest
        return list(late.values())

    def prune(self) -> None:
        """Drop what was settled while it waited, so that it no longer counts as queued."""
        kept = [span for span in self._heap if not span.pending.settled]
        if len(kept) == len(self._heap):
            return
        self._heap = kept
        heapq.heapify(self._heap)
        self.num_tokens = sum(span.num_tokens for span in kept)
        self.num_sequences = sum(span.num_sequences for span in kept)

    def pending(self) -> list[Pending]:
        """Every unsettled request that still has sequences waiting."""
        return list({span.pending.arrival: span.pending for span in self._heap if not span.pending.settled}.values())

    def __len__(self) -> int:
        return len(self._heap)

    def _pop(self) -> Span:
        span = heapq.heappop(self._heap)
        self.num_tokens -= span.num_tokens
        self.num_sequences -= span.num_sequences
        return span


def _sequences_at_once(losses: int) -> int:
    if losses == 0:
        return 2**31
    return _SUSPECTS_AT_ONCE if losses == 1 else 1


def _fitting(span: Span, room_tokens: int) -> int:
    """How many of a span's sequences, from its first, have at most `room_tokens` tokens together."""
    offsets = span.pending.offsets
    end = int(offsets[span.start]) + room_tokens
    return int(np.searchsorted(offsets, end, side="right")) - 1 - span.start
