"""Logging: one line an event, and a stuck reader stops nobody."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import log


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.level = handlers, level


def read(folder: Path) -> list[str]:
    return (folder / "worker-0.log").read_text().splitlines()


def test_a_line_break_in_a_value_cannot_forge_a_line(tmp_path: Path) -> None:
    listener = log.set_up("worker-0", "info", str(tmp_path))
    logging.getLogger("x").warning("name %s", "a\nb\x1b[31m\u2028c")
    listener.stop()
    (line,) = read(tmp_path)
    assert line.endswith(r"WARNING worker-0 x: name a\nb\x1b[31m\u2028c")
    for handler in listener.handlers:
        handler.close()


FILL = """
import logging, resource, sys
from common import log

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

listener = log.set_up("worker-0", "info", sys.argv[1])
logger = logging.getLogger("x")
logger.info("before")
listener.stop()
limit(60)  # as if the disk were full
listener.start()
for number in range(300):
    logger.info("%s %d", "x" * 60, number)
listener.stop()
limit(resource.RLIM_INFINITY)
listener.start()
logger.info("after")
logger.info("later")
listener.stop()
"""


def test_what_cannot_be_written_is_counted_and_told_of_when_there_is_room_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILL, str(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    lines = read(tmp_path)
    assert ended.stderr == ""
    assert lines[0].endswith("x: before")
    assert lines[-3].endswith("x: after")
    assert lines[-2].endswith("WARNING worker-0 common.log: 300 log records could not be written: File too large")
    assert lines[-1].endswith("x: later")


def test_lines_that_a_peer_can_cause_at_will_come_once_a_second_and_say_how_many_did_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limited = log.RateLimitedLog(logging.getLogger("x"))
    for ms in (5_000, 5_001, 5_999, 6_000, 6_500, 9_000, 10_000):
        limited.log(logging.WARNING, ms * 1_000_000, "at %d ms", ms)
    assert [record.getMessage() for record in caplog.records] == [
        "at 5000 ms",
        "at 6000 ms (and 2 more before it)",
        "at 9000 ms (and 1 more before it)",
        "at 10000 ms",
    ]


def test_a_traceback_is_kept_and_indented(tmp_path: Path) -> None:
    listener = log.set_up("worker-0", "info", str(tmp_path))
    try:
        int("wrong\nvalue")
    except ValueError:
        logging.getLogger("x").exception("failed")
    listener.stop()
    lines = read(tmp_path)
    assert lines[0].endswith("failed")
    assert all(line.startswith("    ") for line in lines[1:])
    assert any("ValueError: invalid literal" in line for line in lines)
    for handler in listener.handlers:
        handler.close()


def test_when_nobody_reads_records_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_QUEUED_RECORDS", 3)
    listener = log.set_up("worker-0", "info", str(tmp_path))
    listener.stop()  # as stuck as a reader can be
    logger = logging.getLogger("x")
    for index in range(10):
        logger.info("record %d", index)
    listener.queue.get_nowait()
    listener.queue.get_nowait()
    logger.info("after")
    listener.start()
    listener.stop()
    lines = read(tmp_path)
    assert [line.rpartition(": ")[2] for line in lines if " x: " in line][-1] == "after"
    assert any("7 log records were dropped" in line for line in lines)
    for handler in listener.handlers:
        handler.close()


def test_a_log_that_was_moved_away_is_written_on_in_a_new_file(tmp_path: Path) -> None:
    listener = log.set_up("worker-0", "info", str(tmp_path))
    path = tmp_path / "worker-0.log"
    path.rename(tmp_path / "moved.log")
    log.reopen()
    logging.getLogger("x").info("after")
    listener.stop()
    assert [line.rpartition(" ")[2] for line in read(tmp_path)] == ["after"]
    for handler in listener.handlers:
        handler.close()


def test_a_log_that_cannot_be_opened_again_is_written_on(tmp_path: Path) -> None:
    listener = log.set_up("worker-0", "info", str(tmp_path / "logs"))
    (tmp_path / "logs").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        log.reopen()
    logging.getLogger("x").info("after")
    listener.stop()
    assert len(read(tmp_path / "moved")) == 1
    for handler in listener.handlers:
        handler.close()


def test_a_log_on_standard_error_is_left_alone() -> None:
    listener = log.set_up("worker-0", "info")
    log.reopen()
    listener.stop()
