"""What keeps cores awake gives way to everything, and ends with the suite whichever way that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.config import ProcessConfig
from common.deploy import awake as keeping
from common.errors import EX_CONFIG, EX_FAILURE
from common.hardware import check_keep_awake

COMMAND = [sys.executable, "-c", "import sys; from common.deploy.cli import main; sys.exit(main())", "awake"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def blocks(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:")]
    return bool(mask & (1 << (number - 1)))


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s, "it took 20 s"
        time.sleep(0.02)


@pytest.fixture
def awake(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The process, and those of its cores."""
    process = subprocess.Popen([*COMMAND, "--run-dir", str(tmp_path)], stderr=subprocess.DEVNULL)
    cores = os.sched_getaffinity(0)
    until(lambda: len(children_of(process.pid)) == 1)
    [starter] = children_of(process.pid)
    until(lambda: len(children_of(starter)) == len(cores))
    spinning = children_of(starter)
    until(lambda: sorted(tuple(os.sched_getaffinity(pid)) for pid in spinning) == sorted((core,) for core in cores))
    yield process, spinning
    process.kill()
    process.wait()


def test_cores_are_kept_awake_only_where_their_time_is_all_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("common.hardware.usable_cpus", lambda: 4)
    check_keep_awake()
    monkeypatch.setattr("common.hardware.usable_cpus", lambda: 3)
    with pytest.raises(ValueError, match="leave it out"):
        check_keep_awake()
    assert keeping.main(ProcessConfig(run_dir="unused"), lambda: None) == EX_CONFIG  # by hand, too
    assert "leave it out" in caplog.text


@pytest.mark.slow
def test_each_core_has_something_to_run_that_gives_way_to_all_else(
    awake: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    _, spinning = awake
    assert {os.sched_getscheduler(pid) for pid in spinning} == {os.SCHED_IDLE}
    # The kernel shares time among sessions first: in one of its own, of the least weight, it takes nobody's.
    [session] = {os.getsid(pid) for pid in spinning}
    assert session != os.getsid(0)
    group = Path(f"/proc/{session}/autogroup")
    assert not group.exists() or group.read_text().endswith(" nice 19\n")


@pytest.mark.slow
def test_it_pauses_all_the_time_so_that_the_kernel_does_not_take_a_core_for_busy(
    awake: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    def pauses(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    _, spinning = awake
    began_s, before_s = time.monotonic(), sum(map(cpu_s, spinning))
    before = list(map(pauses, spinning))
    until(lambda: all(pauses(pid) - number > 500 for pid, number in zip(spinning, before, strict=True)))
    assert sum(map(cpu_s, spinning)) - before_s < 0.7 * len(spinning) * (time.monotonic() - began_s)


@pytest.mark.slow
def test_where_nothing_can_give_way_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "spin.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(keeping, "_SPIN", tmp_path / "spin.py")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert keeping.main(ProcessConfig(run_dir="unused"), lambda: None) == EX_FAILURE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "cannot be kept awake here" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_of_it_ends_with_its_process(
    awake: tuple[subprocess.Popen[bytes], list[int]], number: signal.Signals
) -> None:
    process, spinning = awake
    process.send_signal(number)
    assert process.wait(20) == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    until(lambda: not any(map(is_running, spinning)))


@pytest.mark.slow
def test_it_ends_as_it_should_when_told_so_while_it_starts(tmp_path: Path) -> None:
    process = subprocess.Popen([*COMMAND, "--run-dir", str(tmp_path)], stderr=subprocess.DEVNULL)
    until(lambda: bool(children_of(process.pid)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.slow
def test_who_starts_it_may_have_blocked_its_signals(tmp_path: Path) -> None:
    blocked = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP]); os.execv(sys.executable, "
    )
    command = [sys.executable, "-c", f"{blocked}{[*COMMAND, '--run-dir', str(tmp_path)]!r})"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(children_of(process.pid)))
        # While it starts a child, all its signals are blocked for a moment.
        until(lambda: not blocks(process.pid, signal.SIGHUP))
    finally:
        process.kill()
        process.wait()
