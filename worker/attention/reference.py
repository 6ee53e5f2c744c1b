"""Attention as its formula says: one sequence at a time, in float32. Slow and obviously right.

Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from worker.ragged import RaggedBatch


class ReferenceAttention:
    name = "reference"

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        offsets = batch.cu_seqlens.tolist()
        for start, stop in pairwise(offsets):
            q, k, v = (tensor[start:stop].float().transpose(0, 1) for tensor in (query, key, value))
            scores = q @ k.transpose(1, 2) * query.shape[2] ** -0.5  # [heads, length, length]
            output[start:stop] = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
        return output
