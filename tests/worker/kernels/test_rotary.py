"""Rotation of query and key heads, with their norms and without, against plain torch in float32."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels.rotary import qk_norm_rope_, qk_norm_rope_reference, rope_, rope_reference

EPSILON = 1e-6
NUM_POSITIONS = 64
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def inputs(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, ...]:
    """qkv, positions, cos, sin, q_norm, k_norm."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(NUM_POSITIONS, head_dim // 2, generator=generator) * 6
    tensors = (
        torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype),
        torch.randint(NUM_POSITIONS, (num_tokens,), generator=generator, dtype=torch.int32),
        angles.cos(),
        angles.sin(),
        torch.randn(head_dim, generator=generator).to(dtype),
        torch.randn(head_dim, generator=generator).to(dtype),
    )
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def check(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    *,
    norm_offset: float = 0.0,
) -> None:
    qkv, *rest = inputs(num_tokens, heads, kv_heads, head_dim, dtype)
    values = qkv[:, (heads + kv_heads) * head_dim :].clone()
    expected = qk_norm_rope_reference(qkv, *rest, heads, kv_heads, EPSILON, norm_offset)

    qk_norm_rope_(qkv, *rest, heads, kv_heads, EPSILON, norm_offset)

    assert_rounded(qkv, expected)
    assert torch.equal(qkv[:, (heads + kv_heads) * head_dim :], values)


def check_without_norms(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float16
) -> None:
    qkv, positions, cos, sin, _, _ = inputs(num_tokens, heads, kv_heads, head_dim, dtype)
    values = qkv[:, (heads + kv_heads) * head_dim :].clone()
    expected = rope_reference(qkv, positions, cos, sin, heads, kv_heads)

    rope_(qkv, positions, cos, sin, heads, kv_heads)

    assert_rounded(qkv, expected)
    assert torch.equal(qkv[:, (heads + kv_heads) * head_dim :], values)


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-3 if actual.dtype == torch.float16 else 8e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=1e-5)


shapes = pytest.mark.parametrize(
    ("num_tokens", "heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (3, 4, 1, 64), (5, 3, 3, 32), (2, 2, 1, 96), (2, 3, 1, 256)],
)


@shapes
def test_query_and_key_heads_are_normed_and_turned_and_values_left_alone(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    check(num_tokens, heads, kv_heads, head_dim)


@shapes
def test_an_offset_is_added_to_the_weights_of_the_norms(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    check(num_tokens, heads, kv_heads, head_dim, norm_offset=1.0)


@shapes
def test_query_and_key_heads_are_turned_without_norms(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    check_without_norms(num_tokens, heads, kv_heads, head_dim)


def test_a_turn_is_that_of_the_plane_of_columns_half_a_head_apart() -> None:
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]], device=DEVICE).half()
    # A table of one row for each token: by a right angle and not at all.
    cos, sin = torch.tensor([[0.0, 1.0]], device=DEVICE), torch.tensor([[1.0, 0.0]], device=DEVICE)

    rope_(qkv, torch.zeros(1, dtype=torch.int32, device=DEVICE), cos, sin, 1, 1)

    assert qkv.tolist() == [[-3.0, 2.0, 1.0, 4.0, -7.0, 6.0, 5.0, 8.0, 9.0, 10.0, 11.0, 12.0]]


def test_position_zero_is_not_turned() -> None:
    qkv, _, cos, sin, q_norm, k_norm = inputs(1, 2, 1, 32)
    cos[0], sin[0] = 1.0, 0.0
    query = qkv[0, :32].float()

    qk_norm_rope_(qkv, torch.zeros(1, dtype=torch.int32, device=DEVICE), cos, sin, q_norm, k_norm, 2, 1, EPSILON)

    expected = query / query.square().mean().sqrt() * q_norm.float()
    torch.testing.assert_close(qkv[0, :32].float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        pytest.param(*shape, marks=gpu)
        for shape in [(16, 8, 128), (32, 8, 128), (12, 12, 64), (12, 4, 32), (6, 2, 96), (3, 1, 256)]
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 33, 4099, 32768])
def test_many_bf16_tokens(num_tokens: int, heads: int, kv_heads: int, head_dim: int) -> None:
    check(num_tokens, heads, kv_heads, head_dim, torch.bfloat16)
    check(num_tokens, heads, kv_heads, head_dim, torch.bfloat16, norm_offset=1.0)
    check_without_norms(num_tokens, heads, kv_heads, head_dim, torch.bfloat16)
