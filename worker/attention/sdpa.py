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

    from worker.batch.ragged import LengthGroup, RaggedBatch


class SdpaAttention:
    name = "sdpa"
    needs_max_seqlen = False
    prepares = False

    def at(self, tokens: int, sequences: int) -> SdpaAttention:
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
        parts = [_attend(query, key, value, group, causal, window, bias) for group in batch.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: LengthGroup,
    causal: bool,
    window: int | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    q, k, v = (
        tensor[group.start : group.stop].view(group.num_sequences, group.length, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query, key, value)
    )  # [sequences, heads, length, head_dim]
    mask: torch.Tensor | None = None
    if bias is not None or (window is not None and group.length > window + 1):
        mask, causal = _mask(group.length, causal, window, bias, query.dtype), False
    gqa = q.shape[1] != k.shape[1]
    output = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    # [tokens, heads, head_dim]; the CPU kernel lays its result out in this order, so nothing is copied.
    return output.transpose(1, 2).flatten(0, 1).contiguous()


def _mask(length: int, causal: bool, window: int | None, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores, [heads or 1, length, length]. Its size is the square of the length, a head where
    there is a bias: 100 MB for 12 heads and 1,448 tokens in float32."""
    positions = torch.arange(length)
    distances = positions - positions[:, None]
    if bias is None:
        mask = torch.zeros(1, length, length, dtype=dtype)
    else:
        reach = bias.shape[1] // 2
        mask = bias[:, distances.clamp(-reach, reach) + reach].to(dtype)
    hidden = torch.zeros_like(distances, dtype=torch.bool)
    if causal:
        hidden |= distances > 0
    if window is not None:
        hidden |= distances.abs() > window
    return mask.masked_fill_(hidden, float("-inf"))
