"""What is each quantity of the scheduler's policy worth? In simulated time, with and without.

    python benchmarks/policy.py [--set stepsize._LEAST_MS=0 …] [--seeds 3] [--scenarios H200,CPU,…]

`--set` gives a constant of scheduler/ another value: one that takes it away, or a trial.
The real state machine, with the drivers of tests/scheduler: test_beside.py's (one worker, queries beside a backfill)
and test_overload.py's and test_shares.py's (workers, tenants). Steps take what a table says: one H200 with
Qwen3-0.6B's shape, two cores with all-MiniLM-L6-v2 (2026-11-30). So a run says what the scheduler makes of a machine,
not how fast one is, and gives the same numbers on any.

- beside: 200 queries a second on the H200, 5 on the CPU. p50 and p99 in ms, alone and beside a backfill; the share of
  its own rate that the backfill keeps; the share of the time that the worker idles. Ceiling: p99 alone, 100 %, 0 %.
  Also with ways twice as long; documents of very mixed lengths; 0.3 % of the steps stopped for 100 ms; steps that take
  half as long again once it has learned; steps that vary (deviation 0.35 of the logarithm); fresh: no full step has run
  before; and often: 1,000 queries a second (20 on the CPU).
- full: more documents online than a worker can do; its tokens a millisecond.
- workers: four, as much as they can do (tokens a millisecond of one; ceiling 1.75), latency at half of that, and the
  tokens of a worker that is three times slower to the other's (ceiling 0.33). reranking: four, scores alone.
- tenants: the latency of one that asks for an eighth of a worker, beside one that asks for five times all of it.

Medians over the seeds; a difference below 3 % is noise, of `stops` one below 10 %. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import logging
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

from common.metrics import Metrics
from tests.scheduler import test_beside as beside
from tests.scheduler import test_overload as overload
from tests.scheduler import test_shares as shares
from tests.scheduler.rig import MS, SECOND, make_request

Numbers = dict[str, float]

_PHASES = ((True, False), (False, True), (True, True))  # queries, backfill


class Suite(beside.Suite):
    """With ways that take longer, and steps that are stopped, vary or grow slower."""

    ways, stops, noise, slowness = 1.0, 0.0, 0.0, 1.0

    def _travel(self, way: str, ms: float, happen: Callable[[], None]) -> None:
        super()._travel(way, ms * (self.ways if way.endswith("worker") else 1.0), happen)

    def _begin(self, more_ms: float = 0.0) -> None:
        if self._rng.random() < self.stops:
            more_ms += 100.0
        times = self.slowness * (self._rng.lognormvariate(0, self.noise) if self.noise else 1.0)
        super()._begin(more_ms + max(times - 1, -0.9) * self.machine.step_ms(len(self._held[0][0].token_ids)))


class Documents(Suite):
    """The backfill's clients ask online, once a first second has told how long steps take."""

    def _submit(self, asked: beside._Asked) -> None:
        asked.lane = "online" if self.phase.seconds > 1 else "backfill"
        super()._submit(asked)

    def _done(self, asked: beside._Asked) -> None:
        asked.lane = "backfill"
        super()._done(asked)


class Reranking(shares.Fleet):
    """Workers that are asked for scores alone."""

    def _arrive(self, request_id: int, asked: overload.Asked) -> None:
        sequences = [[request_id] * length for length in asked.lengths]
        request = make_request(request_id, *sequences, lane="score")
        self._perform(self.core.on_gateway_message(b"g", request, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))


def run_beside(
    machine: beside.Machine, seconds: float, *, slower: float = 1.0, is_fresh: bool = False, **weather: float
) -> Callable[[Metrics, int], Numbers]:
    def run(metrics: Metrics, seed: int) -> Numbers:
        suite = Suite(metrics, machine, seed)
        for name, value in weather.items():
            setattr(suite, name, value)
        if not is_fresh:
            suite.run(seconds / 3, queries=True, backfill=True)  # it learns
        suite.slowness = slower
        phases = {}
        for queries, backfill in ((True, False), (True, True), (False, True)) if is_fresh else _PHASES:
            suite.run(1.5, queries=False, backfill=False)
            phases[queries, backfill] = suite.run(seconds, queries=queries, backfill=backfill)
        alone, bulk, both = (phases[phase] for phase in _PHASES)
        return {
            "p50 alone": alone.percentile(50),
            "p99 alone": alone.percentile(99),
            "p50": both.percentile(50),
            "p99": both.percentile(99),
            "kept %": 100 * both.backfill_tokens / bulk.backfill_tokens,
            "idle %": 100 * both.idle_ns / (both.seconds * SECOND),
        }

    return run


def run_full(ways: float) -> Callable[[Metrics, int], Numbers]:
    def run(metrics: Metrics, seed: int) -> Numbers:
        suite = Documents(metrics, beside.GPU, seed)
        suite.ways = ways
        suite.run(1, queries=False, backfill=True)
        phase = suite.run(3, queries=False, backfill=True)
        tokens = sum(size * number for size, number in phase.steps.items())
        return {"tokens/ms": tokens / 3000, "idle %": 100 * phase.idle_ns / (3 * SECOND)}

    return run


def latencies(asked: list[overload.Asked]) -> Numbers:
    known = overload.latencies_ms(asked)
    return {"p50": statistics.median(known), "p99": overload.p99(known)}


def run_workers(metrics: Metrics, seed: int) -> Numbers:
    crowd, usual = shares.Fleet(metrics, num_workers=4), shares.Fleet(metrics, num_workers=4)
    begun_ns = crowd.now_ns
    crowd.run(shares.mixed(crowd, 1000 + seed, 0.0))
    rate = crowd.tokens.total() / ((crowd.now_ns - begun_ns) / MS) / 4
    asked = shares.mixed(usual, 1500 + seed, 45)
    usual.run(asked)
    uneven = shares.Fleet(metrics, slowness={b"w1": 3})
    uneven.run(shares.mixed(uneven, 1000 + seed, 10))
    return {"tokens/ms": rate, **latencies(asked), "slow/fast": uneven.tokens[b"w1"] / uneven.tokens[b"w0"]}


def run_reranking(metrics: Metrics, seed: int) -> Numbers:
    workers = Reranking(metrics, num_workers=4)
    asked = shares.mixed(workers, 3000 + seed, 100)
    workers.run(asked)
    return latencies(asked)


def run_tenants(metrics: Metrics, seed: int) -> Numbers:
    simulation, rate = overload.Simulation(metrics), overload._CAPACITY
    small = overload.poisson(simulation, rate, 30, tenant=2 * seed + 1, lengths=(4,))
    crowd = overload.poisson(simulation, 5 * rate, 30, tenant=2 * seed)
    simulation.run(sorted([*small, *crowd], key=lambda one: one.at_ns))
    return latencies(small)


SCENARIOS: dict[str, Callable[[Metrics, int], Numbers]] = {
    "H200": run_beside(beside.GPU, 3),
    "H200 long ways": run_beside(beside.GPU, 3, ways=2.0),
    "H200 mixed lengths": run_beside(replace(beside.GPU, spread=0.6), 3),
    "H200 stops": run_beside(beside.GPU, 3, stops=0.003),
    "H200 slower": run_beside(beside.GPU, 3, slower=1.5),
    "H200 noise": run_beside(beside.GPU, 3, noise=0.35),
    "H200 fresh": run_beside(beside.GPU, 6, is_fresh=True),
    "H200 often": run_beside(replace(beside.GPU, queries_per_s=1000), 2),
    "H200 full": run_full(1.0),
    "H200 full long ways": run_full(2.0),
    "CPU": run_beside(beside.CPU, 60),
    "CPU often": run_beside(replace(beside.CPU, queries_per_s=20), 40),
    "workers": run_workers,
    "reranking": run_reranking,
    "tenants": run_tenants,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE", help="a constant's value")
    parser.add_argument("--seeds", type=int, default=3, help="of each scenario [%(default)s]")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="which of them, with commas [all]")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for assignment in args.set:
        name, value = assignment.split("=", 1)
        module_name, _, constant = name.partition(".")
        module = importlib.import_module(f"scheduler.{module_name}")
        if not hasattr(module, constant):
            parser.error(f"scheduler/{module_name}.py has no {constant}")
        setattr(module, constant, ast.literal_eval(value))
    metrics = Metrics()
    report: dict[str, Numbers] = {}
    for name in args.scenarios.split(","):
        runs = [SCENARIOS[name](metrics, seed) for seed in range(1, args.seeds + 1)]
        report[name] = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
        numbers = "  ".join(f"{key} {value:.2f}" for key, value in report[name].items())
        sys.stdout.write(f"{name:<20}{numbers}\n")
    sys.stdout.write(json.dumps({"set": args.set, "seeds": args.seeds, "scenarios": report}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
