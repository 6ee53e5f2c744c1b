"""Which architectures are served, and the file that has each.

The names are those that checkpoints give in config.json under `architectures`. Another name stops the start, even if it
looks alike: a family's variants differ in ways that only their code shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from worker.models import bert

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from worker.attention import Attention
    from worker.checkpoint import JsonFile
    from worker.ragged import RaggedBatch


class Model(Protocol):
    """What a family's module offers: the forward pass, and where a checkpoint's tensors go."""

    hidden_size: int
    vocab_size: int
    max_positions: int  # the longest sequence that it has positions for

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of the last layer, [tokens, hidden]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """For every canonical name the (part of a) parameter that it fills; together they are all parameters."""

    def canonical_name(self, stored_name: str) -> str | None:
        """What a checkpoint's tensor is called in `checkpoint_tensors`; None if it is known and not needed."""


_FAMILIES: Mapping[str, Callable[[JsonFile, Attention], bert.BertModel]] = MappingProxyType(
    {
        "BertModel": bert.build,
        "BertForMaskedLM": bert.build,  # the same encoder; its language-model head is not used
        "BertForPreTraining": bert.build,
    }
)


def build(architecture: str, config: JsonFile, attention: Attention) -> bert.BertModel:
    """The model that config.json describes, its parameters yet to be filled.

    Raises:
        ModelError: the architecture, or something in its configuration, is not supported.
    """
    family = _FAMILIES.get(architecture)
    if family is None:
        config.refuse("architectures", f"{architecture} is not supported; supported are {', '.join(_FAMILIES)}.")
    return family(config, attention)
