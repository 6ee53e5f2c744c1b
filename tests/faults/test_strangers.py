"""Who comes to a suite's own sockets and is no peer of it, or takes a place that is taken: nobody else is disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from common.run_dir import RunDir
from common.wire.messages import PROTOCOL_VERSION, Goodbye, Join, Welcome
from common.wire.transport import Dealer
from tests.faults.conftest import Report, StartTrial
from tests.faults.promises import quantile
from tests.faults.rig import OracleSuite
from tests.faults.trial import Trial
from tests.suite import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

Bother = Callable[[str], "asyncio.Task[int]"]

_ROUNDS = 3
_CALM_S = 1.5
_PIPE_BYTES = 64 * 1024
_NOT_MESSAGES = 'hedgerow_protocol_errors_total{process="scheduler"}'


@asynccontextmanager
async def strangers(suite: OracleSuite, seed: int) -> AsyncIterator[Bother]:
    """Has a process of its own do what strangers.py knows; the task ends with the count of what was no message."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.strangers", str(suite.run_dir), str(seed)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"

    async def ask(line: str) -> int:
        process.stdin.write(line.encode() + b"\n")
        return int(json.loads(await process.stdout.readline())["undecodable"])

    try:
        yield lambda line: asyncio.create_task(ask(line))
    finally:
        process.stdin.close()
        assert await process.wait() == 0


def p99_s(trial: Trial, begun_s: float, ended_s: float) -> float:
    """Of the requests that were due in this time."""
    return quantile((s.latency_s for s in trial.ledger.sent if begun_s <= s.due_s < ended_s), 0.99)


async def bothered_in_turns(trial: Trial, bother: Bother, line: str) -> int:
    """Calm and strangers in turns, each measured; how much was no message."""
    undecodable = 0
    for _ in range(_ROUNDS):
        calm_s = trial.now_s()
        await asyncio.sleep(_CALM_S)
        bothered_s = trial.now_s()
        undecodable += await bother(line)
        ended_s = trial.now_s()
        await trial.settle()
        calm_p99_s = p99_s(trial, calm_s, bothered_s)
        trial.measured("extra_p99_s", p99_s(trial, bothered_s, ended_s) - 1.5 * calm_p99_s)
    return undecodable


async def test_changed_messages_stop_nothing_and_delay_nobody(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    pids = suite.children()
    async with trial("E1") as running, strangers(suite, running.seed) as bother:
        undecodable = await bothered_in_turns(running, bother, f"changed {running.count // _ROUNDS}")
        await suite.ready()
    assert undecodable > running.count / 2
    report(running.judge(exactly={_NOT_MESSAGES: undecodable} | running.answers()))
    assert suite.children() == pids


async def test_a_log_that_nobody_reads_stops_nothing(suite: OracleSuite, trial: StartTrial, report: Report) -> None:
    pids = suite.children()
    async with trial("G4") as running, strangers(suite, running.seed) as bother:
        # All that the scheduler has to say is more than the pipe holds, to a supervisord that is stopped half the time.
        many = f"guests {running.count // _ROUNDS // 2}"
        for _ in range(_ROUNDS):
            calm_s = running.now_s()
            await bother(many)
            suite.process.send_signal(signal.SIGSTOP)
            try:
                stopped_s = running.now_s()
                await bother(many)
                ended_s = running.now_s()
                unread = suite.log()
                await running.settle()
            finally:
                suite.process.send_signal(signal.SIGCONT)
            p99 = p99_s(running, stopped_s, ended_s)
            running.measured("extra_p99_s", p99 - 1.5 * p99_s(running, calm_s, stopped_s))
            await suite.ready()
            await until_logged(suite, len(unread) + _PIPE_BYTES)  # what waited in the pipe, and beyond
    report(running.judge(exactly=running.answers()))
    assert suite.children() == pids


async def until_logged(suite: OracleSuite, num_bytes: int) -> None:
    """Wait until the log has so many bytes."""
    async with asyncio.timeout(10):
        while len(suite.log()) <= num_bytes:
            await asyncio.sleep(0.05)


async def test_garbage_on_the_sockets_stops_nothing(suite: OracleSuite, trial: StartTrial, report: Report) -> None:
    pids = suite.children()
    async with trial("E2") as running, strangers(suite, running.seed) as bother:
        await bother(f"garbage {running.count}")
        await running.settle()
    running.measured("longest_s", max(sent.latency_s for sent in running.ledger.sent))
    # The oldest protocol of ZeroMQ has no greeting: by it, random bytes are messages, and counted as what they are.
    report(running.judge(exactly=running.answers(), unknown={_NOT_MESSAGES}))
    assert suite.children() == pids


async def test_a_crowd_of_half_open_connections_and_unknown_peers_delays_nobody(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("C10") as running, strangers(suite, running.seed) as bother:
        for _ in range(running.count // _ROUNDS):
            crowd = asyncio.create_task(bothered_in_turns(running, bother, "crowd 2"))
            while not crowd.done():
                await asyncio.sleep(0.5)
                running.measured("let_in_s", await asyncio.to_thread(join, suite))
            await crowd
        await suite.ready()
    report(running.judge(exactly=running.answers()))


def join(suite: OracleSuite) -> float:
    """Join as a gateway, and leave; the seconds until it was let in."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    begun_s = time.monotonic()
    dealer = Dealer(context, RunDir(str(suite.run_dir)).address("gateways"), "g")
    try:
        assert dealer.socket.poll(5000, zmq.POLLOUT)
        dealer.send(Join(PROTOCOL_VERSION, "newcomer", os.getpid()))
        assert dealer.socket.poll(5000)
        assert isinstance(dealer.receive(), Welcome)
        took_s = time.monotonic() - begun_s
        dealer.send(Goodbye("only a look"))
    finally:
        dealer.close(linger_ms=1000)
        context.term()
    return took_s


async def test_a_second_process_of_a_place_ends_with_75_and_the_first_goes_on(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    pids = suite.children()
    async with trial("E5, E6") as running:
        for step in running.steps():
            for rival in (["-m", "scheduler"], [*suite.oracle, "--slot", str(step.slot)]):
                begun_s = running.now_s()
                status, said = await run(suite, rival)
                running.measured("ended_s", running.now_s() - begun_s)
                assert status == 75
                assert b"another" in said
    report(running.judge(exactly=running.answers()))
    assert suite.children() == pids


async def run(suite: OracleSuite, arguments: list[str]) -> tuple[int, bytes]:
    """A process of the suite's own kind that nobody supervises, until it ends: its status and what it has said."""
    process = await suite.start(arguments)
    _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said


async def test_a_deleted_socket_file_is_bound_again_and_who_is_new_gets_in(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    pids = suite.children()
    async with trial("G9") as running:
        for step in running.steps():
            await asyncio.sleep(step.delay_s)
            for side in ("gateways", "workers"):
                Path(suite.run_dir, f"{side}.sock").unlink()
            deleted_s = running.now_s()
            while not all(Path(suite.run_dir, f"{side}.sock").exists() for side in ("gateways", "workers")):
                await asyncio.sleep(0.01)
            running.measured("bound_again_s", running.now_s() - deleted_s)
            third = await suite.start([*suite.oracle, "--slot", "2"])
            await suite.ready(workers=3)
            running.measured("joined_s", running.now_s() - deleted_s)
            third.terminate()
            _, said = await third.communicate()
            assert third.returncode == 0, said
            await asyncio.to_thread(join, suite)
            await suite.ready()
    report(running.judge(exactly=running.answers()))
    assert suite.children() == pids
