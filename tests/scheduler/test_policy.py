"""What runs next, through the state machine: when a batch is closed, how large it is, and whose turn it is."""

from __future__ import annotations

import pytest

from common.metrics import Metrics
from common.wire.messages import (
    NO_NUMBERS,
    Batch,
    Beat,
    Failure,
    Reply,
    Result,
)
from scheduler.actions import Kill
from tests.fakes import oracle_rows
from tests.scheduler.rig import (
    EPOCH,
    MS,
    SECOND,
    Rig,
    ids,
    learn,
    run,
)


def run_beside(rig: Rig, *num_tokens: int) -> dict[bytes, list[Batch]]:
    """Two workers that take a millisecond a token are asked for so much, one thing after the other; who is given what.

    The first thing is for the first worker, the second for the other.
    """
    learn(rig)
    rig.hello(b"w1")
    for count in (4, 16, 64):
        rig.request(200 + count, [1] * 64, lane="backfill")
        rig.request(300 + count, [1] * count, lane="backfill")
        for peer, ms in ((b"w0", 64), (b"w1", count)):
            (batch,) = rig.take(Batch, peer)
            rig.finish(batch, peer, step_us=ms * 1000)
    rig.take(Reply)
    for request_id, count in enumerate(num_tokens, start=1):
        rig.request(request_id, [request_id] * count, lane="backfill", deadline_s=rig.now_ns / SECOND + 0.05)
    return {peer: rig.take(Batch, peer) for peer in (b"w0", b"w1")}


def test_what_waits_is_not_put_behind_a_long_step_while_another_worker_is_through_sooner(rig: Rig) -> None:
    given = run_beside(rig, 64, 4, 4, 5)
    assert [[len(batch.token_ids) for batch in batches] for batches in given.values()] == [[64], [4, 4]]
    rig.tick(4 * MS)
    rig.finish(given[b"w1"][0], b"w1", step_us=4000)
    (batch,) = rig.take(Batch, b"w1")
    rig.tick(9 * MS)
    rig.finish(given[b"w1"][1], b"w1", step_us=4000)
    rig.finish(batch, b"w1", step_us=5000)
    assert [reply.request_id for reply in rig.take(Reply)] == [2, 3, 4]
    assert rig.take(Failure) == []


def test_a_worker_in_a_long_step_has_its_next_batch_before_it_ends_though_another_was_to_be_through_sooner(
    rig: Rig,
) -> None:
    run_beside(rig, 40, 4, 4, 5)
    rig.tick(37 * MS)
    assert rig.take(Batch) == []
    wake_ns = rig.core.next_tick_ns()
    assert 38 * MS <= wake_ns - rig.now_ns + 37 * MS < 40 * MS
    rig.tick(wake_ns - rig.now_ns)
    assert [ids(batch) for batch in rig.take(Batch, b"w0")] == [[4] * 5]


def test_a_second_batch_is_sent_at_once_while_nobody_is_online(rig: Rig) -> None:
    learn(rig)
    rig.tick(2 * SECOND)
    rig.hello()
    for request_id in (1, 2):
        rig.request(request_id, [request_id] * 64, lane="backfill")
    assert [len(batch.token_ids) for batch in rig.take(Batch)] == [64, 64]


def test_a_second_batch_is_closed_shortly_before_the_first_one_ends(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 60)
    (first,) = rig.take(Batch)
    rig.request(2, [2] * 5)
    assert rig.take(Batch) == []
    wake_ns = rig.core.next_tick_ns()
    assert 50 * MS < wake_ns - rig.now_ns < 60 * MS
    rig.request(3, [3] * 7)
    rig.tick(wake_ns - rig.now_ns)
    (second,) = rig.take(Batch)
    assert second.lengths.tolist() == [5, 7]
    assert len(first.token_ids) == 60


def closes_after_ms(rig: Rig, num_tokens: int) -> float:
    """How long after a step of so many tokens has begun the batch behind it is closed; both run, in their time."""
    rig.request(1000 + rig.core._accounts._next_arrival, [1] * num_tokens)
    (first,) = rig.take(Batch)
    rig.request(1000 + rig.core._accounts._next_arrival, [2] * num_tokens)
    assert rig.take(Batch) == []
    began_ns, wake_ns = rig.now_ns, rig.core.next_tick_ns()
    rig.tick(wake_ns - rig.now_ns)
    (second,) = rig.take(Batch)
    for batch in (first, second):
        rig.finish(batch, step_us=num_tokens * 1000, waited_us=0 if batch is second else 9000)
    return (wake_ns - began_ns) / MS


def test_a_step_that_is_not_typical_changes_nothing_that_is_known(rig: Rig) -> None:
    learn(rig)
    for request_id in (1, 2, 3, 4, 5):
        rig.request(request_id, [1] * 20)
        (batch,) = rig.take(Batch)
        rig.finish(batch, step_us=200_000, is_typical=False)
    assert closes_after_ms(rig, 20) == pytest.approx(18.4, abs=0.1)


def test_the_batch_behind_a_step_is_closed_sooner_after_one_that_came_too_late(rig: Rig) -> None:
    learn(rig)
    assert closes_after_ms(rig, 20) - closes_after_ms(rig, 20) == pytest.approx(0.095, abs=0.001)


def test_what_answers_a_result_is_there_before_the_next_batch_is_formed(rig: Rig) -> None:
    for request_id in (1, 2, 3):
        rig.request(request_id, [request_id] * 40)
    first, _ = rig.take(Batch)
    result = Result(EPOCH, first.batch_id, 0, 5000, True, NO_NUMBERS, oracle_rows(first))
    (reply,) = rig.core.on_worker_message(b"w0", result, rig.now_ns)
    (batch,) = rig.core.form_batches(rig.now_ns)
    assert not isinstance(reply, Kill)
    assert not isinstance(batch, Kill)
    assert isinstance(reply.message, Reply)
    assert isinstance(batch.message, Batch)


def test_a_batch_that_is_full_stays_open_so_that_another_tenant_has_its_part_of_it(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 60, tenant=7)
    rig.take(Batch)
    for request_id in range(2, 6):
        rig.request(request_id, [request_id] * 32, tenant=7)
    assert rig.take(Batch) == []
    rig.request(6, [6] * 5, tenant=8)
    rig.tick(rig.core.next_tick_ns() - rig.now_ns)
    (second,) = rig.take(Batch)
    assert [int(ids) for ids in dict.fromkeys(second.token_ids.tolist())] == [2, 6]


def test_a_result_that_comes_before_its_time_closes_the_next_batch(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 60)
    (first,) = rig.take(Batch)
    rig.request(2, [2] * 5)
    rig.finish(first)
    assert [batch.lengths.tolist() for batch in rig.take(Batch)] == [[5]]


def test_backfill_runs_in_small_steps_while_somebody_is_online(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 3)
    (online,) = rig.take(Batch)
    rig.request(2, *[[2] * 4] * 30, lane="backfill")
    run(rig, online, 4)
    (batch,) = rig.take(Batch)
    assert len(batch.token_ids) == 8  # what fits into a sixth of the time of 64


def test_beside_a_query_nothing_runs_where_queries_are_rare_and_a_document_where_they_are_not(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 4)
    (batch,) = rig.take(Batch)
    rig.request(2, *[[2] * 12] * 200, lane="backfill")
    run(rig, batch, 4)
    lengths = []
    for request_id in range(10, 80):
        rig.request(request_id, [7] * 4)
        while 4 not in (batch := rig.take(Batch)[0]).lengths:
            run(rig, batch, len(batch.token_ids))
        lengths.append(batch.lengths.tolist())
        run(rig, batch, len(batch.token_ids))
    assert lengths[0] == [4]
    assert lengths[-1] == [4, 12]


def test_who_is_online_waits_for_one_small_step_of_backfill_at_most(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 3)
    (batch,) = rig.take(Batch)
    rig.request(2, *[[2] * 4] * 100, lane="backfill")
    run(rig, batch, 4)
    waits_ms = []
    for request_id in range(10, 20):
        (backfill,) = rig.take(Batch)
        rig.request(request_id, [7] * 3)
        ms = len(backfill.token_ids)
        run(rig, backfill, ms)
        (mixed,) = rig.take(Batch)
        assert mixed.lengths.tolist()[0] == 3
        waits_ms.append(ms)
        run(rig, mixed, len(mixed.token_ids))
    assert max(waits_ms) <= 8


def test_backfill_has_the_whole_step_again_when_nobody_was_online_for_two_seconds(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 3)
    (online,) = rig.take(Batch)
    run(rig, online, 4)
    rig.live(2)
    rig.request(2, *[[2] * 4] * 30, lane="backfill")
    assert [len(batch.token_ids) for batch in rig.take(Batch)] == [64, 56]


@pytest.mark.parametrize(("lane", "share"), [("score", 0.2), ("backfill", 0.1)])
def test_a_lane_below_gets_its_share_while_online_work_never_ends(rig: Rig, lane: str, share: float) -> None:
    learn(rig)
    rig.request(1, *[[2] * 4] * 1000, lane=lane)
    rig.request(2, *[[1] * 4] * 5000)
    spent_ms = {"online": 0, lane: 0}
    for _ in range(100):
        for batch in rig.take(Batch):
            below = int((batch.token_ids == 2).sum())
            spent_ms[lane] += below
            spent_ms["online"] += len(batch.token_ids) - below
            run(rig, batch, len(batch.token_ids))
    part = spent_ms[lane] / sum(spent_ms.values())
    assert share * 0.8 <= part <= share * 1.3


def test_a_full_backfill_queue_refuses_nobody_who_is_online(rig: Rig) -> None:
    learn(rig)
    for request_id in range(1, 300):
        rig.request(request_id, [2] * 64, lane="backfill")
    assert {failure.code for failure in rig.take(Failure)} == {"overloaded"}
    rig.request(1000, [1] * 3)
    assert rig.take(Failure) == []


def test_a_tenant_that_has_filled_the_queue_is_refused_and_another_is_let_in_up_to_its_part(rig: Rig) -> None:
    learn(rig)  # a millisecond a token, so that 10,000 tokens are a full queue
    for request_id in range(1, 300):
        rig.request(request_id, [2] * 64, tenant=1)
    assert {failure.code for failure in rig.take(Failure)} == {"overloaded"}
    for request_id in range(300, 400):
        rig.request(request_id, [3] * 64, tenant=2)
    refused = {failure.request_id: failure.code for failure in rig.take(Failure)}
    assert set(refused.values()) == {"overloaded"}
    assert 375 <= min(refused) <= 380  # 5,000 of its own tokens wait for as many of the other's
    rig.request(400, [2] * 64, tenant=1)
    assert [failure.request_id for failure in rig.take(Failure)] == [400]
    rig.request(401, [4] * 64, tenant=3)
    assert rig.take(Failure) == []


def test_a_latency_target_makes_steps_smaller(metrics: Metrics) -> None:
    rig = Rig(metrics, latency_target_ms=32)
    rig.join()
    rig.hello()
    learn(rig)
    rig.request(1, *[[1] * 4] * 30)
    sizes = [len(batch.token_ids) for batch in rig.take(Batch)]
    assert sizes[0] == 32


def test_who_waits_online_is_present_however_long_ago_he_came(rig: Rig) -> None:
    learn(rig)
    rig.request(1, *[[1] * 4] * 400)
    rig.request(2, *[[2] * 4] * 400, lane="backfill")
    batches = rig.take(Batch)
    for _ in range(20):  # 1.3 seconds
        batch = batches.pop(0)
        run(rig, batch, len(batch.token_ids))
        batches += rig.take(Batch)
    below = [int((batch.token_ids == 2).sum()) for batch in batches]
    assert max(below) <= 24


def test_a_worker_that_has_done_nothing_yet_refuses_nobody(rig: Rig) -> None:
    learn(rig)
    rig.hello(b"w1")
    for request_id in range(1, 40):
        rig.request(request_id, *[[2] * 50] * 8)
    assert rig.take(Failure) == []


def test_a_worker_that_joins_does_not_turn_the_lanes_round(rig: Rig) -> None:
    learn(rig)
    rig.request(1, *[[2] * 4] * 1000, lane="backfill")
    rig.request(2, *[[1] * 4] * 5000)
    rig.hello(b"w1")
    below = total = 0
    batches = {peer: rig.take(Batch, peer) for peer in (b"w0", b"w1")}
    for turn in range(120):
        peer = (b"w0", b"w1")[turn % 2]
        batch = batches[peer].pop(0)
        below += int((batch.token_ids == 2).sum())
        total += len(batch.token_ids)
        rig.tick(len(batch.token_ids) // 2 * MS)
        for name in (b"w0", b"w1"):
            rig.worker(Beat(EPOCH, 2), name)
        rig.finish(batch, peer, step_us=len(batch.token_ids) * 1000)
        for name, held in batches.items():
            held += rig.take(Batch, name)
    assert below / total == pytest.approx(0.1, abs=0.03)
