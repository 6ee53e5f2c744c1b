"""How parts of requests become a batch on the wire, and how its result is checked against them. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError
from common.wire.messages import NO_NUMBERS, NO_SPANS, NO_TIMES, Batch, Result
from common.wire.rows import ENCODINGS, sparse_bytes
from scheduler.batching import Part


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch at a worker: the parts whose sequences its rows belong to, in order."""

    batch_id: int
    parts: list[Part]
    num_tokens: int
    longest: int  # tokens of its longest sequence
    num_rows: int
    row_bytes: int | None  # of each of its rows: as wide as the widest needs; None: sparse, known from the result only
    sent_ns: int
    predicted_ns: int  # 0 where nothing is known
    was_kept_open: bool  # its slot stayed open until the dispatch lead before the end of the step that ran


class BadResult(Exception):
    """A worker's result does not fit its batch; the worker cannot be trusted with another."""


def pack(parts: list[Part], *, epoch: int, batch_id: int, now_ns: int) -> Batch:
    """The parts as one batch, their sequences in order."""
    requests = [part.pending.request for part in parts]
    counts = [part.num_sequences for part in parts]
    encodings = [ENCODINGS[request.encoding] for request in requests]
    span_counts, spans = _spans(parts)
    token_ids = [
        request.token_ids[part.pending.offsets[part.start] : part.pending.offsets[part.stop]]
        for part, request in zip(parts, requests, strict=True)
    ]
    return Batch(
        epoch=epoch,
        batch_id=batch_id,
        token_ids=np.concatenate(token_ids),
        lengths=np.concatenate([r.lengths[p.start : p.stop] for p, r in zip(parts, requests, strict=True)]),
        dimensions=np.repeat(np.array([r.dimensions for r in requests], dtype=np.int32), counts),
        normalize=np.repeat(np.array([r.normalize for r in requests], dtype=np.uint8), counts),
        encodings=np.repeat(np.array(encodings, dtype=np.uint8), counts),
        type_starts=_type_starts(parts),
        span_counts=span_counts,
        spans=spans,
        times_ns=np.array([now_ns]) if [r for r in requests if len(r.times_ns)] else NO_TIMES,
    )


def check_result(batch: InFlight, result: Result) -> None:
    """Check that a result fits its batch.

    Raises:
        BadResult: its rows are not as many or as wide as the batch asks for, or its pieces do not make up the batch.
    """
    num_rows, num_bytes = result.rows.shape
    if num_rows != batch.num_rows or (batch.row_bytes is not None and num_bytes != batch.row_bytes):
        raise BadResult(f"rows {result.rows.shape} where the batch needs {batch.num_rows, batch.row_bytes}")
    if len(result.nonfinite) and not 0 <= int(result.nonfinite.min()) <= int(result.nonfinite.max()) < num_rows:
        raise BadResult("a row that the batch does not have is named as not finite")
    if len(result.pieces) and (int(result.pieces.min()) < 1 or int(result.pieces.sum()) != batch.num_tokens):
        raise BadResult("pieces that do not make up the batch")
    if batch.row_bytes is None:
        # A row that is not finite holds no answer, so its bytes may be anything.
        answers = np.delete(result.rows, result.nonfinite, axis=0) if len(result.nonfinite) else result.rows
        try:
            sparse_bytes(answers)
        except ProtocolError as error:
            raise BadResult(str(error)) from None


def without(batch: InFlight, position: int) -> tuple[list[Part], Part]:
    """A batch without its sequence at this position, and that sequence.

    Raises:
        BadResult: it has no such sequence.
    """
    others: list[Part] = []
    found: Part | None = None
    for part in batch.parts:
        sequence = part.start + position
        if found is None and position < part.num_sequences:
            found = replace(part, start=sequence, stop=sequence + 1)
            others += [replace(part, stop=sequence)] if sequence > part.start else []
            others += [replace(part, start=sequence + 1)] if sequence + 1 < part.stop else []
        else:
            others.append(part)
        position -= part.num_sequences
    if found is None:
        raise BadResult("a sequence that the batch does not have is named as too large")
    return others, found


def _type_starts(parts: list[Part]) -> npt.NDArray[np.int32]:
    """A batch's `type_starts`: of every sequence, or empty if no request has any."""
    if not any(len(part.pending.request.type_starts) for part in parts):
        return NO_NUMBERS
    type_starts = []
    for part in parts:
        request = part.pending.request
        known = request.type_starts if len(request.type_starts) else request.lengths
        type_starts.append(known[part.start : part.stop])
    return np.concatenate(type_starts)


def _spans(parts: list[Part]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """A batch's `span_counts` and `spans`: of every sequence, or empty if no request has any."""
    if all(part.pending.row_offsets is None for part in parts):
        return NO_NUMBERS, NO_SPANS
    counts, spans = [], []
    for part in parts:
        pending, request = part.pending, part.pending.request
        if pending.row_offsets is None:
            lengths = request.lengths[part.start : part.stop]
            counts.append(np.ones_like(lengths))
            spans.append(np.stack([np.zeros_like(lengths), lengths], axis=1))
        else:
            counts.append(request.span_counts[part.start : part.stop])
            spans.append(request.spans[pending.first_row(part.start) : pending.first_row(part.stop)])
    return np.concatenate(counts), np.concatenate(spans)
