"""What stands behind the scheduler's peers: a socket for each side, a pidfd for each process; and the loop's timer."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable

import zmq

from common.log import RateLimitedLog
from common.wire.codec import Message
from common.wire.transport import Router
from scheduler.actions import Action

logger = logging.getLogger(__name__)

_TIMER_ABSTIME = 1  # TFD_TIMER_ABSTIME of <sys/timerfd.h>


class Side:
    """The gateways, or the workers: their socket, and a pidfd for each peer.

    A death is known within a millisecond. What is killed is a pidfd, never a pid: a pid may belong to another process
    by then. Owns the socket and the pidfds; `close` closes them.
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
        self.dropped = RateLimitedLog(logger)  # what is no message, from any peer
        self.refused = RateLimitedLog(logger)  # peers of another version, likewise
        self.gone: set[bytes] = set()  # peers to which nothing can be sent, whose last messages may be unread
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
        """Close the pidfds of peers of which nothing is expected: one that has come back under a new name, say."""
        for peer in [peer for peer in self._pidfds if not is_known(peer)]:
            self.forget(peer)

    def close(self) -> None:
        for peer in list(self._pidfds):
            self.forget(peer)
        self.router.close()


class Timer:
    """A descriptor that is readable from a time on. (os.timerfd_create comes with Python 3.13.)

    A poll's own limit counts in whole milliseconds, and a GPU's step takes two of them.
    """

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
