"""Llama, and Llama with every token visible: llama-embed-nemotron, llama-3.2-nv-embedqa.

Source: Touvron et al., Llama (2023); transformers' LlamaModel. The decoder stack, with biases where `attention_bias`
and `mlp_bias` say so. The files of the first versions leave out the number of key-value heads (then all heads have
their own) and the base of the positions (then 10,000): these are defaults of the family's, and the same in all versions
of transformers.

The code that nvidia's checkpoints bring (`llama_bidirectional_model.LlamaBidirectionalModel`) is LlamaModel with the
causal mask taken away, and nothing else. Its fields `pooling` and `temperature` are read by the classifier beside it,
not by the model: how tokens become one row is said where it is of every model.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from worker.checkpoint.architectures import ARCHITECTURES
from worker.models.families.decoder import DecoderConfig, DecoderModel, check_bidirectional, is_causal

if TYPE_CHECKING:
    from typing import Self

    from worker.checkpoint.files import JsonFile

_DEFAULT_THETA = 10000.0


class LlamaConfig(DecoderConfig):
    @classmethod
    def parse(cls, architecture: str, config: JsonFile) -> Self:
        """Raises ModelError: a field is missing, or has a value that is not implemented."""
        if config.values.get("num_key_value_heads") is None:
            num_heads = config.integer("num_attention_heads")
            config = dataclasses.replace(config, values=config.values | {"num_key_value_heads": num_heads})
        if ARCHITECTURES[architecture].is_bidirectional:
            check_bidirectional(architecture, config)
            model_type, causal = "llama_bidirec", False
        else:
            model_type, causal = "llama", is_causal(config)
        attention_bias = config.flag("attention_bias", default=False)
        return dataclasses.replace(
            cls.read(config, (model_type,), causal=causal, default_theta=_DEFAULT_THETA),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias", default=False),
        )


def build(architecture: str, config: JsonFile) -> DecoderModel:
    """Raises ModelError: the configuration asks for what is not implemented."""
    return DecoderModel(LlamaConfig.parse(architecture, config))
