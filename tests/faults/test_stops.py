"""Suites that end, by a signal or with their supervisor, and starts: all stops in time, nothing is left behind."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Report, StartTrial
from tests.faults.ledger import Sent
from tests.faults.promises import PROMISES, Promise, measured, schedule
from tests.faults.rig import Loose, OracleSuite, Process
from tests.faults.trial import Trial
from tests.gateway.wire import Wire, request_bytes
from tests.timing import TooSlow

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

_BAD_LINE = re.compile(r"^.* (?:ERROR|CRITICAL) .*$|^Traceback.*$", re.MULTILINE)
_EXIT = re.compile(r"stopped: (?P<name>\S+) \((?P<how>[^)]*)\)")

# What a run folder keeps between two runs: files to lock, counts of metrics, and the oracle's own.
_KEPT = {".lock", ".db", ".running", ".steps", ".fault"}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A suite's folder; what it takes for temporary files is the folder `tmp` there."""
    with tempfile.TemporaryDirectory(prefix="hr-") as name:
        Path(name, "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", f"{name}/tmp")
        yield name


@pytest.fixture
def loose() -> Iterator[Callable[[], Loose]]:
    """Makes run folders without any process; those that are started there end with the test."""
    folders: list[tempfile.TemporaryDirectory[str]] = []
    made: list[Loose] = []

    def make() -> Loose:
        folders.append(tempfile.TemporaryDirectory(prefix="hr-"))
        made.append(Loose(folders[-1].name))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for one_folder in folders:
        one_folder.cleanup()


def verdict(promise: Promise, seed: int, series: dict[str, list[float]]) -> str:
    texts, broken = measured(promise.figures, series)
    if broken:
        raise TooSlow("\n".join(broken))
    return f"{promise.name} seed {seed}: " + "; ".join(texts)


def is_alive(pid: int) -> bool:
    """A process that has ended and waits for its parent to hear of it is none any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def users(folder: str) -> list[str]:
    """The command lines of living processes that belong to a run folder, or hold a file of it open."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            links = [str(link.readlink()) for link in (path / "fd").iterdir()]
            belongs = f"={folder}/run\0".encode() in (path / "environ").read_bytes()
            if belongs or any(link.startswith(f"{folder}/run/") for link in links):
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


def is_held(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def assert_nothing_left(folder: str) -> None:
    files = [path for path in Path(folder, "run").rglob("*") if not path.is_dir()]
    assert [path.name for path in files if path.suffix not in _KEPT and path.name not in {"lock", "connections"}] == []
    assert not any(Path(folder, "run", "connections").read_bytes())  # every gateway has said that it is gone
    assert [path.name for path in files if path.suffix in {".lock", ""} and is_held(path)] == []
    assert list(Path(folder, "tmp").iterdir()) == []
    assert users(folder) == []


async def start_again(running: Trial, folder: str) -> None:
    """A new suite in the place of one that has ended."""
    begun_s = running.now_s()
    logged = len(running.suite.log())
    running.suite.stop()
    running.suite = OracleSuite(folder, running.suite.port)
    await running.suite.ready()
    running.measured("start_s", running.now_s() - begun_s)
    assert _BAD_LINE.findall(running.suite.log()[logged:]) == []


async def test_a_stop_of_everything_answers_what_was_accepted_and_leaves_nothing_behind(
    folder: str, seed: int, soak: bool, report: Report
) -> None:
    running = Trial(OracleSuite(folder), PROMISES["B4"], seed, soak)
    spans: list[tuple[float, float]] = []
    try:
        await running.suite.ready()
        async with running:
            for step in running.steps():
                await asyncio.sleep(1 + step.delay_s)
                suite = running.suite
                logged = len(suite.log())
                signalled_s = running.now_s()
                status = await asyncio.to_thread(suite.stop)
                running.measured("stopped_s", running.now_s() - signalled_s)
                assert status == 0
                exits = dict(match.groups() for match in _EXIT.finditer(suite.log()[logged:]))
                names = ("gateway-0", "gateway-1", "worker-0", "worker-1", "scheduler")
                assert exits == dict.fromkeys(names, "exit status 0")
                assert _BAD_LINE.findall(suite.log()[logged:]) == []
                assert_nothing_left(folder)
                await start_again(running, folder)
                spans.append((signalled_s, running.now_s()))
    finally:
        running.suite.stop()

    def was_refused(sent: Sent) -> bool:
        """It came too late: after the signal, or so little before it that nobody had accepted its connection.

        Those that the kernel had accepted and no gateway are reset when supervisord closes the port.
        """
        says_so = sent.outcome in {"unconnected", "cut"} or sent.detail.startswith("503 ")
        return says_so and any(signalled_s - 0.05 <= sent.due_s < again_s for signalled_s, again_s in spans)

    report(running.judge(exactly={}, allowed=filter(was_refused, running.ledger.sent)))


async def test_when_supervisord_is_killed_all_ends_and_the_next_start_is_clean(
    folder: str, seed: int, soak: bool, report: Report
) -> None:
    running = Trial(OracleSuite(folder), PROMISES["A8"], seed, soak)
    spans: list[tuple[float, float]] = []
    try:
        await running.suite.ready()
        async with running:
            for step in running.steps():
                await asyncio.sleep(step.delay_s)
                pids = running.suite.children()
                assert len(pids) == 5
                killed_s = running.now_s()
                running.suite.process.kill()
                async with asyncio.timeout(10):
                    while any(map(is_alive, pids)):
                        await asyncio.sleep(0.005)
                running.measured("gone_s", running.now_s() - killed_s)
                await start_again(running, folder)
                spans.append((killed_s, running.now_s()))
    finally:
        running.suite.stop()

    def met_nobody(sent: Sent) -> bool:
        in_vain = sent.outcome in {"unconnected", "cut"} or sent.detail.startswith("503 ")
        return in_vain and any(sent.due_s < again_s and sent.ended_s > killed_s for killed_s, again_s in spans)

    report(running.judge(exactly={}, allowed=filter(met_nobody, running.ledger.sent)))


async def test_processes_may_start_in_any_order(
    loose: Callable[[], Loose], seed: int, soak: bool, report: Report
) -> None:
    promise = PROMISES["A11"]
    orders = list(itertools.permutations(("gateway-0", "scheduler-0", "worker-0", "worker-1")))
    random.Random(seed).shuffle(orders)
    series: dict[str, list[float]] = defaultdict(list)
    for order in orders[: promise.soak if soak else promise.quick]:
        place = loose()
        for number, name in enumerate(order, start=1):
            place.start(name)
            async with asyncio.timeout(30):
                while place.log().count("starting: ") < number:
                    await asyncio.sleep(0.01)
        begun_s = time.monotonic()
        await place.ready()
        series["ready_s"].append(time.monotonic() - begun_s)
        assert _BAD_LINE.findall(place.log()) == [], order
        place.close()
    report(verdict(promise, seed, series))


async def ended_s(process: subprocess.Popen[bytes], signalled_s: float) -> float:
    await asyncio.to_thread(process.wait, 30)
    return time.monotonic() - signalled_s


async def test_a_second_signal_ends_a_process_that_waits_for_its_work(
    loose: Callable[[], Loose], seed: int, soak: bool, report: Report
) -> None:
    promise = PROMISES["B5"]
    series: dict[str, list[float]] = defaultdict(list)
    for number, step in enumerate(schedule(seed, promise.soak if soak else promise.quick)):
        place = loose()
        scheduler, worker, gateway = map(place.start, ("scheduler-0", "worker-0", "gateway-0"))
        await place.ready(workers=1)
        wire = await Wire.connect(place.port)
        body = json.dumps({"input": f"HANG w{number}"}).encode()
        await wire.send(request_bytes("POST", "/v1/embeddings", body))
        async with asyncio.timeout(10):
            while not list(place.run_dir.glob("*.fault")):
                await asyncio.sleep(0.01)

        for process in (gateway, worker):
            process.send_signal(signal.SIGTERM if step.slot else signal.SIGINT)
        await asyncio.sleep(step.delay_s)
        assert (gateway.poll(), worker.poll()) == (None, None)
        for process, status in ((gateway, 1), (worker, 0)):
            signalled_s = time.monotonic()
            process.send_signal(signal.SIGTERM if step.draw < 0.5 else signal.SIGINT)
            series["ended_s"].append(await ended_s(process, signalled_s))
            assert process.returncode == status
        assert await wire.rest() == b""  # its answer is not to be had, nor any other
        await wire.close()
        signalled_s = time.monotonic()
        scheduler.send_signal(signal.SIGTERM)
        series["ended_s"].append(await ended_s(scheduler, signalled_s))
        assert scheduler.returncode == 0
        assert _BAD_LINE.findall(place.log()) == []
        place.close()
    report(verdict(promise, seed, series))


async def test_a_signal_ends_a_worker_that_starts_and_loads_its_model(
    loose: Callable[[], Loose], seed: int, soak: bool, report: Report
) -> None:
    promise = PROMISES["B5"]
    series: dict[str, list[float]] = defaultdict(list)
    place = loose()
    statuses = set()
    for step in schedule(seed, promise.soak if soak else promise.quick):
        worker = place.start("worker-0", ["-m", "worker", "--device", "cpu"])
        await asyncio.sleep(4 * step.draw)
        assert worker.poll() is None
        signalled_s = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        series["ended_s"].append(await ended_s(worker, signalled_s))
        statuses.add(worker.returncode)
    assert statuses <= {0, -signal.SIGTERM}  # the latter while Python itself starts
    assert _BAD_LINE.findall(place.log()) == []
    report(verdict(promise, seed, series))


async def test_a_hangup_ends_no_process_and_fails_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    def pids() -> dict[str, int]:
        return {name: pid for role in ("gateway", "scheduler", "worker") for name, pid in suite.pids(role).items()}

    before = pids()
    async with trial("B5 hangup") as running:
        for step in running.steps():
            await asyncio.sleep(step.delay_s)
            running.faulted()
            for name in before:
                process = Process(suite, name)
                process.send(signal.SIGHUP)
                process.close()
    assert pids() == before
    assert len(before) == 5
    report(running.judge(exactly=running.answers()))
