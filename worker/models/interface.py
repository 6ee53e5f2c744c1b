"""What the engine needs from a model: the seam between the families and everything that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from worker.batch.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What those who run a model need to know of it."""

    hidden_size: int
    vocab_size: int
    max_positions: int  # the longest sequence that it has positions for
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    causal: bool = False  # a token attends to itself and the tokens before it; else to all of its sequence
    windowed: bool = False  # some layers call attention with a window
    biased: bool = False  # some layers call attention with a bias
    has_token_types: bool = False  # a pair's second text is told from its first


class Model(Protocol):
    """What a family's module offers: the forward pass, and where a checkpoint's tensors go."""

    shape: ModelShape

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of the last layer, [tokens, hidden]; float32 if `batch.reference` asks for it."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """For every canonical name the (part of a) parameter that it fills; together they are all parameters."""

    def canonical_name(self, stored_name: str) -> str | None:
        """What a checkpoint's tensor is called in `checkpoint_tensors`; None if it is known and not needed."""
