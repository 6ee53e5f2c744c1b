"""Gated activations, against plain torch in float32."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels.activation import ACTIVATIONS
from worker.kernels.swiglu import gated, gated_reference, swiglu

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# exp of a very negative gate: numpy's warning, in the interpreter.
may_overflow = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype).to(DEVICE)


@may_overflow
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 2), (3, 768), (2, 6144), (5, 2200)])
def test_gated_is_that_of_plain_torch(shape: tuple[int, int], activation: str) -> None:
    gate_up = random(*shape)

    inner = gated(gate_up, activation)

    assert inner.dtype == gate_up.dtype
    torch.testing.assert_close(inner.float(), gated_reference(gate_up, activation), rtol=1e-3, atol=1e-5)


def test_the_first_half_is_the_gate() -> None:
    gate_up = torch.tensor([[-1.0, 2.0, 3.0, 4.0]], dtype=torch.float16, device=DEVICE)

    assert gated(gate_up, "relu").tolist() == [[0.0, 8.0]]


def test_swiglu_is_gated_by_silu() -> None:
    gate_up = random(3, 768)

    assert torch.equal(swiglu(gate_up), gated(gate_up, "silu"))


def test_an_activation_of_another_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="swish"):
        gated(random(1, 2), "swish")


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_gate_that_is_not_a_number_stays_one(activation: str) -> None:
    gate_up = torch.tensor([[torch.nan, 1.0, 2.0, 2.0]], dtype=torch.float16, device=DEVICE)

    assert gated(gate_up, activation).isnan().tolist() == [[True, False]]


@may_overflow
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gates_at_the_ends_of_the_range_are_finite(activation: str) -> None:
    gate_up = torch.tensor([[-6e4, 6e4, 1.0, 1.0]], dtype=torch.float16, device=DEVICE)

    assert gated(gate_up, activation).tolist() == [[0.0, 60000.0]]


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (3072, 9728)])
@pytest.mark.parametrize("num_tokens", [1, 33, 4099, 32768])
def test_many_bf16_tokens(num_tokens: int, columns: int, activation: str) -> None:
    gate_up = random(num_tokens, 2 * columns, dtype=torch.bfloat16)

    inner = gated(gate_up, activation)

    torch.testing.assert_close(inner.float(), gated_reference(gate_up, activation), rtol=8e-3, atol=1e-5)
