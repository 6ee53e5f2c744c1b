"""The scheduler's state machine, driven by hand: messages and times in, actions out."""

from __future__ import annotations

import dataclasses
import random
from typing import TypeVar

import numpy as np
import pytest

from common.errors import ProtocolError
from common.metrics import Metrics
from common.wire.codec import Message, decode, encode
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
    Join,
    ModelFacts,
    Ping,
    Refuse,
    Reply,
    Request,
    Result,
    StepTimes,
    Trace,
    Welcome,
)
from common.wire.packing import Replies, Requests
from common.wire.rows import BINARY, FLOAT32
from scheduler.state import Action, Kill, Scheduler
from tests.fakes import DIMENSIONS, FACTS, oracle_row, oracle_rows, oracle_vector
from tests.rogue import mutated

EPOCH = 7
MS = 1_000_000
SECOND = 1000 * MS

M = TypeVar("M")


class Rig:
    """A scheduler and a clock. What it asks for is kept until a test takes it."""

    def __init__(self, metrics: Metrics, *, latency_target_ms: int = 0) -> None:
        self.now_ns = SECOND
        self.core = Scheduler(
            epoch=EPOCH,
            workers_total=2,
            max_queue_ms=10_000,
            metrics=metrics,
            now_ns=self.now_ns,
            latency_target_ms=latency_target_ms,
        )
        self.killed: list[bytes] = []
        self._sent: list[tuple[bytes, Message]] = []

    def gateway(self, message: Message, peer: bytes = b"g0") -> None:
        self._perform(self.core.on_gateway_message(peer, message, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def worker(self, message: Message, peer: bytes = b"w0") -> None:
        self._perform(self.core.on_worker_message(peer, message, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def worker_lost(self, peer: bytes = b"w0", reason: str = "exited") -> None:
        self._perform(self.core.on_worker_lost(peer, reason, self.now_ns))

    def gateway_lost(self, peer: bytes = b"g0") -> None:
        self._perform(self.core.on_gateway_lost(peer, "exited", self.now_ns))

    def tick(self, after_ns: int) -> None:
        """Let time pass, in the steps in which the loop would see it."""
        end_ns = self.now_ns + after_ns
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + 250 * MS)
            self._perform(self.core.on_tick(self.now_ns))

    def live(self, seconds: int, *, held: int = 0) -> None:
        """Let time pass while the gateway and the worker beat."""
        for _ in range(4 * seconds):
            self.tick(250 * MS)
            self.worker(Beat(EPOCH, held))
            self.gateway(Beat(EPOCH, 0))

    def join(self, peer: bytes = b"g0") -> None:
        self.gateway(Join(PROTOCOL_VERSION, peer.decode(), 1), peer)

    def hello(self, peer: bytes = b"w0", facts: ModelFacts = FACTS) -> None:
        self.worker(Hello(PROTOCOL_VERSION, peer.decode(), 1, facts), peer)

    def request(
        self,
        request_id: int,
        *sequences: list[int],
        deadline_s: float = 60,
        opens: bool = True,
        lane: str = "online",
        tenant: int = 0,
    ) -> None:
        deadline_ns = int(deadline_s * SECOND)
        self.gateway(
            make_request(request_id, *sequences, deadline_ns=deadline_ns, opens=opens, lane=lane, tenant=tenant)
        )

    def finish(
        self,
        batch: Batch,
        peer: bytes = b"w0",
        nonfinite: tuple[int, ...] = (),
        *,
        waited_us: int = 0,
        step_us: int = 5000,
        is_typical: bool = True,
    ) -> None:
        ids, nonfinite_rows = (EPOCH, batch.batch_id), np.array(nonfinite, dtype=np.int32)
        self.worker(Result(*ids, waited_us, step_us, is_typical, nonfinite_rows, oracle_rows(batch)), peer)

    def sent(self) -> list[tuple[bytes, Message]]:
        """All that is on the record, which is empty then."""
        sent, self._sent = self._sent, []
        return sent

    def take(self, kind: type[M], peer: bytes | None = None) -> list[M]:
        """The messages of one kind (to one peer) so far; they are taken off the record."""
        taken = [pair for pair in self._sent if isinstance(pair[1], kind) and peer in (None, pair[0])]
        self._sent = [pair for pair in self._sent if not any(pair is other for other in taken)]
        return [message for _, message in taken]  # type: ignore[misc]

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Kill):
                self.killed.append(action.peer)
            else:
                # What travels together is looked at reply by reply.
                messages = action.message.each() if isinstance(action.message, Replies) else [action.message]
                self._sent.extend((action.peer, message) for message in messages)


def make_request(
    request_id: int,
    *sequences: list[int],
    deadline_ns: int = 2**62,
    opens: bool = True,
    lane: str = "online",
    tenant: int = 0,
    encoding: str = "float32",
    type_starts: list[int] | None = None,
    spans: list[list[tuple[int, int]]] | None = None,
) -> Request:
    """A request for these sequences; `spans` are those of each."""
    return Request(
        request_id=request_id,
        fingerprint=FACTS.fingerprint,
        deadline_ns=deadline_ns,
        lane=lane,
        tenant=tenant,
        opens=opens,
        dimensions=DIMENSIONS,
        normalize=True,
        encoding=encoding,
        token_ids=np.array([token for sequence in sequences for token in sequence], dtype=np.int32),
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        type_starts=np.array(type_starts or [], dtype=np.int32),
        span_counts=np.array([len(own) for own in spans or []], dtype=np.int32),
        spans=np.array([span for own in spans or [] for span in own], dtype=np.int32).reshape(-1, 2),
    )


def assert_rows(replies: list[Reply], sequences: list[list[int]], spans: list[list[tuple[int, int]]]) -> None:
    """The replies are all of a request's rows, each once, and each is the oracle's for its span."""
    expected = [
        oracle_row(ids, "float32", span=span) for ids, own in zip(sequences, spans, strict=True) for span in own
    ]
    places = [reply.first_row + index for reply in replies for index in range(len(reply.rows))]
    assert sorted(places) == list(range(len(expected)))
    rows = np.concatenate([reply.rows for reply in replies]).view(np.float32)
    np.testing.assert_array_equal(rows[np.argsort(places)], expected)


def ids(batch: Batch) -> list[int]:
    return batch.token_ids.tolist()


@pytest.fixture
def rig(metrics: Metrics) -> Rig:
    """One gateway and one worker have joined."""
    rig = Rig(metrics)
    rig.join()
    rig.hello()
    rig.take(Welcome)
    rig.take(Ping)
    return rig


# --- joining ---


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


# --- running ---


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


def test_work_goes_to_the_worker_with_the_least_in_its_hands(rig: Rig) -> None:
    rig.hello(b"w1")
    rig.request(1, [1] * 9)
    rig.request(2, [2])
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[2]]
    rig.request(3, [3])
    assert [ids(batch) for batch in rig.take(Batch, b"w1")] == [[3]]


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


def together(*requests: Request) -> Requests:
    """Requests as they come to the scheduler."""
    message = decode([bytes(frame) for frame in encode(Requests.of(requests))])
    assert isinstance(message, Requests)
    return message


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


def test_of_requests_that_came_together_one_is_cancelled_and_the_others_run(rig: Rig) -> None:
    for blocker in (8, 9):
        rig.request(blocker, [blocker])
    first, _ = rig.take(Batch)
    rig.gateway(together(make_request(1, [1]), make_request(2, [2]), make_request(3, [3])))
    rig.gateway(Cancel(2))
    rig.finish(first)
    (batch,) = rig.take(Batch)
    assert ids(batch) == [1, 3]


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


def state(rig: Rig) -> object:
    """What the scheduler owes and waits for."""
    return (
        {gateway.name: sorted(gateway.requests) for gateway in rig.core._gateways.values()},
        {worker.name: list(worker.in_flight) for worker in rig.core._fleet.all()},
        [(id(pending), pending.unanswered) for pending in rig.core._queue.pending()],
        rig.core._queue.num_tokens,
    )


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


# --- requests that are followed ---


def follow(request: Request, sent_ns: int) -> Request:
    return dataclasses.replace(request, times_ns=np.array([sent_ns]))


def step_times(batch: Batch, first_ns: int) -> StepTimes:
    return StepTimes(EPOCH, batch.batch_id, np.arange(first_ns, first_ns + 8))


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


# --- rows that are not one a sequence ---

# Of three sequences, the last as a whole.
SEQUENCES = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
SPANS = [[(0, 1), (1, 3)], [(1, 2)], [(0, 4)]]


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
    assert rig.core._gateways[b"g0"].requests == {}


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


# --- losing a worker ---


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


# --- a connection that is gone, and perhaps its process ---


def accuse(rig: Rig) -> None:
    """Have an input in the hands of three workers in turn whose connections end; a fourth is idle."""
    rig.request(1, [666])
    for number in range(3):
        peer, following = b"w%d" % number, b"w%d" % (number + 1)
        assert [ids(batch) for batch in rig.take(Batch, peer)] == [[666]]
        rig.worker_lost(peer, "disconnected")
        rig.worker(Hello(PROTOCOL_VERSION, following.decode(), 2 + number, FACTS), following)
    assert (rig.take(Batch), rig.take(Failure)) == ([], [])


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


# --- a device without memory for a batch ---


def in_pieces(rig: Rig, batch: Batch, *pieces: int) -> None:
    rows = oracle_rows(batch)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 5000, True, NO_NUMBERS, rows, np.array(pieces, dtype=np.int32)))


def lengths_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.lengths.tolist() for batch in batches]


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


@pytest.mark.parametrize("pieces", [(20, 19), (41,), (-20, 60), (40, 0)])
def test_pieces_that_do_not_make_up_the_batch_end_the_worker(rig: Rig, pieces: tuple[int, ...]) -> None:
    rig.request(1, [1] * 20, [2] * 20)
    (batch,) = rig.take(Batch)
    in_pieces(rig, batch, *pieces)
    assert rig.killed == [b"w0"]
    assert rig.take(Reply) == []


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


# --- refusing, cancelling, expiring ---


def test_a_request_whose_deadline_passes_in_the_queue_is_504_and_never_runs(rig: Rig) -> None:
    rig.request(1, [1])
    rig.request(2, [2])
    first, _ = rig.take(Batch)
    rig.request(3, [3], deadline_s=2)
    rig.now_ns = 2 * SECOND
    rig.finish(first)
    assert [(failure.request_id, failure.code) for failure in rig.take(Failure)] == [(3, "deadline_exceeded")]
    assert rig.take(Batch) == []


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
    rig.request(2, [2] * 64, deadline_s=rig.now_ns / SECOND + 0.06)
    rig.request(3, [3] * 64, deadline_s=rig.now_ns / SECOND + 0.2)
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


def test_the_status_tells_how_many_workers_are_ready_and_whether_work_moves(rig: Rig) -> None:
    rig.request(1, [1])
    rig.live(9, held=1)
    status = rig.take(Ping, b"g0")[-1]
    assert (status.workers_ready, status.workers_total, status.progressing) == (1, 2, True)
    rig.live(1, held=1)
    assert not rig.take(Ping, b"g0")[-1].progressing


# --- lanes, and when a batch is closed ---


def run(rig: Rig, batch: Batch, ms: int) -> None:
    """Let so much time pass, in which this batch runs."""
    rig.tick(ms * MS)
    rig.worker(Beat(EPOCH, 2))
    rig.finish(batch, step_us=ms * 1000)


def learn(rig: Rig) -> None:
    """Show that a step takes a millisecond a token."""
    for request_id in (101, 102, 103):
        rig.request(request_id, [1] * {101: 4, 102: 16, 103: 64}[request_id], lane="backfill")
        (batch,) = rig.take(Batch)
        run(rig, batch, len(batch.token_ids))


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
    assert 39 * MS <= wake_ns - rig.now_ns + 37 * MS < 40 * MS
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
    rig.request(1000 + rig.core._next_arrival, [1] * num_tokens)
    (first,) = rig.take(Batch)
    rig.request(1000 + rig.core._next_arrival, [2] * num_tokens)
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


def test_a_batch_that_is_full_is_closed_at_once(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 60)
    rig.take(Batch)
    rig.request(2, [2] * 40)
    assert rig.take(Batch) == []
    rig.request(3, [3] * 24)
    assert [batch.lengths.tolist() for batch in rig.take(Batch)] == [[40, 24]]


def test_a_batch_that_is_full_stays_open_while_tenants_mix_so_that_who_comes_has_his_part_of_it(rig: Rig) -> None:
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


def test_nothing_is_polled_for_a_worker_that_is_silent(rig: Rig) -> None:
    learn(rig)
    rig.request(1, [1] * 60)
    rig.take(Batch)
    rig.request(2, [2] * 5)
    rig.tick(1200 * MS)
    assert rig.core.next_tick_ns() > rig.now_ns
