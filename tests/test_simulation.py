"""Gateways' ledgers, the scheduler and workers in bad weather; see simulation.py for what that is and what must hold.

`make test` plays a few seeds of each kind, `make simulate` 100,000. So that nobody has to believe that they would find
anything, some bugs are planted here, each in a subclass of a core. Two of them are what the product did until the
simulation was first run.
"""

from __future__ import annotations

import dataclasses

import pytest

from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import Beat
from gateway.ledger import Ledger
from scheduler.actions import Action, Kill
from scheduler.batching import Part
from scheduler.losses import Losses
from scheduler.quarantine import Quarantine
from scheduler.state import Scheduler
from tests.simulation import LONG, MS, SECOND, SHORT, Cores, Plan, World, play


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
async def test_every_request_ends_once_and_rightly_in_any_weather(first: int, metrics: Metrics) -> None:
    outcomes = [await play(seed, metrics, SHORT) for seed in range(first, first + 100)]
    assert {outcome.seed: outcome.failure for outcome in outcomes if outcome.failure} == {}
    ends = [end for outcome in outcomes for end in outcome.ends]
    assert ends.count("answered") > 0.75 * len(ends)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_a_long_spell_of_it_with_messages_through_their_bytes_ends_as_well(seed: int, metrics: Metrics) -> None:
    outcome = await play(seed, metrics, LONG)
    assert outcome.failure is None
    assert outcome.ends.count("answered") > 30


async def test_a_seed_says_all_that_happens(metrics: Metrics) -> None:
    first = await play(7, metrics, trace=True)
    again = await play(7, metrics, trace=True)
    assert first.trace
    assert first.trace == again.trace


async def test_a_poisonous_input_is_given_up_and_the_fleet_recovers(metrics: Metrics) -> None:
    world = World(99, metrics, Plan(odd_steps=0))
    world.run(2)
    poisoned = world.send_request(poison=True)
    innocents = [world.send_request(plain=True) for _ in range(5)]
    world.rest()
    assert poisoned.end == "input_quarantined"
    assert [innocent.end for innocent in innocents] == ["answered"] * 5
    world.check_empty()


async def test_connections_that_break_again_and_again_put_no_input_in_quarantine(metrics: Metrics) -> None:
    world = World(5, metrics, Plan(odd_steps=0))
    world.run(2)
    world.faulty = False  # but for what is done here
    losses = metrics.worker_losses.labels("disconnected")._value.get()
    for _ in range(3):
        requests = [world.send_request(plain=True) for _ in range(4)]
        for _ in range(400):
            for worker in world.workers.values():
                if worker.running is not None and worker.dealer.connection is not None:
                    worker.excuse(8 * SECOND)
                    worker.dealer.connection.break_off(700 * MS, MS)
            world.run(0.02)
        world.rest()
        assert [request.end for request in requests] == ["answered"] * 4
    assert metrics.worker_losses.labels("disconnected")._value.get() - losses >= 9


# --- planted bugs ---


class RetriesSuspectsOnly(Losses):
    def retry(self, part: Part, now_ns: int) -> None:
        if part.losses:
            super().retry(part, now_ns)


class ForgetsWhatWaited(Scheduler):
    """Of what a lost worker held, only what was running runs again."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._losses = RetriesSuspectsOnly(
            Quarantine(b""), self._queue, self._fleet, self._accounts, self._pulse, self._outbox, self._metrics
        )


class RunsWhatIsLate(Scheduler):
    """Deadlines are looked at when a request comes, and not again."""

    def _expire(self, begin_ns: int) -> None:
        pass


class KeepsItsEpoch(Scheduler):
    """Nothing fences off what a scheduler that has died was owed: the next one has batches of the same numbers."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**(arguments | {"epoch": 1}))  # type: ignore[arg-type]


class SendsNothingAgain(Ledger):
    """What a scheduler took with it is not sent to the next one."""

    def _submit_again(self, wanted: object) -> None:
        pass


class SaysThatItWaitsForNothing(Ledger):
    """As it was: what a connection takes that breaks and comes back at once is missed by nobody."""

    def _pulse(self, message: Message, now_ns: int) -> bool:
        return super()._pulse(
            dataclasses.replace(message, num_held=0) if isinstance(message, Beat) else message, now_ns
        )


class CountsBeats(Scheduler):
    """As it was: a worker is killed after eight beats that tell of less than it was sent, however old they are."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._short_beats: dict[int, int] = {}  # by the newest batch

    def on_worker_message(self, peer: bytes, message: Message, now_ns: int) -> list[Action]:
        actions = super().on_worker_message(peer, message, now_ns)
        worker = self._fleet.get(peer)
        if worker is None or not isinstance(message, Beat) or message.num_held >= len(worker.in_flight):
            return actions
        newest = max(worker.in_flight)
        self._short_beats[newest] = self._short_beats.get(newest, 0) + 1
        return [*actions, Kill(peer)] if self._short_beats[newest] == 8 else actions


# The seed to begin with is one shortly before the first that finds the bug, where that takes long from 0.
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cores", "first", "found"),
    [
        (Cores(scheduler=ForgetsWhatWaited), 0, "are lost"),
        (Cores(scheduler=RunsWhatIsLate), 0, "is sent when it is too late"),
        (Cores(scheduler=KeepsItsEpoch), 940, "is killed without a fault of its own"),
        (Cores(ledger=SendsNothingAgain), 0, "no rest"),
        (Cores(ledger=SaysThatItWaitsForNothing), 380, "no rest"),
        (Cores(scheduler=CountsBeats), 130, "is killed without a fault of its own"),
    ],
)
async def test_a_planted_bug_is_found(cores: Cores, first: int, found: str, metrics: Metrics) -> None:
    for seed in range(first, first + 500):
        outcome = await play(seed, metrics, SHORT, cores)
        if outcome.failure is not None:
            break
    assert found in (outcome.failure or "")
