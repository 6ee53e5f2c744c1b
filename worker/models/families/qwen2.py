"""Qwen2 and Qwen2.5: gte-Qwen2, jina-code-embeddings and others of their shape.

Source: Yang et al., Qwen2 Technical Report (2024); transformers' Qwen2Model. The decoder stack, with biases on queries,
keys and values, always.

gte-Qwen2's own code (`modeling_qwen.Qwen2Model`) is that model with the causal mask taken away. Its config.json says so
too (`is_causal: false`), so transformers computes the same with and without that code. A folder that brings such code
and does not say so, or uses what that code predates, is refused: the names alone do not tell what it would do.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from worker.models.families.decoder import DecoderConfig, DecoderModel, is_causal, qwen_windows

if TYPE_CHECKING:
    from typing import Self

    from worker.checkpoint.files import JsonFile


class Qwen2Config(DecoderConfig):
    @classmethod
    def parse(cls, config: JsonFile) -> Self:
        """Raises ModelError: a field is missing, or has a value that is not implemented."""
        parsed = cls.read(config, ("qwen2",), causal=is_causal(config))
        parsed = dataclasses.replace(parsed, windows=qwen_windows(config, parsed), qkv_bias=True)
        if config.values.get("auto_map"):
            parsed._check_own_code(config)
        return parsed

    def _check_own_code(self, config: JsonFile) -> None:
        if self.causal:
            config.refuse("is_causal", "false is needed of a model that brings the code of gte-Qwen2.")
        if self.rope.scaling is not None or any(window is not None for window in self.windows):
            config.refuse("auto_map", "the code of gte-Qwen2 has neither scaled rotary positions nor windows.")


def build(_architecture: str, config: JsonFile) -> DecoderModel:
    """Raises ModelError: the configuration asks for what is not implemented."""
    return DecoderModel(Qwen2Config.parse(config))
