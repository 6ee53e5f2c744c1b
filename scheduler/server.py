"""The scheduler's process: the poll loop, its two sockets, and a pidfd for every peer.

One plain loop around the state machine (`state.py`): wait, hear the workers, hear the gateways, do what is due, and
perform each action that the state machine asks for.

It uses neither asyncio nor torch, so it starts in a fraction of a second: that is how long gateways wait when a
scheduler has died. SIGTERM ends it at once, whatever it holds. Gateways keep their requests and send them to the next
scheduler, as they do when it is killed.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Callable

import zmq

from common.config import SchedulerConfig
from common.errors import ProtocolError, VersionMismatch
from common.metrics import Metrics, open_metrics
from common.run_dir import RunDir
from common.wire.messages import Hello, Join, Refuse, Request
from common.wire.packing import Requests
from common.wire.transport import PeerGone, PeerStuck, Router, now_ns
from scheduler.actions import Action, Kill, ToGateway, ToWorker, version_refusal
from scheduler.sides import Side, Timer
from scheduler.state import Scheduler

logger = logging.getLogger(__name__)

# One side may not keep the other waiting: after 256 messages, or requests in them, the loop looks at everything else.
# After 64 requests, which take half a millisecond, a free worker is given what there is of them.
_MESSAGES_A_TURN = 256
_REQUESTS_AT_ONCE = 64
_BOUND_CHECK_NS = 1_000_000_000
_LAST_WORDS_MS = 2  # libzmq's thread reads within this time what a process wrote before it died
_LEAST_SLEEP_NS = 200_000  # a tick that changes nothing must not keep a core busy


class Server:
    def __init__(self, config: SchedulerConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        self._scheduler = Scheduler(
            epoch=1 + secrets.randbits(62),
            workers_total=config.workers,
            max_queue_ms=config.max_queue_ms,
            latency_target_ms=config.latency_target_ms,
            metrics=metrics,
            now_ns=now_ns(),
        )
        self._poller = zmq.Poller()
        self._timer = Timer()
        self._poller.register(self._timer.fd, zmq.POLLIN)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateways = Side(
            Router(self._context, RunDir(config.run_dir).address("gateways")),
            ToGateway,
            self._scheduler.on_gateway_message,
            self._scheduler.on_gateway_lost,
            self._poller,
        )
        self._workers = Side(
            Router(self._context, RunDir(config.run_dir).address("workers")),
            ToWorker,
            self._scheduler.on_worker_message,
            self._scheduler.on_worker_lost,
            self._poller,
        )
        self._sides = (self._workers, self._gateways)
        self._next_bound_check_ns = now_ns()

    def run(self, stop_fd: int) -> None:
        """Serve until `stop_fd` becomes readable."""
        self._poller.register(stop_fd, zmq.POLLIN)
        while True:
            self._timer.set(max(self._scheduler.next_tick_ns(), now_ns() + _LEAST_SLEEP_NS))
            wait_ms = 0 if any(side.gone for side in self._sides) else None
            ready: dict[object, int] = dict(self._poller.poll(wait_ms))
            if stop_fd in ready:
                return
            self.turn(ready)

    def turn(self, ready: dict[object, int]) -> None:
        """Hear the workers, give the free ones their next batches, hear the gateways, do what is due.

        `ready`: the sockets and descriptors that can be read.
        """
        self._hear(self._workers, ready)
        if self._workers.router.socket in ready:
            self._perform(self._scheduler.form_batches(now_ns()))
        self._hear(self._gateways, ready)
        self._perform(self._scheduler.on_tick(now_ns()))
        self._check_bound()

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._context.destroy(linger=0)
        self._timer.close()

    def _hear(self, side: Side, ready: dict[object, int]) -> None:
        """Handle what one side has sent, then which of its processes have died, then which are new.

        A process's last messages come before its death: its last result counts, and a worker that said goodbye is not
        lost. New processes come last, since one may take the place of one that has died.
        """
        exited = side.exited(ready)
        gone, side.gone = side.gone.difference(exited), set()
        introductions: list[tuple[bytes, Join | Hello]] = []
        if side.router.socket in ready or gone or (exited and side.router.socket.poll(_LAST_WORDS_MS)):
            introductions = self._receive(side)
        for peer in exited:
            side.forget(peer)
            self._perform(side.on_lost(peer, "exited", now_ns()))
        for peer in gone:  # its pidfd stays: its process may end only now; `_check_bound` closes it
            self._perform(side.on_lost(peer, "disconnected", now_ns()))
        for peer, message in introductions:
            if peer in exited:
                continue  # it had come back under a new name, and died
            side.watch(peer, message.pid)
            self._perform(side.on_message(peer, message, now_ns()))

    def _receive(self, side: Side) -> list[tuple[bytes, Join | Hello]]:
        """Handle what waits on a side's socket. Introductions are returned."""
        introductions: list[tuple[bytes, Join | Hello]] = []
        num_heard = num_unformed = 0
        while num_heard < _MESSAGES_A_TURN:
            num_heard += 1
            try:
                received = side.router.receive()
            except VersionMismatch as error:
                refuse = version_refusal(error.version)
                side.refused.log(logging.ERROR, now_ns(), "a peer was refused: %s", refuse.message)
                self._perform([side.action(error.peer, refuse)])
                continue
            except ProtocolError as error:
                self._metrics.protocol_errors.labels("scheduler").inc()
                side.dropped.log(logging.WARNING, now_ns(), "a message was dropped: %s", error)
                continue
            if received is None:
                break
            peer, message = received
            if isinstance(message, Join | Hello):
                introductions.append((peer, message))
                continue
            self._perform(side.on_message(peer, message, now_ns()))
            if isinstance(message, Requests):
                num_heard += len(message.asked) - 1
                num_unformed += len(message.asked)
            elif isinstance(message, Request):
                num_unformed += 1
            if num_unformed >= _REQUESTS_AT_ONCE:  # fewer are left to the tick that ends the turn
                num_unformed = 0
                self._perform(self._scheduler.form_batches(now_ns()))
        return introductions

    def _perform(self, actions: list[Action]) -> None:
        """Do what the scheduler asks. What cannot be delivered is news for it, and it may ask for more."""
        for action in actions:
            if isinstance(action, Kill):
                self._workers.kill(action.peer)
                continue
            side = self._gateways if isinstance(action, ToGateway) else self._workers
            try:
                side.router.send(action.peer, action.message)
            except PeerGone:
                self._scheduler.on_undelivered(action.peer, action.message)
                side.gone.add(action.peer)  # until the next turn: its last messages may wait to be read
            except PeerStuck:
                # It has thousands of unread messages: it hangs.
                self._scheduler.on_undelivered(action.peer, action.message)
                self._perform(side.on_lost(action.peer, "does not read", now_ns()))
            else:
                if isinstance(action.message, Refuse):
                    side.forget(action.peer)

    def _check_bound(self) -> None:
        if now_ns() < self._next_bound_check_ns:
            return
        self._next_bound_check_ns = now_ns() + _BOUND_CHECK_NS
        for side in self._sides:
            side.forget_unless(self._scheduler.knows)
            if side.router.ensure_bound():
                logger.warning("a socket file was removed from the run folder; bound again")


def main(config: SchedulerConfig, on_ready: Callable[[], None]) -> int:
    """Run a scheduler until SIGTERM or SIGINT; the exit status. Calls `on_ready` once its sockets are bound."""
    stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.eventfd_write(stop_fd, 1))
    server = Server(config, open_metrics(config.run_dir))
    on_ready()
    try:
        server.run(stop_fd)
    finally:
        server.close()
    return 0
