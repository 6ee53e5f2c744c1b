"""torch's scaled_dot_product_attention, called once for each length that occurs in the batch: for the CPU.

Sequences of equal length lie side by side in a CPU's batch, so each group is a plain batch without padding, seen
through views. If all lengths differ, each sequence costs a call of about 20 µs: little beside the matrix products of
the same tokens. On a GPU, where a launch is expensive, batches have no groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.attention import Attention

if TYPE_CHECKING:
    from worker.batch.ragged import LengthGroup, Mask, RaggedBatch


class SdpaAttention(Attention):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        parts = [_attend(query, key, value, group, mask) for group in batch.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: LengthGroup, mask: Mask
) -> torch.Tensor:
    q, k, v = (
        tensor[group.start : group.stop].view(group.num_sequences, group.length, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query, key, value)
    )  # [sequences, heads, length, head_dim]
    added, causal = None, mask.causal
    if mask.bias is not None or (mask.window is not None and group.length > mask.window + 1):
        added, causal = _added(group.length, mask, query.dtype), False
    gqa = q.shape[1] != k.shape[1]
    output = scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=causal, enable_gqa=gqa)
    # [tokens, heads, head_dim]: the order in which the CPU kernel writes, so nothing is copied.
    return output.transpose(1, 2).flatten(0, 1).contiguous()


def _added(length: int, mask: Mask, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that are added to the scores, [heads or 1, length, length].

    With a bias there is a square of the length for each head: 100 MB for 12 heads and 1,448 tokens in float32.
    """
    positions = torch.arange(length)
    distances = positions - positions[:, None]
    if mask.bias is None:
        added = torch.zeros(1, length, length, dtype=dtype)
    else:
        reach = mask.bias.shape[1] // 2
        added = mask.bias[:, distances.clamp(-reach, reach) + reach].to(dtype)
    hidden = torch.zeros_like(distances, dtype=torch.bool)
    if mask.causal:
        hidden |= distances > 0
    if mask.window is not None:
        hidden |= distances.abs() > mask.window
    return added.masked_fill_(hidden, float("-inf"))
