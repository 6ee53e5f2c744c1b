"""When requests are due in an open loop, whatever the server does: at random, in bursts, or as they once came.

An open loop is what a crowd of clients is that know nothing of each other: who comes next does not wait for who came
before. Each request has a due time that is settled in advance, and its latency counts from there, so a server that
stands still for a second is charged for everybody who would have come meanwhile. (A closed loop, whose clients send the
next request when they have an answer, sends nothing then, and so leaves out the worst: "coordinated omission".)

The same seed gives the same times, to whichever number of processes they are dealt out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TIME_NAMES = ("arrival_s", "timestamp", "time")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` requests a second on average; of "replay" `times_s`, from its first one on, as they are."""

    kind: Literal["poisson", "bursts", "replay"]
    rate: float
    burst_size: int = 1
    times_s: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0 or self.burst_size < 1:
            raise ValueError("a rate above 0, and bursts of at least one request, are needed")

    @classmethod
    def replay(cls, path: Path, speed: float = 1.0) -> Arrivals:
        """The times of a file, in seconds: a number a line, or JSON objects with `arrival_s`, `timestamp` or `time`.

        Raises:
            ValueError: there are fewer than two times, or a line has none.
        """
        times_s = sorted(_time_of(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        if len(times_s) < 2 or times_s[0] == times_s[-1]:
            raise ValueError(f"{path}: two different times at least are needed")
        times_s = [(time_s - times_s[0]) / speed for time_s in times_s]
        return cls("replay", len(times_s) / times_s[-1], times_s=tuple(times_s))

    def due_s(self, warm_up_s: float, measured_s: float, number: int = 0, count: int = 1) -> list[float]:
        """The due times from 0 on of process `number` of `count`, ascending.

        Of "replay" the file's begin at `warm_up_s`; before that requests come at random, as often on average.
        """
        if self.kind == "replay":
            before = _until(self._random_gaps(), warm_up_s)
            due_s = before + [warm_up_s + time_s for time_s in self.times_s if time_s < measured_s]
        elif self.kind == "poisson":
            due_s = _until(self._random_gaps(), warm_up_s + measured_s)
        else:
            due_s = _until(self._burst_gaps(), warm_up_s + measured_s)
        return due_s[number::count]

    def _random_gaps(self) -> Iterator[float]:
        generator = random.Random(self.seed)
        while True:
            yield generator.expovariate(self.rate)

    def _burst_gaps(self) -> Iterator[float]:
        while True:
            yield self.burst_size / self.rate
            for _ in range(self.burst_size - 1):
                yield 0.0


def _until(gaps_s: Iterator[float], end_s: float) -> list[float]:
    times_s: list[float] = []
    time_s = 0.0
    while (time_s := time_s + next(gaps_s)) < end_s:
        times_s.append(time_s)
    return times_s


def _time_of(line: str) -> float:
    value = json.loads(line)
    if isinstance(value, dict):
        value = next((value[name] for name in _TIME_NAMES if name in value), None)
    if not isinstance(value, int | float):
        raise ValueError(f"{line[:80]!r}: a number of seconds, or an object with {' or '.join(_TIME_NAMES)}, is needed")  # noqa: TRY004 as any other line that is wrong
    return float(value)
