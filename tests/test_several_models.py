"""The real suite with two models (`hedgerow serve A=... B=...`), and what one's deaths are to the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.config import WorkerConfig
from common.metrics import Metrics
from common.model_location import ModelFolder
from tests.gateway.wire import embed
from tests.models import bert_config, write_bert
from tests.models import embed as embed_alone
from tests.suite import Suite
from worker.engine.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HIDDEN = {"A": 32, "B": 16}
SEQUENCE = [5, 9, 7, 23]  # as token ids, which both take as they are


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        for name, hidden in HIDDEN.items():
            write_bert(Path(folder, name), config=bert_config(hidden_size=hidden))
        yield Path(folder)


@pytest.fixture(scope="module")
def suite(folder: Path) -> Iterator[Suite]:
    models = [f"{name}={folder / name}" for name in HIDDEN]
    suite = Suite(f"{folder}/run", *models, "--gateways", "1", "--threads", "1")
    try:
        suite.wait_until_ready(workers=2)
        yield suite
    finally:
        assert suite.stop() == 0


def processes(suite: Suite) -> dict[str, int]:
    """The processes of a suite by the names that supervisord has for them."""
    found: dict[str, int] = {}
    for pid in Path(f"/proc/{suite.process.pid}/task/{suite.process.pid}/children").read_text().split():
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.decode().partition("=")
            if name == "SUPERVISOR_PROCESS_NAME":
                found[value] = int(pid)
    return found


async def ask(suite: Suite, model: str) -> list[float]:
    answer = await embed(suite.port, {"input": SEQUENCE, "model": model})
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return answer.json["data"][0]["embedding"]


async def test_each_model_answers_with_its_own_vectors(suite: Suite, folder: Path) -> None:
    for name, hidden in HIDDEN.items():
        config = WorkerConfig(run_dir="unused", device="cpu")
        alone = embed_alone(
            Engine(ModelFolder(name, folder / name), config, Metrics()), [SEQUENCE], width=hidden, normalize=[1]
        )
        assert alone.shape == (1, hidden)
        np.testing.assert_allclose(await ask(suite, name), alone[0], rtol=0, atol=1e-6)
    assert (await embed(suite.port, {"input": SEQUENCE, "model": "C"})).status == 404


async def test_processes_sockets_and_counts_of_each_are_apart(suite: Suite) -> None:
    for name in HIDDEN:
        await ask(suite, name)
    assert set(processes(suite)) == {"scheduler-A", "scheduler-B", "worker-A-0", "worker-B-0", "gateway-0"}
    for name in HIDDEN:
        assert Path(suite.run_dir, name, "workers.sock").is_socket()
        assert f" worker-{name}-0 common.deploy.process: starting: " in suite.log()
    lines = suite.get("/metrics")[1].decode().splitlines()
    assert [line for line in lines if line.startswith("hedgerow_workers{")] == [
        f'hedgerow_workers{{model="{name}",state="{state}"}} 1.0' for name in HIDDEN for state in ("ready", "total")
    ]


@pytest.mark.thorough
async def test_the_death_of_one_models_processes_is_nothing_to_the_other(suite: Suite) -> None:
    before = processes(suite)
    expected = await ask(suite, "B")
    answered: list[list[float]] = []
    stop = asyncio.Event()

    async def ask_for_b() -> None:
        while not stop.is_set():
            answered.append(await ask(suite, "B"))

    asking = asyncio.create_task(ask_for_b())
    times_down = 0
    for victim in ("scheduler-A", "worker-A-0", "scheduler-A"):
        os.kill(processes(suite)[victim], signal.SIGKILL)
        held = asyncio.create_task(ask(suite, "A"))  # is answered by what comes after
        async with asyncio.timeout(60):
            while (ready := await asyncio.to_thread(suite.get, "/ready"))[0] != 200 or not held.done():
                state = json.loads(ready[1])["models"]
                times_down += state["A"]["status"] != "ready"
                assert state["B"]["status"] == "ready"
                await asyncio.sleep(0.02)
        assert len(await held) == HIDDEN["A"]
    stop.set()
    await asking

    assert times_down > 0
    assert answered == [expected] * len(answered)
    assert len(answered) > 10
    after = processes(suite)
    assert {name for name in before if before[name] != after[name]} == {"scheduler-A", "worker-A-0"}
