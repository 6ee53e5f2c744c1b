"""Faults of every kind at any time, also several at once, where nobody waits until the one before is mended."""

from __future__ import annotations

import asyncio
import json
import random
import signal

import pytest

from tests.faults.conftest import Report, StartTrial
from tests.faults.rig import KilledGateways, OracleSuite, Process
from tests.gateway.wire import request_bytes

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

_PAUSE_S = 2.0
_LONGEST_STOP_S = 3.0
_LONGEST_STOP_OF_SCHEDULER_S = 1.2  # beyond two seconds of its silence gateways refuse what is new


class Monkey:
    """Does what a schedule draws, and keeps the books of what connections that has ended."""

    def __init__(self, suite: OracleSuite, seed: int) -> None:
        self.done: list[str] = []
        self.killed = KilledGateways()
        self._suite = suite
        self._rng = random.Random(seed)
        self._stopped: set[asyncio.Task[None]] = set()

    async def act(self) -> None:
        """One fault. The process that it is meant for may just not be there; then another one is taken."""
        kind = self._rng.choice(("kill", "kill", "stop", "stop", "cut", "unlink"))
        if kind == "cut":
            self.done.append(kind)
            await self._cut()
        elif kind == "unlink":
            side = self._rng.choice(("gateways", "workers"))
            self.done.append(f"{kind} {side}")
            (self._suite.run_dir / f"{side}.sock").unlink(missing_ok=True)
        else:
            while not self._signal(kind):
                await asyncio.sleep(0.05)

    def _signal(self, kind: str) -> bool:
        """Kill or stop a process; whether there was one that has not died of what was done before."""
        names = [name for role in ("gateway", "scheduler", "worker") for name in self._suite.pids(role)]
        if not names:
            return False
        name = self._rng.choice(names)
        try:
            process = Process(self._suite, name)
        except ProcessLookupError:
            return False
        try:
            self._kill(process) if kind == "kill" else self._stop(process)
        except OSError:  # of a signal, or of a look into /proc
            process.close()
            return False
        self.done.append(f"{kind} {name}")
        return True

    async def rest(self) -> None:
        """Wait until all that was stopped goes on."""
        await asyncio.gather(*self._stopped)

    def _kill(self, process: Process) -> None:
        if process.role == "gateway":
            self.killed.kill(process)
        else:
            process.send(signal.SIGKILL)
        process.close()

    def _stop(self, process: Process) -> None:
        longest_s = _LONGEST_STOP_OF_SCHEDULER_S if process.role == "scheduler" else _LONGEST_STOP_S
        process.send(signal.SIGSTOP)
        task = asyncio.create_task(self._continue(process, self._rng.uniform(0.1, longest_s)))
        self._stopped.add(task)
        task.add_done_callback(self._stopped.discard)

    async def _continue(self, process: Process, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            process.send(signal.SIGCONT)
        except ProcessLookupError:
            pass  # killed meanwhile, or given up
        process.close()

    async def _cut(self) -> None:
        """Clients that leave: in the middle of a body, or before they have their answer."""
        body = json.dumps({"input": [f"w{number}" for number in range(8)]}).encode()
        whole = request_bytes("POST", "/v1/embeddings", body)
        for sent in (whole, whole[:-10]):
            _, writer = await asyncio.open_connection("127.0.0.1", self._suite.port)
            writer.write(sent)
            await writer.drain()
            writer.transport.abort()


async def test_whatever_befalls_any_process_nobody_fails_but_whom_a_killed_gateway_had_accepted(
    suite: OracleSuite, trial: StartTrial, seed: int, report: Report
) -> None:
    async with trial("A10") as running:
        monkey = Monkey(suite, seed)
        for _ in running.steps():
            await asyncio.sleep(_PAUSE_S)
            await monkey.act()
        await monkey.rest()
        last_s = running.now_s()
        await asyncio.sleep(0.3)  # gauges are set four times a second
        await suite.ready()
        running.measured("ready_again_s", running.now_s() - last_s)
    # Which of several detectors sees a worker's end first is left to chance here.
    unknown = {name for name in running.moved if name.startswith("hedgerow_worker_losses_total")}
    try:
        line = running.judge(exactly={}, allowed=filter(monkey.killed.has_cut, running.ledger.sent), unknown=unknown)
    except AssertionError as error:
        error.add_note(", ".join(monkey.done))
        raise
    report(line)


async def test_a_scheduler_and_a_worker_that_die_while_a_gateway_stops_fail_no_request(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("A12") as running:
        for number, step in enumerate(running.steps()):
            await asyncio.sleep(step.delay_s)
            faults = [
                ("scheduler-0", signal.SIGKILL),
                (f"worker-{step.slot}", signal.SIGKILL),
                (f"gateway-{step.slot}", signal.SIGTERM),
            ]
            del faults[number % 4 : number % 4 + 1]  # every pair, and all three
            random.Random(step.draw).shuffle(faults)
            victims = [Process(suite, name) for name, _ in faults]
            running.faulted()
            for victim, (_, number_of_signal) in zip(victims, faults, strict=True):
                await asyncio.sleep(0.15 * step.draw)
                victim.send(number_of_signal)
            begun_s = running.now_s()
            for victim in victims:
                await victim.ended()
                await suite.ready(instead_of=victim)
                victim.close()
            running.measured("ready_again_s", running.now_s() - begun_s)
            await running.settle()
    # A worker's death is seen by the scheduler that dies with it, or by none.
    unknown = {name for name in running.moved if name.startswith("hedgerow_worker_losses_total")}
    report(running.judge(exactly=running.answers(), unknown=unknown))
