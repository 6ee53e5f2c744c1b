"""A model's first kernel: rows of the embedding table, and perhaps other embeddings and the first layer norm.

As what is in front of it writes a step's inputs, these kernels let their successor start only once they have waited
themselves (`launch.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker.kernels.launch import launch, pdl_options

_ELEMENTS_PER_THREAD = 8  # one load of 16 bytes


def embed(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of `table` that `token_ids` name.

    Args:
        token_ids: int32 [tokens].
        table: [vocabulary, hidden], contiguous.

    Returns [tokens, hidden], of the table's dtype.
    """
    rows = torch.empty((token_ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(table.shape[1])
    launch(
        _embed_kernel,
        (token_ids.shape[0],),
        token_ids,
        table,
        rows,
        COLUMNS=table.shape[1],
        BLOCK=block,
        num_warps=_num_warps(block),
        **pdl_options(table),
    )
    return rows


def embed_layer_norm(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    words: torch.Tensor,
    position_table: torch.Tensor | None,
    type_table: torch.Tensor | None,
    token_types: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Layer norm of a token's word, position and type embeddings added up. A table that is None adds nothing.

    Args:
        token_ids: int32 [tokens].
        positions: int32 [tokens], each a row of `position_table`.
        words: [vocabulary, hidden], contiguous.
        position_table: [positions, hidden], contiguous.
        type_table: [types, hidden], contiguous.
        token_types: int32 [tokens], each a row of `type_table`; None: row 0 for all.
        weight, bias: [hidden].

    Returns [tokens, hidden], of the dtype of `words`.
    """
    rows = torch.empty((token_ids.shape[0], words.shape[1]), dtype=words.dtype, device=words.device)
    block = triton.next_power_of_2(words.shape[1])
    launch(
        _embed_layer_norm_kernel,
        (token_ids.shape[0],),
        token_ids,
        positions,
        words,
        position_table,
        type_table,
        token_types,
        weight,
        bias,
        rows,
        epsilon,
        COLUMNS=words.shape[1],
        BLOCK=block,
        num_warps=_num_warps(block),
        **pdl_options(words),
    )
    return rows


def embed_reference(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`embed` as plain torch."""
    return functional.embedding(token_ids, table)


def embed_layer_norm_reference(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    words: torch.Tensor,
    position_table: torch.Tensor | None,
    type_table: torch.Tensor | None,
    token_types: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """`embed_layer_norm` as plain torch, in float32."""
    summed = functional.embedding(token_ids, words).float()
    if position_table is not None:
        summed += functional.embedding(positions, position_table).float()
    if type_table is not None:
        summed += (type_table[0] if token_types is None else functional.embedding(token_types, type_table)).float()
    bias = None if bias is None else bias.float()
    return functional.layer_norm(summed, weight.shape, weight.float(), bias, epsilon)


def _num_warps(block: int) -> int:
    return min(16, max(1, block // (32 * _ELEMENTS_PER_THREAD)))


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _embed_kernel(
    token_ids: tl.tensor,  # [tokens]
    table: tl.tensor,  # [vocabulary, COLUMNS]
    rows: tl.tensor,  # [tokens, COLUMNS]
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    token_id = tl.load(token_ids + token).to(tl.int64)
    tl.store(rows + token * COLUMNS + columns, tl.load(table + token_id * COLUMNS + columns, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["token_ids", "positions", "token_types"])
def _embed_layer_norm_kernel(
    token_ids: tl.tensor,  # [tokens]
    positions: tl.tensor,  # [tokens]
    words: tl.tensor,  # [vocabulary, COLUMNS]
    position_table: tl.tensor | None,  # [positions, COLUMNS]
    type_table: tl.tensor | None,  # [types, COLUMNS]
    token_types: tl.tensor | None,  # [tokens]
    weight: tl.tensor,  # [COLUMNS]
    bias: tl.tensor | None,
    rows: tl.tensor,  # [tokens, COLUMNS]
    epsilon: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    token_id = tl.load(token_ids + token).to(tl.int64)
    values = tl.load(words + token_id * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    if position_table is not None:
        position = tl.load(positions + token).to(tl.int64)
        values += tl.load(position_table + position * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    if type_table is not None:
        type_row = type_table
        if token_types is not None:
            type_row += tl.load(token_types + token) * COLUMNS
        values += tl.load(type_row + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)

    values = tl.where(inside, values - tl.sum(values, 0) / COLUMNS, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + epsilon) * scales
    if bias is not None:
        values += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(rows + token * COLUMNS + columns, values.to(rows.dtype.element_ty), mask=inside)
