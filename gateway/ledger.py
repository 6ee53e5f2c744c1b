"""The ledger: every accepted request stays in it until it is answered. No I/O; time is an argument.

`Ledger` is the state machine (messages and time in, messages out); `SchedulerClient` gives it a socket and the event
loop. The ledger makes the death of a scheduler harmless: it sends every unanswered request again to the next one. A
long request is cut into pieces, and a window bounds how many tokens of it wait at the scheduler. The rest stays here,
so that one big request never fills the queue for others.

Short requests that are opened in the same turn of the event loop leave in one message. The one scheduler then needs
half the time for each. Under load a turn opens many requests; a lone request leaves at the end of its turn, without a
timer. Each keeps its own id, deadline and answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequest, Overloaded, ProtocolError, ShuttingDown, Unavailable, from_wire
from common.lanes import LANES
from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import (
    NO_TIMES,
    PROTOCOL_VERSION,
    Beat,
    Cancel,
    Failure,
    Join,
    ModelFacts,
    Ping,
    Refuse,
    Reply,
    Request,
    Trace,
    Welcome,
    max_rows,
)
from common.wire.packing import MAX_REQUESTS, Replies, Requests
from gateway.open_request import OpenRequest
from gateway.status import Readiness, Status

logger = logging.getLogger(__name__)

_TICK_S = 0.25

# The tick while the scheduler is away: as often as its socket may come back.
_JOIN_TICK_S = 0.05

# After three missed pulses, ask again to join. A restarted scheduler does not know us and stays mute until then.
_REJOIN_NS = 700_000_000

# A scheduler that is silent for 2 seconds hangs. Open requests stay open; new ones are refused at once. By then the
# transport has given the connection up too, and a connection that returns under its old routing id is a black hole.
SILENT_NS = 2_000_000_000

# A scheduler that died is started again, which takes one to three seconds: new requests wait for it too. After 15
# seconds it counts as down. (The scheduler waits as long when it has no worker.)
_RECOVERY_NS = 15_000_000_000

# What tells a dead process from one that hangs: a send fails this soon after the last message. The connection to a dead
# process ends with it. One that hangs takes messages until a heartbeat is missed, at least 2 seconds later.
_DISCONNECTED_NS = 1_500_000_000

# How long a client shall wait when the queue is full: the predicted time, within these bounds, plus or minus a random
# part of it. So requests that were refused together do not come back together.
_RETRY_AFTER_S = (1.0, 30.0)
_JITTER = 0.2

# Requests up to `_SHORT_TOKENS` leave together, up to `_TOKENS_TOGETHER` in a message: to copy 4 KB costs less than a
# message. The scheduler keeps a whole message in memory while one of its requests waits, so larger ones go alone.
_SHORT_TOKENS = 1024
_TOKENS_TOGETHER = 4096


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
    """The open requests of this gateway, and what it knows of the scheduler.

    Short requests wait for `flush`: call it after any other method, in the same turn of the event loop.

    Args:
        name: this gateway's, as the scheduler knows it.
        send: takes a message; False if it cannot be sent.
        model: the name of the model that the scheduler serves, for the log.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[Message], bool],
        metrics: Metrics,
        now_ns: int,
        *,
        model: str | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self.facts: ModelFacts | None = None
        self.refused: str | None = None  # why the scheduler refuses this gateway
        self._name = name
        self._scheduler = "the scheduler" if model is None else f"the scheduler of {model}"  # for the log
        self._send = send
        self._metrics = metrics
        self._pieces: dict[int, _Piece] = {}
        self._unsent: dict[int, Request] = {}  # short requests of one model, for the next flush
        self._request_ids = itertools.count(1)
        self._welcome: Welcome | None = None
        self._status: Ping | None = None
        self._asked = False  # a Join was sent and is not answered yet
        self._died = False  # the scheduler that was last heard
        self._last_heard_ns = now_ns
        self._full: dict[tuple[str, int], tuple[int, int]] = {}  # by lane and tenant, the times of a Ping's `full`
        self._jitter = jitter or random.Random()

    def readiness(self, now_ns: int) -> Readiness:
        ready, total = (self._status.workers_ready, self._status.workers_total) if self._status else (0, 0)
        if self.refused is not None:
            return Readiness("unavailable", 0, total, self.refused)
        if self.silent(now_ns) or self._status is None:
            # A gateway that was welcomed and has no Ping yet is still starting.
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
        """Whether the last message of the scheduler is so old that it hangs, or the connection is dead."""
        return now_ns - self._last_heard_ns >= SILENT_NS

    def forgive(self, lag_ns: int, now_ns: int) -> None:
        """This process stood still for `lag_ns`: do not count that time as the scheduler's silence."""
        self._last_heard_ns = min(self._last_heard_ns + lag_ns, now_ns)

    def check_queue(self, lane: str, tenant: int, now_ns: int) -> None:
        """Pass unless the scheduler would refuse such a request, according to a Ping of the last second.

        Raises:
            Overloaded: the same error as the scheduler's.
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
            InvalidRequest: one sequence has more spans than any result holds; `param` names it.
        """
        returns = self._died and now_ns - self._last_heard_ns < _RECOVERY_NS
        if self.refused is not None or self.facts is None or (self.silent(now_ns) and not returns):
            raise Unavailable(self.readiness(now_ns).reason + " Try again.", retry_after_s=1)
        if request.row_offsets is not None:
            _check_span_counts(request.span_counts, max_rows(self.facts))
        self._feed(request)

    def close(self, request: OpenRequest) -> None:
        """Forget a request that was answered, failed or cancelled, and cancel its pieces at the scheduler."""
        for request_id in request.pieces:
            was_sent = self._pieces.pop(request_id).sent
            if self._unsent.pop(request_id, None) is None or was_sent:
                self._send(Cancel(request_id))
        request.pieces.clear()

    def flush(self) -> None:
        """Send the short requests that have been opened since the last flush."""
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
        """Fail every open request: this gateway ends."""
        for piece in self._pieces.values():
            piece.request.fail(ShuttingDown("The server is being stopped. Send the request again.", retry_after_s=1))
            piece.request.pieces.clear()
        self._pieces.clear()
        self._unsent.clear()

    def on_message(self, message: Message, now_ns: int) -> None:
        """Take in a message of the scheduler.

        Raises:
            ProtocolError: the message, or one of its replies, does not fit its request; that part changed nothing.
        """
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
        """Send a heartbeat, or ask to join. Returns the seconds until the next tick."""
        if self.refused is not None:
            return _TICK_S
        self.flush()  # the beat tells how many pieces have been sent
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
            self._asked = False  # a scheduler that stood still answers each of many Joins: send again only once
            # A new scheduler knows no piece. The old one drops copies of those that it still has. It may also have sent
            # answers into a dead connection, so a successful send proves nothing.
            self._submit_again(lambda _: True)
        for request in {piece.request: None for piece in self._pieces.values()}:
            self._feed(request)

    def _submit_again(self, wanted: Callable[[_Piece], bool]) -> None:
        for request_id, piece in self._pieces.items():
            if wanted(piece):
                self._metrics.resubmitted.inc()
                self._submit(request_id, piece, opens=False)

    def _feed(self, request: OpenRequest) -> None:
        """Send pieces of a request until its window is full; at least one, if none waits at the scheduler."""
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
            self.flush()  # so that it overtakes no earlier request
            piece.sent = self._send(message)
            return
        if not self._has_room_for(message):
            self.flush()
        self._unsent[request_id] = message

    def _has_room_for(self, message: Request) -> bool:
        """Whether it fits into the message of the next flush."""
        together = [*self._unsent.values(), message]
        return (
            together[0].fingerprint == message.fingerprint
            and len(together) <= MAX_REQUESTS
            and sum([len(request.token_ids) for request in together]) <= _TOKENS_TOGETHER
        )

    def _on_replies(self, replies: Replies) -> None:
        bad_reply: ProtocolError | None = None
        for reply in replies.each():
            try:
                self._on_reply(reply)
            except ProtocolError as error:
                bad_reply = error  # the other replies still count
        if bad_reply is not None:
            raise bad_reply

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
        if request.unanswered == 0:
            request.succeed()

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
        """The same error with a time to wait that is bounded and random."""
        least, most = _RETRY_AFTER_S
        wait_s = min(max(error.retry_after_s or 0.0, least), most)
        error.retry_after_s = wait_s * self._jitter.uniform(1 - _JITTER, 1 + _JITTER)
        return error


def _piece_end(offsets: list[int], start: int, most: int) -> int:
    """The end of a piece that begins at `start`: at least one sequence, at most `most` tokens (or rows) of them."""
    return max(bisect_right(offsets, offsets[start] + most) - 1, start + 1)


def _check_span_counts(span_counts: npt.NDArray[np.int32], most: int) -> None:
    if int(span_counts.max()) > most:
        sequence = int(np.argmax(span_counts > most))
        raise InvalidRequest(
            f"This input has {span_counts[sequence]} parts to embed; at most {most} are possible. Split it.",
            sequence=sequence,
        )
