"""A wall clock that is set while a suite serves. That none of its code measures by it says tests/test_layout.py; here
are the libraries and supervisord as well."""

from __future__ import annotations

import asyncio
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Report
from tests.faults.promises import PROMISES
from tests.faults.rig import OracleSuite, Process
from tests.faults.trial import Trial, dead

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]

_JUMPS_S = (3600, -3600, -10 * 365 * 86_400, 0)


class Clock:
    """The wall clock of the processes that are started from here on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = folder / "offset"
        self._path.write_bytes(bytes(8))
        library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("WALL_CLOCK", str(self._path))

    def set(self, offset_s: int) -> None:
        with self._path.open("r+b") as file:
            file.write(struct.pack("q", offset_s))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


async def test_a_clock_that_is_set_fails_no_request_and_delays_no_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, soak: bool, report: Report
) -> None:
    if not soak:
        pytest.skip("a suite of its own takes a quarter of a minute: `make soak` has it")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    clock = Clock(folder, monkeypatch)
    suite = OracleSuite(str(folder))
    try:
        await suite.ready()
        async with Trial(suite, PROMISES["G5"], seed, soak) as running:
            for offset_s in _JUMPS_S:
                clock.set(offset_s)
                await asyncio.sleep(1)
                victim = Process(suite, "worker-0")
                victim.send(signal.SIGKILL)
                killed_s = running.now_s()
                await suite.ready(instead_of=victim)
                running.measured("ready_again_s", running.now_s() - killed_s)
                victim.close()
        report(running.judge(exactly=dead(len(_JUMPS_S)) | running.answers()))
        assert min(value for name, value in running.after.items() if name.partition("{")[0].endswith("_sum")) >= 0
        years = {int(line[:4]) for line in suite.log().splitlines() if line[:2] == "20"}
        assert max(years) - min(years) == 10  # it is this clock that they have
    finally:
        suite.stop()
