"""What happens when the device has no memory for a batch: it runs in halves, and the scheduler is told.

Halves are halved again as often as it takes, since nothing tells which sequence needs most. A sequence that does not
fit alone is named, so that its neighbours are not blamed; they run again in another batch. The token counts of the
pieces that fitted travel with the rows. The scheduler then forms smaller batches for a while: a step that fails costs
its time, and all the memory that was kept for speed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.wire.messages import Batch
from worker.batch.lazy import LazyTensor, Rows


class SequenceTooLarge(Exception):
    """There is no memory for one sequence of a batch, though nothing else ran with it."""

    def __init__(self, sequence: int, num_tokens: int) -> None:
        super().__init__(f"no memory for a sequence of {num_tokens} tokens alone")
        self.sequence = sequence  # its index in the batch
        self.num_tokens = num_tokens


def run_in_pieces(batch: Batch, attempt: Callable[[Batch], LazyTensor | None]) -> Rows:
    """The rows of a batch that did not fit at once.

    Args:
        attempt: runs a batch; returns None, after freeing what can be spared, if there was no memory for it.

    Raises:
        SequenceTooLarge: a sequence does not fit alone. Some of the others may have run.
    """
    if len(batch.lengths) == 1:
        lazy = attempt(batch)  # once more, now that memory has been freed for it
        if lazy is None:
            raise SequenceTooLarge(0, len(batch.token_ids))
        return lazy.numpy()
    middle = _middle(batch)
    parts: list[Rows] = []
    pieces: list[int] = []
    for start, stop in ((0, middle), (middle, len(batch.lengths))):
        half = part_of(batch, start, stop)
        lazy = attempt(half)
        try:
            rows = run_in_pieces(half, attempt) if lazy is None else lazy.numpy()
        except SequenceTooLarge as error:
            raise SequenceTooLarge(start + error.sequence, error.num_tokens) from None
        parts.append(rows)
        pieces += rows.pieces or (len(half.token_ids),)
    return _joined(parts, tuple(pieces))


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """The sequences [start, stop) of a batch as a batch."""
    tokens = slice(int(batch.lengths[:start].sum()), int(batch.lengths[:stop].sum()))
    return Batch(
        epoch=batch.epoch,
        batch_id=batch.batch_id,
        token_ids=batch.token_ids[tokens],
        lengths=batch.lengths[start:stop],
        dimensions=batch.dimensions[start:stop],
        normalize=batch.normalize[start:stop],
        encodings=batch.encodings[start:stop],
        type_starts=batch.type_starts[start:stop],
        span_counts=batch.span_counts[start:stop],
        spans=batch.spans[int(batch.span_counts[:start].sum()) : int(batch.span_counts[:stop].sum())],
    )


def _middle(batch: Batch) -> int:
    """The number of sequences in the first piece: both pieces have some, and about half of the tokens."""
    ends = np.cumsum(batch.lengths)
    return int(np.abs(ends[:-1] - ends[-1] / 2).argmin()) + 1


def _joined(parts: list[Rows], pieces: tuple[int, ...]) -> Rows:
    width = max(part.rows.shape[1] for part in parts)
    rows = [np.pad(part.rows, ((0, 0), (0, width - part.rows.shape[1]))) for part in parts]
    return Rows(np.concatenate(rows), np.concatenate([part.finite for part in parts]), pieces)
