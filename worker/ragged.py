"""A batch as a model sees it: sequences one after the other, without padding between them.

Two layouts, since two things are slow:

On a CPU, sequences are put in order of length, so that those of equal length lie side by side. Attention over them is
then one batched call on views of each such group: no padding, no mask, no copy (measured against a loop over sequences,
where a call's own cost is most of the cost of a short text). `restore` puts rows back into the batch's order. Rejected:
order of arrival with a mask, which computes the square of the longest sequence for each.

On a GPU launches are slow, so a batch fills a `Capacity`: fixed numbers of tokens and sequences at fixed addresses, for
which a graph was captured. Order of arrival stays. The tokens left over form dummy sequences rather than nothing, so
that every row of every buffer is computed and finite: attention reads whole tiles, and 0 x NaN is NaN. They are short,
so they are never what a step waits for.

Everything that a batch claims is checked here, once; below nothing is checked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from common.protocol import cu_seqlens

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.protocol import Batch
    from worker.attention import Attention
    from worker.pooling import Spans

MAX_DUMMY_LENGTH = 128


class BadBatch(ValueError):
    """A batch asks for what this model does not have; the text says what."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may ask of a model."""

    vocab_size: int
    max_tokens: int  # of one sequence, special tokens included
    dimensions: int
    encodings: frozenset[int]  # of common.protocol
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
    row_starts: torch.Tensor  # [rows] the first of the tokens that a row is pooled over: mostly a whole sequence
    row_stops: torch.Tensor  # [rows] one past the last
    dimensions: torch.Tensor  # [rows] columns that count
    normalize: torch.Tensor  # [rows] 0 or 1
    encodings: torch.Tensor  # [rows] of common.protocol
    token_types: torch.Tensor | None  # [tokens] 0 or 1; None for a model that has no types
    attention: Attention  # the backend that was chosen for this batch
    max_seqlen: int
    groups: tuple[LengthGroup, ...] = ()  # on the host, of a batch in order of length: all sequences, by length
    reference: bool = False  # compute in float32 whatever the weights are: what the others are compared with

    @property
    def spans(self) -> Spans:
        return self.row_starts, self.row_stops


# --- checks ---


def check(batch: Batch, limits: Limits) -> None:
    """Raises BadBatch: a token id, a length, a number of dimensions, a flag or an encoding is outside the limits."""
    # That lengths are positive and add up, and that no token id is negative, the message itself has made sure of.
    if (largest := int(batch.token_ids.max())) >= limits.vocab_size:
        raise BadBatch(f"token id {largest}, but the model has {limits.vocab_size} tokens")
    if (longest := int(batch.lengths.max())) > limits.max_tokens:
        raise BadBatch(f"a sequence of {longest} tokens, but the model takes {limits.max_tokens}")
    fewest, most = int(batch.dimensions.min()), int(batch.dimensions.max())
    if fewest < 1 or most > limits.dimensions:
        raise BadBatch(f"{fewest} to {most} dimensions, but the model has 1 to {limits.dimensions}")
    if max(batch.normalize.tobytes()) > 1:  # of few bytes: Python is faster than numpy
        raise BadBatch("a normalize flag is neither 0 nor 1")
    if not limits.encodings.issuperset(batch.encodings.tobytes()):
        raise BadBatch(f"encodings {sorted(set(batch.encodings.tolist()))}; the model has {sorted(limits.encodings)}")
    if len(batch.type_starts) and not limits.has_token_types:
        raise BadBatch("tokens of a second type, but the model has one")
    if len(batch.spans):
        _check_spans(batch)


def _check_spans(batch: Batch) -> None:
    sequences = np.repeat(cu_seqlens(batch.lengths)[:-1], batch.span_counts)
    sides = (batch.spans + sequences[:, None]).ravel()  # within the message, a start and a stop in turn
    if (np.diff(sides) < 0).any():
        raise BadBatch("spans of a sequence are out of order, or overlap")


# --- in order of length, on a CPU ---


def load_sorted(batch: Batch, attention: Attention, *, types: bool = False) -> tuple[RaggedBatch, torch.Tensor]:
    """A checked batch in order of length, shortest first, its tokens with types or without, and int64 [rows]: row i of
    the batch's own order is row restore[i] of this one."""
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


# --- at fixed addresses, on a GPU ---


class Capacity(NamedTuple):  # hashed several times a step, for which a tuple is the fastest
    """How many tokens and sequences a launch has room for (fewer are filled up with dummies), and what it reads."""

    tokens: int
    sequences: int  # and as many rows
    types: bool = False  # whether tokens have types
    spans: bool = False  # whether rows are pooled over spans; if not, over sequences

    @property
    def num_words(self) -> int:
        """Of int32 that the arrays of a batch take, one after the other, each from a multiple of 16 bytes on."""
        return sum(_aligned(size) for size in self._sizes())

    def views(self, block: torch.Tensor, attention: Attention, max_seqlen: int) -> RaggedBatch:
        """The arrays of a batch of this capacity within int32 [>= num_words]."""
        sizes = self._sizes()
        parts = torch.split(block[: self.num_words], [_aligned(size) for size in sizes])
        arrays = iter([part[:size] for part, size in zip(parts, sizes, strict=True)])
        offsets = next(arrays)
        token_ids, positions, token_starts, token_stops = (next(arrays) for _ in range(4))
        dimensions, normalize, encodings = (next(arrays) for _ in range(3))
        token_types = next(arrays) if self.types else None
        row_starts, row_stops = (next(arrays), next(arrays)) if self.spans else (offsets[:-1], offsets[1:])
        return RaggedBatch(
            token_ids=token_ids,
            positions=positions,
            token_starts=token_starts,
            token_stops=token_stops,
            cu_seqlens=offsets,
            row_starts=row_starts,
            row_stops=row_stops,
            dimensions=dimensions,
            normalize=normalize,
            encodings=encodings,
            token_types=token_types,
            attention=attention,
            max_seqlen=max_seqlen,
        )

    def _sizes(self) -> list[int]:
        # The offsets first: so their first number, a zero, is at the same place whatever the capacity.
        sizes = [self.sequences + 1] + [self.tokens] * 4 + [self.sequences] * 3
        return sizes + [self.tokens] * self.types + [self.sequences] * 2 * self.spans


class HostArrays:
    """The arrays of a batch of one capacity within a buffer on the host, cut once: cutting costs as much as writing.

    Nothing is written twice or in vain, since this is on every step's way: a launching thread that has slept finds its
    caches cold, and each of numpy's calls costs it 2 µs or more.
    """

    def __init__(self, capacity: Capacity, buffer: npt.NDArray[np.int32]) -> None:
        """`buffer` is int32 [at least capacity.num_words], laid out as `Capacity.views` has it; its first number is 0
        and stays so."""
        tokens, sequences, types, spans = self._capacity = capacity
        first = _aligned(sequences + 1)
        second = first + 4 * _aligned(tokens)
        third = second + 3 * _aligned(sequences)
        fourth = third + types * _aligned(tokens)
        buffer[0] = 0
        self._offsets = buffer[: sequences + 1]
        self._starts, self._stops = self._offsets[:-1], self._offsets[1:]
        self._sides = np.lib.stride_tricks.as_strided(self._offsets, (2, sequences), (4, 4))  # starts, then stops
        of_tokens = buffer[first:second].reshape(4, -1)[:, :tokens]
        self._token_ids, self._positions, self._token_starts, _ = of_tokens
        self._ids_and_positions, self._token_sides = of_tokens[:2], of_tokens[2:]
        self._dimensions, self._normalize, self._encodings = buffer[second:third].reshape(3, -1)[:, :sequences]
        self._types = buffer[third : third + tokens] if types else None
        self._row_sides = buffer[fourth : capacity.num_words].reshape(2, -1)[:, :sequences] if spans else None
        self._lengths = np.zeros(sequences, dtype=np.int32)
        self._counting = np.arange(tokens, dtype=np.int32)

    def fill(self, batch: Batch | None) -> npt.NDArray[np.int32]:
        """Write a checked batch that fits (or none), and its dummies. Returns its cu_seqlens, until the next call."""
        tokens, sequences = self._capacity[:2]
        lengths = self._lengths
        num_tokens, num_sequences, longest = 0, 0, MAX_DUMMY_LENGTH
        if batch is None:
            longest = max(longest, -(-tokens // sequences))  # there may be fewer rows than short dummies take
        else:
            num_tokens, num_sequences = len(batch.token_ids), len(batch.lengths)
            self._token_ids[:num_tokens] = batch.token_ids
            lengths[:num_sequences] = batch.lengths
        lengths[num_sequences:] = 0
        for place, length in enumerate(dummy_lengths(tokens - num_tokens, longest), num_sequences):
            lengths[place] = length
        lengths.cumsum(out=self._stops)
        self._token_sides[:] = self._sides.repeat(lengths, axis=1)
        np.subtract(self._counting, self._token_starts, out=self._positions)
        self._ids_and_positions[:, num_tokens:] = 0  # a dummy may be longer than the model has positions for
        if self._types is not None:
            self._fill_types(batch)
        if self._row_sides is not None:
            self._fill_spans(batch)
        elif batch is not None:
            # What dummies ask for does not matter.
            self._dimensions[:num_sequences] = batch.dimensions
            self._normalize[:num_sequences] = batch.normalize
            self._encodings[:num_sequences] = batch.encodings
        return self._offsets

    def _fill_spans(self, batch: Batch | None) -> None:
        assert self._row_sides is not None
        num_rows = 0
        if batch is not None:
            num_rows, counts = len(batch.spans), batch.span_counts
            np.add(batch.spans.T, self._starts[: len(counts)].repeat(counts), out=self._row_sides[:, :num_rows])
            self._dimensions[:num_rows] = batch.dimensions.repeat(counts)
            self._normalize[:num_rows] = batch.normalize.repeat(counts)
            self._encodings[:num_rows] = batch.encodings.repeat(counts)
        self._row_sides[:, num_rows:] = self._capacity.tokens  # no tokens, and behind all that have some

    def _fill_types(self, batch: Batch | None) -> None:
        assert self._types is not None
        self._types[:] = 0
        if batch is not None and len(batch.type_starts):
            num_tokens, num_sequences = len(batch.token_ids), len(batch.lengths)
            firsts = (self._starts[:num_sequences] + batch.type_starts).repeat(batch.lengths)
            np.greater_equal(self._counting[:num_tokens], firsts, out=self._types[:num_tokens], casting="unsafe")


def _aligned(num_words: int) -> int:
    return -(-num_words // 4) * 4


def dummy_lengths(num_tokens: int, longest: int = MAX_DUMMY_LENGTH) -> list[int]:
    """Lengths of the dummy sequences that so many tokens make."""
    full, rest = divmod(num_tokens, longest)
    return [longest] * full + ([rest] if rest else [])
