"""Qwen3: Qwen3-Embedding (causal, last token) and pplx-embed v1 (every token visible, mean).

Source: Qwen Team, Qwen3 Technical Report (2025); transformers' Qwen3Model. The decoder stack, with queries and keys
normed over each head.

pplx-embed's own code (`PPLXQwen3Model`) is Qwen3Model with the causal mask taken away, and nothing else; what it would
do with windows or biases is not known, so they are refused of it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from worker.checkpoint.architectures import ARCHITECTURES
from worker.models.families.decoder import DecoderConfig, DecoderModel, check_bidirectional, is_causal, qwen_windows

if TYPE_CHECKING:
    from typing import Self

    from worker.checkpoint.files import JsonFile

_PPLX_MODEL_TYPE = "bidirectional_pplx_qwen3"


class Qwen3Config(DecoderConfig):
    @classmethod
    def parse(cls, architecture: str, config: JsonFile) -> Self:
        """Raises ModelError: a field is missing, or has a value that is not implemented."""
        config.integer("head_dim")  # it does not follow from the others
        if ARCHITECTURES[architecture].is_bidirectional:
            check_bidirectional(architecture, config)
            for field in ("attention_bias", "use_sliding_window"):
                if config.flag(field, default=False):
                    config.refuse(field, f"not supported of a {architecture}.")
            parsed = cls.read(config, (_PPLX_MODEL_TYPE,), causal=False)
        else:
            parsed = cls.read(config, ("qwen3",), causal=is_causal(config))
        bias = config.flag("attention_bias", default=False)
        return dataclasses.replace(
            parsed, windows=qwen_windows(config, parsed), qk_norm=True, qkv_bias=bias, output_bias=bias
        )


def build(architecture: str, config: JsonFile) -> DecoderModel:
    """Raises ModelError: the configuration asks for what is not implemented."""
    return DecoderModel(Qwen3Config.parse(architecture, config))
