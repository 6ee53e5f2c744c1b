"""Which cores a GPU's worker runs on, by the files of made-up hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite import ROOT
from worker.process import placement
from worker.process.placement import pin


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What this thread was pinned to, on a host of eight cores; nothing is done to this one."""
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: asked.append(set(cores)))
    monkeypatch.setattr(placement, "_prefer_memory", lambda _: None)
    return asked


def host(root: Path, *gpus: tuple[str, int], nodes: tuple[str, ...] = ("0-3", "4-7")) -> Path:
    """A host with GPUs at these PCI addresses, near these nodes, which have these cores."""
    for number, cores in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for number, (bus_id, node) in enumerate(gpus):
        information = root / f"proc/driver/nvidia/gpus/{bus_id}/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{number}{number}aa-01\n")
        device = root / f"sys/bus/pci/devices/{bus_id.lower()}"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return root


def test_a_worker_runs_on_the_cores_nearest_to_its_gpu(tmp_path: Path, pinned: list[set[int]]) -> None:
    root = host(tmp_path, ("0000:1B:00.0", 0), ("0000:9A:00.0", 1))
    pin(0, None, root)
    pin(1, None, root)
    pin(2, None, root)  # a third worker shares the first GPU
    assert pinned == [{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 1, 2, 3}]


@pytest.mark.parametrize("visible", [["1"], ["GPU-11aa"], ["GPU-11aa-01", "0"]])
def test_a_slot_counts_in_the_devices_that_are_visible(
    tmp_path: Path, pinned: list[set[int]], visible: list[str]
) -> None:
    pin(0, visible, host(tmp_path, ("0000:1b:00.0", 0), ("0000:9a:00.0", 1)))
    assert pinned == [{4, 5, 6, 7}]


def test_cores_that_may_not_be_used_here_are_left_out(
    tmp_path: Path, pinned: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = host(tmp_path, ("0000:1b:00.0", 0), ("0000:9a:00.0", 1), nodes=("0-1,4-5", "2-3,6-7"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 7})
    pin(0, None, root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    pin(1, None, root)
    assert pinned == [{4}]


@pytest.mark.parametrize(
    ("gpus", "nodes", "visible"),
    [
        pytest.param([("0000:1b:00.0", 0)], ("0-7",), None, id="one node"),
        pytest.param([("0000:1b:00.0", -1)], ("0-3", "4-7"), None, id="the node is not told"),
        pytest.param([], ("0-3", "4-7"), None, id="no driver"),
        pytest.param([("0000:1b:00.0", 0)], ("0-3", "4-7"), ["5"], id="no such device"),
        pytest.param([("0000:1b:00.0", 0)], ("0-3", "4-7"), ["MIG-aa"], id="a part of a device"),
        pytest.param([("0000:1b:00.0", 0)], ("0-3", "4-7"), [], id="none is visible"),
    ],
)
def test_where_nothing_is_known_nothing_is_done(
    tmp_path: Path,
    pinned: list[set[int]],
    gpus: list[tuple[str, int]],
    nodes: tuple[str, ...],
    visible: list[str] | None,
) -> None:
    pin(0, visible, host(tmp_path, *gpus, nodes=nodes))
    assert pinned == []


def test_memory_of_the_node_is_asked_for() -> None:
    """Of this host's own first node; in a child, since it cannot be undone here."""
    program = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from worker.process.placement import _prefer_memory\n"
        "_prefer_memory(0)\n"
        "print(open('/proc/self/numa_maps').read())"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    if "cannot be asked for" in child.stderr or "/proc/self/numa_maps" in child.stderr:
        pytest.skip(f"not on this host: {child.stderr[-200:]}")
    assert child.returncode == 0, child.stderr
    assert "prefer:0" in child.stdout or "prefer=relative:0" in child.stdout
