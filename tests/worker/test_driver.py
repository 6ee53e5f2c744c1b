"""What the driver's errors become. Its calls themselves are on every GPU test's way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from worker.engine.driver import Driver, wake


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """One whose every call fails with the graph or the event that it is given."""

    class Call:
        def __init__(self, failing: Callable[..., int]) -> None:
            self._failing = failing

        def __call__(self, *arguments: object) -> int:
            return self._failing(*arguments)

    class Library:
        cuGraphLaunch = Call(lambda graph, stream: graph)
        cuEventRecord = Call(lambda event, stream: event)
        cuGetErrorName = Call(lambda code, name: 1)  # has no name for it

    monkeypatch.setattr(ctypes, "PyDLL", lambda name: Library())
    return Driver()


def test_an_error_says_its_number(driver: Driver) -> None:
    for call in (driver.launch_graph, driver.record):
        with pytest.raises(RuntimeError, match="CUDA error 700: unknown") as caught:
            call(700, 0)
        assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_a_lack_of_memory_is_told_apart_so_that_the_batch_is_halved(driver: Driver) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error 2"):
        driver.launch_graph(2, 0)


def test_what_succeeds_raises_nothing(driver: Driver) -> None:
    driver.launch_graph(0, 0)
    driver.record(0, 0)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that can use a device")
def test_where_torch_is_for_cpus_alone_no_device_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(ctypes, "CDLL", opened.append)

    wake(0)

    assert opened == []
