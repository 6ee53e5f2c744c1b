"""Connections off a listening socket that several gateways wait for: each takes its part of them.

A client opens its pool of connections at once and uses it for hours. An event loop's own server takes all that wait, so
the gateway that wakes first gets most of a pool, and its core is the limit while others have little to do (of 64
connections to four gateways 0, 2, 25 and 37). So a gateway takes one at a time, and one that has more connections than
another waits a moment first, in which that one takes it. How many each has stands in a file of the run folder. If that
cannot be had, each takes what it finds; if it is not true any more, as of a gateway that was killed or hangs, some
connections wait for a millisecond each in vain, and then none: one after the other it would be 600 of them a second.

Rejected: a socket each with SO_REUSEPORT, whose waiting connections are reset where a gateway stops, and which deals
them at random; one at a time alone, which changed nothing: who is awake already is always first.
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

# The event loop's timers are no finer.
_COURTESY_S = 0.001

# Who has the fewest and leaves so many in a row to this gateway, in a tenth of a second, is not there: it is not waited
# for until it has said something else.
_MOST_LEFT = 64

# Where there is no descriptor or no memory left; meanwhile connections wait in the kernel's queue.
_PAUSE_S = 0.1


class ConnectionCounts:
    """How many connections each gateway of a suite has, as each said last: int32 a slot, one more than they are, and 0
    where there is no gateway."""

    def __init__(self, run_dir: str, slot: int) -> None:
        self._place = 4 * slot
        self._fd: int | None = None
        try:
            self._fd = os.open(RunDir(run_dir).connections, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.warning("gateways cannot share connections evenly: %s", error)

    def least_of_others(self, own: int) -> int | None:
        """Tell the others how many there are here, and how many has who has the fewest of them; None without others."""
        if self._fd is None:
            return None
        try:
            os.pwrite(self._fd, struct.pack("<i", own + 1), self._place)
            told = os.pread(self._fd, 4096, 0)
        except OSError:
            return None  # a full disk, say
        told = told[: self._place] + told[self._place + 4 :]
        return min(
            (count - 1 for (count,) in struct.iter_unpack("<i", told[: len(told) // 4 * 4]) if count > 0), default=None
        )

    def close(self) -> None:
        """There is no gateway here any more."""
        if self._fd is not None:
            try:
                os.pwrite(self._fd, bytes(4), self._place)
            except OSError:
                pass  # see the module's text
            os.close(self._fd)
            self._fd = None


class Acceptor:
    """Takes connections of `sock`, which is this object's from here on as `counts` are, until it is closed.

    `num_open` says how many connections there are here now.
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
        self._least: int | None = None  # what the one with the fewest has said last
        self._num_left = 0  # since then, in a row, of those that were left to it
        self._starting: set[asyncio.Task[object]] = set()
        self._short = RateLimitedLog(logger)
        sock.setblocking(False)
        self._counts.least_of_others(0)
        self._loop.add_reader(sock, self._on_waiting)

    async def close(self) -> None:
        """Take no more of them: what waits is for the others. Returns once those that were taken have begun."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._counts.close()
        if self._starting:
            await asyncio.wait(self._starting)

    def _on_waiting(self) -> None:
        """Somebody wants to connect, to this gateway or another."""
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
        """Whether there was one."""
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
        """Look at nothing that waits until then, but do this first."""

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
