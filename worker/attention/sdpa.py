"""torch's scaled_dot_product_attention, called once for each length that occurs in the batch.

Sequences of equal length lie side by side in a `RaggedBatch`, so each group is a plain batch without a mask, seen
through views. A batch of as many lengths as sequences costs a call a sequence, about 20 µs each on a CPU: little beside
the matrix products of the same tokens. On a GPU, where a launch is not small, this is a stopgap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from worker.ragged import LengthGroup, RaggedBatch


class SdpaAttention:
    name = "sdpa"

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        parts = [_attend(query, key, value, group) for group in batch.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: LengthGroup) -> torch.Tensor:
    q, k, v = (
        tensor[group.start : group.stop].view(group.num_sequences, group.length, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query, key, value)
    )  # [sequences, heads, length, head_dim]
    output = scaled_dot_product_attention(q, k, v)
    # [tokens, heads, head_dim]; the CPU kernel lays its result out in this order, so nothing is copied.
    return output.transpose(1, 2).flatten(0, 1).contiguous()
