"""One promise put to the test: load, faults by schedule, and the verdict."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults.ledger import Ledger, Sent
from tests.faults.promises import Promise, Step, measured, schedule
from tests.faults.rig import OracleSuite
from tests.timing import TooSlow

# What has no reason to move unless a test names it.
_STILL = ("hedgerow_worker_losses_total", "hedgerow_protocol_errors_total")

# What is answered twice was asked for twice: a gateway that did not hear the scheduler for 0.7 s sends all again.
# Nor is anything late but what came after a deadline, or after a client had left.
LATE, _ASKED_TWICE = "hedgerow_late_replies_total", "hedgerow_resubmitted_requests_total"

_FAILURES = ("lost", "wrong", "torn", "unconnected", "refused", "cut")


def lost(count: int, *reasons: str) -> dict[str | tuple[str, ...], float]:
    """Workers that the scheduler has counted as lost, for one of these reasons."""
    return {tuple(f'hedgerow_worker_losses_total{{reason="{reason}"}}' for reason in reasons): count}


def dead(count: int) -> dict[str | tuple[str, ...], float]:
    # A pidfd tells in a millisecond, unless a message to the dead comes back sooner.
    return lost(count, "exited", "disconnected")


@dataclass(slots=True, eq=False)
class Trial:
    """`async with Trial(...)` runs the load; at the end of the block `judge` says whether the promise was kept."""

    suite: OracleSuite
    promise: Promise
    seed: int
    soak: bool
    ledger: Ledger = field(init=False)
    calm_s: float = 0.0  # the longest latency where nothing is done to anybody, which stalls do not count
    moved: dict[str, float] = field(default_factory=dict)  # metrics, since the beginning; after the block
    after: dict[str, float] = field(default_factory=dict)  # what they are then
    _series: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _faults: list[tuple[str, float]] = field(default_factory=list)
    _before: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.suite.port, self.promise.load, self.seed)

    async def __aenter__(self) -> Trial:
        self._before = await asyncio.to_thread(self.suite.metrics)
        await self.ledger.__aenter__()
        await asyncio.sleep(0.5)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.ledger.__aexit__(*error)
        await asyncio.sleep(0.3)  # gauges are set four times a second
        self.after = await asyncio.to_thread(self.suite.metrics)
        self.moved = {name: value - self._before.get(name, 0) for name, value in self.after.items()}

    def steps(self) -> list[Step]:
        return schedule(self.seed, self.count)

    @property
    def count(self) -> int:
        """How often it is tried."""
        return self.promise.soak if self.soak else self.promise.quick

    @property
    def num_requests(self) -> int:
        return self.promise.soak_requests if self.soak else self.promise.quick_requests

    def faulted(self, series: str = "stall_s") -> None:
        """Something is done now: the longest latency of a request that it can have touched goes into this series."""
        self._faults.append((series, time.monotonic()))

    @staticmethod
    def now_s() -> float:
        """On the clock of the ledger."""
        return time.monotonic()

    async def settle(self) -> None:
        """Wait until what is open now has ended: one fault's backlog is not to count as the next one's."""
        for sent in self.ledger.in_hand():
            await self.ledger.until(sent)

    def measured(self, series: str, value: float) -> None:
        self._series[series].append(value)

    def judge(
        self,
        *,
        exactly: dict[str | tuple[str, ...], float],
        allowed: Iterable[Sent] = (),
        unknown: Iterable[str] = (),
    ) -> str:
        """Fails with everything that was broken; else the line that says what was measured.

        `exactly`: how far metrics have moved, or several together; a `worker_losses` or `protocol_errors` that is not
        named has not moved. `unknown`: of these nobody can say how far. `allowed`: requests that may have failed.
        """
        allowed, unknown = set(allowed), set(unknown)
        counts = self.ledger.counts()
        failures = [sent for sent in self.ledger.sent if sent.outcome in _FAILURES and sent not in allowed]
        broken = [f"{sent.request_id} {sent.outcome}: {sent.detail}" for sent in failures]
        self._measure_stalls()
        texts, off = measured(self.promise.figures, self._series)
        named = {name for key in exactly for name in ((key,) if isinstance(key, str) else key)}
        still = [name for name in self.moved if name.startswith(_STILL) and name not in named | unknown]
        for key, expected in [*exactly.items(), *((name, 0) for name in still)]:
            moved = sum(self.moved.get(name, 0) for name in ((key,) if isinstance(key, str) else key))
            if moved != expected:
                broken.append(f"{key} moved by {moved:g}, not {expected:g}")
        if LATE not in unknown and self.moved.get(LATE, 0) > self.moved.get(_ASKED_TWICE, 0):
            broken.append(f"{LATE} moved by {self.moved[LATE]:g}, more than {_ASKED_TWICE}")
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        line = f"{self.promise.name} seed {self.seed}: {len(self.ledger.sent)} requests: {outcomes}; " + "; ".join(
            texts
        )
        assert not broken, "\n".join([line, *broken[:40], *off, self.suite.log()[-6000:]])
        if off:
            raise TooSlow("\n".join([line, *off, self.suite.log()[-6000:]]))
        return line

    def answers(self) -> dict[str | tuple[str, ...], float]:
        """What gateways count of the requests here that were answered, where no gateway is killed."""
        answered = [sent for sent in self.ledger.sent if sent.outcome == "answered"]
        return {
            'hedgerow_requests_total{route="/v1/embeddings",status="200"}': len(answered),
            "hedgerow_inputs_total": sum(len(sent.texts) for sent in answered),
        }

    def _measure_stalls(self) -> None:
        for (series, begun_s), (_, next_s) in pairwise([*self._faults, ("", float("inf"))]):
            touched = [s.latency_s for s in self.ledger.sent if s.ended_s >= begun_s and s.due_s < next_s]
            self._series[series].append(max(0.0, max(touched, default=0.0) - self.calm_s))
