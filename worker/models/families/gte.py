"""GTE of 2024: gte-base/large-en-v1.5, gte-multilingual-base, snowflake-arctic-embed-m-v2.0 and others of their shape.

Source: Zhang et al., mGTE (2024). Names and order of operations as in the checkpoints of the models' own code
(Alibaba-NLP/new-impl; Snowflake has a copy of it), which transformers' GteModel reads and writes too.

The encoder is NomicBERT's with biases, and with the halves of the MLP's first product the other way round. The own code
also stretches the rotary frequencies, by a rule for which transformers has no class (`NtkRope`). Its variants that no
published checkpoint uses (other norms, learned positions, scores scaled by the logarithm of the length) are refused;
how it packs its inputs and which library attends makes no difference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from worker.models.families.nomic_bert import NomicBertConfig, NomicBertLayer, NomicBertModel, read_num_types
from worker.models.families.reading import read_activation, read_num_heads
from worker.models.layers import Activation, Linear, is_fusible, tensors_of
from worker.models.rope import Rope

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile

_MODEL_TYPES = ("new", "gte")

# The pooler and the heads of pre-training and of classifiers: not part of an embedding.
_UNUSED = re.compile(r"pooler\..*|lm_head\..*|classifier\..*")

_SCALING_FIELDS = frozenset({"type", "rope_type", "factor", "rope_theta"})


@dataclass(frozen=True, slots=True)
class NtkRope(Rope):
    """Frequencies of a base `factor` times as large, all lowered by factor ** (2 / dim): the slowest turn factor times
    as slowly, the fastest hardly.

    Source: Su, Transformer upgrade path 11 (kexue.fm/archives/9706), equation 6.
    """

    factor: float = 1.0

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians a position, float32 [dim / 2]."""
        wider = Rope(self.dim, self.theta * self.factor, self.num_positions).inverse_frequencies()
        return torch.div(wider, self.factor ** (2 / self.dim))


class GteModel(NomicBertModel):
    @staticmethod
    def make_mlp(config: NomicBertConfig) -> nn.Module:
        return UpGateMlp(config.hidden_size, config.intermediate_size, config.activation)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `new.` or `gte.`, as a checkpoint of the bare encoder has them."""
        tensors = self.embeddings.checkpoint_tensors("embeddings.LayerNorm")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, NomicBertLayer)
            prefix, mlp = f"encoder.layer.{index}", layer.mlp
            assert isinstance(mlp, UpGateMlp)
            tensors |= {
                **tensors_of(f"{prefix}.attention.qkv_proj", layer.qkv.projection),
                **tensors_of(f"{prefix}.attention.o_proj", layer.attention_output),
                **tensors_of(f"{prefix}.attn_ln", layer.attention_norm),
                **tensors_of(f"{prefix}.mlp.up_gate_proj", mlp.up_gate),
                **tensors_of(f"{prefix}.mlp.down_proj", mlp.down),
                **tensors_of(f"{prefix}.mlp_ln", layer.output_norm),
            }
        return tensors

    def canonical_name(self, stored_name: str) -> str | None:
        name = stored_name.removeprefix("new.").removeprefix("gte.")
        return None if _UNUSED.fullmatch(name) else name


class UpGateMlp(nn.Module):
    """`worker.models.layers.GatedMlp` with a weight whose first half is up: a stored tensor fills one parameter.

    On a GPU up and gate are two products, the activation fused into the gate's: the kernel that joins the halves of one
    takes the gate first.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation) -> None:
        super().__init__()
        self.up_gate = Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = Linear(intermediate_size, hidden_size)
        self._activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both [tokens, hidden] → [tokens, hidden]."""
        weight = self.up_gate.weight
        if is_fusible(x, weight):
            from worker.kernels.linear import linear

            up_weight, gate_weight = weight.chunk(2)
            inner = linear(x, gate_weight, activation=self._activation.kernel_name).mul_(linear(x, up_weight))
        else:
            up, gate = self.up_gate(x).chunk(2, dim=1)
            inner = self._activation.function(gate) * up  # [tokens, intermediate]
        output: torch.Tensor = self.down(inner, residual)
        return output


def build(architecture: str, config: JsonFile) -> GteModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return GteModel(_parse(config))


def _parse(config: JsonFile) -> NomicBertConfig:
    _check_supported(config)
    num_heads = read_num_heads(config, "num_attention_heads", "hidden_size")
    hidden_size = config.integer("hidden_size")
    head_dim = hidden_size // num_heads
    if head_dim % 2:
        config.refuse("num_attention_heads", f"heads of {head_dim} columns: rotary positions turn pairs.")
    rope = _read_rope(config, head_dim)
    return NomicBertConfig(
        vocab_size=config.integer("vocab_size"),
        num_types=read_num_types(config),
        max_positions=rope.num_positions,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act"),
        epsilon=config.number("layer_norm_eps"),
        rope=rope,
        attention_bias=True,
        gate_up_bias=False,
        down_bias=True,
    )


def _check_supported(config: JsonFile) -> None:
    if (model_type := config.text("model_type")) not in (None, *_MODEL_TYPES):
        config.refuse("model_type", f"{model_type!r} is not this architecture's: {' or '.join(_MODEL_TYPES)}.")
    fixed = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    for field, value in fixed.items():
        if (declared := config.text(field)) not in (None, value):
            config.refuse(field, f"only {value!r} is supported, not {declared!r}.")
    if config.flag("logn_attention_scale", default=False):
        config.refuse("logn_attention_scale", "scores that depend on the length are not supported.")
    if not config.flag("pack_qkv", default=True):
        config.refuse("pack_qkv", "separate queries, keys and values are not supported.")
    for field in ("is_decoder", "add_cross_attention"):
        if config.flag(field, default=False):
            config.refuse(field, "only encoders are supported.")


def _read_rope(config: JsonFile, head_dim: int) -> Rope:
    """The own code's scaling is taken out of the fields that may hold it, and the rest is read as anywhere."""
    values, factors = dict(config.values), set[float]()
    for field in ("rope_scaling", "rope_parameters"):
        scaling = config.values.get(field)
        if not isinstance(scaling, dict) or "ntk" not in (scaling.get("type"), scaling.get("rope_type")):
            continue
        declared = {name: value for name, value in scaling.items() if value is not None}
        if not _SCALING_FIELDS.issuperset(declared):
            config.refuse(field, f"of 'ntk' only {', '.join(sorted(_SCALING_FIELDS))} are supported: {scaling!r}.")
        if any(declared.get(name) not in (None, "ntk") for name in ("type", "rope_type")):
            config.refuse(field, f"two types at once: {scaling!r}.")
        name = f"{field}.factor"
        factor = replace(config, values={name: declared.get("factor")}).positive_number(name)
        if factor <= 1:
            config.refuse(name, f"a number above 1 is needed, not {factor}.")
        factors.add(factor)
        values[field] = {name: value for name, value in declared.items() if name == "rope_theta"}
    rope = Rope.parse(replace(config, values=values), head_dim, config.integer("max_position_embeddings"))
    if not factors:
        return rope
    if len(factors) > 1 or rope.scaling is not None:
        config.refuse("rope_scaling, rope_parameters", "they disagree.")
    return NtkRope(rope.dim, rope.theta, rope.num_positions, factor=factors.pop())
