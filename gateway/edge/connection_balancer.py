"""Spreads the connections of one listening socket evenly over several gateways.

A client opens its pool of connections at once and uses it for hours. An event loop's own server accepts all that wait,
so the gateway that wakes first gets most of a pool. Its core is then the limit while others idle: of 64 connections,
four gateways got 0, 2, 25 and 37. So a gateway accepts one connection at a time. If it has more connections than
another gateway, it waits a millisecond first, in which the other can accept. A file in the run folder holds each
gateway's number of connections. Without that file, each gateway accepts whatever it finds. If a number is stale, since
its gateway was killed or hangs, some connections wait a millisecond in vain; then that gateway is no longer waited for.
(Otherwise only 600 connections a second would be accepted.)

Rejected: a socket for each gateway with SO_REUSEPORT, which spreads connections at random, and resets those that wait
when a gateway stops; accepting one at a time without the wait, which changed nothing, since the gateway that is awake
is always first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable

from common.log import RateLimitedLog
from common.run_dir import RunDir
from common.wire.transport import now_ns

logger = logging.getLogger(__name__)

# The wait before accepting, as short as the event loop's timers allow.
_COURTESY_S = 0.001

# A gateway with the fewest connections that leaves this many in a row (a tenth of a second) to this one is dead or
# hangs. It is not waited for until its number changes.
_MOST_LEFT = 64

# The pause after running out of descriptors or memory. Connections wait in the kernel's queue meanwhile.
_PAUSE_S = 0.1


class ConnectionCounts:
    """The number of connections that each gateway of a suite last reported.

    The file has an int32 for each slot: the number plus one, or 0 if there is no gateway.
    """

    def __init__(self, run_dir: str, slot: int) -> None:
        self._place = 4 * slot
        self._fd: int | None = None
        try:
            self._fd = os.open(RunDir(run_dir).connections, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.warning("gateways cannot share connections evenly: %s", error)

    def least_of_others(self, own: int) -> int | None:
        """Report this gateway's number; return the smallest number of the other gateways, None if there are none."""
        if self._fd is None:
            return None
        try:
            os.pwrite(self._fd, struct.pack("<i", own + 1), self._place)
            told = os.pread(self._fd, 4096, 0)
        except OSError:
            return None  # the disk is full, for example
        told = told[: self._place] + told[self._place + 4 :]
        return min(
            (count - 1 for (count,) in struct.iter_unpack("<i", told[: len(told) // 4 * 4]) if count > 0), default=None
        )

    def close(self) -> None:
        """Report that this slot has no gateway."""
        if self._fd is not None:
            try:
                os.pwrite(self._fd, bytes(4), self._place)
            except OSError:
                pass  # a stale number does little harm: see above
            os.close(self._fd)
            self._fd = None


class Acceptor:
    """Accepts connections of `sock` until it is closed. It owns `sock` and `counts`, and closes them.

    `num_open` returns this gateway's number of open connections.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        num_open: Callable[[], int],
        counts: ConnectionCounts,
    ) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._num_open = num_open
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._least: int | None = None  # the smallest number that another gateway reported
        self._num_left = 0  # connections that were left to that gateway, and that it left here, in a row
        self._starting: set[asyncio.Task[object]] = set()
        self._short = RateLimitedLog(logger)
        sock.setblocking(False)
        self._counts.least_of_others(0)
        self._loop.add_reader(sock, self._on_waiting)

    async def close(self) -> None:
        """Accept no more: connections that wait are left to other gateways. Returns once accepted ones have started."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._counts.close()
        if self._starting:
            await asyncio.wait(self._starting)

    def _on_waiting(self) -> None:
        """A client connects, to this gateway or to another."""
        own = self._num_open() + len(self._starting)
        least = self._counts.least_of_others(own)
        if least != self._least:
            self._least, self._num_left = least, 0
        if least is not None and own > least and self._num_left < _MOST_LEFT:
            self._later(_COURTESY_S, self._take_what_is_left)
        else:
            self._take_one()

    def _take_what_is_left(self) -> None:
        self._num_left = self._num_left + 1 if self._take_one() else 0

    def _take_one(self) -> bool:
        """Accept a connection; whether there was one."""
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another gateway was quicker, or the client has left
        except OSError as error:
            self._short.log(logging.ERROR, now_ns(), "no connection can be accepted: %s", error.strerror)
            self._later(_PAUSE_S, lambda: None)
            return False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, connection))
        self._starting.add(task)
        task.add_done_callback(self._on_started)
        return True

    def _later(self, delay_s: float, what: Callable[[], object]) -> None:
        """After the delay call `what`; until then, ignore clients that connect."""

        def go_on() -> None:
            self._pause = None
            self._loop.add_reader(self._sock, self._on_waiting)
            what()

        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(delay_s, go_on)

    def _on_started(self, task: asyncio.Task[object]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a connection ended as it began: %s", error)
