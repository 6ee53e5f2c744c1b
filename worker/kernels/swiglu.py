"""The gated activation between the two halves of a merged projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.activation import ACTIVATIONS, activate
from worker.kernels.launch import launch, pdl_options

# Columns that a program holds: 8 a thread with 4 warps, one load of 16 bytes from each half. To be measured.
_BLOCK = 1024
_NUM_WARPS = 4


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) · up.

    Args:
        gate_up: [tokens, 2 · columns], contiguous: gate, then up.
        activation: one of `ACTIVATIONS`.

    Returns [tokens, columns].
    """
    assert activation in ACTIVATIONS, activation
    num_tokens, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    inner = torch.empty((num_tokens, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _gated_kernel,
        (num_tokens, triton.cdiv(num_columns, _BLOCK)),
        gate_up,
        inner,
        ACTIVATION=activation,
        COLUMNS=num_columns,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **pdl_options(gate_up),
    )
    return inner


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`gated` by silu."""
    return gated(gate_up, "silu")


def gated_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`gated` as plain torch, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@triton.jit
def _gated_kernel(
    gate_up: tl.tensor,  # [tokens, 2 · COLUMNS]
    inner: tl.tensor,  # [tokens, COLUMNS]
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    gate_pointers = gate_up + token * (2 * COLUMNS) + columns
    gate = tl.load(gate_pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_pointers + COLUMNS, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(inner + token * COLUMNS + columns, y.to(inner.dtype.element_ty), mask=inside)
