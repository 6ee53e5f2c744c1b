"""The rotary embedding of every query and key head, perhaps after its RMS norm, in place on the merged projection.

Column i turns with column i + head_dim / 2 (half-split layout).

Source: Su et al., RoFormer (2021), section 3.4.2, which pairs neighbours instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import launch, pdl_options

# Elements that a program holds, one token's: 16 a thread with 4 warps. To be measured.
_TILE = 2048
_NUM_WARPS = 4


def rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Rotate the query and key heads; the value heads stay as they are.

    Args:
        qkv: [tokens, (num_heads + 2 · num_kv_heads) · head_dim], contiguous: queries, keys, values.
        positions: int32 [tokens], each a row of the tables.
        cos, sin: float32 [positions, head_dim / 2], contiguous.
    """
    _launch(qkv, positions, cos, sin, None, None, num_heads, num_kv_heads, 0.0, 0.0)


def qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    norm_offset: float = 0.0,
) -> None:
    """Normalise and rotate the query and key heads; the value heads stay as they are.

    Args:
        qkv, positions, cos, sin: as of `rope_`.
        q_norm, k_norm: [head_dim], weights of the norms.
        norm_offset: added to the weights.
    """
    _launch(qkv, positions, cos, sin, q_norm, k_norm, num_heads, num_kv_heads, epsilon, norm_offset)


def rope_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """What `rope_` leaves in `qkv`, as plain torch: a new tensor, in float32."""
    heads = qkv.float().view(qkv.shape[0], num_heads + 2 * num_kv_heads, 2 * cos.shape[1])
    turning, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    first, second = turning.chunk(2, dim=-1)  # [tokens, heads, head_dim / 2]
    c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
    return torch.cat([torch.cat([first * c - second * s, second * c + first * s], dim=-1), value], dim=1).flatten(1)


def qk_norm_rope_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    norm_offset: float = 0.0,
) -> torch.Tensor:
    """What `qk_norm_rope_` leaves in `qkv`, as plain torch: a new tensor, in float32."""
    heads = qkv.float().view(qkv.shape[0], num_heads + 2 * num_kv_heads, q_norm.shape[0])
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, key = (
        x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * (weight.float() + norm_offset)
        for x, weight in ((query, q_norm), (key, k_norm))
    )
    normed = torch.cat([query, key, value], dim=1).flatten(1)
    return rope_reference(normed, positions, cos, sin, num_heads, num_kv_heads)


def _launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    norm_offset: float,
) -> None:
    """Without norms if there are no weights of them."""
    half = cos.shape[1]
    num_rotated = num_heads + num_kv_heads
    block = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_rotated), max(1, _TILE // (2 * block)))
    launch(
        _rope_kernel,
        (qkv.shape[0], triton.cdiv(num_rotated, heads)),
        qkv,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        epsilon,
        norm_offset or None,  # 0 would be an addition for every column
        TOKEN_STRIDE=qkv.shape[1],
        NUM_HEADS=num_heads,
        NUM_ROTATED=num_rotated,
        HALF=half,
        BLOCK=block,
        HEADS=heads,
        num_warps=_NUM_WARPS,
        **pdl_options(qkv),
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope_kernel(
    qkv: tl.tensor,  # [tokens, TOKEN_STRIDE]
    positions: tl.tensor,  # [tokens]
    cos: tl.tensor,  # [positions, HALF]
    sin: tl.tensor,
    q_norm: tl.tensor | None,  # [2 · HALF]
    k_norm: tl.tensor | None,
    epsilon: tl.tensor,
    norm_offset: tl.tensor | None,
    TOKEN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    within = columns < HALF
    # A chain of two loads that nothing in a step writes, so it runs while the kernel in front ends.
    position = tl.load(positions + token).to(tl.int64)
    cosines = tl.load(cos + position * HALF + columns, mask=within, other=0.0)[None, :]
    sines = tl.load(sin + position * HALF + columns, mask=within, other=0.0)[None, :]
    if q_norm is not None:
        is_query = (heads < NUM_HEADS)[:, None]
        q_first = tl.load(q_norm + columns, mask=within, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + HALF + columns, mask=within, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + columns, mask=within, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + HALF + columns, mask=within, other=0.0).to(tl.float32)[None, :]
        if norm_offset is not None:
            q_first += norm_offset
            q_second += norm_offset
            k_first += norm_offset
            k_second += norm_offset

    pointers = qkv + token * TOKEN_STRIDE + heads[:, None] * (2 * HALF) + columns[None, :]
    inside = (heads < NUM_ROTATED)[:, None] & within[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    second = tl.load(pointers + HALF, mask=inside, other=0.0).to(tl.float32)
    if q_norm is not None:
        scales = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + epsilon)[:, None]
        first = first * scales * tl.where(is_query, q_first, k_first)
        second = second * scales * tl.where(is_query, q_second, k_second)
    tl.store(pointers, (first * cosines - second * sines).to(qkv.dtype.element_ty), mask=inside)
    tl.store(pointers + HALF, (second * cosines + first * sines).to(qkv.dtype.element_ty), mask=inside)
