"""What runs next: which worker gets a batch and when, and how much of which lane is in it. Pure: time is an argument.

While only online work waits, a batch is as large as a worker takes. While lanes above are active, work of the lanes
below runs in small steps (`stepsize.py`), so that a new query waits for at most one of them. Each lane below still
gets its share of the workers' time (`batching.py`, `Shares`).

A worker's second slot is filled as late as possible while online work is active, so that a request that arrives
meanwhile joins the next batch: before the lanes below, and another tenant's even if the batch is full already. While
only lanes below are active it is filled at once.
"""

from __future__ import annotations

import math

from common.lanes import BACKFILL, LANES, ONLINE, SCORE
from common.wire.messages import Request, max_rows
from scheduler.batching import SHARES, BatchQueue, Part, Shares
from scheduler.fleet import Choice, Fleet, Worker
from scheduler.stepsize import StepSizes

# A lane counts as active for this long after its last request. (With 5 queries a second, 1 in 100 comes after a second
# without any, and 1 in 20,000 after two.)
_ACTIVE_NS = 2_000_000_000


class Policy:
    def __init__(self, queue: BatchQueue, fleet: Fleet, now_ns: int) -> None:
        self._queue = queue
        self._fleet = fleet
        self._shares = Shares()
        self._step_sizes = StepSizes()
        self._arrived_ns = dict.fromkeys(LANES, now_ns - _ACTIVE_NS)  # when the last request came, by lane

    def note_arrival(self, request: Request, now_ns: int) -> None:
        self._arrived_ns[request.lane] = now_ns

    def choose_worker(self, now_ns: int) -> Choice:
        """The worker to send a batch to now, if any."""
        return self._fleet.choose_worker(now_ns, late=self._is_active(ONLINE, now_ns))

    def take_batch(self, worker: Worker, waiting: list[str], now_ns: int) -> list[Part]:
        """What this worker runs next, taken off the queue. `waiting`: the lanes in which something waits."""
        most_rows = max_rows(worker.facts)
        if waiting == [ONLINE]:  # the common case: only online work waits, so lane budgets do not apply
            self._shares.clear()
            return self._queue.next_batch(self._fleet.most_tokens(worker), most_rows)
        budgets, own = self._budgets(worker, now_ns)
        costs_ms = {lane: self._fleet.step_ms(worker, own[lane]) or math.inf for lane in SHARES}
        first = self._shares.first(costs_ms)
        if first in own:
            budgets[first] = own[first]
        parts = self._queue.next_batch(budgets, most_rows, first)
        if parts:
            self._step_sizes.note(parts)
            if (ms := self._fleet.step_ms(worker, sum(part.num_tokens for part in parts))) is not None:
                self._shares.note(parts, ms, waiting, costs_ms)
        return parts

    def _budgets(self, worker: Worker, now_ns: int) -> tuple[dict[str, int], dict[str, int]]:
        """The tokens of a step that work of each lane may be part of; and of a step that a lane below comes first in.

        The latter is no less than the lane's share of a step, since it gets no more of a step that others fill.
        """
        most = self._fleet.most_tokens(worker)
        online, score = self._is_active(ONLINE, now_ns), self._is_active(SCORE, now_ns)
        if not (online or score):
            return dict.fromkeys(LANES, most), dict.fromkeys(SHARES, most)
        mean_length, num_online = self._queue.mean_length(SHARES), self._queue.tokens_in(ONLINE)
        small = self._step_sizes.small(worker.step_time, most, mean_length, num_online)
        budgets = {ONLINE: most, SCORE: small.beside if online else most, BACKFILL: small.beside}
        # One sequence more than the share, since a sequence that does not fit is not cut.
        shares = {lane: round(share * most + self._queue.mean_length((lane,))) for lane, share in SHARES.items()}
        return budgets, {lane: min(most, max(small.alone, shares[lane])) for lane in SHARES}

    def _is_active(self, lane: str, now_ns: int) -> bool:
        """Whether a request of this lane waits, or came so lately that others may follow."""
        return now_ns - self._arrived_ns[lane] < _ACTIVE_NS or lane in self._queue.waiting_lanes()
