"""What the driver's errors become. Its calls themselves are on every GPU test's way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from worker.driver import Driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """One whose every call fails with the number of bytes or the graph that it is given."""

    class Call:
        def __init__(self, failing: Callable[..., int]) -> None:
            self._failing = failing

        def __call__(self, *arguments: object) -> int:
            return self._failing(*arguments)

    class Library:
        cuMemcpyHtoDAsync_v2 = Call(lambda destination, source, num_bytes, stream: num_bytes)
        cuMemcpyDtoDAsync_v2 = Call(lambda destination, source, num_bytes, stream: num_bytes)
        cuGraphLaunch = Call(lambda graph, stream: graph)
        cuGetErrorName = Call(lambda code, name: 1)  # has no name for it

    monkeypatch.setattr(ctypes, "PyDLL", lambda name: Library())
    return Driver()


def test_an_error_says_its_number(driver: Driver) -> None:
    for call in (
        lambda: driver.copy_in(0, 0, 700, 0),
        lambda: driver.copy_within(0, 0, 700, 0),
        lambda: driver.launch_graph(700, 0),
    ):
        with pytest.raises(RuntimeError, match="CUDA error 700: unknown") as caught:
            call()
        assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_a_lack_of_memory_is_told_apart_so_that_the_batch_is_halved(driver: Driver) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error 2"):
        driver.launch_graph(2, 0)


def test_what_succeeds_raises_nothing(driver: Driver) -> None:
    driver.copy_in(0, 0, 0, 0)
    driver.launch_graph(0, 0)
