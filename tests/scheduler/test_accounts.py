"""Gateways and their accounts, through the state machine: messages and times in, actions out."""

from __future__ import annotations

import dataclasses

from common.metrics import Metrics
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Join,
    Ping,
    Reply,
    Welcome,
)
from tests.fakes import FACTS
from tests.scheduler.rig import (
    EPOCH,
    MS,
    SECOND,
    Rig,
    ids,
    make_request,
    together,
)


def test_a_gateway_learns_the_model_when_the_first_worker_says_hello(metrics: Metrics) -> None:
    rig = Rig(metrics)
    rig.join()
    assert [welcome.facts for welcome in rig.take(Welcome, b"g0")] == [None]
    rig.hello()
    assert [welcome.facts for welcome in rig.take(Welcome, b"g0")] == [FACTS]


def test_a_join_is_answered_as_one_and_an_announcement_is_not(rig: Rig) -> None:
    rig.join()
    assert [welcome.answers_join for welcome in rig.take(Welcome)] == [True]
    rig.hello(b"w1")
    assert [welcome.answers_join for welcome in rig.take(Welcome)] == [False]


def test_a_gateway_that_joins_over_a_new_connection_leaves_nothing_under_the_old_one(rig: Rig) -> None:
    rig.request(1, [1])
    (batch,) = rig.take(Batch)
    rig.gateway(Join(PROTOCOL_VERSION, "g0", 1), b"again")
    rig.gateway(make_request(1, [1]), b"again")
    rig.finish(batch)
    assert rig.take(Reply, b"g0") == []
    (again,) = rig.take(Batch)
    rig.finish(again)
    assert len(rig.take(Reply, b"again")) == 1


def test_a_request_that_is_sent_twice_runs_once(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(1, [1], opens=False)
    assert len(rig.take(Batch)) == 1


def test_when_the_model_is_replaced_what_was_tokenized_for_the_old_one_is_failed(rig: Rig) -> None:
    rig.worker(Goodbye("draining"))
    rig.request(1, [1])
    rig.hello(b"w1", dataclasses.replace(FACTS, fingerprint="other"))
    assert [failure.code for failure in rig.take(Failure)] == ["no_capacity"]
    assert rig.take(Batch) == []


def test_what_was_tokenized_for_another_model_never_runs_whenever_it_comes(metrics: Metrics) -> None:
    # A scheduler that has just begun knows no model yet: the gateway's old requests come before the new worker.
    rig = Rig(metrics)
    rig.join()
    old = dataclasses.replace(make_request(1, [1]), fingerprint="old", opens=False)
    rig.gateway(old)
    rig.hello()
    rig.gateway(dataclasses.replace(old, request_id=2))
    assert [failure.code for failure in rig.take(Failure)] == ["no_capacity", "no_capacity"]
    assert rig.take(Batch) == []


def test_messages_of_peers_that_never_joined_are_dropped(rig: Rig) -> None:
    rig.gateway(make_request(1, [1]), b"stranger")
    rig.worker(Beat(EPOCH, 0), b"stranger")
    assert rig.take(Batch) == []


def test_of_requests_that_came_together_one_is_cancelled_and_the_others_run(rig: Rig) -> None:
    for blocker in (8, 9):
        rig.request(blocker, [blocker])
    first, _ = rig.take(Batch)
    rig.gateway(together(make_request(1, [1]), make_request(2, [2]), make_request(3, [3])))
    rig.gateway(Cancel(2))
    rig.finish(first)
    (batch,) = rig.take(Batch)
    assert ids(batch) == [1, 3]


def test_a_gateways_beat_that_is_older_than_the_answers_misses_nothing(rig: Rig) -> None:
    for number in range(1, 13):
        rig.request(number, [number])
        (batch,) = rig.take(Batch)
        rig.finish(batch)
        rig.tick(250 * MS)
        rig.worker(Beat(EPOCH, 0))
        rig.gateway(Beat(EPOCH, 1))  # of when it waited for that one
    rig.request(99, [99])
    assert [ids(batch) for batch in rig.take(Batch)] == [[99]]


def test_a_cancelled_request_frees_its_place_before_it_reaches_a_worker(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    first, _ = rig.take(Batch)
    rig.request(3, [3])
    rig.request(4, [4])
    rig.gateway(Cancel(3))
    rig.finish(first)
    assert [ids(batch) for batch in rig.take(Batch)] == [[4]]


def test_a_lost_gateways_requests_are_dropped(rig: Rig) -> None:
    rig.join(b"g1")
    rig.request(1, [1])
    rig.request(2, [2])
    first, second = rig.take(Batch)
    rig.request(3, [3])
    rig.gateway_lost()
    rig.finish(first)
    rig.finish(second)
    assert (rig.take(Batch), rig.take(Reply)) == ([], [])


def test_a_silent_gateway_is_forgotten_and_told_to_send_again_when_it_joins(rig: Rig) -> None:
    for _ in range(5):
        rig.tick(SECOND)
        rig.worker(Beat(EPOCH, 0))
    rig.join()
    assert [welcome.answers_join for welcome in rig.take(Welcome)] == [True]


def test_a_gateway_that_waits_for_more_than_there_is_here_is_forgotten_so_that_it_joins_again(rig: Rig) -> None:
    rig.request(1, [1])
    (batch,) = rig.take(Batch)
    for _ in range(9):  # two seconds
        rig.tick(250 * MS)
        rig.worker(Beat(EPOCH, 1))
        rig.gateway(Beat(EPOCH, 2))  # another request was lost on its way
    rig.take(Ping)
    rig.tick(250 * MS)
    assert rig.take(Ping, b"g0") == []
    rig.finish(batch)
    assert rig.take(Reply) == []
    rig.join()
    assert [welcome.answers_join for welcome in rig.take(Welcome)] == [True]


def test_a_gateway_whose_answers_are_on_their_way_is_not_forgotten(rig: Rig) -> None:
    for _ in range(12):
        rig.gateway(Beat(EPOCH, 1))
        rig.tick(250 * MS)
        rig.worker(Beat(EPOCH, 0))
        rig.gateway(Beat(EPOCH, 0))
    for _ in range(12):
        rig.gateway(Beat(EPOCH, 1))  # found at once, after a standstill
    rig.take(Ping)
    rig.tick(250 * MS)
    assert len(rig.take(Ping, b"g0")) == 1
