"""Does a short query still get its answer in time while a backfill takes the rest of the machine?

    python benchmarks/mixed.py --url http://127.0.0.1:8080 [--rate 200] [--lane backfill] [--texts FILE] [--output FILE]

Three phases take turns, several rounds of them: queries alone, backfill alone, both at once. Queries come by a
timetable (Poisson, `--rate` a second, one short text each), whether or not earlier ones were answered, and a query's
latency is from when it was due: a server that stands still does not hide it. The backfill is `--backfill-clients`
connections, each with one request of `--texts-per-request` documents on its way, in the lane `--lane` (`online` shows
what the lane is good for). Of queries what was due within a phase counts, of the backfill what was answered; choose
requests that take a small part of one.

The promises, on one H200 with a model of Qwen3-0.6B's shape: p99 of queries at most 10 ms at 200 a second, with
backfill at 80 % of its own peak; on a CPU with all-MiniLM-L6-v2: p99 at most twice that of queries alone, or one
backfill step more, and backfill at 85 % of what it does alone less the queries' share, which is what they took of the
tokens.

The two loads come from two processes (`clients.py`), so that a query does not wait in its own client while a body of
thousands of tokens is put together. "late ms" is by how much the queries' was late with the 99th of a hundred.

Prints a table; the last line is one JSON object, of which `report.py` makes plots.
"""

from __future__ import annotations

import argparse
import http.client
import math
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.arrivals import Arrivals
from benchmarks.clients import Load, LoadError, Plan, Tally, Target, run_plans
from benchmarks.record import write_result
from benchmarks.texts import Corpus
from common.lanes import BACKFILL, LANES

_PERCENTS = (*range(0, 100, 5), 99, 99.9)
_MOST_QUERIES = 64  # on their way at once

PHASES = {"queries": ("queries",), "backfill": ("backfill",), "both": ("queries", "backfill")}  # their loads


@dataclass(slots=True)
class Seen:
    """What came of one of the loads in one kind of phase, over all rounds."""

    seconds: float = 0.0
    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    late_s: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, tally: Tally) -> None:
        self.seconds += tally.measured_s
        self.latencies_s += tally.latencies_s
        self.late_s += tally.late_s
        self.num_tokens += tally.num_tokens
        self.errors += tally.errors

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: float) -> float:
        return _percentile_ms(self.latencies_s, percent)


def _percentile_ms(times_s: array[float], percent: float) -> float:
    return float(np.percentile(times_s, percent)) * 1e3 if times_s else float("nan")


class Loads:
    def __init__(self, args: argparse.Namespace, target: Target, corpus: Corpus) -> None:
        self._args = args
        self._target = target
        self._corpus = corpus
        self._seeds = np.random.default_rng(args.seed)

    def run(self, names: tuple[str, ...]) -> dict[str, Tally]:
        """Put the loads of these names on the server at once, for one phase."""
        plans = [self._plan(name, number, len(names)) for number, name in enumerate(names)]
        tallies = run_plans(plans)
        self._corpus.next_index = max(tally.next_index for tally in tallies)
        return dict(zip(names, tallies, strict=True))

    def _plan(self, name: str, number: int, count: int) -> Plan:
        args, target = self._args, self._target
        if name == "queries":
            arrivals = Arrivals("poisson", args.rate, seed=int(self._seeds.integers(1 << 30)))
            load = Load(name, _MOST_QUERIES, "query", arrivals=arrivals)
            lane, num_tokens = "online", args.query_tokens
        else:
            arrivals = None
            load = Load(name, args.backfill_clients, "document", args.texts_per_request)
            lane, num_tokens = args.lane, args.document_tokens
        return Plan(
            load=load,
            target=replace(target, fields={"lane": lane}),
            corpus=self._corpus,
            num_words={load.kind: target.num_words(num_tokens)},
            num_clients=load.num_clients,
            first_index=self._corpus.next_index + number,
            stride=count,
            warm_up_s=args.warm_up,
            measured_s=args.seconds,
            due_s=arrivals.due_s(args.warm_up, args.seconds) if arrivals else [],
        )


def measure(args: argparse.Namespace, target: Target, corpus: Corpus) -> dict[str, dict[str, Seen]]:
    """What was seen of each load, by phase."""
    phases = {phase: {name: Seen() for name in names} for phase, names in PHASES.items()}
    loads = Loads(args, target, corpus)
    loads.run(PHASES["both"])  # warms up: graphs, step times
    for _ in range(args.rounds):
        for phase, names in PHASES.items():
            time.sleep(args.pause)
            for name, tally in loads.run(names).items():
                phases[phase][name].add(tally)
    return phases


def main() -> int:
    args = _parse_arguments()
    try:
        corpus = Corpus.read(args.texts)
        target = Target.find(args.url, args.model, corpus)
        phases = measure(args, target, corpus)
    except (LoadError, ValueError, OSError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target.model} at {args.url}: {args.rate:g} queries a second; backfill in the lane {args.lane}\n")
    print(
        f"{'':<12}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'late ms':>10}{'queries/s':>12}{'backfill tokens/s':>20}"
    )
    rows = {}
    for phase, loads in phases.items():
        queries, backfill = loads.get("queries", Seen()), loads.get("backfill", Seen())
        row = {
            "p50_ms": queries.percentile_ms(50),
            "p90_ms": queries.percentile_ms(90),
            "p99_ms": queries.percentile_ms(99),
            "late_p99_ms": _percentile_ms(queries.late_s, 99),
            "queries_per_s": len(queries.latencies_s) / queries.seconds if queries.seconds else 0.0,
            "backfill_tokens_per_s": backfill.tokens_per_s,
            "errors": {name: dict(seen.errors) for name, seen in loads.items() if seen.errors},
            "quantiles_ms": [(percent, queries.percentile_ms(percent)) for percent in _PERCENTS if queries.latencies_s],
        }
        rows[phase] = row
        print(
            f"{phase:<12}{row['p50_ms']:>10.2f}{row['p90_ms']:>10.2f}{row['p99_ms']:>10.2f}{row['late_p99_ms']:>10.2f}"
            f"{row['queries_per_s']:>12.1f}{row['backfill_tokens_per_s']:>20,.0f}  {row['errors'] or ''}"
        )
    alone, both = phases["backfill"]["backfill"].tokens_per_s, phases["both"]
    kept, share = (both[name].tokens_per_s / (alone or math.nan) for name in ("backfill", "queries"))
    times = both["queries"].percentile_ms(99) / phases["queries"]["queries"].percentile_ms(99)
    print(f"\nbeside queries, backfill keeps {kept:.1%} of what it does alone (queries are worth {share:.1%} of that);")
    print(f"beside backfill, the p99 of queries is {times:.2f} times what it is alone")
    result = {
        "benchmark": "mixed",
        "model": target.model,
        "url": args.url,
        "lane": args.lane,
        "rate": args.rate,
        "phases": rows,
    }
    write_result(result, args.output)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server [%(default)s]")
    parser.add_argument("--model", help="name to ask for; default: the first that /v1/models lists")
    parser.add_argument("--texts", type=Path, help=".jsonl or .csv file of running text; default: invented words")
    parser.add_argument("--rate", type=float, default=20.0, help="queries a second [%(default)s]")
    parser.add_argument("--query-tokens", type=int, default=20, help="about so many tokens a query [%(default)s]")
    parser.add_argument("--lane", choices=LANES, default=BACKFILL)
    parser.add_argument("--backfill-clients", type=int, default=4, help="connections [%(default)s]")
    parser.add_argument("--texts-per-request", type=int, default=16, help="documents of a request [%(default)s]")
    parser.add_argument("--document-tokens", type=int, default=150, help="about so many a document [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="of the three phases [%(default)s]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase, after --warm-up [%(default)s]")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds of a phase that do not count [%(default)s]")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between phases [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the timetables [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
