"""A batch as a model sees it: sequences one after the other, without padding between them.

Two layouts, since two things are slow:

On a CPU, sequences are put in order of length, so that those of equal length lie side by side. Attention over them is
then one batched call on views of each such group: no padding, no mask, no copy (measured against a loop over sequences,
where a call's own cost is most of the cost of a short text). `restore` puts rows back into the batch's order. Rejected:
order of arrival with a mask, which computes the square of the longest sequence for each.

On a GPU launches are slow, so a batch fills a `Capacity`: fixed numbers of tokens and sequences at fixed addresses, for
which a graph was captured. Order of arrival stays. The tokens left over form dummy sequences rather than nothing, so
that every row of every buffer is computed and finite: attention reads whole tiles, and 0 x NaN is NaN. They are short,
so they are never what a step waits for. What follows from the lengths alone, three numbers a token, the device works
out itself (`worker.kernels.step`), so that the host need not write it.

Everything that a batch claims is checked here, once; below nothing is checked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from common.wire.messages import cu_seqlens

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.wire.messages import Batch
    from worker.attention import Attention
    from worker.models.pooling import Spans

MAX_DUMMY_LENGTH = 128


class BadBatch(ValueError):
    """A batch asks for what this model does not have; the text says what."""


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
    row_starts: torch.Tensor  # [rows] the first of the tokens that a row is pooled over: mostly a whole sequence
    row_stops: torch.Tensor  # [rows] one past the last
    dimensions: torch.Tensor  # [rows] columns that count
    normalize: torch.Tensor  # [rows] 0 or 1
    encodings: torch.Tensor  # [rows] of common.wire.rows
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
    if (largest := int(np.maximum.reduce(batch.token_ids))) >= limits.vocab_size:
        raise BadBatch(f"token id {largest}, but the model has {limits.vocab_size} tokens")
    if (longest := int(np.maximum.reduce(batch.lengths))) > limits.max_tokens:
        raise BadBatch(f"a sequence of {longest} tokens, but the model takes {limits.max_tokens}")
    fewest, most = int(np.minimum.reduce(batch.dimensions)), int(np.maximum.reduce(batch.dimensions))
    if fewest < 1 or most > limits.dimensions:
        raise BadBatch(f"{fewest} to {most} dimensions, but the model has 1 to {limits.dimensions}")
    # What is left of bytes without those that are right: sooner than any function of numpy.
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

# The first words of the arrays of a batch: numbers that say something of the step, and where to find them.
NUM_TOKENS = 0  # that are no dummies'
NUM_TYPED = 1  # the same where some tokens are of the second type, else 0
NEXT_SLOT, OUTPUT_WORDS, OUTPUT_ADDRESS = 2, 3, 4  # of `worker.staging`; the last takes two words
HEAD_WORDS = 8


class Capacity(NamedTuple):  # hashed several times a step, for which a tuple is the fastest
    """How many tokens and sequences a launch has room for (fewer are filled up with dummies), and what it reads.

    The arrays of a batch lie one after the other in int32, each from a multiple of 16 bytes on:

        the head | offsets | dimensions | normalize | encodings | starts and stops of rows, if spans    (row_words)
        | token ids | token types, if types                                                             (host_words)
        | positions | token starts | token stops                                                        (num_words)

    The host writes those of the first two lines. The offsets' first number, a zero, is at the same place whatever the
    capacity.
    """

    tokens: int
    sequences: int  # and as many rows
    types: bool = False  # whether tokens have types
    spans: bool = False  # whether rows are pooled over spans; if not, over sequences

    @property
    def row_words(self) -> int:
        return HEAD_WORDS + _aligned(self.sequences + 1) + (5 if self.spans else 3) * _aligned(self.sequences)

    @property
    def host_words(self) -> int:
        return self.row_words + (2 if self.types else 1) * _aligned(self.tokens)

    @property
    def num_words(self) -> int:
        return self.host_words + 3 * _aligned(self.tokens)

    def views(self, block: torch.Tensor, attention: Attention, max_seqlen: int) -> RaggedBatch:
        """The arrays of a batch of this capacity within int32 [>= num_words]."""
        sizes = [self.sequences + 1] + [self.sequences] * (5 if self.spans else 3)
        sizes += [self.tokens] * (5 if self.types else 4)
        parts = torch.split(block[HEAD_WORDS : self.num_words], [_aligned(size) for size in sizes])
        arrays = iter([part[:size] for part, size in zip(parts, sizes, strict=True)])
        offsets, dimensions, normalize, encodings = (next(arrays) for _ in range(4))
        row_starts, row_stops = (next(arrays), next(arrays)) if self.spans else (offsets[:-1], offsets[1:])
        token_ids = next(arrays)
        token_types = next(arrays) if self.types else None
        positions, token_starts, token_stops = arrays
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


class HostArrays:
    """The arrays of a batch of one capacity within a buffer on the host, cut once: cutting costs as much as writing.

    Nothing is written twice or in vain, since this is on every step's way: a launching thread that has slept finds its
    caches cold, and each of numpy's calls costs it 2 µs or more.
    """

    def __init__(self, capacity: Capacity, buffer: npt.NDArray[np.int32]) -> None:
        """`buffer` is int32 [at least capacity.host_words], laid out as `Capacity` says; the first of its offsets is 0
        and stays so."""
        tokens, sequences, types, spans = self._capacity = capacity
        self._head = buffer[:HEAD_WORDS].data
        buffer[HEAD_WORDS] = 0
        self._offsets = buffer[HEAD_WORDS : HEAD_WORDS + sequences + 1]
        self._starts, self._stops = self._offsets[:-1], self._offsets[1:]
        first = HEAD_WORDS + _aligned(sequences + 1)
        of_rows = buffer[first : capacity.row_words].reshape(-1, _aligned(sequences))[:, :sequences]
        self._dimensions, self._normalize, self._encodings = of_rows[:3]
        self._row_sides = of_rows[3:] if spans else None
        of_tokens = buffer[capacity.row_words : capacity.host_words].reshape(-1, _aligned(tokens))[:, :tokens]
        self._token_ids = of_tokens[0]
        self._types = of_tokens[1] if types else None

    def fill(self, batch: Batch | None) -> npt.NDArray[np.int32]:
        """Write a checked batch that fits (or none), and its dummies. Returns its cu_seqlens, until the next call.

        What dummies' rows ask for does not matter, and what their tokens are nobody reads.
        """
        tokens, sequences = self._capacity[:2]
        stops = self._stops
        num_tokens, num_sequences, longest = 0, 0, MAX_DUMMY_LENGTH
        if batch is None:
            longest = max(longest, -(-tokens // sequences))  # there may be fewer rows than short dummies take
        else:
            num_tokens, num_sequences = len(batch.token_ids), len(batch.lengths)
            self._token_ids[:num_tokens] = batch.token_ids
            np.add.accumulate(batch.lengths, 0, None, stops[:num_sequences])
        stop = num_tokens
        while tokens - stop > longest:
            stop += longest
            stops[num_sequences] = stop
            num_sequences += 1
        stops[num_sequences:] = tokens  # the last dummy's; rows behind it have no tokens
        self._head[NUM_TOKENS] = num_tokens
        if self._types is not None:
            self._fill_types(batch, self._types)
        if self._row_sides is not None:
            self._fill_spans(batch, self._row_sides)
        elif batch is not None:
            num_rows = len(batch.lengths)
            self._dimensions[:num_rows] = batch.dimensions
            self._normalize[:num_rows] = batch.normalize
            self._encodings[:num_rows] = batch.encodings
        return self._offsets

    def _fill_spans(self, batch: Batch | None, row_sides: npt.NDArray[np.int32]) -> None:
        num_rows = 0
        if batch is not None:
            num_rows, counts = len(batch.spans), batch.span_counts
            np.add(batch.spans.T, self._starts[: len(counts)].repeat(counts), out=row_sides[:, :num_rows])
            self._dimensions[:num_rows] = batch.dimensions.repeat(counts)
            self._normalize[:num_rows] = batch.normalize.repeat(counts)
            self._encodings[:num_rows] = batch.encodings.repeat(counts)
        row_sides[:, num_rows:] = self._capacity.tokens  # no tokens, and behind all that have some

    def _fill_types(self, batch: Batch | None, types: npt.NDArray[np.int32]) -> None:
        num_typed = 0
        if batch is not None and len(batch.type_starts):
            num_typed = len(batch.token_ids)
            firsts = (self._starts[: len(batch.lengths)] + batch.type_starts).repeat(batch.lengths)
            np.greater_equal(np.arange(num_typed), firsts, out=types[:num_typed], casting="unsafe")
        self._head[NUM_TYPED] = num_typed


def worked_out(words: npt.NDArray[np.int32], capacity: Capacity) -> npt.NDArray[np.int32]:
    """int32 [num_words] of the host's [host_words]: what the device makes of them (`worker.kernels.step.fetch`)."""
    tokens = capacity.tokens
    offsets = words[HEAD_WORDS : HEAD_WORDS + capacity.sequences + 1]
    sides = np.lib.stride_tricks.sliding_window_view(offsets, 2).repeat(np.diff(offsets), axis=0)
    places = np.arange(tokens)
    of_tokens = words[capacity.row_words : capacity.host_words].reshape(-1, _aligned(tokens))
    of_tokens = np.concatenate((of_tokens, np.zeros((3, _aligned(tokens)), dtype=np.int32)))
    of_tokens[0, words[NUM_TOKENS] :] = 0
    if capacity.types:
        of_tokens[1, words[NUM_TYPED] :] = 0
    of_tokens[-3, :tokens] = np.where(places < words[NUM_TOKENS], places - sides[:, 0], 0)
    of_tokens[-2:, :tokens] = sides.T
    return np.concatenate((words[: capacity.row_words], of_tokens.ravel()))


def _aligned(num_words: int) -> int:
    return -(-num_words // 4) * 4
