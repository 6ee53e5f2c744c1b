"""What the other tests here rest on: faults happen as asked for, schedules repeat, verdicts can be bad."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from tests.fakes import oracle_vector
from tests.faults.conftest import StartTrial
from tests.faults.ledger import Ledger, Sent, judged
from tests.faults.oracle import token_ids
from tests.faults.promises import QUIET, Figure, measured, schedule
from tests.faults.rig import OracleSuite
from tests.gateway.wire import Answer


def test_a_seed_has_one_schedule() -> None:
    assert schedule(7, 5) == schedule(7, 5)
    assert schedule(7, 5) != schedule(8, 5)


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert Figure("s", 1, 0).of(values) == 4.0
    assert Figure("s", 0.95, 0).of(values) == 3.0  # one of four may be chance
    assert Figure("s", 0.5, 0).of(values) == 2.0


def test_a_series_that_no_figure_is_made_of_is_not_passed_over() -> None:
    with pytest.raises(AssertionError, match="no figure is made of"):
        measured((Figure("s", 1, 0),), {"s": [0.0], "other_s": [0.0]})


def answer(*texts: str, status: int = 200, request_id: str = "a", indices: tuple[int, ...] = (0, 1)) -> Answer:
    rows = [base64.b64encode(oracle_vector(token_ids(text)).tobytes()).decode() for text in texts]
    data = [{"index": index, "embedding": row} for index, row in zip(indices, rows, strict=False)]
    usage = {"prompt_tokens": sum(len(token_ids(text)) for text in texts)}
    body = {"data": data, "usage": usage, "error": {"code": "overloaded"}}
    return Answer("HTTP/1.1", status, {"x-request-id": request_id}, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (answer("w1", "w2 w3"), "answered"),
        (answer("w2 w3", "w1"), "wrong"),
        (answer("w1", "w2 w4"), "wrong"),
        (answer("w1"), "wrong"),
        (answer("w1", "w2 w3", indices=(1, 0)), "wrong"),
        (answer("w1", "w2 w3", request_id="b"), "wrong"),
        (answer("w1", "w2 w3", status=429), "refused"),
    ],
)
def test_an_answer_is_right_when_every_bit_of_it_is(found: Answer, outcome: str) -> None:
    assert judged(Sent("a", ["w1", "w2 w3"], due_s=0.0), found)[0] == outcome


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "lost", "outcome", "detail"),
    [
        ("ABORT w1", 1, "answered", ""),
        ("EXIT w1", 1, "answered", ""),
        ("SHORT_RESULT w1", 1, "answered", ""),
        ("WRONG_DIMENSION w1", 1, "answered", ""),
        ("ABORT ABORT ABORT w2", 3, "refused", "500 input_quarantined"),
        ("NAN w3901", 0, "refused", "500 nonfinite_output"),
    ],
)
async def test_a_fault_word_costs_as_many_workers_as_it_says_and_nobody_else_their_answer(
    suite: OracleSuite, text: str, lost: int, outcome: str, detail: str
) -> None:
    losses = len(suite.losses())
    async with Ledger(suite.port, QUIET, seed=1) as ledger:
        asked = ledger.ask("w7", text, "w8")
        await ledger.until(asked)
    assert (asked.outcome, asked.detail) == (outcome, detail)
    assert {sent.outcome for sent in ledger.sent if sent is not asked} <= {"answered"}
    assert len(await suite.losses_by_now()) - losses == lost


@pytest.mark.slow
@pytest.mark.thorough
async def test_a_promise_that_is_not_kept_fails_its_trial(suite: OracleSuite, trial: StartTrial) -> None:
    async with trial("A2") as running:
        asked = running.ledger.ask("NAN w3902")
        await running.ledger.until(asked)
        for series in ("noticed_s", "not_ready_s"):
            running.measured(series, 0.0)
        running.measured("ready_again_s", 7.5)
        await asyncio.sleep(0.2)
    with pytest.raises(AssertionError) as failed:
        running.judge(exactly={"hedgerow_nonfinite_rows_total": 2})
    assert "refused: 500 nonfinite_output" in str(failed.value)
    assert "ready_again_s p95 7.500 <= 7: [7.5]" in str(failed.value)
    assert "hedgerow_nonfinite_rows_total moved by 1, not 2" in str(failed.value)
