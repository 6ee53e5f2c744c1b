"""A request in the ledger: its token ids and options, and the rows that have come for it so far."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import DeadlineExceeded, ProtocolError, ServiceError
from common.wire.messages import NO_NUMBERS, NO_SPANS, Spans
from common.wire.rows import ENCODINGS, row_bytes, sparse_bytes
from gateway.trace import RequestTrace

# Rows of one encoding:
#     float32: float32 [rows, dimensions]
#     int8:    int8 [rows, dimensions]
#     binary:  uint8 [rows, ceil(dimensions / 8)], one bit a dimension, the first in the first byte's lowest bit
#     sparse:  uint8 [rows, bytes]; `read_sparse` takes a row
Rows: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.int8] | npt.NDArray[np.uint8]

# A sparse row without values has only their count.
_EMPTY_SPARSE_BYTES = 4

# The numpy type of a row's values.
_DTYPES = {"float32": "<f4", "int8": "|i1", "binary": "|u1", "sparse": "|u1"}


@dataclass(frozen=True, slots=True)
class Embedded:
    """The rows of a request, and where its time went."""

    rows: Rows  # one for each sequence, or for each span of each sequence, in order
    queue_us: int  # the longest wait of any sequence
    step_us: int  # the sum of the steps that ran it


@dataclass(frozen=True, slots=True)
class Options:
    """What a client asked for; it holds for every sequence of the request."""

    fingerprint: str  # of the model that tokenized the text
    dimensions: int
    normalize: bool  # float32 rows only
    encoding: str  # float32, int8, binary or sparse
    lane: str
    deadline_ns: int
    tenant: int = 0  # as in a Request
    trace: RequestTrace | None = None  # set if the client asks for one


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A client's request, kept until `future` is done."""

    future: asyncio.Future[Embedded]
    options: Options
    token_ids: npt.NDArray[np.int32]  # [tokens]
    lengths: npt.NDArray[np.int32]  # [sequences]
    offsets: list[int]  # [sequences + 1] of tokens; a list, since it is read one number at a time
    type_starts: npt.NDArray[np.int32]  # [sequences] or empty, as in a Request
    span_counts: npt.NDArray[np.int32]  # [sequences] or empty
    spans: npt.NDArray[np.int32]  # [rows, 2] or empty
    row_offsets: list[int] | None  # [sequences + 1]; None: one row for each sequence
    rows: npt.NDArray[np.uint8]  # [rows, row bytes], filled as replies come; sparse rows widen it
    answered: npt.NDArray[np.bool_]  # [rows]; two schedulers may answer the same row
    unanswered: int  # rows
    next_sequence: int = 0  # the start of the next piece
    waiting_tokens: int = 0  # of the pieces at the scheduler
    pieces: set[int] = field(default_factory=set)  # ids of the pieces at the scheduler
    queue_us: int = 0
    step_us: int = 0

    @classmethod
    def of(
        cls,
        sequences: list[npt.NDArray[np.int32]],
        options: Options,
        *,
        type_starts: Sequence[int] | npt.NDArray[np.int32] | None = None,
        spans: Sequence[Spans] | None = None,
    ) -> OpenRequest:
        """A request for these sequences, on the running event loop; for the arguments see `SchedulerClient.submit`."""
        lengths = list(map(len, sequences))
        span_counts, all_spans, num_rows = NO_NUMBERS, NO_SPANS, len(sequences)
        if spans is not None:
            span_counts = np.fromiter(map(len, spans), dtype=np.int32, count=len(spans))
            all_spans = np.concatenate(spans, dtype=np.int32)
            num_rows = len(all_spans)
        sparse = options.encoding == "sparse"
        num_bytes = _EMPTY_SPARSE_BYTES if sparse else row_bytes(ENCODINGS[options.encoding], options.dimensions)
        return cls(
            future=asyncio.get_running_loop().create_future(),
            options=options,
            token_ids=sequences[0] if len(sequences) == 1 else np.concatenate(sequences),
            lengths=np.array(lengths, dtype=np.int32),
            offsets=list(itertools.accumulate(lengths, initial=0)),
            type_starts=NO_NUMBERS if type_starts is None else np.asarray(type_starts, dtype=np.int32),
            span_counts=span_counts,
            spans=all_spans,
            row_offsets=None if spans is None else list(itertools.accumulate(span_counts.tolist(), initial=0)),
            rows=np.empty((num_rows, num_bytes), dtype=np.uint8),
            answered=np.zeros(num_rows, dtype=np.bool_),
            unanswered=num_rows,
        )

    @staticmethod
    def num_bytes(
        sequences: list[npt.NDArray[np.int32]], options: Options, spans: Sequence[Spans] | None = None
    ) -> int:
        """The memory of a request: ids, spans and rows, and 64 bytes of notes for each sequence and row.

        The sequences that `of` copies count twice. Sparse rows grow as they come, and count here as empty ones.
        """
        num_rows = len(sequences) if spans is None else sum(map(len, spans))
        sparse = options.encoding == "sparse"
        num_bytes = _EMPTY_SPARSE_BYTES if sparse else row_bytes(ENCODINGS[options.encoding], options.dimensions)
        copies = 1 if len(sequences) == 1 else 2
        return 4 * copies * sum(map(len, sequences)) + 64 * (len(sequences) + num_rows) + num_bytes * num_rows

    def first_row(self, sequence: int) -> int:
        """The first row of a sequence."""
        return sequence if self.row_offsets is None else self.row_offsets[sequence]

    def fill(self, first: int, rows: npt.NDArray[np.uint8]) -> int:
        """Take in rows from the place `first` on. Returns how many of them are new.

        Raises:
            ProtocolError: they are narrower than this request needs; nothing has changed.
        """
        last = first + len(rows)
        num_bytes = self.rows.shape[1]
        if self.options.encoding == "sparse":
            widest = sparse_bytes(rows)
            if widest > num_bytes:
                self.rows = np.pad(self.rows, ((0, 0), (0, widest - num_bytes)))
            num_bytes = widest
        elif rows.shape[1] < num_bytes:
            raise ProtocolError(f"rows of {rows.shape[1]} bytes where a request needs {num_bytes}")
        new = len(rows) - int(np.count_nonzero(self.answered[first:last]))
        self.rows[first:last, :num_bytes] = rows[:, :num_bytes]
        self.answered[first:last] = True
        self.unanswered -= new
        return new

    def succeed(self) -> None:
        """Answer it with its rows, which are complete, unless it has been answered."""
        if not self.future.done():
            rows = self.rows.view(_DTYPES[self.options.encoding])
            self.future.set_result(Embedded(rows, self.queue_us, self.step_us))

    def expire(self) -> None:
        """Fail it because its deadline has passed."""
        self.fail(DeadlineExceeded("The deadline passed before the answer was there. Allow more time, or send less."))

    def fail(self, error: ServiceError) -> None:
        """Answer it with an error, unless it has been answered."""
        if not self.future.done():
            self.future.set_exception(error)
