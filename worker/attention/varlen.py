"""torch's own FlashAttention-2 over ragged batches: always installed, about half as fast as newer ones on long texts.

The operator that `torch.nn.attention.varlen` wraps is called directly. The wrapper would launch one more kernel for
each call, which fills a tensor with zeros for the random numbers of dropout.

The grid is (ceil(max_seqlen / 128), sequences, heads), so a captured graph serves lengths up to its own bound. Blocks
beyond a sequence's end return at once.

Source: Dao, FlashAttention-2 (2023); the grid: torch's csrc/flash_attn/src/flash_fwd_launch_template.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.attention import Attention

if TYPE_CHECKING:
    from worker.batch.ragged import Mask, RaggedBatch

_ROWS_PER_BLOCK = 128  # less would not make the grid smaller


class TorchAttention(Attention):
    needs_max_seqlen = True

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        assert mask.is_plain
        longest = max(batch.max_seqlen, _ROWS_PER_BLOCK)
        offsets = batch.cu_seqlens
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, offsets, longest, longest, 0.0, mask.causal, False, scale=query.shape[2] ** -0.5
        )[0]
        return output.contiguous()
