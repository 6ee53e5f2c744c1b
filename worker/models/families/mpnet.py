"""MPNet: all-mpnet-base-v2, multi-qa-mpnet, paraphrase-mpnet and others of their shape.

Source: Song et al., MPNet (2020); names and order of operations as in the checkpoints of transformers' MPNetModel. The
buckets of distances are those of Raffel et al., T5 (2020), both directions.

The encoder is BERT's with RoBERTa's positions and no token types. All layers add one bias to the scaled scores: a
learned number for each head and bucket of distances. It is looked up in every step, in three small kernels, and not
once after loading: a table derived from a parameter would be one more thing that can be out of date.

What transformers fixes whatever config.json says is fixed here: the padding token is 1 and there are 32 buckets. As
with RoBERTa, a padding token within a sequence counts as any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from worker.batch.ragged import Mask
from worker.models.families.bert import BertConfig, BertLayer, BertModel, bare_name, check_encoder
from worker.models.families.reading import read_activation, read_num_heads
from worker.models.layers import Embedding

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile

_PADDING_ID = 1
_NUM_BUCKETS = 32

# Tokens to either side that the table of biases has a column for: T5's largest distance. From 91 on all share a bucket.
_REACH = 128

# A buffer, the pooler of the classifiers and the head of pre-training: not part of an embedding.
_UNUSED = re.compile(r"embeddings\.position_ids|pooler\..*|lm_head\..*")

# What BERT calls a part of a layer, where MPNet calls it something else.
_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attention.self.query": "attention.attn.q",
        "attention.self.key": "attention.attn.k",
        "attention.self.value": "attention.attn.v",
        "attention.output.dense": "attention.attn.o",
        "attention.output.LayerNorm": "attention.LayerNorm",
    }
)


class MPNetModel(BertModel):
    _buckets: torch.Tensor

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.shape = replace(self.shape, biased=True)
        self.relative_bias = Embedding(_NUM_BUCKETS, config.num_heads)
        buckets = [bucket(distance) for distance in range(-_REACH, _REACH + 1)]
        self.register_buffer("_buckets", torch.tensor(buckets, dtype=torch.int64), persistent=False)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch)
        bias = self.relative_bias.weight.index_select(0, self._buckets).float().T.contiguous()  # [heads, 2 * reach + 1]
        mask = Mask(causal=False, bias=bias)
        for layer in self.layers:
            assert isinstance(layer, BertLayer)
            hidden = layer(hidden, batch, mask)
        return hidden

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `mpnet.`, as a checkpoint of the bare encoder has them."""
        tensors = {_own_name(name): tensor for name, tensor in super().checkpoint_tensors().items()}
        return {**tensors, "encoder.relative_attention_bias.weight": self.relative_bias.weight}

    def canonical_name(self, stored_name: str) -> str | None:
        return bare_name(stored_name, "mpnet.", _UNUSED)


def build(architecture: str, config: JsonFile) -> MPNetModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return MPNetModel(_parse(config))


def bucket(distance: int) -> int:
    """The row of the bias table for a key so many tokens after its query, or before it if negative.

    Half of the 32 buckets are for keys after the query. In each half the distances up to 7 have one of their own, and
    from there on two follow each doubling, up to the last: 8, 12, 16, 23, 32, 46, 64 and 91 begin one.

    Source: T5's, with a largest distance of 128, in whole numbers: 8 + ⌊2 · log₂(n / 8)⌋ = 8 + ⌊log₂(n² / 64)⌋.
    """
    n = abs(distance)
    within = n if n < 8 else min(8 + (n * n // 64).bit_length() - 1, _NUM_BUCKETS // 2 - 1)
    return within + (_NUM_BUCKETS // 2 if distance > 0 else 0)


def _parse(config: JsonFile) -> BertConfig:
    check_encoder(config, ("mpnet",))
    fixed = {"pad_token_id": _PADDING_ID, "relative_attention_num_buckets": _NUM_BUCKETS}
    for field, value in fixed.items():
        declared = config.values.get(field)
        if declared is not None and (type(declared) is not int or declared != value):
            config.refuse(field, f"only {value} is supported, which is what transformers computes, not {declared!r}.")
    num_rows = config.integer("max_position_embeddings")
    offset = _PADDING_ID + 1
    if num_rows <= offset:
        config.refuse("max_position_embeddings", f"{num_rows}, of which {offset} are for padding.")
    return BertConfig(
        vocab_size=config.integer("vocab_size"),
        max_positions=num_rows - offset,
        position_offset=offset,
        num_types=0,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=read_num_heads(config, "num_attention_heads", "hidden_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act"),
        epsilon=config.number("layer_norm_eps"),
    )


def _own_name(bert_name: str) -> str:
    for part, own in _PARTS.items():
        bert_name = bert_name.replace(part, own)
    return bert_name
