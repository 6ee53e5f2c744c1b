"""From hidden states to a weight for each token of the vocabulary: SPLADE, sparse rows.

    hidden states → the head of a masked language model → logits [tokens, vocabulary]
                  → log(1 + max(x, 0)), once or twice → maximum or sum over a row's tokens → the weights that are not 0

Every token of a row counts, special ones too. The head computes in float32, whatever the body's dtype: weights above 0
are kept, and near 0 rounding would decide which ones exist.

The logits of 16,384 tokens and 30,522 columns take 2 GB. So they are made for all tokens and a few columns of the
vocabulary at a time: as many as fit a buffer of fixed size, which stays in a device's cache. Making them for a few
tokens at a time was rejected: rows would be added up in parts, and a sum would depend on its sequence's place in the
batch.

A step leaves dense float32 rows on the device. Only the device knows how many columns of a row are not 0, and asking
would wait for it. The thread that reads the rows compresses them (`compress`), so the launching thread loses no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from common.wire.rows import MAX_FRAME_BYTES
from worker.batch.lazy import FLAG_BYTES, Rows
from worker.checkpoint.architectures import ARCHITECTURES
from worker.checkpoint.files import ModelError
from worker.checkpoint.weights import fit, open_weights
from worker.models.heads import Head, Scorer
from worker.models.layers import ACTIVATIONS
from worker.models.output import Output
from worker.models.pooling import pool, total

if TYPE_CHECKING:
    import numpy.typing as npt

    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.architectures import VocabularyHead as VocabularyHeadKind
    from worker.checkpoint.declared import Checkpoint
    from worker.checkpoint.files import JsonFile
    from worker.checkpoint.splade import Splade
    from worker.models.interface import Model

# Logits in the buffer: 16 MiB. On a CPU, 512 tokens of 768 columns, 1 to 16 MiB made no difference (2026-11-30).
_LOGITS_AT_ONCE = 1 << 22

# How TensorFlow's checkpoints name a layer norm's parameters.
_LEGACY_KINDS: Mapping[str, str] = MappingProxyType({"gamma": "weight", "beta": "bias"})


@dataclass(frozen=True, slots=True)
class _HeadNames:
    """The names of a head's parts in checkpoints, and of the table that the decoder is tied to."""

    transform: str
    norm: str
    decoder: str
    bias: str | None  # the tensor that the decoder's bias is tied to; either name may be the one that is stored
    table: str = "embeddings.word_embeddings.weight"


class VocabularyHead(Head):
    """A linear layer, its activation and a norm, then a logit for each token of the vocabulary."""

    def __init__(
        self,
        names: _HeadNames,
        size: int,
        epsilon: float,
        activation: Callable[[torch.Tensor], torch.Tensor],
        table: torch.Tensor,
    ) -> None:
        """`table`, to which the decoder is tied, is [vocabulary, size] of any floating dtype, yet to be filled."""
        layers = {
            names.transform: nn.Linear(size, size, dtype=torch.float32),
            names.norm: nn.LayerNorm(size, eps=epsilon, dtype=torch.float32),
        }
        super().__init__("max", layers, activation)
        self.names = names
        self.bias = nn.Parameter(torch.empty(len(table), dtype=torch.float32))
        self.decoder: nn.Parameter | None = None
        self._bias_name = f"{names.decoder}.bias" if names.bias is None else names.bias
        self._table = (table,)  # in a tuple: it is the body's parameter, not another one

    def untie(self, *, weight: bool, bias: bool) -> None:
        """Give the decoder a weight of its own, a bias of its own, or both, instead of those that it is tied to."""
        if weight:
            (table,) = self._table
            self.decoder = nn.Parameter(torch.empty(table.shape, dtype=torch.float32), requires_grad=False)
        if bias:
            self._bias_name = f"{self.names.decoder}.bias"

    def logits(self, rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Transformed rows, float32 [tokens, size] → logits of the vocabulary's tokens from `start` to `stop`, float32
        [tokens, stop - start]."""
        table = self._table[0] if self.decoder is None else self.decoder
        return functional.linear(rows, table[start:stop].float(), self.bias[start:stop])

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        own = {} if self.decoder is None else {f"{self.names.decoder}.weight": self.decoder}
        return {**super().checkpoint_tensors(), self._bias_name: self.bias, **own}

    def canonical_name(self, stored_name: str) -> str | None:
        part, _, kind = stored_name.rpartition(".")
        name = f"{part}.{_LEGACY_KINDS[kind]}" if part == self.names.norm and kind in _LEGACY_KINDS else stored_name
        return name if name in self.checkpoint_tensors() else None


class SparseOutput(Output):
    """A row has a column for each token of the vocabulary. `normalize` and the like have no meaning for it."""

    is_sparse = True

    def __init__(self, head: VocabularyHead, splade: Splade, vocab_size: int) -> None:
        super().__init__((), [head], vocab_size)
        self._head = (head,)
        self._splade = splade

    @property
    def pooling(self) -> str:
        return f"splade_{self._splade.pooling}"

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """[tokens, hidden] → uint8 [rows, FLAG_BYTES + 4 * dimensions]: each row's flag, then float32 weights."""
        (head,) = self._head
        rows = torch.empty((len(batch.row_starts), 1 + self.dimensions), dtype=torch.float32, device=hidden.device)
        weights = rows[:, 1:]
        transformed = head(hidden.float())
        num_columns = max(1, _LOGITS_AT_ONCE // len(hidden))
        for start in range(0, self.dimensions, num_columns):
            stop = min(start + num_columns, self.dimensions)
            logits = head.logits(transformed, start, stop)
            if self._splade.pooling == "max":  # of the logits: weights have the same order
                weights[:, start:stop] = self._activate(pool(logits, batch.spans, "max"))
            else:
                weights[:, start:stop] = total(self._activate(logits), batch.spans)
        # No weight is negative, so a row's sum is finite exactly if all its weights are.
        rows.view(torch.int32)[:, 0] = torch.isfinite(weights.sum(dim=1))
        return rows.view(torch.uint8)

    def _activate(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.relu_()
        for _ in range(self._splade.num_logs):
            logits = logits.log1p_()
        return logits


assert FLAG_BYTES == 4, "a row's flag takes the place of one float32"


def compress(dense: Rows, dimensions: npt.NDArray[np.int32]) -> Rows:
    """The rows of a sparse batch in their wire format, `common.wire.rows.SPARSE`. A row that is not finite has no
    values.

    Args:
        dense: float32 rows as uint8 [rows, 4 * vocabulary].
        dimensions: [rows] how many columns count.

    Raises:
        RuntimeError: the rows are more than a message holds. A language model that was not trained to be sparse may
        keep
            most of its columns, and then takes twice as much as dense rows.
    """
    values = dense.rows.view("<f4")
    kept = values != 0
    found = [
        np.flatnonzero(row[:count]) if finite else np.zeros(0, dtype=np.int64)
        for row, count, finite in zip(kept, dimensions.tolist(), dense.finite.tolist(), strict=True)
    ]
    width = 4 + 8 * max(map(len, found))
    if len(found) * width > MAX_FRAME_BYTES:
        raise RuntimeError(f"{len(found)} sparse rows of up to {width} bytes are more than a message holds")
    rows = np.zeros((len(found), width), dtype=np.uint8)
    for row, row_values, columns in zip(rows, values, found, strict=True):
        middle, end = 4 + 4 * len(columns), 4 + 8 * len(columns)
        row[:4].view("<i4")[0] = len(columns)
        row[4:middle].view("<i4")[:] = columns
        row[middle:end].view("<f4")[:] = row_values[columns]
    return Rows(rows, dense.finite)


def build_sparse(checkpoint: Checkpoint, body: Model, device: torch.device) -> tuple[Model, Output]:
    """The body with the head of its masked language model, both yet to be filled, and the module that makes rows.

    Raises:
        ModelError: a field is missing or has a value that is not implemented, or the weights cannot be read.
    """
    assert checkpoint.splade is not None
    config = checkpoint.config
    kind = ARCHITECTURES[checkpoint.architecture].vocabulary_head
    assert kind is not None, "a sparse checkpoint without a head: this is a bug"
    head = _BUILDERS[kind](config, body)
    model = Scorer(body, head)
    with open_weights(checkpoint.folder) as weights:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
        wrapper = fit(weights, shapes, model.canonical_name).wrapper
        stored = {name.removeprefix(wrapper) for file in weights.files for name in file.tensors}
        has_weight, has_bias = (f"{head.names.decoder}.{kind}" in stored for kind in ("weight", "bias"))
        if not has_weight and not config.flag("tie_word_embeddings", default=True):
            raise ModelError(
                f"{weights.source}: {head.names.decoder}.weight is missing, and {config.path}: tie_word_embeddings "
                "says that it is not tied to the embeddings."
            )
    # Source: transformers' `tie_weights`: a stored tensor counts, even if config.json says that it is tied.
    head.untie(weight=has_weight, bias=has_bias)
    head.to(device)
    return model, SparseOutput(head, checkpoint.splade, body.shape.vocab_size)


# --- the heads of transformers' classes ---


def _bert_head(config: JsonFile, body: Model) -> VocabularyHead:
    names = _HeadNames(
        transform="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    )
    return _head(names, body, config.number("layer_norm_eps"), config.text("hidden_act"))


def _distilbert_head(config: JsonFile, body: Model) -> VocabularyHead:
    names = _HeadNames("vocab_transform", "vocab_layer_norm", "vocab_projector", None)
    return _head(names, body, 1e-12, config.text("activation"))


def _roberta_head(config: JsonFile, body: Model) -> VocabularyHead:
    names = _HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
    return _head(names, body, config.number("layer_norm_eps"), "gelu")


def _head(names: _HeadNames, body: Model, epsilon: float, activation: str | None) -> VocabularyHead:
    # The body has read the same field, and refused what is not in here.
    function = ACTIVATIONS[activation or ""].function
    table = body.checkpoint_tensors()[names.table]
    return VocabularyHead(names, body.shape.hidden_size, epsilon, function, table)


_BUILDERS: Mapping[VocabularyHeadKind, Callable[[JsonFile, Model], VocabularyHead]] = MappingProxyType(
    {"bert": _bert_head, "roberta": _roberta_head, "distilbert": _distilbert_head}
)
