"""Attention over ragged batches: one interface, one file a backend, one registry.

Adding a backend takes one file, which implements `Attention`, and one row in `registry`, which says what the backend
can do and how it is built. The row's name has to be among the flag's choices (`common.config.ATTENTION_BACKENDS`); a
test compares the two. Everything else follows from the row: which models and devices may use the backend, whether it is
measured, and the tests on a GPU, which compare every backend with `reference`.

Which backend is fastest depends on the device and on the shape of the work (`select` measures it). So a model gets a
backend with each batch and never asks which it is.

On a GPU a backend's kernels are captured into graphs, which are replayed for batches of other lengths. What a backend
leaves to the host for each batch is done in `prepare`. What a captured graph reads (plans, offsets) belongs to the
instance that `at` returns, and lives as long as the graph does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.batch.ragged import Mask
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

    @property
    def mask(self) -> Mask:
        """The mask of layers without a window and without a bias."""
        return Mask(self.causal)


class Attention(ABC):
    """Each token attends to the tokens of its own sequence that a mask lets it see.

    Scores are scaled by head_dim ** -0.5.
    """

    name: str  # that of its row in `registry`, which sets it
    needs_max_seqlen: bool = False  # whether a launch depends on `batch.max_seqlen`: a graph holds up to one bound only
    prepares: bool = False  # whether `prepare` does anything

    def at(self, tokens: int, sequences: int) -> Attention:
        """What a graph of this capacity captures and keeps: the backend itself if it keeps nothing between replays."""
        return self

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        """The host's work for one batch: before its kernels are launched, eagerly or by a replay, on the same stream.

        `cu_seqlens` is int32 [sequences + 1], that of the padded batch, and is read before this returns.
        """
        assert not self.prepares, "a backend that prepares says how"

    @abstractmethod
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] and twice [tokens, kv heads, head_dim] → contiguous [tokens, heads, head_dim].

        The inputs may be strided views of one tensor, with head_dim contiguous. The mask is causal as the head shape
        is, and has a window or a bias only if the head shape is `windowed` or `biased`.
        """
