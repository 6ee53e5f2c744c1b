"""DistilBERT: msmarco-distilbert, multi-qa-distilbert and others of their shape.

Source: Sanh et al., DistilBERT (2019); names, and the epsilon that no field declares, as in transformers'
DistilBertModel.

The encoder is BERT's with no token types. Whether the positions are sinusoidal (`sinusoidal_pos_embds`) only says how
their table began: it is in the checkpoint either way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from worker.models.families.bert import BertConfig, BertModel, bare_name, check_encoder
from worker.models.families.reading import read_activation, read_num_heads

if TYPE_CHECKING:
    import torch

    from worker.checkpoint.files import JsonFile

_EPSILON = 1e-12

# A buffer and the head of pre-training: not part of an embedding.
_UNUSED = re.compile(r"embeddings\.position_ids|vocab_(transform|layer_norm|projector)\..*")

# Other names for the same fields, which transformers reads too.
_ALIASES = (("hidden_size", "dim"), ("num_attention_heads", "n_heads"), ("num_hidden_layers", "n_layers"))

_LAYER_TENSOR = re.compile(r"encoder\.layer\.(?P<index>\d+)\.(?P<part>.+)\.(?P<kind>weight|bias)")

# What BERT calls a part of a layer, and what DistilBERT does.
_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attention.self.query": "attention.q_lin",
        "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin",
        "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm",
        "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2",
        "output.LayerNorm": "output_layer_norm",
    }
)


class DistilBertModel(BertModel):
    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `distilbert.`, as a checkpoint of the bare encoder has them."""
        return {_own_name(name): tensor for name, tensor in super().checkpoint_tensors().items()}

    def canonical_name(self, stored_name: str) -> str | None:
        return bare_name(stored_name, "distilbert.", _UNUSED)


def build(architecture: str, config: JsonFile) -> DistilBertModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return DistilBertModel(_parse(config))


def _parse(config: JsonFile) -> BertConfig:
    check_encoder(config, ("distilbert",))
    for alias, field in _ALIASES:
        value = config.optional_integer(alias)
        if value is not None and value != config.integer(field):
            config.refuse(alias, f"{value}, but {field} is {config.integer(field)}.")
    return BertConfig(
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        position_offset=0,
        num_types=0,
        num_layers=config.integer("n_layers"),
        num_heads=read_num_heads(config, "n_heads", "dim"),
        hidden_size=config.integer("dim"),
        intermediate_size=config.integer("hidden_dim"),
        activation=read_activation(config, "activation"),
        epsilon=_EPSILON,
    )


def _own_name(bert_name: str) -> str:
    match = _LAYER_TENSOR.fullmatch(bert_name)
    if match is None:
        return bert_name  # an embedding's: the same in both
    return f"transformer.layer.{match['index']}.{_PARTS[match['part']]}.{match['kind']}"
