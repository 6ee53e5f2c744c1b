"""The life of a process: the wait after failed starts, signals, its log, and what it ends with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common.deploy import process as life
from common.run_dir import RunDir
from tests.suite import run_hedgerow
from tests.timing import assert_in_time


def test_the_wait_before_a_start_doubles_with_each_failed_one_and_is_bounded(run_dir: str) -> None:
    RunDir(run_dir).prepare()
    history = life._StartHistory(RunDir(run_dir), "worker-0")
    delays = [history.begin() for _ in range(9)]
    assert delays[0] == 0
    for delay, expected in zip(delays[1:], [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.8 * expected <= delay <= 1.2 * expected


def test_a_process_that_became_ready_starts_again_without_a_wait(run_dir: str) -> None:
    RunDir(run_dir).prepare()
    history = life._StartHistory(RunDir(run_dir), "worker-0")
    history.begin()
    history.clear()
    assert life._StartHistory(RunDir(run_dir), "worker-0").begin() == 0


def test_a_stop_ends_the_wait(run_dir: str) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    assert not life._wait(30)
    assert_in_time(time.monotonic() - began, 5)


@pytest.mark.slow
def test_a_process_whose_log_nobody_reads_still_ends(run_dir: str) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "scheduler", "--run-dir", run_dir, "--log-level", "debug"], stderr=writer
    ) as process:
        end = time.monotonic() + 20
        while not Path(run_dir, "gateways.sock").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"x" * 65536)  # full
        except BlockingIOError:
            pass
        os.set_blocking(writer, True)
        process.terminate()
        assert process.wait(10) == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_a_hangup_opens_the_log_again_and_ends_nothing(run_dir: str) -> None:
    log = Path(f"{run_dir}-logs", "scheduler.log")
    command = [sys.executable, "-m", "scheduler", "--run-dir", run_dir, "--log-dir", str(log.parent)]
    with subprocess.Popen(command) as process:
        end = time.monotonic() + 20
        while not Path(run_dir, "gateways.sock").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        log.rename(log.with_name("old.log"))

        process.send_signal(signal.SIGHUP)

        while not log.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        process.terminate()
        assert process.wait(10) == 0
    assert "starting: " in log.with_name("old.log").read_text()
    assert log.read_text().endswith("stopped with status 0\n")


@pytest.mark.slow
def test_a_run_folder_that_is_too_long_for_a_socket_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    ended = run_hedgerow("scheduler", "--run-dir", str(tmp_path / ("x" * 120)))
    assert ended.returncode == 1
    assert "too long" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_process_dies_with_its_supervisor(run_dir: str) -> None:
    # A parent that starts a scheduler as supervisord would, and is killed.
    script = (
        "# supervisord\n"
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'scheduler', '--run-dir', {run_dir!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | {"SUPERVISOR_ENABLED": "1"}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    end = time.monotonic() + 20
    while not Path(run_dir, "gateways.sock").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.kill()
    parent.communicate()
    while _runs(child):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_process_whose_supervisor_is_gone_does_not_start(run_dir: str) -> None:
    # Its parent is this test: not a supervisor, as the init process is not that takes in orphans.
    ended = run_hedgerow("scheduler", "--run-dir", run_dir, SUPERVISOR_ENABLED="1")
    assert ended.returncode == 1
    assert not Path(run_dir, "gateways.sock").exists()


@pytest.mark.slow
def test_a_bug_in_a_running_process_is_logged_with_its_traceback(run_dir: str) -> None:
    script = (
        "from common.config import SchedulerConfig\n"
        "from common.deploy.process import run_process\n"
        "def run(config, on_ready):\n"
        "    on_ready()\n"
        "    raise ValueError('a bug')\n"
        "run_process('scheduler', SchedulerConfig, run)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, "--run-dir", run_dir, "--log-dir", f"{run_dir}-logs"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    log = Path(f"{run_dir}-logs", "scheduler.log").read_text()
    assert "this process has failed" in log
    assert "ValueError: a bug" in log
    assert "cannot start" not in log


@pytest.mark.slow
def test_a_log_folder_that_cannot_be_written_to_is_one_line(run_dir: str) -> None:
    ended = run_hedgerow("scheduler", "--run-dir", run_dir, "--log-dir", "/proc/nolog")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "--log-dir" in ended.stderr


def test_starts_that_cannot_be_counted_wait_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "worker-0.starts").mkdir()  # neither readable nor writable as a file
    assert life._StartHistory(RunDir(str(tmp_path)), "worker-0").begin() == 5


@pytest.mark.slow
def test_a_gateway_whose_port_is_taken_says_so(run_dir: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_hedgerow("gateway", "--port", str(port), "--run-dir", run_dir)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
