"""Processes that die or hang under load: no request fails, and what each death costs is measured."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.faults.conftest import Report, StartTrial
from tests.faults.ledger import Sent
from tests.faults.oracle import Running, digest, steps, token_ids
from tests.faults.rig import KilledGateways, OracleSuite, Process
from tests.faults.trial import dead, lost

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]


async def until_running(suite: OracleSuite, name: str) -> Running:
    """Wait until a worker is in the middle of a step."""
    running = Running(suite.run_dir, int(name.rpartition("-")[2]))
    async with asyncio.timeout(30):
        while not running.num_sequences:
            await asyncio.sleep(0.001)
    return running


async def test_a_worker_killed_in_mid_batch_fails_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    kills = in_batch = in_step = 0
    async with trial("A1") as running:
        for step in running.steps():
            await asyncio.sleep(step.delay_s)
            victim = Process(suite, f"worker-{step.slot}")
            held = await until_running(suite, victim.name)
            touched = running.ledger.in_hand()
            killed_s = victim.send(signal.SIGKILL)
            await victim.ended()
            kills += 1
            in_step += held.num_sequences
            in_batch += held.num_sequences > 0
            running.measured("ready_again_s", await suite.ready(instead_of=victim) - killed_s)
            _, lost_s, _ = suite.loss_of(victim.pid)
            running.measured("noticed_s", lost_s - killed_s)
            usual_s = running.ledger.usual_s()
            for sent in touched:
                await running.ledger.until(sent)
                running.measured("extra_s", sent.latency_s - usual_s)
            victim.close()
    report(running.judge(exactly=dead(kills) | running.answers()))
    assert in_batch >= kills / 2
    assert running.moved["hedgerow_retried_sequences_total"] >= in_step


async def test_the_only_worker_killed_fails_no_request(suite: OracleSuite, trial: StartTrial, report: Report) -> None:
    kills = 0
    await suite.stop_program("worker:worker-1")
    try:
        async with trial("A2") as running:
            for step in running.steps():
                await asyncio.sleep(step.delay_s)
                victim = Process(suite, "worker-0")
                await until_running(suite, victim.name)
                killed_s = victim.send(signal.SIGKILL)
                kills += 1
                running.measured("not_ready_s", await suite.not_ready() - killed_s)
                running.measured("ready_again_s", await suite.ready(workers=1, instead_of=victim) - killed_s)
                _, lost_s, _ = suite.loss_of(victim.pid)
                running.measured("noticed_s", lost_s - killed_s)
                victim.close()
    finally:
        await suite.start_program("worker:worker-1")
    report(running.judge(exactly=dead(kills) | running.answers()))


async def test_the_scheduler_killed_fails_no_request_and_starts_no_worker_again(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    workers = suite.pids("worker")
    async with trial("A3") as running:
        for number, step in enumerate(running.steps()):
            await asyncio.sleep(step.delay_s)
            victim = Process(suite, "scheduler-0")
            twice = number % 3 == 2
            running.faulted("stall_twice_s" if twice else "stall_s")
            victim.send(signal.SIGKILL)
            await victim.ended()
            if twice:
                victim.close()
                victim = await suite.successor(victim)
                await asyncio.sleep(0.2 * step.draw)
                victim.send(signal.SIGKILL)
                await victim.ended()
            await suite.ready(instead_of=victim)
            await running.settle()
            victim.close()
    report(running.judge(exactly=running.answers()))
    assert suite.pids("worker") == workers


async def test_a_gateway_killed_cuts_only_the_connections_that_it_had_accepted(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    killed = KilledGateways()
    async with trial("A4") as running:
        for step in running.steps():
            await asyncio.sleep(step.delay_s)
            victim = Process(suite, f"gateway-{step.slot}")
            killed_s = killed.kill(victim)
            await victim.ended()
            running.measured("ready_again_s", await suite.ready(instead_of=victim) - killed_s)
            _, lost_s, _ = suite.loss_of(victim.pid)
            running.measured("noticed_s", lost_s - killed_s)
            victim.close()
    report(running.judge(exactly={}, allowed=filter(killed.has_cut, running.ledger.sent)))
    assert running.after["hedgerow_queued_sequences"] == 0


async def test_a_stopped_worker_is_given_up_in_time_and_one_that_goes_on_is_not(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    stopped_for_good = 0
    async with trial("A5") as running:
        for number, step in enumerate(running.steps()):
            await asyncio.sleep(step.delay_s)
            victim = Process(suite, f"worker-{step.slot}")
            await until_running(suite, victim.name)
            stopped_s = victim.send(signal.SIGSTOP)
            if number % 2:
                # The design says up to 1.9 s; but by its beat it may have been silent for a quarter of a second before.
                await asyncio.sleep(1.0 + 0.6 * step.draw)
                victim.send(signal.SIGCONT)
            else:
                stopped_for_good += 1
                await victim.ended()
                await suite.ready(instead_of=victim)
                _, lost_s, reason = suite.loss_of(victim.pid)
                assert reason == "silent"
                running.measured("noticed_s", lost_s - stopped_s)
            victim.close()
    report(running.judge(exactly=lost(stopped_for_good, "silent") | running.answers()))


async def test_a_hung_worker_is_ended_and_the_log_says_where_it_was(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    kinds = (("HANG_WITH_GIL", "silent", "hung_python_s"), ("HANG", "overdue", "hung_step_s"))
    reasons = {"silent": 0, "overdue": 0}
    async with trial("A6") as running:
        for number, _ in enumerate(running.steps()):
            word, reason, series = kinds[number % 2]
            known = len(suite.losses())
            logged = len(suite.log())
            asked = running.ledger.ask(f"{word} w{number}")
            begun_s = await suite.fault_began()
            await running.ledger.until(asked)
            assert asked.outcome == "answered"
            losses = await suite.losses_by_now()
            ((_, lost_s, why),) = losses[known:]
            assert why == reason
            reasons[reason] += 1
            running.measured(series, lost_s - begun_s)
            assert "in _misbehave" in suite.log()[logged:]
    hung = lost(reasons["silent"], "silent") | lost(reasons["overdue"], "overdue")
    report(running.judge(exactly=hung | running.answers()))


async def test_a_stopped_scheduler_is_told_of_in_time_and_runs_nothing_that_was_answered_meanwhile(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    before = suite.pids("worker") | suite.pids("gateway")
    spans: list[tuple[float, float]] = []
    async with trial("A7") as running:
        for number, step in enumerate(running.steps()):
            await asyncio.sleep(step.delay_s)
            scheduler = Process(suite, "scheduler-0")
            scheduler.send(signal.SIGSTOP)
            stopped_s = running.now_s()
            await asyncio.sleep((1, 3, 5)[number % 3])
            scheduler.send(signal.SIGCONT)
            spans.append((stopped_s, running.now_s()))
            await suite.ready()
            await running.settle()
            scheduler.close()
    assert suite.pids("worker") | suite.pids("gateway") == before

    sent = running.ledger.sent
    expected: set[Sent] = set()
    for stopped_s, continued_s in spans:
        asked = [one for one in sent if stopped_s - 0.5 <= one.due_s < continued_s + 1]
        # Who was not told at once waits for the scheduler, as long as its deadline allows.
        expected |= {one for one in asked if one.detail == "504 deadline_exceeded" and one.due_s <= stopped_s + 2.5}
        told = [one for one in asked if one.detail == "503 no_capacity"]
        expected |= set(told)
        assert expected.issuperset(one for one in asked if stopped_s + 2.5 < one.due_s < continued_s)
        if told:
            assert continued_s - stopped_s > 2
            running.measured("told_s", told[0].ended_s - stopped_s)
            running.measured("refused_after_s", told[-1].due_s - continued_s)
        for one in told:
            running.measured("refusal_s", one.latency_s)
    answered_s = {digest(token_ids(text)): one.ended_s for one in sent for text in one.texts}
    begun = [(step.begun_s, known) for step in steps(suite.run_dir) for known in step.digests if known in answered_s]
    assert len(begun) >= running.moved["hedgerow_inputs_total"]
    running.measured("late_s", max(begun_s - answered_s[known] for begun_s, known in begun))
    # Their connections have ended meanwhile: the scheduler takes the same processes in again, over new ones.
    taken_in_again = ("reconnected", "disconnected")
    report(
        running.judge(
            exactly=running.answers(),
            allowed=expected,
            unknown={f'hedgerow_worker_losses_total{{reason="{reason}"}}' for reason in taken_in_again},
        )
    )
