"""From hidden states to rows: by the checkpoint's modules, and in the form that each client wants.

    hidden states → pooled (one pooling, or several side by side) → the stages → cut, normalised, encoded

On a GPU this is part of the step's graph, and one pooling without stages is one or two kernels. Stages compute in
float32 with float32 weights, whatever the model's dtype. They see one row for each text, so this costs next to nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from worker.checkpoint.modules import CutStage, DenseStage, NormStage, Stage
from worker.models import pooling as plain
from worker.models.loader import load_stage

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.declared import Checkpoint
    from worker.checkpoint.modules import Pooling

# Source: torch.nn.LayerNorm's default, which sentence-transformers uses.
_EPSILON = 1e-5


class Output(nn.Module):
    is_sparse = False  # whether rows are compressed on the host (`worker.models.sparse`)

    def __init__(self, poolings: Sequence[Pooling], stages: Sequence[nn.Module], dimensions: int) -> None:
        """
        Args:
            poolings: how each row is pooled; several results stand side by side.
            stages: from float32 [rows, columns] to float32 [rows, other columns].
            dimensions: the number of columns of the result.
        """
        super().__init__()
        self.poolings = tuple(poolings)
        self.stages = nn.ModuleList(stages)
        self.dimensions = dimensions

    @property
    def pooling(self) -> str:
        """The name of the pooling, for people."""
        return "+".join(self.poolings)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """[tokens, hidden] → uint8 [rows, FLAG_BYTES + 4 * dimensions], see `pooling.finish`."""
        wanted = (batch.dimensions, batch.normalize, batch.encodings)
        pool, finish = plain.pool, plain.finish
        if hidden.is_cuda and hidden.dtype != torch.float32:
            from worker.kernels import tail

            if len(self.poolings) == 1 and not self.stages:
                return tail.pool_and_finish(hidden, batch.spans, self.poolings[0], *wanted)
            pool, finish = tail.pool, tail.finish
        pooled = [pool(hidden, batch.spans, pooling) for pooling in self.poolings]
        rows = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for stage in self.stages:
            rows = stage(rows)
        return finish(rows.contiguous(), *wanted)


def load_output(checkpoint: Checkpoint, device: torch.device) -> tuple[Output, str]:
    """The output that the checkpoint declares, its stages loaded, and one SHA-256 over all their weights.

    Raises:
        ModelError: weights are missing, not expected, of another shape or not finite.
    """
    digest = hashlib.sha256()
    stages: list[nn.Module] = []
    for stage in checkpoint.stages:
        module = _build(stage).to(device).requires_grad_(requires_grad=False)
        if isinstance(stage, DenseStage | NormStage):
            digest.update(load_stage(checkpoint.root / stage.folder, module).encode())
        stages.append(module)
    return Output(checkpoint.poolings, stages, checkpoint.dimensions), digest.hexdigest()


def _build(stage: Stage) -> nn.Module:
    if isinstance(stage, DenseStage):
        return _Dense(stage)
    if isinstance(stage, NormStage):
        return _LayerNorm(stage.num_columns)
    return _Cut(stage.num_columns) if isinstance(stage, CutStage) else _Unit()


# --- the stages, float32 [rows, columns] → float32 [rows, columns]; parameters have the names that files give them ---


class _Dense(nn.Module):
    def __init__(self, stage: DenseStage) -> None:
        super().__init__()
        inputs, outputs = stage.num_inputs, stage.num_outputs
        self.linear = nn.Linear(inputs, outputs, bias=stage.has_bias, dtype=torch.float32)
        self.activation: nn.Module = getattr(nn, stage.activation)()
        self.has_residual = stage.has_residual
        if stage.has_residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False, dtype=torch.float32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] → [rows, outputs]."""
        mapped: torch.Tensor = self.activation(self.linear(rows))
        if self.has_residual:
            mapped = mapped + (self.residual(rows) if hasattr(self, "residual") else rows)
        return mapped


class _LayerNorm(nn.Module):
    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_columns, eps=_EPSILON, dtype=torch.float32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(rows)
        return normed


class _Unit(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.normalize(rows, dim=1)


class _Cut(nn.Module):
    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.num_columns = num_columns

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self.num_columns]
