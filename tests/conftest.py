"""Fixtures for every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.metrics import Metrics, open_metrics


@pytest.fixture(scope="session")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """One set of counters for the whole run; tests compare before and after."""
    return open_metrics(str(tmp_path_factory.mktemp("metrics")))


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A run folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield str(Path(folder) / "run")
