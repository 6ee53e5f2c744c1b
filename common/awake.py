"""Keeps a host's cores from sleeping, for who pays power for latency: `hedgerow serve --keep-awake`.

A query wakes some fifteen threads one after the other, and a core that sleeps takes 50 to 150 µs to wake: on a virtual
machine with one H200 that is a third of a lone query's 4 ms. So on each core something runs that gives way to
everything else at once (the kernel's policy SCHED_IDLE) and leaves the core no reason to sleep. It costs nothing but
power, and what a neighbour on the same physical core then lacks.

Rejected: /dev/cpu_dma_latency, which needs root and changes nothing in a guest whose kernel has no driver for idle
states; threads of our own that spin, which would take the interpreter's lock from those that work.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from common.config import ProcessConfig

logger = logging.getLogger(__name__)

# A core's process: it ends with ours (PR_SET_PDEATHSIG), which may have ended before the kernel was told.
_SPIN = """
import ctypes, os, sys
core, parent = map(int, sys.argv[1:])
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {core})
if os.getppid() == parent:
    while True:
        pass
"""


def main(_config: ProcessConfig, on_ready: Callable[[], None]) -> int:
    """Keep every core awake that this process may use, until SIGTERM or SIGINT; the exit status."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-I", "-S", "-c", _SPIN]
    spinning = [subprocess.Popen([*command, str(core), str(os.getpid())]) for core in cores]
    logger.info("%d cores are kept awake", len(cores))
    on_ready()
    signal.sigwait(ends)
    for process in spinning:
        process.kill()
        process.wait()
    return 0
