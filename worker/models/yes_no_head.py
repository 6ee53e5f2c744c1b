"""The head of a language model that scores by answering: two rows of its vocabulary head, "yes" and "no".

A vocabulary head is as large as the vocabulary, and a score needs two of its rows. They are read on their own, so that
the whole table is never in memory. If no head is stored and it is tied to the embeddings, the rows of the embeddings
are read. They have a hash of their own, whatever else the loader reads.

The files' headers tell where the rows lie, so `hedgerow inspect` can say that they are missing.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from worker.checkpoint.files import ModelError
from worker.checkpoint.weights import FLOAT_DTYPES, StoredTensor, fit, listed, open_weights

if TYPE_CHECKING:
    from worker.checkpoint.declared import Checkpoint
    from worker.checkpoint.scoring import AnswerTokens
    from worker.checkpoint.weights import Weights
    from worker.models.interface import Model

_HEAD_TABLE = "lm_head.weight"
_EMBEDDING_TABLE = "embed_tokens.weight"


class AnswerHead(nn.Module):
    """logit(yes) - logit(no), or only logit(yes), from the rows of these tokens in a language model's head."""

    rows: torch.Tensor

    def __init__(self, rows: torch.Tensor) -> None:
        """`rows` is float32 [1 or 2, hidden], that of "yes" first."""
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden] → float32 [rows, 1]."""
        logits = functional.linear(rows, self.rows)  # [rows, 1 or 2]
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]


def check_answer_rows(checkpoint: Checkpoint, model: Model) -> None:
    """Check by the files' headers that they hold the rows of a checkpoint with `scoring.answers`. `model` may be on
    torch's meta device.

    Raises:
        ModelError: as `read_answer_rows`, except for numbers that are not finite.
    """
    with open_weights(checkpoint.folder) as weights:
        _find_table(weights, model, _answers(checkpoint))


def read_answer_rows(checkpoint: Checkpoint, model: Model) -> tuple[torch.Tensor, str]:
    """The rows of a checkpoint with `scoring.answers`, float32 [1 or 2, hidden] on the host, and the SHA-256 of their
    bytes in the files.

    Raises:
        ModelError: the rows are missing, of another shape, or not finite, or the files are damaged.
    """
    answers = _answers(checkpoint)
    ids = [answers.yes] if answers.no is None else [answers.yes, answers.no]
    with open_weights(checkpoint.folder) as weights:
        table = _find_table(weights, model, answers)
        stream = next(file.stream for file in weights.files if file.path == table.path)
        content = b"".join(_read_row(stream.fileno(), table, token_id) for token_id in ids)
    dtype: torch.dtype = getattr(torch, FLOAT_DTYPES[table.dtype])
    rows = torch.frombuffer(bytearray(content), dtype=dtype).view(len(ids), -1).float()
    if not rows.isfinite().all():
        raise ModelError(f"{table.place}: holds a NaN or an infinity.")
    return rows, hashlib.sha256(content).hexdigest()


def _answers(checkpoint: Checkpoint) -> AnswerTokens:
    assert checkpoint.scoring is not None
    assert checkpoint.scoring.answers is not None
    return checkpoint.scoring.answers


def _find_table(weights: Weights, model: Model, answers: AnswerTokens) -> StoredTensor:
    """The head, or the embedding table that it is tied to.

    Source: transformers' `tie_weights`: a stored head counts, even if config.json says that it is tied.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
    fitted = fit(weights, shapes, model.canonical_name)
    stored = {tensor.name: tensor for file in weights.files for tensor in file.tensors.values()}
    table = stored.get(fitted.wrapper + _HEAD_TABLE)
    if table is None and answers.tied:
        table = fitted.filled.get(_EMBEDDING_TABLE)
    if table is None:
        why = f"and so is {_EMBEDDING_TABLE}, to which it is tied"
        if not answers.tied:
            names = listed([tensor.name for tensor in fitted.unused])
            why = f"and not tied to the embeddings ({names})"
        raise ModelError(f"{weights.source}: {_HEAD_TABLE} is missing, {why}.")
    needed = (model.shape.vocab_size, model.shape.hidden_size)
    if table.shape != needed or table.dtype not in FLOAT_DTYPES:
        raise ModelError(f"{table.place}: a table of {list(needed)} floats is needed.")
    return table


def _read_row(descriptor: int, table: StoredTensor, index: int) -> bytes:
    row_bytes = table.num_bytes // table.shape[0]
    content = os.pread(descriptor, row_bytes, table.start + index * row_bytes)
    if len(content) < row_bytes:
        raise ModelError(f"{table.path} is damaged: it was cut short while it was read.")
    return content
