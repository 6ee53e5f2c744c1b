"""What runs next: first come, first served, up to a token budget. Pure: no clock, no socket.

Latency follows the number of tokens, hardly that of sequences, so a batch is a token budget, and a batch is formed
when a worker has a free slot, from what waits: no timer, no minimum. Nothing overtakes: a sequence that does not fit
closes the batch, and one longer than the whole budget runs alone. So do sparse sequences next to dense ones, whose rows
travel differently, and more rows than a result can hold. A request may be split over several batches; work that comes
back from a lost worker returns to its old place in the order of arrival. Requests in the backfill lane come after all
others.

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
    sparse: bool = field(init=False)
    offsets: np.ndarray = field(init=False)  # int32 [sequences + 1] of tokens
    row_offsets: np.ndarray | None = field(init=False)  # int32 [sequences + 1]; None: a row a sequence

    def __post_init__(self) -> None:
        request = self.request
        self.sparse = request.encoding == "sparse"
        self.offsets = cu_seqlens(request.lengths)
        self.row_offsets = cu_seqlens(request.span_counts) if len(request.span_counts) else None

    def first_row(self, sequence: int) -> int:
        """The first row of a sequence, counted across the request's sequences."""
        return sequence if self.row_offsets is None else int(self.row_offsets[sequence])

    def sequence_of(self, row: int) -> int:
        """The sequence that a row of the request belongs to."""
        return row if self.row_offsets is None else int(np.searchsorted(self.row_offsets, row, side="right")) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Part:
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

    @property
    def num_rows(self) -> int:
        return self.pending.first_row(self.stop) - self.pending.first_row(self.start)

    def __lt__(self, other: Part) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[bool, int, int]:
        return self.pending.request.lane == "backfill", self.pending.arrival, self.start


class BatchQueue:
    """What waits, in order of arrival. Unbounded by itself: `admission.py` decides what is let in."""

    def __init__(self) -> None:
        self._heap: list[Part] = []
        self.num_tokens = 0
        self.num_sequences = 0
        self._earliest_deadline_ns: int | None = None

    def push(self, part: Part) -> None:
        """Add new work, or give returned work its old place."""
        heapq.heappush(self._heap, part)
        self.num_tokens += part.num_tokens
        self.num_sequences += part.num_sequences
        deadline_ns = part.pending.request.deadline_ns
        if self._earliest_deadline_ns is None or deadline_ns < self._earliest_deadline_ns:
            self._earliest_deadline_ns = deadline_ns

    def next_batch(self, max_tokens: int, max_rows: int) -> list[Part]:
        """The parts to run now, taken off the queue; empty when nothing waits.

        Never more than `max_tokens` tokens or `max_rows` rows, unless the oldest sequence alone has more: then just
        that one.
        """
        batch: list[Part] = []
        room_tokens, room_rows = max_tokens, max_rows
        num_sequences = 0
        while self._heap:
            head = self._heap[0]
            if head.pending.settled:
                self._pop()
                continue
            pending = head.pending
            # Suspects run among suspects, sparse sequences among sparse ones.
            if batch and (head.losses != batch[0].losses or pending.sparse != batch[0].pending.sparse):
                break
            fitting = min(
                _fitting(pending.offsets, head.start, room_tokens),
                room_rows if pending.row_offsets is None else _fitting(pending.row_offsets, head.start, room_rows),
                _sequences_at_once(head.losses) - num_sequences,
            )
            if fitting <= 0:
                if batch:
                    break
                fitting = 1
            self._pop()
            taken = Part(pending, head.start, min(head.start + fitting, head.stop), head.losses)
            batch.append(taken)
            room_tokens -= taken.num_tokens
            room_rows -= taken.num_rows
            num_sequences += taken.num_sequences
            if taken.stop < head.stop:
                self.push(Part(pending, taken.stop, head.stop, head.losses))
                break
        return batch

    def expired(self, now_ns: int) -> list[Pending]:
        """The waiting requests whose deadline has passed; the caller settles them."""
        if self._earliest_deadline_ns is None or now_ns < self._earliest_deadline_ns:
            return []
        late: dict[int, Pending] = {}
        earliest: int | None = None
        for part in self._heap:
            pending = part.pending
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
        kept = [part for part in self._heap if not part.pending.settled]
        if len(kept) == len(self._heap):
            return
        self._heap = kept
        heapq.heapify(self._heap)
        self.num_tokens = sum(part.num_tokens for part in kept)
        self.num_sequences = sum(part.num_sequences for part in kept)

    def pending(self) -> list[Pending]:
        """Every unsettled request that still has sequences waiting."""
        return list({part.pending.arrival: part.pending for part in self._heap if not part.pending.settled}.values())

    def __len__(self) -> int:
        return len(self._heap)

    def _pop(self) -> Part:
        part = heapq.heappop(self._heap)
        self.num_tokens -= part.num_tokens
        self.num_sequences -= part.num_sequences
        return part


def _sequences_at_once(losses: int) -> int:
    if losses == 0:
        return 2**31
    return _SUSPECTS_AT_ONCE if losses == 1 else 1


def _fitting(offsets: np.ndarray, start: int, room: int) -> int:
    """How many sequences, from `start` on, have at most `room` together of what `offsets` counts."""
    return int(np.searchsorted(offsets, int(offsets[start]) + room, side="right")) - 1 - start
