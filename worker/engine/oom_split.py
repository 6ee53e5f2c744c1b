"""What is done where the device has no memory for a batch: it runs in halves, and whoever sent it is told.

Halves of halves, as far down as it takes: which sequence needs most is not known before. A sequence that does not fit
alone is named, so that its neighbours are not blamed; they run again with another batch. The tokens of the pieces that
did fit travel with the rows: the scheduler forms smaller batches for a while, since finding out costs a step that fails
and all that was kept for speed.
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
        self.sequence = sequence  # its place in the batch
        self.num_tokens = num_tokens


def run_in_pieces(batch: Batch, attempt: Callable[[Batch], LazyTensor | None]) -> Rows:
    """The rows of a batch that did not fit at once.

    Args:
        attempt: runs a batch; None, and what can be spared is given up, where there was no memory for it.

    Raises:
        SequenceTooLarge: one does not fit alone. Of the others some may have run.
    """
    if len(batch.lengths) == 1:
        lazy = attempt(batch)  # once more, now that memory was given up for it
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
    """Of how many sequences the first piece is, so that both hold about half of the tokens, and neither none."""
    ends = np.cumsum(batch.lengths)
    return int(np.abs(ends[:-1] - ends[-1] / 2).argmin()) + 1


def _joined(parts: list[Rows], pieces: tuple[int, ...]) -> Rows:
    width = max(part.rows.shape[1] for part in parts)
    rows = [np.pad(part.rows, ((0, 0), (0, width - part.rows.shape[1]))) for part in parts]
    return Rows(np.concatenate(rows), np.concatenate([part.finite for part in parts]), pieces)
