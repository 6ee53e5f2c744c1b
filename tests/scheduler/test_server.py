"""The scheduler's loop on real sockets: garbage, deaths, a stolen socket file, a second scheduler."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType

import msgpack
import numpy as np
import pytest
import zmq

from common.config import SchedulerConfig
from common.metrics import Metrics
from common.run_dir import RunDir
from common.wire.codec import Frame, Message, encode
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Failure,
    Goodbye,
    Hello,
    Join,
    Ping,
    Refuse,
    Reply,
    Result,
    Welcome,
)
from common.wire.packing import Replies, Requests
from common.wire.transport import Dealer, now_ns
from scheduler.actions import ToWorker
from scheduler.server import Server
from scheduler.sides import Timer
from tests.fakes import FACTS, FakeWorker, RunningScheduler, oracle_result, oracle_vector
from tests.scheduler.rig import make_request
from tests.timing import assert_in_time

StartWorker = Callable[..., FakeWorker]


class Gateway:
    """A gateway's socket, by hand."""

    def __init__(self, run_dir: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = Dealer(self.context, RunDir(run_dir).address("gateways"), "g")
        assert self.dealer.socket.poll(5000, zmq.POLLOUT)
        self.dealer.send(Join(PROTOCOL_VERSION, "gateway-0", os.getpid()))

    def wait_for(self, kind: type[Message] | UnionType) -> Message:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if self.dealer.socket.poll(50):
                message = self.dealer.receive()
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind} came")

    def wait_for_workers(self, count: int) -> None:
        while True:
            status = self.wait_for(Ping)
            assert isinstance(status, Ping)
            if status.workers_ready == count:
                return

    def close(self) -> None:
        self.dealer.close()
        self.context.term()


@pytest.fixture
def gateway(run_dir: str, start_scheduler: Callable[[], RunningScheduler]) -> Iterator[Gateway]:
    start_scheduler()
    gateway = Gateway(run_dir)
    gateway.wait_for(Welcome)
    yield gateway
    gateway.close()


def test_garbage_is_counted_and_everybody_else_is_served(
    run_dir: str, start_worker: StartWorker, gateway: Gateway, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    begun_s = time.monotonic()
    start_worker()
    counter = metrics.protocol_errors.labels("scheduler")
    before = counter._value.get()
    rng = random.Random(1)
    template = encode(make_request(1, [1, 2, 3]))
    for side in ("gateways", "workers"):
        stranger = Dealer(gateway.context, RunDir(run_dir).address(side), "x")
        assert stranger.socket.poll(5000, zmq.POLLOUT)
        for _ in range(300):
            frames = [bytearray(frame) for frame in template][: rng.randint(1, 3)]
            frames[0][rng.randrange(4)] ^= 0xFF
            stranger.socket.send_multipart(frames)
        stranger.close(linger_ms=1000)
    gateway.wait_for_workers(1)
    gateway.dealer.send(make_request(7, [1, 2, 3]))
    reply = gateway.wait_for(Reply)
    assert isinstance(reply, Reply)
    assert reply.request_id == 7
    took_s = time.monotonic() - begun_s
    assert counter._value.get() - before > 300
    lines = [record.getMessage() for record in caplog.records if "a message was dropped" in record.getMessage()]
    assert 2 <= len(lines) <= 2 * (1 + took_s)  # one a second of each side


def test_a_worker_that_took_its_leave_is_not_lost_where_a_message_to_it_fails_before_its_last_words_are_read(
    run_dir: str, metrics: Metrics
) -> None:
    RunDir(run_dir).prepare()
    server = Server(SchedulerConfig(run_dir=run_dir), metrics)
    losses = metrics.worker_losses.labels("disconnected")._value.get()
    gateway = Gateway(run_dir)
    worker = Dealer(gateway.context, RunDir(run_dir).address("workers"), "w")
    assert worker.socket.poll(5000, zmq.POLLOUT)

    def turn_until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            server.turn(dict(server._poller.poll(10)))

    worker.send(Hello(PROTOCOL_VERSION, "worker-0", os.getpid(), FACTS))
    turn_until(lambda: server._workers._pidfds and server._gateways._pidfds)
    gateway.dealer.send(make_request(7, [1, 2, 3]))
    turn_until(lambda: worker.socket.poll(0))
    while not isinstance(batch := worker.receive(), Batch):
        turn_until(lambda: worker.socket.poll(0))
    (peer,) = server._workers._pidfds

    worker.send(oracle_result(batch))
    worker.send(Goodbye("told to stop"))
    worker.close(linger_ms=1000)
    end = time.monotonic() + 10
    while not server._workers.gone and time.monotonic() < end:
        server._perform([ToWorker(peer, Ping(batch.epoch, 1, 1, True))])  # not a turn: nothing is read meanwhile
    server.turn(dict(server._poller.poll(0)))

    reply = gateway.wait_for(Reply)
    assert isinstance(reply, Reply)
    assert reply.request_id == 7
    assert server._scheduler.on_worker_lost(peer, "exited", now_ns()) == []
    assert metrics.worker_losses.labels("disconnected")._value.get() == losses
    server.close()
    gateway.close()


class Inbox:
    """Stands for a side's Router: what waits on it is known, which of a real socket nobody can say."""

    def __init__(self) -> None:
        self.socket = object()
        self.waiting: deque[tuple[bytes, Message]] = deque()
        self.sent: list[Message] = []

    def receive(self) -> tuple[bytes, Message] | None:
        return self.waiting.popleft() if self.waiting else None

    def send(self, peer: bytes, message: Message) -> None:
        self.sent.append(message)

    def ensure_bound(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Turns:
    """A scheduler whose turns are taken by hand: a gateway and a worker have joined."""

    def __init__(self, run_dir: str, metrics: Metrics) -> None:
        RunDir(run_dir).prepare()
        self.server = Server(SchedulerConfig(run_dir=run_dir), metrics)
        self._gateways, self._workers = Inbox(), Inbox()
        for side, inbox in ((self.server._gateways, self._gateways), (self.server._workers, self._workers)):
            side.router.close()
            side.router = inbox  # type: ignore[assignment]  # what the loop asks of one
        self._gateways.waiting.append((b"g", Join(PROTOCOL_VERSION, "gateway-0", os.getpid())))
        facts = replace(FACTS, max_batch_tokens=1000)
        self._workers.waiting.append((b"w", Hello(PROTOCOL_VERSION, "worker-0", os.getpid(), facts)))
        self.take()

    def take(self, *messages: Message) -> list[list[int]]:
        """Take a turn while these wait of the gateway; the token ids of each batch that is sent."""
        self._gateways.waiting.extend((b"g", message) for message in messages)
        self._workers.sent.clear()
        self.server.turn({self._gateways.socket: zmq.POLLIN, self._workers.socket: zmq.POLLIN})
        return [message.token_ids.tolist() for message in self._workers.sent if isinstance(message, Batch)]

    @property
    def num_waiting(self) -> int:
        return len(self._gateways.waiting)


@pytest.fixture
def turns(run_dir: str, metrics: Metrics) -> Iterator[Turns]:
    turns = Turns(run_dir, metrics)
    yield turns
    turns.server.close()


def test_all_requests_of_a_message_run_in_one_batch(run_dir: str, start_worker: StartWorker, gateway: Gateway) -> None:
    worker = start_worker()
    gateway.wait_for_workers(1)
    gateway.dealer.send(Requests.of([make_request(number, [number]) for number in (1, 2, 3)]))
    replies = gateway.wait_for(Replies)
    assert isinstance(replies, Replies)
    rows = {reply.request_id: reply.rows.view(np.float32)[0].tolist() for reply in replies.each()}
    assert rows == {number: oracle_vector([number]).tolist() for number in (1, 2, 3)}
    assert [batch.token_ids.tolist() for batch in worker.batches] == [[1, 2, 3]]


def test_what_waits_at_one_moment_is_all_heard_before_a_batch_is_formed(turns: Turns) -> None:
    together = Requests.of([make_request(number, [number]) for number in (2, 3)])
    assert turns.take(make_request(1, [1]), together, make_request(4, [4])) == [[1, 2, 3, 4]]


@pytest.mark.parametrize("size", [1, 2])
def test_a_free_worker_does_not_wait_until_more_has_been_heard_than_takes_a_moment(turns: Turns, size: int) -> None:
    requests = [make_request(number, [number]) for number in range(1, 81)]
    together = [Requests.of(requests[first : first + size]) for first in range(0, 80, size)]
    first, second = turns.take(*(requests if size == 1 else together))
    assert first == list(range(1, 65))
    assert second == list(range(65, 81))


def test_a_turn_ends_after_as_many_requests_as_messages_however_they_come(turns: Turns) -> None:
    messages = [Requests.of([make_request(64 * message + number, [1]) for number in range(64)]) for message in range(6)]
    turns.take(*messages)
    assert turns.num_waiting == 2


def test_a_workers_death_is_noticed_at_once(run_dir: str, start_worker: StartWorker, gateway: Gateway) -> None:
    worker = start_worker()
    gateway.wait_for_workers(1)
    killed_at = time.monotonic()
    worker.process.kill()
    gateway.wait_for_workers(0)
    assert_in_time(time.monotonic() - killed_at, 1.0)  # silence alone would take two seconds


@pytest.mark.slow
def test_an_input_whose_third_worker_has_hung_up_is_in_quarantine_when_its_process_ends(
    run_dir: str, start_worker: StartWorker, gateway: Gateway
) -> None:
    workers = [start_worker(f"worker-{number}", answer=lambda _: None) for number in range(3)]
    gateway.wait_for_workers(3)
    gateway.dealer.send(make_request(7, [666]))
    for left in (2, 1, 0):
        end = time.monotonic() + 5
        while not (holders := [worker for worker in workers if worker.batches]):
            assert time.monotonic() < end
            time.sleep(0.005)
        (holder,) = holders
        workers.remove(holder)
        holder.hang_up()
        gateway.wait_for_workers(left)
    status = gateway.wait_for(Ping | Failure)
    assert isinstance(status, Ping)  # its process lives

    holder.process.kill()

    failure = gateway.wait_for(Failure)
    assert isinstance(failure, Failure)
    assert (failure.request_id, failure.code) == (7, "input_quarantined")


LIES: dict[str, Callable[[Result], Message | list[Frame]]] = {
    "a row is missing": lambda result: replace(result, rows=result.rows[:-1]),
    "a row too many": lambda result: replace(result, rows=np.vstack([result.rows, result.rows[:1]])),
    "wrong dimensions": lambda result: replace(result, rows=np.ascontiguousarray(result.rows[:, :-4])),
    "another batch": lambda result: replace(result, batch_id=result.batch_id + 1000),
    "another epoch": lambda result: replace(result, epoch=result.epoch + 1),
    "a buffer that is cut": lambda result: [*encode(result)[:-1], bytes(encode(result)[-1])[:-1]],
    "a row that there is not is not finite": lambda result: replace(result, nonfinite=np.array([2], dtype=np.int32)),
    "pieces of another batch": lambda result: replace(result, pieces=np.array([2, 2], dtype=np.int32)),
    "no room for what there is not": lambda result: BatchFailed(result.epoch, result.batch_id, "no memory", 2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_lies_is_recycled_and_its_batch_runs_elsewhere(
    run_dir: str, start_worker: StartWorker, gateway: Gateway, lie: str
) -> None:
    liar = start_worker("worker-0", answer=lambda batch: LIES[lie](oracle_result(batch)))
    gateway.wait_for_workers(1)
    gateway.dealer.send(make_request(7, [1, 2], [3]))
    assert liar.process.wait(10) == -signal.SIGKILL
    start_worker("worker-1")

    reply = gateway.wait_for(Reply)

    assert isinstance(reply, Reply)
    assert (reply.request_id, reply.first_row) == (7, 0)
    assert reply.rows.view(np.float32).tolist() == [oracle_vector([1, 2]).tolist(), oracle_vector([3]).tolist()]


def test_a_worker_whose_place_is_taken_is_refused_and_the_first_one_goes_on(
    run_dir: str, start_worker: StartWorker, gateway: Gateway
) -> None:
    first = start_worker()
    gateway.wait_for_workers(1)
    rival = start_worker()
    end = time.monotonic() + 5
    while not rival.refusals:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert rival.refusals[0].code == "duplicate_name"
    rival.close()
    gateway.dealer.send(make_request(7, [1, 2, 3]))
    assert gateway.wait_for(Reply).request_id == 7
    assert first.refusals == []


@pytest.mark.slow
def test_a_worker_takes_the_place_of_one_that_has_fallen_silent_within_three_seconds(
    run_dir: str, start_worker: StartWorker, gateway: Gateway
) -> None:
    silent = start_worker()
    gateway.wait_for_workers(1)
    silent.mute()
    begun_s = time.monotonic()
    while True:  # as a supervisor would: each that is refused ends and is started again
        rival = start_worker()
        while not (rival.refusals or rival.welcomed):
            time.sleep(0.01)
        if rival.welcomed:
            break
        rival.close()
    assert_in_time(time.monotonic() - begun_s, 3)
    assert silent.process.wait(5) == -signal.SIGKILL
    gateway.dealer.send(make_request(7, [1, 2, 3]))
    assert gateway.wait_for(Reply).request_id == 7


@pytest.mark.slow
def test_a_peer_that_comes_back_as_somebody_new_again_and_again_takes_no_more_descriptors(gateway: Gateway) -> None:
    def num_pidfds() -> int:
        return sum("pidfd" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())

    for _ in range(20):
        gateway.dealer.reconnect()
        assert gateway.dealer.socket.poll(5000, zmq.POLLOUT)
        gateway.dealer.send(Join(PROTOCOL_VERSION, "gateway-0", os.getpid()))
        gateway.wait_for(Welcome)
    end = time.monotonic() + 5
    while num_pidfds() > 1:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert num_pidfds() == 1


def test_a_removed_socket_file_is_bound_again(run_dir: str, start_worker: StartWorker, gateway: Gateway) -> None:
    (Path(run_dir) / "workers.sock").unlink()
    end = time.monotonic() + 5
    while not (Path(run_dir) / "workers.sock").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    start_worker()
    gateway.wait_for_workers(1)


def introduction(role: str, version: int) -> list[bytes]:
    """Of a peer of another version, which may have other fields as well: facts of 18, as protocol 1 had them."""
    if role == "gateways":
        return [msgpack.packb([1, version, f"gateway-{version}", os.getpid(), []])]
    facts = ["x"] * 18 if version != PROTOCOL_VERSION else [getattr(FACTS, field.name) for field in fields(FACTS)]
    return [msgpack.packb([4, version, f"worker-{version}", os.getpid(), facts, []])]


@pytest.mark.parametrize("role", ["gateways", "workers"])
@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION, PROTOCOL_VERSION + 1])
def test_a_peer_of_this_version_is_taken_in_and_one_of_another_is_told_why_not_within_a_second(
    run_dir: str,
    start_scheduler: Callable[[], RunningScheduler],
    caplog: pytest.LogCaptureFixture,
    role: str,
    version: int,
) -> None:
    start_scheduler()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = Dealer(context, RunDir(run_dir).address(role), "x")
    try:
        assert dealer.socket.poll(5000, zmq.POLLOUT)
        dealer.socket.send_multipart(introduction(role, version))

        assert dealer.socket.poll(1000)
        answer = dealer.receive()
    finally:
        dealer.close()
        context.term()

    if version == PROTOCOL_VERSION:
        assert isinstance(answer, Welcome if role == "gateways" else Ping)
        return
    reason = f"this scheduler speaks protocol {PROTOCOL_VERSION}, the peer {version}; install one version of hedgerow"
    assert answer == Refuse("version", reason)
    assert reason in caplog.text


@pytest.mark.slow
def test_a_second_scheduler_of_a_run_folder_exits_with_75_and_the_first_goes_on(run_dir: str) -> None:
    command = [sys.executable, "-m", "scheduler", "--run-dir", run_dir]
    first = subprocess.Popen(command, stderr=subprocess.PIPE)
    gateway = None
    try:
        end = time.monotonic() + 20
        while not (Path(run_dir) / "gateways.sock").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        second = subprocess.run(command, stderr=subprocess.PIPE, timeout=30, check=False)
        assert second.returncode == 75
        assert b"another scheduler" in second.stderr
        gateway = Gateway(run_dir)
        gateway.wait_for(Welcome)
    finally:
        first.terminate()
        _, errors = first.communicate(timeout=20)
        if gateway is not None:
            gateway.close()
    assert first.returncode == 0, errors
    assert not list(Path(run_dir).glob("*.sock"))


def test_the_timer_wakes_a_poll_within_a_fraction_of_a_millisecond_and_not_before() -> None:
    timer = Timer()
    poller = zmq.Poller()
    poller.register(timer.fd, zmq.POLLIN)
    late_ns = []
    try:
        for number in range(1, 41):
            at_ns = now_ns() + number * 130_000
            timer.set(at_ns)
            assert poller.poll(5000) == [(timer.fd, zmq.POLLIN)]
            late_ns.append(now_ns() - at_ns)
        timer.set(now_ns() + 3_600_000_000_000)
        assert poller.poll(0) == []  # though it was readable before
    finally:
        timer.close()
    assert min(late_ns) >= 0
    assert_in_time(sorted(late_ns)[20] / 1e9, 0.0005)
