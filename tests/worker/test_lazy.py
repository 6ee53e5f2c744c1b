"""A result on its way to the host."""

from __future__ import annotations

import numpy as np
import pytest

from worker.batch.lazy import LazyTensor, Rows

ROWS = Rows(np.array([[1, 2], [3, 4]], dtype=np.uint8), np.array([1, 0], dtype=np.uint8))


def test_a_result_that_needs_no_device_is_ready_at_once() -> None:
    lazy = LazyTensor(lambda: ROWS)

    assert lazy.ready()
    assert lazy.numpy() is ROWS


def test_a_result_is_read_once_and_can_be_asked_for_twice() -> None:
    reads = []

    def read() -> Rows:
        reads.append(1)
        return ROWS

    lazy = LazyTensor(read)

    assert lazy.numpy() is lazy.numpy()
    assert reads == [1]


def test_a_result_is_ready_when_its_step_has_ended_or_it_was_read() -> None:
    ended = [False]
    lazy = LazyTensor(lambda: ROWS, lambda: ended[0])

    assert not lazy.ready()
    ended[0] = True
    assert lazy.ready()
    ended[0] = False
    lazy.numpy()
    assert lazy.ready()


def test_a_device_that_failed_fails_every_reading_and_is_asked_once() -> None:
    reads = []

    def read() -> Rows:
        reads.append(1)
        raise RuntimeError("the device is gone")

    lazy = LazyTensor(read, lambda: True)

    with pytest.raises(RuntimeError, match="the device is gone"):
        lazy.numpy()
    with pytest.raises(RuntimeError, match="asked for before"):
        lazy.numpy()
    assert reads == [1]
