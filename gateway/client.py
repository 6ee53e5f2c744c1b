"""The gateway's side of the scheduler: every request that was accepted is kept here until it is answered.

`Ledger` is the state machine (messages and time in, messages out); `SchedulerClient` gives it a socket, the event loop
and futures. The ledger is what makes a scheduler's death harmless: whatever was not answered is sent again to the
next one. A long request is cut into pieces, and only so many wait at the scheduler at once; the rest stays here, so
that one big request never fills the queue for others.

Short requests that are opened in the same turn of the event loop leave in one message, since the scheduler, of which
there is one, then takes half as long for each. Under load many are, since a turn hears many clients; a lone one leaves
with the end of its turn, without a timer. All else stays each one's own: its id, deadline, answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import zmq

from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    ServiceError,
    ShuttingDown,
    Unavailable,
    from_wire,
)
from common.log import Seldom
from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import (
    LANES,
    NO_NUMBERS,
    NO_SPANS,
    NO_TIMES,
    PROTOCOL_VERSION,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Join,
    ModelFacts,
    Ping,
    Refuse,
    Reply,
    Request,
    Spans,
    Trace,
    Welcome,
    max_rows,
)
from common.wire.packing import MAX_REQUESTS, Replies, Requests
from common.wire.rows import ENCODINGS, row_bytes, sparse_bytes
from common.wire.transport import Dealer, address, now_ns
from gateway.trace import RequestTrace

logger = logging.getLogger(__name__)

_TICK_S = 0.25

# While the scheduler is away: as often as its socket may come back.
_JOIN_TICK_S = 0.05

# Three pulses missed: ask again to join. A restarted scheduler does not know us and stays mute until then.
_REJOIN_NS = 700_000_000

# Silent for so long, the scheduler hangs: what is held stays held, new requests are better told at once. The transport
# has given the connection up by then too, and a connection that comes back under its old routing id is a black hole.
_SILENT_NS = 2_000_000_000

# One that has died is another matter: it is started again, which takes a second or three, and new requests wait for it
# as the older ones do. One that stays away for so long is down. (As the scheduler does while it has no worker.)
_RECOVERY_NS = 15_000_000_000

# How one tells them apart: the connection to a dead process ends with it, and nothing can be sent; one to a process
# that hangs takes what is sent until a heartbeat is missed, two seconds or more after we have last heard of it.
_DISCONNECTED_NS = 1_500_000_000

# A tick that is late by less is the ordinary jitter of a busy machine.
_LAG_NS = 500_000_000

# One of: float32 [rows, dimensions], int8 [rows, dimensions], uint8 [rows, ceil(dimensions / 8)] (of binary: one bit a
# dimension, the first in the lowest bit of the first byte), uint8 [rows, bytes] (of sparse: `read_sparse` takes a row).
Rows: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.int8] | npt.NDArray[np.uint8]

# What a client is told to wait when the queue is full: what is predicted, within these, give or take a part of it, so
# that those who were refused together do not come back together.
_RETRY_AFTER_S = (1.0, 30.0)
_JITTER = 0.2

# Requests of at most so many tokens leave together, up to so many tokens in a message: a copy of 4 KB takes less than a
# message, and of larger ones the scheduler would hold all as long as one of them waits.
_SHORT_TOKENS = 1024
_TOKENS_TOGETHER = 4096

# A sparse row without any values: its count.
_EMPTY_SPARSE_BYTES = 4

# What the bytes of a row are.
_DTYPES = {"float32": "<f4", "int8": "|i1", "binary": "|u1", "sparse": "|u1"}


@dataclass(frozen=True, slots=True)
class Embedded:
    """A request's vectors, and where its time went."""

    rows: Rows  # a row a sequence, or a row a span of each, in order
    queue_us: int  # the longest wait of any of its sequences
    step_us: int  # the steps that ran it, added up


Status = Literal["ready", "starting", "draining", "unavailable"]


@dataclass(frozen=True, slots=True)
class Readiness:
    status: Status
    workers_ready: int
    workers_total: int
    reason: str  # one sentence; empty when ready


@dataclass(frozen=True, slots=True)
class Options:
    """What a client asked for, for every sequence of its request."""

    fingerprint: str  # of the model that its text was tokenized for
    dimensions: int
    normalize: bool  # of float32 rows
    encoding: str  # float32, int8, binary or sparse
    lane: str
    deadline_ns: int
    tenant: int = 0  # whose request it is, as in a Request
    trace: RequestTrace | None = None  # of a request that is followed


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A client's request, held until `future` is done."""

    future: asyncio.Future[Embedded]
    options: Options
    token_ids: npt.NDArray[np.int32]  # [tokens]
    lengths: npt.NDArray[np.int32]  # [sequences]
    offsets: list[int]  # [sequences + 1] of tokens; a list, since it is looked up a number at a time
    type_starts: npt.NDArray[np.int32]  # [sequences] or empty, as in a Request
    span_counts: npt.NDArray[np.int32]  # [sequences] or empty
    spans: npt.NDArray[np.int32]  # [rows, 2] or empty
    row_offsets: list[int] | None  # [sequences + 1]; None: a row a sequence
    rows: npt.NDArray[np.uint8]  # [rows, row bytes], filled as replies come; sparse ones widen it
    answered: npt.NDArray[np.bool_]  # [rows] since two schedulers may answer the same one
    unanswered: int  # rows
    next_sequence: int = 0  # where the next piece begins
    waiting_tokens: int = 0  # of its pieces at the scheduler
    pieces: set[int] = field(default_factory=set)  # their ids
    queue_us: int = 0
    step_us: int = 0

    @classmethod
    def of(
        cls,
        sequences: list[npt.NDArray[np.int32]],
        options: Options,
        *,
        type_starts: Sequence[int] | npt.NDArray[np.int32] | None = None,
        spans: Sequence[Spans] | None = None,
    ) -> OpenRequest:
        """A request for these sequences of token ids, on the running event loop; see `SchedulerClient.submit`."""
        lengths = list(map(len, sequences))
        span_counts, all_spans, num_rows = NO_NUMBERS, NO_SPANS, len(sequences)
        if spans is not None:
            span_counts = np.fromiter(map(len, spans), dtype=np.int32, count=len(spans))
            all_spans = np.concatenate(spans, dtype=np.int32)
            num_rows = len(all_spans)
        sparse = options.encoding == "sparse"
        num_bytes = _EMPTY_SPARSE_BYTES if sparse else row_bytes(ENCODINGS[options.encoding], options.dimensions)
        return cls(
            future=asyncio.get_running_loop().create_future(),
            options=options,
            token_ids=sequences[0] if len(sequences) == 1 else np.concatenate(sequences),
            lengths=np.array(lengths, dtype=np.int32),
            offsets=list(itertools.accumulate(lengths, initial=0)),
            type_starts=NO_NUMBERS if type_starts is None else np.asarray(type_starts, dtype=np.int32),
            span_counts=span_counts,
            spans=all_spans,
            row_offsets=None if spans is None else list(itertools.accumulate(span_counts.tolist(), initial=0)),
            rows=np.empty((num_rows, num_bytes), dtype=np.uint8),
            answered=np.zeros(num_rows, dtype=np.bool_),
            unanswered=num_rows,
        )

    @staticmethod
    def num_bytes(
        sequences: list[npt.NDArray[np.int32]], options: Options, spans: Sequence[Spans] | None = None
    ) -> int:
        """What `of` would allocate for these, with what it is made from: ids, spans and rows, and 64 bytes for each
        sequence and row of what else is noted of them. Sparse rows grow as they come, and count as empty ones."""
        num_rows = len(sequences) if spans is None else sum(map(len, spans))
        sparse = options.encoding == "sparse"
        num_bytes = _EMPTY_SPARSE_BYTES if sparse else row_bytes(ENCODINGS[options.encoding], options.dimensions)
        copies = 1 if len(sequences) == 1 else 2
        return 4 * copies * sum(map(len, sequences)) + 64 * (len(sequences) + num_rows) + num_bytes * num_rows

    def first_row(self, sequence: int) -> int:
        """The first row of a sequence."""
        return sequence if self.row_offsets is None else self.row_offsets[sequence]

    def fill(self, first: int, rows: npt.NDArray[np.uint8]) -> int:
        """Take the rows from `first` on, each at least as wide as this request needs; how many of them are new.

        Raises:
            ProtocolError: they are not; nothing has changed.
        """
        last = first + len(rows)
        num_bytes = self.rows.shape[1]
        if self.options.encoding == "sparse":
            widest = sparse_bytes(rows)
            if widest > num_bytes:
                self.rows = np.pad(self.rows, ((0, 0), (0, widest - num_bytes)))
            num_bytes = widest
        elif rows.shape[1] < num_bytes:
            raise ProtocolError(f"rows of {rows.shape[1]} bytes where a request needs {num_bytes}")
        new = len(rows) - int(np.count_nonzero(self.answered[first:last]))
        self.rows[first:last, :num_bytes] = rows[:, :num_bytes]
        self.answered[first:last] = True
        self.unanswered -= new
        return new

    def expire(self) -> None:
        """Its deadline has passed."""
        self.fail(DeadlineExceeded("The deadline passed before the answer was there. Allow more time, or send less."))

    def fail(self, error: ServiceError) -> None:
        """Answer it with its failure, unless it has been answered."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Piece:
    """The sequences [start, stop) of a request, as one message."""

    request: OpenRequest
    start: int
    stop: int
    unanswered: int  # rows
    sent: bool = False

    @property
    def num_tokens(self) -> int:
        return self.request.offsets[self.stop] - self.request.offsets[self.start]


class Ledger:
    """What this gateway owes, and what it knows of the scheduler. `send` takes a message or says that it cannot.

    Short requests wait for `flush`, which has to follow whatever the ledger is told, in the same turn of the loop.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[Message], bool],
        metrics: Metrics,
        now_ns: int,
        *,
        model: str | None = None,  # of several, which one's scheduler it is
        jitter: random.Random | None = None,
    ) -> None:
        self.facts: ModelFacts | None = None
        self.refused: str | None = None  # why the scheduler will not have us
        self._name = name
        self._scheduler = "the scheduler" if model is None else f"the scheduler of {model}"  # for the log
        self._send = send
        self._metrics = metrics
        self._pieces: dict[int, _Piece] = {}
        self._unsent: dict[int, Request] = {}  # for the next flush: short, of one model
        self._request_ids = itertools.count(1)
        self._welcome: Welcome | None = None
        self._status: Ping | None = None
        self._asked = False  # to be let in, and not answered yet
        self._died = False  # the scheduler that we have last heard of
        self._last_heard_ns = now_ns
        self._full: dict[tuple[str, int], tuple[int, int]] = {}  # by lane and tenant, the times of a Ping's `full`
        self._jitter = jitter or random.Random()

    def readiness(self, now_ns: int) -> Readiness:
        ready, total = (self._status.workers_ready, self._status.workers_total) if self._status else (0, 0)
        if self.refused is not None:
            return Readiness("unavailable", 0, total, self.refused)
        if self.silent(now_ns) or self._status is None:
            # Welcomed and not told the state yet is still a start.
            starting = self._welcome is None or (self._status is None and not self.silent(now_ns))
            status: Status = "starting" if starting else "unavailable"
            return Readiness(status, 0, total, "The scheduler does not answer.")
        if self.facts is None:
            return Readiness(
                "starting", ready, total, "No worker has loaded the model yet; if this lasts, a worker's log says why."
            )
        if ready == 0:
            return Readiness("unavailable", 0, total, "No worker is ready.")
        if not self._status.progressing:
            return Readiness("unavailable", ready, total, "Work is outstanding and none of it finishes.")
        return Readiness("ready", ready, total, "")

    def silent(self, now_ns: int) -> bool:
        """Whether the scheduler has said nothing for so long that it hangs, or the connection is dead."""
        return now_ns - self._last_heard_ns >= _SILENT_NS

    def forgive(self, lag_ns: int, now_ns: int) -> None:
        """This process stood still for so long: meanwhile the scheduler was not silent, but not heard."""
        self._last_heard_ns = min(self._last_heard_ns + lag_ns, now_ns)

    def check_queue(self, lane: str, tenant: int, now_ns: int) -> None:
        """Pass unless the scheduler would refuse such a request, by what it has told within the last second.

        Raises:
            Overloaded: as the scheduler's own.
        """
        times_ns = self._full.get((lane, tenant))
        if times_ns is None:
            return
        until_ns, done_ns = times_ns
        if now_ns >= until_ns:
            del self._full[lane, tenant]
            return
        error = Overloaded.queue_full((done_ns - now_ns) / 1e6)
        self._metrics.refused.labels(error.code).inc()
        raise self._spread(error)

    def open(self, request: OpenRequest, now_ns: int) -> None:
        """Accept a request: from here on it is answered through its future.

        Raises:
            Unavailable: the scheduler hangs or stays away, or no worker has ever been ready.
            InvalidRequest: one sequence has more spans than any result holds; `sequence` is its place.
        """
        returns = self._died and now_ns - self._last_heard_ns < _RECOVERY_NS
        if self.refused is not None or self.facts is None or (self.silent(now_ns) and not returns):
            raise Unavailable(self.readiness(now_ns).reason + " Try again.", retry_after_s=1)
        if request.row_offsets is not None:
            _check_span_counts(request.span_counts, max_rows(self.facts))
        self._feed(request)

    def close(self, request: OpenRequest) -> None:
        """Nobody waits for it any more (answered, failed, cancelled): take back what the scheduler still has."""
        for request_id in request.pieces:
            was_sent = self._pieces.pop(request_id).sent
            if self._unsent.pop(request_id, None) is None or was_sent:
                self._send(Cancel(request_id))
        request.pieces.clear()

    def flush(self) -> None:
        """Send what was opened, or fed, since the last time."""
        requests, self._unsent = self._unsent, {}
        if not requests:
            return
        message: Message
        message, *more = requests.values()
        sent = self._send(Requests.of([message, *more]) if more else message)
        for request_id in requests:
            if (piece := self._pieces.get(request_id)) is not None:
                piece.sent = sent

    def abandon(self) -> None:
        """Fail everything that is still held: this gateway ends."""
        for piece in self._pieces.values():
            piece.request.fail(ShuttingDown("The server is being stopped. Send the request again.", retry_after_s=1))
            piece.request.pieces.clear()
        self._pieces.clear()
        self._unsent.clear()

    def on_message(self, message: Message, now_ns: int) -> None:
        """Raises ProtocolError: the message, or one of its replies, does not fit what was asked and changed nothing."""
        self._last_heard_ns = now_ns
        self._died = False
        if isinstance(message, Replies):
            self._on_replies(message)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, Ping):
            self._status = message
            self._full = {
                (LANES[lane], tenant): (until_ns, done_ns) for lane, tenant, until_ns, done_ns in message.full.tolist()
            }
        elif isinstance(message, Failure):
            self._on_failure(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Trace):
            self._on_trace(message, now_ns)
        elif isinstance(message, Refuse):
            logger.error("%s refused this gateway: %s", self._scheduler, message.message)
            self.refused = f"The scheduler refused this gateway: {message.message}."
        else:
            logger.warning("%s sent a %s; ignored", self._scheduler, type(message).__name__)

    def on_tick(self, now_ns: int) -> float:
        """Say that we are here, or ask to be let in; the seconds until the next tick."""
        if self.refused is not None:
            return _TICK_S
        self.flush()  # a beat tells how many have been sent
        if self._welcome is None or self._died or now_ns - self._last_heard_ns >= _REJOIN_NS:
            self._asked = self._pulse(Join(PROTOCOL_VERSION, self._name, os.getpid()), now_ns) or self._asked
            return _JOIN_TICK_S
        self._pulse(Beat(self._welcome.epoch, sum(piece.sent for piece in self._pieces.values())), now_ns)
        self._submit_again(lambda piece: not piece.sent)
        return _JOIN_TICK_S if self._died else _TICK_S

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def _pulse(self, message: Message, now_ns: int) -> bool:
        sent = self._send(message)
        if not (sent or self._died or self._welcome is None) and now_ns - self._last_heard_ns < _DISCONNECTED_NS:
            self._died = True
            logger.warning("%s is gone; %d requests wait for the next", self._scheduler, len(self._pieces))
        return sent

    def _on_welcome(self, welcome: Welcome) -> None:
        is_new = self._welcome is None or self._welcome.epoch != welcome.epoch
        self._welcome = welcome
        if welcome.facts is not None and welcome.facts != self.facts:
            self.facts = welcome.facts
        if welcome.answers_join and (is_new or self._asked):
            self._asked = False  # a scheduler that stood still answers every Join that had piled up: once is enough
            # A new scheduler knows none of them. One that was merely not heard has some still, and drops the copies;
            # others it has answered into a connection that was dead: a successful send proves nothing.
            self._submit_again(lambda _: True)
        for request in {piece.request: None for piece in self._pieces.values()}:
            self._feed(request)

    def _submit_again(self, wanted: Callable[[_Piece], bool]) -> None:
        for request_id, piece in self._pieces.items():
            if wanted(piece):
                self._metrics.resubmitted.inc()
                self._submit(request_id, piece, opens=False)

    def _feed(self, request: OpenRequest) -> None:
        """Send pieces of a request until the window is full: at least one, at most all."""
        assert self._welcome is not None, "facts come in a Welcome"
        assert self.facts is not None, "open() comes first"
        num_sequences = len(request.lengths)
        while request.next_sequence < num_sequences and not request.future.done():
            start = request.next_sequence
            stop = _piece_end(request.offsets, start, self._welcome.piece_tokens)
            if request.row_offsets is not None:
                stop = min(stop, _piece_end(request.row_offsets, start, max_rows(self.facts)))
            piece = _Piece(request, start, stop, request.first_row(stop) - request.first_row(start))
            if request.pieces and request.waiting_tokens + piece.num_tokens > self._welcome.window_tokens:
                return
            request_id = next(self._request_ids)
            self._pieces[request_id] = piece
            request.pieces.add(request_id)
            request.waiting_tokens += piece.num_tokens
            request.next_sequence = stop
            self._submit(request_id, piece, opens=start == 0)

    def _submit(self, request_id: int, piece: _Piece, *, opens: bool) -> None:
        request, options = piece.request, piece.request.options
        first, last = request.offsets[piece.start], request.offsets[piece.stop]
        message = Request(
            request_id=request_id,
            fingerprint=options.fingerprint,
            deadline_ns=options.deadline_ns,
            lane=options.lane,
            tenant=options.tenant,
            opens=opens,
            dimensions=options.dimensions,
            normalize=options.normalize,
            encoding=options.encoding,
            token_ids=request.token_ids[first:last],
            lengths=request.lengths[piece.start : piece.stop],
            type_starts=request.type_starts[piece.start : piece.stop],
            span_counts=request.span_counts[piece.start : piece.stop],
            spans=request.spans[request.first_row(piece.start) : request.first_row(piece.stop)],
            times_ns=NO_TIMES if options.trace is None else options.trace.sent(),
        )
        if last - first > _SHORT_TOKENS or not Requests.may_hold(message):
            self.flush()  # so that nothing overtakes
            piece.sent = self._send(message)
            return
        if not self._has_room_for(message):
            self.flush()
        self._unsent[request_id] = message

    def _has_room_for(self, message: Request) -> bool:
        """Whether it can leave with what is to leave next."""
        together = [*self._unsent.values(), message]
        return (
            together[0].fingerprint == message.fingerprint
            and len(together) <= MAX_REQUESTS
            and sum([len(request.token_ids) for request in together]) <= _TOKENS_TOGETHER
        )

    def _on_replies(self, replies: Replies) -> None:
        odd: ProtocolError | None = None
        for reply in replies.each():
            try:
                self._on_reply(reply)
            except ProtocolError as error:
                odd = error  # the others are right all the same
        if odd is not None:
            raise odd

    def _on_reply(self, reply: Reply) -> None:
        piece = self._pieces.get(reply.request_id)
        if piece is None:
            self._metrics.late_replies.inc()
            return
        request = piece.request
        first = request.first_row(piece.start) + reply.first_row
        if first + len(reply.rows) > request.first_row(piece.stop):
            raise ProtocolError(f"a reply of {reply.rows.shape} does not fit its request")
        piece.unanswered -= request.fill(first, reply.rows)
        request.queue_us = max(request.queue_us, reply.queue_us)
        request.step_us += reply.step_us
        if piece.unanswered == 0:
            del self._pieces[reply.request_id]
            request.pieces.remove(reply.request_id)
            request.waiting_tokens -= piece.num_tokens
            self._feed(request)
        if request.unanswered == 0 and not request.future.done():
            rows = request.rows.view(_DTYPES[request.options.encoding])
            request.future.set_result(Embedded(rows, request.queue_us, request.step_us))

    def _on_trace(self, trace: Trace, now_ns: int) -> None:
        piece = self._pieces.get(trace.request_id)
        if piece is not None and piece.request.options.trace is not None:
            piece.request.options.trace.add(trace, now_ns)

    def _on_failure(self, failure: Failure) -> None:
        piece = self._pieces.pop(failure.request_id, None)
        if piece is None:
            self._metrics.late_replies.inc()
            return
        piece.request.pieces.remove(failure.request_id)
        error = from_wire(
            failure.code,
            failure.message,
            sequence=None if failure.sequence is None else piece.start + failure.sequence,
            retry_after_s=None if failure.retry_after_ms is None else failure.retry_after_ms / 1000,
        )
        piece.request.fail(self._spread(error) if isinstance(error, Overloaded) else error)
        self.close(piece.request)

    def _spread(self, error: Overloaded) -> Overloaded:
        """The same, with what its client is told to wait."""
        least, most = _RETRY_AFTER_S
        wait_s = min(max(error.retry_after_s or 0.0, least), most)
        error.retry_after_s = wait_s * self._jitter.uniform(1 - _JITTER, 1 + _JITTER)
        return error


def _piece_end(offsets: list[int], start: int, most: int) -> int:
    """Where a piece that begins at `start` ends: as many sequences as have `most` tokens (or rows), at least one."""
    return max(bisect_right(offsets, offsets[start] + most) - 1, start + 1)


def _check_span_counts(span_counts: npt.NDArray[np.int32], most: int) -> None:
    if int(span_counts.max()) > most:
        sequence = int(np.argmax(span_counts > most))
        raise InvalidRequest(
            f"This input has {span_counts[sequence]} parts to embed; at most {most} are possible. Split it.",
            sequence=sequence,
        )


class SchedulerClient:
    """The ledger on a running event loop. One DEALER socket, owned here; `close` closes it."""

    def __init__(self, run_dir: str, name: str, metrics: Metrics, *, model: str | None = None) -> None:
        self.on_facts: Callable[[ModelFacts], None] | None = None  # called on the loop when facts come or change
        self.on_refused: Callable[[], object] | None = None  # called on the loop: another try is in vain
        self._metrics = metrics
        self._odd = Seldom(logger)  # what comes that is no message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = Dealer(self._context, address(run_dir, "gateways"), "g")
        self._ledger = Ledger(name, self._dealer.send, metrics, now_ns(), model=model)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._next_reconnect_ns = 0
        self._tick_due_ns = now_ns()
        self._receive_handle: asyncio.Handle | None = None  # where it is due with the end of this turn of the loop

    @property
    def facts(self) -> ModelFacts | None:
        """The model's facts; None until the first worker of the fleet has been ready."""
        return self._ledger.facts

    @property
    def refused(self) -> bool:
        """Whether the scheduler will not have this gateway: another version, say."""
        return self._ledger.refused is not None

    def readiness(self) -> Readiness:
        return self._ledger.readiness(now_ns())

    def start(self) -> None:
        """Begin to talk to the scheduler, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._receive)
        self._tick()

    async def close(self) -> None:
        """Leave. Requests that are still held fail with ShuttingDown: let them finish first."""
        self._ledger.abandon()
        self._dealer.send(Goodbye("the gateway was told to stop"))
        if self._loop is not None:
            self._loop.remove_reader(self._dealer.fd)
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._forget_receive()
        self._dealer.close(linger_ms=100)
        self._context.term()

    def check_queue(self, lane: str, tenant: int) -> None:
        """Pass unless the queue is known to be full for such a request, before anything is done for it.

        Raises:
            Overloaded: it is. It tells when to try again.
        """
        self._ledger.check_queue(lane, tenant, now_ns())

    async def submit(
        self,
        sequences: list[npt.NDArray[np.int32]],
        options: Options,
        *,
        type_starts: Sequence[int] | npt.NDArray[np.int32] | None = None,
        spans: Sequence[Spans] | None = None,
    ) -> Embedded:
        """The vectors of sequences of token ids, in their order, as `options` asks for them.

        When the caller's task is cancelled, so is the work.

        Args:
            type_starts: where the tokens of type 1 begin within each sequence, its length where it has none.
            spans: of each sequence, int32 [rows, 2], at least one row: where each span that is pooled starts and stops
                within it. Without them, each sequence makes one row over all of its tokens.

        Raises:
            Overloaded, Unavailable, DeadlineExceeded, NonfiniteOutput, InputTooLarge, InternalError: see errors.py;
                `param` names the sequence at fault where there is one.
            InvalidRequest: one sequence has more spans than any result holds.
        """
        assert self._loop is not None, "start() comes first"
        request = OpenRequest.of(sequences, options, type_starts=type_starts, spans=spans)
        if self._ledger.silent(now_ns()):
            self._note_time()
            self._receive()
        timer = self._loop.call_later(max(0, options.deadline_ns - now_ns()) / 1e9, request.expire)
        try:
            self._ledger.open(request, now_ns())
            if self._receive_handle is None:
                # Which sends all that is opened before it runs.
                self._receive_handle = self._loop.call_soon(self._receive)
            return await request.future
        finally:
            timer.cancel()
            self._ledger.close(request)

    def _receive(self) -> None:
        """Send what has been opened, and take everything that waits.

        ZeroMQ's descriptor signals an edge, and a send may consume it: so this also runs after every send.
        """
        self._forget_receive()
        facts, refused = self._ledger.facts, self._ledger.refused
        while True:
            try:
                self._ledger.flush()  # what a message has made room for, too
                message = self._dealer.receive()
                if message is None:
                    break
                self._ledger.on_message(message, now_ns())
            except ProtocolError as error:
                self._metrics.protocol_errors.labels("gateway").inc()
                self._odd.log(logging.WARNING, now_ns(), "a message of the scheduler was dropped: %s", error)
        if self._ledger.facts is not facts and self._ledger.facts is not None and self.on_facts is not None:
            self.on_facts(self._ledger.facts)
        if self._ledger.refused is not None and refused is None and self.on_refused is not None:
            self.on_refused()

    def _forget_receive(self) -> None:
        if self._receive_handle is not None:
            self._receive_handle.cancel()
            self._receive_handle = None

    def _note_time(self) -> None:
        """See whether this process stood still (stopped, starved).

        For two seconds, and the transport has given the connection up: what it brought is lost, and the scheduler has
        to be joined again before it is heard.
        """
        now = now_ns()
        lag_ns = now - self._tick_due_ns
        if lag_ns > _LAG_NS:
            self._tick_due_ns = now
            logger.warning("this gateway stood still for %.1f s", lag_ns / 1e9)
            self._ledger.forgive(lag_ns, now)

    def _tick(self) -> None:
        assert self._loop is not None
        self._note_time()
        self._receive()
        now = now_ns()
        if self._ledger.silent(now) and now >= self._next_reconnect_ns:
            self._next_reconnect_ns = now + _SILENT_NS
            self._loop.remove_reader(self._dealer.fd)
            self._dealer.reconnect()
            self._loop.add_reader(self._dealer.fd, self._receive)
        delay_s = self._ledger.on_tick(now)
        self._tick_due_ns = now + int(delay_s * 1e9)
        self._tick_handle = self._loop.call_later(delay_s, self._tick)
        self._receive()
