"""What a folder declares about sparse rows: a weight for each token of the vocabulary, by SPLADE.

The head of a masked language model makes such a row. Whether a model does is never guessed. Its folder says so (a
SpladePooling module of sentence-transformers), or the operator does (`--task sparse`). The latter takes the maximum
over the tokens, as sentence-transformers' SparseEncoder does with a bare masked language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from worker.checkpoint.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from worker.checkpoint.architectures import Architecture
    from worker.checkpoint.files import JsonFile


@dataclass(frozen=True, slots=True)
class Splade:
    """How the logits of a row's tokens become its weights."""

    pooling: Literal["max", "sum"]
    num_logs: int  # how often log(1 + x) is taken of max(x, 0)


def read_splade(config: JsonFile, vocab_size: int) -> Splade:
    """What the config.json of a SpladePooling says.

    Raises:
        ModelError: a field is not understood.
    """
    # `chunk_size` bounds memory and changes no number.
    known = {"pooling_strategy", "activation_function", "chunk_size"}
    widths = ("embedding_dimension", "word_embedding_dimension")
    config.refuse_unknown(frozenset({*known, *widths}))
    for field in widths:
        width = config.optional_integer(field)
        if width is not None and width != vocab_size:
            config.refuse(field, f"{width}, but the vocabulary has {vocab_size} tokens.")
    strategy = config.text("pooling_strategy") or "max"
    activation = config.text("activation_function") or "relu"
    if strategy not in ("max", "sum"):
        config.refuse("pooling_strategy", f"'max' or 'sum' is needed, not {strategy!r}.")
    if activation not in ("relu", "log1p_relu"):
        config.refuse("activation_function", f"'relu' or 'log1p_relu' is needed, not {activation!r}.")
    return Splade("max" if strategy == "max" else "sum", 1 if activation == "relu" else 2)


def read_bare(architecture: Architecture, config: JsonFile) -> Splade:
    """What SparseEncoder makes of a folder without modules.json.

    Raises:
        ModelError: it would put layers without weights behind it.
    """
    if architecture.kind != "masked_lm":
        config.refuse("architectures", f"--task sparse: a masked language model is needed, not a {architecture.name}.")
    return Splade("max", 1)


def check_masked(architecture: Architecture, config: JsonFile) -> None:
    """Raises ModelError: the architecture has no vocabulary head that is known."""
    if architecture.vocabulary_head is None:
        known = ", ".join(row.name for row in ARCHITECTURES.values() if row.vocabulary_head is not None)
        config.refuse(
            "architectures", f"sparse rows of a {architecture.name} are not supported; supported are {known}."
        )
