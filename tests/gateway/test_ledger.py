"""The ledger by hand: what it sends for which messages, and at which time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from common.errors import InvalidRequest, Overloaded, ProtocolError, Unavailable
from common.lanes import LANES
from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import Beat, Cancel, Failure, Ping, Refuse, Reply, Request, Welcome
from common.wire.packing import Replies, Requests
from gateway.ledger import Ledger
from gateway.open_request import OpenRequest
from gateway.trace import RequestTrace
from tests.fakes import DIMENSIONS, FACTS
from tests.gateway.test_client import make_options, make_spans, sequences

SECOND = 1_000_000_000


class Wire:
    """The messages of a ledger, as they leave; it can be cut."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.cut = False
        self.flush: Callable[[], None] = lambda: None

    def send(self, message: Message) -> bool:
        if not self.cut:
            self.sent.append(message)
        return not self.cut

    def requests(self) -> list[Request]:
        """One by one, those that wait to leave too; they are taken off the record."""
        self.flush()
        messages = self.sent
        self.sent = [message for message in messages if not isinstance(message, Request | Requests)]
        return [request for message in messages for request in _requests_of(message)]

    def num_tokens(self) -> list[list[int]]:
        """The tokens of each request of each message; the messages are taken off the record."""
        messages, self.sent = self.sent, []
        return [[len(request.token_ids) for request in _requests_of(message)] for message in messages]


def _requests_of(message: Message) -> list[Request]:
    messages = message.each() if isinstance(message, Requests) else [message]
    return [one for one in messages if isinstance(one, Request)]


def make_open(*lengths: int) -> OpenRequest:
    return OpenRequest.of(sequences(*lengths), make_options(2))


def reply(request: Request) -> Reply:
    rows = np.full((len(request.lengths), DIMENSIONS), request.request_id, dtype=np.float32)
    return Reply(request.request_id, 0, 10, 20, rows.view(np.uint8))


class NoJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def ledger(wire: Wire, metrics: Metrics) -> Ledger:
    """Joined: pieces of at most 10 tokens, at most 20 of a request at the scheduler."""
    ledger = Ledger("gateway-0", wire.send, metrics, now_ns=0, jitter=NoJitter())
    wire.flush = ledger.flush
    ledger.on_message(Welcome(1, 7, True, FACTS, 10, 20), 0)
    ledger.on_message(Ping(7, 1, 1, True), 0)
    return ledger


async def test_a_long_request_waits_here_and_is_fed_as_answers_come(ledger: Ledger, wire: Wire) -> None:
    entry = make_open(*[5] * 8)
    ledger.open(entry, 0)
    first, second = wire.requests()
    assert (first.opens, second.opens) == (True, False)
    ledger.on_message(reply(second), 0)
    (third,) = wire.requests()
    for request in (first, third):
        ledger.on_message(reply(request), 0)
    (fourth,) = wire.requests()
    ledger.on_message(reply(fourth), 0)
    assert (await entry.future).rows[:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert ledger.num_pieces == 0


async def test_a_piece_takes_the_spans_and_types_of_its_sequences_along(ledger: Ledger, wire: Wire) -> None:
    spans = [make_spans((0, 1), (1, 5)), make_spans((0, 5)), make_spans((2, 3)), make_spans((0, 1), (0, 1), (4, 5))]
    entry = OpenRequest.of(sequences(*[5] * 4), make_options(2), type_starts=[5, 4, 3, 2], spans=spans)
    ledger.open(entry, 0)
    first, second = wire.requests()
    assert (first.type_starts.tolist(), first.span_counts.tolist()) == ([5, 4], [2, 1])
    assert (second.type_starts.tolist(), second.span_counts.tolist()) == ([3, 2], [1, 3])
    assert first.spans.tolist() == [[0, 1], [1, 5], [0, 5]]
    assert second.spans.tolist() == [[2, 3], [0, 1], [0, 1], [4, 5]]
    rows = np.arange(4 * DIMENSIONS, dtype=np.float32).reshape(4, DIMENSIONS)
    for request, first_row, part in ((second, 1, rows[1:]), (first, 0, rows[:3]), (second, 0, rows[:1])):
        assert not entry.future.done()
        ledger.on_message(Reply(request.request_id, first_row, 1, 1, part.view(np.uint8)), 0)
    np.testing.assert_array_equal((await entry.future).rows, np.concatenate([rows[:3], rows])[:, :2])
    assert ledger.num_pieces == 0


async def test_a_piece_asks_for_no_more_rows_than_a_result_holds(ledger: Ledger, wire: Wire) -> None:
    facts = dataclasses.replace(FACTS, dimensions=4 * 1024 * 1024)  # four rows fill a frame
    ledger.on_message(Welcome(1, 7, False, facts, 1000, 1000), 0)
    spans = [make_spans((0, 1), (1, 2))] * 3 + [make_spans((0, 2))] * 3
    ledger.open(OpenRequest.of(sequences(*[2] * 6), make_options(2), spans=spans), 0)
    assert [request.span_counts.tolist() for request in wire.requests()] == [[2, 2], [2, 1, 1], [1]]


async def test_a_sequence_with_more_spans_than_a_result_holds_is_refused(ledger: Ledger, wire: Wire) -> None:
    ledger.on_message(Welcome(1, 7, False, dataclasses.replace(FACTS, dimensions=4 * 1024 * 1024), 1000, 1000), 0)
    entry = OpenRequest.of(
        sequences(9, 9), make_options(2), spans=[make_spans((0, 9)), make_spans(*((n, n + 1) for n in range(5)))]
    )
    with pytest.raises(InvalidRequest, match=r"5 parts.*at most 4") as raised:
        ledger.open(entry, 0)
    assert raised.value.sequence == 1
    assert (wire.requests(), ledger.num_pieces) == ([], 0)


async def test_a_reply_beyond_the_rows_of_its_piece_is_a_protocol_error(ledger: Ledger, wire: Wire) -> None:
    spans = [make_spans((0, 1), (1, 2)), make_spans((0, 1))]
    ledger.open(OpenRequest.of(sequences(6, 6), make_options(2), spans=spans), 0)
    first, second = wire.requests()
    rows = np.zeros((2, 4 * DIMENSIONS), dtype=np.uint8)
    for request, first_row in ((first, 1), (first, 2**62), (second, 0)):
        with pytest.raises(ProtocolError):
            ledger.on_message(Reply(request.request_id, first_row, 1, 1, rows), 0)


async def test_of_replies_that_came_together_one_that_does_not_fit_leaves_the_others_alone(
    ledger: Ledger, wire: Wire
) -> None:
    entries = [OpenRequest.of(sequences(3), make_options(2)) for _ in range(3)]
    for entry in entries:
        ledger.open(entry, 0)
    first, second, third = (request.request_id for request in wire.requests())
    rows = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32).view(np.uint8)
    answers = np.array([[first, 0, 10], [second, 1, 11], [third, 0, 12]])  # the second request has one row
    with pytest.raises(ProtocolError):
        ledger.on_message(Replies(20, answers, rows), 0)
    assert [entry.future.done() for entry in entries] == [True, False, True]
    embedded = await entries[2].future
    assert (embedded.rows.tolist(), embedded.queue_us, embedded.step_us) == ([[5, 6]], 12, 20)


async def test_sparse_rows_may_be_wider_in_every_reply_and_what_is_no_sparse_row_is_a_protocol_error(
    ledger: Ledger, wire: Wire
) -> None:
    entry = OpenRequest.of(sequences(3, 3, 3), make_options(2, encoding="sparse"))
    ledger.open(entry, 0)
    (request,) = wire.requests()
    one = np.array([[1, 0, 0, 0, *range(8), 255, 255]], dtype=np.uint8)  # one value, and room for a part of another
    for nonsense in (one[:, :11], one[:, :3], np.full((1, 12), 255, dtype=np.uint8)):
        with pytest.raises(ProtocolError):
            ledger.on_message(Reply(request.request_id, 0, 1, 1, nonsense), 0)
    two = np.array([[2, 0, 0, 0, *range(16)], [0, 0, 0, 0, *range(16)]], dtype=np.uint8)
    ledger.on_message(Reply(request.request_id, 1, 1, 1, two), 0)
    ledger.on_message(Reply(request.request_id, 0, 1, 1, one), 0)
    rows = (await entry.future).rows
    assert rows[0, :12].tolist() == one[0, :12].tolist()
    assert rows[1:].tolist() == two.tolist()


async def test_a_failed_piece_fails_the_request_and_takes_the_others_back(ledger: Ledger, wire: Wire) -> None:
    entry = make_open(*[5] * 8)
    ledger.open(entry, 0)
    first, second = wire.requests()
    ledger.on_message(Failure(second.request_id, "overloaded", "full", None, 2500), 0)
    assert [message.request_id for message in wire.sent if isinstance(message, Cancel)] == [first.request_id]
    error = entry.future.exception()
    assert error is not None
    assert (error.status, error.retry_after_s) == (429, 2.5)  # type: ignore[attr-defined]
    ledger.on_message(reply(first), 0)
    assert wire.requests() == []


async def test_a_new_scheduler_is_sent_everything_again_and_may_not_refuse_it(ledger: Ledger, wire: Wire) -> None:
    ledger.open(make_open(5), 0)
    ledger.open(make_open(6), 0)
    before = wire.requests()
    ledger.on_message(Welcome(1, 8, True, None, 10, 20), 0)
    again = wire.requests()
    assert [request.request_id for request in again] == [request.request_id for request in before]
    assert [request.opens for request in again] == [False, False]


async def test_what_could_not_be_sent_is_sent_when_the_scheduler_speaks_again(ledger: Ledger, wire: Wire) -> None:
    ledger.open(make_open(5), 0)
    wire.requests()
    wire.cut = True
    ledger.open(make_open(6), 0)
    ledger.flush()
    wire.cut = False
    ledger.on_tick(0)
    assert [request.lengths.tolist() for request in wire.requests()] == [[6]]


async def test_whatever_is_unanswered_is_sent_again_when_a_join_is_answered(ledger: Ledger, wire: Wire) -> None:
    answered, open_ = make_open(4), make_open(5)
    ledger.open(answered, 0)
    ledger.open(open_, 0)
    first, _ = wire.requests()
    ledger.on_message(reply(first), 0)
    ledger.on_message(Welcome(1, 7, False, FACTS, 10, 20), 0)
    assert wire.requests() == []
    ledger.on_tick(SECOND)  # asks to be let in, several times while nobody answers
    ledger.on_tick(SECOND)
    ledger.on_message(Welcome(1, 7, True, FACTS, 10, 20), 0)
    assert [request.lengths.tolist() for request in wire.requests()] == [[5]]
    ledger.on_message(Welcome(1, 7, True, FACTS, 10, 20), 0)
    assert wire.requests() == []


async def test_a_reply_that_does_not_fit_is_a_protocol_error_and_changes_nothing(ledger: Ledger, wire: Wire) -> None:
    held = make_open(5)
    ledger.open(held, 0)
    (request,) = wire.requests()
    for rows in (np.zeros((2, 4 * DIMENSIONS), dtype=np.uint8), np.zeros((1, 4 * 2 - 1), dtype=np.uint8)):
        with pytest.raises(ProtocolError):
            ledger.on_message(Reply(request.request_id, 0, 1, 1, rows), 0)
    ledger.on_message(reply(request), 0)
    assert (await held.future).rows.tolist() == [[1, 1]]


@pytest.mark.parametrize(("encoding", "needed"), [("float32", 32), ("int8", 8), ("binary", 1)])
async def test_a_row_may_be_wider_than_was_asked_for_and_never_narrower(
    ledger: Ledger, wire: Wire, encoding: str, needed: int
) -> None:
    held = OpenRequest.of(sequences(5), make_options(8, encoding=encoding))
    ledger.open(held, 0)
    (request,) = wire.requests()
    assert request.encoding == encoding
    rows = np.arange(64, dtype=np.uint8).reshape(1, 64)
    with pytest.raises(ProtocolError):
        ledger.on_message(Reply(request.request_id, 0, 1, 1, rows[:, : needed - 1]), 0)
    ledger.on_message(Reply(request.request_id, 0, 1, 1, rows), 0)
    assert (await held.future).rows.tobytes() == bytes(range(needed))


async def test_a_refused_gateway_does_not_ask_again(ledger: Ledger, wire: Wire) -> None:
    ledger.on_message(Refuse("version", "install one version"), 0)
    ledger.on_tick(10 * SECOND)
    assert wire.sent == []
    with pytest.raises(Unavailable):
        ledger.open(make_open(5), 0)


async def test_a_second_answer_to_the_same_request_changes_nothing(ledger: Ledger, wire: Wire) -> None:
    entry = make_open(5)
    ledger.open(entry, 0)
    (request,) = wire.requests()
    ledger.on_message(reply(request), 0)
    ledger.on_message(Failure(request.request_id, "internal_error", "late", None, None), 0)
    assert (await entry.future).rows.tolist() == [[1, 1]]


async def test_what_two_schedulers_answer_counts_once(ledger: Ledger, wire: Wire) -> None:
    entry = make_open(2, 2, 2)
    ledger.open(entry, 0)
    (request,) = wire.requests()
    rows = reply(request).rows
    ledger.on_message(Reply(request.request_id, 0, 1, 1, rows[:2]), 0)
    ledger.on_message(Welcome(1, 8, True, None, 10, 20), 0)
    ledger.on_message(Reply(request.request_id, 0, 1, 1, rows[:2]), 0)
    assert not entry.future.done()
    ledger.on_message(Reply(request.request_id, 2, 1, 1, rows[2:]), 0)
    assert (await entry.future).rows[:, 0].tolist() == [1, 1, 1]


async def test_a_silent_scheduler_makes_new_requests_503_and_keeps_what_is_held(ledger: Ledger, wire: Wire) -> None:
    held = make_open(5)
    ledger.open(held, 0)
    with pytest.raises(Unavailable):
        ledger.open(make_open(5), 2 * SECOND)
    assert ledger.readiness(2 * SECOND).status == "unavailable"
    assert not held.future.done()
    ledger.on_message(Ping(7, 1, 1, True), 3 * SECOND)
    ledger.open(make_open(5), 3 * SECOND)


async def test_a_gateway_that_stood_still_does_not_take_the_scheduler_for_silent(ledger: Ledger, wire: Wire) -> None:
    ledger.forgive(3 * SECOND, 3 * SECOND)
    ledger.open(make_open(5), 4 * SECOND)
    assert ledger.readiness(4 * SECOND).status == "ready"
    with pytest.raises(Unavailable):
        ledger.open(make_open(5), 5 * SECOND)


async def test_while_a_dead_scheduler_is_started_again_new_requests_wait_for_the_next(
    ledger: Ledger, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.cut = True
    ledger.on_tick(SECOND // 4)  # nothing can be sent at once: it is not silent, it is gone
    ledger.on_tick(SECOND // 2)
    waiting = make_open(5)
    ledger.open(waiting, 3 * SECOND)
    assert caplog.messages == ["the scheduler is gone; 0 requests wait for the next"]
    wire.cut = False
    ledger.on_message(Welcome(1, 8, True, FACTS, 10, 20), 4 * SECOND)
    (request,) = wire.requests()
    ledger.on_message(reply(request), 4 * SECOND)
    assert (await waiting.future).rows[:, 0].tolist() == [1]


async def test_when_the_scheduler_has_died_the_next_one_is_asked_as_soon_as_it_is_there(
    ledger: Ledger, wire: Wire
) -> None:
    wire.cut = True
    soon_s = ledger.on_tick(SECOND // 4)
    wire.cut = False
    ledger.on_tick(SECOND // 3)  # long before three pulses are missed
    assert soon_s == 0.05
    assert [type(message).__name__ for message in wire.sent] == ["Join"]


async def test_a_dead_scheduler_that_stays_away_makes_new_requests_503(ledger: Ledger, wire: Wire) -> None:
    wire.cut = True
    ledger.on_tick(SECOND // 4)
    ledger.open(make_open(5), 14 * SECOND)
    with pytest.raises(Unavailable):
        ledger.open(make_open(5), 15 * SECOND)


async def test_a_connection_that_ends_after_a_long_silence_was_one_to_a_scheduler_that_hangs(
    ledger: Ledger, wire: Wire
) -> None:
    ledger.on_tick(SECOND)
    wire.cut = True  # the transport has missed its heartbeat
    ledger.on_tick(2 * SECOND)
    with pytest.raises(Unavailable):
        ledger.open(make_open(5), 2 * SECOND)


async def test_a_scheduler_that_came_back_and_hangs_makes_new_requests_503(ledger: Ledger, wire: Wire) -> None:
    wire.cut = True
    ledger.on_tick(SECOND // 4)
    wire.cut = False
    ledger.on_message(Welcome(1, 8, True, FACTS, 10, 20), SECOND)
    ledger.on_tick(2 * SECOND)
    with pytest.raises(Unavailable):
        ledger.open(make_open(5), 3 * SECOND)


async def test_its_beats_tell_how_many_requests_it_has_sent_and_waits_for(ledger: Ledger, wire: Wire) -> None:
    ledger.open(make_open(5, 5, 5, 5), 0)
    ledger.open(make_open(3), 0)
    first, _, _ = wire.requests()
    wire.cut = True
    ledger.open(make_open(2), 0)
    ledger.flush()
    wire.cut = False
    ledger.on_tick(SECOND // 4)
    assert wire.sent[0] == Beat(7, 3)
    ledger.on_message(reply(first), SECOND // 4)
    ledger.on_tick(SECOND // 2)
    assert wire.sent[-1] == Beat(7, 3)  # the last one was sent with the first beat, and the first one is answered


async def test_it_joins_again_when_pulses_are_missed(ledger: Ledger, wire: Wire) -> None:
    ledger.on_tick(SECOND // 2)
    ledger.on_tick(SECOND)
    assert [type(message).__name__ for message in wire.sent] == ["Beat", "Join"]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Ping(7, 1, 2, True), "ready"),
        (Ping(7, 0, 2, True), "unavailable"),
        (Ping(7, 1, 2, False), "unavailable"),
    ],
)
async def test_readiness_follows_the_schedulers_status(ledger: Ledger, status: Ping, expected: str) -> None:
    ledger.on_message(status, 0)
    assert ledger.readiness(0).status == expected


# --- what leaves together ---


@pytest.fixture
def roomy(wire: Wire, metrics: Metrics) -> Ledger:
    """A ledger that has joined, whose pieces have at most 2000 tokens."""
    ledger = Ledger("gateway-0", wire.send, metrics, now_ns=0)
    ledger.on_message(Welcome(1, 7, True, FACTS, 2000, 10**6), 0)
    return ledger


async def test_requests_that_are_opened_before_the_next_flush_leave_in_one_message(roomy: Ledger, wire: Wire) -> None:
    entries = [make_open(3), make_open(4, 5), make_open(6)]
    for entry in entries:
        roomy.open(entry, 0)
    assert wire.sent == []
    roomy.flush()
    (message,) = wire.sent
    assert isinstance(message, Requests)
    requests = list(message.each())
    assert [request.lengths.tolist() for request in requests] == [[3], [4, 5], [6]]
    assert len({request.request_id for request in requests}) == 3
    for request, entry in zip(requests, entries, strict=True):
        np.testing.assert_array_equal(request.token_ids, entry.token_ids)
        roomy.on_message(reply(request), 0)
        assert (await entry.future).rows.tolist() == [[request.request_id] * 2] * len(request.lengths)


async def test_a_request_that_is_alone_leaves_as_one(roomy: Ledger, wire: Wire) -> None:
    roomy.open(make_open(3), 0)
    roomy.flush()
    roomy.flush()
    assert [type(message) for message in wire.sent] == [Request]


async def test_a_long_request_leaves_at_once_and_overtakes_none_that_was_opened_before_it(
    roomy: Ledger, wire: Wire
) -> None:
    for num_tokens in (3, 4, 1025, 5):
        roomy.open(make_open(num_tokens), 0)
    assert wire.num_tokens() == [[3, 4], [1025]]
    roomy.flush()
    assert wire.num_tokens() == [[5]]


async def test_no_more_leave_together_than_a_message_should_have(roomy: Ledger, wire: Wire) -> None:
    for num_tokens in [1000] * 5 + [1] * 70:
        roomy.open(make_open(num_tokens), 0)
    roomy.flush()
    assert wire.num_tokens() == [[1000] * 4, [1000, *[1] * 63], [1] * 7]


async def test_one_that_is_closed_before_it_leaves_makes_room_for_others(roomy: Ledger, wire: Wire) -> None:
    closed = [make_open(1000) for _ in range(3)]
    for request in closed:
        roomy.open(request, 0)
    for request in closed:
        roomy.close(request)
    for _ in range(4):
        roomy.open(make_open(1000), 0)
    roomy.flush()
    assert wire.num_tokens() == [[1000] * 4]


async def test_requests_for_two_models_do_not_leave_together(roomy: Ledger, wire: Wire) -> None:
    for fingerprint in ("f1", "f1", "f2", "f2"):
        options = dataclasses.replace(make_options(2), fingerprint=fingerprint)
        roomy.open(OpenRequest.of(sequences(3), options), 0)
    roomy.flush()
    assert [message.fingerprint for message in wire.sent if isinstance(message, Requests)] == ["f1", "f2"]


async def test_requests_with_spans_types_or_a_trace_leave_by_themselves(roomy: Ledger, wire: Wire) -> None:
    traced = dataclasses.replace(make_options(2), trace=RequestTrace())
    roomy.open(make_open(2), 0)
    roomy.open(OpenRequest.of(sequences(3), make_options(2), spans=[make_spans((0, 1), (1, 3))]), 0)
    roomy.open(OpenRequest.of(sequences(4), make_options(2), type_starts=[2]), 0)
    roomy.open(OpenRequest.of(sequences(5), traced), 0)
    roomy.open(make_open(6), 0)
    roomy.open(make_open(7), 0)
    roomy.flush()
    assert wire.num_tokens() == [[2], [3], [4], [5], [6, 7]]


async def test_a_request_that_is_closed_before_it_leaves_never_does(roomy: Ledger, wire: Wire) -> None:
    entries = [make_open(3), make_open(4), make_open(5)]
    for entry in entries:
        roomy.open(entry, 0)
    roomy.close(entries[1])
    roomy.flush()
    assert wire.num_tokens() == [[3, 5]]
    roomy.close(entries[2])
    assert [type(message) for message in wire.sent] == [Cancel]


async def test_requests_that_could_not_be_sent_together_are_all_sent_again(roomy: Ledger, wire: Wire) -> None:
    for num_tokens in (3, 4):
        roomy.open(make_open(num_tokens), 0)
    wire.cut = True
    roomy.flush()
    wire.cut = False
    roomy.on_tick(SECOND // 4)
    assert wire.sent == [Beat(7, 0)]
    roomy.flush()
    assert wire.num_tokens() == [[], [3, 4]]


async def test_a_new_scheduler_is_sent_what_is_held_together_and_one_that_is_closed_meanwhile_is_taken_back(
    roomy: Ledger, wire: Wire
) -> None:
    entries = [make_open(3), make_open(4)]
    for entry in entries:
        roomy.open(entry, 0)
    roomy.flush()
    wire.sent.clear()
    roomy.on_message(Welcome(1, 8, True, FACTS, 2000, 10**6), 0)
    roomy.close(entries[0])
    roomy.flush()
    cancel, request = wire.sent
    assert isinstance(cancel, Cancel)  # this scheduler may be one that has had it
    assert isinstance(request, Request)
    assert (request.lengths.tolist(), request.opens) == ([4], False)


# --- a full queue ---


def full(*rows: tuple[int, int, int, int]) -> Ping:
    return Ping(7, 1, 1, True, np.array(rows, dtype=np.int64).reshape(-1, 4))


def refused_ms(ledger: Ledger, lane: str, tenant: int, now_ns: int) -> int | None:
    """What such a request is told to wait; None where it is not refused."""
    try:
        ledger.check_queue(lane, tenant, now_ns)
    except Overloaded as error:
        return round((error.retry_after_s or 0) * 1000)
    return None


def test_a_gateway_refuses_itself_whom_the_scheduler_would_and_nobody_else(ledger: Ledger) -> None:
    ledger.on_message(full((0, 5, SECOND, 12 * SECOND), (2, 0, SECOND, 2 * SECOND)), 0)
    told = {(lane, tenant): refused_ms(ledger, lane, tenant, 0) for lane in LANES for tenant in (0, 5)}
    assert {whose: wait_ms for whose, wait_ms in told.items() if wait_ms} == {
        ("online", 5): 12_000,
        ("backfill", 0): 2000,
    }


def test_a_gateway_refuses_until_the_time_that_it_was_told_and_not_after_the_next_pulse(
    ledger: Ledger,
) -> None:
    ledger.on_message(full((0, 5, SECOND, 12 * SECOND)), 0)
    assert refused_ms(ledger, "online", 5, SECOND - 1) == 11_000
    assert refused_ms(ledger, "online", 5, SECOND) is None
    ledger.on_message(full((0, 5, 2 * SECOND, 12 * SECOND)), SECOND)
    ledger.on_message(full(), SECOND)
    assert refused_ms(ledger, "online", 5, SECOND) is None


async def test_who_is_refused_is_told_a_time_within_bounds_and_not_all_the_same(wire: Wire, metrics: Metrics) -> None:
    ledger = Ledger("gateway-0", wire.send, metrics, 0, jitter=random.Random(1))
    waits = []
    for done_s in (0, 10, 100):
        ledger.on_message(full((0, 5, SECOND, done_s * SECOND)), 0)
        waits.append([refused_ms(ledger, "online", 5, 0) or 0 for _ in range(100)])
    for told, (least, most) in zip(waits, [(800, 1200), (8_000, 12_000), (24_000, 36_000)], strict=True):
        assert least <= min(told) < 0.9 * (least + most) / 2
        assert 1.1 * (least + most) / 2 < max(told) <= most
    ledger.on_message(Welcome(1, 7, True, FACTS, 10, 20), 0)
    entry = make_open(5)
    ledger.open(entry, 0)
    ledger.on_message(Failure(1, "overloaded", "full", None, 20_000), 0)
    with pytest.raises(Overloaded) as caught:
        await entry.future
    assert caught.value.retry_after_s is not None
    assert 16 <= caught.value.retry_after_s <= 24
    assert caught.value.retry_after_s != 20
