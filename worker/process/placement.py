"""A GPU's worker runs on the cores and in the memory nearest to its GPU, if the host has several NUMA nodes.

A copy to a GPU on the other socket crosses the link between the sockets, and so does every launch. The node of a GPU is
read from files of the kernel and the driver, before CUDA is initialised and before the threads that use it start. What
this thread starts and allocates later follows.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from pathlib import Path

logger = logging.getLogger(__name__)

_MPOL_PREFERRED = 1  # memory of this node while it has some, then of another
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the system call's number
_MAX_NODES = 1024


def pin(slot: int, visible: list[str] | None, root: Path = Path("/")) -> None:
    """Keep the calling thread, and all threads that it starts, to the NUMA node of this slot's GPU.

    Does nothing if there is one node, if the node is unknown, or if none of its cores may be used here.

    Args:
        visible: the devices of CUDA_VISIBLE_DEVICES, None without it; slots beyond the last begin again at the first.
        root: of the file system.
    """
    bus_id = _bus_id(slot, visible, root)
    node = None if bus_id is None else _node(bus_id, root)
    if node is None or len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return
    try:
        cores = _cores((root / f"sys/devices/system/node/node{node}/cpulist").read_text()) & os.sched_getaffinity(0)
        if not cores:
            logger.warning("the GPU at %s is near NUMA node %d, of whose cores none may be used here", bus_id, node)
            return
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning("not kept to NUMA node %d, near the GPU at %s: %s", node, bus_id, error.strerror)
        return
    logger.info("on the %d cores of NUMA node %d, nearest to the GPU at %s", len(cores), node, bus_id)
    _prefer_memory(node)


def _bus_id(slot: int, visible: list[str] | None, root: Path) -> str | None:
    """The PCI address of a slot's GPU, in the form of /sys.

    CUDA counts GPUs by speed and then by address. These are alike, so the address decides.
    """
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    if not folders:
        return None
    if visible is None:
        return folders[slot % len(folders)].name.lower()
    wanted = visible[slot % len(visible)] if visible else ""
    if wanted.isdecimal():
        return folders[int(wanted)].name.lower() if int(wanted) < len(folders) else None
    for folder in folders:
        try:
            found = re.search(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
        except OSError:
            continue
        if found is not None and wanted.startswith("GPU-") and found[1].startswith(wanted):
            return folder.name.lower()
    return None  # a MIG instance, say


def _node(bus_id: str, root: Path) -> int | None:
    try:
        node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _cores(cpulist: str) -> set[int]:
    """The numbers in the kernel's list of ranges: `0-3,8` is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for span in cpulist.strip().split(","):
        first, _, last = span.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _prefer_memory(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or node >= _MAX_NODES:
        return
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_PREFERRED, mask, _MAX_NODES):
        # Some containers forbid it. Memory is then taken where the thread runs, which is usually the same node.
        logger.info("memory of NUMA node %d cannot be asked for: %s", node, os.strerror(ctypes.get_errno()))
