"""Who the workers are, what each has in its hands, and when one counts as lost. Pure: no clock, no socket, no pid.

A worker holds at most two batches, one running and one waiting, so that it never idles while a result travels; that
credit, not a socket's high-water mark, is the flow control. A worker is judged by progress as well as by pulse: its
process may be alive with its Python hung (silence), or beat while its device is stuck (an overdue batch).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.protocol import ENCODINGS, Batch, Beat, ModelFacts, Result, row_bytes
from scheduler.batching import Span

_CREDITS = 2
SUSPECT_NS = 1_000_000_000  # silent for so long: no new work
LOST_NS = 2_000_000_000  # silent for so long: lost

_MAX_SHORT_BEATS = 8  # two seconds

# The longest that one batch may take. Flat, until step times are learned: then a stuck batch is noticed sooner.
_MAX_STEP_NS = 30_000_000_000
_MAX_STEP_TO_PREDICTED = 20


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch at a worker: whose sequences its rows are, in order."""

    batch_id: int
    spans: list[Span]
    num_tokens: int
    row_bytes: int  # of each of its rows: as many as the widest needs
    sent_ns: int
    predicted_ns: int


@dataclass(slots=True, eq=False)
class Worker:
    peer: bytes
    name: str
    pid: int
    facts: ModelFacts
    last_heard_ns: int
    running_since_ns: int = 0  # when its oldest batch began, as far as can be seen from here
    short_beats: int = 0  # beats in a row that tell of fewer batches than were sent
    in_flight: dict[int, InFlight] = field(default_factory=dict)  # oldest first: a worker works in order

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.in_flight.values())


class BadResult(Exception):
    """A worker's result does not fit its batch; the worker cannot be trusted with another."""


class Fleet:
    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._workers: dict[bytes, Worker] = {}
        self._next_batch_id = 1

    def join(self, worker: Worker) -> None:
        self._workers[worker.peer] = worker

    def leave(self, peer: bytes) -> list[InFlight]:
        """Forget a worker. The batches it held: first the one that it was running, then the one that waited."""
        return list(self._workers.pop(peer).in_flight.values())

    def get(self, peer: bytes) -> Worker | None:
        return self._workers.get(peer)

    def named(self, name: str) -> Worker | None:
        return next((worker for worker in self._workers.values() if worker.name == name), None)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def ready(self, now_ns: int) -> int:
        """How many workers can be given work, or work already."""
        return sum(now_ns - worker.last_heard_ns < SUSPECT_NS for worker in self._workers.values())

    def free_worker(self, now_ns: int) -> Worker | None:
        """The worker with the least in its hands, if one has a free slot."""
        free = [
            worker
            for worker in self._workers.values()
            if len(worker.in_flight) < _CREDITS and now_ns - worker.last_heard_ns < SUSPECT_NS
        ]
        return min(free, key=lambda worker: (len(worker.in_flight), worker.num_tokens), default=None)

    def assign(self, worker: Worker, spans: list[Span], predicted_ms: float | None, now_ns: int) -> Batch:
        """Pack spans into a batch and note that this worker holds it."""
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        requests = [span.pending.request for span in spans]
        counts = [span.num_sequences for span in spans]
        encodings = [ENCODINGS[request.encoding] for request in requests]
        token_ids = [
            request.token_ids[span.pending.offsets[span.start] : span.pending.offsets[span.stop]]
            for span, request in zip(spans, requests, strict=True)
        ]
        batch = Batch(
            epoch=self._epoch,
            batch_id=batch_id,
            token_ids=np.concatenate(token_ids),
            lengths=np.concatenate([r.lengths[s.start : s.stop] for s, r in zip(spans, requests, strict=True)]),
            dimensions=np.repeat(np.array([r.dimensions for r in requests], dtype=np.int32), counts),
            normalize=np.repeat(np.array([r.normalize for r in requests], dtype=np.uint8), counts),
            encodings=np.repeat(np.array(encodings, dtype=np.uint8), counts),
        )
        if not worker.in_flight:
            worker.running_since_ns = now_ns
        worker.short_beats = 0
        worker.in_flight[batch_id] = InFlight(
            batch_id=batch_id,
            spans=spans,
            num_tokens=len(batch.token_ids),
            row_bytes=row_bytes(min(encodings), worker.facts.dimensions),
            sent_ns=now_ns,
            predicted_ns=int((predicted_ms or 0) * 1e6),
        )
        return batch

    def release(self, worker: Worker, batch_id: int, now_ns: int) -> InFlight | None:
        """Take a finished batch out of a worker's hands; None if it was not there (a past incarnation's)."""
        batch = worker.in_flight.pop(batch_id, None)
        if batch is not None:
            worker.running_since_ns = now_ns
        return batch

    def on_beat(self, worker: Worker, beat: Beat) -> None:
        """A beat may cross a batch on its way; several in a row that miss one mean that it never arrived."""
        if beat.epoch == self._epoch and beat.batches_held < len(worker.in_flight):
            worker.short_beats += 1
        else:
            worker.short_beats = 0

    def lost(self, now_ns: int) -> list[tuple[Worker, str]]:
        """The workers that count as lost now, each with why: silent, desynchronized or overdue."""
        verdicts = []
        for worker in self._workers.values():
            if now_ns - worker.last_heard_ns >= LOST_NS:
                verdicts.append((worker, "silent"))
            elif worker.short_beats >= _MAX_SHORT_BEATS:
                verdicts.append((worker, "desynchronized"))
            elif worker.in_flight:
                running = next(iter(worker.in_flight.values()))
                limit_ns = max(_MAX_STEP_NS, _MAX_STEP_TO_PREDICTED * running.predicted_ns)
                if now_ns - worker.running_since_ns >= limit_ns:
                    verdicts.append((worker, "overdue"))
        return verdicts

    def forgive(self, lag_ns: int, now_ns: int) -> None:
        """The scheduler itself stood still for so long: nobody is to blame for that silence."""
        for worker in self._workers.values():
            worker.last_heard_ns = min(worker.last_heard_ns + lag_ns, now_ns)
            worker.running_since_ns = min(worker.running_since_ns + lag_ns, now_ns)


def with_loss(span: Span) -> Span:
    return Span(span.pending, span.start, span.stop, span.losses + 1)


def check_result(batch: InFlight, result: Result) -> None:
    """Raises BadResult unless the result has one row of the batch's width for each sequence of the batch."""
    expected = (sum(span.num_sequences for span in batch.spans), batch.row_bytes)
    if result.rows.shape != expected:
        raise BadResult(f"rows {result.rows.shape} where the batch needs {expected}")
    if len(result.nonfinite) and not 0 <= int(result.nonfinite.min()) <= int(result.nonfinite.max()) < expected[0]:
        raise BadResult("a row that the batch does not have is named as not finite")
