"""The suite that faults are done to, and the table of what was measured at the end of the run.

`FAULTS=soak` has the long counts of the table; `FAULTS_SEED` another schedule.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.faults.promises import PROMISES
from tests.faults.rig import OracleSuite
from tests.faults.trial import Trial

_MEASURED = pytest.StashKey[list[str]]()

StartTrial = Callable[[str], Trial]
Report = Callable[[str], None]

_MAX_FILES = 8192  # as supervisord's minfds


@pytest.fixture(scope="package", autouse=True)
def many_files() -> Iterator[None]:
    """As many connections as a server that supervisord starts may have, for the clients here as well."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if before[1] == resource.RLIM_INFINITY else min(_MAX_FILES, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], most), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="package")
def oracle_suite() -> Iterator[OracleSuite]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        suite = OracleSuite(folder)
        try:
            asyncio.run(suite.ready())
            yield suite
        finally:
            suite.stop()


@pytest.fixture
async def suite(oracle_suite: OracleSuite) -> OracleSuite:
    """With everything there, whatever the test before did to it."""
    await oracle_suite.ready()
    return oracle_suite


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("FAULTS_SEED", "1"))


@pytest.fixture
def soak() -> bool:
    return os.environ.get("FAULTS") == "soak"


@pytest.fixture
def trial(suite: OracleSuite, seed: int, soak: bool) -> StartTrial:
    """Starts the trial of a promise: `async with trial("A1") as running`."""
    return lambda name: Trial(suite, PROMISES[name], seed, soak)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Takes a line for the end of the run."""
    return request.config.stash.setdefault(_MEASURED, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_MEASURED, [])
    if lines:
        terminalreporter.section("promises, as measured")
        for line in lines:
            terminalreporter.write_line(line)
