"""NomicBERT: nomic-embed-text v1 and v1.5, CodeRankEmbed and others of their shape.

Source: Nussbaum et al., Nomic Embed (2024). Names and order of operations as in the checkpoints of the model's own code
(nomic-ai/contrastors), which transformers' NomicBertModel reads and writes too.

A BERT with rotary positions and a gated MLP; the norms follow their sums. Queries, keys and values come from one merged
product, gate and up from another.

config.json comes in two dialects, GPT-2's field names with those of the model's own code, and transformers'; newer
files have both. Each field is read from the dialect that has it, and two that disagree are refused. This file
implements what the published text models do, and refuses the rest of the own code: mixtures of experts (v2), plain
MLPs, positions that turn in part or in neighbouring pairs.

With `rotary_scaling_factor`, the own code lets the base of the frequencies grow once a sequence is longer than
`max_trained_positions`, and keeps it for all shorter ones after it: a text's vector depends on what ran before. So
such a model takes no more than `max_trained_positions`, where the base is the declared one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

from worker.batch.ragged import Mask
from worker.models.families.reading import read_activation
from worker.models.interface import ModelShape
from worker.models.layers import (
    ACTIVATIONS,
    Activation,
    Embedding,
    GatedMlp,
    LayerNorm,
    Linear,
    RotaryQkv,
    RotaryTable,
    Rotation,
    tensors_of,
)
from worker.models.rope import Rope

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile

# The pooler and the heads of pre-training: not part of an embedding.
_UNUSED = re.compile(r"pooler\..*|cls\..*")

# The own code's gated MLPs by their activation.
_GATED: Mapping[str, Activation] = MappingProxyType({"swiglu": ACTIVATIONS["silu"], "geglu": ACTIVATIONS["gelu"]})

# Fields of the own code, and the one value of each that this file computes; not given, they have it.
_FIXED: Mapping[str, object] = MappingProxyType(
    {
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "use_rms_norm": False,
        "norm_mlp": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_head_dim": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
)

# Where config.json does not say: the own code's, and transformers'.
_DEFAULT_TRAINED_POSITIONS = 2048
_DEFAULT_THETA = 1000.0


@dataclass(frozen=True, slots=True)
class NomicBertConfig:
    vocab_size: int
    num_types: int  # 0: nothing is added for a token's type
    max_positions: int
    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    activation: Activation  # of the gate
    epsilon: float
    rope: Rope
    attention_bias: bool  # of all four projections
    gate_up_bias: bool
    down_bias: bool

    @classmethod
    def parse(cls, config: JsonFile) -> NomicBertConfig:
        """Raises ModelError: a field is missing, or has a value that this file does not implement."""
        has_own_fields = config.values.get("n_embd") is not None
        _check_supported(config, has_own_fields=has_own_fields)
        hidden_size = _either(config, "n_embd", "hidden_size")
        num_heads = _either(config, "n_head", "num_attention_heads")
        head_dim = _read_head_dim(config, hidden_size, num_heads)
        rope = _read_rope(config, head_dim, has_own_fields=has_own_fields)
        return cls(
            vocab_size=_read_vocab_size(config),
            num_types=read_num_types(config),
            max_positions=rope.num_positions,
            num_layers=_either(config, "n_layer", "num_hidden_layers"),
            num_heads=num_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=_either(config, "n_inner", "intermediate_size"),
            activation=_read_gate(config),
            epsilon=_read_epsilon(config),
            rope=rope,
            attention_bias=config.flag("qkv_proj_bias", default=has_own_fields),
            gate_up_bias=config.flag("mlp_fc1_bias", default=has_own_fields),
            down_bias=config.flag("mlp_fc2_bias", default=has_own_fields),
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
            head_dim=self.head_dim,
            has_token_types=self.num_types > 1,
        )


class NomicBertModel(nn.Module):
    def __init__(self, config: NomicBertConfig) -> None:
        super().__init__()
        self.shape = config.shape
        self.embeddings = NomicBertEmbeddings(config)
        self.rotary = RotaryTable(config.rope)
        self.layers = nn.ModuleList(NomicBertLayer(config, self.make_mlp(config)) for _ in range(config.num_layers))

    @staticmethod
    def make_mlp(config: NomicBertConfig) -> nn.Module:
        """A layer's MLP: `mlp(x, residual)`. Other families of this shape keep its weights in another order."""
        return GatedMlp(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            bias=config.gate_up_bias,
            down_bias=config.down_bias,
        )

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch)
        rotation = self.rotary.at(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, rotation)
        return hidden

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `bert.` or `nomic_bert.`, as a checkpoint of the bare encoder has them."""
        tensors = self.embeddings.checkpoint_tensors("emb_ln")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, NomicBertLayer)
            prefix, mlp = f"encoder.layers.{index}", layer.mlp
            assert isinstance(mlp, GatedMlp)
            gate, up = mlp.gate_up.weight.chunk(2)
            tensors |= {
                **tensors_of(f"{prefix}.attn.Wqkv", layer.qkv.projection),
                **tensors_of(f"{prefix}.attn.out_proj", layer.attention_output),
                **tensors_of(f"{prefix}.norm1", layer.attention_norm),
                f"{prefix}.mlp.fc11.weight": up,
                f"{prefix}.mlp.fc12.weight": gate,
                **tensors_of(f"{prefix}.mlp.fc2", mlp.down),
                **tensors_of(f"{prefix}.norm2", layer.output_norm),
            }
            if mlp.gate_up.bias is not None:
                gate, up = mlp.gate_up.bias.chunk(2)
                tensors |= {f"{prefix}.mlp.fc11.bias": up, f"{prefix}.mlp.fc12.bias": gate}
        return tensors

    def canonical_name(self, stored_name: str) -> str | None:
        name = stored_name.removeprefix("nomic_bert.").removeprefix("bert.")
        return None if _UNUSED.fullmatch(name) else name


class NomicBertEmbeddings(nn.Module):
    """Words and types, added up and normed: positions come with the rotation."""

    def __init__(self, config: NomicBertConfig) -> None:
        super().__init__()
        self.words = Embedding(config.vocab_size, config.hidden_size)
        self.types = Embedding(config.num_types, config.hidden_size) if config.num_types else None
        self.norm = LayerNorm(config.hidden_size, config.epsilon)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        embedded: torch.Tensor = self.words(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            embedded = embedded.float()
        if batch.token_types is not None:
            assert self.types is not None
            embedded += self.types(batch.token_types)
        elif self.types is not None:
            embedded += self.types.weight[0]
        output: torch.Tensor = self.norm(embedded)
        return output

    def checkpoint_tensors(self, norm: str) -> dict[str, torch.Tensor]:
        """`norm` is what the checkpoint calls the norm."""
        types = {} if self.types is None else {"embeddings.token_type_embeddings.weight": self.types.weight}
        return {"embeddings.word_embeddings.weight": self.words.weight, **types, **tensors_of(norm, self.norm)}


class NomicBertLayer(nn.Module):
    def __init__(self, config: NomicBertConfig, mlp: nn.Module) -> None:
        super().__init__()
        hidden_size, num_heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.qkv = RotaryQkv(hidden_size, num_heads, num_heads, head_dim, bias=config.attention_bias)
        self.attention_output = Linear(num_heads * head_dim, hidden_size, bias=config.attention_bias)
        self.attention_norm = LayerNorm(hidden_size, config.epsilon)
        self.mlp = mlp
        self.output_norm = LayerNorm(hidden_size, config.epsilon)
        self._mask = Mask(causal=False)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, rotation: Rotation) -> torch.Tensor:
        query, key, value = self.qkv(hidden, rotation)
        attended = batch.attention(query, key, value, batch, self._mask).flatten(1)  # [tokens, heads * head_dim]
        hidden = self.attention_norm(self.attention_output(attended, hidden))
        output: torch.Tensor = self.output_norm(self.mlp(hidden, hidden))
        return output


def build(architecture: str, config: JsonFile) -> NomicBertModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return NomicBertModel(NomicBertConfig.parse(config))


def read_num_types(config: JsonFile) -> int:
    """Rows of the table of token types, 0 if there is none. Raises ModelError: missing or no such number."""
    num_types = config.values.get("type_vocab_size")
    if type(num_types) is not int or num_types < 0:
        config.refuse("type_vocab_size", f"a whole number from 0 on is needed, not {num_types!r}.")
    return num_types


def _check_supported(config: JsonFile, *, has_own_fields: bool) -> None:
    if (model_type := config.text("model_type")) not in (None, "nomic_bert"):
        config.refuse("model_type", f"{model_type!r} is not this architecture's: nomic_bert.")
    for field in ("moe_every_n_layers", "num_experts", "num_shared_experts"):
        if config.values.get(field):
            config.refuse(field, "mixtures of experts, such as nomic-embed-text-v2-moe, are not supported.")
    for field, value in _FIXED.items():
        declared = config.values.get(field)
        if declared is not None and declared != value:
            config.refuse(field, f"only {value!r} is supported, not {declared!r}.")
    for field in ("is_decoder", "add_cross_attention"):
        if config.flag(field, default=False):
            config.refuse(field, "only encoders are supported.")
    fraction = config.values.get("rotary_emb_fraction")
    if fraction != 1 and (has_own_fields or fraction is not None):
        config.refuse("rotary_emb_fraction", f"only 1 is supported, heads that are rotated whole, not {fraction!r}.")
    num_kv_heads = config.optional_integer("num_heads_kv")
    if num_kv_heads is not None and num_kv_heads != _either(config, "n_head", "num_attention_heads"):
        config.refuse("num_heads_kv", f"{num_kv_heads}: key-value heads that are shared are not supported.")


def _either(config: JsonFile, own: str, current: str) -> int:
    """A field that has another name in each dialect. Raises ModelError: neither is there, or they disagree."""
    found = {field: config.integer(field) for field in (own, current) if config.values.get(field) is not None}
    if not found:
        config.refuse(current, f"missing, and no {own} either.")
    if len(set(found.values())) > 1:
        config.refuse(own, f"{found[own]}, but {current} is {found[current]}.")
    return next(iter(found.values()))


def _read_epsilon(config: JsonFile) -> float:
    own, current = "layer_norm_epsilon", "layer_norm_eps"
    found = {field: config.number(field) for field in (own, current) if config.values.get(field) is not None}
    if not found:
        config.refuse(current, f"missing, and no {own} either.")
    if len(set(found.values())) > 1:
        config.refuse(own, f"{found[own]}, but {current} is {found[current]}.")
    return next(iter(found.values()))


def _read_gate(config: JsonFile) -> Activation:
    own = config.text("activation_function")
    if own is None:
        return read_activation(config, "hidden_act")
    if own not in _GATED:
        config.refuse("activation_function", f"{own!r} is not supported; supported are {', '.join(_GATED)}.")
    if config.values.get("hidden_act") is not None and read_activation(config, "hidden_act") is not _GATED[own]:
        config.refuse("activation_function", f"{own!r}, but hidden_act is {config.text('hidden_act')!r}.")
    return _GATED[own]


def _read_head_dim(config: JsonFile, hidden_size: int, num_heads: int) -> int:
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            config.refuse("num_attention_heads, n_head", f"{num_heads} does not divide the hidden size {hidden_size}.")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        config.refuse("head_dim", f"{head_dim} is odd: rotary positions turn pairs.")
    return head_dim


def _read_rope(config: JsonFile, head_dim: int, *, has_own_fields: bool) -> Rope:
    if not has_own_fields:
        num_positions = config.integer("max_position_embeddings")
        return Rope.parse(config, head_dim, num_positions, default_theta=_DEFAULT_THETA)
    theta = config.positive_number("rotary_emb_base")
    if config.values.get("rope_theta") not in (None, theta):
        config.refuse("rotary_emb_base", f"{theta}, but rope_theta is {config.values['rope_theta']!r}.")
    # The parser then compares it with rope_parameters, if those are there.
    joined = replace(config, values=config.values | {"rope_theta": theta})
    rope = Rope.parse(joined, head_dim, _read_num_positions(config))
    if rope.scaling is not None:
        config.refuse("rope_scaling, rope_parameters", "scaled, which the model's own code does not know of.")
    return rope


def _read_num_positions(config: JsonFile) -> int:
    """The limit for the model's own code, which has no table: `n_positions` says how far it is meant to go.

    transformers' field beside it is the trained length.
    """
    num_positions = config.integer("n_positions")
    if not config.values.get("rotary_scaling_factor"):
        return num_positions
    return min(num_positions, config.optional_integer("max_trained_positions") or _DEFAULT_TRAINED_POSITIONS)


def _read_vocab_size(config: JsonFile) -> int:
    vocab_size = config.integer("vocab_size")
    multiple = config.optional_integer("pad_vocab_size_multiple") or 1
    if vocab_size % multiple:
        config.refuse("vocab_size", f"{vocab_size} is no multiple of pad_vocab_size_multiple {multiple}.")
    return vocab_size
