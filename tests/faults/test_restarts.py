"""Restarts as an operator does them, one process at a time, under load: no request fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from tests.faults.conftest import StartTrial
from tests.faults.rig import OracleSuite, Process
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Report = Callable[[str], None]


async def roll(suite: OracleSuite, trial: Trial, *names: str) -> None:
    """Restart each in its turn, as often as the schedule says and until the requests are enough."""
    steps = trial.steps()
    for number in itertools.count():
        if number >= len(steps) and len(trial.ledger.sent) >= trial.num_requests:
            return
        await asyncio.sleep(steps[number % len(steps)].delay_s)
        program = names[number % len(names)]
        name = program.rpartition(":")[2]
        before = Process(suite, name if "-" in name else f"{name}-0")
        trial.faulted()
        await suite.restart_program(program)
        await suite.ready(instead_of=before)
        await trial.settle()
        before.close()


async def test_gateways_restarted_one_by_one_fail_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("B1") as running:
        await roll(suite, running, "gateway:gateway-0", "gateway:gateway-1")
    report(running.judge(exactly=running.answers()))


async def test_workers_restarted_one_by_one_fail_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("B2") as running:
        await roll(suite, running, "worker:worker-0", "worker:worker-1")
    report(running.judge(exactly=running.answers()))


async def test_the_scheduler_restarted_fails_no_request_and_starts_no_worker_again(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    workers = suite.pids("worker")
    async with trial("B3") as running:
        await roll(suite, running, "scheduler")
    report(running.judge(exactly=running.answers()))
    assert suite.pids("worker") == workers
