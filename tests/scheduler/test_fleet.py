"""What the fleet foresees of its workers: when one begins something new, and which free slot is worth filling."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from common.metrics import Metrics
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Beat,
    Failure,
    Hello,
    Join,
    Ping,
    Refuse,
    Reply,
)
from scheduler.batching import Part, Pending
from scheduler.fleet import Choice, Fleet, Worker
from tests.fakes import FACTS
from tests.scheduler.rig import (
    EPOCH,
    MS,
    SECOND,
    Rig,
    ids,
    in_pieces,
    learn,
    lengths_of,
    make_request,
)

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


def give(fleet: Fleet, worker: Worker, num_tokens: int, now_ns: int = NOW_NS, choice: Choice | None = None) -> None:
    request = make_request(0, *[[1] * 4] * (num_tokens // 4))
    pending = Pending(b"g0", request, next(_arrivals), NOW_NS, num_tokens // 4)
    fleet.assign(choice or Choice(worker), [Part(pending, 0, num_tokens // 4)], now_ns)


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
    assert fleet.choose_worker(NOW_NS, late=late).worker is None


@pytest.mark.parametrize("late", [False, True])
def test_it_is_filled_the_dispatch_lead_before_the_end_and_the_loop_wakes_for_that(fleet: Fleet, late: bool) -> None:
    worker = join(fleet, "long", 256)
    full = join(fleet, "full", 16, 4)  # whose steps take far longer than was thought
    worker.last_heard_ns = full.last_heard_ns = NOW_NS + 254 * MS
    filled_ns = fleet.next_free_ns(NOW_NS)
    assert filled_ns == NOW_NS + 254_400_000
    assert fleet.choose_worker(filled_ns - 1, late=late).worker is None
    assert fleet.choose_worker(filled_ns, late=late).worker is worker


def test_it_is_filled_at_once_where_the_full_worker_is_through_later(fleet: Fleet) -> None:
    worker = join(fleet, "long", 64)
    join(fleet, "full", 64, 4)
    assert fleet.choose_worker(NOW_NS, late=False).worker is worker


def test_it_is_filled_at_once_where_the_full_worker_is_not_heard_of(fleet: Fleet) -> None:
    worker = join(fleet, "long", 64)
    silent = join(fleet, "full", 16, 4)
    silent.last_heard_ns = NOW_NS - SECOND
    assert fleet.choose_worker(NOW_NS, late=False).worker is worker


def test_it_is_filled_at_once_where_the_other_worker_rests_for_longer(fleet: Fleet) -> None:
    worker = join(fleet, "long", 64)
    resting = join(fleet, "resting")
    fleet.rest(resting, NOW_NS)
    assert fleet.choose_worker(NOW_NS, late=False).worker is worker


def test_a_step_of_which_nothing_is_known_is_not_taken_for_a_long_one(fleet: Fleet) -> None:
    unknown = join(fleet, "unknown", 256, learned=False)
    join(fleet, "full", 16, 4)
    assert fleet.choose_worker(NOW_NS, late=False).worker is unknown


def test_an_idle_worker_is_never_left_waiting(fleet: Fleet) -> None:
    join(fleet, "full", 4, 4)
    idle = join(fleet, "idle")
    assert fleet.choose_worker(NOW_NS, late=True).worker is idle


def test_where_both_slots_are_taken_everywhere_there_is_none_and_nothing_to_wake_for(fleet: Fleet) -> None:
    join(fleet, "one", 256, 256)
    join(fleet, "other", 4, 4)
    assert fleet.choose_worker(NOW_NS, late=False).worker is None
    assert fleet.next_free_ns(NOW_NS) is None


@pytest.mark.parametrize(
    ("num_tokens", "filled_ns"),
    [pytest.param(16, 14_400_000, id="a short step"), pytest.param(64, 62_400_000, id="a long one")],
)
def test_of_one_worker_a_slot_that_is_kept_open_is_filled_sooner_by_what_the_ways_take(
    fleet: Fleet, num_tokens: int, filled_ns: int
) -> None:
    worker = join(fleet, "only", num_tokens)
    assert fleet.next_free_ns(NOW_NS) == NOW_NS + filled_ns
    worker.last_heard_ns = NOW_NS + filled_ns
    assert fleet.choose_worker(NOW_NS + filled_ns - 1, late=True).worker is None
    assert fleet.choose_worker(NOW_NS + filled_ns, late=True).worker is worker


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
        before = fleet.choose_worker(opens_ns - 1, late=True)
        assert before.worker is None
        fleet.keep_open(before)
    now_ns = max(NOW_NS, opens_ns) + int(after_ms * MS)
    choice = fleet.choose_worker(now_ns, late=True)
    assert choice.worker is worker
    give(fleet, worker, worker.num_tokens, now_ns, choice)
    first, second = worker.in_flight
    fleet.release(worker, first, NOW_NS)
    worker.learn_dispatch_lead(worker.in_flight[second], waited_us)


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


def test_to_ask_which_worker_is_next_changes_nothing(fleet: Fleet) -> None:
    worker = join(fleet, "only", 16)
    first = fleet.choose_worker(NOW_NS, late=True)
    assert first.kept_open == (worker,)
    assert fleet.choose_worker(NOW_NS, late=True) == first
    assert not worker.is_kept_open


@pytest.mark.parametrize(("waited_us", "bound_ms"), [(0, 3.0), (9000, 0.5)])
def test_what_is_learned_has_bounds(fleet: Fleet, waited_us: int, bound_ms: float) -> None:
    worker = join(fleet, "only", 4)
    for _ in range(1000):
        run_late(fleet, worker, waited_us=waited_us)
    assert worker.dispatch_lead_ns == bound_ms * MS


# --- through the state machine ---


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_protocol_version_is_refused_on_both_sides(rig: Rig, version: int) -> None:
    rig.gateway(Join(version, "g1", 1), b"g1")
    rig.worker(Hello(version, "w1", 1, FACTS), b"w1")
    assert [refuse.code for refuse in rig.take(Refuse, b"g1")] == ["version"]
    assert [refuse.code for refuse in rig.take(Refuse, b"w1")] == ["version"]


def test_workers_are_counted_as_soon_as_gateways_are_told_of_them(metrics: Metrics) -> None:
    ready = metrics.workers.labels("ready")
    rig = Rig(metrics)
    rig.join()
    rig.hello()
    assert (rig.take(Ping, b"g0")[-1].workers_ready, ready._value.get()) == (1, 1)
    rig.hello(b"w1")
    assert (rig.take(Ping, b"g0")[-1].workers_ready, ready._value.get()) == (2, 2)
    rig.worker_lost(b"w1")
    assert (rig.take(Ping, b"g0")[-1].workers_ready, ready._value.get()) == (1, 1)


def test_a_second_worker_of_the_same_name_is_refused_and_the_first_works_on(rig: Rig) -> None:
    rig.worker(Hello(PROTOCOL_VERSION, "w0", 2, FACTS), b"other")  # another process: 2 where the first is 1
    assert [refuse.code for refuse in rig.take(Refuse, b"other")] == ["duplicate_name"]
    rig.request(1, [1])
    assert len(rig.take(Batch, b"w0")) == 1


def test_a_worker_that_comes_back_under_a_new_routing_id_takes_its_own_place(rig: Rig) -> None:
    rig.request(1, [1])
    rig.take(Batch)
    for again in (b"again", b"a third time", b"a fourth time"):
        rig.worker(Hello(PROTOCOL_VERSION, "w0", 1, FACTS), again)
        assert [ids(batch) for batch in rig.take(Batch, again)] == [[1]]
    assert (rig.take(Refuse), rig.take(Failure)) == ([], [])  # nothing has died: the input is not to blame


def test_a_worker_with_another_model_is_refused_while_the_first_model_is_served(rig: Rig) -> None:
    rig.hello(b"w1", dataclasses.replace(FACTS, fingerprint="other"))
    assert [refuse.code for refuse in rig.take(Refuse, b"w1")] == ["model_mismatch"]


def test_work_goes_to_the_worker_with_the_least_in_its_hands(rig: Rig) -> None:
    rig.hello(b"w1")
    rig.request(1, [1] * 9)
    rig.request(2, [2])
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[2]]
    rig.request(3, [3])
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[3]]


def test_after_a_batch_ran_in_pieces_the_next_have_as_many_tokens_as_fitted_and_in_a_minute_all_again(
    rig: Rig,
) -> None:
    rig.request(1, [1] * 20, [2] * 20, [3] * 20)
    (batch,) = rig.take(Batch)
    in_pieces(rig, batch, 20, 20, 20)
    assert len(rig.take(Reply)) == 1
    four = ([4] * 10, [5] * 10, [6] * 10, [7] * 30)
    rig.request(2, *four)
    batches = rig.take(Batch)
    assert lengths_of(batches) == [[10, 10], [10]]
    for batch in batches:
        rig.finish(batch)
    (longer,) = rig.take(Batch)
    assert lengths_of([longer]) == [[30]]  # longer than the budget: alone, as ever
    rig.finish(longer)
    rig.live(59)
    rig.request(3, *four[:2], [6] * 5, deadline_s=1000)
    (batch,) = rig.take(Batch)
    assert lengths_of([batch]) == [[10, 10]]
    rig.finish(batch)
    rig.finish(rig.take(Batch)[0])
    rig.live(1)
    rig.request(4, *four, deadline_s=1000)
    assert lengths_of(rig.take(Batch)) == [[10, 10, 10, 30]]


def test_memory_is_short_at_one_worker_alone(rig: Rig) -> None:
    rig.hello(b"w1")
    rig.request(1, [1] * 20, [2] * 20)
    (batch,) = rig.take(Batch, b"w0")
    in_pieces(rig, batch, 20, 20)
    rig.request(2, [3] * 20, [4] * 20, [5] * 20)
    assert lengths_of(rig.take(Batch, b"w0")) == [[20]]
    assert lengths_of(rig.take(Batch, b"w1")) == [[20, 20]]


def test_a_silent_worker_gets_no_new_work_and_is_killed_after_two_seconds(rig: Rig) -> None:
    rig.request(1, [1])
    rig.take(Batch)
    rig.tick(1500 * MS)
    rig.request(2, [2])
    assert (rig.take(Batch), rig.killed) == ([], [])
    rig.tick(500 * MS)
    assert rig.killed == [b"w0"]
    rig.hello(b"w1")
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[1], [2]]


def test_a_worker_that_beats_but_never_finishes_is_killed(rig: Rig) -> None:
    rig.request(1, [1])
    rig.live(29, held=1)
    assert rig.killed == []
    rig.live(1, held=1)
    assert rig.killed == [b"w0"]


def test_when_the_scheduler_itself_stood_still_nobody_is_blamed(rig: Rig) -> None:
    rig.request(1, [1])
    rig.now_ns += 20 * SECOND
    rig.request(2, [2])  # heard before any tick
    assert rig.take(Failure) == []
    rig.tick(250 * MS)
    assert rig.killed == []


def test_a_hang_after_a_standstill_is_noticed_as_soon_as_any_other(rig: Rig) -> None:
    rig.now_ns += 20 * SECOND
    rig.worker(Beat(EPOCH, 0))
    rig.tick(2 * SECOND)
    assert rig.killed == [b"w0"]


def test_who_was_silent_before_a_long_standstill_too_gets_time_to_be_heard_after_it(rig: Rig) -> None:
    """What it said meanwhile may be lost: the transport gives a connection up that nobody serves."""
    rig.tick(1900 * MS)
    rig.now_ns += 2200 * MS
    rig.tick(1000 * MS)
    assert rig.killed == []
    rig.tick(250 * MS)
    assert rig.killed == [b"w0"]


def test_a_batch_that_never_arrived_runs_again_without_blame(rig: Rig) -> None:
    rig.request(1, [1], [2])
    (lost,) = rig.take(Batch)
    rig.live(2)  # its beats tell of no batch
    assert rig.take(Batch) == []
    rig.tick(250 * MS)
    (batch,) = rig.take(Batch)
    assert (ids(batch), rig.killed) == ([1, 2], [])
    rig.finish(lost)
    assert rig.take(Reply) == []
    rig.finish(batch)
    assert len(rig.take(Reply)) == 1


def test_a_batch_that_was_sent_before_one_whose_result_has_come_never_arrived_and_runs_again(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    rig.request(3, [3])
    _, second = rig.take(Batch)
    rig.finish(second)
    (batch,) = rig.take(Batch)
    assert (ids(batch), rig.killed) == ([1, 3], [])


def test_an_introduction_under_an_old_name_that_is_found_after_the_new_one_is_stale(rig: Rig) -> None:
    hello = Hello(PROTOCOL_VERSION, "w0", 1, FACTS)
    rig.worker(hello, b"w9")  # came back as somebody new, while the scheduler stood still
    rig.worker(hello, b"w0")
    join = Join(PROTOCOL_VERSION, "g0", 1)
    rig.gateway(join, b"g9")
    rig.gateway(join, b"g0")
    rig.gateway(make_request(1, [1]), b"g9")
    (batch,) = rig.take(Batch, b"w9")
    rig.finish(batch, b"w9")
    assert len(rig.take(Reply, b"g9")) == 1


def test_beats_that_a_scheduler_finds_after_a_standstill_say_nothing_of_what_it_sends_then(rig: Rig) -> None:
    rig.request(1, [1])
    (batch,) = rig.take(Batch)
    rig.request(2, [2])
    rig.take(Batch)
    rig.now_ns += 3 * SECOND
    rig.finish(batch)
    for _ in range(12):
        rig.worker(Beat(EPOCH, 0))  # before the worker has seen what its result brings it
    rig.tick(250 * MS)
    rig.worker(Beat(EPOCH, 1))
    rig.live(3, held=1)
    assert (rig.killed, rig.take(Batch)) == ([], [])


def test_a_worker_that_misses_one_of_two_batches_ends_the_other_before_it_is_taken_at_its_word(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    first, _ = rig.take(Batch)
    rig.live(5, held=1)
    assert rig.take(Batch) == []
    rig.finish(first)
    rig.live(1)
    (batch,) = rig.take(Batch)
    assert (ids(batch), rig.killed) == ([2], [])


def test_beats_that_piled_up_while_the_scheduler_stood_still_miss_no_batch(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    rig.request(3, [3])
    first, second = rig.take(Batch)
    rig.now_ns += 3 * SECOND
    rig.finish(first)  # so that the third is sent, which none of what was said meanwhile can know of
    for _ in range(12):
        rig.worker(Beat(EPOCH, 1))
    rig.tick(250 * MS)
    assert rig.killed == []
    rig.finish(second)
    assert [reply.request_id for reply in rig.take(Reply)] == [1, 2]


def test_the_status_tells_how_many_workers_are_ready_and_whether_work_moves(rig: Rig) -> None:
    rig.request(1, [1])
    rig.live(9, held=1)
    status = rig.take(Ping, b"g0")[-1]
    assert (status.workers_ready, status.workers_total, status.progressing) == (1, 2, True)
    rig.live(1, held=1)
    assert not rig.take(Ping, b"g0")[-1].progressing


def test_work_goes_to_workers_by_how_fast_they_are(rig: Rig) -> None:
    rig.hello(b"w1")
    ms_per_token = {b"w0": 1, b"w1": 3}
    done_tokens = {b"w0": 0, b"w1": 0}
    rig.request(1, *[[1] * 4] * 3000, lane="backfill")
    running: dict[bytes, list[Batch]] = {b"w0": [], b"w1": []}
    ends_ns: dict[bytes, int] = {}
    while sum(done_tokens.values()) < 10_000:
        for peer, held in running.items():
            held += rig.take(Batch, peer)
            if held:
                ends_ns.setdefault(peer, rig.now_ns + len(held[0].token_ids) * ms_per_token[peer] * MS)
        peer = min(ends_ns, key=ends_ns.__getitem__)
        rig.now_ns = max(rig.now_ns, ends_ns.pop(peer))
        batch = running[peer].pop(0)
        done_tokens[peer] += len(batch.token_ids)
        rig.worker(Beat(EPOCH, 2), b"w0")
        rig.worker(Beat(EPOCH, 2), b"w1")
        rig.finish(batch, peer, step_us=len(batch.token_ids) * ms_per_token[peer] * 1000)
    assert done_tokens[b"w0"] / done_tokens[b"w1"] == pytest.approx(3, rel=0.05)


def test_nothing_is_polled_for_a_worker_that_is_silent(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 60)
    rig.take(Batch)
    rig.request(2, [2] * 5)
    rig.tick(1200 * MS)
    assert rig.core.next_tick_ns() > rig.now_ns
