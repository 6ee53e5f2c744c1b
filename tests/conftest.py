"""Fixtures for every test."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

# Before whatever is collected first imports Triton: it decides then. Without a GPU kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from common.metrics import Metrics
from tests.browser import Browser, launch
from tests.chromium import find
from tests.fakes import FakeWorker, RunningScheduler


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`sampled(n)` leaves the first of every n sets of a test's parameters to `make test`; the others are thorough."""
    num_sets: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            (every,) = sampled.args
            if num_sets[test] % every:
                item.add_marker(pytest.mark.thorough)
            num_sets[test] += 1


@pytest.fixture(scope="session")
def metrics() -> Metrics:
    """One set of counters for the whole run, in memory; tests compare before and after."""
    return Metrics()


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A run folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield str(Path(folder) / "run")


@pytest.fixture
def start_worker(run_dir: str) -> Iterator[Callable[..., FakeWorker]]:
    """Start an oracle worker; it is stopped after the test."""
    workers: list[FakeWorker] = []

    def start(*args: str, **kwargs: object) -> FakeWorker:
        workers.append(FakeWorker(run_dir, *args, **kwargs))  # type: ignore[arg-type]
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def start_scheduler(run_dir: str, metrics: Metrics) -> Iterator[Callable[[], RunningScheduler]]:
    """Start the real scheduler's loop; it is stopped after the test."""
    schedulers: list[RunningScheduler] = []

    def start() -> RunningScheduler:
        schedulers.append(RunningScheduler(run_dir, metrics))
        return schedulers[-1]

    yield start
    for scheduler in schedulers:
        scheduler.close()


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    """A headless Chromium of this test's own. Without one the test is skipped; in CI, where `CI` is set, it fails."""
    chromium = find()
    if chromium is None:
        missing = "no Chromium is found; `make test` says why, tests/chromium.py what is looked for"
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    async with launch(chromium, tmp_path / "profile") as browser:
        yield browser
