"""Gemma 3 as a text model: EmbeddingGemma (every token visible, mean), and causal ones.

Source: Gemma Team, Gemma 3 Technical Report (2025); Vera et al., EmbeddingGemma (2025); names and order of operations
as in the checkpoints of transformers' Gemma3TextModel. Queries, keys and values come from one merged product, gate and
up from another. The weights are those of a language model; its head is not part of an embedding and is not read.

Embeddings are multiplied by the root of the hidden size, which is rounded to the dtype of the weights first, as in
transformers; a reference in float32 takes it whole. All norms scale by 1 + weight, and what attention and MLP give is
normed before it is added.

Local layers see `sliding_window` tokens back, themselves included. With `use_bidirectional_attention` it is the
`sliding_window // 2` tokens to either side, and themselves. A scale of the scores other than that of their width
(`query_pre_attn_scalar`) is multiplied into the queries.

Not for float16: on real weights the hidden states grow beyond what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from worker.batch.ragged import Mask
from worker.models.families.reading import (
    GLOBAL,
    LOCAL,
    read_activation,
    read_layer_types,
    read_num_kv_heads,
    read_rope,
)
from worker.models.interface import ModelShape
from worker.models.layers import (
    Activation,
    Embedding,
    GatedMlp,
    Linear,
    RMSNorm,
    RotaryQkv,
    RotaryTable,
    Rotation,
    rotations_at,
    tensors_of,
)

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile
    from worker.models.rope import Rope

_NORM_OFFSET = 1.0


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    vocab_size: int
    max_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    epsilon: float
    attention_bias: bool
    causal: bool
    query_scale: float  # beside attention's own, head_dim ** -0.5
    window: int | None  # the farthest that a token sees in a local layer; None: there are none
    layer_types: tuple[str, ...]
    ropes: Mapping[str, Rope]  # of each type of layer that occurs

    @classmethod
    def parse(cls, config: JsonFile) -> Gemma3Config:
        """Raises ModelError: a field is missing, or has a value that this file does not implement."""
        if (model_type := config.text("model_type")) not in (None, "gemma3_text"):
            config.refuse("model_type", f"{model_type!r} is not a Gemma3TextModel's.")
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.values.get(field) is not None:
                config.refuse(field, "a cap on scores or logits is not supported.")
        if not config.flag("is_causal", default=True):
            config.refuse("is_causal", "use_bidirectional_attention says which tokens a Gemma 3 sees.")
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = read_num_kv_heads(config, num_heads)
        head_dim = config.integer("head_dim")
        if head_dim % 2:
            config.refuse("head_dim", f"{head_dim} is odd: rotary positions turn pairs.")
        max_positions = config.integer("max_position_embeddings")
        causal = not config.flag("use_bidirectional_attention", default=False)
        # The last of every n layers is global.
        layer_types = read_layer_types(config, "sliding_window_pattern", lambda index, every: (index + 1) % every == 0)
        theta_fields = {GLOBAL: "rope_theta", LOCAL: "rope_local_base_freq"}
        ropes = {
            layer_type: read_rope(
                config, layer_type, theta_fields[layer_type], head_dim, max_positions, scaled=layer_type == GLOBAL
            )
            for layer_type in sorted(set(layer_types))
        }
        return cls(
            vocab_size=config.integer("vocab_size"),
            max_positions=min(rope.num_positions for rope in ropes.values()),  # scaling may reach further
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_activation"),
            epsilon=config.number("rms_norm_eps"),
            attention_bias=config.flag("attention_bias", default=False),
            causal=causal,
            query_scale=(head_dim / config.positive_number("query_pre_attn_scalar")) ** 0.5,
            window=_window(config, causal=causal) if LOCAL in layer_types else None,
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
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            windowed=self.window is not None,
        )


class Gemma3Model(nn.Module):
    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        self.shape = config.shape
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = nn.ModuleDict({layer_type: RotaryTable(rope) for layer_type, rope in config.ropes.items()})
        self.layers = nn.ModuleList(Gemma3Layer(config, index) for index in range(len(config.layer_types)))
        self.norm = RMSNorm(config.hidden_size, config.epsilon, offset=_NORM_OFFSET)
        self._layer_types = config.layer_types

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            hidden = hidden.float()
        hidden.mul_(torch.tensor(self.shape.hidden_size**0.5, dtype=hidden.dtype, device="cpu").item())
        rotations = rotations_at(self.rotary, batch)
        for layer, layer_type in zip(self.layers, self._layer_types, strict=True):
            hidden = layer(hidden, batch, rotations[layer_type])
        output: torch.Tensor = self.norm(hidden)
        return output

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `model.`, as a checkpoint of the bare stack has them."""
        tensors: dict[str, torch.Tensor] = {"embed_tokens.weight": self.embeddings.weight}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma3Layer)
            tensors |= layer.checkpoint_tensors(f"layers.{index}")
        return {**tensors, "norm.weight": self.norm.weight}

    def canonical_name(self, stored_name: str) -> str | None:
        return None if stored_name == "lm_head.weight" else stored_name.removeprefix("model.")


class Gemma3Layer(nn.Module):
    def __init__(self, config: Gemma3Config, index: int) -> None:
        super().__init__()
        hidden_size, epsilon = config.hidden_size, config.epsilon
        self.attention_norm = RMSNorm(hidden_size, epsilon, offset=_NORM_OFFSET)
        self.qkv = RotaryQkv(
            hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
            epsilon=epsilon,
            norm_offset=_NORM_OFFSET,
        )
        self.attention_output = Linear(config.num_heads * config.head_dim, hidden_size, bias=config.attention_bias)
        self.attended_norm = RMSNorm(hidden_size, epsilon, offset=_NORM_OFFSET)
        self.mlp_norm = RMSNorm(hidden_size, epsilon, offset=_NORM_OFFSET)
        self.mlp = GatedMlp(hidden_size, config.intermediate_size, config.activation)
        self.output_norm = RMSNorm(hidden_size, epsilon, offset=_NORM_OFFSET)
        self._query_scale = config.query_scale
        self._mask = Mask(config.causal, config.window if config.layer_types[index] == LOCAL else None)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, rotation: Rotation) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden), rotation)
        if self._query_scale != 1.0:
            query.mul_(self._query_scale)
        attended = batch.attention(query, key, value, batch, self._mask)
        hidden = hidden + self.attended_norm(self.attention_output(attended.flatten(1)))
        output: torch.Tensor = hidden + self.output_norm(self.mlp(self.mlp_norm(hidden)))
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        projection = self.qkv.projection
        q_norm, k_norm = self.qkv.q_norm, self.qkv.k_norm
        assert q_norm is not None
        assert k_norm is not None
        gate, up = self.mlp.gate_up.weight.chunk(2)
        tensors = {
            **tensors_of(f"{prefix}.input_layernorm", self.attention_norm),
            **tensors_of(f"{prefix}.self_attn.q_norm", q_norm),
            **tensors_of(f"{prefix}.self_attn.k_norm", k_norm),
            **tensors_of(f"{prefix}.self_attn.o_proj", self.attention_output),
            **tensors_of(f"{prefix}.post_attention_layernorm", self.attended_norm),
            **tensors_of(f"{prefix}.pre_feedforward_layernorm", self.mlp_norm),
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            **tensors_of(f"{prefix}.mlp.down_proj", self.mlp.down),
            **tensors_of(f"{prefix}.post_feedforward_layernorm", self.output_norm),
        }
        for kind, merged in (("weight", projection.weight), ("bias", projection.bias)):
            if merged is not None:
                for part, tensor in zip("qkv", self.qkv.parts(merged), strict=True):
                    tensors[f"{prefix}.self_attn.{part}_proj.{kind}"] = tensor
        return tensors


def build(architecture: str, config: JsonFile) -> Gemma3Model:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return Gemma3Model(Gemma3Config.parse(config))


def _window(config: JsonFile, *, causal: bool) -> int:
    num_tokens = config.integer("sliding_window")
    return num_tokens - 1 if causal else num_tokens // 2
