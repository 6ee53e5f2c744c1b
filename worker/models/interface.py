"""What the engine needs from a model: the seam between the families and the code that runs them."""

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
    """The sizes of a model, and which options of attention and of batches it uses."""

    hidden_size: int
    vocab_size: int
    max_positions: int  # the longest sequence that it has positions for
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    causal: bool = False  # a token attends to itself and to earlier tokens; else to all of its sequence
    windowed: bool = False  # some layers call attention with a window
    biased: bool = False  # some layers call attention with a bias
    has_token_types: bool = False  # it distinguishes a pair's second text from the first


class Model(Protocol):
    """A family's module: the forward pass, and where a checkpoint's tensors go."""

    shape: ModelShape

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of the last layer, [tokens, hidden]; float32 if `batch.reference` asks for it."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Canonical name → the parameter, or part of one, that it fills. Together they are all parameters."""

    def canonical_name(self, stored_name: str) -> str | None:
        """The name of a checkpoint's tensor in `checkpoint_tensors`; None: it is known and not needed."""
