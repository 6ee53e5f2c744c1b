"""How a batch is laid out for a GPU: a fixed number of tokens and of sequences, in arrays at fixed addresses.

Launches are slow on a GPU, so a batch fills a `Capacity` that a graph was captured for. Sequences stay in order of
arrival. The tokens left over form dummy sequences, so that every row of every buffer is computed and finite: attention
reads whole tiles, and 0 x NaN is NaN. Dummies are short, so a step never waits for them.

Three numbers for each token follow from the lengths alone. The device computes them (`worker.kernels.step`), so the
host need not write them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from worker.batch.ragged import Attend, RaggedBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.wire.messages import Batch

MAX_DUMMY_LENGTH = 128

# The capacities that have graphs. Below about 200 tokens reading the weights takes most of the time, and padding is
# free. Above, padding costs a quarter of a step at worst (1,025 tokens run as 1,280) and 5 % on average. Even 8,192
# tokens can take longer to launch than to compute (18 ms on a slow host against 14 ms, 200 kernels, 2026-11-29). So
# graphs go up to twice that; larger steps run eagerly, nearly unpadded.
TOKEN_COUNTS = (
    *range(64, 513, 64),
    *range(640, 1025, 128),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
    *range(9216, 16385, 1024),
)
SEQUENCE_COUNTS = (8, 32, 128, 512, 2048)
_EAGER_TOKEN_STEP = 64  # eager steps are padded to a multiple of this, which matrix products like

# The words of the head, which comes before the arrays of a batch and describes the step.
NUM_TOKENS = 0  # tokens without those of dummies
NUM_TYPED = 1  # the same number if some tokens are of the second type, else 0
NEXT_SLOT, OUTPUT_WORDS, OUTPUT_ADDRESS = 2, 3, 4  # see `worker.engine.staging`; the last takes two words
HEAD_WORDS = 8


class Capacity(NamedTuple):  # a tuple, since each step hashes it several times
    """How many tokens and sequences a launch has room for, and the layout of its arrays.

    The arrays of a batch lie one after the other in int32, each from a multiple of 16 bytes on:

        the head | offsets | dimensions | normalize | encodings | starts and stops of rows, if spans    (row_words)
        | token ids | token types, if types                                                             (host_words)
        | positions | token starts | token stops                                                        (num_words)

    The host writes the arrays of the first two lines. The first offset, a zero, has the same address in every
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

    def views(self, block: torch.Tensor, attention: Attend, max_seqlen: int) -> RaggedBatch:
        """A batch of this capacity, whose arrays are views of `block`, int32 [>= num_words]."""
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


def choose_capacity(
    num_tokens: int, num_sequences: int, num_spans: int = 0, *, types: bool = False
) -> tuple[Capacity, bool]:
    """The smallest capacity that takes a batch and its dummies, and whether to use a graph for it."""
    found = bucket_index(num_tokens, num_sequences, num_spans)
    if found is not None:
        tokens, sequences = divmod(found // 2, len(SEQUENCE_COUNTS))
        return Capacity(TOKEN_COUNTS[tokens], SEQUENCE_COUNTS[sequences], types, num_spans > 0), True
    index = bisect_left(TOKEN_COUNTS, num_tokens)
    many = -(-num_tokens // _EAGER_TOKEN_STEP) * _EAGER_TOKEN_STEP
    tokens = TOKEN_COUNTS[index] if index < len(TOKEN_COUNTS) else many
    return Capacity(
        tokens, max(_with_dummies(num_tokens, num_sequences, tokens), num_spans), types, num_spans > 0
    ), False


def bucket_index(num_tokens: int, num_sequences: int, num_spans: int) -> int | None:
    """The number of the smallest capacity with a graph that takes a batch; None: no such capacity takes it.

    Every step calls this, so it makes no objects.
    """
    index = bisect_left(TOKEN_COUNTS, num_tokens)
    if index == len(TOKEN_COUNTS):
        return None
    needed = _with_dummies(num_tokens, num_sequences, TOKEN_COUNTS[index])
    if needed < num_spans:
        needed = num_spans
    if needed > SEQUENCE_COUNTS[-1]:
        return None
    return (index * len(SEQUENCE_COUNTS) + bisect_left(SEQUENCE_COUNTS, needed)) * 2 + (num_spans > 0)


def _with_dummies(num_tokens: int, num_sequences: int, tokens: int) -> int:
    """The number of sequences of a batch, dummies included, once it is padded to `tokens`."""
    return num_sequences - (num_tokens - tokens) // MAX_DUMMY_LENGTH


def largest_capacity(max_tokens: int) -> Capacity:
    """A capacity with at least the words of every one that `choose_capacity` returns for up to `max_tokens`."""
    tokens = max(-(-max_tokens // _EAGER_TOKEN_STEP) * _EAGER_TOKEN_STEP, TOKEN_COUNTS[-1])
    return Capacity(tokens, tokens + 1, types=True, spans=True)


class HostArrays:
    """Views of a host buffer, one for each array of a capacity. They are made once: making costs as much as writing.

    Every step writes them, so nothing is written twice or in vain. A launching thread that has slept finds its caches
    cold, and each call of numpy costs it 2 µs or more.
    """

    def __init__(self, capacity: Capacity, buffer: npt.NDArray[np.int32]) -> None:
        """`buffer` is int32 [at least capacity.host_words], laid out as `Capacity` says. Its first offset is set to 0
        here and stays so."""
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
        """Write a checked batch that fits (or none), and its dummies. Returns cu_seqlens, valid until the next call.

        The token ids of dummies and the options of their rows are never read.
        """
        tokens, sequences = self._capacity[:2]
        stops = self._stops
        num_tokens, num_sequences, longest = 0, 0, MAX_DUMMY_LENGTH
        if batch is None:
            longest = max(longest, -(-tokens // sequences))  # short dummies may need more rows than there are
        else:
            num_tokens, num_sequences = len(batch.token_ids), len(batch.lengths)
            self._token_ids[:num_tokens] = batch.token_ids
            np.add.accumulate(batch.lengths, 0, None, stops[:num_sequences])
        stop = num_tokens
        while tokens - stop > longest:
            stop += longest
            stops[num_sequences] = stop
            num_sequences += 1
        stops[num_sequences:] = tokens  # the last dummy; rows behind it have no tokens
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
        row_sides[:, num_rows:] = self._capacity.tokens  # rows without tokens, behind all others

    def _fill_types(self, batch: Batch | None, types: npt.NDArray[np.int32]) -> None:
        num_typed = 0
        if batch is not None and len(batch.type_starts):
            num_typed = len(batch.token_ids)
            firsts = (self._starts[: len(batch.lengths)] + batch.type_starts).repeat(batch.lengths)
            np.greater_equal(np.arange(num_typed), firsts, out=types[:num_typed], casting="unsafe")
        self._head[NUM_TYPED] = num_typed


def worked_out(words: npt.NDArray[np.int32], capacity: Capacity) -> npt.NDArray[np.int32]:
    """int32 [num_words]: what the device makes of the host's `words` (`worker.kernels.step.fetch`)."""
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
