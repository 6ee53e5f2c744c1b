"""Attention over ragged batches: one interface, one file a backend.

Every backend passes the same tests against `reference`. Which is fastest depends on the device and on the shape of the
work (`select` measures it), so a model is handed a backend with each batch and never asks which it is.

On a GPU a backend's kernels are captured into graphs that are replayed for other lengths. What they leave to the host
for each batch is done in `prepare`; what a captured graph reads (plans, offsets) is owned by the instance that `at`
gives, and lives as long as the graph does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from worker.checkpoint.files import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from worker.batch.ragged import RaggedBatch


class AttentionUnavailable(ModelError):
    """A backend cannot do what is asked of it on this machine. The text says why, and what to install or choose."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What all attention layers of a model have in common."""

    num_heads: int
    num_kv_heads: int  # each serves num_heads / num_kv_heads heads
    head_dim: int
    causal: bool
    dtype: torch.dtype
    windowed: bool = False  # in some layers a token sees only those near it
    biased: bool = False  # scores have a bias that depends on distance

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")


class Attention(Protocol):
    """Each token attends to all tokens of its own sequence, or if causal to those up to itself.

    Scores are scaled by head_dim ** -0.5.
    """

    name: str
    needs_max_seqlen: bool  # whether a launch depends on `batch.max_seqlen`: a graph then holds up to one bound only
    prepares: bool  # whether `prepare` does anything

    def at(self, tokens: int, sequences: int) -> Attention:
        """What a graph of this capacity captures and keeps; itself where nothing is kept between replays."""

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        """The host's work for one batch: before its kernels are launched, eagerly or by a replay, on the same stream.

        `cu_seqlens` is int32 [sequences + 1], those of the padded batch, and is read before this returns. Nothing to do
        for most backends.
        """

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
        """[tokens, heads, head_dim] and twice [tokens, kv heads, head_dim] → contiguous [tokens, heads, head_dim].

        The inputs may be strided views of one tensor, with head_dim contiguous.

        Args:
            window: the farthest that a token sees, in tokens to either side; None: all of its sequence. Only where the
                head shape is `windowed`.
            bias: float32 [heads, 2 * reach + 1], added to the scaled scores of a query at i and a key at j in column
                reach + min(max(j - i, -reach), reach). Only where the head shape is `biased`.
        """
