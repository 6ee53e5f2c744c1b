"""voyage-4-nano: Qwen3 with every token visible, and a linear layer behind its last norm.

Source: the own code of voyageai/voyage-4-nano (`modeling_qwen3_bidirectional.Qwen3BidirectionalModel`, revision
67fabc9). It is Qwen3Model without the causal mask. A linear layer without a bias then maps the hidden states of each
token to `num_labels` columns, and these are what is pooled. That code has no mask for windows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from worker.models.families.decoder import DecoderConfig, DecoderModel, check_bidirectional
from worker.models.families.qwen3 import Qwen3Config
from worker.models.layers import Linear, tensors_of

if TYPE_CHECKING:
    import torch

    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.files import JsonFile


class VoyageModel(DecoderModel):
    def __init__(self, config: DecoderConfig, num_columns: int) -> None:
        super().__init__(config)
        self.shape = dataclasses.replace(self.shape, hidden_size=num_columns)
        self.linear = Linear(config.hidden_size, num_columns, bias=False)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        projected: torch.Tensor = self.linear(super().forward(batch))  # [tokens, num_columns]
        return projected

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return {**super().checkpoint_tensors(), **tensors_of("linear", self.linear)}


def build(architecture: str, config: JsonFile) -> VoyageModel:
    """Raises ModelError: the configuration asks for what is not implemented."""
    check_bidirectional(architecture, config)
    if config.flag("use_sliding_window", default=False):
        config.refuse("use_sliding_window", f"not supported of a {architecture}.")
    as_qwen3 = {"is_causal": False, "use_bidirectional_attention": None}
    body = Qwen3Config.parse("Qwen3Model", dataclasses.replace(config, values=config.values | as_qwen3))
    return VoyageModel(body, config.integer("num_labels"))
