"""The thread that owns the device, around an engine whose steps end when the test says so."""

from __future__ import annotations

import atexit
import dataclasses
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.config import WorkerConfig
from common.errors import EX_DEVICE_LOST, EX_STUCK
from common.metrics import Metrics
from common.wire.messages import Batch, BatchFailed, ModelFacts, Result, StepTimes
from tests.fakes import FACTS, RunningScheduler
from tests.models import make_batch
from tests.scheduler.rig import make_request
from tests.scheduler.test_server import Gateway
from tests.timing import assert_in_time
from worker.batch.lazy import DeviceLost, Progress, Rows
from worker.process.compute import Broken, Compute, Outcome, Ready, _Step, _times_of
from worker.process.server import Server


class FakeRows:
    """Rows that are on the host once `arrived` is set."""

    def __init__(self, rows: Rows, failure: Exception | None) -> None:
        self._rows = rows
        self._failure = failure
        self.progress: Progress | None = None
        self.is_typical = True
        self.arrived = threading.Event()
        self.waited_for = threading.Event()

    def ready(self) -> bool:
        return self.arrived.is_set()

    def numpy(self) -> Rows:
        self.waited_for.set()
        assert self.arrived.wait(10)
        if self._failure is not None:
            raise self._failure
        return self._rows


class FakeEngine:
    """A device: `step` returns at once.

    A batch of token 0 fails to launch, one of token 1 fails on the device, one of token 2 has a row that is not finite,
    one of token 3 breaks the device for good.
    """

    def __init__(self, *, at_once: bool, chores: int = 0) -> None:
        self._at_once = at_once
        self._chores = chores
        self.tended = threading.Semaphore(0)
        self.chore_breaks = False
        self.steps: list[FakeRows] = []
        self.launched = threading.Semaphore(0)

    def hello(self) -> ModelFacts:
        return FACTS

    def step(self, batch: Batch) -> FakeRows:
        token = int(batch.token_ids[0])
        if token == 0:
            raise ValueError("this batch cannot be launched")
        failure = {1: RuntimeError("this step failed"), 3: RuntimeError("the device is gone")}.get(token)
        count = len(batch.lengths)
        finite = np.full(count, token != 2, dtype=np.uint8)
        rows = FakeRows(Rows(np.full((count, 2), token, dtype=np.uint8), finite), failure)
        if self._at_once:
            rows.arrived.set()
        self.steps.append(rows)
        self.launched.release()
        return rows

    @property
    def has_idle_work(self) -> bool:
        return self._chores > 0

    def idle_work(self) -> None:
        self._chores -= 1
        if self.chore_breaks:
            raise RuntimeError("the device is gone")
        self.tended.release()

    def check_device(self, error: Exception) -> None:
        if "gone" in str(error):
            raise DeviceLost(str(error))


class Harness:
    def __init__(self, engine: FakeEngine, metrics: Metrics) -> None:
        self.engine = engine
        self.compute = Compute(lambda: engine, metrics)  # type: ignore[arg-type, return-value]  # a fake
        self.compute.start()
        assert self.next() == Ready(FACTS)

    def next(self) -> Outcome:
        """The next outcome, which must be the only one so far."""
        assert select.select([self.compute.wakeup_fd], [], [], 10)[0]
        (outcome,) = self.compute.take_outcomes()
        return outcome

    def launch(self, token: int, batch_id: int) -> None:
        self.compute.submit(make_batch([[token]], batch_id=batch_id))
        assert self.engine.launched.acquire(timeout=10)


@pytest.fixture
def device(metrics: Metrics) -> Iterator[Harness]:
    harness = Harness(FakeEngine(at_once=False), metrics)
    yield harness
    for step in harness.engine.steps:
        step.arrived.set()
    harness.compute.stop(10)


@pytest.fixture
def host(metrics: Metrics) -> Iterator[Harness]:
    harness = Harness(FakeEngine(at_once=True), metrics)
    yield harness
    harness.compute.stop(10)


def test_the_second_step_is_launched_before_the_first_one_is_waited_for(metrics: Metrics) -> None:
    engine = FakeEngine(at_once=False)
    compute = Compute(lambda: engine, metrics)  # type: ignore[arg-type, return-value]  # a fake
    compute.submit(make_batch([[5]], batch_id=1))
    compute.submit(make_batch([[6]], batch_id=2))

    compute.start()

    assert engine.launched.acquire(timeout=10)
    assert engine.launched.acquire(timeout=10)
    assert engine.steps[0].waited_for.wait(10)
    assert not engine.steps[1].waited_for.is_set()
    for step in engine.steps:
        step.arrived.set()
    compute.stop(10)


def test_nothing_waits_for_a_chore_and_chores_are_done_when_nothing_else_is(metrics: Metrics) -> None:
    engine = FakeEngine(at_once=True, chores=2)
    compute = Compute(lambda: engine, metrics)  # type: ignore[arg-type, return-value]  # a fake
    compute.submit(make_batch([[5]], batch_id=1))

    compute.start()

    assert engine.tended.acquire(timeout=10)
    assert len(engine.steps) == 1
    assert engine.tended.acquire(timeout=10)
    assert compute.stop(10)


def test_a_device_that_is_lost_ends_the_threads_and_fails_no_batch(metrics: Metrics) -> None:
    engine = FakeEngine(at_once=True)
    compute = Compute(lambda: engine, metrics)  # type: ignore[arg-type, return-value]  # a fake
    compute.submit(make_batch([[3]], batch_id=1))

    compute.start()
    assert compute.stop(10)

    ready, broken = compute.take_outcomes()
    assert ready == Ready(FACTS)
    assert isinstance(broken, Broken)
    assert isinstance(broken.error, DeviceLost)


def test_a_device_that_is_found_lost_between_steps_is_named(metrics: Metrics) -> None:
    engine = FakeEngine(at_once=True, chores=1)
    engine.chore_breaks = True
    compute = Compute(lambda: engine, metrics)  # type: ignore[arg-type, return-value]  # a fake

    compute.start()

    assert select.select([compute.wakeup_fd], [], [], 10)[0]
    outcomes = compute.take_outcomes()
    while not isinstance(outcomes[-1], Broken):
        assert select.select([compute.wakeup_fd], [], [], 10)[0]
        outcomes += compute.take_outcomes()
    assert isinstance(outcomes[-1].error, DeviceLost)


def test_what_is_ready_at_once_is_handed_on_before_the_next_step(host: Harness) -> None:
    host.launch(5, batch_id=1)
    result = host.next()

    assert isinstance(result, Result)
    assert (result.epoch, result.batch_id) == (1, 1)
    assert result.rows.tolist() == [[5, 5]]
    assert len(result.nonfinite) == 0


def test_rows_that_are_not_finite_are_named(host: Harness, metrics: Metrics) -> None:
    before = metrics.nonfinite_rows._value.get()
    host.launch(2, batch_id=1)
    result = host.next()

    assert isinstance(result, Result)
    assert result.nonfinite.tolist() == [0]
    assert metrics.nonfinite_rows._value.get() == before + 1


def test_a_result_says_how_long_its_batch_has_waited_and_whether_the_next_will_take_as_long(device: Harness) -> None:
    device.launch(5, batch_id=1)
    device.launch(6, batch_id=2)
    first, second = device.engine.steps
    second.is_typical = False
    time.sleep(0.05)
    first.arrived.set()
    result = device.next()
    assert isinstance(result, Result)
    assert (result.is_typical, result.waited_us + result.step_us >= 50_000) == (True, True)
    alone_us = result.waited_us

    second.arrived.set()
    result = device.next()
    assert isinstance(result, Result)
    assert not result.is_typical
    assert result.waited_us >= 50_000 - alone_us  # until the first one had ended


def test_a_step_that_raises_fails_its_batch_and_the_next_one_runs(host: Harness, metrics: Metrics) -> None:
    before = metrics.step_failures._value.get()
    host.compute.submit(make_batch([[0]], batch_id=1))
    assert host.next() == BatchFailed(1, 1, "ValueError: this batch cannot be launched")

    host.launch(5, batch_id=2)

    assert isinstance(host.next(), Result)
    assert metrics.step_failures._value.get() == before + 1


def test_a_failure_that_shows_only_on_the_device_fails_its_batch(host: Harness) -> None:
    host.launch(1, batch_id=7)

    assert host.next() == BatchFailed(1, 7, "RuntimeError: this step failed")


def test_batches_that_have_not_begun_can_be_dropped(metrics: Metrics) -> None:
    may_build = threading.Event()
    engine = FakeEngine(at_once=True)

    def build() -> FakeEngine:
        assert may_build.wait(10)
        return engine

    compute = Compute(build, metrics)  # type: ignore[arg-type]  # a fake
    compute.start()
    compute.submit(make_batch([[5]], batch_id=1))
    compute.drop_queued()
    compute.submit(make_batch([[6]], batch_id=2))

    may_build.set()
    assert compute.stop(10)

    _, result = compute.take_outcomes()
    assert isinstance(result, Result)
    assert result.batch_id == 2
    assert len(engine.steps) == 1


@pytest.mark.parametrize("known", [True, False], ids=["progress", "no progress"])
def test_of_a_batch_that_is_followed_the_times_come_before_the_result(device: Harness, known: bool) -> None:
    batch = dataclasses.replace(make_batch([[5]]), times_ns=np.array([time.monotonic_ns()]))
    device.compute.submit(batch)
    assert device.engine.launched.acquire(timeout=10)
    (step,) = device.engine.steps
    assert step.waited_for.wait(10)
    if known:
        step.progress = Progress(computed_ns=time.monotonic_ns())
    step.arrived.set()

    outcomes: list[Outcome] = []
    while len(outcomes) < 2:
        assert select.select([device.compute.wakeup_fd], [], [], 10)[0]
        outcomes += device.compute.take_outcomes()

    times, result = outcomes
    assert isinstance(times, StepTimes)
    assert isinstance(result, Result)
    received, taken, staged, launched, began, computed, copied, answered = times.times_ns.tolist()
    assert batch.times_ns[0] <= received == taken == staged <= launched == began <= computed <= copied == answered
    assert (computed < copied) == known


def test_a_step_that_has_run_before_its_launch_returns_was_launched_when_it_was_staged() -> None:
    batch = dataclasses.replace(make_batch([[5]]), times_ns=np.array([1]))
    step = _Step(batch, arrived_ns=5, launched_ns=10, returned_ns=40)

    times = _times_of(step, Progress(staged_ns=15, computed_ns=30), began_ns=10, copied_ns=50)

    assert times.times_ns.tolist() == [10, 10, 15, 15, 15, 30, 50, 50]


def test_a_step_that_was_launched_behind_another_began_when_that_one_ended() -> None:
    batch = dataclasses.replace(make_batch([[5]]), times_ns=np.array([1]))
    step = _Step(batch, arrived_ns=5, launched_ns=10, returned_ns=20)

    times = _times_of(step, Progress(staged_ns=15, computed_ns=90), began_ns=60, copied_ns=95)

    assert times.times_ns.tolist() == [10, 10, 15, 20, 60, 90, 95, 95]


def test_when_the_oldest_step_began_is_known_while_one_runs(device: Harness) -> None:
    assert device.compute.step_began_s is None
    device.launch(5, batch_id=1)
    assert device.engine.steps[0].waited_for.wait(10)
    assert device.compute.step_began_s is not None
    device.engine.steps[0].arrived.set()
    device.next()
    assert device.compute.stop(10)
    assert device.compute.step_began_s is None


def test_an_engine_that_cannot_be_built_is_reported(metrics: Metrics) -> None:
    def build() -> FakeEngine:
        raise LookupError("no such model")

    compute = Compute(build, metrics)  # type: ignore[arg-type]  # a fake
    compute.start()

    assert select.select([compute.wakeup_fd], [], [], 10)[0]
    (outcome,) = compute.take_outcomes()
    assert isinstance(outcome, Broken)
    assert str(outcome.error) == "no such model"


@pytest.fixture
def own_signal_handlers() -> Iterator[None]:
    """A server on this thread replaces them, and may arrange for the process's end: this process goes on."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    atexit.unregister(os._exit)


def serve_one(run_dir: str, metrics: Metrics, engine: FakeEngine, token: int, max_step_s: float) -> int:
    """The exit status of a worker that gets one request."""
    config = WorkerConfig(run_dir=run_dir)
    server = Server(config, metrics, lambda: engine, lambda: None, max_step_s=max_step_s)  # type: ignore[arg-type, return-value]

    def send_one_request() -> None:
        gateway = Gateway(run_dir)
        gateway.wait_for_workers(1)
        gateway.dealer.send(make_request(1, [token]))
        engine.launched.acquire(timeout=10)
        gateway.close()

    client = threading.Thread(target=send_one_request)
    client.start()
    try:
        return server.run()
    finally:
        client.join()
        for step in engine.steps:
            step.arrived.set()


@pytest.mark.slow
@pytest.mark.usefixtures("own_signal_handlers")
def test_a_step_that_does_not_end_ends_the_worker_and_the_log_says_where_it_is_well_before(
    run_dir: str,
    start_scheduler: Callable[[], RunningScheduler],
    metrics: Metrics,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    start_scheduler()

    assert serve_one(run_dir, metrics, FakeEngine(at_once=False), token=5, max_step_s=0.9) == EX_STUCK

    told = [record for record in caplog.records if "a step has not ended" in record.getMessage()]
    assert len(told) == 2
    assert capfd.readouterr().err.count("in _collect_all") == 2
    between_s = told[1].created - told[0].created
    assert between_s > 0.3
    assert_in_time(between_s, 0.9)


@pytest.mark.usefixtures("own_signal_handlers")
def test_a_lost_device_ends_the_worker_with_its_own_status(
    run_dir: str, start_scheduler: Callable[[], RunningScheduler], metrics: Metrics
) -> None:
    start_scheduler()

    assert serve_one(run_dir, metrics, FakeEngine(at_once=True), token=3, max_step_s=60.0) == EX_DEVICE_LOST
