"""The threads behind the socket's: one owns the device and launches, one waits for the launched steps.

The server's thread owns the socket, so that it can report that this process lives while a step runs. Batches go in
through one queue and outcomes come back through another. Each outcome is announced on an eventfd that the server polls.
The queues need no bound of their own: the server takes no more than two batches at once.

    server ─batch→ launcher: Engine.step ─LazyTensor→ collector: waits, asleep ─outcome→ server

The launcher does not wait for a step to end, so the next one is launched behind the running one. A result that is ready
at once, as always on a CPU, it hands on itself. When no batch has come for a moment, the engine does idle work: it
captures a graph.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from common.wire.messages import NO_NUMBERS, Batch, BatchFailed, ModelFacts, Result, StepTimes
from worker.batch.lazy import Progress
from worker.engine.oom_split import SequenceTooLarge

if TYPE_CHECKING:
    from common.metrics import Metrics
    from worker.batch.lazy import LazyTensor
    from worker.engine.engine import Engine
    from worker.process.profiling import StepProfiler

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 1000
_IDLE_S = 0.02  # without a batch, before idle work; a client that sends one request after another is back sooner


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine cannot be built, its device is lost, or a bug has ended a thread: no more outcomes will come."""

    error: Exception


Outcome: TypeAlias = Ready | Broken | StepTimes | Result | BatchFailed


@dataclass(slots=True, eq=False)
class _Step:
    batch: Batch
    arrived_ns: int
    launched_ns: int  # when its launch began
    rows: LazyTensor | None = None  # None until it is launched
    returned_ns: int = 0  # when its launch was over


class Compute:
    """All public methods are for the server's thread."""

    def __init__(self, build: Callable[[], Engine], metrics: Metrics, profiler: StepProfiler | None = None) -> None:
        self._build = build
        self._metrics = metrics
        self._profiler = profiler
        self._batches: queue.SimpleQueue[tuple[Batch, int] | None] = queue.SimpleQueue()  # and when it came
        self._launched: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._running: deque[_Step] = deque()  # the oldest first; each step leaves it once, however it ends
        self._finished_ns = 0
        # Readable while outcomes wait. It stays open at the end, since a thread in a step may still write to it.
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Daemons: if a step hangs, the process must still be able to end.
        self._launcher = threading.Thread(target=self._launch_all, name="launcher", daemon=True)
        self._collector = threading.Thread(target=self._collect_all, name="collector", daemon=True)

    @property
    def step_began_s(self) -> float | None:
        """When the oldest running step began, on time.monotonic()'s clock; None: none runs."""
        try:
            return max(self._running[0].launched_ns, self._finished_ns) / 1e9
        except IndexError:
            return None

    def start(self) -> None:
        self._launcher.start()
        self._collector.start()

    def submit(self, batch: Batch) -> None:
        self._batches.put((batch, time.monotonic_ns()))

    def drop_queued(self) -> None:
        """Forget the batches that have not begun."""
        try:
            while True:
                self._batches.get_nowait()
        except queue.Empty:
            return

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes since the last call."""
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return []
        outcomes = []
        try:
            while True:
                outcomes.append(self._outcomes.get_nowait())
        except queue.Empty:
            return outcomes

    def stop(self, timeout_s: float) -> bool:
        """Let the threads end after the queued batches, and wait up to `timeout_s`; whether they have ended."""
        deadline_s = time.monotonic() + timeout_s
        self._batches.put(None)
        for thread in (self._launcher, self._collector):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._launcher.is_alive() and not self._collector.is_alive()

    # --- on the launcher ---

    def _launch_all(self) -> None:
        engine: Engine | None = None
        try:
            engine = self._engine = self._build()
            self._put(Ready(engine.hello()))
            while (arrival := self._next_batch(engine)) is not None:
                self._launch(engine, *arrival)
        except Exception as error:  # noqa: BLE001  # carried to the server's thread, which ends the process
            self._put(Broken(_cause(engine, error)))
        finally:
            self._launched.put(None)

    def _next_batch(self, engine: Engine) -> tuple[Batch, int] | None:
        """The next batch and when it came, as soon as there is one; None: there will be none."""
        while True:
            try:
                return self._batches.get(timeout=_IDLE_S if engine.has_idle_work else None)
            except queue.Empty:
                engine.idle_work()

    def _launch(self, engine: Engine, batch: Batch, arrived_ns: int) -> None:
        step = _Step(batch, arrived_ns, time.monotonic_ns())
        self._running.append(step)
        if self._profiler is not None:
            self._profiler.before_step()
        try:
            step.rows = engine.step(batch)
        except Exception as error:  # noqa: BLE001  # one batch's failure is its own; the loop goes on
            self._fail(step, error)
            return
        step.returned_ns = time.monotonic_ns()
        if step is self._running[0] and step.rows.ready():
            self._collect(step)
        else:
            self._launched.put(step)
            self._metrics.step_launch_seconds.observe((step.returned_ns - step.launched_ns) / 1e9)
        if self._profiler is not None:
            self._profiler.after_step()

    # --- on the collector ---

    def _collect_all(self) -> None:
        try:
            while (step := self._launched.get()) is not None:
                self._collect(step)
        except Exception as error:  # noqa: BLE001  # as the launcher's
            self._put(Broken(_cause(self._engine, error)))

    # --- on either thread; one of them for each step ---

    def _collect(self, step: _Step) -> None:
        """Wait for a step's rows and hand them on."""
        assert step.rows is not None
        try:
            result = step.rows.numpy()
        except Exception as error:  # noqa: BLE001  # errors of the device show only here
            self._finished_ns = time.monotonic_ns()
            self._fail(step, error)
            return
        # A step that was launched behind another began when that one ended.
        began_ns = max(step.launched_ns, self._finished_ns)
        self._finished_ns = time.monotonic_ns()
        duration_ns = self._finished_ns - began_ns
        nonfinite = np.flatnonzero(result.finite == 0).astype(np.int32)
        if len(step.batch.times_ns):
            self._put(_times_of(step, step.rows.progress or Progress(), began_ns, self._finished_ns))
        pieces = np.array(result.pieces, dtype=np.int32) if result.pieces else NO_NUMBERS
        ids, waited_ns = (step.batch.epoch, step.batch.batch_id), began_ns - step.arrived_ns
        times_us = max(0, waited_ns) // 1000, duration_ns // 1000
        self._put(Result(*ids, *times_us, step.rows.is_typical, nonfinite, result.rows, pieces))
        self._running.remove(step)  # only now: the launcher itself hands on a step that it finds to be the oldest
        # After the answer has been handed on: this costs tens of microseconds.
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(duration_ns / 1e9)
        if len(nonfinite):
            self._metrics.nonfinite_rows.inc(len(nonfinite))

    def _fail(self, step: _Step, error: Exception) -> None:
        # Raises DeviceLost if nothing will ever run again, which ends the thread and so the process. The batch is not
        # answered then: the scheduler runs it elsewhere, as every batch of a dead worker.
        self._engine.check_device(error)
        logger.error("batch %d failed", step.batch.batch_id, exc_info=error)
        self._metrics.step_failures.inc()
        message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
        too_large = error.sequence if isinstance(error, SequenceTooLarge) else None
        self._put(BatchFailed(step.batch.epoch, step.batch.batch_id, message, too_large))
        self._running.remove(step)  # after that: see _collect

    def _put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        os.eventfd_write(self.wakeup_fd, 1)


def _times_of(step: _Step, progress: Progress, began_ns: int, copied_ns: int) -> StepTimes:
    """The times of a step that are known here. The server knows when the batch came and when its answer goes."""
    taken_ns = step.launched_ns
    staged_ns = progress.staged_ns or taken_ns
    computed_ns = progress.computed_ns or copied_ns
    # On a CPU the step has run before the call returns.
    launched_ns = staged_ns if computed_ns <= step.returned_ns else step.returned_ns
    began_ns = min(max(launched_ns, began_ns), computed_ns)
    times_ns = [taken_ns, taken_ns, staged_ns, launched_ns, began_ns, computed_ns, copied_ns, copied_ns]
    return StepTimes(step.batch.epoch, step.batch.batch_id, np.array(times_ns))


def _cause(engine: Engine | None, error: Exception) -> Exception:
    """The error itself, or DeviceLost if the device is lost: errors of many kinds may be signs of that."""
    try:
        if engine is not None:
            engine.check_device(error)
    except Exception as lost:  # noqa: BLE001  # a DeviceLost
        return lost
    return error
