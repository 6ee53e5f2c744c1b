"""torch's scaled_dot_product_attention, called once for each length that occurs in the batch: for the CPU.

Sequences of equal length lie side by side in a CPU's batch, so each group is a plain batch without a mask, seen
through views. A batch of as many lengths as sequences costs a call a sequence, about 20 µs each: little beside the
matrix products of the same tokens. On a GPU, where a launch is not small, no batch has groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from worker.ragged import LengthGroup, RaggedBatch


class SdpaAttention:
    name = "sdpa"
    needs_max_seqlen = False

    def at(self, tokens: int, sequences: int) -> SdpaAttention:
        return self

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        pass

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, *, causal: bool
    ) -> torch.Tensor:
        parts = [_attend(query, key, value, group, causal) for group in batch.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: LengthGroup, causal: bool
) -> torch.Tensor:
    q, k, v = (
        tensor[group.start : group.stop].view(group.num_sequences, group.length, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query, key, value)
    )  # [sequences, heads, length, head_dim]
    output = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    # [tokens, heads, head_dim]; the CPU kernel lays its result out in this order, so nothing is copied.
    return output.transpose(1, 2).flatten(0, 1).contiguous()
