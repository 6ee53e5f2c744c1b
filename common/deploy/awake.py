"""Keeps the CPU cores of a host awake, which trades power for latency: `hedgerow serve --keep-awake`.

A query wakes about fifteen threads one after the other, and a sleeping core takes 50 to 150 µs to wake. On a virtual
machine with one H200 that is a third of the 4 ms of a single query. So on each core a process runs that works for
10 µs, sleeps for 60 µs, and so on. It gives way to any other process at once (the kernel's policy SCHED_IDLE). The core
has no time to fall asleep. This costs power, a fifth of each core's time, and what a neighbour on the same physical
core then lacks.

The kernel first shares a core among groups of processes, and applies policies only within a group. On most desktops
each session is a group (autogroup). There a busy process of another session would get only half of a core (2.0 s of 4,
measured 2026-11-30). So these processes have a session of their own with the least weight: they take 0.07 s of 4, and a
thread that wakes waits no longer than within one session. A container or service with its own group cannot change its
weight from within. Against other groups it counts as busy.

Rejected: work without a pause. A thread then wakes 5 µs sooner (in 9.5 µs instead of 14.2; without this module in 21 to
38), and a single query takes 2.46 ms instead of 2.68. But the kernel then sees all cores as busy. It looks for no other
core if a thread's own has work, and moves no waiting thread to a free one. Beside a backfill the p99 of queries was
12.8 ms instead of 9.0 (one H200, 16 cores, 2026-11-30).

Rejected: /dev/cpu_dma_latency. It needs root, and changes nothing in a guest whose kernel has no driver for idle
states. Rejected: threads that spin in our own processes. They would take the interpreter's lock from the others.
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
    """Keep every core awake that this process may use, until SIGTERM or SIGINT. Returns the exit status."""
    try:
        check_keep_awake()
    except ValueError as error:  # `hedgerow serve` has checked this; here it was started by hand
        logger.error("cannot start: %s", error)  # noqa: TRY400 the text says it all
        return EX_CONFIG
    # Handlers, not `sigwait` on blocked signals: until then another thread, which does not block them, could take one.
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
        logger.info("keeping %d cores awake", len(cores))
        on_ready()
        os.read(end_fd, 8)
        spinning.kill()
    return 0


if __name__ == "__main__":
    run_process("awake", ProcessConfig, main)
