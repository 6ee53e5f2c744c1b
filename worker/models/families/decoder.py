"""The stack that Llama, Mistral, Qwen2, Qwen3 and Gemma share; a file each says what their config.json files mean.

Source: Touvron et al., Llama (2023); names and order of operations as in transformers' LlamaModel, of which the others
are variants. Queries, keys and values come from one merged product, gate and up from another. The weights are those of
a language model; its head is not part of an embedding and is not read, tied to the embeddings or not.

All of these are causal unless `is_causal` is false. transformers makes such a model see every token since its version
5, which is how checkpoints that were trained so (gte-Qwen2) are meant; a window then reaches to both sides. Another
field of that meaning (`use_bidirectional_attention`) is none of these families' but Gemma's, which reads it itself: it
is refused, not guessed at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from worker.batch.ragged import Mask
from worker.models.families.reading import GLOBAL, LOCAL, read_activation, read_num_kv_heads
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
    tensors_of,
)
from worker.models.rope import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile

# The head of a language model, and the frequencies that older checkpoints hold: they are computed from config.json.
_UNUSED = re.compile(r"lm_head\.weight|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

_LAYER_TYPES = (GLOBAL, LOCAL)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    epsilon: float
    rope: Rope
    causal: bool
    windows: tuple[int | None, ...]  # of each layer: the farthest that a token sees; None: all of its sequence
    qk_norm: bool = False  # queries and keys are normed over each head
    qkv_bias: bool = False
    output_bias: bool = False  # of attention
    mlp_bias: bool = False
    norm_offset: float = 0.0  # norms scale by weight + offset
    embedding_scale: float | None = None  # embeddings are multiplied by it, rounded to their dtype first

    @property
    def max_positions(self) -> int:
        return self.rope.num_positions

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            windowed=any(window is not None for window in self.windows),
        )

    @classmethod
    def read(
        cls,
        config: JsonFile,
        model_types: Sequence[str],
        *,
        causal: bool,
        default_theta: float | None = None,
    ) -> Self:
        """What all families have: neither biases, nor norms over heads, nor windows.

        Raises:
            ModelError: a field is missing, or has a value that is not implemented.
        """
        if (model_type := config.text("model_type")) not in (None, *model_types):
            config.refuse("model_type", f"{model_type!r} is not this architecture's.")
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        num_kv_heads = read_num_kv_heads(config, num_heads)
        head_dim = config.optional_integer("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                config.refuse("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}.")
            head_dim = hidden_size // num_heads
        if head_dim % 2:
            config.refuse("head_dim", f"{head_dim} is odd: rotary positions turn pairs.")
        num_layers = config.integer("num_hidden_layers")
        return cls(
            vocab_size=config.integer("vocab_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act"),
            epsilon=config.number("rms_norm_eps"),
            rope=Rope.parse(config, head_dim, config.integer("max_position_embeddings"), default_theta),
            causal=causal,
            windows=(None,) * num_layers,
        )

    def window(self, num_tokens: int) -> int | None:
        """The farthest that a token sees within a window of so many tokens, itself among them; None where that is as
        far as there are positions.

        Source: transformers' masking_utils. Causal, the window ends with the token; else it reaches so far to either
        side, the token itself not counted.
        """
        distance = num_tokens - 1 if self.causal else num_tokens
        return distance if distance < self.max_positions - 1 else None


def is_causal(config: JsonFile) -> bool:
    """Raises ModelError: another field than `is_causal` says which tokens are seen."""
    if config.flag("use_bidirectional_attention", default=False):
        config.refuse(
            "use_bidirectional_attention", "not a field of this architecture's; is_causal says what it means."
        )
    return config.flag("is_causal", default=True)


def check_bidirectional(architecture: str, config: JsonFile) -> None:
    """Raises ModelError: a field contradicts an architecture in which every token is seen."""
    if not config.flag("use_bidirectional_attention", default=True):
        config.refuse("use_bidirectional_attention", f"false, but a {architecture} always is.")
    if config.flag("is_causal", default=False):
        config.refuse("is_causal", f"true, but a {architecture} never is.")


def qwen_windows(config: JsonFile, decoder: DecoderConfig) -> tuple[int | None, ...]:
    """The windows of Qwen2's and Qwen3's layers: which of them have one is said by `layer_types`, and where that is
    missing all from layer `max_window_layers` on have; none has, unless `use_sliding_window` is set.

    Raises:
        ModelError: a field is missing, of another length, or contradicts another.
    """
    num_layers, size = decoder.num_layers, None
    if config.flag("use_sliding_window", default=False):
        if "sliding_window" not in config.values:
            config.refuse("sliding_window", "missing; null or a number of tokens is needed with use_sliding_window.")
        size = config.optional_integer("sliding_window")
    layer_types = config.values.get("layer_types")
    if layer_types is None:
        first = num_layers if size is None else _first_windowed_layer(config)
        layer_types = [_LAYER_TYPES[index >= first] for index in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        config.refuse("layer_types", f"a list of {num_layers} is needed, one a layer, not {layer_types!r}.")
    if any(layer_type not in _LAYER_TYPES for layer_type in layer_types):
        config.refuse("layer_types", f"{' and '.join(_LAYER_TYPES)} are supported, not {layer_types!r}.")
    if size is None:
        if LOCAL in layer_types:
            config.refuse("layer_types", "'sliding_attention' needs use_sliding_window, and a sliding_window.")
        return decoder.windows
    window = decoder.window(size)
    return tuple(window if layer_type == LOCAL else None for layer_type in layer_types)


def _first_windowed_layer(config: JsonFile) -> int:
    value = config.values.get("max_window_layers")
    if type(value) is not int or value < 0:
        config.refuse("max_window_layers", f"a whole number is needed with use_sliding_window, not {value!r}.")
    return value


class DecoderModel(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.shape = config.shape
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.epsilon, offset=config.norm_offset)
        self._embedding_scale = config.embedding_scale

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(batch.token_ids)  # [tokens, hidden]
        if batch.reference:
            hidden = hidden.float()
        if self._embedding_scale is not None:
            hidden.mul_(torch.tensor(self._embedding_scale, dtype=hidden.dtype, device="cpu").item())
        rotation = self.rotary.at(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, rotation)
        output: torch.Tensor = self.norm(hidden)
        return output

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Names without `model.`, as a checkpoint of the bare stack has them."""
        tensors: dict[str, torch.Tensor] = {"embed_tokens.weight": self.embeddings.weight}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            tensors |= layer.checkpoint_tensors(f"layers.{index}")
        return {**tensors, "norm.weight": self.norm.weight}

    def canonical_name(self, stored_name: str) -> str | None:
        name = stored_name.removeprefix("model.")
        return None if _UNUSED.fullmatch(name) else name


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        hidden_size, epsilon = config.hidden_size, config.epsilon
        self.attention_norm = RMSNorm(hidden_size, epsilon, offset=config.norm_offset)
        self.qkv = RotaryQkv(
            hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.qkv_bias,
            epsilon=epsilon if config.qk_norm else None,
            norm_offset=config.norm_offset,
        )
        self.attention_output = Linear(config.num_heads * config.head_dim, hidden_size, bias=config.output_bias)
        self.mlp_norm = RMSNorm(hidden_size, epsilon, offset=config.norm_offset)
        self.mlp = GatedMlp(
            hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias, down_bias=config.mlp_bias
        )
        self._mask = Mask(config.causal, window)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, rotation: Rotation) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden), rotation)
        attended = batch.attention(query, key, value, batch, self._mask)  # [tokens, heads, head_dim]
        hidden = self.attention_output(attended.flatten(1), hidden)
        output: torch.Tensor = self.mlp(self.mlp_norm(hidden), hidden)
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        qkv, mlp = self.qkv, self.mlp
        tensors = {
            **tensors_of(f"{prefix}.input_layernorm", self.attention_norm),
            **tensors_of(f"{prefix}.self_attn.o_proj", self.attention_output),
            **tensors_of(f"{prefix}.post_attention_layernorm", self.mlp_norm),
            **tensors_of(f"{prefix}.mlp.down_proj", mlp.down),
        }
        for name, norm in (("q_norm", qkv.q_norm), ("k_norm", qkv.k_norm)):
            if norm is not None:
                tensors |= tensors_of(f"{prefix}.self_attn.{name}", norm)
        for kind, merged in qkv.projection.named_parameters():
            names = (f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv")
            tensors |= zip(names, qkv.parts(merged), strict=True)
        for kind, merged in mlp.gate_up.named_parameters():
            names = (f"{prefix}.mlp.{part}_proj.{kind}" for part in ("gate", "up"))
            tensors |= zip(names, merged.chunk(2), strict=True)
        return tensors
