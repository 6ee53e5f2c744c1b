"""Keeps a host's cores from sleeping, for who pays power for latency: `hedgerow serve --keep-awake`.

A query wakes some fifteen threads one after the other, and a core that sleeps takes 50 to 150 µs to wake: on a virtual
machine with one H200 that is a third of a lone query's 4 ms. So on each core something runs that gives way to
everything else at once (the kernel's policy SCHED_IDLE): it works for 10 µs, sleeps for 60, and so on, which leaves the
core no time to fall asleep. It costs nothing but power, for a fifth of each core's time, and what a neighbour on the
same physical core then lacks.

The kernel shares a core among groups first and looks at policies within a group only. Where each session is a group
(autogroups, as most desktops have them) somebody else's busy process would get half of a core and this the other half
(2.0 s of 4, measured 2026-11-30): hence a session of its own with the least weight (0.07 s of 4; a thread that wakes
waits no longer than beside it in one session). A container or service with a group of its own cannot change its weight
from within: against others it counts as busy.

Rejected: to work without a pause. A thread is woken 5 µs sooner then (in 9.5 instead of 14.2 µs; 21 to 38 where nothing
keeps cores awake), and a lone query takes 2.46 ms instead of 2.68. But to the kernel all cores are busy: where a
thread's own has work it looks for no other, and moves none that waits to one that has none. Beside a backfill the p99
of queries was 12.8 ms instead of 9.0 (one H200, 16 cores, 2026-11-30). Nor /dev/cpu_dma_latency, which needs root and
changes nothing in a guest whose kernel has no driver for idle states; nor threads of our own that spin, which would
take the interpreter's lock from those that work.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.config import ProcessConfig
from common.deploy.process import run_process
from common.errors import EX_CONFIG, EX_FAILURE
from common.hardware import check_keep_awake

logger = logging.getLogger(__name__)

_SPIN = Path(__file__).with_name("spin.py")


def main(_config: ProcessConfig, on_ready: Callable[[], None]) -> int:
    """Keep every core awake that this process may use, until SIGTERM or SIGINT; the exit status."""
    try:
        check_keep_awake()
    except ValueError as error:  # not by `hedgerow serve`, which has looked
        logger.error("cannot start: %s", error)  # noqa: TRY400 the text says it all
        return EX_CONFIG
    # Not blocked for `sigwait`: until that is reached a signal would go to another thread, which does not block it.
    end_fd = os.eventfd(0, os.EFD_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.eventfd_write(end_fd, 1))
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-I", "-S", str(_SPIN), str(os.getpid()), *map(str, cores)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as spinning:
        assert spinning.stdout is not None, "a pipe was asked for"
        if not spinning.stdout.read(1):
            logger.error("cannot start: cores cannot be kept awake here; leave out --keep-awake")
            return EX_FAILURE
        logger.info("%d cores are kept awake", len(cores))
        on_ready()
        os.read(end_fd, 8)
        spinning.kill()
    return 0


if __name__ == "__main__":
    run_process("awake", ProcessConfig, main)
