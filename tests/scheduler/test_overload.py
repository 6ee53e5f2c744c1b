"""Overload in simulated time: the real state machine, and workers whose steps take exactly what they cost.

What is promised of quantiles far out is tried here, where nothing else uses the cores; tests/faults/test_overload.py
has the same promises for the real processes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.metrics import Metrics
from common.wire.messages import PROTOCOL_VERSION, Batch, Beat, Failure, Hello, Join, Reply, Result
from common.wire.packing import Replies
from common.wire.rows import row_bytes
from scheduler.actions import Action, ToWorker
from scheduler.state import Scheduler
from tests.fakes import DIMENSIONS, FACTS
from tests.scheduler.rig import EPOCH, MS, SECOND, make_request

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

_STEP_NS = 40 * MS
_TOKEN_NS = MS // 10
_FULL_STEP_NS = _STEP_NS + FACTS.max_batch_tokens * _TOKEN_NS  # of 64 tokens: 46.4 ms
_CAPACITY = 2 * SECOND / _FULL_STEP_NS  # requests a second of half a step each, of one worker
_HALF_STEP = (16, 16)


@dataclass(slots=True, eq=False)
class Asked:
    """A request and what became of it, in nanoseconds."""

    at_ns: int
    tenant: int
    lengths: tuple[int, ...]
    deadline_ns: int = 2**62
    predicted_ms: float | None = None  # of its wait
    begun_ns: int = 0  # its last sequence
    ended_ns: int = 0
    queue_ms: float = 0.0
    refused: str = ""
    comes_back: bool = True  # once, when it is refused and told to
    second: Asked | None = None  # that try

    @property
    def latency_ms(self) -> float:
        return (self.ended_ns - self.at_ns) / 1e6


@dataclass(slots=True)
class Simulation:
    metrics: Metrics
    max_queue_ms: int = 100
    num_workers: int = 1
    now_ns: int = SECOND
    obeys: bool = False  # who is refused comes back
    core: Scheduler = field(init=False)
    _held: dict[bytes, deque[Batch]] = field(default_factory=dict)  # by worker
    _done: list[tuple[int, bytes]] = field(default_factory=list)  # a heap: when its first batch is, and whose
    _asked: dict[int, Asked] = field(default_factory=dict)
    _arrivals: list[tuple[int, int, Asked]] = field(default_factory=list)  # a heap: when, and the request's id
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.core = Scheduler(
            epoch=EPOCH,
            workers_total=self.num_workers,
            max_queue_ms=self.max_queue_ms,
            metrics=self.metrics,
            now_ns=self.now_ns,
        )
        self._perform(self.core.on_gateway_message(b"g", Join(PROTOCOL_VERSION, "g", 1), self.now_ns))
        for number in range(self.num_workers):
            self.join(b"w%d" % number)
        self.run([Asked(self.now_ns + index * SECOND, 0, (4 << index,)) for index in range(5)])  # it learns

    def join(self, peer: bytes) -> None:
        self._held[peer] = deque()
        hello = Hello(PROTOCOL_VERSION, peer.decode(), 1, FACTS)
        self._perform(self.core.on_worker_message(peer, hello, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def cost_ns(self, peer: bytes) -> int:
        """Of the step that a worker runs."""
        return _STEP_NS + len(self._held[peer][0].token_ids) * _TOKEN_NS

    def finished(self, peer: bytes, num_tokens: int) -> None:
        """A worker has run a step of so many tokens."""

    def passed(self) -> None:
        """Time has passed."""

    def run(self, asked: list[Asked]) -> None:
        """Until all of these, and who of them comes back, are answered."""
        for one in asked:
            self._expect(one)
        arrivals = self._arrivals
        beat_ns = self.now_ns
        while arrivals or any(self._held.values()):
            self.now_ns = min(
                arrivals[0][0] if arrivals else 2**62,
                self._done[0][0] if self._done else 2**62,
                max(self.now_ns, self.core.next_tick_ns()),
                beat_ns,
            )
            if self.now_ns == beat_ns:
                beat_ns += 250 * MS
                self._perform(self.core.on_gateway_message(b"g", Beat(EPOCH, 0), self.now_ns))
                for peer, held in self._held.items():
                    self._perform(self.core.on_worker_message(peer, Beat(EPOCH, len(held)), self.now_ns))
            while self._done and self._done[0][0] <= self.now_ns:
                self._finish(heapq.heappop(self._done)[1])
            while arrivals and arrivals[0][0] <= self.now_ns:
                self._arrive(*heapq.heappop(arrivals)[1:])
            self.passed()
            self._perform(self.core.on_tick(self.now_ns))

    def _expect(self, asked: Asked) -> None:
        request_id = 1 + len(self._asked)
        self._asked[request_id] = asked
        heapq.heappush(self._arrivals, (asked.at_ns, request_id, asked))

    def _come_back(self, asked: Asked, retry_after_ms: int) -> None:
        """As late as a gateway says: from 1 to 30 s, give or take a fifth."""
        wait_s = min(max(retry_after_ms / 1000, 1.0), 30.0) * self._rng.uniform(0.8, 1.2)
        asked.second = Asked(self.now_ns + int(wait_s * SECOND), asked.tenant, asked.lengths, comes_back=False)
        self._expect(asked.second)

    def _arrive(self, request_id: int, asked: Asked) -> None:
        before = self.core._queue.tokens_before("online", asked.tenant, sum(asked.lengths))
        asked.predicted_ms = self.core._fleet.wait_ms(before, self.now_ns)
        sequences = [[request_id] * length for length in asked.lengths]
        request = make_request(request_id, *sequences, tenant=asked.tenant, deadline_ns=asked.deadline_ns)
        self._perform(self.core.on_gateway_message(b"g", request, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def _begin(self, peer: bytes) -> None:
        batch = self._held[peer][0]
        for request_id in set(batch.token_ids.tolist()):
            self._asked[request_id].begun_ns = self.now_ns
        heapq.heappush(self._done, (self.now_ns + self.cost_ns(peer), peer))

    def _finish(self, peer: bytes) -> None:
        step_us = self.cost_ns(peer) // 1000
        batch = self._held[peer].popleft()
        if self._held[peer]:
            self._begin(peer)
        self.finished(peer, len(batch.token_ids))
        rows = np.zeros((batch.num_rows, row_bytes(0, DIMENSIONS)), dtype=np.uint8)
        result = Result(EPOCH, batch.batch_id, 0, step_us, True, np.zeros(0, dtype=np.int32), rows)
        self._perform(self.core.on_worker_message(peer, result, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            message = getattr(action, "message", None)
            if isinstance(action, ToWorker) and isinstance(message, Batch):
                self._held[action.peer].append(message)
                if len(self._held[action.peer]) == 1:
                    self._begin(action.peer)
            elif isinstance(message, Failure):
                asked = self._asked[message.request_id]
                asked.refused, asked.ended_ns = message.code, self.now_ns
                if self.obeys and asked.comes_back and message.retry_after_ms is not None:
                    self._come_back(asked, message.retry_after_ms)
            elif isinstance(message, Reply | Replies):
                for reply in message.each() if isinstance(message, Replies) else [message]:
                    asked = self._asked[reply.request_id]
                    asked.ended_ns = self.now_ns
                    asked.queue_ms = max(asked.queue_ms, reply.queue_us / 1000)


def poisson(
    simulation: Simulation, rate: float, seconds: float, *, tenant: int = 0, lengths: tuple[int, ...] = _HALF_STEP
) -> list[Asked]:
    rng = random.Random(tenant)
    times_s = itertools.accumulate(rng.expovariate(rate) for _ in range(int(rate * seconds)))
    return [Asked(simulation.now_ns + int(at_s * SECOND), tenant, lengths) for at_s in times_s]


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def latencies_ms(asked: list[Asked]) -> list[float]:
    return [one.latency_ms for one in asked if not one.refused]


def test_at_five_times_the_load_who_is_let_in_waits_no_longer_than_twice_as_at_80_percent(metrics: Metrics) -> None:
    simulation = Simulation(metrics)
    usual = poisson(simulation, 0.8 * _CAPACITY, 30)
    simulation.run(usual)
    storm = poisson(simulation, 5 * _CAPACITY, 30)
    simulation.run(storm)
    assert {one.refused for one in storm} == {"", "overloaded"}
    assert {one.latency_ms for one in storm if one.refused} == {0.0}  # at once
    assert p99(latencies_ms(storm)) <= 2 * p99(latencies_ms(usual))
    assert len(latencies_ms(storm)) / 30 >= 0.9 * _CAPACITY


def test_a_key_at_ten_times_its_part_leaves_the_other_its_latency_and_each_its_order(metrics: Metrics) -> None:
    simulation = Simulation(metrics)
    alone = poisson(simulation, _CAPACITY, 30, tenant=1, lengths=(4,))  # an eighth of what there is
    simulation.run(alone)
    beside = poisson(simulation, _CAPACITY, 30, tenant=1, lengths=(4,))
    crowd = poisson(simulation, 5 * _CAPACITY, 30, tenant=2)
    simulation.run(sorted([*beside, *crowd], key=lambda one: one.at_ns))
    assert {one.refused for one in [*alone, *beside]} == {""}
    assert {one.refused for one in crowd} == {"", "overloaded"}
    assert p99(latencies_ms(beside)) <= 1.25 * p99(latencies_ms(alone))
    for asked in (beside, crowd):
        begun_ns = [one.begun_ns for one in asked if not one.refused]
        assert begun_ns == sorted(begun_ns)


def test_two_keys_that_both_want_all_have_half_each_and_three_a_third(metrics: Metrics) -> None:
    for num_tenants, seconds in ((2, 10), (3, 40)):  # three have more chance in their parts
        simulation = Simulation(metrics)
        asked = [
            one for tenant in range(num_tenants) for one in poisson(simulation, 3 * _CAPACITY, seconds, tenant=tenant)
        ]
        simulation.run(sorted(asked, key=lambda one: one.at_ns))
        served = [sum(one.tenant == tenant and not one.refused for one in asked) for tenant in range(num_tenants)]
        assert max(served) <= 1.1 * min(served)
        assert sum(served) / seconds >= 0.9 * _CAPACITY


def test_what_expires_is_not_begun(metrics: Metrics) -> None:
    simulation = Simulation(metrics, max_queue_ms=1000)
    asked = poisson(simulation, 2 * _CAPACITY, 4000 / 2 / _CAPACITY)
    rng = random.Random(1)
    for one in asked:
        one.deadline_ns = one.at_ns + rng.randint(5, 500) * MS
    simulation.run(asked)
    assert {one.refused for one in asked} == {"", "deadline_exceeded"}
    late_ns = [one.begun_ns - one.deadline_ns for one in asked if one.begun_ns]
    assert len(late_ns) > 500
    assert max(late_ns) <= MS  # by as much as a prediction is off
    assert max(one.ended_ns - one.deadline_ns for one in asked if one.refused) <= 50 * MS


def test_what_is_predicted_of_a_wait_is_what_it_becomes(metrics: Metrics) -> None:
    simulation = Simulation(metrics, max_queue_ms=2000)
    asked = poisson(simulation, 3 * _CAPACITY, 20)
    simulation.run(asked)
    errors = [
        abs(one.queue_ms - one.predicted_ms) / max(20 / 0.3, one.predicted_ms)
        for one in asked
        if not one.refused and one.predicted_ms is not None
    ]
    assert sorted(errors)[int(0.9 * len(errors))] <= 0.3


def test_who_comes_back_when_it_is_told_to_is_let_in_the_second_time(metrics: Metrics) -> None:
    """After a storm of five seconds' work in one. While one goes on, most of any tries are more than can be done."""
    simulation = Simulation(metrics, max_queue_ms=2000, obeys=True)
    storm = poisson(simulation, 5 * _CAPACITY, 1)
    simulation.run(storm)
    again = [one.second for one in storm if one.refused]
    assert len(again) > len(storm) / 3
    assert sum(second is not None and not second.refused for second in again) >= 0.8 * len(again)
