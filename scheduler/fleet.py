"""The workers: what each holds, when one begins something new, and when one counts as lost. Pure: time is an argument.

A worker holds at most two batches, one running and one waiting, so that it never idles while a result travels. That
credit is the flow control, not a socket's high-water mark. The second batch may be sent late, the dispatch lead before
the predicted end of the first: so that a request that arrives meanwhile still joins it, or because a worker that holds
two batches will be through both sooner than this one with its first.

A worker is judged by progress as well as by pulse. Its process may be alive while its Python hangs (it is silent), or
send beats while its device is stuck (a batch is overdue).

If a worker's device had no memory for a batch, it ran in pieces. For a minute its batches have no more tokens than the
largest piece; then as many as before, since whatever took the memory may be gone. Rejected: a budget that grows again
by the second. While memory stays short it fails every few seconds, and each time the worker drops its graphs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.wire.messages import PROTOCOL_VERSION, Batch, Beat, Hello, ModelFacts, Refuse, StepTimes
from common.wire.rows import row_bytes
from scheduler.actions import version_refusal
from scheduler.batching import Part
from scheduler.inflight import InFlight, pack
from scheduler.steptime import TYPICAL_LENGTH, StepTime

_CREDITS = 2
SUSPECT_NS = 1_000_000_000  # a worker that is silent for this long gets no new work
LOST_NS = 2_000_000_000  # and after this long it is lost

# The dispatch lead: a slot that is kept open is filled this long before the predicted end of the step that runs. A step
# ends when its result is here. The device was done some 0.5 ms before, the next batch takes as long to get there, and a
# prediction is off by some percent. The sum differs by host (1.6 ms were too few for one batch in six on one of them,
# and a GPU idled for a tenth of its time, 2026-11-30), so it is learned: of the batches that were sent this late, the
# share `_LATE_SHARE` finds the device at rest, or about to be.
# (Source: stochastic approximation of a quantile, Robbins and Monro 1951.)
_FIRST_DISPATCH_LEAD_NS, _LEAST_DISPATCH_LEAD_NS, _MOST_DISPATCH_LEAD_NS = 1_600_000, 500_000, 3_000_000
_LATE_SHARE, _LATE_NS = 0.05, 100_000
_AT_REST_US = 300  # a batch that waits for less in a worker found the device at rest, or about to be

# If beats tell of fewer batches than were sent for this long, these batches never arrived. It is the clock that counts,
# not the number of beats: after a standstill of the scheduler the beats of seconds come at once, and all are old.
MISSING_NS = 2_000_000_000
_MAX_MISSING = 2  # a connection may break and come back; twice in a row, the worker is at fault

# Two beats this far apart were not both under way while a batch was. If both do not tell of it, it has not arrived by
# the second. A beat comes every quarter of a second.
_CROSSING_NS = 200_000_000

_REST_NS = 1_000_000_000

# An idle worker keeps its turn for this much work, since its caches are warm: with two workers on one CPU, queries one
# after the other take 12 % longer if each worker has every second one (2026-11-30).
_TURN_NS = 100_000_000

_SHORT_OF_MEMORY_NS = 60_000_000_000  # how long a worker gets smaller batches

# The longest that one batch may take. It is generous, since the first step of a kind may compile for seconds, and a
# worker that can see that it hangs ends by itself.
_MAX_STEP_NS = 30_000_000_000
_MAX_STEP_TO_PREDICTED = 20


@dataclass(slots=True, eq=False)
class Worker:
    peer: bytes
    name: str
    pid: int
    facts: ModelFacts
    last_heard_ns: int
    replaced: frozenset[bytes] = frozenset()  # the peers that this process was before
    running_since_ns: int = 0  # when its oldest batch began, as far as can be seen from here
    short_since_ns: int | None = None  # since when its beats tell of fewer batches than were sent
    held: int = 0  # batches of this scheduler that it holds, by its last beat
    beat_ns: int = 0  # when its last beat came
    undelivered: set[int] = field(default_factory=set)  # batches that could not even be sent
    num_missing: int = 0  # how often batches never arrived, without any result since
    in_flight: dict[int, InFlight] = field(default_factory=dict)  # oldest first: a worker works in order
    step_time: StepTime = field(default_factory=StepTime)
    is_kept_open: bool = False  # its free slot, though something waits that could fill it
    dispatch_lead_ns: float = _FIRST_DISPATCH_LEAD_NS
    fitting_tokens: int | None = None  # the most of a batch while memory is short; None: it is not
    memory_back_ns: int = 0  # when memory is taken to be there again, if it is short
    longest: int = 0  # tokens of the longest sequence that it has run
    rests_until_ns: int = 0  # it gets no new work before
    times: StepTimes | None = None  # of the batch whose result comes next, if one of its requests is traced
    worked_ns: int = 0  # how long it has held a batch; a new worker begins with as much as the one that has most

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.in_flight.values())

    @property
    def is_empty_handed(self) -> bool:
        """Whether its beats say that no batch has arrived."""
        since_ns = self.short_since_ns
        return self.held == 0 and since_ns is not None and self.beat_ns - since_ns >= _CROSSING_NS

    @property
    def turn(self) -> tuple[int, int]:
        """The idle worker with the least of this is next: the one that has worked least.

        So all work for as long, at any load, and a slower one does less.
        """
        return self.worked_ns // _TURN_NS, -self.running_since_ns

    def busy_ns(self, now_ns: int) -> int:
        """How long it will take for the batches that it holds, as predicted."""
        if not self.in_flight:
            return 0
        left_ns = self.running_since_ns - now_ns
        for batch in self.in_flight.values():
            left_ns += batch.predicted_ns
        return max(0, left_ns)

    def free_at_ns(self, now_ns: int, begins_in_ns: int, *, late: bool) -> int | None:
        """When another batch may be sent; None while both slots are taken.

        Args:
            begins_in_ns: how long until any worker can begin something new. If this one takes longer, its slot is
                filled late.
            late: the slot is filled late in any case: the dispatch lead before its step ends.
        """
        if len(self.in_flight) >= _CREDITS:
            return None
        if not self.in_flight:
            return 0
        (running,) = self.in_flight.values()
        lead_ns = int(self.dispatch_lead_ns)
        if late or self.busy_ns(now_ns) > begins_in_ns + lead_ns:
            return self.running_since_ns + running.predicted_ns - lead_ns
        return 0

    def learn_dispatch_lead(self, batch: InFlight, waited_us: int) -> None:
        """Lengthen the dispatch lead if this batch came too late, else shorten it a little."""
        if batch.was_kept_open:  # else it could not have come sooner
            is_late = waited_us < _AT_REST_US
            dispatch_lead_ns = self.dispatch_lead_ns + _LATE_NS * (is_late - _LATE_SHARE)
            self.dispatch_lead_ns = min(max(dispatch_lead_ns, _LEAST_DISPATCH_LEAD_NS), _MOST_DISPATCH_LEAD_NS)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which worker is given the next batch, and which slots stay open though something waits."""

    worker: Worker | None  # None: no slot may be filled now
    kept_open: tuple[Worker, ...] = ()  # whose slots stay open until the dispatch lead before their steps' ends


class Fleet:
    def __init__(self, epoch: int, latency_target_ms: int = 0) -> None:
        """`latency_target_ms`: how long a step may take, as far as its sequences can be split; 0: no limit."""
        self._epoch = epoch
        self._latency_target_ms = latency_target_ms
        self._workers: dict[bytes, Worker] = {}
        self._next_batch_id = 1

    def join(self, worker: Worker) -> None:
        # A new worker has nothing to catch up with, least of all one that dies again and again.
        worker.worked_ns = max((other.worked_ns for other in self._workers.values()), default=0)
        self._workers[worker.peer] = worker

    def leave(self, peer: bytes) -> list[InFlight]:
        """Forget a worker; the batches that it held, first the one that ran, then the one that waited."""
        return list(self._workers.pop(peer).in_flight.values())

    def get(self, peer: bytes) -> Worker | None:
        return self._workers.get(peer)

    def named(self, name: str) -> Worker | None:
        return next((worker for worker in self._workers.values() if worker.name == name), None)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def ready(self, now_ns: int) -> int:
        """How many workers can be given work, or are working."""
        return sum(now_ns - worker.last_heard_ns < SUSPECT_NS for worker in self._workers.values())

    def refusal(self, hello: Hello) -> Refuse | None:
        """Why this process is not taken as a worker; None where it is."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return version_refusal(hello.protocol_version)
        if self.named(hello.name) is not None:
            return Refuse("duplicate_name", f"a worker named {hello.name} is already here; give each its own --slot")
        others = self.all()
        if others and others[0].facts.fingerprint != hello.facts.fingerprint:
            return Refuse(
                "model_mismatch",
                f"{others[0].name} serves {others[0].facts.name} ({others[0].facts.fingerprint}), "
                f"this worker {hello.facts.name} ({hello.facts.fingerprint}); one fleet serves one model",
            )
        return None

    @property
    def has_slot(self) -> bool:
        """Whether any worker has a free slot."""
        return any(len(worker.in_flight) < _CREDITS for worker in self._workers.values())

    def choose_worker(self, now_ns: int, *, late: bool) -> Choice:
        """The worker that would begin soonest, of those with a free slot that may be filled now.

        None also where a worker without a free slot would begin sooner: it has one as soon as its step ends, and
        whichever ends first takes what waits. That costs a worker something only where a step ends well before its
        predicted end and the next one is not there yet: 0.6 % where times are a third off (2026-11-30, simulated).
        """
        begins_in_ns = self.begins_in_ns(now_ns)
        free, kept_open = [], []
        for worker in self._workers.values():
            if now_ns - worker.last_heard_ns >= SUSPECT_NS or worker.rests_until_ns > now_ns:
                continue
            free_at_ns = worker.free_at_ns(now_ns, begins_in_ns, late=late)
            if free_at_ns is None:
                continue
            if free_at_ns <= now_ns:
                free.append(worker)
            else:
                kept_open.append(worker)
        chosen = min(free, key=lambda worker: (worker.busy_ns(now_ns), worker.num_tokens, *worker.turn), default=None)
        return Choice(chosen, tuple(kept_open))

    def keep_open(self, choice: Choice) -> None:
        """Note which workers' slots the choice leaves open: what fills one later tells of the dispatch lead."""
        for worker in choice.kept_open:
            worker.is_kept_open = True

    def begins_in_ns(self, now_ns: int) -> int:
        """How long until a worker can begin something new, as predicted; 0 if no worker is ready."""
        begins_in_ns = [
            max(worker.busy_ns(now_ns), worker.rests_until_ns - now_ns)
            for worker in self._workers.values()
            if now_ns - worker.last_heard_ns < SUSPECT_NS
        ]
        return min(begins_in_ns, default=0)

    def next_free_ns(self, now_ns: int) -> int | None:
        """When the first of the slots that are kept open may be filled; None if no slot is."""
        begins_in_ns = self.begins_in_ns(now_ns)
        times_ns = [
            worker.free_at_ns(now_ns, begins_in_ns, late=True)
            for worker in self._workers.values()
            if worker.in_flight and now_ns - worker.last_heard_ns < SUSPECT_NS and worker.rests_until_ns <= now_ns
        ]
        return min((time_ns for time_ns in times_ns if time_ns is not None), default=None)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that any worker has run."""
        return max((worker.longest for worker in self._workers.values()), default=0)

    def most_tokens(self, worker: Worker) -> int:
        """The most tokens of a step of this worker."""
        most = worker.facts.max_batch_tokens
        if worker.fitting_tokens is not None:
            most = min(most, worker.fitting_tokens)
        if not self._latency_target_ms:
            return most
        return worker.step_time.budget(self._latency_target_ms, TYPICAL_LENGTH, most)

    def step_ms(self, worker: Worker, num_tokens: int) -> float | None:
        """Milliseconds that a step of this worker will take; by another worker's steps if it has done none yet."""
        known = (other.step_time.predict_ms(num_tokens, TYPICAL_LENGTH) for other in (worker, *self._workers.values()))
        return next((ms for ms in known if ms is not None), None)

    def wait_ms(self, num_tokens: int, now_ns: int) -> float | None:
        """Milliseconds that the ready workers together take for this many queued tokens; None if nothing is known.

        A worker that has done nothing yet counts as the mean of the others.
        """
        rates: list[float] = []  # how much of all these tokens each worker does in a millisecond
        num_unknown = 0
        for worker in self._workers.values():
            if now_ns - worker.last_heard_ns < SUSPECT_NS:
                ms = worker.step_time.queue_ms(num_tokens, self.most_tokens(worker), TYPICAL_LENGTH)
                if ms is None:
                    num_unknown += 1
                else:
                    rates.append(1 / ms if ms else math.inf)
        return len(rates) / sum(rates) / (len(rates) + num_unknown) if rates else None

    def assign(self, choice: Choice, parts: list[Part], now_ns: int) -> Batch:
        """Pack parts into a batch and note that the chosen worker holds it."""
        worker = choice.worker
        assert worker is not None, "there is no worker to assign a batch to: this is a bug"
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        batch = pack(parts, epoch=self._epoch, batch_id=batch_id, now_ns=now_ns)
        was_kept_open, worker.is_kept_open = worker.is_kept_open, False
        if not worker.in_flight:
            was_kept_open = False  # its step ended before its time
            worker.running_since_ns = now_ns
        longest = int(batch.lengths.max())
        predicted_ms = worker.step_time.predict_ms(len(batch.token_ids), longest)
        # An earlier lost batch is detected by the next result, so restart the missing-batch clock here.
        worker.short_since_ns = None
        worker.in_flight[batch_id] = InFlight(
            batch_id=batch_id,
            parts=parts,
            num_tokens=len(batch.token_ids),
            longest=longest,
            num_rows=batch.num_rows,
            row_bytes=None
            if parts[0].pending.sparse
            else row_bytes(int(batch.encodings.min()), worker.facts.dimensions),
            sent_ns=now_ns,
            predicted_ns=int((predicted_ms or 0) * 1e6),
            was_kept_open=was_kept_open,
        )
        return batch

    def release(self, worker: Worker, batch_id: int, now_ns: int) -> InFlight | None:
        """Take a finished batch from a worker; None if it did not hold it (the result is an earlier worker's)."""
        batch = worker.in_flight.pop(batch_id, None)
        if batch is not None:
            worker.num_missing = 0
            worker.worked_ns += now_ns - worker.running_since_ns
            worker.running_since_ns = now_ns
        return batch

    def note_pieces(self, worker: Worker, pieces: npt.NDArray[np.int32], now_ns: int) -> None:
        """A batch had to run in pieces, of this many tokens each: give this worker smaller ones for a minute."""
        worker.fitting_tokens = int(pieces.max())
        worker.memory_back_ns = now_ns + _SHORT_OF_MEMORY_NS

    def rest(self, worker: Worker, now_ns: int) -> None:
        """Give nothing for a second to a worker that fails where others do not: always free, it would get all work."""
        worker.rests_until_ns = now_ns + _REST_NS

    def recover(self, now_ns: int) -> list[Worker]:
        """Lift the limit of workers whose memory has not been short for a minute; these workers."""
        recovered = [
            worker
            for worker in self._workers.values()
            if worker.fitting_tokens is not None and worker.memory_back_ns <= now_ns
        ]
        for worker in recovered:
            worker.fitting_tokens = None
        return recovered

    def on_beat(self, worker: Worker, beat: Beat, now_ns: int) -> None:
        """Note how many batches a worker says that it holds.

        A beat may cross a batch on its way; if beats go on missing it, it never arrived. A worker that still speaks of
        another scheduler's epoch takes nothing of this one's.
        """
        worker.held = beat.num_held if beat.epoch == self._epoch else 0
        worker.beat_ns = now_ns
        if worker.held >= len(worker.in_flight):
            worker.short_since_ns = None
        elif worker.short_since_ns is None:
            worker.short_since_ns = now_ns

    def take_overtaken(self, worker: Worker, batch_id: int) -> list[InFlight]:
        """Take back the batches that were sent before the one whose result has come: they never arrived.

        A worker gives its results in the order of its batches.
        """
        if batch_id not in worker.in_flight:
            return []
        older = list(itertools.takewhile(lambda known: known != batch_id, worker.in_flight))
        return [worker.in_flight.pop(known) for known in older]

    def take_missing(self, now_ns: int) -> list[tuple[Worker, list[InFlight]]]:
        """Take back the batches of workers whose beats have said for 2 seconds that they hold none.

        While a worker holds one of two, that one ends first, and its result says more.
        """
        missing = []
        for worker in self._workers.values():
            since_ns = worker.short_since_ns
            if since_ns is not None and now_ns - since_ns >= MISSING_NS and worker.in_flight and worker.held == 0:
                worker.short_since_ns = None
                worker.num_missing += 1
                missing.append((worker, list(worker.in_flight.values())))
                worker.in_flight.clear()
        return missing

    def lost(self, now_ns: int) -> list[tuple[Worker, str]]:
        """The workers that count as lost now, each with the reason: silent, desynchronized or overdue."""
        verdicts = []
        for worker in self._workers.values():
            if now_ns - worker.last_heard_ns >= LOST_NS:
                verdicts.append((worker, "silent"))
            elif worker.num_missing >= _MAX_MISSING:
                verdicts.append((worker, "desynchronized"))
            elif worker.in_flight:
                running = next(iter(worker.in_flight.values()))
                limit_ns = max(_MAX_STEP_NS, _MAX_STEP_TO_PREDICTED * running.predicted_ns)
                if now_ns - worker.running_since_ns >= limit_ns:
                    verdicts.append((worker, "overdue"))
        return verdicts

    def forgive(self, lag_ns: int, now_ns: int) -> None:
        """The scheduler itself stood still for this long: no worker is to blame for that silence.

        After a long standstill the transport may have given up a connection, with the messages that came meanwhile. So
        a worker that seems to have been silent before gets time to be heard again.
        """
        for worker in self._workers.values():
            heard_ns = worker.last_heard_ns + lag_ns
            if lag_ns >= SUSPECT_NS:
                heard_ns = max(heard_ns, now_ns - SUSPECT_NS)
            worker.last_heard_ns = min(heard_ns, now_ns)
            worker.running_since_ns = min(worker.running_since_ns + lag_ns, now_ns)
            if worker.short_since_ns is not None:
                worker.short_since_ns = min(worker.short_since_ns + lag_ns, now_ns)
