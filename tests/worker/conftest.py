"""A tiny model for every test of the worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import WorkerConfig
from common.metrics import Metrics
from common.model_location import ModelFolder
from tests.models import write_bert
from worker.engine.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products are faster so, and threads that wait for each other make a busy machine slow."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: write another one for that."""
    return write_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder: Path) -> Engine:
    return make_engine(tiny_folder)


def make_engine(folder: Path, **options: object) -> Engine:
    """An engine, on the CPU unless `options`, which are fields of the configuration, say otherwise."""
    values = {"run_dir": "unused", "device": "cpu"} | options
    config = WorkerConfig(**values)  # type: ignore[arg-type]  # fields by name
    return Engine(ModelFolder(folder.name, folder), config, Metrics())
