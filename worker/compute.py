"""The thread that owns the device: it builds the engine, then runs batches in the order in which they come.

The other thread (`server`) owns the socket, so that it can say that this process lives while a step runs. Batches go in
through a queue; outcomes come back through another, each announced on an eventfd that the other thread polls. Neither
queue needs a bound of its own: the server takes no more than two batches at once.

A step is launched before the previous one's rows are read, so that the host prepares the next batch while the device
still works. What is ready at once (always so on a CPU) is handed on before anything else is launched.
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

from common.protocol import Batch, BatchFailed, ModelFacts, Result

if TYPE_CHECKING:
    from common.metrics import Metrics
    from worker.engine import Engine
    from worker.lazy import LazyTensor

logger = logging.getLogger(__name__)

_MAX_RUNNING = 2
_MAX_MESSAGE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine cannot be built, or the thread has ended by a bug: there will be no more outcomes."""

    error: Exception


Outcome: TypeAlias = Ready | Broken | Result | BatchFailed


@dataclass(frozen=True, slots=True)
class _Running:
    batch: Batch
    launched_ns: int
    rows: LazyTensor


class Compute:
    """All public methods are for the other thread."""

    def __init__(self, build: Callable[[], Engine], metrics: Metrics) -> None:
        self._build = build
        self._metrics = metrics
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._finished_ns = 0
        self.step_began_s: float | None = None  # of the oldest step that has not ended; on time.monotonic()'s clock
        # Readable while outcomes wait. Left open at the end: a thread that is still in a step may yet write to it.
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A daemon: where a step hangs, the process must still be able to end.
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        self._batches.put(batch)

    def drop_queued(self) -> None:
        """Forget the batches that have not begun."""
        try:
            while True:
                self._batches.get_nowait()
        except queue.Empty:
            return

    def take_outcomes(self) -> list[Outcome]:
        """What has come about since the last call."""
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
        """Let the thread end after what is queued, and wait so long for it; whether it has ended."""
        self._batches.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the thread itself ---

    def _main(self) -> None:
        try:
            engine = self._build()
            self._put(Ready(engine.hello()))
            self._run(engine)
        except Exception as error:  # noqa: BLE001  # carried to the other thread, which ends the process
            self._put(Broken(error))

    def _run(self, engine: Engine) -> None:
        running: deque[_Running] = deque()
        while True:
            batch = self._next_batch(wait=not running)
            if batch is None and not running:
                return
            if batch is not None:
                self._launch(engine, batch, running)
            # With nothing new to launch, wait for the oldest; with a new one launched, for the one before it.
            while running and (batch is None or len(running) == _MAX_RUNNING or running[0].rows.ready()):
                self._flush(running.popleft())
                self.step_began_s = running[0].launched_ns / 1e9 if running else None

    def _next_batch(self, *, wait: bool) -> Batch | None:
        """The next batch; None when there is none, or, after waiting, when there will be none."""
        try:
            return self._batches.get(block=wait)
        except queue.Empty:
            return None

    def _launch(self, engine: Engine, batch: Batch, running: deque[_Running]) -> None:
        launched_ns = time.monotonic_ns()
        self.step_began_s = self.step_began_s or launched_ns / 1e9
        try:
            rows = engine.step(batch)
        except Exception as error:  # noqa: BLE001  # one batch's failure is its own; the loop goes on
            self._fail(batch, error)
            self.step_began_s = running[0].launched_ns / 1e9 if running else None
            return
        running.append(_Running(batch, launched_ns, rows))

    def _flush(self, step: _Running) -> None:
        """Wait for a step's rows and hand them on."""
        try:
            rows = step.rows.numpy()
        except Exception as error:  # noqa: BLE001  # what the device did wrong shows only here
            self._fail(step.batch, error)
            return
        # A step that was launched behind another has run since that one's end.
        began_ns = max(step.launched_ns, self._finished_ns)
        self._finished_ns = time.monotonic_ns()
        duration_ns = self._finished_ns - began_ns
        # The engine's promise: a row that is not finite is NaN throughout.
        nonfinite = np.flatnonzero(~np.isfinite(rows[:, 0])).astype(np.int32)
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(duration_ns / 1e9)
        if len(nonfinite):
            self._metrics.nonfinite_rows.inc(len(nonfinite))
        self._put(Result(step.batch.epoch, step.batch.batch_id, duration_ns // 1000, nonfinite, rows))

    def _fail(self, batch: Batch, error: Exception) -> None:
        logger.error("batch %d failed", batch.batch_id, exc_info=error)
        self._metrics.step_failures.inc()
        message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
        self._put(BatchFailed(batch.epoch, batch.batch_id, message))

    def _put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        os.eventfd_write(self.wakeup_fd, 1)
