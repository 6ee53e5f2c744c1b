"""What a suite takes of its machine: nothing that grows, next to nothing at rest, what it may of a flood."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import Report, StartTrial
from tests.faults.rig import OracleSuite
from tests.faults.trial import Trial
from tests.gateway.wire import Wire, ask, request_bytes
from tests.suite import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

MIB = 2**20
_CONNECTIONS = 48
_CAP_BYTES = 64 * MIB
_BODY_BYTES = 4 * MIB
_LARGE_BYTES = 0.85 * _CAP_BYTES  # what bodies that are large may hold of it
_PACKET_BYTES = 128 * 1024  # so that this process does not hold what is refused
_LEAK_BYTES = 4096  # of each sequence; a third of them run there
_EMBEDDING = request_bytes("POST", "/v1/embeddings", json.dumps({"input": "w1 w2"}).encode())
_REFUSED = (
    (404, request_bytes("GET", "/nowhere")),
    (405, request_bytes("DELETE", "/v1/embeddings")),
    (400, request_bytes("POST", "/v1/embeddings", b'{"input": ')),
    (400, request_bytes("POST", "/v1/embeddings", b'{"input": [1.5, {}]}')),
    (404, request_bytes("POST", "/v1/embeddings", b'{"input": "w1", "model": "another"}')),
    (415, request_bytes("POST", "/v1/embeddings", b"w1", {"Content-Type": "text/plain"})),
)


# Wakes so many times, a hundred a second, and does nothing; then says what CPU each took.
_IDLER = """
import sys, time
count, begun_s = int(sys.argv[1]), time.process_time()
for _ in range(count):
    time.sleep(0.01)
print((time.process_time() - begun_s) / count)
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """By one process."""

    memory_bytes: int  # its own, resident
    descriptors: int
    threads: int
    wakeups: int  # of all its threads that live
    cpu_s: float

    @classmethod
    def by(cls, pid: int) -> Taken:
        process = Path(f"/proc/{pid}")
        status = (process / "status").read_text()
        stat = (process / "stat").read_text().rpartition(")")[2].split()
        tasks = [path.read_text() for path in process.glob("task/*/status")]
        return cls(
            memory_bytes=_number("RssAnon", status) * 1024,
            descriptors=len(list((process / "fd").iterdir())),
            threads=len(tasks),
            wakeups=sum(_number("voluntary_ctxt_switches", task) for task in tasks),
            cpu_s=(int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        )


def _number(name: str, status: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def taken(suite: OracleSuite) -> dict[str, Taken]:
    """By each process of a suite, by its name."""
    return {
        name: Taken.by(pid) for role in ("scheduler", "worker", "gateway") for name, pid in suite.pids(role).items()
    }


async def at_rest(suite: OracleSuite) -> dict[str, Taken]:
    """What is taken once no connection is being closed: a server hears of the end of one a little later."""
    async with asyncio.timeout(10):
        before, now = {}, taken(suite)
        while before != {name: process.descriptors for name, process in now.items()}:
            before = {name: process.descriptors for name, process in now.items()}
            await asyncio.sleep(0.2)
            now = taken(suite)
        return now


async def send(port: int, requests: list[tuple[int, bytes]]) -> None:
    """Requests one after the other over a few connections, each with the status that it has to have."""
    queue = iter(requests)

    async def client() -> None:
        wire = await Wire.connect(port)
        for expected, sent in queue:
            await wire.send(sent)
            answer = await wire.answer(timeout_s=30)
            assert answer.status == expected
            if answer.headers.get("connection") == "close":
                await wire.close()
                wire = await Wire.connect(port)
        await wire.close()

    await asyncio.gather(*(client() for _ in range(_CONNECTIONS)))


def growth_mib(before: Taken, after: Taken) -> float:
    return (after.memory_bytes - before.memory_bytes) / MIB


async def test_memory_stays_where_it_is_and_a_leak_would_be_seen(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("G1") as running:
        await send(suite.port, [(200, _EMBEDDING)] * (running.count // 3))
        before = await at_rest(suite)
        await send(suite.port, [(200, _EMBEDDING)] * running.count)
        after = await at_rest(suite)
        for name, process in after.items():
            running.measured("growth_mib", growth_mib(before[name], process))
            running.measured("descriptors", process.descriptors - before[name].descriptors)
            running.measured("threads", process.threads - before[name].threads)
        leaked_mib = await leaked(suite, running)
    report(running.judge(exactly={}))
    assert leaked_mib > running.promise.figures[0].most


async def leaked(suite: OracleSuite, running: Trial) -> float:
    """What the same look finds of a third worker, beside the others, that leaks."""
    third = await suite.start([*suite.oracle, "--slot", "2", "--leak-bytes", str(_LEAK_BYTES)])
    try:
        await suite.ready(workers=3)
        await send(suite.port, [(200, _EMBEDDING)] * (running.count // 3))
        before = Taken.by(third.pid)
        await send(suite.port, [(200, _EMBEDDING)] * running.count)
        return growth_mib(before, Taken.by(third.pid))
    finally:
        third.terminate()
        await third.communicate()
        await suite.ready()


async def test_memory_stays_where_it_is_however_much_is_refused(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("G2") as running:
        await send(suite.port, [*_REFUSED] * (running.count // len(_REFUSED) // 2))
        before = taken(suite)
        await send(suite.port, [*_REFUSED] * (running.count // len(_REFUSED)))
        after = taken(suite)
        for name, process in after.items():
            running.measured("growth_mib", growth_mib(before[name], process))
    report(running.judge(exactly={}))


async def test_who_is_asked_nothing_does_next_to_nothing(suite: OracleSuite, trial: StartTrial, report: Report) -> None:
    running = trial("G11")
    await asyncio.sleep(1)
    before, begun_s = taken(suite), time.monotonic()
    idler = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IDLER, str(running.count * 100)), stdout=asyncio.subprocess.PIPE
    )
    least_s = float((await idler.communicate())[0])
    after, took_s = taken(suite), time.monotonic() - begun_s
    wakeups = {name: after[name].wakeups - process.wakeups for name, process in before.items()}
    cpu_s = sum(after[name].cpu_s - process.cpu_s for name, process in before.items())
    running.measured("cpu_of_wakeup", cpu_s / sum(wakeups.values()) / least_s)
    for name, number in wakeups.items():
        series = "scheduler_wakeups_per_s" if name == "scheduler-0" else "peer_wakeups_per_s"
        running.measured(series, number / took_s)
    report(running.judge(exactly={}) + f"; {cpu_s / took_s * 100:.1f} % of a core")


async def test_bodies_that_do_not_end_hold_as_much_memory_as_they_may(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    port = free_port()
    flags = ["--max-held-bytes", str(_CAP_BYTES), "--max-body-bytes", str(_BODY_BYTES)]
    gateway = await suite.start(["-m", "gateway", "--slot", "2", "--port", str(port), *flags])
    try:
        await until_served(port)
        async with trial("C6") as running:
            await send(port, [(200, _EMBEDDING)] * 500)
            processes = (gateway.pid, suite.pids("scheduler")["scheduler-0"])
            before_bytes = sum(Taken.by(pid).memory_bytes for pid in processes)
            peak_bytes = 0
            flood = asyncio.create_task(send_bodies(port, running.count))
            while not flood.done():
                peak_bytes = max(peak_bytes, sum(Taken.by(pid).memory_bytes for pid in processes))
                await asyncio.sleep(0.02)
            refused = await flood
            reserved_bytes = _LARGE_BYTES * 9 / 8
            running.measured("kib_a_connection", (peak_bytes - before_bytes - reserved_bytes) / running.count / 1024)
            await send(port, [(200, _EMBEDDING)] * 100)
        report(running.judge(exactly={}))
        # Else it was no flood. Those that are held end by their own slowness, and make room for as many again.
        assert refused >= running.count / 4
        assert peak_bytes - before_bytes > _LARGE_BYTES / 2
    finally:
        gateway.terminate()
        await gateway.communicate()
        await suite.ready()


async def until_served(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if (await ask(port, "GET", "/ready")).status == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.05)


async def send_bodies(port: int, count: int) -> int:
    """Bodies of 4 MiB, all but the last byte of each at once; how many were refused."""
    head = request_bytes("POST", "/v1/embeddings", None, {"Content-Type": "application/json"})[:-2]
    head += f"Content-Length: {_BODY_BYTES}\r\n\r\n".encode()
    body = b'{"input": "' + b"w" * (_BODY_BYTES - 14)
    wires = [await Wire.connect(port) for _ in range(count)]

    async def one(wire: Wire) -> int:
        try:
            await wire.send(head)
            for begin in range(0, len(body), _PACKET_BYTES):
                await wire.send(body[begin : begin + _PACKET_BYTES])
            answer = await wire.answer(timeout_s=1)
        except TimeoutError:
            return 0  # it waits for the rest, and holds what has come
        except (ConnectionError, asyncio.IncompleteReadError):
            return 1  # cut off while it still sent
        assert answer.status in (408, 429)
        return answer.status == 429  # else it was held, and took too long to come

    refused = sum(await asyncio.gather(*map(one, wires)))
    for wire in wires:
        await wire.close()
    return refused
