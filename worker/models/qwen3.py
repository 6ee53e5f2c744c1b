"""Qwen3: Qwen3-Embedding (causal, last token) and pplx-embed v1 (every token visible, mean).

Source: Qwen Team, Qwen3 Technical Report (2025); names and order of operations as in the checkpoints of transformers'
Qwen3Model. Queries, keys and values come from one merged product, gate and up from another. The weights are those of a
language model; its head is not part of an embedding and is not read.

pplx-embed's own code (`PPLXQwen3Model`) is Qwen3Model with the causal mask taken away, and nothing else. A Qwen3Model
whose config.json says `is_causal: false` is computed so too, as transformers does since its version 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from worker.layers import Embedding, GatedMlp, Linear, RMSNorm, RotaryQkv, RotaryTable, Rotation
from worker.rope import Rope

if TYPE_CHECKING:
    import torch

    from worker.checkpoint import JsonFile
    from worker.ragged import RaggedBatch

_PPLX_ARCHITECTURE = "PPLXQwen3Model"
_PPLX_MODEL_TYPE = "bidirectional_pplx_qwen3"


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    vocab_size: int
    max_positions: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    epsilon: float
    rope: Rope
    causal: bool

    @classmethod
    def parse(cls, architecture: str, config: JsonFile) -> Qwen3Config:
        """Raises ModelError: a field is missing, or has a value that this file does not implement."""
        is_pplx = architecture == _PPLX_ARCHITECTURE
        model_type = config.text("model_type")
        if model_type not in (None, _PPLX_MODEL_TYPE if is_pplx else "qwen3"):
            config.refuse("model_type", f"{model_type!r} is not a {architecture}'s.")
        if (activation := config.text("hidden_act")) != "silu":
            config.refuse("hidden_act", f"{activation!r} is not supported; a {architecture} has 'silu'.")
        if config.flag("attention_bias", default=False):
            config.refuse("attention_bias", "biases in attention are not supported.")
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads")
        if num_heads % num_kv_heads:
            config.refuse("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}.")
        head_dim = config.integer("head_dim")
        if head_dim % 2:
            config.refuse("head_dim", f"{head_dim} is odd: rotary positions turn pairs.")
        num_layers = config.integer("num_hidden_layers")
        _check_layer_types(config, num_layers)
        return cls(
            vocab_size=config.integer("vocab_size"),
            max_positions=config.integer("max_position_embeddings"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            epsilon=config.number("rms_norm_eps"),
            rope=Rope.parse(config, head_dim, config.integer("max_position_embeddings")),
            causal=_is_causal(config, is_pplx=is_pplx),
        )


class Qwen3Model(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.num_layers = config.num_layers
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.causal = config.causal
        self.windowed = self.biased = False
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.rope)
        self.layers = nn.ModuleList(Qwen3Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.epsilon)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            hidden = hidden.float()
        rotation = self.rotary.at(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, rotation)
        output: torch.Tensor = self.norm(hidden)
        return output

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `model.`, as a checkpoint of the bare stack has them."""
        tensors: dict[str, torch.Tensor] = {"embed_tokens.weight": self.embeddings.weight}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Qwen3Layer)
            tensors |= layer.checkpoint_tensors(f"layers.{index}")
        return {**tensors, "norm.weight": self.norm.weight}

    def canonical_name(self, stored_name: str) -> str | None:
        return None if stored_name == "lm_head.weight" else stored_name.removeprefix("model.")


class Qwen3Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden_size, epsilon = config.hidden_size, config.epsilon
        self.attention_norm = RMSNorm(hidden_size, epsilon)
        self.qkv = RotaryQkv(
            hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, epsilon=epsilon, bias=False
        )
        self.attention_output = Linear(config.num_heads * config.head_dim, hidden_size, bias=False)
        self.mlp_norm = RMSNorm(hidden_size, epsilon)
        self.mlp = GatedMlp(hidden_size, config.intermediate_size)
        self._causal = config.causal

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, rotation: Rotation) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden), rotation)
        attended = batch.attention(query, key, value, batch, causal=self._causal)  # [tokens, heads, head_dim]
        hidden = self.attention_output(attended.flatten(1), hidden)
        output: torch.Tensor = self.mlp(self.mlp_norm(hidden), hidden)
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        query, key, value = self.qkv.parts(self.qkv.projection.weight)
        q_norm, k_norm = self.qkv.q_norm, self.qkv.k_norm
        assert q_norm is not None
        assert k_norm is not None
        gate, up = self.mlp.gate_up.weight.chunk(2)
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}.self_attn.q_proj.weight": query,
            f"{prefix}.self_attn.k_proj.weight": key,
            f"{prefix}.self_attn.v_proj.weight": value,
            f"{prefix}.self_attn.q_norm.weight": q_norm.weight,
            f"{prefix}.self_attn.k_norm.weight": k_norm.weight,
            f"{prefix}.self_attn.o_proj.weight": self.attention_output.weight,
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm.weight,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": self.mlp.down.weight,
        }


def build(architecture: str, config: JsonFile) -> Qwen3Model:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return Qwen3Model(Qwen3Config.parse(architecture, config))


def _check_layer_types(config: JsonFile, num_layers: int) -> None:
    if config.flag("use_sliding_window", default=False):
        config.refuse("use_sliding_window", "sliding windows are not supported.")
    layer_types = config.values.get("layer_types")
    if layer_types not in (None, ["full_attention"] * num_layers):
        config.refuse("layer_types", f"{num_layers} times 'full_attention' is supported, not {layer_types!r}.")


def _is_causal(config: JsonFile, *, is_pplx: bool) -> bool:
    if is_pplx:
        if not config.flag("use_bidirectional_attention", default=True):
            config.refuse("use_bidirectional_attention", f"false, but a {_PPLX_ARCHITECTURE} always is.")
        if config.flag("is_causal", default=False):
            config.refuse("is_causal", f"true, but a {_PPLX_ARCHITECTURE} never is.")
        return False
    if config.flag("use_bidirectional_attention", default=False):
        config.refuse("use_bidirectional_attention", "not a field of Qwen3's; is_causal says what this one means.")
    return config.flag("is_causal", default=True)
