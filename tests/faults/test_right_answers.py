"""Inputs that break what runs them, and devices that fall short: nobody else's answer is touched."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time

import pytest

from tests.fakes import oracle_vector
from tests.faults.conftest import Report, StartTrial
from tests.faults.oracle import MAX_BATCH_TOKENS, Memory, token_ids
from tests.faults.rig import OracleSuite
from tests.faults.trial import dead
from tests.gateway.wire import Answer, Wire, ask, embed, request_bytes

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

COMPANY = 32


def company(number: int, places: dict[int, str]) -> list[str]:
    """The texts of a batch of 32, other ones for each number up to 124, with these words before some of them."""
    return [f"{places.get(place, '')} w{number * COMPANY + place}".strip() for place in range(COMPANY)]


async def ask_partial(suite: OracleSuite, texts: list[str], **fields: object) -> Answer:
    """All in one request, which is one batch, that may fail in part."""
    wire = await Wire.connect(suite.port)
    try:
        body = json.dumps({"input": texts, "partial": True} | fields).encode()
        await wire.send(request_bytes("POST", "/v1/embeddings", body, {"X-Request-Timeout-Ms": "20000"}))
        return await wire.answer(timeout_s=25)
    finally:
        await wire.close()


def assert_all_but(answer: Answer, texts: list[str], failed: dict[int, str]) -> None:
    """Every text has the oracle's row, bit by bit, but for those that failed, each with its code."""
    assert answer.status == 200, answer.body
    body = answer.json
    assert {entry["index"]: entry["error"]["code"] for entry in body["errors"]} == failed
    rows = {row["index"]: base64.b64decode(row["embedding"]) for row in body["data"]}
    assert rows == {
        index: oracle_vector(token_ids(text)).tobytes() for index, text in enumerate(texts) if index not in failed
    }


async def test_what_is_not_finite_fails_alone_at_every_place_and_no_body_holds_a_nan(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    async with trial("D3") as running:
        for number, _ in enumerate(running.steps()):
            place = number % COMPANY
            texts = company(number, {place: "NAN NAN"})  # twice, one after the other
            alone = f"NAN w{number}"
            answer, refused, neighbour = await asyncio.gather(
                ask_partial(suite, texts, encoding_format="base64"),
                embed(suite.port, {"input": alone}),
                embed(suite.port, {"input": [f"w{number}"] * 3}),
            )
            assert_all_but(answer, texts, {place: "nonfinite_output"})
            assert (refused.status, refused.error["code"]) == (500, "nonfinite_output")
            assert refused.headers["x-should-retry"] == "false"
            assert neighbour.status == 200
            # As numbers: base64 may spell anything.
            numbers = await ask_partial(suite, texts)
            assert not any(word in body for body in (neighbour.body, numbers.body) for word in (b"NaN", b"Infinity"))
            assert all(None not in row["embedding"] for row in numbers.json["data"])
    report(running.judge(exactly={"hedgerow_nonfinite_rows_total": 3 * len(running.steps())}))


async def test_a_device_short_of_memory_gets_smaller_batches_and_what_fits_nowhere_is_413(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    memory = Memory(suite.run_dir)
    fitting = MAX_BATCH_TOKENS // 2
    long = "w1 " * fitting
    workers = suite.pids("worker")
    try:
        async with trial("D4") as running:
            before = (await asyncio.to_thread(suite.metrics)).get("hedgerow_memory_splits_total", 0)
            memory.num_tokens = fitting
            # Full batches, one after the other: each failed, before the scheduler was told.
            for number in range(20 * len(running.steps())):
                asked = running.ledger.ask(*company(number, {}))
                await running.ledger.until(asked)
            after = (await asyncio.to_thread(suite.metrics))["hedgerow_memory_splits_total"]
            assert after > before
            running.measured("splits", after - before)
            answer = await ask_partial(suite, ["w1", long, "w2"], encoding_format="base64")
            assert_all_but(answer, ["w1", long, "w2"], {1: "input_too_large_for_device"})
            refused = await embed(suite.port, {"input": long})
            assert (refused.status, refused.error["code"]) == (413, "input_too_large_for_device")
            assert refused.headers["x-should-retry"] == "false"
            memory.num_tokens = None
            if running.soak:  # it takes a minute, which tests/scheduler/test_fleet.py has go by on a clock of its own
                async with asyncio.timeout(75):
                    while is_short_of_memory(suite):
                        await asyncio.sleep(0.25)
    finally:
        memory.num_tokens = None
    report(running.judge(exactly={}))
    assert suite.pids("worker") == workers


def is_short_of_memory(suite: OracleSuite) -> bool:
    """Whether any worker gets smaller batches, by what the scheduler last said of it."""
    last = dict(re.findall(r"(worker-\d) (had no memory|gets full batches)", suite.log()))
    return "had no memory" in last.values()


async def send_again(suite: OracleSuite, text: str, times: int) -> None:
    """Send an input in quarantine, again and again over one connection."""
    request = request_bytes("POST", "/v1/embeddings", json.dumps({"input": ["w1", text]}).encode())
    wire = await Wire.connect(suite.port)
    for _ in range(times):
        await wire.send(request)
        refused = await wire.answer()
        assert (refused.status, refused.error["code"]) == (500, "input_quarantined")
        assert refused.error["param"] == "input[1]"
        assert refused.headers["x-should-retry"] == "false"
    await wire.close()


async def nobody_ready_s(suite: OracleSuite) -> float:
    """For how long /ready has told of no worker, by the end of this task."""
    total_s = 0.0
    looked_s = time.monotonic()
    while True:
        try:
            await asyncio.sleep(0.02)
            ready = (await ask(suite.port, "GET", "/ready")).status == 200
        except asyncio.CancelledError:
            return total_s
        before_s, looked_s = looked_s, time.monotonic()
        total_s += 0.0 if ready else looked_s - before_s


async def test_a_deadly_input_costs_three_workers_at_most_and_none_when_it_is_sent_again(
    suite: OracleSuite, trial: StartTrial, report: Report
) -> None:
    deaths = 0
    async with trial("D5") as running:
        for number, step in enumerate(running.steps()):
            await asyncio.sleep(step.delay_s)
            # At the ends, then anywhere; every third time two of them.
            place = [0, COMPANY - 1][number] if number < 2 else int(step.draw * (COMPANY - 1))
            places = [place, place + 1 + int(step.draw * (COMPANY - 1 - place))] if number % 3 == 2 else [place]
            texts = company(number, dict.fromkeys(places, "ABORT " * 12))
            losses = len(suite.losses())
            looks = asyncio.create_task(nobody_ready_s(suite))
            sent_s = time.monotonic()
            answer = await ask_partial(suite, texts, encoding_format="base64")
            running.measured("neighbours_s", time.monotonic() - sent_s)
            assert_all_but(answer, texts, dict.fromkeys(places, "input_quarantined"))
            died = len(await suite.losses_by_now()) - losses
            running.measured("deaths", died / len(places))
            looks.cancel()
            running.measured("nobody_ready_s", await looks / len(places))
            deaths += died
            losses += died
            await asyncio.gather(*(send_again(suite, texts[places[-1]], times=100) for _ in range(10)))
            assert len(suite.losses()) == losses
    report(running.judge(exactly=dead(deaths)))
