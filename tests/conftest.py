"""Fixtures for every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.metrics import Metrics


@pytest.fixture(scope="session")
def metrics() -> Metrics:
    """One set of counters for the whole run, in memory; tests compare before and after."""
    return Metrics()


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A run folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield str(Path(folder) / "run")
