"""How workers share the work, in simulated time: the real state machine, and workers whose steps take what they cost.

Of unequal workers, of ones that die, and of mixed lengths, under as much load as there can be and under less.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from common.metrics import Metrics
from tests.scheduler.rig import SECOND
from tests.scheduler.test_overload import Asked, Simulation

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# Short, long, and longer than a step of 64 tokens: 49 tokens a request in the mean.
_LENGTHS = ((4,), (4,), (8,), (16,), (64,), (200,))
_ALL_AT_ONCE = 0.0

_AWAY_NS = 2 * SECOND  # a worker that has died; a real one takes longer


@dataclass(slots=True)
class Fleet(Simulation):
    """Workers of which some are slower, or die in the middle of a step."""

    max_queue_ms: int = 10**9
    num_workers: int = 2
    slowness: dict[bytes, int] = field(default_factory=dict)  # how many times as long a step takes
    last_dies: bool = False  # the last worker, whenever it is in a step
    tokens: Counter[bytes] = field(default_factory=Counter)  # that each worker has run
    num_deaths: int = 0
    num_changes: int = 0  # of the worker that runs a step
    _last: bytes = b""
    _back_ns: int = 2**62

    def run(self, asked: list[Asked]) -> None:
        self.tokens.clear()
        Simulation.run(self, asked)

    def cost_ns(self, peer: bytes) -> int:
        return Simulation.cost_ns(self, peer) * self.slowness.get(peer, 1)

    def finished(self, peer: bytes, num_tokens: int) -> None:
        self.tokens[peer] += num_tokens
        self.num_changes += peer != self._last
        self._last = peer

    def passed(self) -> None:
        victim = b"w%d" % (self.num_workers - 1)
        if self.last_dies and self._held.get(victim):
            self.num_deaths += 1
            del self._held[victim]
            self._done = [(at_ns, peer) for at_ns, peer in self._done if peer != victim]
            heapq.heapify(self._done)
            self._back_ns = self.now_ns + _AWAY_NS
            self._perform(self.core.on_worker_lost(victim, "exited", self.now_ns))
        elif self._back_ns <= self.now_ns:
            self._back_ns = 2**62
            self.join(victim)


def mixed(fleet: Fleet, count: int, rate: float) -> list[Asked]:
    """Requests of one sequence each, so many a second, or all at once."""
    rng = random.Random(1)
    at_ns, asked = fleet.now_ns, []
    for _ in range(count):
        if rate != _ALL_AT_ONCE:
            at_ns += int(rng.expovariate(rate) * SECOND)
        asked.append(Asked(at_ns, 0, rng.choice(_LENGTHS)))
    return asked


def throughput(metrics: Metrics, num_workers: int) -> float:
    """Tokens a second of as many workers, of a thousand requests that are all there from the start."""
    fleet = Fleet(metrics, num_workers=num_workers)
    begun_ns = fleet.now_ns
    fleet.run(mixed(fleet, 1000, _ALL_AT_ONCE))
    return sum(fleet.tokens.values()) * SECOND / (fleet.now_ns - begun_ns)


def test_two_workers_do_twice_what_one_does_and_four_four_times(metrics: Metrics) -> None:
    one = throughput(metrics, 1)
    assert throughput(metrics, 2) >= 1.95 * one
    assert throughput(metrics, 4) >= 3.9 * one


def test_workers_that_are_alike_run_as_many_tokens_within_a_tenth(metrics: Metrics) -> None:
    fleet = Fleet(metrics)
    fleet.run(mixed(fleet, 3000, _ALL_AT_ONCE))
    least, most = sorted(fleet.tokens.values())
    assert most <= 1.1 * least


@pytest.mark.parametrize("rate", [5, 25, 45])
def test_workers_that_are_alike_work_for_as_long_in_any_load(metrics: Metrics, rate: float) -> None:
    """How many tokens that makes is chance: a step costs its start, and nine tokens or a hundred have one each."""
    fleet = Fleet(metrics)
    fleet.run(mixed(fleet, 1500, rate))
    least, most = sorted(worker.worked_ns for worker in fleet.core._fleet.all())
    assert most <= 1.02 * least
    assert max(fleet.tokens.values()) <= 1.3 * min(fleet.tokens.values())


def test_a_query_after_the_other_goes_to_the_worker_of_the_one_before(metrics: Metrics) -> None:
    fleet = Fleet(metrics)
    fleet.run([Asked(fleet.now_ns + index * SECOND // 5, 0, (4,)) for index in range(200)])
    assert fleet.num_changes < 100


@pytest.mark.parametrize("rate", [10, _ALL_AT_ONCE])
def test_a_worker_that_is_three_times_slower_does_a_third_of_what_the_other_does(metrics: Metrics, rate: float) -> None:
    fleet = Fleet(metrics, slowness={b"w1": 3})
    fleet.run(mixed(fleet, 2000, rate))
    assert 0.85 / 3 <= fleet.tokens[b"w1"] / fleet.tokens[b"w0"] <= 1.15 / 3


def test_a_worker_that_dies_again_and_again_costs_the_other_next_to_nothing_and_no_request(metrics: Metrics) -> None:
    """As soon as it is in a step again; what it was running is run by itself, in a step that is not full."""
    fleet = Fleet(metrics)
    begun_ns = fleet.now_ns
    fleet.run(mixed(fleet, 1000, _ALL_AT_ONCE))
    calm = fleet.tokens[b"w0"] / (fleet.now_ns - begun_ns)

    fleet.last_dies = True
    begun_ns = fleet.now_ns
    asked = mixed(fleet, 1000, _ALL_AT_ONCE)
    fleet.run(asked)
    stormy = fleet.tokens[b"w0"] / (fleet.now_ns - begun_ns)

    assert fleet.num_deaths >= 8
    assert {one.refused for one in asked} == {""}
    assert stormy >= 0.95 * calm


def test_who_is_new_has_nothing_to_catch_up_with(metrics: Metrics) -> None:
    fleet = Fleet(metrics, num_workers=1)
    fleet.run(mixed(fleet, 200, 5))
    fleet.join(b"w1")
    fleet.run(mixed(fleet, 200, 5))
    assert fleet.tokens[b"w1"] <= 1.2 * fleet.tokens[b"w0"]
