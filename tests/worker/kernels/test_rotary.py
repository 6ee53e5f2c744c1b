"""Norm and rotation of query and key heads, against plain torch in float32."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels.rotary import qk_norm_rope_, qk_norm_rope_reference

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


def check(num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float16) -> None:
    qkv, *rest = inputs(num_tokens, heads, kv_heads, head_dim, dtype)
    values = qkv[:, (heads + kv_heads) * head_dim :].clone()
    expected = qk_norm_rope_reference(qkv, *rest, heads, kv_heads, EPSILON)

    qk_norm_rope_(qkv, *rest, heads, kv_heads, EPSILON)

    tolerance = 1e-3 if dtype == torch.float16 else 8e-3
    torch.testing.assert_close(qkv.float(), expected, rtol=tolerance, atol=1e-5)
    assert torch.equal(qkv[:, (heads + kv_heads) * head_dim :], values)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (3, 4, 1, 64), (5, 3, 3, 32), (2, 2, 1, 96)],
)
def test_query_and_key_heads_are_normed_and_turned_and_values_left_alone(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    check(num_tokens, heads, kv_heads, head_dim)


def test_position_zero_is_not_turned() -> None:
    qkv, _, cos, sin, q_norm, k_norm = inputs(1, 2, 1, 32)
    cos[0], sin[0] = 1.0, 0.0
    query = qkv[0, :32].float()

    qk_norm_rope_(qkv, torch.zeros(1, dtype=torch.int32, device=DEVICE), cos, sin, q_norm, k_norm, 2, 1, EPSILON)

    expected = query / query.square().mean().sqrt() * q_norm.float()
    torch.testing.assert_close(qkv[0, :32].float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [pytest.param(*shape, marks=gpu) for shape in [(16, 8, 128), (32, 8, 128), (12, 12, 64), (12, 4, 32), (6, 2, 96)]],
)
@pytest.mark.parametrize("num_tokens", [1, 33, 4099, 32768])
def test_many_bf16_tokens(num_tokens: int, heads: int, kv_heads: int, head_dim: int) -> None:
    check(num_tokens, heads, kv_heads, head_dim, torch.bfloat16)
