"""Does a short query still get its answer in time while a backfill takes the rest of the machine?

    python benchmarks/mixed.py --url http://127.0.0.1:8080 [--rate 200] [--lane backfill] [--texts FILE] [--output FILE]

Three phases take turns, several rounds of them: queries alone, backfill alone, both at once. Queries come by a
timetable (Poisson, `--rate` a second, one short text each), whether or not earlier ones were answered, and a query's
latency is from when it was due: a server that stands still does not hide it. The backfill is `--backfill-clients`
connections, each with one request of `--texts-per-request` documents on its way, in the lane `--lane` (`online` shows
what the lane is good for). What was answered within a phase counts; choose requests that take a small part of one.

The promises, on one H200 with a model of Qwen3-0.6B's shape: p99 of queries at most 10 ms at 200 a second, with
backfill at 80 % of its own peak; on a CPU with all-MiniLM-L6-v2: p99 at most twice that of queries alone, or one
backfill step more, and backfill at 85 % of what it does alone less the queries' share, which is what they took of the
tokens.

The client is one process with aiohttp; its own part of a query's latency is some 0.3 ms, in all phases.

Prints a table; the last line is one JSON object, of which `report.py` makes plots.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.clients import Target
from benchmarks.record import write_result
from benchmarks.texts import Corpus

_PERCENTS = (*range(0, 100, 5), 99, 99.9)

PHASES = ("queries", "backfill", "both")


@dataclass(slots=True)
class Phase:
    """What one kind of phase came to, over all rounds."""

    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)  # of queries
    query_tokens: int = 0
    backfill_tokens: int = 0
    errors: int = 0

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else float("nan")


class Loads:
    """The two loads, on one event loop."""

    def __init__(
        self, args: argparse.Namespace, target: Target, corpus: Corpus, session: aiohttp.ClientSession
    ) -> None:
        self._args = args
        self._target = target
        self._corpus = corpus
        self._session = session
        self._url = f"http://{target.host}:{target.port}{target.path}"
        self._random = random.Random(args.seed)

    async def run(self, name: str, phase: Phase) -> None:
        begin = time.perf_counter()
        end = begin + self._args.seconds
        async with asyncio.TaskGroup() as tasks:
            if name != "backfill":
                tasks.create_task(self._queries(phase, begin, end))
            if name != "queries":
                for _ in range(self._args.backfill_clients):
                    tasks.create_task(self._backfill(phase, end))
        phase.seconds += self._args.seconds

    async def _queries(self, phase: Phase, begin: float, end: float) -> None:
        due = begin
        async with asyncio.TaskGroup() as tasks:
            while (due := due + self._random.expovariate(self._args.rate)) < end:
                await asyncio.sleep(due - time.perf_counter())
                tasks.create_task(self._query(phase, due))

    async def _query(self, phase: Phase, due: float) -> None:
        body = self._body(1, self._args.query_tokens, "online")
        num_tokens = await self._post(body)
        if num_tokens is None:
            phase.errors += 1
        else:
            phase.latencies_ms.append((time.perf_counter() - due) * 1e3)
            phase.query_tokens += num_tokens

    async def _backfill(self, phase: Phase, end: float) -> None:
        while time.perf_counter() < end:
            num_tokens = await self._post(
                self._body(self._args.texts_per_request, self._args.document_tokens, self._args.lane)
            )
            if num_tokens is None:
                phase.errors += 1
                await asyncio.sleep(0.1)
            elif time.perf_counter() < end:
                phase.backfill_tokens += num_tokens

    def _body(self, num_texts: int, num_tokens: int, lane: str) -> bytes:
        num_words = self._target.num_words(num_tokens)
        first = self._corpus.next_index
        self._corpus.next_index += num_texts
        texts = [self._corpus.text(first + index, num_words) for index in range(num_texts)]
        return self._target.body(texts, "base64")[:-1] + b',"lane":"%b"}' % lane.encode()

    async def _post(self, body: bytes) -> int | None:
        """The tokens that were run; None for an error."""
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers) as answer:
                content = await answer.read()
        except aiohttp.ClientError:
            return None
        if answer.status != 200:
            return None
        return int(content.rpartition(b'"prompt_tokens":')[2].partition(b",")[0])


async def measure(args: argparse.Namespace, target: Target, corpus: Corpus) -> dict[str, Phase]:
    phases = {name: Phase() for name in PHASES}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        loads = Loads(args, target, corpus, session)
        await loads.run("both", Phase())  # warms up: graphs, connections, step times
        for _ in range(args.rounds):
            for name in PHASES:
                await loads.run(name, phases[name])
                await asyncio.sleep(args.pause)
    return phases


def main() -> int:
    args = _parse_arguments()
    corpus = Corpus.read(args.texts)
    target = Target.find(args.url, args.model, corpus)
    phases = asyncio.run(measure(args, target, corpus))
    print(f"{target.model} at {args.url}: {args.rate:g} queries a second; backfill in the lane {args.lane}\n")
    print(f"{'':<12}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'queries/s':>12}{'backfill tokens/s':>20}{'errors':>8}")
    rows = {}
    for name, phase in phases.items():
        row = {
            "p50_ms": phase.percentile(50),
            "p90_ms": phase.percentile(90),
            "p99_ms": phase.percentile(99),
            "queries_per_s": len(phase.latencies_ms) / phase.seconds,
            "backfill_tokens_per_s": phase.backfill_tokens / phase.seconds,
            "errors": phase.errors,
            "quantiles_ms": [(percent, phase.percentile(percent)) for percent in _PERCENTS if phase.latencies_ms],
        }
        rows[name] = row
        print(
            f"{name:<12}{row['p50_ms']:>10.2f}{row['p90_ms']:>10.2f}{row['p99_ms']:>10.2f}{row['queries_per_s']:>12.1f}"
            f"{row['backfill_tokens_per_s']:>20,.0f}{phase.errors:>8}"
        )
    both, alone = phases["both"], phases["backfill"]
    kept = both.backfill_tokens / max(alone.backfill_tokens, 1)
    share = both.query_tokens / max(alone.backfill_tokens, 1)
    times = both.percentile(99) / phases["queries"].percentile(99)
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
    parser.add_argument("--lane", choices=("online", "score", "backfill"), default="backfill")
    parser.add_argument("--backfill-clients", type=int, default=4, help="connections [%(default)s]")
    parser.add_argument("--texts-per-request", type=int, default=16, help="documents of a request [%(default)s]")
    parser.add_argument("--document-tokens", type=int, default=150, help="about so many a document [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="of the three phases [%(default)s]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase [%(default)s]")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between phases [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the timetable [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
