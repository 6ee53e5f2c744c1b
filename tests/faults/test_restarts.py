"""Restarts as an operator does them, one process at a time, under load: no request fails."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.faults.conftest import Report, StartTrial
from tests.faults.oracle import steps
from tests.faults.rig import OracleSuite, Process
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

_KEPT = 16  # connections
_NEWCOMERS = 200


async def roll(suite: OracleSuite, trial: Trial, *names: str, newcomers: int = 0) -> None:
    """Restart each in its turn, as often as the schedule says and until the requests are enough.

    `newcomers`: so many connect at once, each time just before.
    """
    schedule = trial.steps()
    for number in itertools.count():
        if number >= len(schedule) and len(trial.ledger.sent) >= trial.num_requests:
            return
        await asyncio.sleep(schedule[number % len(schedule)].delay_s)
        program = names[number % len(names)]
        name = program.rpartition(":")[2]
        before = Process(suite, name if "-" in name else f"{name}-0")
        trial.faulted()
        if newcomers:
            trial.ledger.rush(newcomers, fresh=True)
            await asyncio.sleep(0.1 * schedule[number % len(schedule)].draw)
        await suite.restart_program(program)
        await suite.ready(instead_of=before)
        await trial.settle()
        before.close()


async def rush_s(trial: Trial) -> float:
    """How long it takes when nothing is restarted until all that come at once are answered."""
    before = len(trial.ledger.sent)
    trial.ledger.rush(_NEWCOMERS, fresh=True)
    await trial.settle()
    return max(sent.latency_s for sent in trial.ledger.sent[before:])


async def test_gateways_restarted_one_by_one_fail_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("B1") as running:
        running.ledger.rush(_KEPT, fresh=False)
        await running.settle()
        before_s = await rush_s(running)
        await roll(suite, running, "gateway:gateway-0", "gateway:gateway-1", newcomers=_NEWCOMERS)
        running.calm_s = max(before_s, await rush_s(running))
    report(running.judge(exactly=running.answers()))


async def test_workers_restarted_one_by_one_fail_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("B2") as running:
        await roll(suite, running, "worker:worker-0", "worker:worker-1")
    report(running.judge(exactly=running.answers()))


async def test_while_workers_are_restarted_one_by_one_the_other_does_what_one_can(
    suite: OracleSuite, trial: StartTrial, seed: int, report: Report
) -> None:
    rng = random.Random(seed)

    async def keep_asking(running: Trial) -> None:
        while True:
            texts = [" ".join(f"w{rng.randrange(4000)}" for _ in range(10)) for _ in range(32)]
            await running.ledger.until(running.ledger.ask(*texts))

    begun_s, ended_s = [], []
    async with trial("B2 throughput") as running:
        asking = [asyncio.create_task(keep_asking(running)) for _ in range(24)]
        await asyncio.sleep(1)
        calm_s = running.now_s()
        await asyncio.sleep(3)
        for number, _ in enumerate(running.steps()):
            before = Process(suite, f"worker-{number % 2}")
            begun_s.append(running.now_s())
            await suite.restart_program(f"worker:{before.name}")
            await suite.ready(instead_of=before)
            ended_s.append(running.now_s())
            before.close()
            await asyncio.sleep(0.5)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    begun = steps(suite.run_dir)

    def tokens_per_s(start_s: float, stop_s: float) -> float:
        return sum(step.num_tokens for step in begun if start_s <= step.begun_s < stop_s) / (stop_s - start_s)

    both = tokens_per_s(calm_s, calm_s + 3)
    for start_s, stop_s in zip(begun_s, ended_s, strict=True):
        running.measured("missing", 1 - tokens_per_s(start_s, stop_s) / both)
    report(running.judge(exactly=running.answers()))


async def test_the_scheduler_restarted_fails_no_request_and_starts_no_worker_again(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    workers = suite.pids("worker")
    async with trial("B3") as running:
        await roll(suite, running, "scheduler")
    report(running.judge(exactly=running.answers()))
    assert suite.pids("worker") == workers
