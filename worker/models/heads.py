"""The heads of classifiers: from a pair's hidden states to its scores. Language models score by `yes_no_head`.

The classifiers of transformers share a few heads: a row is pooled, and one or two linear layers make logits of it. So a
model that scores is a body, whose family knows nothing of scores, and a head beside it (`Scorer`). Both are filled from
the same files by exact name. A head computes in float32, whatever the body's dtype, because its rows are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from worker.checkpoint.scoring import read_num_labels
from worker.models.layers import ACTIVATIONS, tensors_of
from worker.models.output import Output
from worker.models.yes_no_head import AnswerHead, read_answer_rows

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.checkpoint.architectures import ScoreHead
    from worker.checkpoint.declared import Checkpoint
    from worker.checkpoint.files import JsonFile
    from worker.checkpoint.modules import Pooling
    from worker.models.interface import Model

_POOLER = "pooler."


class Head(nn.Module):
    """Linear layers and norms one after the other; if there are several, an activation follows the first."""

    def __init__(
        self,
        pooling: Pooling,
        layers: Mapping[str, nn.Module],
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        padding_id: int | None = None,
    ) -> None:
        """
        Args:
            pooling: how a row is made of its tokens.
            layers: the layers by their names in checkpoints.
            padding_id: a token that "last" skips at a sequence's end.
        """
        super().__init__()
        self.pooling: Pooling = pooling
        self.padding_id = padding_id
        self.layers = nn.ModuleList(layers.values())
        self._names = tuple(layers)
        self._activation = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden] → float32 [rows, labels]."""
        for index, layer in enumerate(self.layers):
            rows = layer(rows)
            if index == 0 and len(self.layers) > 1:
                rows = self._activation(rows)
        return rows

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in zip(self._names, self.layers, strict=True):
            tensors |= tensors_of(name, layer)
        return tensors

    def canonical_name(self, stored_name: str) -> str | None:
        """The name in `checkpoint_tensors` of a checkpoint's tensor; None if it is not the head's."""
        # A pooler is part of the body in checkpoints, and has the body's prefix.
        rest = stored_name.partition(".")[2]
        name = rest if rest.startswith(_POOLER) else stored_name
        return name if name in self.checkpoint_tensors() else None


class Scorer(nn.Module):
    """A body and its head, filled from one checkpoint. A call runs only the body; the head sees pooled rows
    (`output`)."""

    def __init__(self, body: Model, head: Head) -> None:
        super().__init__()
        self.body = cast("nn.Module", body)  # before the head: its dtype is the model's
        self.head = head.requires_grad_(requires_grad=False)
        self.shape = body.shape
        self._model = (body,)  # not as a second submodule

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """[tokens, hidden]."""
        return self._model[0](batch)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return {**self._model[0].checkpoint_tensors(), **self.head.checkpoint_tensors()}

    def canonical_name(self, stored_name: str) -> str | None:
        return self.head.canonical_name(stored_name) or self._model[0].canonical_name(stored_name)


class ScoreOutput(Output):
    """Scores as rows. Padding tokens at the end of a sequence are not pooled, if the head has a `padding_id`.

    Source: transformers' GenericForSequenceClassification takes the last token that is not the padding token, also from
    a sequence that is not padded. If all tokens are, it takes the first.
    """

    def __init__(self, pooling: Pooling, head: nn.Module, num_labels: int, padding_id: int | None = None) -> None:
        super().__init__((pooling,), [head], num_labels)
        self._padding_id = padding_id

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        if self._padding_id is not None:
            batch = dataclasses.replace(batch, row_stops=_trimmed_stops(batch, self._padding_id))
        return super().forward(hidden, batch)


def build_head(kind: ScoreHead, config: JsonFile, hidden_size: int) -> Head:
    """The head of a classifier, its parameters yet to be filled.

    Raises:
        ModelError: a field is missing, or has a value that is not implemented.
    """
    return _BUILDERS[kind](config, hidden_size, read_num_labels(config))


def load_scores(checkpoint: Checkpoint, model: Model, device: torch.device) -> tuple[Output, str]:
    """The module that makes scores of hidden states, and a SHA-256 over the weights that were read for it.

    Raises:
        ModelError: the rows of the answer tokens are missing, of another shape or not finite.
    """
    assert checkpoint.scoring is not None
    num_labels = checkpoint.scoring.num_labels
    if checkpoint.scoring.answers is None:
        assert isinstance(model, Scorer)
        return ScoreOutput(model.head.pooling, model.head, num_labels, model.head.padding_id), ""
    rows, digest = read_answer_rows(checkpoint, model)
    return ScoreOutput("last", AnswerHead(rows).to(device), num_labels), digest


# --- the heads of transformers' classes ---


def _pooler_head(config: JsonFile, hidden_size: int, num_labels: int) -> Head:
    """The head of BertForSequenceClassification, which other encoders share."""
    layers = {"pooler.dense": _linear(hidden_size, hidden_size), "classifier": _linear(hidden_size, num_labels)}
    return Head("cls", layers)


def _roberta_head(config: JsonFile, hidden_size: int, num_labels: int) -> Head:
    layers = {
        "classifier.dense": _linear(hidden_size, hidden_size),
        "classifier.out_proj": _linear(hidden_size, num_labels),
    }
    return Head("cls", layers)


def _distilbert_head(config: JsonFile, hidden_size: int, num_labels: int) -> Head:
    layers = {"pre_classifier": _linear(hidden_size, hidden_size), "classifier": _linear(hidden_size, num_labels)}
    return Head("cls", layers, functional.relu)


def _modernbert_head(config: JsonFile, hidden_size: int, num_labels: int) -> Head:
    pooling = config.text("classifier_pooling")
    if pooling not in ("cls", "mean"):
        config.refuse("classifier_pooling", f"'cls' or 'mean' is needed, not {pooling!r}.")
    activation = config.text("classifier_activation") or ""
    if activation not in ACTIVATIONS:
        config.refuse(
            "classifier_activation", f"{activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}."
        )
    norm_bias = config.flag("norm_bias", default=False)
    layers = {
        "head.dense": _linear(hidden_size, hidden_size, bias=config.flag("classifier_bias", default=False)),
        "head.norm": nn.LayerNorm(hidden_size, eps=config.number("norm_eps"), bias=norm_bias, dtype=torch.float32),
        "classifier": _linear(hidden_size, num_labels),
    }
    return Head("mean" if pooling == "mean" else "cls", layers, ACTIVATIONS[activation].function)


def _last_token_head(config: JsonFile, hidden_size: int, num_labels: int) -> Head:
    padding_id = config.values.get("pad_token_id")
    if padding_id is not None and type(padding_id) is not int:
        config.refuse("pad_token_id", f"a token id is needed, not {padding_id!r}.")
    return Head("last", {"score": _linear(hidden_size, num_labels, bias=False)}, padding_id=padding_id)


_BUILDERS: Mapping[ScoreHead, Callable[[JsonFile, int, int], Head]] = MappingProxyType(
    {
        "pooler": _pooler_head,
        "roberta": _roberta_head,
        "distilbert": _distilbert_head,
        "modernbert": _modernbert_head,
        "last_token": _last_token_head,
    }
)


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float32)


def _trimmed_stops(batch: RaggedBatch, padding_id: int) -> torch.Tensor:
    """int32 [rows]: one past the last token of each row that is not `padding_id`; past its first if all are."""
    starts, stops = batch.spans
    ends = torch.arange(1, len(batch.token_ids) + 1, dtype=torch.int32, device=starts.device)
    kept = torch.where(batch.token_ids == padding_id, 0, ends).cummax(0).values  # [tokens]
    trimmed = torch.maximum(kept[(stops - 1).clamp_min(0)], starts + 1)
    return torch.where(stops > starts, trimmed, stops)
