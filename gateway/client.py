"""The gateway's connection to a scheduler: the ledger on a running event loop, with a socket, timers and futures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import zmq

from common.errors import ProtocolError
from common.log import RateLimitedLog
from common.metrics import Metrics
from common.run_dir import RunDir
from common.wire.messages import Goodbye, ModelFacts, Spans
from common.wire.transport import Dealer, now_ns
from gateway.ledger import SILENT_NS, Ledger
from gateway.open_request import Embedded, OpenRequest, Options
from gateway.status import Readiness

logger = logging.getLogger(__name__)

# A tick that is late by less than this is the usual jitter of a busy machine.
_LAG_NS = 500_000_000


class SchedulerClient:
    """The ledger on a running event loop. It owns one DEALER socket, which `close` closes.

    `model` is the name of the model that the scheduler serves; None if its workers tell.
    """

    def __init__(self, run_dir: str, name: str, metrics: Metrics, *, model: str | None = None) -> None:
        self.model = model
        self.on_facts: Callable[[ModelFacts], None] | None = None  # called on the loop when facts arrive or change
        self.on_refused: Callable[[], object] | None = None  # called on the loop; trying again is useless
        self._metrics = metrics
        self._bad_messages = RateLimitedLog(logger)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = Dealer(self._context, RunDir(run_dir).address("gateways"), "g")
        self._ledger = Ledger(name, self._dealer.send, metrics, now_ns(), model=model)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._next_reconnect_ns = 0
        self._tick_due_ns = now_ns()
        self._receive_handle: asyncio.Handle | None = None  # set if `_receive` is due at the end of this turn

    @property
    def facts(self) -> ModelFacts | None:
        """The model's facts; None until a first worker has been ready."""
        return self._ledger.facts

    @property
    def refused(self) -> bool:
        """Whether the scheduler refuses this gateway, for example because of its version."""
        return self._ledger.refused is not None

    def readiness(self) -> Readiness:
        return self._ledger.readiness(now_ns())

    def start(self) -> None:
        """Begin to talk to the scheduler, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._receive)
        self._tick()

    async def close(self) -> None:
        """Leave the scheduler and close the socket. Open requests fail with ShuttingDown: let them finish first."""
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
        """Pass unless the queue is known to be full for such a request. Ask before any work is done for it.

        Raises:
            Overloaded: the queue is full; the error says when to try again.
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
        """The rows of sequences of token ids, in their order, as `options` asks for them.

        If the caller's task is cancelled, the work is cancelled too.

        Args:
            type_starts: for each sequence, where its tokens of type 1 begin; its length if it has none.
            spans: for each sequence, int32 [rows, 2], at least one row: the start and stop of each span that is pooled.
                None: each sequence makes one row of all its tokens.

        Raises:
            Overloaded, Unavailable, DeadlineExceeded, NonfiniteOutput, InputTooLarge, InternalError: see errors.py;
                `param` names the sequence at fault, if there is one.
            InvalidRequest: a sequence has more spans than any result holds.
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
                # It sends every request that is opened before it runs.
                self._receive_handle = self._loop.call_soon(self._receive)
            return await request.future
        finally:
            timer.cancel()
            self._ledger.close(request)

    def _receive(self) -> None:
        """Send the short requests that have been opened, and take in every message that waits.

        ZeroMQ's descriptor signals an edge, and a send may consume it. So this also runs after every send.
        """
        self._forget_receive()
        facts, refused = self._ledger.facts, self._ledger.refused
        while True:
            try:
                self._ledger.flush()  # also the pieces that the last message made room for
                message = self._dealer.receive()
                if message is None:
                    break
                self._ledger.on_message(message, now_ns())
            except ProtocolError as error:
                self._metrics.protocol_errors.labels("gateway").inc()
                self._bad_messages.log(logging.WARNING, now_ns(), "a message of the scheduler was dropped: %s", error)
        if self._ledger.facts is not facts and self._ledger.facts is not None and self.on_facts is not None:
            self.on_facts(self._ledger.facts)
        if self._ledger.refused is not None and refused is None and self.on_refused is not None:
            self.on_refused()

    def _forget_receive(self) -> None:
        if self._receive_handle is not None:
            self._receive_handle.cancel()
            self._receive_handle = None

    def _note_time(self) -> None:
        """Notice whether this process stood still (was stopped, or starved of CPU).

        After two seconds the transport has given the connection up. Messages on it are lost, and this gateway has to
        join the scheduler again.
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
            self._next_reconnect_ns = now + SILENT_NS
            self._loop.remove_reader(self._dealer.fd)
            self._dealer.reconnect()
            self._loop.add_reader(self._dealer.fd, self._receive)
        delay_s = self._ledger.on_tick(now)
        self._tick_due_ns = now + int(delay_s * 1e9)
        self._tick_handle = self._loop.call_later(delay_s, self._tick)
        self._receive()
