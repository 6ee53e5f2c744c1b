"""The program that keeps cores awake, one process for each: `python -I -S spin.py PARENT CORE ...`.

`awake.py` starts it in its own session and says why. It imports the standard library only. Each process dies with the
process that started it. A byte on standard output says that all of them run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_WORK_S = 10e-6
_SLEEP_S = 60e-6
_GROUP_TRIES = 50
_GROUP_RETRY_S = 0.1

_libc = ctypes.CDLL(None)


def main() -> None:
    """Start a process for each core, then wait for a signal."""
    parent, *cores = map(int, sys.argv[1:])
    _end_with(parent)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _weigh_least()
    own = os.getpid()
    for core in cores:
        if os.fork() == 0:
            _end_with(own)
            _spin(core)
    os.write(1, b".")
    signal.pause()


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, which may have happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _weigh_least() -> None:
    """Give this session the least weight, if the kernel weighs sessions."""
    for _ in range(_GROUP_TRIES):
        try:
            with open("/proc/self/autogroup", "w") as group:  # pathlib takes 10 ms to import
                group.write("19")
        except BlockingIOError:
            time.sleep(_GROUP_RETRY_S)  # the kernel limits how often a user may change a weight
            continue
        except OSError:
            pass  # this kernel does not weigh sessions
        return


def _spin(core: int) -> NoReturn:
    """Work and sleep on one core, for ever."""
    os.sched_setaffinity(0, {core})
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # makes sleeps exact to a microsecond
    while True:
        until = time.perf_counter() + _WORK_S
        while time.perf_counter() < until:
            pass
        time.sleep(_SLEEP_S)


if __name__ == "__main__":
    main()
