"""Queries beside a backfill, in simulated time: the real state machine, and ways and steps that take time.

What is promised of it is measured for real by benchmarks/mixed.py, whose phases these are: queries alone, the backfill
alone, both. Here a step takes what a table says, so that what the scheduler makes of it can be told from the noise of a
machine. The tables are a GPU's, whose steps are as short as the ways to it, and a CPU's, of which a small step has a
large fixed part.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import NO_NUMBERS, PROTOCOL_VERSION, Batch, Beat, Failure, Hello, Join, Reply, Result
from common.wire.packing import Replies
from common.wire.rows import row_bytes
from scheduler.actions import Action, ToWorker
from scheduler.server import _LEAST_SLEEP_NS
from scheduler.state import Scheduler
from tests.fakes import DIMENSIONS, FACTS
from tests.scheduler.rig import EPOCH, MS, SECOND, make_request

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

_QUERY_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a suite runs on, and how much is asked of it."""

    max_batch_tokens: int
    steps: tuple[tuple[int, float], ...]  # (tokens, ms), rising; between them a line, below a step takes no less
    queries_per_s: float
    clients: int  # of the backfill, each with one request on its way
    texts: int  # of a request
    document_tokens: int
    spread: float = 0.2  # of a document's tokens: their deviation, as a part of the mean

    def step_ms(self, num_tokens: float) -> float:
        return float(np.interp(num_tokens, *zip(*self.steps, strict=True)))


# Documents of Qwen3-0.6B's shape on one H200, where time rises in stairs, and all-MiniLM-L6-v2 in float32 on two cores
# (2026-11-30).
_SMALL = ((128, 0.93), (256, 1.11), (384, 1.52), (512, 1.63), (640, 1.84), (768, 2.11), (896, 2.11), (1664, 3.59))
GPU = Machine(
    4096,
    (*_SMALL, (2048, 3.68), (2049, 4.9), (2816, 5.24), (3712, 7.21), (4096, 7.4)),
    queries_per_s=200,
    clients=8,
    texts=32,
    document_tokens=310,
)
CPU = Machine(512, ((16, 20.0), (170, 45.0), (512, 110.0)), queries_per_s=5, clients=4, texts=16, document_tokens=150)

_LONE_MS = 0.3  # more for a step that nothing ran before


@dataclass(slots=True, eq=False)
class _Asked:
    """A query, or a request of the backfill."""

    at_ns: int
    lane: str
    lengths: list[int]
    next_sequence: int = 0
    waiting_tokens: int = 0
    unanswered: int = 0  # sequences
    is_refused: bool = False


@dataclass(slots=True)
class Phase:
    """What one kind of phase came to."""

    latencies_ms: list[float] = field(default_factory=list)  # of queries
    backfill_tokens: int = 0
    seconds: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)  # by tokens
    idle_ns: int = 0  # of the worker

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.latencies_ms, percent))


class Suite:
    """Clients, a gateway and a worker around a scheduler; what takes time are the ways between them, and the steps."""

    def __init__(self, metrics: Metrics, machine: Machine, seed: int = 1) -> None:
        self.now_ns = SECOND
        self.machine = machine
        self._rng = random.Random(seed)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last_ns: dict[str, int] = {}  # by way: what is sent later does not overtake
        self._request_ids = itertools.count(1)
        self._pieces: dict[int, tuple[_Asked, int, int]] = {}  # by request: whose, sequences, tokens
        self._held: deque[tuple[Batch, int]] = deque()  # with when it came
        self._num_sent = 0
        self._idle_since_ns = self.now_ns
        self._poll = 0
        self._until_ns = 0
        self._num_asked = 0  # that are not done
        self.phase = Phase()
        self.core = Scheduler(epoch=EPOCH, workers_total=1, max_queue_ms=10_000, metrics=metrics, now_ns=self.now_ns)
        facts = dataclasses.replace(FACTS, max_batch_tokens=machine.max_batch_tokens)
        self._perform(self.core.on_gateway_message(b"g", Join(PROTOCOL_VERSION, "g", 1), self.now_ns))
        self._perform(self.core.on_worker_message(b"w", Hello(PROTOCOL_VERSION, "w", 1, facts), self.now_ns))
        self._beat()

    def run(self, seconds: float, *, queries: bool, backfill: bool) -> Phase:
        """Until what came within so many seconds is answered."""
        self.phase = Phase(seconds=seconds)
        self._idle_since_ns = self.now_ns
        begin_ns = self.now_ns
        self._until_ns = begin_ns + int(seconds * SECOND)
        if queries:
            self._expect_query(begin_ns)
        for _ in range(self.machine.clients if backfill else 0):
            self._ask_again(30 if queries else 0)  # before the first query steps are full, as nothing is online
        while self.now_ns < self._until_ns or self._num_asked:
            self.now_ns, _, happen = heapq.heappop(self._events)
            happen()
        return self.phase

    # --- ways ---

    def _after(self, ms: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ns + int(ms * MS), next(self._order), happen))

    def _travel(self, way: str, ms: float, happen: Callable[[], None]) -> None:
        """Arrive after so long at the median; of a hundred one takes twice as long."""
        at_ns = self.now_ns + int(ms * self._rng.lognormvariate(0, 0.3) * MS)
        if way:
            at_ns = self._last_ns[way] = max(at_ns, self._last_ns.get(way, 0) + 1)
        heapq.heappush(self._events, (at_ns, next(self._order), happen))

    # --- clients and their gateway ---

    def _expect_query(self, at_ns: int) -> None:
        at_ns += int(self._rng.expovariate(self.machine.queries_per_s) * SECOND)
        if at_ns < self._until_ns:
            self._after((at_ns - self.now_ns) / MS, lambda: self._ask_query(at_ns))

    def _ask_query(self, at_ns: int) -> None:
        self._num_asked += 1
        asked = _Asked(at_ns, "online", [_QUERY_TOKENS], unanswered=1)
        self._travel("", 0.4, lambda: self._submit(asked))
        self._expect_query(at_ns)

    def _ask_backfill(self) -> None:
        mean = self.machine.document_tokens
        lengths = [
            max(8, min(512, round(self._rng.gauss(mean, mean * self.machine.spread))))
            for _ in range(self.machine.texts)
        ]
        asked = _Asked(self.now_ns, "backfill", lengths, unanswered=len(lengths))
        self._travel("", 1.0 + sum(lengths) / 1000, lambda: self._submit(asked))

    def _submit(self, asked: _Asked) -> None:
        """Pieces of a batch's size, as many as fill a worker's two slots."""
        most = self.machine.max_batch_tokens
        while asked.next_sequence < len(asked.lengths):
            start = stop = asked.next_sequence
            num_tokens = 0
            while stop < len(asked.lengths) and (stop == start or num_tokens + asked.lengths[stop] <= most):
                num_tokens += asked.lengths[stop]
                stop += 1
            if asked.waiting_tokens and asked.waiting_tokens + num_tokens > 2 * most:
                return
            asked.next_sequence = stop
            asked.waiting_tokens += num_tokens
            request_id = next(self._request_ids)
            self._pieces[request_id] = (asked, stop - start, num_tokens)
            sequences = [[request_id] * length for length in asked.lengths[start:stop]]
            request = make_request(request_id, *sequences, lane=asked.lane, opens=start == 0)
            self._travel("gateway", 0.25, lambda request=request: self._hear(b"g", request))

    def _answered(self, reply: Reply) -> None:
        asked, left, num_tokens = self._pieces[reply.request_id]
        left -= len(reply.rows)
        self._pieces[reply.request_id] = (asked, left, num_tokens)
        asked.unanswered -= len(reply.rows)
        if left == 0:
            del self._pieces[reply.request_id]
            asked.waiting_tokens -= num_tokens
            self._submit(asked)
        if asked.unanswered == 0 and not asked.is_refused:
            self._travel("", 0.35, lambda: self._done(asked))

    def _refused(self, failure: Failure) -> None:
        """Its client comes back; what else of it is on its way runs for nobody."""
        asked, _, _ = self._pieces.pop(failure.request_id)
        assert (asked.lane, failure.code) == ("backfill", "overloaded")
        asked.is_refused = True
        asked.next_sequence = len(asked.lengths)
        self._num_asked -= 1
        if self.now_ns < self._until_ns:
            self._ask_again(100)

    def _done(self, asked: _Asked) -> None:
        self._num_asked -= 1
        if asked.lane == "online":
            self.phase.latencies_ms.append((self.now_ns - asked.at_ns) / MS)
        elif self.now_ns < self._until_ns:
            self.phase.backfill_tokens += sum(asked.lengths)
            self._ask_again(0)

    def _ask_again(self, after_ms: float) -> None:
        self._num_asked += 1
        self._after(after_ms, self._ask_backfill)

    # --- the scheduler ---

    def _hear(self, peer: bytes, message: Message) -> None:
        heard = self.core.on_gateway_message if peer == b"g" else self.core.on_worker_message
        self._perform(heard(peer, message, self.now_ns))
        self._perform(self.core.on_tick(self.now_ns))
        self._sleep()

    def _sleep(self) -> None:
        """As the scheduler's loop does, which wakes a little late."""
        self._poll += 1
        poll = self._poll
        wait_ms = max(_LEAST_SLEEP_NS, self.core.next_tick_ns() - self.now_ns) / MS + self._rng.uniform(0.05, 0.15)
        self._after(wait_ms, lambda: self._wake(poll))

    def _wake(self, poll: int) -> None:
        if poll == self._poll:
            self._perform(self.core.on_tick(self.now_ns))
            self._sleep()

    def _beat(self) -> None:
        self._hear(b"g", Beat(EPOCH, 0))
        self._hear(b"w", Beat(EPOCH, self._num_sent))
        self._after(250, self._beat)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            message = getattr(action, "message", None)
            if isinstance(action, ToWorker) and isinstance(message, Batch):
                self._num_sent += 1
                self._travel("to worker", 0.5, lambda batch=message: self._take(batch))
            elif isinstance(message, Failure):
                self._travel("to gateway", 0.6, lambda failure=message: self._refused(failure))
            elif isinstance(message, Reply | Replies):
                for reply in message.each() if isinstance(message, Replies) else [message]:
                    self._travel("to gateway", 0.4, lambda reply=reply: self._answered(reply))

    # --- the worker ---

    def _take(self, batch: Batch) -> None:
        self._held.append((batch, self.now_ns))
        if len(self._held) == 1:
            self.phase.idle_ns += self.now_ns - self._idle_since_ns
            self._begin(_LONE_MS)

    def _begin(self, more_ms: float = 0.0) -> None:
        batch, came_ns = self._held[0]
        waited_us = (self.now_ns - came_ns) // 1000
        num_tokens = len(batch.token_ids)
        self.phase.steps[num_tokens] += 1
        ms = self.machine.step_ms(num_tokens) * self._rng.uniform(0.97, 1.03) + more_ms
        self._after(ms, lambda: self._finish(ms, waited_us))

    def _finish(self, ms: float, waited_us: int) -> None:
        batch, _ = self._held.popleft()
        if self._held:
            self._begin()
        else:
            self._idle_since_ns = self.now_ns
        self._travel("from worker", 0.45, lambda: self._result(batch, ms, waited_us))

    def _result(self, batch: Batch, ms: float, waited_us: int) -> None:
        self._num_sent -= 1
        rows = np.zeros((batch.num_rows, row_bytes(0, DIMENSIONS)), dtype=np.uint8)
        self._hear(b"w", Result(EPOCH, batch.batch_id, waited_us, int(ms * 1000), True, NO_NUMBERS, rows))


@dataclass(slots=True)
class Mixed:
    """The phases of benchmarks/mixed.py."""

    queries: Phase
    backfill: Phase
    both: Phase

    @classmethod
    def of(cls, suite: Suite, seconds: float) -> Mixed:
        suite.run(seconds / 3, queries=True, backfill=True)  # it learns
        phases = []
        for queries, backfill in ((True, False), (False, True), (True, True)):
            suite.run(1.5, queries=False, backfill=False)
            phases.append(suite.run(seconds, queries=queries, backfill=backfill))
        return cls(*phases)

    @property
    def kept(self) -> float:
        """What the backfill keeps of what it does alone."""
        return self.both.backfill_tokens / self.backfill.backfill_tokens

    def longer_ms(self, percent: float) -> float:
        return self.both.percentile(percent) - self.queries.percentile(percent)


@pytest.mark.parametrize("spread", [0.2, 0.05])
def test_on_a_gpu_queries_wait_for_little_more_than_a_small_step_and_backfill_keeps_four_fifths(
    metrics: Metrics, spread: float
) -> None:
    mixed = Mixed.of(Suite(metrics, dataclasses.replace(GPU, spread=spread)), 3)
    half = GPU.max_batch_tokens / 2
    assert mixed.longer_ms(99) <= 1.2 * GPU.step_ms(half)
    assert mixed.kept >= 0.8
    assert mixed.both.idle_ns <= 0.03 * mixed.both.seconds * SECOND
    assert sum(number for size, number in mixed.both.steps.items() if size <= half) >= 0.98 * mixed.both.steps.total()


def test_on_a_cpu_they_wait_for_less_than_a_full_step_and_backfill_keeps_four_fifths(metrics: Metrics) -> None:
    mixed = Mixed.of(Suite(metrics, CPU), 60)
    assert mixed.longer_ms(99) <= 0.75 * CPU.step_ms(CPU.max_batch_tokens)
    assert mixed.kept >= 0.8
