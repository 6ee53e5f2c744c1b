"""ModernBERT: gte-modernbert, nomic's modernbert-embed, granite-embedding R2, mmBERT, Ettin and others of their shape.

Source: Warner et al., Smarter, Better, Faster, Longer (2024); names and order of operations as in the checkpoints of
transformers' ModernBertModel.

Norms come before attention and MLP, but for the first layer, whose input the embeddings have normed. Most layers are
local: a token sees those up to `local_attention // 2` away, itself and that many to either side, so that 128 means 129
keys. A local layer turns by angles of its own base.

config.json says which layers are local in one of two ways (`global_attn_every_n_layers`; since transformers 5
`layer_types`), and by what they turn in one of two ways (`global_rope_theta` and `local_rope_theta`;
`rope_parameters`). One of each has to be there: transformers' defaults are not assumed. Gemma 3 says it in the same
ways under other names; `worker.models.families.reading` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from worker.batch.ragged import Mask
from worker.models.families.reading import GLOBAL, LOCAL, read_activation, read_layer_types, read_num_heads, read_rope
from worker.models.interface import ModelShape
from worker.models.layers import (
    Activation,
    Embedding,
    GatedMlp,
    LayerNorm,
    Linear,
    RotaryQkv,
    RotaryTable,
    Rotation,
    rotations_at,
    tensors_of,
)

if TYPE_CHECKING:
    import torch

    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile
    from worker.models.rope import Rope

# The head of pre-training: not part of an embedding.
_UNUSED = re.compile(r"head\..*|decoder\..*")


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    vocab_size: int
    max_positions: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    epsilon: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    window: int  # the farthest that a token sees in a local layer
    layer_types: tuple[str, ...]
    ropes: Mapping[str, Rope]  # of each type of layer that occurs

    @classmethod
    def parse(cls, config: JsonFile) -> ModernBertConfig:
        """Raises ModelError: a field is missing, or has a value that this file does not implement."""
        if (model_type := config.text("model_type")) not in (None, "modernbert"):
            config.refuse("model_type", f"{model_type!r} is not a ModernBertModel's.")
        for field in ("is_causal", "is_decoder", "add_cross_attention"):
            if config.flag(field, default=False):
                config.refuse(field, "only encoders are supported.")
        num_heads = read_num_heads(config, "num_attention_heads", "hidden_size")
        hidden_size = config.integer("hidden_size")
        head_dim = hidden_size // num_heads
        if head_dim % 2:
            config.refuse("num_attention_heads", f"heads of {head_dim} columns: rotary positions turn pairs.")
        max_positions = config.integer("max_position_embeddings")
        # The first layer is global, and from there on every n-th.
        layer_types = read_layer_types(config, "global_attn_every_n_layers", lambda index, every: index % every == 0)
        theta_fields = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}
        ropes = {
            layer_type: read_rope(config, layer_type, theta_fields[layer_type], head_dim, max_positions)
            for layer_type in sorted(set(layer_types))
        }
        return cls(
            vocab_size=config.integer("vocab_size"),
            max_positions=min(rope.num_positions for rope in ropes.values()),  # scaling may reach further
            num_heads=num_heads,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_activation"),
            epsilon=config.number("norm_eps"),
            norm_bias=config.flag("norm_bias", default=False),
            attention_bias=config.flag("attention_bias", default=False),
            mlp_bias=config.flag("mlp_bias", default=False),
            window=config.integer("local_attention") // 2,
            layer_types=layer_types,
            ropes=ropes,
        )

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            num_layers=len(self.layer_types),
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            windowed=LOCAL in self.layer_types,
        )


class ModernBertModel(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.shape = config.shape
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.embeddings_norm = LayerNorm(config.hidden_size, config.epsilon, bias=config.norm_bias)
        self.rotary = nn.ModuleDict({layer_type: RotaryTable(rope) for layer_type, rope in config.ropes.items()})
        self.layers = nn.ModuleList(ModernBertLayer(config, index) for index in range(len(config.layer_types)))
        self.norm = LayerNorm(config.hidden_size, config.epsilon, bias=config.norm_bias)
        self._layer_types = config.layer_types

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            hidden = hidden.float()
        hidden = self.embeddings_norm(hidden)
        rotations = rotations_at(self.rotary, batch)
        for layer, layer_type in zip(self.layers, self._layer_types, strict=True):
            hidden = layer(hidden, batch, rotations[layer_type])
        output: torch.Tensor = self.norm(hidden)
        return output

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `model.`, as a checkpoint of the bare encoder has them."""
        tensors: dict[str, torch.Tensor] = {"embeddings.tok_embeddings.weight": self.embeddings.weight}
        tensors |= tensors_of("embeddings.norm", self.embeddings_norm)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, ModernBertLayer)
            tensors |= layer.checkpoint_tensors(f"layers.{index}")
        return tensors | tensors_of("final_norm", self.norm)

    def canonical_name(self, stored_name: str) -> str | None:
        return None if _UNUSED.fullmatch(stored_name) else stored_name.removeprefix("model.")


class ModernBertLayer(nn.Module):
    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        hidden_size, num_heads = config.hidden_size, config.num_heads
        self.attention_norm = LayerNorm(hidden_size, config.epsilon, bias=config.norm_bias) if index else None
        self.qkv = RotaryQkv(hidden_size, num_heads, num_heads, hidden_size // num_heads, bias=config.attention_bias)
        self.attention_output = Linear(hidden_size, hidden_size, bias=config.attention_bias)
        self.mlp_norm = LayerNorm(hidden_size, config.epsilon, bias=config.norm_bias)
        self.mlp = GatedMlp(
            hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias, down_bias=config.mlp_bias
        )
        self._mask = Mask(causal=False, window=config.window if config.layer_types[index] == LOCAL else None)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, rotation: Rotation) -> torch.Tensor:
        normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
        query, key, value = self.qkv(normed, rotation)
        attended = batch.attention(query, key, value, batch, self._mask)
        hidden = self.attention_output(attended.flatten(1), hidden)
        output: torch.Tensor = self.mlp(self.mlp_norm(hidden), hidden)
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            **({} if self.attention_norm is None else tensors_of(f"{prefix}.attn_norm", self.attention_norm)),
            **tensors_of(f"{prefix}.attn.Wqkv", self.qkv.projection),
            **tensors_of(f"{prefix}.attn.Wo", self.attention_output),
            **tensors_of(f"{prefix}.mlp_norm", self.mlp_norm),
            **tensors_of(f"{prefix}.mlp.Wi", self.mlp.gate_up),
            **tensors_of(f"{prefix}.mlp.Wo", self.mlp.down),
        }


def build(architecture: str, config: JsonFile) -> ModernBertModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return ModernBertModel(ModernBertConfig.parse(config))
