"""What the fleet foresees of its workers: when one begins something new, and which free slot is worth filling."""

from __future__ import annotations

import itertools
import random

import pytest

from scheduler.batching import Part, Pending
from scheduler.fleet import Fleet, Worker
from tests.fakes import FACTS
from tests.scheduler.test_core import EPOCH, MS, SECOND, make_request

NOW_NS = 10 * SECOND
_arrivals = itertools.count(1)


def join(fleet: Fleet, name: str, *batches: int, learned: bool = True) -> Worker:
    """A worker that takes a millisecond a token, as is known of it, and has just been given batches of so many."""
    worker = Worker(name.encode(), name, 1, FACTS, NOW_NS)
    for num_tokens in (4, 16, 64, 256) if learned else ():
        worker.step_time.observe(num_tokens, 4, num_tokens * 1000)
    fleet.join(worker)
    for num_tokens in batches:
        give(fleet, worker, num_tokens)
    return worker


def give(fleet: Fleet, worker: Worker, num_tokens: int, now_ns: int = NOW_NS) -> None:
    request = make_request(0, *[[1] * 4] * (num_tokens // 4))
    pending = Pending(b"g0", request, next(_arrivals), NOW_NS, num_tokens // 4)
    fleet.assign(worker, [Part(pending, 0, num_tokens // 4)], now_ns)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(EPOCH)


# --- when a worker begins something new ---


def test_without_workers_and_with_an_idle_one_nothing_is_known_to_wait(fleet: Fleet) -> None:
    assert fleet.begins_in_ns(NOW_NS) == 0
    join(fleet, "busy", 64)
    join(fleet, "idle")
    assert fleet.begins_in_ns(NOW_NS) == 0


def test_who_is_through_with_both_its_batches_first_begins_first(fleet: Fleet) -> None:
    join(fleet, "long", 64)
    join(fleet, "full", 16, 4)
    assert fleet.begins_in_ns(NOW_NS) == 20 * MS


def test_what_has_run_of_a_batch_counts_as_over_and_one_that_is_late_as_about_to_end(fleet: Fleet) -> None:
    join(fleet, "full", 16, 4)
    assert fleet.begins_in_ns(NOW_NS + 15 * MS) == 5 * MS
    assert fleet.begins_in_ns(NOW_NS + 90 * MS) == 0


def test_a_worker_that_is_not_heard_of_begins_nothing(fleet: Fleet) -> None:
    join(fleet, "long", 64)
    silent = join(fleet, "silent", 4)
    silent.last_heard_ns = NOW_NS - SECOND
    assert fleet.begins_in_ns(NOW_NS) == 64 * MS


def test_a_worker_that_rests_begins_nothing_before_it_has(fleet: Fleet) -> None:
    join(fleet, "long", 64)
    resting = join(fleet, "resting")
    fleet.rest(resting, NOW_NS - 990 * MS)
    assert fleet.begins_in_ns(NOW_NS) == 10 * MS
    fleet.rest(resting, NOW_NS)
    assert fleet.begins_in_ns(NOW_NS) == 64 * MS


# --- which slot is filled ---


@pytest.mark.parametrize("late", [False, True])
def test_a_slot_behind_a_long_step_stays_open_while_a_full_worker_is_through_sooner(fleet: Fleet, late: bool) -> None:
    join(fleet, "long", 256)
    join(fleet, "full", 16, 4)
    assert fleet.free_worker(NOW_NS, late=late) is None


@pytest.mark.parametrize("late", [False, True])
def test_it_is_filled_as_late_as_a_hand_over_takes_and_the_loop_wakes_for_that(fleet: Fleet, late: bool) -> None:
    worker = join(fleet, "long", 256)
    full = join(fleet, "full", 16, 4)  # whose steps take far longer than was thought
    worker.last_heard_ns = full.last_heard_ns = NOW_NS + 254 * MS
    filled_ns = fleet.next_free_ns(NOW_NS)
    assert filled_ns == NOW_NS + 255 * MS  # not 5 % of the step before its end
    assert fleet.free_worker(filled_ns - 1, late=late) is None
    assert fleet.free_worker(filled_ns, late=late) is worker


def test_it_is_filled_at_once_where_the_full_worker_is_through_later(fleet: Fleet) -> None:
    worker = join(fleet, "long", 64)
    join(fleet, "full", 64, 4)
    assert fleet.free_worker(NOW_NS, late=False) is worker


def test_it_is_filled_at_once_where_the_full_worker_is_not_heard_of(fleet: Fleet) -> None:
    worker = join(fleet, "long", 64)
    silent = join(fleet, "full", 16, 4)
    silent.last_heard_ns = NOW_NS - SECOND
    assert fleet.free_worker(NOW_NS, late=False) is worker


def test_it_is_filled_at_once_where_the_other_worker_rests_for_longer(fleet: Fleet) -> None:
    worker = join(fleet, "long", 64)
    resting = join(fleet, "resting")
    fleet.rest(resting, NOW_NS)
    assert fleet.free_worker(NOW_NS, late=False) is worker


def test_a_step_of_which_nothing_is_known_is_not_taken_for_a_long_one(fleet: Fleet) -> None:
    unknown = join(fleet, "unknown", 256, learned=False)
    join(fleet, "full", 16, 4)
    assert fleet.free_worker(NOW_NS, late=False) is unknown


def test_an_idle_worker_is_never_left_waiting(fleet: Fleet) -> None:
    join(fleet, "full", 4, 4)
    idle = join(fleet, "idle")
    assert fleet.free_worker(NOW_NS, late=True) is idle


def test_where_both_slots_are_taken_everywhere_there_is_none_and_nothing_to_wake_for(fleet: Fleet) -> None:
    join(fleet, "one", 256, 256)
    join(fleet, "other", 4, 4)
    assert fleet.free_worker(NOW_NS, late=False) is None
    assert fleet.next_free_ns(NOW_NS) is None


@pytest.mark.parametrize(
    ("num_tokens", "filled_ns"),
    [pytest.param(16, 14_400_000, id="by its ways"), pytest.param(64, 60_800_000, id="5 %")],
)
def test_of_one_worker_a_slot_that_is_kept_open_is_filled_sooner_by_what_the_ways_take(
    fleet: Fleet, num_tokens: int, filled_ns: int
) -> None:
    worker = join(fleet, "only", num_tokens)
    assert fleet.next_free_ns(NOW_NS) == NOW_NS + filled_ns
    worker.last_heard_ns = NOW_NS + filled_ns
    assert fleet.free_worker(NOW_NS + filled_ns - 1, late=True) is None
    assert fleet.free_worker(NOW_NS + filled_ns, late=True) is worker


def lead_ms(worker: Worker, fleet: Fleet) -> float:
    """How long before the end of a step of 16 ms the next batch is sent."""
    opens_ns = fleet.next_free_ns(NOW_NS)
    assert opens_ns is not None
    return (worker.running_since_ns + 16 * MS - opens_ns) / MS


def run_late(fleet: Fleet, worker: Worker, *, waited_us: int, after_ms: float = 0.0, waits: bool = True) -> None:
    """Give a worker that has a batch the next one so long after its slot opens, and end the first one.

    `waits`: whether something has waited for that.
    """
    opens_ns = fleet.next_free_ns(NOW_NS)
    assert opens_ns is not None
    worker.last_heard_ns = NOW_NS
    if waits and opens_ns > NOW_NS:
        assert fleet.free_worker(opens_ns - 1, late=True) is None
    now_ns = max(NOW_NS, opens_ns) + int(after_ms * MS)
    assert fleet.free_worker(now_ns, late=True) is worker
    give(fleet, worker, worker.num_tokens, now_ns)
    first, second = worker.in_flight
    fleet.release(worker, first, NOW_NS)
    worker.learn_lead(worker.in_flight[second], waited_us)


def test_what_is_kept_open_is_sent_as_late_as_one_of_twenty_is_late(fleet: Fleet) -> None:
    worker = join(fleet, "only", 16)
    rng = random.Random(1)
    late = []
    for _ in range(4000):
        # Its ways take 1.2 ms and more, and the rest it waits in the worker.
        waited_us = max(0, round((lead_ms(worker, fleet) - 1.2 - rng.expovariate(5)) * 1000))
        late.append(waited_us < 300)
        run_late(fleet, worker, waited_us=waited_us, after_ms=rng.uniform(0, 0.3))  # as late as the loop wakes
    assert sum(late[1000:]) / len(late[1000:]) == pytest.approx(0.05, abs=0.01)
    assert 1.8 < lead_ms(worker, fleet) < 2.6  # 1.2, 0.3, and what 95 of 100 take at most beyond: 0.6


def test_of_what_could_have_been_sent_no_sooner_nothing_is_learned(fleet: Fleet) -> None:
    worker = join(fleet, "only", 16)
    before = lead_ms(worker, fleet)
    run_late(fleet, worker, waited_us=0, waits=False)  # it came when its slot was open
    assert lead_ms(worker, fleet) == before
    run_late(fleet, worker, waited_us=0)
    assert lead_ms(worker, fleet) > before


def test_of_a_long_step_of_which_a_share_decides_nothing_is_learned(fleet: Fleet) -> None:
    worker = join(fleet, "only", 64)
    run_late(fleet, worker, waited_us=0)
    assert worker.lead_ns == 1_600_000


def test_what_is_sent_a_whole_step_early_is_sent_later_again_where_it_waits(fleet: Fleet) -> None:
    worker = Worker(b"only", "only", 1, FACTS, NOW_NS)
    for _ in range(5):
        worker.step_time.observe(16, 4, 1_500)  # a step of 1.5 ms: there is a slot from its beginning on
    fleet.join(worker)
    give(fleet, worker, 16)
    run_late(fleet, worker, waited_us=0)
    assert worker.lead_ns == 1_600_000  # no sooner than at once
    run_late(fleet, worker, waited_us=900)
    assert worker.lead_ns == 1_595_000
    for _ in range(100):
        run_late(fleet, worker, waited_us=900)
    assert worker.lead_ns < 1_500_000


@pytest.mark.parametrize(("waited_us", "bound_ms"), [(0, 3.0), (9000, 0.5)])
def test_what_is_learned_has_bounds(fleet: Fleet, waited_us: int, bound_ms: float) -> None:
    worker = join(fleet, "only", 4)
    for _ in range(1000):
        run_late(fleet, worker, waited_us=waited_us)
    assert worker.lead_ns == bound_ms * MS
