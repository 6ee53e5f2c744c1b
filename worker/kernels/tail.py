"""From hidden states of tokens to the bytes that cross to the host: pooling, then normalising and encoding.

What both compute is said in `worker/models/pooling.py`, whose functions of the same names are the reference. A mean is
added up in an order that depends on its span's length alone, so a row is the same in any batch. Where a token's row is
its span's, nothing is pooled at all: the kernel that encodes reads it from the hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from common.wire.rows import FLOAT32, INT8
from worker.batch.lazy import FLAG_BYTES
from worker.kernels.launch import launch, pdl_options

if TYPE_CHECKING:
    from worker.batch.ragged import Spans
    from worker.checkpoint.modules import Pooling

# A tile of `pool`: 32 elements a thread with 4 warps, in flight at once. 64 columns are 128 bytes, one line of the
# cache, and leave a single sequence of 1,024 columns 16 programs. To be measured.
_POOL_TOKENS, _POOL_COLUMNS, _POOL_WARPS = 64, 64, 4

# Source: torch.nn.functional.normalize, as in worker/models/pooling.py.
_LEAST_NORM = 1e-12


def pool_and_finish(
    hidden: torch.Tensor,
    spans: Spans,
    pooling: Pooling,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
    encodings: torch.Tensor,
) -> torch.Tensor:
    """`finish` of `pool`: one kernel for the poolings "cls" and "last", two for the others.

    Args:
        hidden: [tokens, hidden], contiguous.
        spans: int32 [rows] twice; one without tokens gets a row of zeros.
        dimensions, normalize, encodings: int32 [rows].

    Returns uint8 [rows, FLAG_BYTES + 4 · hidden].
    """
    if pooling in ("cls", "last"):
        return _finish(hidden, spans, pooling, dimensions, normalize, encodings)
    return finish(pool(hidden, spans, pooling), dimensions, normalize, encodings)


def pool(hidden: torch.Tensor, spans: Spans, pooling: Pooling) -> torch.Tensor:
    """One row a span: its first token's, its last token's, or a mean or the maximum over all of them.

    Args:
        hidden: [tokens, hidden], contiguous.
        spans: int32 [rows] twice; one without tokens gets a row of zeros.

    Returns float32 [rows, hidden].
    """
    starts, stops = spans
    num_rows, num_columns = starts.shape[0], hidden.shape[1]
    rows = torch.empty((num_rows, num_columns), dtype=torch.float32, device=hidden.device)
    # Rows first: the grid's other axes end at 65,535 programs.
    launch(
        _pool_kernel,
        (num_rows, triton.cdiv(num_columns, _POOL_COLUMNS)),
        hidden,
        starts,
        stops,
        rows,
        COLUMNS=num_columns,
        POOLING=pooling,
        TOKENS=_POOL_TOKENS,
        BLOCK=_POOL_COLUMNS,
        num_warps=_POOL_WARPS,
        **pdl_options(hidden),
    )
    return rows


def finish(
    rows: torch.Tensor, dimensions: torch.Tensor, normalize: torch.Tensor, encodings: torch.Tensor
) -> torch.Tensor:
    """What was asked for of each row, as bytes behind a flag that says whether its row is finite.

    Args:
        rows: float32 [rows, columns], contiguous.
        dimensions, normalize, encodings: int32 [rows].

    Returns uint8 [rows, FLAG_BYTES + 4 · columns].
    """
    return _finish(rows, None, None, dimensions, normalize, encodings)


def _finish(
    rows: torch.Tensor,
    spans: Spans | None,
    pooling: Pooling | None,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
    encodings: torch.Tensor,
) -> torch.Tensor:
    """The rows are those of tokens where there are `spans`, whose "cls" or "last" `pooling` takes."""
    starts, stops = (None, None) if spans is None else spans
    num_rows, num_columns = dimensions.shape[0], rows.shape[1]
    finished = torch.empty((num_rows, FLAG_BYTES + 4 * num_columns), dtype=torch.uint8, device=rows.device)
    block = max(32, triton.next_power_of_2(num_columns))
    launch(
        _finish_kernel,
        (num_rows,),
        rows,
        starts,
        stops,
        dimensions,
        normalize,
        encodings,
        finished,
        COLUMNS=num_columns,
        POOLING=pooling,
        BLOCK=block,
        FLAG_BYTES=FLAG_BYTES,
        LEAST_NORM=_LEAST_NORM,
        FLOAT32=FLOAT32,
        INT8=INT8,
        num_warps=min(8, max(1, block // 256)),
        **pdl_options(rows),
    )
    return finished


@triton.jit(do_not_specialize_on_alignment=["starts", "stops"])
def _pool_kernel(
    hidden: tl.tensor,  # [tokens, COLUMNS]
    starts: tl.tensor,  # [rows]
    stops: tl.tensor,
    rows: tl.tensor,  # [rows, COLUMNS]
    COLUMNS: tl.constexpr,
    POOLING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    start = tl.load(starts + row).to(tl.int64)
    stop = tl.load(stops + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < COLUMNS
    if PDL:
        tl.extra.cuda.gdc_wait()
    if POOLING == "cls" or POOLING == "last":
        token = start if POOLING == "cls" else stop - 1
        pooled = tl.load(hidden + token * COLUMNS + columns, mask=within & (stop > start), other=0.0).to(tl.float32)
    else:
        empty: tl.constexpr = float("-inf") if POOLING == "max" else 0.0
        gathered = tl.full((TOKENS, BLOCK), empty, tl.float32)
        for first in tl.range(start, stop, TOKENS, num_stages=3):
            tokens = first + tl.arange(0, TOKENS)
            values = tl.load(
                hidden + tokens[:, None] * COLUMNS + columns[None, :],
                mask=(tokens < stop)[:, None] & within[None, :],
                other=empty,
            ).to(tl.float32)
            if POOLING == "max":
                gathered = tl.maximum(gathered, values, propagate_nan=tl.PropagateNan.ALL)
            elif POOLING == "weighted_mean":
                gathered += values * (tokens - start + 1).to(tl.float32)[:, None]
            else:
                gathered += values
        if POOLING == "max":
            # `tl.max` loses a NaN.
            broken = tl.max((gathered != gathered).to(tl.int32), 0) != 0
            pooled = tl.where(broken, float("nan"), tl.max(gathered, 0))
            pooled = tl.where(stop > start, pooled, 0.0)
        else:
            divisor = tl.maximum(stop - start, 1).to(tl.float32)
            if POOLING == "mean_sqrt_len":
                divisor = tl.sqrt_rn(divisor)
            elif POOLING == "weighted_mean":
                divisor = divisor * (divisor + 1) / 2
            pooled = tl.sum(gathered, 0) / divisor
    tl.store(rows + row.to(tl.int64) * COLUMNS + columns, pooled, mask=within)


@triton.jit(do_not_specialize_on_alignment=["starts", "stops", "dimensions", "normalize", "encodings"])
def _finish_kernel(
    rows: tl.tensor,  # [rows or tokens, COLUMNS]
    starts: tl.tensor | None,  # [rows] where what is read are tokens
    stops: tl.tensor | None,
    dimensions: tl.tensor,  # [rows]
    normalize: tl.tensor,
    encodings: tl.tensor,
    finished: tl.tensor,  # uint8 [rows, FLAG_BYTES + 4 · COLUMNS]
    COLUMNS: tl.constexpr,
    POOLING: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    LEAST_NORM: tl.constexpr,
    FLOAT32: tl.constexpr,
    INT8: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    num_columns = tl.load(dimensions + row)
    encoding = tl.load(encodings + row)
    normalized = tl.load(normalize + row) != 0
    columns = tl.arange(0, BLOCK)
    within = columns < COLUMNS
    if starts is None:
        source = row
        present = within
    else:
        start = tl.load(starts + row).to(tl.int64)
        stop = tl.load(stops + row).to(tl.int64)
        source = start if POOLING == "cls" else stop - 1
        present = within & (stop > start)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The whole row, so that the load is of 16 bytes a thread whatever `dimensions` says.
    values = tl.load(rows + source * COLUMNS + columns, mask=present, other=0.0).to(tl.float32)
    counts = columns < num_columns
    values = tl.where(counts, values, 0.0)
    squared = tl.sum(values * values, 0)
    is_finite = squared < float("inf")  # false for a NaN too

    flag = finished + row * (FLAG_BYTES + 4 * COLUMNS)
    # In words of four bytes, the lowest first: the flag and its zeros are one, and so is a float32 column.
    tl.static_assert(FLAG_BYTES == 4)
    tl.store(flag.to(tl.pointer_type(tl.int32), bitcast=True), is_finite.to(tl.int32))
    codes = flag + FLAG_BYTES
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    if encoding == FLOAT32:
        divisor = tl.where(normalized, tl.maximum(tl.sqrt_rn(squared), LEAST_NORM), 1.0)
        divisor = tl.where(is_finite, divisor, float("nan"))
        tl.store(words + columns, tl.div_rn(values, divisor).to(tl.int32, bitcast=True), mask=within)
    else:
        # Bytes that are not needed are 0: whole words from `num_words` on, and up to three bytes before them.
        if encoding == INT8:
            num_words = (COLUMNS + 3) // 4
            whole = tl.where(is_finite, values, 0.0)
            scaled = (1.0 - 2.0 / (tl.exp(2.0 * whole) + 1.0)) * 127.0  # tanh
            rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 · 2²³: what is left has no fraction, halves went to even
            tl.store(codes + columns, rounded.to(tl.int8).to(tl.uint8, bitcast=True), mask=columns < 4 * num_words)
        else:
            num_words = (COLUMNS + 31) // 32
            ones = ((tl.where(is_finite, values, -1.0) >= 0) & counts).to(tl.int32).reshape(BLOCK // 8, 8)
            bits = tl.sum(ones << tl.arange(0, 8)[None, :], 1)
            tl.store(codes + tl.arange(0, BLOCK // 8), bits.to(tl.uint8), mask=tl.arange(0, BLOCK // 8) < 4 * num_words)
        tl.store(words + columns, 0, mask=(columns >= num_words) & within)
