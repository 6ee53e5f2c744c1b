"""The real worker process and a tiny model, with the test in the scheduler's place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from common.metrics import render
from common.run_dir import RunDir
from common.wire.codec import Message
from common.wire.messages import PROTOCOL_VERSION, BatchFailed, Beat, Goodbye, Hello, Ping, Refuse, Result
from common.wire.transport import PeerGone, Router
from tests.models import bert_config, bert_tensors, edit_json, make_batch, random_sequences, write_bert
from tests.reference import BertReference
from tests.timing import assert_in_time
from worker.process.profiling import NUM_STEPS

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0  # torch is imported by each process, on a machine that may be busy


class WorkerProcess:
    """A worker and the scheduler's end of its connection."""

    def __init__(self, run_dir: str, model: Path | str, *flags: str) -> None:
        RunDir(run_dir).prepare()
        self.run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = Router(self._context, RunDir(run_dir).address("workers"))
        self.peer = b""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEDGEROW_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker", "--run-dir", run_dir, "--model", str(model), "--device", "cpu", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"OMP_WAIT_POLICY": "passive"},
        )

    def receive(self, wanted: Callable[[Message], bool]) -> Message:
        """The next message that is wanted; others are passed over."""
        end = time.monotonic() + PATIENCE_S
        while (left := end - time.monotonic()) > 0:
            if self.router.socket.poll(min(left, 0.25) * 1000):
                received = self.router.receive()
                assert received is not None
                self.peer, message = received
                if wanted(message):
                    return message
            elif self.process.poll() is not None:
                break
        raise AssertionError(f"nothing that was wanted came; status {self.process.poll()}")

    def answers(self, within_s: float) -> list[Result | BatchFailed]:
        """The next answer to a batch; none where it does not come so soon."""
        end = time.monotonic() + within_s
        while (left := end - time.monotonic()) > 0:
            if self.router.socket.poll(left * 1000) and (received := self.router.receive()) is not None:
                self.peer, message = received
                if isinstance(message, Result | BatchFailed):
                    return [message]
        return []

    def hello(self) -> Hello:
        message = self.receive(lambda message: isinstance(message, Hello))
        assert isinstance(message, Hello)
        return message

    def result(self) -> Result:
        message = self.receive(lambda message: isinstance(message, Result | BatchFailed))
        assert isinstance(message, Result), message
        return message

    def num_protocol_errors(self) -> int:
        """How many messages this worker, and any before it in this run folder, could do nothing with."""
        metrics = render(self.run_dir)
        found = re.search(rb'^hedgerow_protocol_errors_total\{process="worker"\} (\d+)', metrics, re.MULTILINE)
        return 0 if found is None else int(found[1])

    def send(self, message: Message) -> None:
        self.router.send(self.peer, message)

    def ping(self, epoch: int) -> None:
        """Begin an epoch, and wait until the worker has entered it.

        While nobody spoke to it, it has come back under new routing ids: the last of them counts.
        """
        while (received := self.router.receive()) is not None:
            self.peer = received[0]
        while True:
            try:
                self.send(Ping(epoch, 1, 1, progressing=True))
                break
            except PeerGone:
                self.hello()
        self.receive(lambda message: isinstance(message, Beat) and message.epoch == epoch)

    def speak(self, epoch: int) -> None:
        """As a scheduler does: from one that says nothing for two seconds a worker turns away, without its batches.

        One that has ended meanwhile may have said something before.
        """
        with contextlib.suppress(PeerGone):
            self.send(Ping(epoch, 1, 1, progressing=True))

    def end(self) -> tuple[int, str]:
        """The exit status and the log, once the process has ended."""
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.router.close()
        self._context.term()


@pytest.fixture
def start(run_dir: str) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start_one(model: Path | str, *flags: str) -> WorkerProcess:
        worker = WorkerProcess(run_dir, model, *flags)
        started.append(worker)
        return worker

    yield start_one
    for worker in started:
        worker.close()


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose step of 4,096 tokens takes a second or so."""
    config = bert_config(num_hidden_layers=24, max_position_embeddings=4096)
    return write_bert(tmp_path_factory.mktemp("slow"), config=config, tensors=bert_tensors(config))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One process for all tests that leave it running; each begins an epoch of its own."""
    tensors = bert_tensors(bert_config())
    tensors["embeddings.word_embeddings.weight"][5] = 3e38
    folder = write_bert(tmp_path_factory.mktemp("shared") / "tiny", tensors=tensors)
    worker = WorkerProcess(str(tmp_path_factory.mktemp("run")), folder)
    worker.hello()
    yield worker
    worker.close()


@pytest.fixture
def epoch(shared: WorkerProcess, request: pytest.FixtureRequest) -> int:
    """A fresh epoch that the shared worker has entered."""
    number = 1 + zlib.crc32(request.node.name.encode())
    shared.ping(number)
    return number


def test_a_worker_says_hello_with_the_facts_of_its_model(
    start: Callable[..., WorkerProcess], tiny_folder: Path
) -> None:
    worker = start(tiny_folder, "--slot", "3")

    hello = worker.hello()

    assert hello.protocol_version == PROTOCOL_VERSION
    assert hello.name == "worker-3"
    assert hello.pid == worker.process.pid
    assert (hello.facts.name, hello.facts.dimensions, hello.facts.max_tokens) == ("tiny", 32, 48)


def test_a_batch_is_answered_with_its_rows(shared: WorkerProcess, epoch: int, tiny_folder: Path) -> None:
    sequences = random_sequences([7, 1, 48, 7], seed=3)
    sequences = [[token if token != 5 else 6 for token in sequence] for sequence in sequences]

    shared.send(make_batch(sequences, epoch=epoch, batch_id=41))
    result = shared.result()

    assert (result.epoch, result.batch_id) == (epoch, 41)
    assert len(result.nonfinite) == 0
    assert 0 < result.step_us < 10_000_000
    reference = BertReference(tiny_folder)
    np.testing.assert_allclose(
        result.rows.view(np.float32), np.stack([reference.embed(s) for s in sequences]), atol=1e-5
    )


def test_two_batches_are_answered_in_order(shared: WorkerProcess, epoch: int) -> None:
    shared.send(make_batch([[1] * 48] * 8, epoch=epoch, batch_id=1))
    shared.send(make_batch([[2]], epoch=epoch, batch_id=2))

    assert [shared.result().batch_id, shared.result().batch_id] == [1, 2]


def test_a_worker_that_is_asked_traces_its_next_steps_once(shared: WorkerProcess, epoch: int) -> None:
    path = Path(shared.run_dir, "worker-0.trace.json")
    batch_ids = iter(range(1, 200))

    def run_batch() -> None:
        shared.send(make_batch([[1, 2, 3]], epoch=epoch, batch_id=next(batch_ids)))
        shared.result()

    for _ in range(NUM_STEPS + 1):
        run_batch()
    assert not path.exists()

    shared.process.send_signal(signal.SIGUSR1)
    while not path.exists():
        run_batch()
    run_batch()  # which begins when the trace is written

    trace = json.loads(path.read_text())
    operators = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert len([name for name in operators if name.startswith("aten::")]) >= NUM_STEPS

    path.unlink()
    for _ in range(NUM_STEPS + 1):
        run_batch()
    assert not path.exists()


def test_a_scheduler_that_counts_from_nothing_is_answered_what_it_sent_last(shared: WorkerProcess, epoch: int) -> None:
    """As one does that has lost this worker and taken it in again, over a connection that broke and came back."""
    for batch_id in range(1, 21):
        shared.send(make_batch([[1] * 48] * 20, epoch=epoch, batch_id=batch_id))

    answers = [shared.result().batch_id]
    while answers[-1] != 20:
        answers.append(shared.result().batch_id)

    assert answers[-2:] == [19, 20]
    assert answers == sorted(answers)


def test_rows_that_are_not_finite_are_named(shared: WorkerProcess, epoch: int) -> None:
    shared.send(make_batch([[1, 2], [3, 5], [4]], epoch=epoch, batch_id=1))

    result = shared.result()

    assert result.nonfinite.tolist() == [1]
    assert np.isfinite(result.rows[[0, 2]]).all()


def test_a_batch_that_the_model_cannot_run_fails_alone(shared: WorkerProcess, epoch: int) -> None:
    shared.send(make_batch([[1], [64]], epoch=epoch, batch_id=1))
    failed = shared.receive(lambda message: isinstance(message, Result | BatchFailed))
    shared.send(make_batch([[1], [63]], epoch=epoch, batch_id=2))

    assert failed == BatchFailed(epoch, 1, "BadBatch: token id 64, but the model has 64 tokens")
    assert shared.result().batch_id == 2


def test_a_message_that_cannot_be_read_is_counted_and_the_next_one_is_served(shared: WorkerProcess, epoch: int) -> None:
    shared.router.socket.send_multipart([shared.peer, b"\xc1garbage"])
    shared.send(Goodbye("not for a worker"))
    shared.send(make_batch([[1]], epoch=epoch, batch_id=1))

    assert shared.result().batch_id == 1
    assert b'hedgerow_protocol_errors_total{process="worker"}' in render(shared.run_dir)


def test_a_new_epoch_is_answered_with_hello_and_batches_of_the_old_one_are_not_run(
    shared: WorkerProcess, epoch: int
) -> None:
    shared.send(Ping(epoch + 1, 1, 1, progressing=True))
    hello = shared.hello()
    shared.send(make_batch([[1]], epoch=epoch, batch_id=1))
    shared.send(make_batch([[1]], epoch=epoch + 1, batch_id=1))

    result = shared.result()

    assert hello.pid == shared.process.pid
    assert result.epoch == epoch + 1
    beat = shared.receive(lambda message: isinstance(message, Beat | Result | BatchFailed))
    assert beat == Beat(epoch + 1, 0)


@pytest.mark.thorough
def test_beats_come_while_a_step_runs(start: Callable[..., WorkerProcess], slow_folder: Path) -> None:
    worker = start(slow_folder, "--threads", "1")
    worker.hello()
    worker.ping(1)
    worker.send(make_batch([[1] * 4096], epoch=1, batch_id=1))

    began = time.monotonic()
    beats = []
    while not isinstance(message := worker.receive(lambda message: isinstance(message, Beat | Result)), Result):
        beats.append(message)
        worker.speak(1)

    assert time.monotonic() - began > 0.3
    assert Beat(1, 1) in beats


def test_a_worker_that_hears_nothing_introduces_itself_again(shared: WorkerProcess, epoch: int) -> None:
    began = time.monotonic()

    shared.hello()

    taken_s = time.monotonic() - began
    assert taken_s > 0.4
    assert_in_time(taken_s, 5.0)


def test_a_batch_that_is_sent_twice_is_taken_once(shared: WorkerProcess, epoch: int) -> None:
    batch = make_batch([[1] * 48] * 20, epoch=epoch, batch_id=1)
    errors_before = shared.num_protocol_errors()
    shared.send(batch)
    shared.send(batch)
    shared.send(make_batch([[1]], epoch=epoch, batch_id=2))

    assert [shared.result().batch_id, shared.result().batch_id] == [1, 2]
    assert shared.num_protocol_errors() - errors_before == 1  # the second was not taken


def test_a_scheduler_that_comes_back_hears_of_the_worker_at_once(shared: WorkerProcess, epoch: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = RunDir(shared.run_dir).address("workers")
    shared.router.close()
    time.sleep(0.6)  # as long as a scheduler takes to start
    shared.router = Router(context, endpoint)
    began = time.monotonic()
    try:
        assert shared.hello().pid == shared.process.pid
        assert_in_time(time.monotonic() - began, 1.2)
        shared.ping(epoch + 1)
        shared.send(make_batch([[1]], epoch=epoch + 1, batch_id=1))

        assert shared.result().epoch == epoch + 1
    finally:
        shared.router.close()
        context.term()
        shared.router = Router(shared._context, endpoint)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_batch_in_hand_finish_and_no_other_begin(
    start: Callable[..., WorkerProcess], slow_folder: Path, number: signal.Signals
) -> None:
    worker = start(slow_folder, "--threads", "1", "--drain-timeout-s", "300")  # a busy machine takes its time
    worker.hello()
    worker.ping(1)
    worker.send(make_batch([[1] * 4096] * 2, epoch=1, batch_id=1))
    worker.receive(lambda message: message == Beat(1, 1))

    worker.process.send_signal(number)
    worker.receive(lambda message: message == Beat(1, 2))  # it has heard the signal: as if it held all that it may
    worker.send(make_batch([[1]], epoch=1, batch_id=2))

    while not (answers := worker.answers(within_s=0.5)):
        worker.speak(1)
    assert [answer.batch_id for answer in answers] == [1]
    last = worker.receive(lambda message: not isinstance(message, Beat))
    assert last == Goodbye("the worker was told to stop")
    assert worker.end()[0] == 0


@pytest.mark.thorough
def test_a_step_that_outlasts_the_drain_timeout_is_left(start: Callable[..., WorkerProcess], slow_folder: Path) -> None:
    worker = start(slow_folder, "--threads", "1", "--drain-timeout-s", "1")
    worker.hello()
    worker.ping(1)
    worker.send(make_batch([[1] * 4096] * 40, epoch=1, batch_id=1))
    worker.receive(lambda message: message == Beat(1, 1))

    worker.process.send_signal(signal.SIGTERM)
    worker.receive(lambda message: isinstance(message, Goodbye))

    status, log = worker.end()
    assert status == 0
    assert "1 batches are not finished after 1 s" in log


@pytest.mark.thorough
def test_a_second_signal_ends_the_worker_at_once(start: Callable[..., WorkerProcess], slow_folder: Path) -> None:
    worker = start(slow_folder, "--threads", "1")
    worker.hello()
    worker.ping(1)
    worker.send(make_batch([[1] * 4096] * 40, epoch=1, batch_id=1))
    worker.receive(lambda message: message == Beat(1, 1))

    worker.process.send_signal(signal.SIGTERM)
    # It takes no batch any more, and none that is sent now counts as lost: its beats tell of all that it may hold.
    worker.receive(lambda message: message == Beat(1, 2))
    assert worker.process.poll() is None
    worker.process.send_signal(signal.SIGTERM)
    signalled = time.monotonic()

    assert worker.end()[0] == 0
    assert time.monotonic() - signalled < 5


def test_a_signal_while_the_model_loads_ends_the_worker_at_once(
    start: Callable[..., WorkerProcess], tiny_folder: Path
) -> None:
    worker = start(tiny_folder)
    maps = Path(f"/proc/{worker.process.pid}/maps")
    while "libtorch" not in maps.read_text():
        assert worker.process.poll() is None

    worker.process.send_signal(signal.SIGTERM)

    status, log = worker.end()
    assert status == 0
    assert "stopping at once" in log


_HANGS = """
import ctypes, sys
from common.config import WorkerConfig
from common.metrics import Metrics
from tests.fakes import FACTS
from worker.process.server import Server

class Engine:
    has_idle_work = False
    def hello(self):
        return FACTS
    def step(self, batch):
        ctypes.PyDLL(None).sleep(60)  # a PyDLL's functions are called with the GIL held

Server(WorkerConfig(run_dir=sys.argv[1]), Metrics(), Engine, lambda: None, max_step_s=1.0).run()
"""


@pytest.mark.thorough
def test_a_process_whose_python_hangs_is_ended_though_no_scheduler_kills_it(run_dir: str) -> None:
    RunDir(run_dir).prepare()
    with zmq.Context() as context, subprocess.Popen([sys.executable, "-c", _HANGS, run_dir]) as process:
        router = Router(context, RunDir(run_dir).address("workers"))
        assert router.socket.poll(PATIENCE_S * 1000)
        received = router.receive()
        assert received is not None
        router.send(received[0], Ping(1, 1, 1, progressing=True))
        router.send(received[0], make_batch([[1]], epoch=1, batch_id=1))
        try:
            assert process.wait(PATIENCE_S) == -signal.SIGALRM
        finally:
            process.kill()
            router.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("code", "status"), [("duplicate_name", 75), ("model_mismatch", 78), ("version", 78)])
def test_a_refused_worker_exits_with_a_status_that_says_why(
    start: Callable[..., WorkerProcess], tiny_folder: Path, code: str, status: int
) -> None:
    worker = start(tiny_folder)
    worker.hello()

    worker.send(Refuse(code, "another one is here"))

    ended, log = worker.end()
    assert ended == status
    assert f"refuses this worker ({code}): another one is here" in log


def test_a_bad_model_is_one_clear_line_and_status_78(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    edit_json(folder / "config.json", hidden_act="mish")

    status, log = start(folder).end()

    assert status == 78
    assert [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line] == [
        line for line in log.splitlines() if f"{folder}/config.json: hidden_act: 'mish' is not supported" in line
    ]


@pytest.mark.thorough
def test_a_model_that_is_not_there_is_status_78(start: Callable[..., WorkerProcess]) -> None:
    status, log = start("no-such-model").end()

    assert status == 78
    assert "No model 'no-such-model' is installed" in log
    assert "Traceback" not in log
