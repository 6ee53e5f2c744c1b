"""A result on its way to the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.lazy import LazyTensor


def test_a_result_on_the_cpu_is_ready_at_once() -> None:
    lazy = LazyTensor.start(torch.tensor([[1.0, 2.0]]), copy_stream=None)

    assert lazy.ready()
    np.testing.assert_array_equal(lazy.numpy(), np.array([[1.0, 2.0]], dtype=np.float32))


def test_a_result_can_be_read_twice() -> None:
    lazy = LazyTensor.start(torch.tensor([[1.0, 2.0]]), copy_stream=None)
    lazy.numpy()

    assert lazy.numpy().tolist() == [[1.0, 2.0]]


def test_only_contiguous_float32_rows_are_taken() -> None:
    with pytest.raises(AssertionError):
        LazyTensor.start(torch.zeros(2, 2, dtype=torch.float64), copy_stream=None)
    with pytest.raises(AssertionError):
        LazyTensor.start(torch.zeros(2, 3).T, copy_stream=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_result_of_a_device_arrives_while_the_next_step_runs() -> None:
    copy_stream = torch.cuda.Stream()
    rows = torch.arange(8.0, device="cuda").reshape(2, 4) * 2

    lazy = LazyTensor.start(rows, copy_stream)
    del rows
    torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")

    assert lazy.numpy().tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert lazy.ready()
