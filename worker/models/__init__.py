"""Which architectures are served, and the file that has each.

The names are those that checkpoints give in config.json under `architectures`. Another name stops the start, even if it
looks alike: a family's variants differ in ways that only their code shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from worker.attention import Attention
    from worker.checkpoint import JsonFile
    from worker.models.bert import BertModel
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


# Architecture → module. By name, so that what is supported can be asked without torch.
_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "BertModel": "bert",
        "BertForMaskedLM": "bert",  # the same encoder; its language-model head is not used
        "BertForPreTraining": "bert",
    }
)


def check_architecture(architecture: str, config: JsonFile) -> None:
    """Raises ModelError: no family has this architecture."""
    if architecture not in _FAMILIES:
        config.refuse("architectures", f"{architecture} is not supported; supported are {', '.join(_FAMILIES)}.")


def build(architecture: str, config: JsonFile, attention: Attention) -> BertModel:
    """The model that config.json describes, its parameters yet to be filled.

    Raises:
        ModelError: the architecture, or something in its configuration, is not supported.
    """
    check_architecture(architecture, config)
    family = importlib.import_module(f"worker.models.{_FAMILIES[architecture]}")
    return cast("BertModel", family.build(config, attention))
