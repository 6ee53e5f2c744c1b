"""BERT: MiniLM, BGE, E5, GTE (first version) and others of their shape.

Source: Devlin et al., BERT (2018); names and order of operations as in the checkpoints of transformers' BertModel.
Queries, keys and values come from one merged product. Every token is of type 0: pairs come with the rerankers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from worker.layers import ACTIVATIONS, Activation, Embedding, LayerNorm, Linear, is_fusible

if TYPE_CHECKING:
    import torch

    from worker.checkpoint import JsonFile
    from worker.ragged import RaggedBatch

# A buffer, the pooler of next-sentence prediction and the heads of pre-training: not part of an embedding.
_UNUSED = re.compile(r"embeddings\.position_ids|pooler\..*|cls\..*")

# How TensorFlow's checkpoints name a layer norm's parameters.
_LEGACY_NAMES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))


@dataclass(frozen=True, slots=True)
class BertConfig:
    vocab_size: int
    max_positions: int
    num_types: int
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    epsilon: float

    @classmethod
    def parse(cls, config: JsonFile) -> BertConfig:
        """Raises ModelError: a field is missing, or has a value that this file does not implement."""
        model_type = config.text("model_type")
        if model_type not in (None, "bert"):
            config.refuse("model_type", f"{model_type!r} is not a BertModel's.")
        position_embedding_type = config.text("position_embedding_type") or "absolute"
        if position_embedding_type != "absolute":
            config.refuse("position_embedding_type", f"{position_embedding_type!r} is not supported.")
        for field in ("is_decoder", "add_cross_attention"):
            if config.flag(field, default=False):
                config.refuse(field, "only encoders are supported.")
        if config.values.get("pruned_heads"):
            config.refuse("pruned_heads", "pruned heads are not supported.")
        activation = config.text("hidden_act")
        if activation is None or activation not in ACTIVATIONS:
            config.refuse("hidden_act", f"{activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden_size % num_heads:
            config.refuse("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}.")
        return cls(
            vocab_size=config.integer("vocab_size"),
            max_positions=config.integer("max_position_embeddings"),
            num_types=config.integer("type_vocab_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            activation=ACTIVATIONS[activation],
            epsilon=config.number("layer_norm_eps"),
        )


class BertModel(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.num_layers = config.num_layers
        self.num_heads = self.num_kv_heads = config.num_heads
        self.head_dim = config.hidden_size // config.num_heads
        self.causal = False
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `bert.`, as a checkpoint of the bare encoder has them."""
        tensors = self.embeddings.checkpoint_tensors("embeddings")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, BertLayer)
            tensors |= layer.checkpoint_tensors(f"encoder.layer.{index}")
        return tensors

    def canonical_name(self, stored_name: str) -> str | None:
        name = stored_name.removeprefix("bert.")
        if _UNUSED.fullmatch(name):
            return None
        for legacy, current in _LEGACY_NAMES:
            if name.endswith(legacy):
                return name.removesuffix(legacy) + current
        return name


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = Embedding(config.vocab_size, config.hidden_size)
        self.types = Embedding(config.num_types, config.hidden_size)
        self.positions = Embedding(config.max_positions, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.epsilon)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        words = self.words.weight
        if is_fusible(words, words) and not batch.reference:
            from worker.kernels.embedding import embed_layer_norm

            return embed_layer_norm(
                batch.token_ids,
                batch.positions,
                words,
                self.positions.weight,
                self.types.weight[0],
                self.norm.weight,
                self.norm.bias,
                self.norm.epsilon,
            )
        embedded: torch.Tensor = self.words(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            embedded = embedded.float()
        embedded += self.types.weight[0]
        embedded += self.positions(batch.positions)
        output: torch.Tensor = self.norm(embedded)
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.word_embeddings.weight": self.words.weight,
            f"{prefix}.token_type_embeddings.weight": self.types.weight,
            f"{prefix}.position_embeddings.weight": self.positions.weight,
            **_norm_tensors(f"{prefix}.LayerNorm", self.norm),
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

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        qkv = self.qkv(hidden).view(-1, 3, self._num_heads, self._head_dim)  # [tokens, 3, heads, head_dim]
        query, key, value = qkv.unbind(1)
        attended = batch.attention(query, key, value, batch, causal=False).flatten(1)  # [tokens, hidden]
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
            **_linear_tensors(f"{prefix}.attention.output.dense", self.attention_output),
            **_norm_tensors(f"{prefix}.attention.output.LayerNorm", self.attention_norm),
            **_linear_tensors(f"{prefix}.intermediate.dense", self.up),
            **_linear_tensors(f"{prefix}.output.dense", self.down),
            **_norm_tensors(f"{prefix}.output.LayerNorm", self.output_norm),
        }


def build(architecture: str, config: JsonFile) -> BertModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return BertModel(BertConfig.parse(config))


def _linear_tensors(prefix: str, linear: Linear) -> dict[str, torch.Tensor]:
    assert linear.bias is not None
    return {f"{prefix}.weight": linear.weight, f"{prefix}.bias": linear.bias}


def _norm_tensors(prefix: str, norm: LayerNorm) -> dict[str, torch.Tensor]:
    return {f"{prefix}.weight": norm.weight, f"{prefix}.bias": norm.bias}
