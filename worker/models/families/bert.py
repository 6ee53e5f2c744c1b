"""BERT: MiniLM, BGE, E5, GTE (first version) and others of their shape.

Source: Devlin et al., BERT (2018); names and order of operations as in the checkpoints of transformers' BertModel.
Queries, keys and values come from one merged product. Tokens are of type 0, but for a pair's second text.

RoBERTa and DistilBERT are the same computation: their files read other fields into `BertConfig` and give the tensors
other names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from worker.batch.ragged import Mask
from worker.models.families.reading import read_activation, read_num_heads
from worker.models.interface import ModelShape
from worker.models.layers import Activation, Embedding, LayerNorm, Linear, is_fusible, tensors_of

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile

# A buffer, the pooler of next-sentence prediction and the heads of pre-training: not part of an embedding.
_UNUSED = re.compile(r"embeddings\.position_ids|pooler\..*|cls\..*")

# How TensorFlow's checkpoints name a layer norm's parameters.
_LEGACY_NAMES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))


@dataclass(frozen=True, slots=True)
class BertConfig:
    vocab_size: int
    max_positions: int  # that a token can have
    position_offset: int  # rows of the position table before that of a sequence's first token
    num_types: int  # 0: nothing is added for a token's type
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    epsilon: float

    @classmethod
    def parse(cls, config: JsonFile, model_types: tuple[str, ...] = ("bert",)) -> BertConfig:
        """Raises ModelError: a field is missing, or has a value that this file does not implement."""
        check_encoder(config, model_types)
        return cls(
            vocab_size=config.integer("vocab_size"),
            max_positions=config.integer("max_position_embeddings"),
            position_offset=0,
            num_types=config.integer("type_vocab_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=read_num_heads(config, "num_attention_heads", "hidden_size"),
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act"),
            epsilon=config.number("layer_norm_eps"),
        )

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            has_token_types=self.num_types > 1,
        )


class BertModel(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.shape = config.shape
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))
        self._mask = Mask(causal=False)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, self._mask)
        return hidden

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `bert.`, as a checkpoint of the bare encoder has them."""
        tensors = self.embeddings.checkpoint_tensors("embeddings")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, BertLayer)
            tensors |= layer.checkpoint_tensors(f"encoder.layer.{index}")
        return tensors

    def canonical_name(self, stored_name: str) -> str | None:
        return bare_name(stored_name, "bert.", _UNUSED)


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = Embedding(config.vocab_size, config.hidden_size)
        self.types = Embedding(config.num_types, config.hidden_size) if config.num_types else None
        self.positions = Embedding(config.position_offset + config.max_positions, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.epsilon)
        self._position_offset = config.position_offset

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        words = self.words.weight
        position_table = self.positions.weight[self._position_offset :]  # [max_positions, hidden]
        if is_fusible(words, words) and not batch.reference:
            from worker.kernels.embedding import embed_layer_norm

            return embed_layer_norm(
                batch.token_ids,
                batch.positions,
                words,
                position_table,
                None if self.types is None else self.types.weight,
                batch.token_types,
                self.norm.weight,
                self.norm.bias,
                self.norm.epsilon,
            )
        embedded: torch.Tensor = self.words(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            embedded = embedded.float()
        if self.types is not None:
            embedded += self.types.weight[0] if batch.token_types is None else self.types(batch.token_types)
        embedded += functional.embedding(batch.positions, position_table)
        output: torch.Tensor = self.norm(embedded)
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        types = {} if self.types is None else {f"{prefix}.token_type_embeddings.weight": self.types.weight}
        return {
            f"{prefix}.word_embeddings.weight": self.words.weight,
            **types,
            f"{prefix}.position_embeddings.weight": self.positions.weight,
            **tensors_of(f"{prefix}.LayerNorm", self.norm),
        }


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.qkv = Linear(hidden_size, 3 * hidden_size)
        self.attention_output = Linear(hidden_size, hidden_size)
        self.attention_norm = LayerNorm(hidden_size, config.epsilon)
        self.up = Linear(hidden_size, config.intermediate_size, config.activation)
        self.down = Linear(config.intermediate_size, hidden_size)
        self.output_norm = LayerNorm(hidden_size, config.epsilon)
        self._num_heads = config.num_heads
        self._head_dim = hidden_size // config.num_heads

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, mask: Mask) -> torch.Tensor:
        qkv = self.qkv(hidden).view(-1, 3, self._num_heads, self._head_dim)  # [tokens, 3, heads, head_dim]
        query, key, value = qkv.unbind(1)
        attended = batch.attention(query, key, value, batch, mask).flatten(1)  # [tokens, hidden]
        hidden = self.attention_norm(self.attention_output(attended, hidden))
        output: torch.Tensor = self.output_norm(self.down(self.up(hidden), hidden))
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        tensors = {}
        assert self.qkv.bias is not None
        parts = zip(("query", "key", "value"), self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        for name, weight, bias in parts:
            tensors[f"{prefix}.attention.self.{name}.weight"] = weight
            tensors[f"{prefix}.attention.self.{name}.bias"] = bias
        return {
            **tensors,
            **tensors_of(f"{prefix}.attention.output.dense", self.attention_output),
            **tensors_of(f"{prefix}.attention.output.LayerNorm", self.attention_norm),
            **tensors_of(f"{prefix}.intermediate.dense", self.up),
            **tensors_of(f"{prefix}.output.dense", self.down),
            **tensors_of(f"{prefix}.output.LayerNorm", self.output_norm),
        }


def build(architecture: str, config: JsonFile) -> BertModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return BertModel(BertConfig.parse(config))


def check_encoder(config: JsonFile, model_types: tuple[str, ...]) -> None:
    """Raises ModelError: config.json is another family's, or asks for what no family of BERT's shape has here."""
    model_type = config.text("model_type")
    if model_type is not None and model_type not in model_types:
        config.refuse("model_type", f"{model_type!r} is not this architecture's: {' or '.join(model_types)}.")
    position_embedding_type = config.text("position_embedding_type") or "absolute"
    if position_embedding_type != "absolute":
        config.refuse("position_embedding_type", f"{position_embedding_type!r} is not supported.")
    for field in ("is_decoder", "add_cross_attention"):
        if config.flag(field, default=False):
            config.refuse(field, "only encoders are supported.")
    if config.values.get("pruned_heads"):
        config.refuse("pruned_heads", "pruned heads are not supported.")


def bare_name(stored_name: str, prefix: str, unused: re.Pattern[str]) -> str | None:
    """What a bare encoder's checkpoint of today calls this tensor; None if it is not needed."""
    name = stored_name.removeprefix(prefix)
    if unused.fullmatch(name):
        return None
    for legacy, current in _LEGACY_NAMES:
        if name.endswith(legacy):
            return name.removesuffix(legacy) + current
    return name
