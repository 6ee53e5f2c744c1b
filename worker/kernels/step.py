"""A step's first kernel and its last: inputs out of the host's memory, rows out of the way of the next step.

They are in every graph, so a step is one launch, without a copy before it or behind it. When a graph is captured, it is
not known which slot of the host's memory a step will read. A counter on the device says it. The last kernel of each
step sets the counter to the slot of the next. The input says where the rows go.

`fetch` reads the host's memory through the bus, which takes a microsecond or two. So it reads everything at once, and
writes to the device what other kernels read many times. From the offsets it computes where each token's sequence begins
and ends. It never starts early, and no kernel starts early behind it: by then all readers of the previous step's inputs
have ended. Plain loads see what the host had written when it launched the step. Rejected: volatile loads, which cross
the bus one by one (2.8 ms for 16,384 tokens).

`publish` writes the counter and does not read it; `fetch` reads it and does not write it. So no program that runs
beside others can see it change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from worker.batch import capacity as layout
from worker.kernels.launch import launch, pdl_options

if TYPE_CHECKING:
    from worker.batch.capacity import Capacity

_NUM_TOKENS = tl.constexpr(layout.NUM_TOKENS)
_NUM_TYPED = tl.constexpr(layout.NUM_TYPED)
_NEXT_SLOT = tl.constexpr(layout.NEXT_SLOT)
_OUTPUT_WORDS = tl.constexpr(layout.OUTPUT_WORDS)
_OUTPUT_ADDRESS = tl.constexpr(layout.OUTPUT_ADDRESS)
_HEAD_WORDS = tl.constexpr(layout.HEAD_WORDS)

_FETCH_WARPS = 8  # a tile of 8,192 comparisons in registers
_PUBLISH_WARPS = 4
_FETCHED_WORDS = 512  # by a program, of the head, the offsets and the rows
_PUBLISHED_WORDS = 2048  # by a program, 16 a thread: four loads of 16 bytes
# Offsets that a program compares its tokens with at a time, and how many tokens those are. Each time is a way over the
# bus, so few sequences take one, and 2,048 of them eight.
_TILES = ((16, 256), (64, 128), (256, 32))


def fetch(ring: torch.Tensor, counter: torch.Tensor, block: torch.Tensor, capacity: Capacity) -> None:
    """Fill the block of a capacity from the row of the ring that the counter says.

    Args:
        ring: int32 [slots, words], contiguous, pinned memory of the host; a row begins as `HostArrays` has written it.
        counter: int32 [1].
        block: int32 [at least capacity.num_words], contiguous. It gets what `layout.worked_out` makes of the row.
    """
    num_offsets, num_tokens = next((tile for tile in _TILES if capacity.sequences <= tile[0]), _TILES[-1])
    token_programs = triton.cdiv(capacity.tokens, num_tokens)
    launch(
        _fetch_kernel,
        (token_programs + triton.cdiv(capacity.row_words, _FETCHED_WORDS),),
        ring,
        counter,
        block,
        ring.shape[1],
        capacity.row_words,
        capacity.tokens,
        capacity.sequences,
        TYPES=capacity.types,
        OFFSETS=num_offsets,
        TOKENS=num_tokens,
        WORDS=_FETCHED_WORDS,
        num_warps=_FETCH_WARPS,
    )


def publish(output: torch.Tensor, block: torch.Tensor, counter: torch.Tensor) -> None:
    """Copy as many words of the output as the block's head says to the address that is there, and set the counter.

    Args:
        output: uint8 [rows, bytes], contiguous, bytes a multiple of 4.
        block: int32 [at least HEAD_WORDS], as `fetch` has filled it.
        counter: int32 [1].
    """
    assert output.is_contiguous()
    words = output.view(torch.int32)
    launch(
        _publish_kernel,
        (triton.cdiv(words.numel(), _PUBLISHED_WORDS),),
        words,
        block,
        counter,
        WORDS=_PUBLISHED_WORDS,
        num_warps=_PUBLISH_WARPS,
        **pdl_options(output),
    )


@triton.jit(do_not_specialize=["slot_words", "row_words", "num_tokens", "num_sequences"])
def _fetch_kernel(
    ring: tl.tensor,  # [slots, slot_words]
    counter: tl.tensor,
    block: tl.tensor,
    slot_words: tl.tensor,
    row_words: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    TYPES: tl.constexpr,
    OFFSETS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    source = ring + tl.load(counter) * slot_words
    program = tl.program_id(0)
    token_programs = tl.cdiv(num_tokens, TOKENS)
    if program >= token_programs:
        words = (program - token_programs) * WORDS + tl.arange(0, WORDS)
        within = words < row_words
        tl.store(block + words, tl.load(source + words, mask=within), mask=within)
    else:
        tokens = program * TOKENS + tl.arange(0, TOKENS)
        inside = tokens < num_tokens
        # No load waits for what another one has read: all are under way at once.
        token_ids = tl.load(source + row_words + tokens, mask=inside)
        is_real = tokens < tl.load(source + _NUM_TOKENS)
        # The last offset that is not behind the token, and the first that is.
        starts = tl.zeros((TOKENS,), tl.int32)
        stops = tl.zeros((TOKENS,), tl.int32) + num_tokens
        for first in range(0, num_sequences, OFFSETS):
            sequences = first + tl.arange(0, OFFSETS)
            offsets = tl.load(
                source + (_HEAD_WORDS + 1) + sequences,
                mask=sequences < num_sequences,
                other=num_tokens,
            )
            is_begun = offsets[None, :] <= tokens[:, None]  # [TOKENS, OFFSETS]
            starts = tl.maximum(starts, tl.max(tl.where(is_begun, offsets[None, :], 0), 1))
            stops = tl.minimum(stops, tl.min(tl.where(is_begun, num_tokens, offsets[None, :]), 1))
        stride = tl.cdiv(num_tokens, 4) * 4
        target = block + row_words + tokens
        tl.store(target, tl.where(is_real, token_ids, 0), mask=inside)
        if TYPES:
            types = tl.load(source + row_words + stride + tokens, mask=inside)
            is_typed = tokens < tl.load(source + _NUM_TYPED)
            target += stride
            tl.store(target, tl.where(is_typed, types, 0), mask=inside)
        tl.store(target + stride, tl.where(is_real, tokens - starts, 0), mask=inside)
        tl.store(target + 2 * stride, starts, mask=inside)
        tl.store(target + 3 * stride, stops, mask=inside)


@triton.jit
def _publish_kernel(
    output: tl.tensor,
    block: tl.tensor,
    counter: tl.tensor,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # The head is among the inputs, so nothing in the step writes it.
    num_words = tl.load(block + _OUTPUT_WORDS)
    next_slot = tl.load(block + _NEXT_SLOT)
    address = tl.load((block + _OUTPUT_ADDRESS).to(tl.pointer_type(tl.int64), bitcast=True))
    target = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    # Four words at once, and what is left over.
    num_whole = num_words // 4 * 4
    words = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    rest = num_whole + tl.arange(0, 4)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tl.store(target + words, tl.load(output + words, mask=words < num_whole), mask=words < num_whole)
    if tl.program_id(0) == 0:
        tl.store(target + rest, tl.load(output + rest, mask=rest < num_words), mask=rest < num_words)
        tl.store(counter, next_slot)
