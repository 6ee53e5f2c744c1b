"""The queue: first come, first served for each tenant in a lane, up to a token budget. Pure: no clock, no socket.

A step's time follows its number of tokens, hardly that of sequences, so a batch is limited by tokens. It is formed from
what waits when a worker has a free slot: no timer, no minimum.

A tenant is all requests with one key, or all without a key. Within a lane nothing of a tenant is overtaken. A sequence
that does not fit waits for the next batch, as do all behind it; one longer than the whole budget runs alone. Sparse
sequences do not join dense ones, since their rows travel differently. A request may be split over several batches.
Work that comes back from a lost worker returns to its old place in the order of arrival.

Tenants that wait in the same lane take turns, by the tokens that each has had. So a tenant that asks for ten times as
much as another fills its own queue and not the other's. A tenant that is new, or back, begins as if it had had as much
as the one whose turn it was: nothing is saved up. (Start-time fair queueing, Goyal et al. 1996. Deficit round robin
would let a new tenant wait for a round of all others.) A tenant that is alone has the whole budget.

Lanes come in their order: what one leaves of a budget goes to the next. A lane below has a budget of its own, which
`policy.py` makes smaller while lanes above are active, so that a new request there waits for a small step at most. So
that no lane starves, each gets a share of the workers' time while anything of it waits (`Shares`).

Sequences that were running when a worker died are suspects. After one loss they run again among suspects only, at most
8 at once; after two, alone; after three they are given up. So an input that kills workers does not take its neighbours
with it, and costs three deaths at most. (Rejected: bisecting, which needs a worker restart of about 5 s for each
halving; running each alone at once, which serializes 64 innocent sequences after every ordinary crash.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from common.lanes import BACKFILL, LANES, SCORE
from common.wire.messages import Request

MAX_LOSSES = 3

# The share of the workers' time that a lane gets while anything of it waits.
SHARES = {SCORE: 0.2, BACKFILL: 0.1}
_MOST_OWED_STEPS = 2  # a lane may be behind by this many of its own steps

_SUSPECTS_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class Pending:
    """A request that the scheduler holds.

    It is `settled` once it was answered, failed or cancelled: nothing waits for the parts that are queued or running.
    """

    gateway: bytes
    request: Request
    arrival: int  # the order of arrival, never reused
    arrived_ns: int
    unanswered: int  # sequences
    settled: bool = False
    sparse: bool = field(init=False)
    # Lists, since one number is looked up at a time: 0.1 µs; numpy takes 1 to 3 (2026-11-30, 2-core VM).
    offsets: list[int] = field(init=False)  # [sequences + 1] of tokens
    row_offsets: list[int] | None = field(init=False)  # [sequences + 1]; None: a row a sequence

    def __post_init__(self) -> None:
        request = self.request
        self.sparse = request.encoding == "sparse"
        self.offsets = _offsets(request.lengths)
        self.row_offsets = _offsets(request.span_counts) if len(request.span_counts) else None

    def first_row(self, sequence: int) -> int:
        """The first row of a sequence, counted across the request's sequences."""
        return sequence if self.row_offsets is None else self.row_offsets[sequence]

    def sequence_of(self, row: int) -> int:
        """The sequence that a row of the request belongs to."""
        return row if self.row_offsets is None else bisect_right(self.row_offsets, row) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The sequences [start, stop) of a request, which wait or run together."""

    pending: Pending
    start: int
    stop: int
    losses: int = 0  # how many workers died with it
    failures: int = 0  # how many batches with it failed, and no worker died

    @property
    def suspicion(self) -> int:
        """How much it is suspected: 0, or 1 (it runs among few), or 2 (it runs alone)."""
        return self.losses + self.failures

    @property
    def num_tokens(self) -> int:
        return self.pending.offsets[self.stop] - self.pending.offsets[self.start]

    @property
    def num_sequences(self) -> int:
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        return self.pending.first_row(self.stop) - self.pending.first_row(self.start)


@dataclass(slots=True)
class _Line:
    """The parts of one tenant that wait in one lane."""

    heap: list[tuple[int, int, Part]] = field(default_factory=list)  # by arrival and first sequence, which are unique
    num_tokens: int = 0
    num_sequences: int = 0

    def push(self, part: Part) -> None:
        heapq.heappush(self.heap, (part.pending.arrival, part.start, part))
        self.num_tokens += part.num_tokens
        self.num_sequences += part.num_sequences

    def pop(self) -> Part:
        _, _, part = heapq.heappop(self.heap)
        self.num_tokens -= part.num_tokens
        self.num_sequences -= part.num_sequences
        return part

    def prune(self) -> None:
        kept = [entry for entry in self.heap if not entry[2].pending.settled]
        if len(kept) < len(self.heap):
            heapq.heapify(kept)
            self.heap = kept
            self.num_tokens = sum(part.num_tokens for _, _, part in kept)
            self.num_sequences = sum(part.num_sequences for _, _, part in kept)


@dataclass(slots=True)
class _Lane:
    """The tenants that wait in one lane, and whose turn it is."""

    lines: dict[int, _Line] = field(default_factory=dict)  # by tenant, none of them empty between calls
    # A heap with an entry for each line: the tokens that its tenant has had, the arrival of the part that was first in
    # it when its last turn ended, the tenant.
    turns: list[tuple[int, int, int]] = field(default_factory=list)
    num_had: int = 0  # tokens that the tenant of the last turn had had before it: a new tenant begins with as many
    # Sums over all lines. They are kept up to date, since every request and every batch asks for one.
    num_tokens: int = 0
    num_sequences: int = 0

    def tokens_before(self, tenant: int, num_tokens: int) -> int:
        """Tokens of this lane that run before a request of this tenant and size has run: the tenant's own that wait,
        and as many of each other tenant."""
        own = self.lines[tenant].num_tokens if tenant in self.lines else 0
        others = (line.num_tokens for other, line in self.lines.items() if other != tenant)
        return own + sum(min(waiting, own + num_tokens) for waiting in others)

    def push(self, part: Part) -> None:
        tenant = part.pending.request.tenant
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = _Line()
            heapq.heappush(self.turns, (self.num_had, part.pending.arrival, tenant))
        line.push(part)
        self.num_tokens += part.num_tokens
        self.num_sequences += part.num_sequences

    def head(self) -> Part | None:
        """The part that is next and not settled, if there is one."""
        while self.turns:
            tenant = self.turns[0][2]
            line = self.lines[tenant]
            while line.heap and line.heap[0][2].pending.settled:
                settled = line.pop()
                self.num_tokens -= settled.num_tokens
                self.num_sequences -= settled.num_sequences
            if line.heap:
                return line.heap[0][2]
            heapq.heappop(self.turns)
            del self.lines[tenant]
        return None

    def turn(self, head: Part, most: int) -> int:
        """How many sequences of the next part its tenant may have in this turn: at least one."""
        if len(self.lines) == 1:
            return head.num_sequences
        return max(1, _fitting(head.pending.offsets, head.start, most // len(self.lines)))

    def take(self, num_sequences: int) -> Part:
        """Take this many sequences of the next part, which ends its tenant's turn."""
        self.num_had, _, tenant = self.turns[0]
        line = self.lines[tenant]
        head = line.pop()
        stop = min(head.start + num_sequences, head.stop)
        taken = head
        if stop < head.stop:
            taken = replace(head, stop=stop)
            line.push(replace(head, start=stop))
        self.num_tokens -= taken.num_tokens
        self.num_sequences -= taken.num_sequences
        if line.heap:
            heapq.heapreplace(self.turns, (self.num_had + taken.num_tokens, line.heap[0][0], tenant))
        else:
            heapq.heappop(self.turns)
            del self.lines[tenant]
        return taken

    def prune(self) -> None:
        for line in self.lines.values():
            line.prune()
        self.num_tokens = sum(line.num_tokens for line in self.lines.values())
        self.num_sequences = sum(line.num_sequences for line in self.lines.values())
        if any(not line.heap for line in self.lines.values()):
            self.lines = {tenant: line for tenant, line in self.lines.items() if line.heap}
            self.turns = [turn for turn in self.turns if turn[2] in self.lines]
            heapq.heapify(self.turns)

    def parts(self) -> Iterator[Part]:
        return (part for line in self.lines.values() for _, _, part in line.heap)


class BatchQueue:
    """The parts that wait, in lanes. It has no limit of its own: `admission.py` decides what is let in."""

    def __init__(self) -> None:
        self._lanes = {lane: _Lane() for lane in LANES}
        self._earliest_deadline_ns: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(lane.num_tokens for lane in self._lanes.values())

    @property
    def num_sequences(self) -> int:
        return sum(lane.num_sequences for lane in self._lanes.values())

    def tokens_before(self, lane: str, tenant: int, num_tokens: int) -> int:
        """Tokens that run before a request of this lane, tenant and size: all in the lanes above, and those of its own
        lane that have their turn sooner."""
        total = 0
        for name, waiting in self._lanes.items():
            if name == lane:
                return total + waiting.tokens_before(tenant, num_tokens)
            total += waiting.num_tokens
        raise AssertionError("no request names a lane that there is not")

    def tokens_in(self, lane: str) -> int:
        """Tokens that wait in this lane."""
        return self._lanes[lane].num_tokens

    def mean_length(self, lanes: Collection[str]) -> float:
        """Mean tokens of the sequences that wait in these lanes; 0 if none does."""
        num_sequences = sum(self._lanes[lane].num_sequences for lane in lanes)
        return sum(self._lanes[lane].num_tokens for lane in lanes) / num_sequences if num_sequences else 0.0

    def waiting_lanes(self) -> list[str]:
        """The lanes in which something waits."""
        return [name for name, lane in self._lanes.items() if lane.lines]

    def push(self, part: Part) -> None:
        """Queue new work, or returned work at its old place."""
        self._lanes[part.pending.request.lane].push(part)
        deadline_ns = part.pending.request.deadline_ns
        if self._earliest_deadline_ns is None or deadline_ns < self._earliest_deadline_ns:
            self._earliest_deadline_ns = deadline_ns

    def next_batch(self, max_tokens: int | Mapping[str, int], max_rows: int, first: str = LANES[0]) -> list[Part]:
        """The parts to run now, taken off the queue; empty when nothing waits.

        The lane `first` goes first, the others follow in their order. Within a lane the tenants take turns, each for an
        equal part of the lane's tokens, or for one sequence.

        Args:
            max_tokens: of the batch when work of a lane is added, for all lanes or by lane. If the oldest sequence
                alone has more, the batch is just that one.
            max_rows: of the batch.
        """
        batch: list[Part] = []
        num_tokens = num_sequences = 0
        room_rows = max_rows
        for name in (first, *(other for other in LANES if other != first)):
            lane = self._lanes[name]
            limit = max_tokens if isinstance(max_tokens, int) else max_tokens[name]
            while (head := lane.head()) is not None:
                pending = head.pending
                # Suspects run among suspects, sparse sequences among sparse ones.
                if batch and (head.suspicion != batch[0].suspicion or pending.sparse != batch[0].pending.sparse):
                    return batch
                fitting = min(
                    _fitting(pending.offsets, head.start, limit - num_tokens),
                    room_rows if pending.row_offsets is None else _fitting(pending.row_offsets, head.start, room_rows),
                    _sequences_at_once(head.suspicion) - num_sequences,
                )
                if fitting <= 0:
                    if batch:
                        break
                    fitting = 1
                taken = lane.take(min(fitting, lane.turn(head, limit)))
                batch.append(taken)
                num_tokens += taken.num_tokens
                room_rows -= taken.num_rows
                num_sequences += taken.num_sequences
        return batch

    def take_expired(self, now_ns: int) -> list[Pending]:
        """The waiting requests whose deadline has passed. The caller settles them: they are not told again."""
        if self._earliest_deadline_ns is None or now_ns < self._earliest_deadline_ns:
            return []
        waiting = self.pending()
        deadlines_ns = [pending.request.deadline_ns for pending in waiting]
        self._earliest_deadline_ns = min((time_ns for time_ns in deadlines_ns if time_ns > now_ns), default=None)
        return [pending for pending in waiting if pending.request.deadline_ns <= now_ns]

    def prune(self) -> None:
        """Drop parts that were settled while they waited, so that they no longer count."""
        for lane in self._lanes.values():
            lane.prune()

    def pending(self) -> list[Pending]:
        """Every unsettled request that still has sequences waiting."""
        parts = (part for lane in self._lanes.values() for part in lane.parts())
        return list({part.pending.arrival: part.pending for part in parts if not part.pending.settled}.values())

    def __len__(self) -> int:
        return sum(len(line.heap) for lane in self._lanes.values() for line in lane.lines.values())


class Shares:
    """Gives each lane its share of the workers' time while anything of it waits.

    A lane is owed its share of every step that runs while it waits, and pays for what it gets of one. Once it is owed
    as much as a step of its own costs, that step comes first.
    """

    def __init__(self) -> None:
        self._owed_ms = dict.fromkeys(SHARES, 0.0)

    def clear(self) -> None:
        """Nothing waits in the lanes below: a share that is not used is not saved up."""
        self._owed_ms = dict.fromkeys(SHARES, 0.0)

    def first(self, costs_ms: Mapping[str, float]) -> str:
        """The lane that goes first in the next batch. `costs_ms`: how long a step of each lane takes."""
        due = [lane for lane, owed_ms in self._owed_ms.items() if owed_ms >= costs_ms[lane]]
        return max(due, key=self._owed_ms.__getitem__, default=LANES[0])

    def note(self, batch: list[Part], ms: float, waiting: Collection[str], costs_ms: Mapping[str, float]) -> None:
        """This batch will run for `ms`. `waiting`: the lanes in which something waited when it was formed."""
        num_tokens = sum(part.num_tokens for part in batch)
        for lane, share in SHARES.items():
            if lane not in waiting:
                self._owed_ms[lane] = 0.0
                continue
            own = sum(part.num_tokens for part in batch if part.pending.request.lane == lane)
            owed_ms = self._owed_ms[lane] + ms * (share - own / num_tokens)
            self._owed_ms[lane] = min(max(0.0, owed_ms), _MOST_OWED_STEPS * costs_ms[lane])


def _sequences_at_once(suspicion: int) -> int:
    if suspicion == 0:
        return 2**31
    return _SUSPECTS_AT_ONCE if suspicion == 1 else 1


def _offsets(counts: np.ndarray) -> list[int]:
    """The running sum of counts, from 0: where each sequence begins, and where the last one ends."""
    return list(accumulate(counts.tolist(), initial=0))


def _fitting(offsets: list[int], start: int, room: int) -> int:
    """How many sequences, from `start` on, have at most `room` in all, by their `offsets`."""
    return bisect_right(offsets, offsets[start] + room) - 1 - start
