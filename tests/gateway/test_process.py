"""The real process: its socket, its signals, and a request through the real scheduler."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.wire.codec import Message
from common.wire.messages import Batch, ModelFacts
from tests import fakes
from tests.fakes import FakeWorker, RunningScheduler, oracle_vector
from tests.gateway.wire import Wire, ask, embed, request_bytes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


_COUNT = """
import os, sys
from common.text.tokenization import bound_tokenizer_threads
from tokenizers import Tokenizer, models, pre_tokenizers
before = len(os.listdir("/proc/self/task"))
bound_tokenizer_threads(int(sys.argv[1]))
tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
assert [found.ids for found in tokenizer.encode_batch_fast(["a b"] * 100)] == [[0, 0]] * 100
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(("num_threads", "started"), [(1, 0), (2, 2), (5, 5)])
def test_the_library_tokenizes_a_list_on_no_more_threads_than_are_asked_for(num_threads: int, started: int) -> None:
    command = [sys.executable, "-c", _COUNT, str(num_threads)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert int(run.stdout) == started


_MAIN = """
import os
from common.config import GatewayConfig
from gateway.process import main
main(GatewayConfig(run_dir="unused", tokenizer_threads=7, api_keys_file="nowhere"), lambda: None)
print(os.environ["RAYON_NUM_THREADS"])
"""


def test_a_gateway_bounds_them_before_anything_else() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _MAIN], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["7"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def gateway(run_dir: str) -> Iterator[Start]:
    """Starts `python -m gateway`; with `listener` as its standard input, as a supervisor does."""
    processes: list[subprocess.Popen[str]] = []

    def start(*flags: str, listener: socket.socket | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--run-dir", run_dir, *flags],
            cwd=ROOT,
            stdin=subprocess.DEVNULL if listener is None else listener.fileno(),
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def port_of(sock: socket.socket) -> int:
    return sock.getsockname()[1]


async def exit_status(process: subprocess.Popen[str], timeout_s: float) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), timeout_s)


async def ready(port: int) -> None:
    async with asyncio.timeout(20):
        while (await ask(port, "GET", "/ready")).status != 200:
            await asyncio.sleep(0.02)


def test_a_port_that_is_taken_is_named(gateway: Start, listener: socket.socket) -> None:
    process = gateway("--port", str(port_of(listener)))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"port {port_of(listener)} of 127.0.0.1 is taken" in errors
    assert "Traceback" not in errors


async def test_a_port_of_its_own_is_served(gateway: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = port_of(probe)
    process = gateway("--port", str(port))
    async with asyncio.timeout(20):
        while True:
            try:
                answer = await ask(port, "GET", "/health")
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                break
    assert answer.status == 200
    process.send_signal(signal.SIGINT)
    assert await exit_status(process, 5) == 0


async def test_an_inherited_socket_outlives_its_gateways(gateway: Start, listener: socket.socket) -> None:
    first = gateway(listener=listener)
    assert (await ask(port_of(listener), "GET", "/health")).status == 200
    first.terminate()
    assert await exit_status(first, 5) == 0
    waiting = await Wire.connect(port_of(listener))
    await waiting.send(request_bytes("GET", "/health"))
    gateway(listener=listener)
    assert (await waiting.answer()).status == 200
    await waiting.close()


async def test_idle_connections_do_not_delay_the_end(gateway: Start, listener: socket.socket) -> None:
    process = gateway(listener=listener)
    idle = [await Wire.connect(port_of(listener)) for _ in range(10)]
    for wire in idle:
        assert (await wire.ask(request_bytes("GET", "/health"))).status == 200
    process.terminate()
    assert await exit_status(process, 5) == 0
    for wire in idle:
        assert await wire.rest() == b""
        await wire.close()


@pytest.fixture
def oracle(
    start_scheduler: Callable[[], RunningScheduler], start_worker: Callable[..., FakeWorker], facts: ModelFacts
) -> Callable[..., FakeWorker]:
    """Starts an oracle worker, behind the real scheduler."""
    start_scheduler()
    return partial(start_worker, facts=dataclasses.replace(facts, dimensions=fakes.DIMENSIONS))


async def test_a_request_goes_through_the_real_scheduler_and_back(
    gateway: Start, listener: socket.socket, oracle: Callable[..., FakeWorker]
) -> None:
    oracle()
    gateway(listener=listener)
    await ready(port_of(listener))
    texts = [f"w{index % 60} w{index // 60}" for index in range(200)]
    answer = await embed(port_of(listener), {"input": texts})
    rows = [item["embedding"] for item in answer.json["data"]]
    np.testing.assert_array_equal(
        rows, [oracle_vector([1, index % 60 + 4, index // 60 + 4, 2]) for index in range(200)]
    )
    metrics = (await ask(port_of(listener), "GET", "/metrics")).body.decode()
    assert 'hedgerow_requests_total{route="/v1/embeddings",status="200"} 1.0' in metrics
    assert "hedgerow_inputs_total 200.0" in metrics


async def test_a_stop_waits_for_what_runs(
    gateway: Start, listener: socket.socket, oracle: Callable[..., FakeWorker]
) -> None:
    arrived, release = threading.Event(), threading.Event()

    def answer(batch: Batch) -> Message:
        arrived.set()
        release.wait()
        return fakes.oracle_result(batch)

    oracle(answer=answer)
    process = gateway(listener=listener)
    await ready(port_of(listener))
    wire = await Wire.connect(port_of(listener))
    await wire.send(request_bytes("POST", "/v1/embeddings", b'{"input":"w1"}'))
    await asyncio.to_thread(arrived.wait)
    process.terminate()
    await asyncio.to_thread(_read_until, process, "stopping: nothing more is accepted")
    release.set()
    held = await wire.answer()
    assert (held.status, held.headers["connection"]) == (200, "close")
    assert await exit_status(process, 5) == 0
    await wire.close()


async def test_a_second_signal_does_not_wait(
    gateway: Start, listener: socket.socket, oracle: Callable[..., FakeWorker]
) -> None:
    arrived = threading.Event()
    oracle(answer=lambda _: arrived.set())
    process = gateway(listener=listener)
    await ready(port_of(listener))
    wire = await Wire.connect(port_of(listener))
    await wire.send(request_bytes("POST", "/v1/embeddings", b'{"input":"w1"}'))
    await asyncio.to_thread(arrived.wait)
    process.terminate()
    await asyncio.to_thread(_read_until, process, "stopping: nothing more is accepted")
    process.terminate()
    assert await exit_status(process, 2) == 1
    assert await wire.rest() == b""
    await wire.close()


def test_keys_that_others_can_read_refuse_the_start(gateway: Start, listener: socket.socket, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("canary-7f3a\n")
    keys.chmod(0o644)
    process = gateway("--api-keys-file", str(keys), listener=listener)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 78
    assert f"cannot start: --api-keys-file {keys} is open to others (mode 0644): run chmod 600 on it" in errors
    assert "canary" not in errors
    assert "Traceback" not in errors


async def test_a_hangup_reads_keys_and_opens_the_log_again_while_requests_are_answered(
    gateway: Start, listener: socket.socket, tmp_path: Path
) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log" / "gateway-0.log"
    keys.touch(0o600)
    keys.write_text("canary-lasting\ncanary-old\n")
    process = gateway("--api-keys-file", str(keys), "--log-dir", str(log.parent), listener=listener)
    assert await _status(listener, "canary-old") == 200
    asking = asyncio.create_task(_ask_until_cancelled(listener, "canary-lasting"))

    log.rename(log.with_name("old.log"))
    keys.write_text("canary-lasting\ncanary-new\n")
    process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(20):
        while await _status(listener, "canary-new") != 200:
            await asyncio.sleep(0.01)
    assert await _status(listener, "canary-old") == 401
    await _logged(log, "2 keys from now on")

    keys.write_text("canary-lasting\ncanary-newer\ncanary-wrong lane=fast\n")
    process.send_signal(signal.SIGHUP)
    await _logged(log, f"the keys stay as they were: --api-keys-file {keys}, line 3: lane= needs online or backfill")
    keys.chmod(0o640)
    process.send_signal(signal.SIGHUP)
    await _logged(log, "run chmod 600 on it")
    assert (await _status(listener, "canary-new"), await _status(listener, "canary-newer")) == (200, 401)

    asking.cancel()
    answered = await asking
    assert (len(answered) > 10, set(answered)) == (True, {200})
    process.terminate()
    assert await exit_status(process, 5) == 0
    assert "canary" not in log.read_text() + log.with_name("old.log").read_text()


async def _status(listener: socket.socket, key: str) -> int:
    return (await ask(port_of(listener), "GET", "/info", headers={"x-api-key": key})).status


async def _ask_until_cancelled(listener: socket.socket, key: str) -> list[int]:
    """The status of each answer."""
    statuses: list[int] = []
    try:
        while True:
            statuses.append(await _status(listener, key))
    except asyncio.CancelledError:
        return statuses


async def _logged(log: Path, text: str) -> None:
    async with asyncio.timeout(20):
        while not (log.exists() and text in log.read_text()):
            await asyncio.sleep(0.01)


@pytest.mark.thorough
async def test_made_up_names_leave_metrics_and_memory_as_they_were(
    gateway: Start, listener: socket.socket, oracle: Callable[..., FakeWorker]
) -> None:
    oracle()
    process = gateway(listener=listener)
    port = port_of(listener)
    await ready(port)

    async def ask_for_made_up_names(wire: Wire, name: str) -> list[int]:
        """One request of each kind, all with this name somewhere; their statuses."""
        model = json.dumps({"input": "w1", "model": name}).encode()
        user = json.dumps({"input": "w1", "user": name}).encode()
        requests = (
            request_bytes("POST", "/v1/embeddings", model),
            request_bytes("POST", "/v1/embeddings", user, {"X-Request-Id": name, "X-" + name: name}),
            request_bytes("GET", "/v1/models/" + name),
            request_bytes("GET", "/" + name),
            request_bytes("PROPFIND", "/health?" + name),
        )
        statuses = []
        for sent in requests:
            await wire.send(sent)
            statuses.append((await wire.answer()).status)
        return statuses

    async def ask_with_a_made_up_method(name: str) -> int:
        return (await ask(port, name, "/health")).status

    async def state() -> tuple[int, int]:
        """How many series /metrics has, and the process's memory in bytes."""
        text = (await ask(port, "GET", "/metrics")).body.decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        assert resident is not None
        return len(lines), int(resident[1]) * 1024

    wire = await Wire.connect(port)
    for index in range(100):
        assert await ask_for_made_up_names(wire, f"warm-{index}") == [404, 200, 404, 404, 405]
        assert await ask_with_a_made_up_method(f"WARM{index}") == 400
    await state()
    num_series, resident_bytes = await state()

    for index in range(900):
        await ask_for_made_up_names(wire, f"made-up-{index}")
    for index in range(500):
        await ask_with_a_made_up_method(f"MADEUP{index}")

    num_series_after, resident_bytes_after = await state()
    assert num_series > 30
    assert num_series_after == num_series
    assert resident_bytes_after - resident_bytes < 5_000_000
    await wire.close()


async def test_connections_beyond_the_file_table_are_refused_and_not_fatal(
    gateway: Start, listener: socket.socket
) -> None:
    port = port_of(listener)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    process = gateway(listener=listener)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (await ask(port, "GET", "/health")).status == 200

    begun_s = time.monotonic()
    wires = [await Wire.connect(port) for _ in range(600)]
    statuses = []
    for wire in wires:
        try:
            await wire.send(request_bytes("GET", "/health"))
            statuses.append((await wire.answer()).status)
        except (ConnectionError, asyncio.IncompleteReadError):
            statuses.append(0)  # closed without the courtesy of an answer
    for wire in wires:
        await wire.close()

    assert statuses[:192] == [200] * 192
    assert set(statuses[192:]) <= {503, 0}
    assert 503 in statuses
    async with asyncio.timeout(2):
        while (await ask(port, "GET", "/health")).status != 200:
            await asyncio.sleep(0.02)
    took_s = time.monotonic() - begun_s
    process.terminate()
    assert await exit_status(process, 5) == 0
    assert process.stderr is not None
    said = process.stderr.read()
    assert "Too many open files" not in said
    assert len(said.splitlines()) < 10 + 10 * took_s


def _read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the process ended without saying {text!r}")
