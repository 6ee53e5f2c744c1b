"""torch's own FlashAttention-2 over ragged batches: always there, about half the rate of newer kernels when long.

The operator that `torch.nn.attention.varlen` wraps is called directly, since the wrapper fills a tensor with zeros for
the random numbers of dropout with every call: a kernel of its own.

The grid is (ceil(max_seqlen / 128), sequences, heads), so a captured graph serves lengths up to its own bound. Blocks
beyond a sequence's end leave at once.

Source: Dao, FlashAttention-2 (2023); the grid: torch's csrc/flash_attn/src/flash_fwd_launch_template.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.attention import AttentionUnavailable, HeadShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from worker.batch.ragged import RaggedBatch

_ROWS_PER_BLOCK = 128  # less would not make the grid smaller


class TorchAttention:
    name = "torch"
    needs_max_seqlen = True
    prepares = False

    def __init__(self, shape: HeadShape) -> None:
        """Raises AttentionUnavailable: the kernels do not have this head shape."""
        if reason := unavailable(shape):
            raise AttentionUnavailable(f"attention torch: {reason}")

    def at(self, tokens: int, sequences: int) -> TorchAttention:
        return self

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        pass

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        *,
        causal: bool,
        window: int | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert window is None
        assert bias is None
        longest = max(batch.max_seqlen, _ROWS_PER_BLOCK)
        offsets = batch.cu_seqlens
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, offsets, longest, longest, 0.0, causal, False, scale=query.shape[2] ** -0.5
        )[0]
        return output.contiguous()


def unavailable(shape: HeadShape) -> str | None:
    """Why these kernels cannot serve a head shape; None if they can."""
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {shape.dtype}"
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"head_dim {shape.head_dim} is not a multiple of 8 up to 256"
    return None
