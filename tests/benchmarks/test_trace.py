"""What is read from a profile, with times that can be added up by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.trace import Span, idle_us, read_spans, split_steps, summarize, svg

LANE = "kernels, stream 7"
# Two steps of two kernels: 0-10, 12-20 | 25-35, 38-45.
STEPS = [
    Span(LANE, "first", 0, 10),
    Span(LANE, "second", 12, 20),
    Span(LANE, "first", 25, 35),
    Span(LANE, "second", 38, 45),
]


def test_idle_time_is_what_no_span_covers() -> None:
    assert idle_us(STEPS) == 2 + 5 + 3


def test_spans_that_overlap_are_busy_once() -> None:
    assert (
        idle_us([Span(LANE, "a", 0, 10), Span(LANE, "b", 2, 4), Span(LANE, "c", 9, 12), Span(LANE, "d", 15, 16)]) == 3
    )


def test_kernels_belong_to_no_step_when_they_do_not_divide_evenly() -> None:
    assert split_steps(STEPS, 3) is None


def test_a_timeline_tells_idle_time_within_steps_from_that_between_them() -> None:
    timeline = summarize([*STEPS, Span("copies, stream 9", "copy", 46, 80)], num_steps=2)

    assert timeline.idle_share == pytest.approx(10 / 45)
    assert timeline.kernels_per_step == 2
    assert timeline.step_us == 20
    assert timeline.within_us == 2.5
    assert timeline.between_us == 5


def test_kernels_are_ordered_by_the_time_that_they_take() -> None:
    first, second = summarize(STEPS, num_steps=2).top

    assert (first.name, first.per_step, first.mean_us) == ("first", 1, 10)
    assert second.share == pytest.approx(15 / 35)


def test_a_profile_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        summarize([Span("copies, stream 9", "copy", 0, 1)], num_steps=1)


def test_kernels_and_copies_are_read_from_a_trace_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    events = [
        {"ph": "X", "cat": "kernel", "name": "late", "ts": 5.5, "dur": 2, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 1, "dur": 1, "args": {"stream": 9}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))

    spans = read_spans(path)

    assert spans == [Span("copies, stream 9", "copy", 1, 2), Span(LANE, "late", 5.5, 7.5)]


def test_the_picture_has_one_box_a_span_and_escapes_names() -> None:
    picture = svg([Span(LANE, "f<int>", 0, 1), Span(LANE, "g", 1, 2)], {"f<int>": "#1f77b4"}, "two & two")

    assert picture.count("<title>") == 2
    assert "f&lt;int&gt;: 1.0 µs from 0.0 on" in picture
    assert "two &amp; two" in picture
