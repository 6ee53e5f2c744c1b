"""The scheduler's process: the poll loop, its two sockets, and a pidfd for every peer.

One plain loop without asyncio and without torch: it starts in a fraction of a second, which is what a gateway waits for
when a scheduler has died. SIGTERM ends it at once, whatever it holds: gateways hold their requests and send them to
the next scheduler, as they do when it is killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable

import zmq

from common.config import SchedulerConfig
from common.errors import ProtocolError, VersionMismatch
from common.log import RateLimitedLog
from common.metrics import Metrics, open_metrics
from common.run_dir import RunDir
from common.wire.codec import Message
from common.wire.messages import Hello, Join, Refuse, Request
from common.wire.packing import Requests
from common.wire.transport import PeerGone, PeerStuck, Router, now_ns
from scheduler.state import Action, Kill, Scheduler, ToGateway, ToWorker, version_refusal

logger = logging.getLogger(__name__)

# One side may not keep the other waiting: after so many messages, or requests in them, the loop looks at everything
# else. After so many requests a worker that is free has what there is of them: these take half a millisecond.
_MESSAGES_A_TURN = 256
_REQUESTS_AT_ONCE = 64
_BOUND_CHECK_NS = 1_000_000_000
_LAST_WORDS_MS = 2  # for libzmq's thread to read what a process wrote before it died
_LEAST_SLEEP_NS = 200_000  # lest a tick that changes nothing keep a core busy
_TIMER_ABSTIME = 1  # TFD_TIMER_ABSTIME of <sys/timerfd.h>


class _Side:
    """The gateways, or the workers: their socket, and a pidfd for each peer so that a death is known in a millisecond.

    A pidfd, and never a pid, is what is killed: a pid may belong to somebody else by then.
    """

    def __init__(
        self,
        router: Router,
        action: Callable[[bytes, Message], Action],
        on_message: Callable[[bytes, Message, int], list[Action]],
        on_lost: Callable[[bytes, str, int], list[Action]],
        poller: zmq.Poller,
    ) -> None:
        self.router = router
        self.action = action  # what sends a message to a peer of this side
        self.on_message = on_message
        self.on_lost = on_lost
        self.dropped = RateLimitedLog(logger)  # what comes that is no message, from whomever
        self.refused = RateLimitedLog(logger)  # who speaks another version, likewise
        self.gone: set[bytes] = set()  # peers to which nothing can be sent; what they have said is not all heard yet
        self._poller = poller
        self._pidfds: dict[bytes, int] = {}
        poller.register(router.socket, zmq.POLLIN)

    def watch(self, peer: bytes, pid: int) -> None:
        if peer in self._pidfds:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:  # gone already, or of another host: its silence will tell
            logger.warning("the process %d of a peer cannot be watched: %s", pid, error)
            return
        self._pidfds[peer] = pidfd
        self._poller.register(pidfd, zmq.POLLIN)

    def exited(self, ready: dict[object, int]) -> list[bytes]:
        return [peer for peer, pidfd in self._pidfds.items() if pidfd in ready]

    def kill(self, peer: bytes) -> None:
        pidfd = self._pidfds.get(peer)
        if pidfd is not None:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it died by itself

    def forget(self, peer: bytes) -> None:
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)

    def forget_unless(self, is_known: Callable[[bytes], bool]) -> None:
        """Close the pidfds of peers that nothing is expected of: of one that has come back as somebody new, say."""
        for peer in [peer for peer in self._pidfds if not is_known(peer)]:
            self.forget(peer)

    def close(self) -> None:
        for peer in list(self._pidfds):
            self.forget(peer)
        self.router.close()


class _Timer:
    """A descriptor that is readable from a time on: a poll's own limit counts in whole milliseconds, and a GPU's step
    takes two. (os.timerfd_create comes with Python 3.13.)"""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timer to be had")
        self._times = (ctypes.c_long * 4)()  # of a repetition, never; and once: seconds, nanoseconds

    def set(self, at_ns: int) -> None:
        """By the clock of `now_ns`. Until then it is not readable, whatever it was before."""
        self._times[2], self._times[3] = divmod(at_ns, 1_000_000_000)
        if self._libc.timerfd_settime(self.fd, _TIMER_ABSTIME, self._times, None) < 0:
            raise OSError(ctypes.get_errno(), "the timer cannot be set")

    def close(self) -> None:
        os.close(self.fd)


class Server:
    def __init__(self, config: SchedulerConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        self._core = Scheduler(
            epoch=1 + secrets.randbits(62),
            workers_total=config.workers,
            max_queue_ms=config.max_queue_ms,
            latency_target_ms=config.latency_target_ms,
            metrics=metrics,
            now_ns=now_ns(),
        )
        self._poller = zmq.Poller()
        self._timer = _Timer()
        self._poller.register(self._timer.fd, zmq.POLLIN)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateways = _Side(
            Router(self._context, RunDir(config.run_dir).address("gateways")),
            ToGateway,
            self._core.on_gateway_message,
            self._core.on_gateway_lost,
            self._poller,
        )
        self._workers = _Side(
            Router(self._context, RunDir(config.run_dir).address("workers")),
            ToWorker,
            self._core.on_worker_message,
            self._core.on_worker_lost,
            self._poller,
        )
        self._sides = (self._workers, self._gateways)
        self._next_bound_check_ns = now_ns()

    def run(self, stop_fd: int) -> None:
        """Serve until `stop_fd` becomes readable."""
        self._poller.register(stop_fd, zmq.POLLIN)
        while True:
            self._timer.set(max(self._core.next_tick_ns(), now_ns() + _LEAST_SLEEP_NS))
            wait_ms = 0 if any(side.gone for side in self._sides) else None
            ready: dict[object, int] = dict(self._poller.poll(wait_ms))
            if stop_fd in ready:
                return
            self.turn(ready)

    def turn(self, ready: dict[object, int]) -> None:
        """Hear who has something to say, of the sockets and descriptors that are ready, and do what is due."""
        self._turn(self._workers, ready)
        if self._workers.router.socket in ready:  # who is free again has its next batch before gateways are heard
            self._perform(self._core.form_batches(now_ns()))
        self._turn(self._gateways, ready)
        self._perform(self._core.on_tick(now_ns()))
        self._check_bound()

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._context.destroy(linger=0)
        self._timer.close()

    def _turn(self, side: _Side, ready: dict[object, int]) -> None:
        """Hear what one side has said, then who of it has died, then who is new.

        What a process said before it died comes first: its last result is a result, and no reason to blame it; a worker
        that took its leave is not lost at all. Who is new comes last: it may take the place of one that has died.
        """
        exited = side.exited(ready)
        gone, side.gone = side.gone.difference(exited), set()
        introductions: list[tuple[bytes, Join | Hello]] = []
        if side.router.socket in ready or gone or (exited and side.router.socket.poll(_LAST_WORDS_MS)):
            introductions = self._receive(side)
        for peer in exited:
            side.forget(peer)
            self._perform(side.on_lost(peer, "exited", now_ns()))
        for peer in gone:  # its process may end only now, which the core may want to know; else see `_check_bound`
            self._perform(side.on_lost(peer, "disconnected", now_ns()))
        for peer, message in introductions:
            if peer in exited:
                continue  # it had come back as somebody new, and died
            side.watch(peer, message.pid)
            self._perform(side.on_message(peer, message, now_ns()))

    def _receive(self, side: _Side) -> list[tuple[bytes, Join | Hello]]:
        """Handle what waits on a side's socket, but for introductions, which are returned."""
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
            if num_unformed >= _REQUESTS_AT_ONCE:  # else with the tick that ends the turn
                num_unformed = 0
                self._perform(self._core.form_batches(now_ns()))
        return introductions

    def _perform(self, actions: list[Action]) -> None:
        """Do what the core asks. What cannot be delivered is news for the core, which may ask for more."""
        for action in actions:
            if isinstance(action, Kill):
                self._workers.kill(action.peer)
                continue
            side = self._gateways if isinstance(action, ToGateway) else self._workers
            try:
                side.router.send(action.peer, action.message)
            except PeerGone:
                self._core.on_undelivered(action.peer, action.message)
                side.gone.add(action.peer)  # for the next turn: what it said last may wait to be read
            except PeerStuck:
                # Thousands of unread messages: it hangs, and this message cannot reach it.
                self._core.on_undelivered(action.peer, action.message)
                self._perform(side.on_lost(action.peer, "does not read", now_ns()))
            else:
                if isinstance(action.message, Refuse):
                    side.forget(action.peer)

    def _check_bound(self) -> None:
        if now_ns() < self._next_bound_check_ns:
            return
        self._next_bound_check_ns = now_ns() + _BOUND_CHECK_NS
        for side in self._sides:
            side.forget_unless(self._core.knows)
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
