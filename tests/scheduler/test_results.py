"""How results become replies, through the state machine: each request gets its own rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import (
    Batch,
    BatchFailed,
    Failure,
    Reply,
    Request,
    Result,
    StepTimes,
    Trace,
)
from common.wire.packing import Replies
from common.wire.rows import BINARY, FLOAT32
from scheduler.actions import Kill
from tests.fakes import DIMENSIONS, FACTS, oracle_row, oracle_rows, oracle_vector
from tests.scheduler.rig import (
    EPOCH,
    SEQUENCES,
    SPANS,
    Rig,
    assert_rows,
    ids,
    in_pieces,
    make_request,
)


def test_single_rows_of_a_batch_travel_together_to_each_gateway_and_longer_parts_alone(rig: Rig) -> None:
    rig.join(b"g1")
    for blocker in (1, 2):
        rig.request(blocker, [blocker])
    for request_id, peer, sequences in (
        (3, b"g0", [[3]]),
        (4, b"g1", [[4]]),
        (5, b"g0", [[5], [6]]),
        (6, b"g0", [[7]]),
    ):
        rig.gateway(make_request(request_id, *sequences), peer)
    first, second = rig.take(Batch)
    rig.finish(first)
    (batch,) = rig.take(Batch)
    rig.finish(second)
    rig.take(Reply)

    result = Result(EPOCH, batch.batch_id, 0, 5000, True, np.zeros(0, dtype=np.int32), oracle_rows(batch))
    actions = rig.core.on_worker_message(b"w0", result, rig.now_ns)

    alone, together, other = [action for action in actions if not isinstance(action, Kill)]
    assert [action.peer for action in (alone, together, other)] == [b"g0", b"g0", b"g1"]
    assert isinstance(together.message, Replies)
    assert [(reply.request_id, reply.first_row) for reply in together.message.each()] == [(3, 0), (6, 0)]
    np.testing.assert_array_equal(together.message.rows.view(np.float32), [oracle_vector([3]), oracle_vector([7])])
    assert isinstance(alone.message, Reply)
    assert isinstance(other.message, Reply)
    assert [(reply.request_id, len(reply.rows)) for reply in (alone.message, other.message)] == [(5, 2), (4, 1)]


def test_a_long_request_is_answered_in_parts_whose_places_are_told(rig: Rig) -> None:
    rig.request(1, *[[token] * 40 for token in (1, 2, 3)])  # the budget is 64 tokens
    first, second = rig.take(Batch)
    rig.finish(first)
    (third,) = rig.take(Batch)
    rig.finish(second)
    rig.finish(third)
    assert [reply.first_row for reply in rig.take(Reply)] == [0, 1, 2]


def test_options_travel_with_each_sequence(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [1])
    plain = make_request(3, [3], [4])
    rig.gateway(dataclasses.replace(plain, dimensions=2, normalize=False, encoding="binary"))
    rig.request(4, [5])
    first, _ = rig.take(Batch)
    rig.finish(first)
    (batch,) = rig.take(Batch)
    assert (batch.dimensions.tolist(), batch.normalize.tolist()) == ([2, 2, DIMENSIONS], [0, 0, 1])
    assert batch.encodings.tolist() == [BINARY, BINARY, FLOAT32]


def test_one_batch_runs_what_was_asked_for_in_different_encodings_and_each_reply_begins_with_its_own(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [1])
    rig.gateway(make_request(3, [3], [4], encoding="int8"))
    rig.gateway(make_request(4, [5], encoding="binary"))
    rig.request(5, [6])
    first, _ = rig.take(Batch)
    rig.finish(first)
    rig.take(Reply)
    (batch,) = rig.take(Batch)
    rig.finish(batch)
    integers, bits, floats = rig.take(Reply)
    assert {reply.rows.shape[1] for reply in (integers, bits, floats)} == {4 * DIMENSIONS}
    np.testing.assert_array_equal(
        integers.rows[:, :DIMENSIONS].view(np.int8), [oracle_row([3], "int8"), oracle_row([4], "int8")]
    )
    np.testing.assert_array_equal(bits.rows[:, : DIMENSIONS // 8], [oracle_row([5], "binary")])
    np.testing.assert_array_equal(floats.rows.view(np.float32), [oracle_vector([6])])


@pytest.mark.parametrize(("encoding", "num_bytes"), [("int8", DIMENSIONS), ("binary", DIMENSIONS // 8)])
def test_rows_are_no_wider_than_the_widest_of_their_batch(rig: Rig, encoding: str, num_bytes: int) -> None:
    rig.gateway(make_request(1, [1], encoding=encoding))
    (batch,) = rig.take(Batch)
    rig.finish(batch)
    (reply,) = rig.take(Reply)
    assert reply.rows.shape == (1, num_bytes)
    assert rig.killed == []


def test_the_rows_of_a_reply_are_a_piece_of_the_result_and_no_copy(rig: Rig) -> None:
    rig.gateway(make_request(1, [1], [2], encoding="int8"))
    (batch,) = rig.take(Batch)
    rows = oracle_rows(batch)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 1, True, np.zeros(0, dtype=np.int32), rows))
    (reply,) = rig.take(Reply)
    assert np.shares_memory(reply.rows, rows)
    assert reply.rows.flags.c_contiguous


def test_a_nonfinite_row_fails_its_own_request_and_no_other(rig: Rig) -> None:
    rig.request(1, [9])
    rig.request(2, [9])
    first, _ = rig.take(Batch)
    rig.request(3, [1], [2], [3])
    rig.request(4, [4])
    rig.finish(first)
    (batch,) = rig.take(Batch)
    rig.take(Reply)
    rig.finish(batch, nonfinite=(1,))
    (failure,) = rig.take(Failure)
    assert (failure.request_id, failure.code, failure.sequence) == (3, "nonfinite_output", 1)
    assert [reply.request_id for reply in rig.take(Reply)] == [4]


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [
        ("float32", (2, 4 * DIMENSIONS)),
        ("float32", (1, 4 * DIMENSIONS - 1)),
        ("float32", (1, DIMENSIONS)),
        ("int8", (1, DIMENSIONS - 1)),
        ("int8", (1, 4 * DIMENSIONS)),
        ("binary", (1, 0)),
    ],
)
def test_a_result_of_the_wrong_shape_ends_the_worker_and_the_batch_runs_elsewhere(
    rig: Rig, encoding: str, shape: tuple[int, int]
) -> None:
    rig.gateway(make_request(1, [1], encoding=encoding))
    (batch,) = rig.take(Batch)
    rig.hello(b"w1")
    rows = np.zeros(shape, dtype=np.uint8)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 1, True, np.zeros(0, dtype=np.int32), rows))
    assert rig.killed == [b"w0"]
    assert rig.take(Reply) == []
    assert [ids(again) for again in rig.take(Batch, b"w1")] == [[1]]


def test_results_of_another_epoch_or_an_unknown_batch_change_nothing(rig: Rig) -> None:
    rig.request(1, [1])
    (batch,) = rig.take(Batch)
    rows = oracle_rows(batch)
    rig.worker(Result(EPOCH + 1, batch.batch_id, 0, 1, True, np.zeros(0, dtype=np.int32), rows))
    rig.worker(Result(EPOCH, batch.batch_id + 1, 0, 1, True, np.zeros(0, dtype=np.int32), rows))
    assert rig.take(Reply) == []
    rig.finish(batch)
    rig.finish(batch)
    assert len(rig.take(Reply)) == 1


@pytest.mark.parametrize("failed", [False, True], ids=["a result", "a failure"])
@pytest.mark.parametrize(
    "source",
    ["another epoch", "an unknown batch", "another worker", "a finished batch", "a stranger", "an earlier attempt"],
)
def test_what_does_not_answer_a_batch_of_its_sender_is_counted_and_changes_nothing(
    rig: Rig, metrics: Metrics, source: str, failed: bool
) -> None:
    def answer(batch: Batch, epoch: int = EPOCH) -> Message:
        if failed:
            return BatchFailed(epoch, batch.batch_id, "raised")
        return Result(epoch, batch.batch_id, 0, 5000, True, np.zeros(0, dtype=np.int32), oracle_rows(batch))

    rig.hello(b"w1")
    for request_id in range(6):
        rig.request(request_id, [1, 2])
    batches = rig.take(Batch, b"w0")
    late, late_peer = answer(batches[0]), b"w0"
    if source == "another epoch":
        late = answer(batches[0], EPOCH + 1)
    elif source == "an unknown batch":
        late = answer(dataclasses.replace(batches[0], batch_id=10**9))
    elif source == "another worker":
        late_peer = b"w1"
    elif source == "a finished batch":
        rig.finish(batches[0])
    elif source == "a stranger":
        late_peer = b"w9"
    else:  # the worker was given up and has come back as somebody new; what it held runs elsewhere, or again
        rig.worker_lost(b"w0")
        rig.hello(b"w0-again")
        late_peer = b"w0-again"
    for kind in (Reply, Replies, Failure, Batch):
        rig.take(kind)
    before, counted = state(rig), metrics.stale_messages._value.get()

    rig.worker(late, late_peer)

    assert state(rig) == before
    assert metrics.stale_messages._value.get() == counted + 1
    assert [rig.take(kind) for kind in (Reply, Replies, Failure, Batch)] == [[], [], [], []]
    assert rig.killed == []


def test_a_request_that_is_followed_hears_when_what_happened_before_it_hears_its_rows(rig: Rig) -> None:
    sent_ns = rig.now_ns - 5
    rig.gateway(follow(make_request(1, [1, 2]), sent_ns))
    arrived_ns = rig.now_ns
    (batch,) = rig.take(Batch)
    rig.now_ns += 1000
    rig.worker(step_times(batch, arrived_ns + 10))
    rig.finish(batch)

    (trace,) = rig.take(Trace)
    assert (trace.request_id, trace.batch_id, trace.worker) == (1, batch.batch_id, "w0")
    assert (trace.num_sequences, trace.num_tokens) == (1, 2)
    step = range(arrived_ns + 10, arrived_ns + 18)
    assert trace.times_ns.tolist() == [sent_ns, arrived_ns, arrived_ns, *step, arrived_ns + 1000]
    assert batch.times_ns.tolist() == [arrived_ns]
    assert [reply.request_id for reply in rig.take(Reply)] == [1]


def test_of_a_batch_only_those_hear_of_it_that_are_followed(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])  # both slots are taken
    first, second = rig.take(Batch)
    rig.request(3, [3])
    rig.gateway(follow(make_request(4, [4]), rig.now_ns))
    rig.finish(first)
    rig.finish(second)
    (batch,) = rig.take(Batch)
    rig.now_ns += 1000
    rig.worker(step_times(batch, rig.now_ns - 500))
    rig.finish(batch)

    assert (len(first.times_ns), len(second.times_ns), len(batch.times_ns)) == (0, 0, 1)
    assert [(trace.request_id, trace.num_sequences) for trace in rig.take(Trace)] == [(4, 2)]
    assert [reply.request_id for reply in rig.take(Reply)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [{"epoch": EPOCH + 1}, {"batch_id": 99}, {"times_ns": np.arange(8)}],
    ids=["of another epoch", "of another batch", "of another clock"],
)
def test_times_that_cannot_be_a_batchs_are_told_nobody_and_its_rows_arrive(rig: Rig, change: dict[str, object]) -> None:
    rig.gateway(follow(make_request(1, [1]), rig.now_ns))
    (batch,) = rig.take(Batch)
    rig.now_ns += 1000
    rig.worker(dataclasses.replace(step_times(batch, rig.now_ns - 500), **change))
    rig.finish(batch)

    assert rig.take(Trace) == []
    assert [reply.request_id for reply in rig.take(Reply)] == [1]


def test_requests_with_and_without_spans_share_a_batch_and_each_gets_its_own_rows(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [1])
    rig.request(3, [3], [4, 5])
    rig.gateway(make_request(4, *SEQUENCES, spans=SPANS))
    rig.request(5, [6])
    first, second = rig.take(Batch)
    rig.finish(first)
    rig.finish(second)
    rig.take(Reply)
    (batch,) = rig.take(Batch)
    assert batch.span_counts.tolist() == [1, 1, 2, 1, 1, 1]
    assert batch.spans.tolist() == [[0, 1], [0, 2], [0, 1], [1, 3], [1, 2], [0, 4], [0, 1]]
    rig.finish(batch)
    before, spanned, after = rig.take(Reply)
    assert_rows([before], [[3], [4, 5]], [[(0, 1)], [(0, 2)]])
    assert_rows([spanned], SEQUENCES, SPANS)
    assert_rows([after], [[6]], [[(0, 1)]])


def test_a_batch_of_requests_without_spans_or_types_carries_none(rig: Rig) -> None:
    rig.request(1, [1, 2])
    (batch,) = rig.take(Batch)
    assert (len(batch.type_starts), len(batch.span_counts), len(batch.spans)) == (0, 0, 0)


def test_where_one_request_has_tokens_of_type_1_the_others_say_that_they_have_none(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [1])
    rig.request(3, [3], [4, 5])
    rig.gateway(make_request(4, [6, 7], [8, 9, 10], type_starts=[1, 3]))
    first, _ = rig.take(Batch)
    rig.finish(first)
    rig.take(Reply)
    (batch,) = rig.take(Batch)
    assert batch.type_starts.tolist() == [1, 2, 1, 3]
    assert len(batch.span_counts) == 0
    rig.finish(batch)
    _, pair = rig.take(Reply)
    np.testing.assert_array_equal(
        pair.rows.view(np.float32), [oracle_row([6, 7], "float32", type_start=1), oracle_vector([8, 9, 10])]
    )


def test_a_long_request_with_spans_is_answered_in_parts_whose_rows_are_counted_across_its_sequences(rig: Rig) -> None:
    sequences = [[token] * 40 for token in (1, 2, 3)]  # the budget is 64 tokens
    spans = [[(0, 10), (10, 20), (20, 40)], [(0, 40)], [(5, 6), (6, 7)]]
    rig.hello(b"w1")
    rig.gateway(make_request(1, *sequences, spans=spans, type_starts=[40, 3, 40]))
    (first, third), (second,) = rig.take(Batch, b"w0"), rig.take(Batch, b"w1")
    assert (first.type_starts.tolist(), second.type_starts.tolist()) == ([40], [3])
    rig.finish(first)
    rig.finish(third)
    assert rig.take(Failure) == []
    rig.finish(second, b"w1")
    replies = rig.take(Reply)
    assert [(reply.first_row, len(reply.rows)) for reply in replies] == [(0, 3), (4, 2), (3, 1)]
    assert [gateway.requests for gateway in rig.core._accounts.all()] == [{}]


def test_a_batch_has_no_more_rows_than_its_result_can_carry(metrics: Metrics) -> None:
    rig = Rig(metrics)
    rig.join()
    rig.hello(facts=dataclasses.replace(FACTS, dimensions=4 * 1024 * 1024))  # four rows fill a frame
    rig.gateway(make_request(1, *[[1, 2, 3]] * 4, spans=[[(0, 1), (1, 2), (2, 3)]] * 4))
    rig.request(2, *[[4]] * 5)
    batches = rig.take(Batch)
    assert [batch.num_rows for batch in batches] == [3, 3]


def test_a_nonfinite_row_of_a_span_names_its_sequence(rig: Rig) -> None:
    rig.gateway(make_request(1, *SEQUENCES, spans=SPANS))
    (batch,) = rig.take(Batch)
    rig.finish(batch, nonfinite=(3, 2))
    (failure,) = rig.take(Failure)
    assert (failure.code, failure.sequence) == ("nonfinite_output", 1)
    assert rig.take(Reply) == []


def test_a_result_with_a_row_a_sequence_where_spans_were_asked_for_ends_the_worker(rig: Rig) -> None:
    rig.gateway(make_request(1, *SEQUENCES, spans=SPANS))
    (batch,) = rig.take(Batch)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 1, True, np.zeros(0, dtype=np.int32), oracle_rows(batch)[:3]))
    assert rig.killed == [b"w0"]
    assert rig.take(Reply) == []


def test_sparse_rows_come_back_as_wide_as_their_batch_needed_and_never_next_to_dense_ones(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [1])
    sparse = [[token, token] for token in range(8)]
    rig.gateway(make_request(3, *sparse, encoding="sparse"))
    rig.request(4, [4])
    rig.gateway(make_request(5, [5, 6], encoding="sparse", spans=[[(0, 1), (1, 2)]]))
    held = rig.take(Batch)
    mixed = 0
    while held:
        batch = held.pop(0)
        mixed += len(set(batch.encodings.tolist())) > 1
        rig.finish(batch)
        held += rig.take(Batch)
    replies = {reply.request_id: reply for reply in rig.take(Reply)}
    assert mixed == 0
    expected = [oracle_row(ids, "sparse") for ids in sparse]
    assert replies[3].rows.shape == (8, max(map(len, expected)))
    assert [row[: len(own)].tobytes() for row, own in zip(replies[3].rows, expected, strict=True)] == [
        own.tobytes() for own in expected
    ]
    assert len(replies[5].rows) == 2
    assert rig.killed == []


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 4), dtype=np.uint8),
        np.zeros((2, 3), dtype=np.uint8),
        np.array([[0, 0, 0, 0], [1, 0, 0, 0]], dtype=np.uint8),
        np.full((2, 400), 0xFF, dtype=np.uint8),
    ],
)
def test_a_sparse_result_that_says_nonsense_ends_the_worker(rig: Rig, rows: np.ndarray) -> None:
    rig.gateway(make_request(1, [1], [2], encoding="sparse"))
    (batch,) = rig.take(Batch)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 1, True, np.zeros(0, dtype=np.int32), rows))
    assert rig.killed == [b"w0"]
    assert rig.take(Reply) == []


def test_a_sparse_row_that_is_not_finite_may_say_anything(rig: Rig) -> None:
    rig.gateway(make_request(1, [1], [2], encoding="sparse"))
    (batch,) = rig.take(Batch)
    rows = np.array([[0, 0, 0, 0], [0xFF, 0xFF, 0xFF, 0xFF]], dtype=np.uint8)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 1, True, np.array([1], dtype=np.int32), rows))
    assert rig.killed == []
    assert [(failure.code, failure.sequence) for failure in rig.take(Failure)] == [("nonfinite_output", 1)]


@pytest.mark.parametrize("pieces", [(20, 19), (41,), (-20, 60), (40, 0)])
def test_pieces_that_do_not_make_up_the_batch_end_the_worker(rig: Rig, pieces: tuple[int, ...]) -> None:
    rig.request(1, [1] * 20, [2] * 20)
    (batch,) = rig.take(Batch)
    in_pieces(rig, batch, *pieces)
    assert rig.killed == [b"w0"]
    assert rig.take(Reply) == []


def state(rig: Rig) -> object:
    """What the scheduler owes and waits for."""
    return (
        {gateway.name: sorted(gateway.requests) for gateway in rig.core._accounts.all()},
        {worker.name: list(worker.in_flight) for worker in rig.core._fleet.all()},
        [(id(pending), pending.unanswered) for pending in rig.core._queue.pending()],
        rig.core._queue.num_tokens,
    )


def follow(request: Request, sent_ns: int) -> Request:
    return dataclasses.replace(request, times_ns=np.array([sent_ns]))


def step_times(batch: Batch, first_ns: int) -> StepTimes:
    return StepTimes(EPOCH, batch.batch_id, np.arange(first_ns, first_ns + 8))
