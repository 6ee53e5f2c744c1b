"""The page of a load: one file, nothing of anybody's text run, nothing from another host."""

from __future__ import annotations

import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from benchmarks.clients import Load, Tally
from benchmarks.load import summarize
from benchmarks.report import picture, render

ORIGIN = {"command": "python load.py", "commit": None, "date": "2026-11-30", "cpu": "a CPU", "cores": 2, "gpu": None}
BODY = b'{"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 7}}'


def load_result(*latencies_s: float, name: str = "queries", model: str = "m") -> dict[str, object]:
    rows = []
    for latency_s in latencies_s:
        load = Load(name, 1, "query", encoding="float")
        tally = Tally(seconds=2.0)
        for number in range(20):
            tally.add(latency_s * (1 + number), [BODY], b"\r\nServer-Timing: queue;dur=1.5, step;dur=2.5", number / 10)
        rows.append({**asdict(load), **asdict(summarize([tally], load))})
    return {"benchmark": "load", "url": "http://127.0.0.1:1", "model": model, "loads": rows, **ORIGIN}


def profile_result() -> dict[str, object]:
    row = {"p50_ms": 1.0, "p99_ms": 2.0, "share": 0.5}
    stages = {"accept": row, "device": row, "sum of the stages": row}
    return {"benchmark": "profile_latency", "url": "u", "model": "m", "clients": 1, "followed": 9, "stages": stages} | {
        **ORIGIN
    }


def plots(page: str) -> list[str]:
    """The titles of the page's plots, each of which is well-formed."""
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


def test_a_load_has_a_histogram_its_throughput_and_its_stages() -> None:
    assert plots(render([load_result(0.010)])) == [
        "Mean time at each stage, as the server says (Server-Timing), ms",
        "Latencies: requests by milliseconds",
        "Answers in each second",
    ]


def test_loads_of_several_strengths_are_put_against_one_another() -> None:
    page = render([load_result(0.010), load_result(0.020)])

    assert plots(page)[0] == "Latency against load: query, 1 a request, float, closed loop"
    assert page.count("<circle") == 6


def test_the_stages_of_a_profile_are_shown_without_their_sum() -> None:
    page = render([profile_result()])

    assert plots(page) == ["Stages of 9 requests, 1 at a time, p50, ms"]
    assert page.count("<rect") == 4  # two bars, two of the legend


def test_queries_and_backfill_are_shown_alone_and_together() -> None:
    def phase(quantiles_ms: list[tuple[float, float]], tokens_per_s: float) -> dict[str, object]:
        return {"quantiles_ms": quantiles_ms, "backfill_tokens_per_s": tokens_per_s}

    phases = {
        "queries": phase([(50, 3.0), (99, 5.0)], 0),
        "backfill": phase([], 1000),
        "both": phase([(50, 4.0), (99, 9.0)], 900),
    }
    result = {"benchmark": "mixed", "url": "u", "model": "m", "lane": "backfill", "rate": 20.0, "phases": phases}

    page = render([result | ORIGIN])

    assert plots(page) == [
        "Latency of queries: so many percent took no longer",
        "Backfill, percent of what it does alone",
    ]
    assert page.count("<circle") == 4
    assert "90.00" in page


def test_a_load_that_nothing_answered_is_shown_as_that() -> None:
    load = Load("none", 1, "query")
    row = {**asdict(load), **asdict(summarize([Tally(seconds=2.0)], load))}

    page = render([{"benchmark": "load", "url": "u", "model": "m", "loads": [row], **ORIGIN}])

    assert plots(page) == []
    assert "<td>none" in page


def test_what_others_have_named_is_text_and_nothing_is_loaded() -> None:
    page = render([load_result(0.010, name="<script>alert(1)</script>", model='"><img src=x>')])

    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;img src=x&gt;" in page
    assert not re.search(r"<(?:script|img|link|iframe|object|image)|href|@import|url\(", page)


@pytest.mark.parametrize(
    ("result", "title"),
    [
        (load_result(0.010, 0.020), "Latency against load: query, 1 a request, float, closed loop"),
        (profile_result(), "Stages of 9 requests, 1 at a time, p50, ms"),
    ],
    ids=["loads", "profile"],
)
def test_a_plot_is_a_picture_of_its_own(result: dict[str, object], title: str) -> None:
    svg = ElementTree.fromstring(picture([result]))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert next(text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")) == title


def test_of_a_single_load_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no plot"):
        picture([load_result(0.010)])
