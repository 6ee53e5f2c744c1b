"""Gemma, the first: the language model below bge-reranker-v2-gemma.

Source: Gemma Team, Gemma: Open Models Based on Gemini Research and Technology (2024); transformers' GemmaModel. The
decoder stack, with biases in attention where `attention_bias` says so. Embeddings are multiplied by the root of the
hidden size, which is rounded to the dtype of the weights first; a reference in float32 takes it whole. All norms scale
by 1 + weight.

Where releases of transformers, or their kinds of attention, disagree on what a field means, it is refused:

- The activation. Release 4 reads `hidden_activation`, and takes null for gelu_pytorch_tanh whatever `hidden_act` says;
  release 5 reads `hidden_act` alone, and takes gelu for gelu_pytorch_tanh.
- Which tokens are seen. `is_causal` false is every token. `use_bidirectional_attention` without that is heeded only by
  attention that gets no mask: by sdpa where nothing is padded, by eager never.

Not for float16: the hidden states grow beyond what it holds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from worker.models.families.decoder import DecoderConfig, DecoderModel

if TYPE_CHECKING:
    from typing import Self

    from worker.checkpoint.files import JsonFile

_ACTIVATION = "gelu_pytorch_tanh"
_OLD_NAME = "gelu"


class GemmaConfig(DecoderConfig):
    @classmethod
    def parse(cls, config: JsonFile) -> Self:
        """Raises ModelError: a field is missing, or has a value that is not implemented."""
        config.integer("head_dim")  # which is not the hidden size over the number of heads where it is missing
        attention_bias = config.flag("attention_bias", default=False)
        named = dataclasses.replace(config, values=config.values | {"hidden_act": _read_activation_name(config)})
        parsed = cls.read(named, ("gemma",), causal=_is_causal(config))
        return dataclasses.replace(
            parsed,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            norm_offset=1.0,
            embedding_scale=parsed.hidden_size**0.5,
        )


def build(_architecture: str, config: JsonFile) -> DecoderModel:
    """Raises ModelError: the configuration asks for what is not implemented."""
    return DecoderModel(GemmaConfig.parse(config))


def _read_activation_name(config: JsonFile) -> str:
    """Raises ModelError: releases of transformers take it for different ones."""
    before = config.text("hidden_activation") or _ACTIVATION
    since = config.text("hidden_act") or _ACTIVATION
    if since == _OLD_NAME:
        since = _ACTIVATION
    if before != since:
        config.refuse("hidden_activation, hidden_act", f"release 4 of transformers takes {before}, release 5 {since}.")
    return since


def _is_causal(config: JsonFile) -> bool:
    """Raises ModelError: it depends on the kind of attention."""
    causal = config.flag("is_causal", default=True)
    if causal and config.flag("use_bidirectional_attention", default=False):
        config.refuse(
            "use_bidirectional_attention",
            "true, but is_causal is not false: transformers then sees what its kind of attention does.",
        )
    return causal
