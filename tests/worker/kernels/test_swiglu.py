"""The gated activation, against plain torch in float32."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels.swiglu import swiglu, swiglu_reference

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype).to(DEVICE)


@pytest.mark.parametrize("shape", [(1, 2), (3, 768), (2, 6144), (5, 2200)])
def test_swiglu_is_that_of_plain_torch(shape: tuple[int, int]) -> None:
    gate_up = random(*shape)

    gated = swiglu(gate_up)

    assert gated.dtype == gate_up.dtype
    torch.testing.assert_close(gated.float(), swiglu_reference(gate_up), rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_gates_at_the_ends_of_the_range_are_finite() -> None:
    gate_up = torch.tensor([[-6e4, 6e4, 1.0, 1.0]], dtype=torch.float16, device=DEVICE)

    assert swiglu(gate_up).tolist() == [[0.0, 60000.0]]


@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (3072, 9728)])
@pytest.mark.parametrize("num_tokens", [1, 33, 4099, 32768])
def test_many_bf16_tokens(num_tokens: int, columns: int) -> None:
    gate_up = random(num_tokens, 2 * columns, dtype=torch.bfloat16)

    torch.testing.assert_close(swiglu(gate_up).float(), swiglu_reference(gate_up), rtol=8e-3, atol=1e-5)
