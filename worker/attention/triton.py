"""Attention for many short sequences, and right for any: tiles of consecutive tokens instead of sequences.

Kernels for long sequences give each sequence tiles of its own. So a query of 20 tokens pays for 64 or 128, and the
launch depends on the number and lengths of sequences: it needs a plan, or an axis padded to a capacity. Here a tile is
a fixed number of consecutive tokens of the packed batch, whatever sequences they belong to. It goes over the keys from
the start of its first token's sequence to the end of its last token's, and each row takes the keys of its own sequence.
The launch depends on the number of tokens alone: a graph needs neither a plan nor the longest length.

The query heads that share a key head are rows of one tile, so its keys and values are read once for all of them.

A window shortens a row's range of keys, and with it a tile's. Keys that no row of a tile sees are not visited, so a
long sequence costs its length times the window. A bias is read from its table for every score. The size of the window
is an argument. Whether there is a window or a bias is a constant, so a kernel without them contains no code for them.

A value that is not finite must spoil its own sequence only, but 0 · NaN is NaN. So a tile of several sequences checks
its result. If that is not finite, it is computed again with such values taken out and their sequences marked. Rejected:
cleaning all values when they are loaded, which would take them through registers. Rejected: a second loop without masks
for keys that all rows of a tile see, since the compiler ran out of registers; a branch in the one loop needs no more.

Rejected too: norm and rotation of queries and keys when they are loaded. It saves a kernel, but repeats the work for
the same keys in each tile that reads them. On an H200 on 2026-11-29 it took 4.35 µs against 5.39 of two kernels for one
text of 20 tokens, 5.2 against 6.8 for 25 of 20 and 8.1 against 7.7 for 4 of 128; above 256 tokens a fused projection
does that already.

In float32 products are exact instead of rounded to the tensor cores' TF32: slow, and for comparing.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao, FlashAttention-2 (2023),
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from worker.attention import Attention
from worker.kernels.launch import launch, pdl_options

if TYPE_CHECKING:
    from worker.batch.ragged import Mask, RaggedBatch

# The tensor cores' smallest tile has 16 rows and 16 columns.
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True)
class Config:
    """How the work is cut. All but `num_stages` are powers of two."""

    block_m: int  # tokens of a tile
    block_n: int  # keys at a time
    heads: int  # query heads of one key head in a tile, block_m · heads ≥ 16 rows in all
    num_warps: int
    num_stages: int
    skip_masks: bool  # where all rows see all keys of a block: a branch for every block, faster for long sequences


class TritonAttention(Attention):
    """Every sequence at once; for bf16, fp16 and float32 on a GPU."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        num_rows = batch.cu_seqlens.shape[0] - 1
        config = _choose(num_tokens, num_rows, num_heads // key.shape[1], head_dim, query.dtype)
        return _attend(query, key, value, batch.token_starts, batch.token_stops, mask, config)


@dataclass(frozen=True, slots=True)
class _Choices:
    """What a head_dim's batches are cut into, by their tokens. `block_m` is meant for one head."""

    short: Config  # up to 1,024 tokens
    short_many: Config
    long: Config  # up to 1,024 tokens
    long_some: Config  # up to 2,048
    long_many: Config


# By the largest head_dim. Measured on an H200 on 2026-11-29, in bf16, on graphs of 28 calls: 16 heads on 8 key heads of
# 128, 16 on 16 of 64, 12 on 12 of 32, each with 25 × 20, 16 × 32, 200 × 20 (short), 4 × 128, 1 × 512, 16 × 128,
# 32 × 128, 12 × 320 and 32 × 512 tokens (long). Within 5 % of the best of `_candidates` in all of them, but 10 % above
# at 32 × 128 of head_dim 32.
_CHOICES: Mapping[int, _Choices] = MappingProxyType(
    {
        32: _Choices(
            short=Config(16, 32, 1, 1, 2, skip_masks=True),
            short_many=Config(32, 32, 1, 2, 2, skip_masks=False),
            long=Config(128, 64, 1, 8, 3, skip_masks=True),
            long_some=Config(128, 64, 1, 8, 3, skip_masks=True),
            long_many=Config(64, 64, 1, 4, 3, skip_masks=True),
        ),
        64: _Choices(
            short=Config(16, 32, 1, 1, 2, skip_masks=True),
            short_many=Config(64, 32, 1, 4, 3, skip_masks=False),
            long=Config(128, 64, 1, 8, 3, skip_masks=True),
            long_some=Config(64, 32, 1, 4, 3, skip_masks=True),
            long_many=Config(64, 64, 1, 4, 3, skip_masks=True),
        ),
        128: _Choices(
            short=Config(64, 32, 1, 4, 3, skip_masks=False),
            short_many=Config(64, 64, 1, 4, 2, skip_masks=True),
            long=Config(64, 64, 1, 4, 2, skip_masks=True),
            long_some=Config(64, 64, 1, 4, 2, skip_masks=True),
            long_many=Config(64, 64, 1, 4, 3, skip_masks=True),
        ),
    }
)
_LONG = 32  # tokens to a row of cu_seqlens, from which on a batch is taken to be of long sequences


def _choose(num_tokens: int, num_rows: int, group: int, head_dim: int, dtype: torch.dtype) -> Config:
    """The choice depends on what all batches of a graph share: the numbers of tokens and of rows of cu_seqlens.

    Lengths are not shared. But a batch has few more rows than it needs (`choose_capacity`), so tokens for each row are
    nearly a lower bound of the mean length: 25 × 20 tokens come in 32 rows, 4 × 128 in 8.
    """
    if dtype == torch.float32:  # no tensor cores: what a thread multiplies, it holds in registers
        return _folded(Config(16, 32, 1, 4 if head_dim <= 64 else 8, 1, skip_masks=False), group)
    if head_dim > 128:  # not measured
        return _folded(Config(32, 32, 1, 4, 2, skip_masks=False), group)
    if num_tokens <= 64:  # one tile of all, and not folded, for as many programs as can be
        return Config(64, 64, 1, 4, 2, skip_masks=False)
    choices = _CHOICES[min(size for size in _CHOICES if head_dim <= size)]
    if num_tokens < _LONG * num_rows:
        config = choices.short if num_tokens <= 1024 else choices.short_many
    elif num_tokens <= 1024:
        config = choices.long
    else:
        config = choices.long_some if num_tokens <= 2048 else choices.long_many
    return _folded(config, group)


def _folded(config: Config, group: int) -> Config:
    """The same number of rows in a tile, from as many heads of a group as leave at least 8 tokens to a tile."""
    heads = min(triton.next_power_of_2(group), config.block_m // 8)
    return replace(config, block_m=config.block_m // heads, heads=heads)


def _candidates(group: int) -> list[Config]:
    """The configurations worth measuring for a group of query heads. Some may not fit into the shared memory."""
    heads = triton.next_power_of_2(group)
    shapes = [(16, 32, 1), (32, 32, 2), (32, 32, 4), (64, 32, 4), (64, 64, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8)]
    shapes += [(128, 128, 8), (256, 64, 8)]  # rows, keys, warps
    return [
        Config(rows // folded, keys, folded, warps, stages, skips)
        for rows, keys, warps in shapes
        for folded in sorted({1, heads})
        for stages in (2, 3)
        for skips in (False, True)
    ]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    token_starts: torch.Tensor,
    token_stops: torch.Tensor,
    mask: Mask,
    config: Config,
) -> torch.Tensor:
    """Attention of every token over its own sequence.

    Args:
        query: [tokens, heads, head_dim], key, value: [tokens, key heads, head_dim]; head_dim contiguous.
        token_starts, token_stops: int32 [tokens], the first token of each token's sequence, and one past its last.
        mask: its bias is contiguous.

    Returns [tokens, heads, head_dim], contiguous.
    """
    window, bias = mask.window, mask.bias
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    output = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    grid = (triton.cdiv(num_tokens, config.block_m), num_kv_heads * triton.cdiv(group, config.heads))
    launch(
        _attention_kernel,
        grid,
        output,
        query,
        key,
        value,
        token_starts,
        token_stops,
        num_tokens,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        head_dim**-0.5 * math.log2(math.e),
        None if window is None else min(window, num_tokens),  # wider is no different, and could overflow
        bias,
        None if bias is None else bias.shape[1] // 2,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(_LEAST_TILE, triton.next_power_of_2(head_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HEADS=config.heads,
        CAUSAL=mask.causal,
        SKIP_MASKS=config.skip_masks,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # of products of float32, and of no other
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(query),
    )
    return output


@triton.jit(
    do_not_specialize=["num_tokens", "window", "reach"], do_not_specialize_on_alignment=["token_starts", "token_stops"]
)
def _attention_kernel(
    output: tl.tensor,  # [tokens, NUM_HEADS, HEAD_DIM]
    query: tl.tensor,  # [tokens, NUM_HEADS, HEAD_DIM]
    key: tl.tensor,  # [tokens, NUM_HEADS / GROUP, HEAD_DIM]
    value: tl.tensor,  # as key
    token_starts: tl.tensor,  # [tokens]
    token_stops: tl.tensor,
    num_tokens: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    scale: tl.tensor,  # of the scores, as exponents of 2
    window: tl.tensor | None,
    bias: tl.tensor | None,  # [NUM_HEADS, 2 * reach + 1]
    reach: tl.tensor | None,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SKIP_MASKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = BLOCK_M * HEADS
    SPLITS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # With a causal mask the last tile of a long sequence has most to do, so it goes first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    kv_head = tl.program_id(1) // SPLITS
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, num_tokens) - 1
    rows = tl.arange(0, ROWS)
    # Rows beyond the batch or the group repeat the last of it, and are not stored.
    tokens = tl.minimum(first + rows // HEADS, last)
    in_group = tl.program_id(1) % SPLITS * HEADS + rows % HEADS
    heads = kv_head * GROUP + tl.minimum(in_group, GROUP - 1)
    stored = (first + rows // HEADS < num_tokens) & (in_group < GROUP)

    # Row r sees keys starts[r] … stops[r] - 1. Both grow with the token, so that all rows see
    #   lo ≤ whole_lo … whole_hi ≤ hi   (empty where the tile has several short sequences).
    starts = tl.load(token_starts + tokens)
    stops = tl.load(token_stops + tokens)
    lo = tl.load(token_starts + first)
    hi = tl.load(token_stops + last)
    whole_lo = tl.load(token_starts + last)
    whole_hi = tl.load(token_stops + first)
    if CAUSAL:
        stops = tl.minimum(stops, tokens + 1)
        hi = tl.minimum(hi, last + 1)
        whole_hi = tl.minimum(whole_hi, first + 1)
    if window is not None:
        starts = tl.maximum(starts, tokens - window)
        lo = tl.maximum(lo, first - window)
        whole_lo = tl.maximum(whole_lo, last - window)
        if not CAUSAL:
            stops = tl.minimum(stops, tokens + window + 1)
            hi = tl.minimum(hi, last + window + 1)
            whole_hi = tl.minimum(whole_hi, first + window + 1)

    columns = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    query_pointers = (
        query
        + tokens.to(tl.int64)[:, None] * query_token_stride
        + heads[:, None] * query_head_stride
        + columns[None, :]
    )
    key_pointers = (
        key
        + (lo.to(tl.int64) * key_token_stride + kv_head * key_head_stride)
        + (keys[None, :] * key_token_stride + columns[:, None])
    )  # [BLOCK_D, BLOCK_N]
    value_pointers = (
        value
        + (lo.to(tl.int64) * value_token_stride + kv_head * value_head_stride)
        + (keys[:, None] * value_token_stride + columns[None, :])
    )  # [BLOCK_N, BLOCK_D]
    within = columns < HEAD_DIM

    if PDL:
        tl.extra.cuda.gdc_wait()
    queries = tl.load(query_pointers, mask=within[None, :], other=0.0)  # [ROWS, BLOCK_D]
    # The largest score so far starts with a finite number, so that -inf - largest is never a NaN.
    largest = tl.full((ROWS,), -3.0e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_D), tl.float32)

    for block in tl.range(lo, hi, BLOCK_N):
        numbers = block + keys
        key_block = tl.load(key_pointers, mask=within[:, None] & (numbers < hi)[None, :], other=0.0)
        scores = tl.dot(queries, key_block, input_precision=PRECISION) * scale
        if bias is not None:
            # Beyond the reach on one side of all rows it is one number a row. A load in a branch also stays where it
            # is: the compiler would bring the whole [ROWS, BLOCK_N] through shared memory, ahead of its use.
            is_before = block + BLOCK_N - 1 - first <= -reach
            if is_before | (block - last >= reach):
                scores += _biases(bias, reach, heads, tl.where(is_before, -reach, reach))[:, None]
            else:
                scores += _biases(bias, reach, heads[:, None], numbers[None, :] - tokens[:, None])
        if SKIP_MASKS:
            if (block < whole_lo) | (block + BLOCK_N > whole_hi):
                scores = _hide(scores, numbers, starts, stops)
        else:
            scores = _hide(scores, numbers, starts, stops)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        value_block = tl.load(value_pointers, mask=within[None, :] & (numbers < hi)[:, None], other=0.0)
        mixed = tl.dot(weights.to(value_block.dtype), value_block, mixed * shrink[:, None], input_precision=PRECISION)
        largest = new_largest
        key_pointers += BLOCK_N * key_token_stride
        value_pointers += BLOCK_N * value_token_stride

    # True if the tile is of several sequences. A window moves lo and whole_lo within one sequence, too, so that there
    # whole_lo has to be within the tile: the start of a sequence, or a window shorter than the tile.
    if whole_lo > (lo if window is None else first):  # noqa: SIM102  # `and` would look at the result in any case
        # x - x is 0 where x is finite, and NaN where it is not.
        if tl.sum(tl.sum(mixed - mixed, 1), 0) != 0.0:
            mixed = _mix_without_broken_values(
                queries, key, value, starts, stops, lo, hi, largest, kv_head,
                key_token_stride, key_head_stride, value_token_stride, value_head_stride, scale,
                bias, reach, heads, tokens, HEAD_DIM, BLOCK_D, ROWS, PRECISION,
            )  # fmt: skip
    output_pointers = output + tokens.to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM
    result = mixed / total[:, None]
    tl.store(
        output_pointers + columns[None, :], result.to(output.dtype.element_ty), mask=stored[:, None] & within[None, :]
    )


@triton.jit
def _hide(scores: tl.tensor, keys: tl.tensor, starts: tl.tensor, stops: tl.tensor) -> tl.tensor:
    """-inf for keys of other sequences: [rows, keys], of keys [keys], each row's first and one past its last [rows]."""
    seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < stops[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _biases(bias: tl.tensor, reach: tl.tensor, heads: tl.tensor, distances: tl.tensor) -> tl.tensor:
    """What is added to scores at these distances from the query to the key, as exponents of 2."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    columns = reach + tl.minimum(tl.maximum(distances, -reach), reach)
    return tl.load(bias + heads * (2 * reach + 1) + columns) * LOG2_E


@triton.jit
def _mix_without_broken_values(
    queries: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    largest: tl.tensor,
    kv_head: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor | None,
    reach: tl.tensor | None,
    heads: tl.tensor,
    tokens: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The weighted sum of values with the largest scores known; NaN in rows that see a value that is not finite."""
    # As few keys at a time as can be: this never runs, and must not be what the kernel needs registers for.
    BLOCK_N: tl.constexpr = 16
    columns = tl.arange(0, BLOCK_D)
    within = columns < HEAD_DIM
    mixed = tl.zeros((ROWS, BLOCK_D), tl.float32)
    spoiled = tl.zeros((ROWS,), tl.int32)
    for block in tl.range(lo, hi, BLOCK_N, num_stages=1):
        numbers = block + tl.arange(0, BLOCK_N)
        places = tl.minimum(numbers, hi - 1).to(tl.int64)
        key_block = tl.load(
            key + kv_head * key_head_stride + places[None, :] * key_token_stride + columns[:, None],
            mask=within[:, None],
            other=0.0,
        )
        value_block = tl.load(
            value + kv_head * value_head_stride + places[:, None] * value_token_stride + columns[None, :],
            mask=within[None, :],
            other=0.0,
        )
        broken = value_block - value_block != 0.0
        scores = tl.dot(queries, key_block, input_precision=PRECISION) * scale
        if bias is not None:
            scores += _biases(bias, reach, heads[:, None], numbers[None, :] - tokens[:, None])
        scores = _hide(scores, numbers, starts, stops)
        weights = tl.exp2(scores - largest[:, None])
        value_block = tl.where(broken, 0.0, value_block)
        mixed = tl.dot(weights.to(value_block.dtype), value_block, mixed, input_precision=PRECISION)
        any_broken = tl.max(broken.to(tl.int32), 1)  # [BLOCK_N]
        seen = (numbers[None, :] >= starts[:, None]) & (numbers[None, :] < stops[:, None])
        spoiled = tl.maximum(spoiled, tl.max(seen.to(tl.int32) * any_broken[None, :], 1))
    return tl.where((spoiled != 0)[:, None], float("nan"), mixed)
