"""That the stages of a request are all there, in order, and add up; from hand-made times and from the real suite."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Iterator

import pytest

from benchmarks.clients import Target
from benchmarks.profile_latency import (
    ALL_STAGES,
    BUDGET_US,
    Followed,
    Measured,
    ProfileError,
    ask_all,
    budget_rows,
    chrome_trace,
    stage_rows,
)
from benchmarks.texts import LONGEST_TEXT, Corpus, invent_text
from gateway.trace import MOMENTS, STAGES
from tests.suite import Suite

START_NS = 5_000_000


def header_of(batches: int = 1, **changes: object) -> bytes:
    """An answer's: a millisecond between any two moments, a piece after the other."""
    times_ns = [[(4 + index + 100 * piece) * 1_000_000 for index in range(13)] for piece in range(batches)]
    last_ms = times_ns[-1][-1] // 1_000_000
    pieces = [
        {"batch": 7 + number, "worker": "worker-0", "sequences": 2, "tokens": 40, "times_ns": piece}
        for number, piece in enumerate(times_ns)
    ]
    said = {
        "pid": 12,
        "start_ns": START_NS,
        "before_ns": [0, 1_000_000, 2_000_000, 3_000_000],
        "after_ns": [(last_ms + 1) * 1_000_000, (last_ms + 2) * 1_000_000],
        "pieces": pieces,
        **changes,
    }
    return b"HTTP/1.1 200 OK\r\nX-Trace: %b\r\nContent-Length: 2" % json.dumps(said).encode()


def followed(client: int = 0, batches: int = 1) -> Followed:
    end_ns = START_NS + (18 + 100 * (batches - 1) + 3) * 1_000_000
    return Followed.of(header_of(batches), client, START_NS - 1_000_000, end_ns)


def test_the_stages_lie_between_the_moments_and_leave_nothing_out() -> None:
    stages_ms = followed().stages_ms()

    assert list(stages_ms) == ["accept", *STAGES, "write"]
    assert len(STAGES) == len(MOMENTS) - 1
    assert stages_ms == dict.fromkeys(ALL_STAGES, 1.0) | {"write": 3.0}


def test_the_stages_of_a_request_in_pieces_are_those_of_the_last_one() -> None:
    assert followed(batches=3).stages_ms()["send"] == 201.0
    assert followed(batches=3).latency_ms == 222.0


def test_every_stage_is_in_one_group_of_the_budget() -> None:
    assert sorted(name for names, _ in BUDGET_US.values() for name in names) == sorted(ALL_STAGES)


def test_shares_add_up_to_one() -> None:
    rows = stage_rows([followed(), followed(batches=2)])

    assert rows.pop("sum of the stages").share == pytest.approx(1.0)
    assert sum(row.share for row in rows.values()) == pytest.approx(1.0)
    assert sum(row.share for row in budget_rows([followed()]).values()) == pytest.approx(1.0)
    assert rows["send"].p99_ms == 101.0


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2", "without X-Trace"),
        (header_of(after_ns=[1, 2]), "out of order"),
        (header_of(start_ns=10**15), "out of order"),
    ],
    ids=["no header", "backwards", "another clock"],
)
def test_what_cannot_be_used_is_said(header: bytes, told: str) -> None:
    with pytest.raises(ProfileError, match=told):
        Followed.of(header, 0, START_NS - 1, START_NS + 10**9)


def test_the_trace_has_lanes_for_every_process_and_each_batch_once() -> None:
    trace = chrome_trace([followed(0), followed(1)])

    events: list[dict] = trace["traceEvents"]  # type: ignore[assignment]
    lanes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert lanes == ["clients", "scheduler", "gateway (pid 12)", "worker-0: CPU", "worker-0: device"]
    assert [event["name"] for event in events if event["name"] == "batch 7"] == ["batch 7"]
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_arrows_begin_and_end_within_a_slice_of_their_lane() -> None:
    events: list[dict] = chrome_trace([followed(0, batches=2)])["traceEvents"]  # type: ignore[assignment]

    arrows = [event for event in events if event["ph"] in "stf"]
    assert [event["ph"] for event in arrows] == ["s", "t", "t", "t", "t", "f"] * 2
    for arrow in arrows:
        assert any(
            event["ph"] == "X"
            and (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
            for event in events
        )


# --- the real suite ---


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        suite = Suite(f"{folder}/run", "--gateways", "1", "--threads", "1")
        try:
            suite.wait_until_ready()
            yield suite
        finally:
            suite.stop()


def profile(suite: Suite, **options: object) -> Measured:
    corpus = Corpus(invent_text(LONGEST_TEXT + 1000, seed=0))
    target = Target.find(suite.url, None, corpus)
    defaults = {"clients": 1, "requests": 12, "warm_up": 2, "sample": 0.5, "texts_per_request": 1}
    return asyncio.run(ask_all(target, corpus, 12, argparse.Namespace(**{**defaults, **options})))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{}, {"clients": 4, "requests": 24}, {"texts_per_request": 40, "requests": 2, "sample": 1.0}],
    ids=["one at a time", "batches of several", "in pieces"],
)
def test_the_stages_of_real_requests_are_ordered_and_add_up_to_what_the_client_sees(
    suite: Suite, options: dict[str, object]
) -> None:
    measured = profile(suite, **options)

    for one in measured.followed:
        stages_ms = one.stages_ms()
        assert min(stages_ms.values()) >= 0
        assert stages_ms["device"] > 0
        assert sum(stages_ms.values()) == pytest.approx(one.latency_ms, rel=0.05)
        assert [piece.times_ns["heard"] for piece in one.pieces] == sorted(
            piece.times_ns["heard"] for piece in one.pieces
        )
    assert len(measured.followed) + len(measured.others_ms) == options.get("requests", 12)
    assert len(measured.followed) >= len(measured.others_ms)
    assert chrome_trace(measured.followed)["traceEvents"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_long_request_shows_the_batches_that_it_ran_in(suite: Suite) -> None:
    (one,) = profile(suite, texts_per_request=40, requests=1, warm_up=0, sample=1.0).followed

    assert len({piece.batch for piece in one.pieces}) > 1
    assert sum(piece.num_sequences for piece in one.pieces) == 40


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("headers", "traced"),
    [({}, False), ({"X-Trace": "0"}, False), ({"X-Trace": "1"}, True)],
    ids=["by default", "0", "1"],
)
def test_an_answer_tells_its_moments_only_where_it_is_asked(
    suite: Suite, headers: dict[str, str], traced: bool
) -> None:
    request = urllib.request.Request(
        f"{suite.url}/v1/embeddings", b'{"input":"one"}', {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request) as answer:
        timing = [part.partition(";")[0] for part in answer.headers["Server-Timing"].split(", ")]
        given = answer.headers["X-Trace"]

    assert (given is not None) == traced
    assert timing[:6] == ["parse", "tokenize", "queue", "step", "render", "total"]
    assert timing[6:] == ([name for name in STAGES if name not in timing[:6]] if traced else [])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_refusal_and_what_runs_no_model_have_no_moments(suite: Suite) -> None:
    headers = {"Content-Type": "application/json", "X-Trace": "1"}
    bad = urllib.request.Request(f"{suite.url}/v1/embeddings", b'{"input":""}', headers)
    local = urllib.request.Request(f"{suite.url}/tokenize", b'{"inputs":"one"}', headers)

    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(bad)
    refused.value.close()
    with urllib.request.urlopen(local) as answer:
        assert answer.headers["X-Trace"] is None

    assert refused.value.code == 400
    assert refused.value.headers["X-Trace"] is None
