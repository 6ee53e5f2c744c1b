"""Lost workers and failed batches, through the state machine: what runs again, and what is given up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from common.wire.messages import (
    NO_NUMBERS,
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Reply,
    Result,
)
from tests.fakes import FACTS, oracle_row, oracle_rows
from tests.scheduler.rig import (
    EPOCH,
    MS,
    SECOND,
    SEQUENCES,
    SPANS,
    Rig,
    assert_rows,
    ids,
    make_request,
)


def die_of(rig: Rig, token: int) -> int:
    """Let workers die of a sequence of this token, as long as any is given one; how many did. One is there after it."""
    for deaths in range(10):
        peer = b"w%d" % deaths
        held = rig.take(Batch, peer)
        while held and token not in ids(held[0]):
            rig.finish(held.pop(0), peer)
            held += rig.take(Batch, peer)
        if not held:
            return deaths
        rig.worker_lost(peer)
        rig.hello(b"w%d" % (deaths + 1))
    raise AssertionError("it goes on killing")


def accuse(rig: Rig) -> None:
    """Have an input in the hands of three workers in turn whose connections end; a fourth is idle."""
    rig.request(1, [666])
    for number in range(3):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        assert [ids(batch) for batch in rig.take(Batch, peer)] == [[666]]
        rig.worker_lost(peer, "disconnected")
        rig.worker(Hello(PROTOCOL_VERSION, following.decode(), 2 + number, FACTS), following)
    assert (rig.take(Batch), rig.take(Failure)) == ([], [])


def test_a_lost_workers_spans_run_again_next_to_requests_without(rig: Rig) -> None:
    rig.worker(Goodbye("draining"))
    rig.gateway(make_request(3, *SEQUENCES, spans=SPANS))
    rig.request(4, [4, 5])
    rig.hello(b"w1")
    assert [batch.num_rows for batch in rig.take(Batch, b"w1")] == [5]
    rig.worker_lost(b"w1")
    rig.hello(b"w2")
    batches = rig.take(Batch, b"w2")
    while batches:
        rig.finish(batches.pop(0), b"w2")
        batches += rig.take(Batch, b"w2")
    replies = rig.take(Reply)
    assert_rows([reply for reply in replies if reply.request_id == 3], SEQUENCES, SPANS)
    assert_rows([reply for reply in replies if reply.request_id == 4], [[4, 5]], [[(0, 2)]])


def test_of_a_batch_with_spans_that_fails_the_sequence_at_fault_is_named_and_its_neighbours_are_served(
    rig: Rig,
) -> None:
    rig.request(100, [50])
    rig.request(101, [50])
    held = rig.take(Batch)
    rig.gateway(make_request(1, *SEQUENCES, *SEQUENCES, *SEQUENCES, spans=SPANS * 3))
    rig.gateway(make_request(2, [1, 1], [666, 2, 3], spans=[[(0, 1), (1, 2)], [(0, 1), (2, 3)]]))
    rig.request(3, [9, 9])
    while held:
        batch = held.pop(0)
        if 666 in ids(batch):
            rig.worker(BatchFailed(EPOCH, batch.batch_id, "raised"))
        else:
            rig.finish(batch)
        held += rig.take(Batch)
    replies = rig.take(Reply)
    assert_rows([reply for reply in replies if reply.request_id == 1], SEQUENCES * 3, SPANS * 3)
    assert_rows([reply for reply in replies if reply.request_id == 3], [[9, 9]], [[(0, 2)]])
    (failure,) = rig.take(Failure)
    assert (failure.request_id, failure.code, failure.sequence) == (2, "internal_error", 1)


def test_a_lost_workers_sequences_run_again_before_what_came_later(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    rig.request(3, [3])
    rig.take(Batch)
    rig.worker_lost()
    assert rig.take(Failure) == []
    rig.hello(b"w1")
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[1], [2, 3]]


def test_a_lost_workers_sequences_run_again_in_the_encoding_that_was_asked_for(rig: Rig) -> None:
    rig.gateway(make_request(1, [1], encoding="int8"))
    rig.take(Batch)
    rig.worker_lost()
    rig.hello(b"w1")
    (again,) = rig.take(Batch, b"w1")
    rig.finish(again, b"w1")
    (reply,) = rig.take(Reply)
    np.testing.assert_array_equal(reply.rows.view(np.int8), [oracle_row([1], "int8")])


def test_an_input_that_kills_three_workers_is_given_up_and_its_neighbours_are_served(rig: Rig) -> None:
    poison, innocents = [666], [[token] for token in range(1, 12)]
    rig.request(100, [50])
    rig.request(101, [50])
    first, second = rig.take(Batch)
    rig.request(1, *innocents[:5], poison, *innocents[5:])
    rig.finish(first)
    rig.finish(second)
    rig.take(Reply)
    deaths = 0
    for incarnation in range(40):
        peer = b"w%d" % incarnation
        held = rig.take(Batch, peer)
        while held:
            if 666 in ids(held[0]):
                rig.worker_lost(peer)
                deaths += 1
                rig.hello(b"w%d" % (incarnation + 1))
                break
            rig.finish(held.pop(0), peer)
            held += rig.take(Batch, peer)
    assert deaths == 3
    (failure,) = rig.take(Failure)
    assert (failure.code, failure.sequence) == ("input_quarantined", 5)


def test_an_input_that_workers_died_of_is_refused_without_running_when_it_is_sent_again(rig: Rig) -> None:
    rig.request(1, [666])
    assert die_of(rig, 666) == 3
    rig.request(2, [1], [666], [2])
    rig.request(3, [666], opens=False)
    rig.request(4, [667])
    refused = [(failure.request_id, failure.code, failure.sequence) for failure in rig.take(Failure)]
    assert refused == [(1, "input_quarantined", 0), (2, "input_quarantined", 1), (3, "input_quarantined", 0)]
    assert [ids(batch) for batch in rig.take(Batch)] == [[667]]


def test_copies_of_a_deadly_input_cost_no_workers_of_their_own(rig: Rig) -> None:
    rig.request(1, [666])
    rig.request(2, [5], [666])
    rig.request(3, [666], lane="backfill")
    rig.request(4, [6])
    assert die_of(rig, 666) == 3
    refused = [(failure.request_id, failure.code, failure.sequence) for failure in rig.take(Failure)]
    assert sorted(refused) == [
        (1, "input_quarantined", 0),
        (2, "input_quarantined", 1),
        (3, "input_quarantined", 0),
    ]
    assert [reply.request_id for reply in rig.take(Reply)] == [4]


def test_a_deadly_input_whose_client_has_left_is_remembered_all_the_same(rig: Rig) -> None:
    rig.request(1, [666])
    for peer, following in ((b"w0", b"w1"), (b"w1", b"w2")):
        rig.take(Batch, peer)
        rig.worker_lost(peer)
        rig.hello(following)
    rig.gateway(Cancel(1))
    rig.worker_lost(b"w2")
    rig.hello(b"w3")
    rig.take(Batch)
    rig.request(2, [666])
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(2, "input_quarantined")]


def test_a_deadly_input_that_comes_again_and_again_with_too_little_time_costs_three_workers(rig: Rig) -> None:
    for number in range(3):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        rig.request(number, [666], [number], deadline_s=rig.now_ns / SECOND + 1)
        first, *_ = rig.take(Batch, peer)
        assert ids(first) == [[666, 0], [666], [666]][number]  # with others, with suspects, alone
        rig.worker_lost(peer)
        rig.tick(2 * SECOND)
        rig.gateway(Beat(EPOCH, 0))
        rig.hello(following)
    rig.take(Failure)
    rig.request(7, [1], [666])
    refused = [(failure.request_id, failure.code, failure.sequence) for failure in rig.take(Failure)]
    assert refused == [(7, "input_quarantined", 1)]
    assert rig.take(Batch) == []


def test_a_suspect_that_was_answered_runs_in_company_again(rig: Rig) -> None:
    rig.request(1, [5])
    rig.take(Batch)
    rig.worker_lost()
    rig.hello(b"w1")
    (batch,) = rig.take(Batch, b"w1")
    rig.finish(batch, b"w1")
    rig.request(2, [4], [5], [6])
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[4, 5, 6]]


def test_an_input_on_which_the_model_fails_is_not_remembered(rig: Rig) -> None:
    for request_id in (1, 2):
        rig.request(request_id, [666])
        for _ in range(3):
            (batch,) = rig.take(Batch)
            rig.worker(BatchFailed(EPOCH, batch.batch_id, "raised"))
    assert [failure.code for failure in rig.take(Failure)] == ["internal_error"] * 2


def test_a_batch_that_fails_three_times_fails_its_request_and_the_worker_stays(rig: Rig) -> None:
    rig.request(1, [1])
    for _ in range(3):
        (batch,) = rig.take(Batch)
        rig.worker(BatchFailed(EPOCH, batch.batch_id, "raised"))
    assert [failure.code for failure in rig.take(Failure)] == ["internal_error"]
    rig.request(2, [2])
    assert len(rig.take(Batch, b"w0")) == 1


def test_an_input_whose_third_worker_is_gone_is_in_quarantine_once_that_has_died(rig: Rig) -> None:
    accuse(rig)
    assert rig.core.knows(b"w2")  # so that its end is heard of
    rig.tick(4 * SECOND)
    rig.worker_lost(b"w2")
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(1, "input_quarantined")]
    assert not rig.core.knows(b"w2")
    rig.worker(Beat(EPOCH, 0), b"w3")
    rig.request(2, [666])
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(2, "input_quarantined")]
    assert rig.take(Batch) == []


@pytest.mark.parametrize("peer", [b"w2", b"again"])
def test_an_input_is_not_to_blame_where_the_worker_comes_back_whose_connection_had_gone(rig: Rig, peer: bytes) -> None:
    accuse(rig)
    rig.worker_lost(b"w3", "goodbye")
    for _ in range(5):
        rig.tick(750 * MS)
        rig.worker(Hello(PROTOCOL_VERSION, "w2", 3, FACTS), peer)
        assert [ids(batch) for batch in rig.take(Batch, peer)] == [[666]]
        rig.worker_lost(peer, "disconnected")
    rig.tick(750 * MS)
    rig.worker(Hello(PROTOCOL_VERSION, "w2", 3, FACTS), peer)
    (batch,) = rig.take(Batch, peer)
    rig.finish(batch, peer)
    assert ([reply.request_id for reply in rig.take(Reply)], rig.take(Failure)) == ([1], [])


def test_an_input_runs_again_where_nothing_is_heard_of_the_worker_whose_connection_is_gone(rig: Rig) -> None:
    accuse(rig)
    for _ in range(20):
        assert rig.take(Batch) == []
        rig.tick(250 * MS)
        rig.worker(Beat(EPOCH, 0), b"w3")
        rig.gateway(Beat(EPOCH, 1))
    (batch,) = rig.take(Batch, b"w3")
    rig.worker_lost(b"w2")  # too late to say anything
    rig.finish(batch, b"w3")
    assert ([reply.request_id for reply in rig.take(Reply)], rig.take(Failure)) == ([1], [])


def test_an_input_is_remembered_though_its_client_left_before_its_worker_was_known_to_be_dead(rig: Rig) -> None:
    accuse(rig)
    rig.gateway(Cancel(1))
    rig.worker_lost(b"w2")
    rig.request(2, [666])
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(2, "input_quarantined")]


def test_an_input_that_was_held_back_does_not_run_on_the_model_that_has_come_meanwhile(rig: Rig) -> None:
    accuse(rig)
    rig.worker_lost(b"w3", "goodbye")
    rig.worker(Hello(PROTOCOL_VERSION, "w4", 9, dataclasses.replace(FACTS, fingerprint="other")), b"w4")
    rig.worker(Hello(PROTOCOL_VERSION, "w2", 3, FACTS), b"w2")  # is refused, and lives
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(1, "no_capacity")]
    assert rig.take(Batch) == []


def test_what_waited_behind_an_input_that_is_held_back_runs_at_once(rig: Rig) -> None:
    rig.request(1, [666])
    for number in range(2):
        rig.take(Batch)
        rig.worker_lost(b"w%d" % number)
        rig.hello(b"w%d" % (number + 1))
    rig.request(2, [2])
    assert [ids(batch) for batch in rig.take(Batch, b"w2")] == [[666], [2]]
    rig.worker_lost(b"w2", "disconnected")
    rig.worker(Hello(PROTOCOL_VERSION, "w3", 2, FACTS), b"w3")  # another process
    assert [ids(batch) for batch in rig.take(Batch, b"w3")] == [[2]]


def test_an_input_without_room_alone_is_named_and_its_neighbours_run_again_without_blame(rig: Rig) -> None:
    rig.request(100, [50])
    rig.request(101, [50])
    held = rig.take(Batch)
    rig.request(1, [1], [2])
    rig.request(2, [3], [4] * 30, [5])
    rig.request(3, [6], [7])
    for batch in held:
        rig.finish(batch)
    rig.take(Reply)
    (batch,) = rig.take(Batch)
    rig.worker(BatchFailed(EPOCH, batch.batch_id, "no memory", 3))
    assert [(f.request_id, f.code, f.sequence) for f in rig.take(Failure)] == [(2, "input_too_large_for_device", 1)]
    (batch,) = rig.take(Batch)
    assert ids(batch) == [1, 2, 6, 7]  # at once, where suspects would have been parted
    rig.finish(batch)
    assert [reply.request_id for reply in rig.take(Reply)] == [1, 3]
    assert rig.killed == []


def test_an_input_as_long_as_others_that_ran_there_is_tried_again_and_then_told_to_come_back(rig: Rig) -> None:
    rig.request(1, [1] * 30)
    rig.finish(rig.take(Batch)[0])
    rig.request(2, [2], [3] * 30)
    failed_ns = []
    for _ in range(4):
        while batches := rig.take(Batch):
            for batch in batches:
                if 3 in batch.token_ids:
                    failed_ns.append(rig.now_ns)
                    rig.worker(BatchFailed(EPOCH, batch.batch_id, "no memory", batch.lengths.tolist().index(30)))
                else:
                    rig.finish(batch)
        rig.live(1)
    assert [(ns - failed_ns[0]) // SECOND for ns in failed_ns] == [0, 1, 2]
    (failure,) = rig.take(Failure)
    assert (failure.request_id, failure.code, failure.sequence) == (2, "no_capacity", 1)
    assert failure.retry_after_ms == 5000


def test_an_input_that_one_worker_has_no_memory_for_runs_on_another_that_has_run_as_long_ones(rig: Rig) -> None:
    rig.request(1, [1] * 30)
    rig.finish(rig.take(Batch)[0])
    rig.hello(b"w1")
    rig.request(2, [2] * 10)
    rig.request(3, [3] * 30)
    (other,) = rig.take(Batch, b"w0")
    (batch,) = rig.take(Batch, b"w1")
    rig.worker(BatchFailed(EPOCH, batch.batch_id, "no memory", 0), b"w1")
    assert rig.take(Failure) == []
    rig.finish(other)
    rig.finish(next(batch for batch in rig.take(Batch) if 3 in batch.token_ids))
    assert [reply.request_id for reply in rig.take(Reply)] == [1, 2, 3]


def test_naming_a_sequence_that_the_batch_does_not_have_ends_the_worker(rig: Rig) -> None:
    rig.request(1, [1], [2])
    (batch,) = rig.take(Batch)
    rig.worker(BatchFailed(EPOCH, batch.batch_id, "no memory", 2))
    assert rig.killed == [b"w0"]
    assert rig.take(Failure) == []


def test_a_worker_that_says_goodbye_hands_its_work_back_without_blame(rig: Rig) -> None:
    rig.request(1, [1])
    rig.take(Batch)
    for incarnation in range(1, 6):
        rig.worker(Goodbye("draining"), b"w%d" % (incarnation - 1))
        rig.hello(b"w%d" % incarnation)
    assert rig.take(Failure) == []


@pytest.mark.parametrize(("epoch", "held"), [(EPOCH, 0), (EPOCH - 1, 2)])
def test_an_input_that_never_arrived_is_not_blamed_for_its_workers_death(rig: Rig, epoch: int, held: int) -> None:
    rig.request(1, [1])
    for number in range(5):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        assert [ids(batch) for batch in rig.take(Batch, peer)] == [[1]]
        for _ in range(2):
            rig.tick(250 * MS)
            rig.worker(Beat(epoch, held), peer)  # it holds none, or only what another scheduler had sent
        rig.gateway(Beat(EPOCH, 1))
        rig.worker_lost(peer)
        rig.hello(following)
    rig.request(2, [2])
    first, _ = rig.take(Batch, b"w5")
    rig.finish(first, b"w5")
    assert [reply.request_id for reply in rig.take(Reply)] == [1]
    assert rig.take(Failure) == []


def test_an_input_that_could_not_be_sent_is_not_blamed_for_the_end_of_who_was_to_run_it(rig: Rig) -> None:
    rig.request(1, [1])
    for number in range(5):  # workers that have died, and whose introduction is found after that
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        (batch,) = rig.take(Batch, peer)
        rig.core.on_undelivered(peer, batch)
        rig.worker_lost(peer, ("disconnected", "exited")[number % 2])
        rig.hello(following)
    (batch,) = rig.take(Batch, b"w5")
    rig.finish(batch, b"w5")
    assert ([reply.request_id for reply in rig.take(Reply)], rig.take(Failure)) == ([1], [])


def test_an_input_that_runs_is_blamed_though_the_one_behind_it_could_not_be_sent(rig: Rig) -> None:
    rig.request(1, [666])
    rig.request(2, [2])
    for number in range(3):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        rig.core.on_undelivered(peer, rig.take(Batch, peer)[-1])
        rig.worker_lost(peer)
        rig.hello(following)
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(1, "input_quarantined")]


@pytest.mark.parametrize(
    "beats",
    [
        pytest.param([(1, 0)], id="crossed"),
        pytest.param([(1, 0), (2, 0)], id="read at once"),
        pytest.param([(1, 0), (251, 1)], id="arrived"),
    ],
)
def test_a_beat_that_may_be_older_than_a_batch_does_not_clear_its_input(rig: Rig, beats: list[tuple[int, int]]) -> None:
    rig.request(1, [666])
    for number in range(3):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        rig.take(Batch, peer)
        sent_ns = rig.now_ns
        for after_ms, held in beats:
            rig.tick(sent_ns + after_ms * MS - rig.now_ns)
            rig.worker(Beat(EPOCH, held), peer)
        rig.tick(500 * MS)
        rig.worker_lost(peer)
        rig.hello(following)
    assert [failure.code for failure in rig.take(Failure)] == ["input_quarantined"]


def test_an_answer_that_makes_no_sense_is_held_against_its_input_whatever_beats_say(rig: Rig) -> None:
    rig.request(1, [666])
    for number in range(3):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        (batch,) = rig.take(Batch, peer)
        for _ in range(2):
            rig.tick(250 * MS)
            rig.worker(Beat(EPOCH, 0), peer)
        rig.worker(Result(EPOCH, batch.batch_id, 0, 1, True, NO_NUMBERS, oracle_rows(batch)[:0]), peer)
        rig.hello(following)
    assert [failure.code for failure in rig.take(Failure)] == ["input_quarantined"]


def test_failures_without_a_death_put_nothing_in_quarantine(rig: Rig) -> None:
    rig.request(1, [1])
    for _ in range(2):
        (batch,) = rig.take(Batch)
        rig.worker(BatchFailed(EPOCH, batch.batch_id, "raised"))
    (batch,) = rig.take(Batch)
    rig.worker_lost()  # as a deploy's kill may have it
    rig.hello(b"w1")
    (batch,) = rig.take(Batch, b"w1")
    rig.finish(batch, b"w1")
    assert [reply.request_id for reply in rig.take(Reply)] == [1]
    assert rig.take(Failure) == []
