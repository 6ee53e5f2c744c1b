"""Due times are those that were asked for, however many processes they are dealt out to."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import pytest

from benchmarks.arrivals import Arrivals


def test_random_arrivals_come_as_often_as_asked_and_at_any_distance() -> None:
    due_s = Arrivals("poisson", 100.0).due_s(10.0, 90.0)
    gaps_s = sorted(later - earlier for earlier, later in pairwise(due_s))

    assert len(due_s) == pytest.approx(10_000, rel=0.03)
    assert due_s == sorted(due_s)
    assert due_s[-1] < 100.0
    # Of an exponential distribution the median is ln 2 of the mean, and 5 % are above three times the mean.
    assert gaps_s[len(gaps_s) // 2] == pytest.approx(0.00693, rel=0.05)
    assert gaps_s[int(len(gaps_s) * 0.95)] == pytest.approx(0.02996, rel=0.1)


def test_bursts_come_at_once_and_as_often_as_makes_the_rate() -> None:
    assert Arrivals("bursts", 4.0, burst_size=2).due_s(0.0, 1.6) == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]


@pytest.mark.parametrize("kind", ["poisson", "bursts"])
def test_processes_share_the_times_of_one(kind: str) -> None:
    arrivals = Arrivals(kind, 50.0, burst_size=3, seed=5)  # type: ignore[arg-type]  # a literal

    dealt = [arrivals.due_s(1.0, 2.0, number, 3) for number in range(3)]

    assert sorted(chain.from_iterable(dealt)) == arrivals.due_s(1.0, 2.0)


def test_a_replay_begins_when_measuring_does_and_is_as_long_as_its_file(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text('1005.0\n\n{"timestamp": 1003}\n{"id": 1, "arrival_s": 1004.5}\n')

    arrivals = Arrivals.replay(path, speed=2.0)

    assert arrivals.times_s == (0.0, 0.75, 1.0)
    assert arrivals.rate == 3.0
    due_s = arrivals.due_s(2.0, 0.9)
    assert due_s[-2:] == [2.0, 2.75]
    assert all(time_s < 2.0 for time_s in due_s[:-2])


@pytest.mark.parametrize(
    ("text", "told"),
    [("5\n", "two different times"), ("5\n5", "two different times"), ('5\n{"id": 1}', "arrival_s or")],
)
def test_a_file_without_times_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text(text)

    with pytest.raises(ValueError, match=told):
        Arrivals.replay(path)


@pytest.mark.parametrize(("rate", "burst_size"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_arrivals_that_never_come_are_refused(rate: float, burst_size: int) -> None:
    with pytest.raises(ValueError, match="a rate above 0"):
        Arrivals("bursts", rate, burst_size)
