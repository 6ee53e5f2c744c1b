"""Mistral: e5-mistral, SFR-Embedding, Linq-Embed and others of their shape.

Source: Jiang et al., Mistral 7B (2023); transformers' MistralModel. The decoder stack without biases; `sliding_window`,
which may be null but has to be there, is the window of all layers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from worker.models.families.decoder import DecoderConfig, DecoderModel, is_causal

if TYPE_CHECKING:
    from typing import Self

    from worker.checkpoint.files import JsonFile


class MistralConfig(DecoderConfig):
    @classmethod
    def parse(cls, config: JsonFile) -> Self:
        """Raises ModelError: a field is missing, or has a value that is not implemented."""
        parsed = cls.read(config, ("mistral",), causal=is_causal(config))
        if config.values.get("layer_types") is not None:
            config.refuse("layer_types", "not a field of Mistral's, all of whose layers are alike.")
        if "sliding_window" not in config.values:
            config.refuse("sliding_window", "missing; null or a number of tokens is needed.")
        size = config.optional_integer("sliding_window")
        window = None if size is None else parsed.window(size)
        return dataclasses.replace(parsed, windows=(window,) * parsed.num_layers)


def build(_architecture: str, config: JsonFile) -> DecoderModel:
    """Raises ModelError: the configuration asks for what is not implemented."""
    return DecoderModel(MistralConfig.parse(config))
