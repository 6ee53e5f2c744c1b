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
    dimensions: torch.Tensor  # [sequences] columns that count
    normalize: torch.Tensor  # [sequences] 0 or 1
    encodings: torch.Tensor  # [sequences] of common.protocol
    attention: Attention  # the backend that was chosen for this batch
    max_seqlen: int
    groups: tuple[LengthGroup, ...] = ()  # on the host, of a batch in order of length: all sequences, by length
    reference: bool = False  # compute in float32 whatever the weights are: what the others are compared with


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
    if int(batch.normalize.max()) > 1:
        raise BadBatch("a normalize flag is neither 0 nor 1")
    if not limits.encodings.issuperset(batch.encodings.tolist()):
        raise BadBatch(f"encodings {sorted(set(batch.encodings.tolist()))}; the model has {sorted(limits.encodings)}")


# --- in order of length, on a CPU ---


def load_sorted(batch: Batch, attention: Attention) -> tuple[RaggedBatch, torch.Tensor]:
    """A checked batch in order of length, shortest first, and int64 [sequences]: row i of the batch's own order is
    row restore[i] of this one."""
    order = np.argsort(batch.lengths, kind="stable").astype(np.int32)
    lengths = batch.lengths[order]
    offsets = cu_seqlens(lengths)
    token_starts = np.repeat(offsets[:-1], lengths)
    positions = np.arange(len(batch.token_ids), dtype=np.int32) - token_starts
    sources = np.repeat(cu_seqlens(batch.lengths)[:-1][order], lengths) + positions
    restore = np.empty(len(order), dtype=np.int64)
    restore[order] = np.arange(len(order))
    ragged = RaggedBatch(
        token_ids=torch.from_numpy(batch.token_ids[sources]),
        positions=torch.from_numpy(positions),
        token_starts=torch.from_numpy(token_starts),
        token_stops=torch.from_numpy(np.repeat(offsets[1:], lengths)),
        cu_seqlens=torch.from_numpy(offsets),
        dimensions=torch.from_numpy(batch.dimensions[order]),
        normalize=torch.from_numpy(batch.normalize[order].astype(np.int32)),
        encodings=torch.from_numpy(batch.encodings[order].astype(np.int32)),
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
    """How many tokens and sequences a launch has room for; fewer are filled up with dummies."""

    tokens: int
    sequences: int

    @property
    def num_words(self) -> int:
        """Of int32 that the arrays of a batch take, one after the other, each from a multiple of 16 bytes on."""
        return 4 * _aligned(self.tokens) + _aligned(self.sequences + 1) + 3 * _aligned(self.sequences)

    def views(self, block: torch.Tensor, attention: Attention, max_seqlen: int) -> RaggedBatch:
        """The arrays of a batch of this capacity within int32 [>= num_words]."""
        sizes = [self.tokens] * 4 + [self.sequences + 1] + [self.sequences] * 3
        parts = torch.split(block[: self.num_words], [_aligned(size) for size in sizes])
        arrays = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        token_ids, positions, token_starts, token_stops, offsets, dimensions, normalize, encodings = arrays
        return RaggedBatch(
            token_ids=token_ids,
            positions=positions,
            token_starts=token_starts,
            token_stops=token_stops,
            cu_seqlens=offsets,
            dimensions=dimensions,
            normalize=normalize,
            encodings=encodings,
            attention=attention,
            max_seqlen=max_seqlen,
        )


class HostArrays:
    """The arrays of a batch of one capacity within a buffer on the host, cut once: cutting costs as much as writing."""

    def __init__(self, capacity: Capacity, buffer: npt.NDArray[np.int32]) -> None:
        """`buffer` is int32 [at least capacity.num_words], laid out as `Capacity.views` has it."""
        tokens, sequences = self._capacity = capacity
        width, first = _aligned(tokens), 4 * _aligned(tokens)
        of_tokens = buffer[:first].reshape(4, width)[:, :tokens]
        self._token_ids, self._positions, self._token_starts, self._token_stops = of_tokens
        self._offsets = buffer[first : first + sequences + 1]
        self._starts, self._stops = self._offsets[:-1], self._offsets[1:]
        second = first + _aligned(sequences + 1)
        self._of_sequences = buffer[second : capacity.num_words].reshape(3, -1)[:, :sequences]
        self._dimensions, self._normalize, self._encodings = self._of_sequences
        self._lengths = np.zeros(sequences, dtype=np.int32)
        self._counting = np.arange(tokens, dtype=np.int32)

    def fill(self, batch: Batch | None) -> npt.NDArray[np.int32]:
        """Write a checked batch that fits (or none), and its dummies. Returns its cu_seqlens, until the next call."""
        tokens, sequences = self._capacity
        num_tokens, num_sequences, longest = 0, 0, MAX_DUMMY_LENGTH
        if batch is None:
            longest = max(longest, -(-tokens // sequences))  # there may be fewer rows than short dummies take
        else:
            num_tokens, num_sequences = len(batch.token_ids), len(batch.lengths)
            self._token_ids[:num_tokens] = batch.token_ids
            self._lengths[:num_sequences] = batch.lengths
            self._dimensions[:num_sequences] = batch.dimensions
            self._normalize[:num_sequences] = batch.normalize
            self._encodings[:num_sequences] = batch.encodings
        self._lengths[num_sequences:] = 0
        for place, length in enumerate(dummy_lengths(tokens - num_tokens, longest), num_sequences):
            self._lengths[place] = length
        self._of_sequences[:, num_sequences:] = 0
        self._offsets[0] = 0  # another capacity's arrays may lie in the same buffer
        self._lengths.cumsum(out=self._stops)
        token_starts = self._starts.repeat(self._lengths)
        self._token_starts[:] = token_starts
        self._token_stops[:] = self._stops.repeat(self._lengths)
        np.subtract(self._counting, token_starts, out=self._positions)
        self._token_ids[num_tokens:] = 0
        self._positions[num_tokens:] = 0  # a dummy may be longer than the model has positions for
        return self._offsets


def _aligned(num_words: int) -> int:
    return -(-num_words // 4) * 4


def dummy_lengths(num_tokens: int, longest: int = MAX_DUMMY_LENGTH) -> list[int]:
    """Lengths of the dummy sequences that so many tokens make."""
    full, rest = divmod(num_tokens, longest)
    return [longest] * full + ([rest] if rest else [])
