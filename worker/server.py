"""The worker process: batches from the scheduler in, results back, and signs of life meanwhile.

This thread owns the socket and nothing else, so it beats while a step runs; `Compute` has those around the device.

    poll ⇒ Batch → Compute → Engine.step → LazyTensor ⇒ outcome → Result

The worker holds only the batches in its hands. A scheduler that was restarted knows none of them: its first `Ping`
carries a new epoch, whereupon what belongs to the old one is dropped and the worker introduces itself again.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from common import transport
from common.errors import ProtocolError
from common.metrics import Metrics, open_metrics
from common.models import ModelNotFound, find_model
from common.protocol import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Goodbye,
    Hello,
    Message,
    ModelFacts,
    Ping,
    Refuse,
    Result,
)
from worker.compute import Broken, Compute, Outcome, Ready
from worker.driver import wake
from worker.files import ModelError
from worker.lazy import DeviceLost

if TYPE_CHECKING:
    from types import FrameType

    from common.config import WorkerConfig
    from worker.engine import Engine

logger = logging.getLogger(__name__)

EXIT_BUG = 1
EXIT_STUCK = 70  # a step does not end; only a new process can use the device again
EXIT_DEVICE_LOST = 71  # the device answers nothing but errors; likewise
EXIT_REFUSED = 75  # somebody else has this place; a later try may succeed
EXIT_CONFIGURATION = 78  # the model or the configuration is wrong; another try is in vain

_MAX_HELD = 2  # batches: one runs, one waits
_BEAT_S = 0.25
_SILENCE_S = 0.75  # three Pings missed: the scheduler may be another one, so introduce ourselves again
_LINGER_MS = 500  # for last words
_MAX_STEP_S = 60.0  # the scheduler gives up sooner; this is for a scheduler that has started since, and knows nothing
_LONG_STEP_PART = 3  # at this part of that the log says where a step is: the scheduler ends us without a word

# Without a turn of this loop for so long, since something holds the interpreter, say, the log says where every thread
# is: half a second later the scheduler gives us up.
_MUTE_S = 1.5

_STOP_S = 0.25  # for the compute thread, which should be idle by then

# So many introductions without any answer, more than two seconds: the transport has given the connection up by then,
# and one that comes back under its old routing id may swallow all (transport.py). Come back under a new one.
_MAX_UNANSWERED = 3


class Server:
    """One run from start to end.

    `build` is called on the compute thread, `joined` once a scheduler has taken this worker in.
    """

    def __init__(
        self,
        config: WorkerConfig,
        metrics: Metrics,
        build: Callable[[], Engine],
        joined: Callable[[], None],
        max_step_s: float = _MAX_STEP_S,
    ) -> None:
        self._config = config
        self._max_step_s = max_step_s
        self._metrics = metrics
        self._compute = Compute(build, metrics)
        self._joined = joined
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: transport.Dealer | None = None  # from Ready on
        self._facts: ModelFacts | None = None  # likewise
        self._epoch: int | None = None  # from the first Ping on
        self._held: set[int] = set()  # batches of this epoch that are not answered
        self._unsent: deque[Result | BatchFailed] = (
            deque()
        )  # bounded by what is held, and by what a confused scheduler sends beyond
        self._signals = 0
        self._drain_deadline_s: float | None = None
        self._next_beat_s = 0.0
        self._next_hello_s = 0.0
        self._unanswered = 0
        self._status: int | None = None
        self._told_of_s: float | None = None  # when the step began that the log tells of

    def run(self) -> int:
        """Serve until a signal or a refusal. Returns the exit status.

        Call it on the main thread, and end the process after it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._compute.start()
        while self._status is None:
            self._wait()
            for outcome in self._compute.take_outcomes():
                self._on_outcome(outcome)
            for message in self._messages():
                self._on_message(message)
            self._send_due(time.monotonic())
            self._check_step(time.monotonic())
            self._check_signals(time.monotonic())
        faulthandler.cancel_dump_traceback_later()
        if self._dealer is not None:
            self._dealer.close(_LINGER_MS)
        self._context.term()
        if not self._compute.stop(_STOP_S):
            # It is inside a step, or loads the model. The interpreter would unwind it in the middle of torch's C++,
            # which aborts the process (status -6); everything that matters has been closed by then.
            atexit.register(os._exit, self._status)
        return self._status

    def _wait(self) -> None:
        """Until a message, an outcome, a signal, or the next deadline."""
        poller = zmq.Poller()
        poller.register(self._compute.wakeup_fd, zmq.POLLIN)
        deadlines_s = [] if self._drain_deadline_s is None else [self._drain_deadline_s]
        now_s = time.monotonic()
        if self._dealer is not None:
            deadlines_s.append(self._next_beat_s)
            # Something waits for a connection: it will be writable as soon as there is one.
            blocked = bool(self._unsent) or now_s >= self._next_hello_s
            poller.register(self._dealer.socket, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            if not blocked:
                deadlines_s.append(self._next_hello_s)
        poller.poll(math.ceil(max(0.0, min(deadlines_s) - now_s) * 1000) if deadlines_s else None)

    # --- what arrives ---

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        os.eventfd_write(self._compute.wakeup_fd, 1)

    def _messages(self) -> list[Message]:
        """What has arrived on the socket by now."""
        messages: list[Message] = []
        while self._dealer is not None:
            try:
                message = self._dealer.receive()
            except ProtocolError as error:
                logger.warning("a message that cannot be read: %s", error)
                self._metrics.protocol_errors.labels("worker").inc()
                continue
            if message is None:
                break
            messages.append(message)
        return messages

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Batch):
            self._on_batch(message)
        elif isinstance(message, Ping):
            self._on_ping(message)
        elif isinstance(message, Refuse):
            self._on_refuse(message)
        else:
            logger.warning("a %s is not for a worker; ignored", type(message).__name__)
            self._metrics.protocol_errors.labels("worker").inc()

    def _on_batch(self, batch: Batch) -> None:
        if batch.epoch != self._epoch:
            self._metrics.stale_messages.inc()
        elif self._drain_deadline_s is not None:
            pass  # not taken: our Goodbye tells the scheduler to run it elsewhere
        elif batch.batch_id in self._held:
            self._metrics.protocol_errors.labels("worker").inc()  # sent twice; its one answer will come
        elif len(self._held) >= _MAX_HELD:
            self._metrics.protocol_errors.labels("worker").inc()
            self._unsent.append(BatchFailed(batch.epoch, batch.batch_id, f"this worker holds {_MAX_HELD} batches"))
        else:
            self._held.add(batch.batch_id)
            self._compute.submit(batch)

    def _on_ping(self, ping: Ping) -> None:
        self._next_hello_s = time.monotonic() + _SILENCE_S
        self._unanswered = 0
        if self._epoch is None:
            self._joined()
        if ping.epoch != self._epoch:
            logger.info("a scheduler of epoch %d; %d batches of the last one dropped", ping.epoch, len(self._held))
            self._epoch = ping.epoch
            self._compute.drop_queued()
            self._held.clear()
            self._unsent.clear()
            self._next_hello_s = 0.0

    def _on_refuse(self, refuse: Refuse) -> None:
        logger.error("the scheduler refuses this worker (%s): %s", refuse.code, refuse.message)
        self._status = EXIT_REFUSED if refuse.code == "duplicate_name" else EXIT_CONFIGURATION

    def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Ready):
            self._facts = outcome.facts
            endpoint = transport.address(self._config.run_dir, "workers")
            self._dealer = transport.Dealer(self._context, endpoint, "worker")
        elif isinstance(outcome, Broken):
            self._status = self._status_of(outcome.error)
        elif outcome.epoch != self._epoch:
            self._metrics.stale_messages.inc()  # nobody waits for it: its scheduler is gone
        else:
            self._unsent.append(outcome)

    def _status_of(self, error: Exception) -> int:
        if isinstance(error, (ModelNotFound, ModelError)):
            logger.error("%s", error)
            return EXIT_CONFIGURATION
        if isinstance(error, DeviceLost):
            logger.critical("%s; a new process may find it well again", error)
            return EXIT_DEVICE_LOST
        logger.critical("the worker has failed", exc_info=error)
        return EXIT_BUG

    # --- what goes out ---

    def _send_due(self, now_s: float) -> None:
        """Send what waits and what the time asks for. What cannot be sent now waits for a connection."""
        if self._dealer is None or self._facts is None:
            return
        if now_s >= self._next_hello_s:
            self._introduce(self._dealer, self._facts, now_s)
        while self._unsent and self._dealer.send(self._unsent[0]):
            self._held.discard(self._unsent.popleft().batch_id)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + _BEAT_S
            faulthandler.dump_traceback_later(_MUTE_S)  # by a thread that needs no interpreter; 0.1 ms
            # Draining, it declines batches; its Goodbye gives them back, so they are not missing.
            held = len(self._held) if self._drain_deadline_s is None else _MAX_HELD
            if self._epoch is not None and not self._dealer.send(Beat(self._epoch, held)):
                # No connection, so the scheduler has ended. The next one hears of us as soon as it is there.
                self._next_hello_s = now_s

    def _introduce(self, dealer: transport.Dealer, facts: ModelFacts, now_s: float) -> None:
        if self._unanswered >= _MAX_UNANSWERED:
            logger.warning("nobody has answered %d introductions; reconnecting", self._unanswered)
            self._unanswered = 0
            # Who takes us in again counts from nothing, and has what we held run again.
            self._compute.drop_queued()
            self._held.clear()
            self._unsent.clear()
            dealer.reconnect()
        if dealer.send(Hello(PROTOCOL_VERSION, f"worker-{self._config.slot}", os.getpid(), facts)):
            self._unanswered += 1
            self._next_hello_s = now_s + _SILENCE_S

    # --- the end ---

    def _check_step(self, now_s: float) -> None:
        began_s = self._compute.step_began_s
        if self._status is not None or began_s is None or now_s - began_s < self._max_step_s / _LONG_STEP_PART:
            return
        if now_s - began_s >= self._max_step_s:
            self._status = EXIT_STUCK
        elif began_s == self._told_of_s:
            return
        self._told_of_s = began_s
        logger.critical("a step has not ended after %.0f s; where it is:", now_s - began_s)
        faulthandler.dump_traceback()

    def _check_signals(self, now_s: float) -> None:
        if self._status is not None or not self._signals:
            return
        if self._signals > 1 or self._dealer is None:
            logger.info("stopping at once")
            self._status = 0
            return
        if self._drain_deadline_s is None:
            logger.info("stopping: %d batches in hand", len(self._held))
            self._drain_deadline_s = now_s + self._config.drain_timeout_s
        if self._held and now_s >= self._drain_deadline_s:
            logger.warning("%d batches are not finished after %d s", len(self._held), self._config.drain_timeout_s)
            self._held.clear()
        if not self._held:
            self._dealer.send(Goodbye("the worker was told to stop"))
            self._status = 0


def main(config: WorkerConfig, joined: Callable[[], None]) -> int:
    """Run a worker until it is told to stop.

    Returns the exit status: 0 stopped, 70 stuck in a step, 71 device lost, 75 refused, 78 misconfigured, 1 bug.

    `joined` is called once the worker can do its work: its model is loaded and a scheduler has answered.

    Call it on the main thread. The process should end right after it.
    """
    metrics = open_metrics(config.run_dir)
    return Server(config, metrics, lambda: _build(config, metrics), joined).run()


def _build(config: WorkerConfig, metrics: Metrics) -> Engine:
    if config.device != "cpu":
        threading.Thread(target=wake, args=(config.slot,), name="wake", daemon=True).start()
    # Imported here: torch takes seconds, in which the process already heeds signals.
    import torch

    from worker.engine import Engine

    torch.set_num_threads(_num_threads(config))
    torch.set_num_interop_threads(1)
    return Engine(find_model(config.model), config, metrics)


def _num_threads(config: WorkerConfig) -> int:
    if config.threads != "auto":
        return int(config.threads)
    return max(1, min(len(os.sched_getaffinity(0)), _cgroup_cpus()) // config.workers)


def _cgroup_cpus() -> int:
    """How many CPUs' time this process's control group may use; a container with a quota still sees all of them."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file (version 1), or the quota is "max"
        return sys.maxsize
