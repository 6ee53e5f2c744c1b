"""Attention over ragged batches: one interface, one file a backend.

Every backend passes the same tests against `reference`. Which is fastest depends on the device and on the shape of the
work, so a model is handed a backend and never asks which it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from worker.ragged import RaggedBatch


class Attention(Protocol):
    """Each token attends to all tokens of its own sequence, scaled by head_dim ** -0.5."""

    name: str

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """All [tokens, heads, head_dim], the inputs of any strides with head_dim contiguous; the result contiguous."""
