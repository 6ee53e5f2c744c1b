"""Attention as its formula says: one sequence at a time, in float32. Slow and obviously right.

Scores are computed in blocks of rows, so that a sequence of 32,768 tokens needs 0.5 GiB at a time and not 68.

Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.1; grouped heads: Ainslie et al., GQA (2023).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from worker.attention import Attention

if TYPE_CHECKING:
    from worker.batch.ragged import Mask, RaggedBatch

_MAX_SCORES = 1 << 27  # at a time: 512 MiB of float32


class ReferenceAttention(Attention):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for start, stop in pairwise(batch.cu_seqlens.tolist()):
            if start < stop:
                rows = slice(start, stop)
                output[rows] = attend(query[rows], key[rows], value[rows], mask)
        return output


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask) -> torch.Tensor:
    """One sequence: [length, heads, head_dim] and twice [length, kv heads, head_dim] → float32 as the query."""
    length, num_heads, head_dim = query.shape
    group = num_heads // key.shape[1]
    q = query.float().transpose(0, 1)  # [heads, length, head_dim]
    k, v = (tensor.float().transpose(0, 1).repeat_interleave(group, dim=0) for tensor in (key, value))
    output = torch.empty(length, num_heads, head_dim, device=query.device)
    num_rows = max(1, _MAX_SCORES // (num_heads * length))
    for first in range(0, length, num_rows):
        rows = slice(first, min(first + num_rows, length))
        scores = q[:, rows] @ k.transpose(1, 2) * head_dim**-0.5  # [heads, rows, length]
        positions = torch.arange(length, device=query.device)
        distances = positions - positions[rows, None]  # [rows, length]
        if mask.bias is not None:
            reach = mask.bias.shape[1] // 2
            scores += mask.bias[:, distances.clamp(-reach, reach) + reach]
        if mask.causal:
            scores = scores.masked_fill(distances > 0, float("-inf"))
        if mask.window is not None:
            scores = scores.masked_fill(distances.abs() > mask.window, float("-inf"))
        output[rows] = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
    return output
