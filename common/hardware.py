"""The CPU time and the GPUs that a process may use. It does not load torch, so that a start stays quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import environment


def usable_cpus() -> int:
    """How many CPUs' time this process may use. A container with a quota sees all CPUs, but may not use them all."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file (version 1), or the quota is "max"
        allowed = sys.maxsize
    return min(len(os.sched_getaffinity(0)), allowed)


def visible_gpus() -> list[str]:
    """The GPUs that this user may use, as CUDA_VISIBLE_DEVICES writes them."""
    visible = environment.visible_cuda_devices()
    if visible is not None:
        return visible
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def check_keep_awake() -> None:
    """Raises ValueError: keeping cores awake would take time from the processes that work."""
    if usable_cpus() < len(os.sched_getaffinity(0)):
        raise ValueError(
            "--keep-awake would use a fifth of every core that this container sees, but its CPU quota (cpu.max) is "
            "less than all of them: leave it out, or give the container its own cores (cpuset)"
        )
