"""The worker process: batches from the scheduler in, results back, and signs of life meanwhile.

This thread owns the socket and nothing else, so it sends beats while a step runs. `Compute` has the threads around the
device. `state.py` decides what is sent, and when.

    poll ⇒ Batch → Compute → Engine.step → LazyTensor ⇒ outcome → Result
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from common.environment import visible_cuda_devices
from common.errors import ProtocolError
from common.hardware import usable_cpus
from common.log import RateLimitedLog
from common.metrics import Metrics, open_metrics
from common.model_location import find_model
from common.run_dir import RunDir
from common.wire import transport
from common.wire.codec import Message
from worker.engine.driver import wake
from worker.process.compute import Broken, Compute, Outcome, Ready
from worker.process.placement import pin
from worker.process.profiling import StepProfiler
from worker.process.state import MAX_STEP_S, Worker

if TYPE_CHECKING:
    from types import FrameType

    from common.config import WorkerConfig
    from worker.engine.engine import Engine

logger = logging.getLogger(__name__)

_LINGER_MS = 500  # for last words

# If this loop has no turn for this time, because something holds the interpreter, say, every thread's stack goes to the
# log. Half a second later the scheduler gives this worker up.
_MUTE_S = 1.5
_WATCH_S = 0.25  # how often the timer is set anew; it takes 0.1 ms

_STOP_S = 0.25  # for the compute threads to end, which should be idle by then


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
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._profiler = StepProfiler(RunDir(config.run_dir).trace(f"worker-{config.slot}"))
        self._compute = Compute(build, metrics, self._profiler)
        self._max_step_s = max_step_s
        self._core = Worker(
            f"worker-{config.slot}",
            os.getpid(),
            self._compute,
            joined,
            metrics,
            drain_timeout_s=config.drain_timeout_s,
            max_step_s=max_step_s,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: transport.Dealer | None = None  # from Ready on
        self._bad_messages = RateLimitedLog(logger)  # bytes that are no message
        self._signals = 0
        self._signals_told = 0  # of these, told to the core
        self._next_watch_s = 0.0

    def run(self) -> int:
        """Serve until a signal or a refusal. Returns the exit status.

        Call it on the main thread, and end the process after it.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, lambda *_: self._profiler.ask())
        self._compute.start()
        core = self._core
        while core.status is None:
            self._wait()
            for outcome in self._compute.take_outcomes():
                self._on_outcome(outcome)
            for message in self._messages():
                core.on_message(message, time.monotonic())
            while self._signals_told < self._signals:
                self._signals_told += 1
                core.on_signal(time.monotonic())
            core.on_tick(time.monotonic())
            self._watch(time.monotonic())
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._dealer is not None:
            self._dealer.close(_LINGER_MS)
        self._context.term()
        if not self._compute.stop(_STOP_S):
            # A thread is inside a step, or loads the model. The interpreter would unwind it in the middle of torch's
            # C++, which aborts the process (status -6). Everything that matters is closed by then.
            atexit.register(os._exit, core.status)
        return core.status

    def _wait(self) -> None:
        """Wait for a message, an outcome, a signal, a missing connection, or the next deadline."""
        poller = zmq.Poller()
        poller.register(self._compute.wakeup_fd, zmq.POLLIN)
        now_s = time.monotonic()
        if self._dealer is not None:
            blocked = self._core.blocked(now_s)
            poller.register(self._dealer.socket, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
        next_s = self._core.next_tick_s(now_s)
        poller.poll(None if next_s is None else math.ceil(max(0.0, next_s - now_s) * 1000))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        os.eventfd_write(self._compute.wakeup_fd, 1)

    def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Ready):
            endpoint = RunDir(self._config.run_dir).address("workers")
            self._dealer = transport.Dealer(self._context, endpoint, "worker")
            self._core.on_ready(outcome.facts, self._dealer)
        elif isinstance(outcome, Broken):
            self._core.on_broken(outcome.error)
        else:
            self._core.on_outcome(outcome, time.monotonic())

    def _messages(self) -> list[Message]:
        """The messages that have arrived on the socket by now."""
        messages: list[Message] = []
        while self._dealer is not None:
            try:
                message = self._dealer.receive()
            except ProtocolError as error:
                self._bad_messages.log(logging.WARNING, transport.now_ns(), "a message that cannot be read: %s", error)
                self._metrics.protocol_errors.labels("worker").inc()
                continue
            if message is None:
                break
            messages.append(message)
        return messages

    def _watch(self, now_s: float) -> None:
        """Log the threads' stacks if this thread has no turn, or if a step does not end.

        If there is no turn for as long as a step may take, the kernel ends the process (SIGALRM, which has no handler).
        The scheduler does so sooner, unless it has started since and never heard of this worker.
        """
        if self._dealer is not None and now_s >= self._next_watch_s:
            self._next_watch_s = now_s + _WATCH_S
            faulthandler.dump_traceback_later(_MUTE_S)  # from a thread that does not need the interpreter
            signal.setitimer(signal.ITIMER_REAL, self._max_step_s)
        if self._core.is_step_long(self._compute.step_began_s, now_s):
            faulthandler.dump_traceback()


def main(config: WorkerConfig, joined: Callable[[], None]) -> int:
    """Run a worker until it is told to stop.

    Returns the exit status: 0 stopped, 70 stuck in a step, 71 device lost, 75 refused, 78 misconfigured, 1 bug.

    `joined` is called once the worker can do its work: its model is loaded and a scheduler has answered.

    Call it on the main thread. The process should end right after it.
    """
    if config.device != "cpu":
        pin(config.slot, visible_cuda_devices())  # before the threads that use it
    metrics = open_metrics(config.run_dir)
    return Server(config, metrics, lambda: _build(config, metrics), joined).run()


def _build(config: WorkerConfig, metrics: Metrics) -> Engine:
    if config.device != "cpu":
        threading.Thread(target=wake, args=(config.slot,), name="wake", daemon=True).start()
    # Imported here: torch takes seconds, in which the process already heeds signals.
    import torch

    from worker.engine.engine import Engine

    torch.set_num_threads(_num_threads(config))
    torch.set_num_interop_threads(1)
    return Engine(find_model(config.model), config, metrics)


def _num_threads(config: WorkerConfig) -> int:
    if config.threads != "auto":
        return int(config.threads)
    return max(1, usable_cpus() // config.workers)
