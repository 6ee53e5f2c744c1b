"""Norms, against plain torch in float32."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)

EPSILON = 1e-6
# Rows that fill their tile and rows that do not, several to a program and one.
shapes = pytest.mark.parametrize("shape", [(1, 384), (5, 384), (3, 768), (2, 1024), (3, 2560), (1, 4096)])
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for one rounding, of a relative 2⁻¹¹ in fp16 and 2⁻⁸ in bf16, and what float32 adds to it."""
    tolerance = 1e-3 if actual.dtype == torch.float16 else 8e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=1e-5)


@shapes
def test_rms_norm_is_that_of_plain_torch(shape: tuple[int, int]) -> None:
    x, weight = random(*shape, seed=0), random(shape[1], seed=1)

    assert_rounded(rms_norm(x, weight, EPSILON), rms_norm_reference(x, weight, EPSILON))


@shapes
def test_an_offset_is_added_to_the_weight_before_anything_is_rounded(shape: tuple[int, int]) -> None:
    # Weights so small that in half precision 1 + weight would be another number.
    x, weight = random(*shape, seed=0), random(shape[1], seed=1) / 1000

    assert_rounded(rms_norm(x, weight, EPSILON, 1.0), rms_norm_reference(x, weight, EPSILON, 1.0))


@shapes
def test_add_rms_norm_normalises_the_sum_and_returns_it(shape: tuple[int, int]) -> None:
    x, residual, weight = random(*shape, seed=0), random(*shape, seed=1), random(shape[1], seed=2)

    normed, summed = add_rms_norm(x, residual, weight, EPSILON)

    assert_rounded(normed, rms_norm_reference(x.float() + residual.float(), weight, EPSILON))
    assert torch.equal(summed, x + residual)


@shapes
def test_layer_norm_is_that_of_plain_torch(shape: tuple[int, int]) -> None:
    x, weight, bias = random(*shape, seed=0), random(shape[1], seed=1), random(shape[1], seed=2)

    assert_rounded(layer_norm(x, weight, bias, EPSILON), layer_norm_reference(x, weight, bias, EPSILON))


@shapes
def test_add_layer_norm_normalises_the_sum(shape: tuple[int, int]) -> None:
    x, residual = random(*shape, seed=0), random(*shape, seed=1)
    weight, bias = random(shape[1], seed=2), random(shape[1], seed=3)

    normed = add_layer_norm(x, residual, weight, bias, EPSILON)

    assert_rounded(normed, layer_norm_reference(x.float() + residual.float(), weight, bias, EPSILON))


@shapes
def test_a_layer_norm_without_a_shift_still_subtracts_the_mean(shape: tuple[int, int]) -> None:
    x, residual, weight = random(*shape, seed=0) + 2, random(*shape, seed=1), random(shape[1], seed=2)

    normed = layer_norm(x, weight, None, EPSILON)
    of_sum = add_layer_norm(x, residual, weight, None, EPSILON)

    assert_rounded(normed, layer_norm_reference(x, weight, None, EPSILON))
    assert_rounded(of_sum, layer_norm_reference(x.float() + residual.float(), weight, None, EPSILON))


def test_a_large_mean_does_not_spoil_the_variance() -> None:
    x = random(2, 384, seed=0) + 1000
    ones, zeros = torch.ones(384, device=DEVICE).half(), torch.zeros(384, device=DEVICE).half()

    assert_rounded(layer_norm(x, ones, zeros, EPSILON), layer_norm_reference(x, ones, zeros, EPSILON))


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    x, weight = random(7, 384, seed=0), random(384, seed=1)
    alone = rms_norm(x[6:], weight, EPSILON)
    x[:6] = torch.nan

    assert torch.equal(rms_norm(x, weight, EPSILON)[6:], alone)


@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (384, 768, 1024, 2560, 4096)])
@pytest.mark.parametrize("rows", [1, 33, 4099, 32768])
def test_norms_of_many_bf16_rows(rows: int, columns: int) -> None:
    x, residual = (random(rows, columns, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    weight, bias = (random(columns, seed=seed, dtype=torch.bfloat16) for seed in (2, 3))
    exact = x.float() + residual.float()

    normed, summed = add_rms_norm(x, residual, weight, EPSILON)

    assert torch.equal(summed, x + residual)
    assert_rounded(normed, rms_norm_reference(exact, weight, EPSILON))
    assert_rounded(rms_norm(x, weight, EPSILON), rms_norm_reference(x, weight, EPSILON))
    assert_rounded(rms_norm(x, weight, EPSILON, 1.0), rms_norm_reference(x, weight, EPSILON, 1.0))
    assert_rounded(layer_norm(x, weight, bias, EPSILON), layer_norm_reference(x, weight, bias, EPSILON))
    assert_rounded(layer_norm(x, weight, None, EPSILON), layer_norm_reference(x, weight, None, EPSILON))
    for shift in (bias, None):
        normed = add_layer_norm(x, residual, weight, shift, EPSILON)
        assert_rounded(normed, layer_norm_reference(exact, weight, shift, EPSILON))
