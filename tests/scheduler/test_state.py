"""The scheduler's state machine: what is let in, what forms a batch, what expires."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from common.errors import ProtocolError
from common.metrics import Metrics
from common.wire.codec import decode, encode
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Join,
    Ping,
    Reply,
    Result,
)
from common.wire.packing import Requests
from scheduler.actions import Kill
from tests.fakes import FACTS, oracle_rows, oracle_vector
from tests.rogue import mutated
from tests.scheduler.rig import (
    EPOCH,
    MS,
    SECOND,
    SEQUENCES,
    SPANS,
    Rig,
    ids,
    learn,
    make_request,
    together,
)


def test_a_request_is_dispatched_at_once_and_its_rows_come_back(rig: Rig) -> None:
    rig.request(5, [1, 2], [3])
    (batch,) = rig.take(Batch)
    assert (ids(batch), batch.lengths.tolist()) == ([1, 2, 3], [2, 1])
    rig.now_ns += 3 * MS
    rig.finish(batch)
    (reply,) = rig.take(Reply)
    assert (reply.request_id, reply.first_row, reply.queue_us, reply.step_us) == (5, 0, 0, 5000)
    np.testing.assert_array_equal(reply.rows.view(np.float32), [oracle_vector([1, 2]), oracle_vector([3])])


def test_what_arrives_while_both_slots_are_taken_forms_one_batch(rig: Rig) -> None:
    for request_id in range(1, 6):
        rig.request(request_id, [request_id])
    first, second = rig.take(Batch)
    assert (ids(first), ids(second)) == ([1], [2])
    rig.finish(first)
    (third,) = rig.take(Batch)
    assert ids(third) == [3, 4, 5]


def test_requests_that_come_together_run_in_one_batch_and_each_is_answered(rig: Rig) -> None:
    rig.gateway(together(make_request(1, [1]), make_request(2, [2], [3, 4]), make_request(3, [5])))
    (batch,) = rig.take(Batch)
    assert batch.lengths.tolist() == [1, 1, 2, 1]
    rig.finish(batch)
    replies = {reply.request_id: reply.rows.view(np.float32).tolist() for reply in rig.take(Reply)}
    assert replies == {
        1: [oracle_vector([1]).tolist()],
        2: [oracle_vector([2]).tolist(), oracle_vector([3, 4]).tolist()],
        3: [oracle_vector([5]).tolist()],
    }


def test_of_requests_that_come_together_each_is_let_in_by_itself(rig: Rig) -> None:
    rig.request(4, [9])
    rig.take(Batch)
    rig.gateway(
        together(
            make_request(1, [1]),
            make_request(2, [2], deadline_ns=rig.now_ns),  # over
            make_request(4, [9]),  # here already
            make_request(3, [3]),
        )
    )
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(2, "deadline_exceeded")]
    (batch,) = rig.take(Batch)
    assert ids(batch) == [1, 3]


def test_requests_that_come_together_are_refused_as_if_they_had_come_one_by_one(metrics: Metrics) -> None:
    rng = random.Random(0)
    requests = [
        make_request(
            10 + number,
            [number] * rng.randint(1, 40),
            deadline_ns=int(rng.uniform(2, 20) * SECOND),
            opens=rng.random() < 0.8,
            lane=rng.choice(("online", "backfill")),
            tenant=rng.randrange(3),
        )
        for number in range(40)
    ]
    outcomes = []
    for size in (1, 5, 40):
        rig = Rig(metrics)
        rig.join()
        rig.hello()
        for blocker in (1, 2, 3):
            rig.request(blocker, [blocker] * 64)
        rig.finish(rig.take(Batch)[0], step_us=2_000_000)  # of 64 tokens: ten seconds for 320 that wait
        rig.take(Batch)
        for first in range(0, 40, size):
            rig.gateway(together(*requests[first : first + size]))
        outcomes.append([(failure.request_id, failure.code) for failure in rig.take(Failure)])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    codes = [code for _, code in outcomes[0]]
    assert (codes.count("overloaded"), codes.count("deadline_exceeded")) == (5, 9)


def test_requests_that_come_together_take_turns_by_tenant_and_lane_as_ever(rig: Rig) -> None:
    for blocker in (8, 9):
        rig.request(blocker, [blocker])
    first, second = rig.take(Batch)
    rig.gateway(
        together(
            make_request(1, [1] * 64, lane="backfill"),
            make_request(2, [2], tenant=1),
            make_request(3, [3], tenant=1),
            make_request(4, [4], tenant=2),
        )
    )
    rig.finish(first)
    (batch,) = rig.take(Batch)
    assert ids(batch) == [2, 4, 3]
    rig.finish(second)
    rig.live(1)
    (batch,) = rig.take(Batch)
    assert ids(batch) == [1] * 64


def test_batches_are_formed_once_for_all_that_has_been_heard(rig: Rig) -> None:
    actions = [rig.core.on_gateway_message(b"g0", make_request(number, [number]), rig.now_ns) for number in (1, 2, 3)]
    assert actions == [[], [], []]
    (action,) = rig.core.form_batches(rig.now_ns)
    assert not isinstance(action, Kill)
    assert isinstance(action.message, Batch)
    assert ids(action.message) == [1, 2, 3]
    assert rig.core.form_batches(rig.now_ns) == []


@pytest.mark.slow
def test_no_message_that_can_be_read_stops_the_scheduler_whatever_it_says(metrics: Metrics) -> None:
    rng = random.Random(1)
    request = make_request(1, [1024, 1025], [1026])
    from_gateways = [
        Join(PROTOCOL_VERSION, "g0", 1),
        request,
        dataclasses.replace(request, request_id=2, lane="backfill", encoding="int8"),
        Requests.of([dataclasses.replace(request, request_id=number) for number in (4, 5)]),
        make_request(3, *SEQUENCES, spans=SPANS),
        Cancel(1),
        Beat(EPOCH, 0),
        Goodbye("leaves"),
    ]
    from_workers = [
        Hello(PROTOCOL_VERSION, "w9", 1, FACTS),
        Result(EPOCH, 1, 0, 10, True, np.zeros(0, dtype=np.int32), np.ones((2, 64), dtype=np.uint8)),
        BatchFailed(EPOCH, 1, "raised"),
        Beat(EPOCH, 0),
        Goodbye("leaves"),
    ]
    understood = 0
    for number in range(20_000):
        if number % 200 == 0:
            rig = Rig(metrics)
        rig.hello()  # again: whoever spoke for them may have made them leave
        rig.join()
        is_gateways = rng.random() < 0.7
        frames = mutated(rng, from_gateways if is_gateways else from_workers)
        try:
            message = decode(frames)
        except ProtocolError:
            continue
        understood += 1
        if is_gateways:
            rig.gateway(message)
        else:
            rig.worker(message, rng.choice([b"w0", b"w9"]))
        for batch in rig.take(Batch, b"w0"):
            rig.finish(batch)
        rig.tick(rng.randrange(300) * MS)
        for _, sent in rig.sent():
            encode(sent)
    assert understood > 1000


def test_a_request_whose_deadline_passes_in_the_queue_is_504_and_never_runs(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    first, _ = rig.take(Batch)
    rig.request(3, [3], deadline_s=2)
    rig.now_ns = 2 * SECOND
    rig.finish(first)
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(3, "deadline_exceeded")]
    assert rig.take(Batch) == []


def test_a_full_queue_refuses_what_opens_and_takes_what_belongs_to_an_accepted_request(rig: Rig) -> None:
    for _ in range(3):
        rig.request(1, [1] * 10)
        (batch,) = rig.take(Batch)
        rows = oracle_rows(batch)
        rig.worker(
            Result(EPOCH, batch.batch_id, 0, 6_000_000, True, np.zeros(0, dtype=np.int32), rows)
        )  # 6 s for ten tokens
    for request_id in range(2, 5):  # one that runs, and two that wait
        rig.request(request_id, [request_id] * 10)
    assert rig.take(Failure) == []
    rig.request(5, [5])
    (failure,) = rig.take(Failure)
    assert (failure.request_id, failure.code, failure.retry_after_ms) == (5, "overloaded", 12_000)
    rig.request(6, [6], opens=False)
    assert rig.take(Failure) == []


def test_whoever_refuses_a_request_its_gateway_is_told_of_the_full_queue_at_once_and_others_by_the_pulse(
    rig: Rig,
) -> None:
    rig.join(b"g1")
    learn(rig)  # a millisecond a token
    for request_id in range(1, 159):
        rig.request(request_id, [2] * 64, tenant=9)
    rig.request(159, [2] * 640, tenant=9, opens=False)
    rig.take(Ping)
    rig.request(160, [2] * 64, tenant=9)
    (failure,) = rig.take(Failure)[-1:]
    assert (failure.request_id, failure.code) == (160, "overloaded")
    (told,) = rig.take(Ping, b"g0")
    ((lane, tenant, until_ns, done_ns),) = told.full.tolist()
    assert (lane, tenant) == (0, 9)
    assert rig.now_ns + 800 * MS < until_ns < rig.now_ns + 1000 * MS
    assert until_ns + 9_750 * MS < done_ns < until_ns + 9_850 * MS
    assert rig.take(Ping, b"g1") == []
    rig.tick(250 * MS)
    assert rig.take(Ping, b"g1")[-1].full.tolist() == told.full.tolist()
    rig.tick(1000 * MS)
    assert rig.take(Ping, b"g1")[-1].full.tolist() == []


def test_what_would_begin_after_its_deadline_is_not_sent_to_a_worker(rig: Rig) -> None:
    learn(rig)  # a millisecond a token
    rig.request(1, [1] * 64)
    rig.request(2, [2] * 64, deadline_s=rig.now_ns / SECOND + 0.063)
    rig.request(3, [3] * 64, deadline_s=rig.now_ns / SECOND + 0.2)
    rig.tick(rig.core.next_tick_ns() - rig.now_ns)  # the second slot is filled as late as it can be
    assert [ids(batch)[0] for batch in rig.take(Batch)] == [1, 3]
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(2, "deadline_exceeded")]


def test_without_a_worker_requests_are_held_then_failed_when_none_comes_back(rig: Rig) -> None:
    rig.worker_lost()
    rig.request(1, [1])
    rig.live(14)
    assert rig.take(Failure) == []
    rig.live(1)
    assert [failure.code for failure in rig.take(Failure)] == ["no_capacity"]
    rig.request(2, [2])
    assert [failure.code for failure in rig.take(Failure)] == ["no_capacity"]
