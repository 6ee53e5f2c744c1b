"""The worker as a state machine: messages, outcomes, signals and the time go in. No socket, no clock, no thread.

Two objects take what goes out: a `Link` sends a message or says that it cannot, and a `Device` runs batches in the
order in which they come. `status` says how the process is to end.

The worker's only state is the batches that it has not answered. A scheduler that was restarted knows none of them. Its
first `Ping` carries a new epoch, upon which the worker drops the batches of the old one and introduces itself again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from common.errors import EX_BUSY, EX_CONFIG, EX_DEVICE_LOST, EX_FAILURE, EX_STUCK
from common.metrics import Metrics
from common.model_location import ModelNotFound
from common.wire.codec import Message
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Goodbye,
    Hello,
    ModelFacts,
    Ping,
    Refuse,
    Result,
    StepTimes,
)
from worker.batch.lazy import DeviceLost
from worker.checkpoint.files import ModelError

logger = logging.getLogger(__name__)

MAX_STEP_S = 60.0  # the scheduler gives up sooner, unless it has started since and does not know of the step
_LONG_STEP_PART = 3  # after a third of that the log says where a step is: the scheduler would end us without a word

_MAX_HELD = 2  # batches at once: one runs, one waits
_BEAT_S = 0.25
_SILENCE_S = 0.75  # three Pings missed: the scheduler may have been restarted, so say Hello again

# Introductions without any answer, which take more than two seconds. By then the transport has given the connection up,
# and one that comes back under its old routing id may swallow all messages (transport.py). So a new id is taken.
_MAX_UNANSWERED = 3


class Link(Protocol):
    """The way to the scheduler."""

    def send(self, message: Message) -> bool:
        """Send a message if there is a connection; whether it was sent."""

    def reconnect(self) -> None:
        """Come back under a new routing id."""


class Device(Protocol):
    """It runs batches. Each comes back as an outcome, unless it was dropped before it began."""

    def submit(self, batch: Batch) -> None: ...

    def drop_queued(self) -> None: ...


class Worker:
    """Times are on the clock that all processes of a host share (transport.now_ns).

    `joined` is called once a scheduler has taken this worker in.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        device: Device,
        joined: Callable[[], object],
        metrics: Metrics,
        *,
        drain_timeout_s: float,
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        self.status: int | None = None  # the exit status, once the process is to end
        self._name = name
        self._pid = pid
        self._device = device
        self._joined = joined
        self._metrics = metrics
        self._drain_timeout_s = drain_timeout_s
        self._max_step_s = max_step_s
        self._link: Link | None = None  # from the loading of the model on
        self._facts: ModelFacts | None = None  # likewise
        self._epoch: int | None = None  # from the first Ping on
        self._held: set[int] = set()  # ids of this epoch's batches that are not answered
        # Bounded by the batches held, and by those that a confused scheduler sends beyond.
        self._unsent: deque[StepTimes | Result | BatchFailed] = deque()
        self._received_ns: dict[int, int] = {}  # when traced batches came, until they are answered
        self._drain_deadline_s: float | None = None
        self._next_beat_s = 0.0
        self._next_hello_s = 0.0
        self._unanswered = 0
        self._told_of_s: float | None = None  # when the step began that was logged as long

    @property
    def num_held(self) -> int:
        """The number of batches that are not answered."""
        return len(self._held)

    def next_tick_s(self, now_s: float) -> float | None:
        """When `on_tick` is due if nothing happens before; None: not until something happens."""
        deadlines_s = [] if self._drain_deadline_s is None else [self._drain_deadline_s]
        if self._link is not None:
            deadlines_s.append(self._next_beat_s)
            if not self.blocked(now_s):
                deadlines_s.append(self._next_hello_s)
        return min(deadlines_s, default=None)

    def blocked(self, now_s: float) -> bool:
        """Whether something waits for a connection; `on_tick` is due as soon as the link can send again."""
        return self._link is not None and (bool(self._unsent) or now_s >= self._next_hello_s)

    # --- what arrives ---

    def on_ready(self, facts: ModelFacts, link: Link) -> None:
        """The model is loaded."""
        self._facts = facts
        self._link = link

    def on_broken(self, error: Exception) -> None:
        """The device will run nothing any more, or could not be opened."""
        if isinstance(error, (ModelNotFound, ModelError)):
            logger.error("%s", error)
            self.status = EX_CONFIG
        elif isinstance(error, DeviceLost):
            logger.critical("%s; a new process may find it well again", error)
            self.status = EX_DEVICE_LOST
        else:
            logger.critical("the worker has failed", exc_info=error)
            self.status = EX_FAILURE

    def on_outcome(self, outcome: StepTimes | Result | BatchFailed, now_s: float) -> None:
        """A batch has ended. The times of a traced batch come right before its result."""
        if outcome.epoch != self._epoch or outcome.batch_id not in self._held:
            self._metrics.stale_messages.inc()  # no process waits for it any more
        elif isinstance(outcome, StepTimes):
            self._on_times(outcome, now_s)
        else:
            self._unsent.append(outcome)

    def on_message(self, message: Message, now_s: float) -> None:
        if isinstance(message, Batch):
            self._on_batch(message, now_s)
        elif isinstance(message, Ping):
            self._on_ping(message, now_s)
        elif isinstance(message, Refuse):
            self._on_refuse(message)
        else:
            logger.warning("a %s is not for a worker; ignored", type(message).__name__)
            self._metrics.protocol_errors.labels("worker").inc()

    def on_signal(self, now_s: float) -> None:
        """Stop after the batches in hand; at once if it is the second signal, or before the model is loaded."""
        if self.status is not None:
            return
        if self._link is None or self._drain_deadline_s is not None:
            logger.info("stopping at once")
            self.status = 0
        else:
            logger.info("stopping: %d batches in hand", len(self._held))
            self._drain_deadline_s = now_s + self._drain_timeout_s

    def _on_batch(self, batch: Batch, now_s: float) -> None:
        if batch.epoch != self._epoch:
            self._metrics.stale_messages.inc()
        elif self._drain_deadline_s is not None:
            pass  # not taken: the Goodbye tells the scheduler to run it elsewhere
        elif batch.batch_id in self._held:
            self._metrics.protocol_errors.labels("worker").inc()  # sent twice; its one answer will come
        else:
            if len(self._held) >= _MAX_HELD:
                # A connection broke and came back, and the scheduler takes this worker for a new one that holds
                # nothing. The batches that it had sent before run elsewhere by now; their results are of no use.
                self._held.discard(min(self._held))
            self._held.add(batch.batch_id)
            if len(batch.times_ns):
                known = {held: time_ns for held, time_ns in self._received_ns.items() if held in self._held}
                self._received_ns = {**known, batch.batch_id: int(now_s * 1e9)}
            self._device.submit(batch)

    def _on_times(self, times: StepTimes, now_s: float) -> None:
        received_ns = self._received_ns.pop(times.batch_id, None)
        if received_ns is not None:
            times_ns = np.array([received_ns, *times.times_ns[1:-1].tolist(), int(now_s * 1e9)])
            self._unsent.append(StepTimes(times.epoch, times.batch_id, times_ns))

    def _on_ping(self, ping: Ping, now_s: float) -> None:
        self._next_hello_s = now_s + _SILENCE_S
        self._unanswered = 0
        if self._epoch is None:
            self._joined()
        if ping.epoch != self._epoch:
            logger.info("a scheduler of epoch %d; %d batches of the last one dropped", ping.epoch, len(self._held))
            self._epoch = ping.epoch
            self._drop_all()
            self._next_hello_s = 0.0

    def _on_refuse(self, refuse: Refuse) -> None:
        logger.error("the scheduler refuses this worker (%s): %s", refuse.code, refuse.message)
        self.status = EX_BUSY if refuse.code == "duplicate_name" else EX_CONFIG

    def _drop_all(self) -> None:
        self._device.drop_queued()
        self._held.clear()
        self._unsent.clear()

    # --- what goes out ---

    def on_tick(self, now_s: float) -> None:
        """Send the messages that wait or are due. Call it at `next_tick_s`, and after all arrivals.

        A message that cannot be sent now waits for a connection.
        """
        if self._link is None or self._facts is None:
            return
        if now_s >= self._next_hello_s:
            self._introduce(self._link, self._facts, now_s)
        while self._unsent and self._link.send(self._unsent[0]):
            sent = self._unsent.popleft()
            if not isinstance(sent, StepTimes):  # these come before a Result and do not answer the batch
                self._held.discard(sent.batch_id)
        if now_s >= self._next_beat_s:
            self._beat(self._link, now_s)
        if self._drain_deadline_s is not None and self.status is None:
            self._drain(self._link, self._drain_deadline_s, now_s)

    def _introduce(self, link: Link, facts: ModelFacts, now_s: float) -> None:
        if self._unanswered >= _MAX_UNANSWERED:
            logger.warning("no scheduler has answered %d introductions; reconnecting", self._unanswered)
            self._unanswered = 0
            self._drop_all()  # the scheduler will take us for a new worker, and run these batches again
            link.reconnect()
        if link.send(Hello(PROTOCOL_VERSION, self._name, self._pid, facts)):
            self._unanswered += 1
            self._next_hello_s = now_s + _SILENCE_S

    def _beat(self, link: Link, now_s: float) -> None:
        self._next_beat_s = now_s + _BEAT_S
        # While draining, the worker declines batches. Its Goodbye gives them back, so they are not missing.
        held = len(self._held) if self._drain_deadline_s is None else _MAX_HELD
        if self._epoch is not None and not link.send(Beat(self._epoch, held)):
            # There is no connection, so the scheduler has ended. The next one gets a Hello as soon as it is there.
            self._next_hello_s = now_s

    # --- the end ---

    def is_step_long(self, began_s: float | None, now_s: float) -> bool:
        """Whether the log should say where the running step is; sets `status` if the step counts as stuck.

        The log says it once well before that, and once then.
        """
        if self.status is not None or began_s is None or now_s - began_s < self._max_step_s / _LONG_STEP_PART:
            return False
        if now_s - began_s >= self._max_step_s:
            self.status = EX_STUCK
        elif began_s == self._told_of_s:
            return False
        self._told_of_s = began_s
        logger.critical("a step has not ended after %.0f s; where it is:", now_s - began_s)
        return True

    def _drain(self, link: Link, deadline_s: float, now_s: float) -> None:
        if self._held and now_s >= deadline_s:
            logger.warning("%d batches are not finished after %d s", len(self._held), self._drain_timeout_s)
            self._held.clear()
        if not self._held:
            link.send(Goodbye("the worker was told to stop"))
            self.status = 0
