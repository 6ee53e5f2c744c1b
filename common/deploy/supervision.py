"""A plugin of supervisord's that has it look up at once when there is something to do. `supervisord.conf` names it.

Its loop waits for its children's pipes and its control socket, and looks at everything else once a second: it starts
its programs a second after it is up itself, and sees a child's death or a SIGTERM up to a second late. Here its
signals, and its own start, come through a pipe that it waits for as for the others. What dies at once is started again
at once, too: `launch.py` has a process wait whose last starts have failed.

Rejected: another supervisor; a process that prods the control socket, which is bound at a moment that nobody is told.
"""

from __future__ import annotations

import os
import signal
from typing import Any

_DRAIN_BYTES = 4096


class Waker:
    """A pipe in supervisord's loop, readable once at the start and then whenever a signal has come."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(self._writer, b"\0")
        # Python writes a signal's number to it. Where nobody has read so many, one more says nothing new.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    # What supervisord asks of whatever it waits for.

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        os.read(self.fd, _DRAIN_BYTES)

    def handle_error(self) -> None:
        """Nothing to let go of: what was not read is read in the next turn."""


class _NoInterface:
    """What a plugin adds to supervisord's remote calls."""


def plug_in(supervisord: Any, **config: str) -> _NoInterface:  # noqa: ANN401  # a supervisor.supervisord.Supervisord
    """Called by supervisord on its main thread before its loop begins; after a reload again, the old pipe shut."""
    waiting = supervisord.options.get_socket_map()
    for fd in [fd for fd, what in waiting.items() if isinstance(what, Waker)]:
        del waiting[fd]
    waker = Waker()
    waiting[waker.fd] = waker
    return _NoInterface()
