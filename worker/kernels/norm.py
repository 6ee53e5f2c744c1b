"""RMS norm and layer norm of every row, alone or with the residual added first.

A program holds whole rows in registers, so memory is read once and written once. Statistics are taken in float32 over
the unrounded sum, and a result is rounded once, at the end; the reference of transformers rounds twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker.kernels.launch import launch, pdl_options

# Elements that a program holds: 16 a thread, two loads of 16 bytes each from every input. To be measured.
_TILE = 2048
_ELEMENTS_PER_THREAD = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """x / √(mean(x²) + epsilon) · (weight + offset), for each row.

    Args:
        x: [tokens, hidden], contiguous.
        weight: [hidden].
    """
    normed = torch.empty_like(x)
    _launch(x, None, weight, None, epsilon, normed, None, offset=offset, centred=False)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`rms_norm` of x + residual, x + residual); the norm is that of the sum before it is rounded."""
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, None, epsilon, normed, summed, offset=0.0, centred=False)
    return normed, summed


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """(x − mean(x)) / √(var(x) + epsilon) · weight + bias, for each row.

    Args:
        x: [tokens, hidden], contiguous.
        weight, bias: [hidden].
    """
    normed = torch.empty_like(x)
    _launch(x, None, weight, bias, epsilon, normed, None, offset=0.0, centred=True)
    return normed


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """`layer_norm` of x + residual."""
    normed = torch.empty_like(x)
    _launch(x, residual, weight, bias, epsilon, normed, None, offset=0.0, centred=True)
    return normed


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """`rms_norm` as plain torch, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * (weight.float() + offset)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """`layer_norm` as plain torch, in float32."""
    bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), bias, epsilon)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    normed: torch.Tensor,
    summed: torch.Tensor | None,
    *,
    offset: float,
    centred: bool,
) -> None:
    """A layer norm if `centred`, else an RMS norm. `offset` is added to the weight."""
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    rows = max(1, _TILE // block)
    launch(
        _norm_kernel,
        (triton.cdiv(num_rows, rows),),
        x,
        residual,
        weight,
        bias,
        normed,
        summed,
        num_rows,
        epsilon,
        offset or None,  # 0 would be an addition for every column
        CENTRED=centred,
        COLUMNS=num_columns,
        BLOCK=block,
        ROWS=rows,
        num_warps=min(16, max(1, rows * block // (32 * _ELEMENTS_PER_THREAD))),
        **pdl_options(x),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x: tl.tensor,  # [rows, columns]
    residual: tl.tensor | None,
    weight: tl.tensor,  # [columns]
    bias: tl.tensor | None,
    normed: tl.tensor,  # [rows, columns]
    summed: tl.tensor | None,
    num_rows: tl.tensor,
    epsilon: tl.tensor,
    offset: tl.tensor | None,
    CENTRED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    scales = tl.load(weight + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    if offset is not None:
        scales += offset
    if bias is not None:
        shifts = tl.load(bias + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)

    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if residual is not None:
        values += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    if summed is not None:
        tl.store(summed + offsets, values.to(summed.dtype.element_ty), mask=inside)

    if CENTRED:
        means = tl.sum(values, 1) / COLUMNS
        values = tl.where(inside, values - means[:, None], 0.0)
    variances = tl.sum(values * values, 1) / COLUMNS
    values = values * tl.rsqrt(variances + epsilon)[:, None] * scales[None, :]
    if bias is not None:
        values += shifts[None, :]
    tl.store(normed + offsets, values.to(normed.dtype.element_ty), mask=inside)
