"""A batch as a model sees it: sequences one after the other, without padding between them.

On a CPU, sequences are sorted by length, so that those of equal length lie side by side. Attention is then one batched
call on views of each such group: no padding, no copy. A loop over sequences was slower, since a call's own cost is most
of the cost of a short text. `restore` puts rows back into the batch's order. Rejected: order of arrival with a mask,
which computes the square of the longest sequence for every sequence.

For a GPU, `capacity` lays a batch out.

Everything that a batch claims is checked here, once. Code below this trusts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from common.wire.messages import cu_seqlens

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.wire.messages import Batch


# int32 [rows] twice: where each row's tokens start, and one past where they stop.
Spans: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Which tokens of its own sequence a token attends to, and what is added to its scores."""

    causal: bool  # it sees those up to itself; else all
    window: int | None = None  # the farthest that it sees, in tokens to either side; None: all of its sequence
    # float32 [heads, 2 * reach + 1], added to the scaled scores of a query at i and a key at j in column
    # reach + min(max(j - i, -reach), reach); None: nothing is added.
    bias: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it has neither a window nor a bias."""
        return self.window is None and self.bias is None


# What a model calls in each layer, with query, key and value: see `worker.attention.Attention`.
Attend: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RaggedBatch, Mask], torch.Tensor]"


class BadBatch(ValueError):
    """A batch asks for something that the model does not have. The text says what."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may ask of a model."""

    vocab_size: int
    max_tokens: int  # of one sequence, special tokens included
    dimensions: int
    encodings: frozenset[int]  # of common.wire.rows
    has_token_types: bool = False


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """`num_sequences` sequences of `length` tokens each, side by side from token `start` on."""

    start: int
    num_sequences: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.num_sequences * self.length


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All tensors are int32 on one device."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens] 0 … length - 1 within each sequence
    token_starts: torch.Tensor  # [tokens] where the token's own sequence begins
    token_stops: torch.Tensor  # [tokens] one past where it ends
    cu_seqlens: torch.Tensor  # [sequences + 1] sequence i is tokens cu_seqlens[i] … cu_seqlens[i + 1] - 1
    row_starts: torch.Tensor  # [rows] the first token that a row is pooled over: usually of a whole sequence
    row_stops: torch.Tensor  # [rows] one past the last such token
    dimensions: torch.Tensor  # [rows] columns that the client wants
    normalize: torch.Tensor  # [rows] 0 or 1
    encodings: torch.Tensor  # [rows] of common.wire.rows
    token_types: torch.Tensor | None  # [tokens] 0 or 1; None for a model that has no types
    attention: Attend  # the backend for this batch
    max_seqlen: int
    groups: tuple[LengthGroup, ...] = ()  # all sequences by length, if the batch is sorted; on the host
    reference: bool = False  # compute in float32 whatever the dtype of the weights, for comparison

    @property
    def spans(self) -> Spans:
        return self.row_starts, self.row_stops


# --- checks ---


def check(batch: Batch, limits: Limits) -> None:
    """Raises BadBatch: a token id, a length, a number of dimensions, a flag or an encoding is outside the limits."""
    # The message itself guarantees that lengths are positive and add up, and that no token id is negative.
    if (largest := int(np.maximum.reduce(batch.token_ids))) >= limits.vocab_size:
        raise BadBatch(f"token id {largest}, but the model has {limits.vocab_size} tokens")
    if (longest := int(np.maximum.reduce(batch.lengths))) > limits.max_tokens:
        raise BadBatch(f"a sequence of {longest} tokens, but the model takes {limits.max_tokens}")
    fewest, most = int(np.minimum.reduce(batch.dimensions)), int(np.maximum.reduce(batch.dimensions))
    if fewest < 1 or most > limits.dimensions:
        raise BadBatch(f"{fewest} to {most} dimensions, but the model has 1 to {limits.dimensions}")
    # Bytes without the allowed ones leave the wrong ones: faster than any function of numpy.
    if batch.normalize.tobytes().translate(None, b"\0\1"):
        raise BadBatch("a normalize flag is neither 0 nor 1")
    if batch.encodings.tobytes().translate(None, bytes(limits.encodings)):
        raise BadBatch(f"encodings {sorted(set(batch.encodings.tolist()))}; the model has {sorted(limits.encodings)}")
    if len(batch.type_starts) and not limits.has_token_types:
        raise BadBatch("tokens of a second type, but the model has one")
    if len(batch.spans):
        _check_spans(batch)


def _check_spans(batch: Batch) -> None:
    sequences = np.repeat(cu_seqlens(batch.lengths)[:-1], batch.span_counts)
    sides = (batch.spans + sequences[:, None]).ravel()  # starts and stops in turn, counted within the message
    if (np.diff(sides) < 0).any():
        raise BadBatch("spans of a sequence are out of order, or overlap")


# --- in order of length, on a CPU ---


def load_sorted(batch: Batch, attention: Attend, *, types: bool = False) -> tuple[RaggedBatch, torch.Tensor]:
    """A checked batch sorted by length, shortest first, and `restore`, int64 [rows].

    Row i in the batch's own order is row restore[i] of the sorted one.
    """
    order = np.argsort(batch.lengths, kind="stable").astype(np.int32)
    lengths = batch.lengths[order]
    offsets = cu_seqlens(lengths)
    token_starts = np.repeat(offsets[:-1], lengths)
    positions = np.arange(len(batch.token_ids), dtype=np.int32) - token_starts
    sources = np.repeat(cu_seqlens(batch.lengths)[:-1][order], lengths) + positions
    row_sequences, row_order, row_starts, row_stops = order, order, offsets[:-1], offsets[1:]
    if len(batch.spans):
        counts = batch.span_counts[order]
        row_sequences = np.repeat(order, counts)
        within = np.arange(len(batch.spans), dtype=np.int32) - np.repeat(cu_seqlens(counts)[:-1], counts)
        row_order = cu_seqlens(batch.span_counts)[:-1][row_sequences] + within
        row_starts, row_stops = (batch.spans[row_order] + np.repeat(offsets[:-1], counts)[:, None]).T
    restore = np.empty(len(row_order), dtype=np.int64)
    restore[row_order] = np.arange(len(row_order))
    token_types: torch.Tensor | None = None
    if types:
        type_starts = batch.type_starts[order] if len(batch.type_starts) else lengths
        token_types = torch.from_numpy((positions >= np.repeat(type_starts, lengths)).astype(np.int32))
    ragged = RaggedBatch(
        token_ids=torch.from_numpy(batch.token_ids[sources]),
        positions=torch.from_numpy(positions),
        token_starts=torch.from_numpy(token_starts),
        token_stops=torch.from_numpy(np.repeat(offsets[1:], lengths)),
        cu_seqlens=torch.from_numpy(offsets),
        row_starts=torch.from_numpy(np.ascontiguousarray(row_starts)),
        row_stops=torch.from_numpy(np.ascontiguousarray(row_stops)),
        dimensions=torch.from_numpy(batch.dimensions[row_sequences]),
        normalize=torch.from_numpy(batch.normalize[row_sequences].astype(np.int32)),
        encodings=torch.from_numpy(batch.encodings[row_sequences].astype(np.int32)),
        token_types=token_types,
        attention=attention,
        max_seqlen=int(lengths[-1]),
        groups=_groups(lengths, offsets),
    )
    return ragged, torch.from_numpy(restore)


def _groups(lengths: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]) -> tuple[LengthGroup, ...]:
    """The runs of equal length of a sorted list."""
    firsts = np.flatnonzero(np.diff(lengths, prepend=0))
    counts = np.diff(firsts, append=len(lengths))
    return tuple(
        LengthGroup(start, count, length)
        for start, count, length in zip(starts[firsts].tolist(), counts.tolist(), lengths[firsts].tolist(), strict=True)
    )
