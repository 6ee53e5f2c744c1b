"""A trace of steps that cannot be had or written: whoever asked is told, and steps go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.autograd import profiler

from worker.process.profiling import NUM_STEPS, StepProfiler


def run_steps(steps: StepProfiler, count: int) -> None:
    for _ in range(count):
        steps.before_step()
        steps.after_step()


def test_a_trace_that_cannot_begin_is_told_of_and_nothing_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(profile: profiler.profile) -> None:
        raise RuntimeError("it is in use")

    monkeypatch.setattr(profiler.profile, "__enter__", refuse)
    steps = StepProfiler(tmp_path / "trace.json")
    steps.ask()
    run_steps(steps, 2 * NUM_STEPS)
    assert [record.getMessage() for record in caplog.records] == ["steps cannot be traced: it is in use"]
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_that_cannot_be_written_is_told_of_and_the_next_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = StepProfiler(tmp_path / "gone" / "trace.json")
    steps.ask()
    run_steps(steps, NUM_STEPS)
    assert "could not be written" in caplog.text

    (tmp_path / "gone").mkdir()
    steps.ask()
    run_steps(steps, NUM_STEPS)
    assert (tmp_path / "gone" / "trace.json").stat().st_size > 0
