"""A plugin for supervisord that makes it react at once. `supervisord.conf` names it.

supervisord's loop waits for the pipes of its children and for its control socket. Everything else it checks once a
second: it starts its programs one second late, and notices a child's death or a SIGTERM up to a second late. This
plugin adds a pipe to the loop, and writes to it at the start and at each signal. A process that dies at once is then
restarted at once, so `process.py` makes a process wait after failed starts.

Rejected: another supervisor. Rejected: a process that connects to the control socket, since nothing tells when
supervisord has bound it.
"""

from __future__ import annotations

import os
import signal
from typing import Any

_DRAIN_BYTES = 4096


class Waker:
    """A pipe in supervisord's loop, readable once at the start and then after each signal."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(self._writer, b"\0")
        # Python writes each signal's number to the pipe. If the pipe is full, one more number would say nothing new.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    # The interface that supervisord's loop expects.

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        os.read(self.fd, _DRAIN_BYTES)

    def handle_error(self) -> None:
        """Nothing to clean up: the next turn of the loop reads the rest."""


class _NoInterface:
    """The remote calls that a plugin adds to supervisord: none."""


def plug_in(supervisord: Any, **config: str) -> _NoInterface:  # noqa: ANN401  # a supervisor.supervisord.Supervisord
    """Called by supervisord on its main thread before its loop begins, and again after each reload."""
    waiting = supervisord.options.get_socket_map()
    for fd in [fd for fd, what in waiting.items() if isinstance(what, Waker)]:
        del waiting[fd]
    waker = Waker()
    waiting[waker.fd] = waker
    return _NoInterface()
