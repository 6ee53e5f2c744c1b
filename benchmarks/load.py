"""How many texts a second does a server embed over HTTP, and how long does a client wait?

    python benchmarks/load.py --url http://127.0.0.1:8080 --table [--texts DATA/scifact/corpus.jsonl] [--output FILE]
    python benchmarks/load.py --url http://127.0.0.1:8080 --clients 1,4,16,64 [--kind document] [--texts-per-request 32]
        [--encoding float] [--seconds 6] [--report REPORT.html]
    python benchmarks/load.py --url https://HOST/v1 --model NAME --api-key KEY --rate 50,100,200 [--burst 32]
    python benchmarks/load.py --replay ARRIVALS.txt [--speed 2] [--kind mixed] [--texts QUERIES.jsonl --lines]

For any server with OpenAI's `POST /v1/embeddings` (or `/v1/rerank` as Cohere, Jina and we have it), so that the same
program measures others.

With `--clients` a closed loop: each client has one connection with one request on its way, and sends the next when it
has the answer. Latency is from before a request's first byte is written to its answer's last byte; what was answered in
the measured seconds counts. With `--rate` or `--replay` an open loop (`arrivals.py`): requests are due at random, in
bursts, or when a file says, whatever the server does. Latency is from when a request was due, so who had to wait for a
connection, or came while the server stood still, is not left out; what was due in the measured seconds counts, however
late it is answered, and is counted as answered in the seconds that it took. `--clients` is then how many may be on
their way at once. "late ms" is by how much this program itself was late with the 99th of a hundred: where that is near
the latencies, it is what is measured.

`--table` runs the eight loads that the project has goals for, one after the other. The goals are for one H200 with 16
cores, which the clients share, and a model of Qwen3-0.6B's shape; the ceiling is the engine alone (`engine.py`): 512
tokens in 0.6 ms are 43,000 queries a second, 16,384 in 21 ms are 790,000 tokens a second.

The clients (`clients.py`) must not be what is measured: the table has the cores that they kept busy beside each load;
near one for each process means that they were the limit: give more `--processes`. Of the answers that they keep, one
vector a text, finite, all of one width is asked.

The texts are runs of words of `--texts` (a .txt, .jsonl or .csv file; else invented words from a seed), none sent
twice, so nothing is answered from a cache; with `--lines` they are the file's own, one after the other and again. How
many words make 20 or 310 tokens is found out from the server's own `usage` first. Kinds: a query, a document, "mixed"
(of ten requests nine queries), or "rerank" (a query and `--texts-per-request` documents).

Percentiles are of all samples, which take 8 bytes each. The result has them as HdrHistogram's encoding too (`hdr`, of
microseconds, three digits): whoever wants to add up runs of several machines can, which percentiles cannot be.

Prints a table; the last line is one JSON object. `--report` writes a page with plots (`report.py`).
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

from benchmarks.arrivals import Arrivals
from benchmarks.clients import Goal, Load, LoadError, Plan, Tally, Target, run_plans
from benchmarks.record import origin, write_result
from benchmarks.report import write_report
from benchmarks.texts import Corpus, Lines

_CLIENTS_PER_PROCESS = 128
_SECONDS = 6.0
_CLOSED_CLIENTS, _OPEN_CLIENTS = 16, 256
_BINS_PER_DECADE = 20
_LONGEST_US = 3_600_000_000

TABLE = (
    Load("1 client, query", 1, "query", goals=(Goal("p50_ms", "≤", 2.5), Goal("p99_ms", "≤", 4))),
    Load("16 clients, query", 16, "query", goals=(Goal("texts_per_s", "≥", 4_000), Goal("p50_ms", "≤", 4))),
    Load("64 clients, query", 64, "query", goals=(Goal("texts_per_s", "≥", 8_000), Goal("p50_ms", "≤", 8))),
    Load("256 clients, query", 256, "query", goals=(Goal("texts_per_s", "≥", 15_000),)),
    Load("1 client, document", 1, "document", goals=(Goal("p50_ms", "≤", 3.5),)),
    Load("64 clients, document", 64, "document", goals=(Goal("tokens_per_s", "≥", 500_000), Goal("p50_ms", "≤", 40))),
    Load("8 × 32 documents", 8, "document", 32, goals=(Goal("tokens_per_s", "≥", 560_000),)),
    Load("8 × 32 documents, floats", 8, "document", 32, "float", goals=(Goal("tokens_per_s", "≥", 450_000),)),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What one load gave, over the measured seconds and all processes."""

    seconds: float
    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    answers: int  # with status 200
    errors: dict[str, int]  # by status, or by what happened to the connection
    client_cores: float  # CPU seconds of the clients in a second
    tokens_per_text: float
    dimensions: list[int]  # as seen in the sample
    sampled: int
    p999_ms: float
    max_ms: float
    rate: float | None  # requests due in a second; None in a closed loop
    late_p99_ms: float | None  # how long after they were due requests could be sent
    answers_by_second: list[int]
    stages_ms: dict[str, float]  # means, as the server says
    bins: list[tuple[float, float, int]]  # milliseconds from and to, requests between them
    hdr: str


def run_load(
    load: Load, target: Target, corpus: Corpus | Lines, lengths: dict[str, int], args: argparse.Namespace
) -> Report:
    """Put one load on a server, of queries and documents of about so many tokens ("query", "document").

    Raises:
        LoadError: a client process died, for example since the server refuses connections.
    """
    num_processes = min(args.processes or -(-load.num_clients // _CLIENTS_PER_PROCESS), load.num_clients)
    plans = [
        Plan(
            load=load,
            target=target,
            corpus=corpus,
            num_words={kind: target.num_words(num_tokens) for kind, num_tokens in lengths.items()},
            num_clients=len(range(number, load.num_clients, num_processes)),
            first_index=corpus.next_index + number,
            stride=num_processes,
            warm_up_s=args.warm_up,
            measured_s=args.seconds,
            due_s=load.arrivals.due_s(args.warm_up, args.seconds, number, num_processes) if load.arrivals else [],
        )
        for number in range(num_processes)
    ]
    tallies = run_plans(plans, partial(_show_progress, load.name, args.warm_up + args.seconds))
    corpus.next_index = max(tally.next_index for tally in tallies)
    return summarize(tallies, load)


def _show_progress(name: str, seconds: float, receivers: list[Pipe]) -> None:
    """Until the first process has ended, a line on the terminal, if there is one."""
    began_s = time.monotonic()
    while not wait(receivers, 0.5):
        done = min(1.0, (time.monotonic() - began_s) / seconds)
        if sys.stderr.isatty():
            print(f"\r{name:<40} [{'#' * round(30 * done):<30}] {done:4.0%}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def summarize(tallies: list[Tally], load: Load) -> Report:
    """One report of what all processes saw."""
    latencies_s = sorted(latency_s for tally in tallies for latency_s in tally.latencies_s)
    seconds = sum(tally.seconds for tally in tallies) / len(tallies)
    measured_s = sum(tally.measured_s or tally.seconds for tally in tallies) / len(tallies)
    errors = sum((tally.errors for tally in tallies), Counter())
    samples = [sample for tally in tallies for sample in tally.samples]
    widths: set[int] = set()
    for sample in samples:
        try:
            widths |= check_answer(sample, load)
        except (LoadError, ValueError, KeyError, TypeError) as error:
            errors[f"bad answer: {error}"] += 1
    num_tokens = sum(tally.num_tokens for tally in tallies)
    num_texts = len(latencies_s) * load.texts_per_request
    late_s = sorted(late_s for tally in tallies for late_s in tally.late_s)
    by_second = sum((tally.by_second for tally in tallies), Counter())
    stages_ms = sum((tally.stages_ms for tally in tallies), Counter())
    num_timed = max(1, sum(tally.num_timed for tally in tallies))
    us = np.rint(np.array(latencies_s) * 1e6).astype(np.int64)
    return Report(
        seconds=seconds,
        requests_per_s=len(latencies_s) / seconds,
        texts_per_s=num_texts / seconds,
        tokens_per_s=num_tokens / seconds,
        p50_ms=percentile(latencies_s, 50) * 1e3,
        p90_ms=percentile(latencies_s, 90) * 1e3,
        p99_ms=percentile(latencies_s, 99) * 1e3,
        answers=len(latencies_s),
        errors=dict(errors),
        client_cores=sum(tally.cpu_s for tally in tallies) / measured_s,
        tokens_per_text=num_tokens / max(1, num_texts),
        dimensions=sorted(widths),
        sampled=len(samples),
        p999_ms=percentile(latencies_s, 99.9) * 1e3,
        max_ms=percentile(latencies_s, 100) * 1e3,
        rate=None if load.arrivals is None else sum(tally.num_due for tally in tallies) / measured_s,
        late_p99_ms=percentile(late_s, 99) * 1e3 if late_s else None,
        answers_by_second=[by_second[second] for second in range(max(by_second, default=-1) + 1)],
        stages_ms={name: total_ms / num_timed for name, total_ms in stages_ms.items()},
        bins=_bins(us),
        hdr=_hdr(us),
    )


def _bins(us: npt.NDArray[np.int64]) -> list[tuple[float, float, int]]:
    """Latencies counted between edges that are equally far apart on a logarithmic scale, 20 a decade."""
    if not len(us):
        return []
    places = np.floor(np.log10(np.maximum(us, 1) / 1e3) * _BINS_PER_DECADE).astype(np.int64)
    counts = np.bincount(places - places.min())
    edges_ms = 10 ** ((places.min() + np.arange(len(counts) + 1)) / _BINS_PER_DECADE)
    return list(zip(edges_ms[:-1].tolist(), edges_ms[1:].tolist(), counts.tolist(), strict=True))


def _hdr(us: npt.NDArray[np.int64]) -> str:
    """Latencies in HdrHistogram's own encoding."""
    histogram = HdrHistogram(1, _LONGEST_US, 3)
    for value, count in zip(*np.unique(np.clip(us, 1, _LONGEST_US), return_counts=True), strict=True):
        histogram.record_value(int(value), int(count))
    encoded: bytes = histogram.encode()
    return encoded.decode()


def check_answer(body: bytes, load: Load) -> set[int]:
    """The widths of an answer's vectors, if it has any.

    Raises:
        LoadError: there is not one finite vector a text, in order, or of rerank not one finite score a document.
    """
    answer = json.loads(body)
    if load.kind == "rerank":
        results = answer["results"] if "results" in answer else answer["data"]
        if sorted(result["index"] for result in results) != list(range(load.texts_per_request)):
            raise LoadError("not one score a document")
        if not all(math.isfinite(result["relevance_score"]) for result in results):
            raise LoadError("a score that is not finite")
        return set()
    rows = answer["data"]
    if [row["index"] for row in rows] != list(range(load.texts_per_request)):
        raise LoadError("not one vector a text, in order")
    vectors = [row["embedding"] for row in rows]
    if load.encoding == "base64":
        vectors = [array("f", base64.b64decode(vector)) for vector in vectors]
    if not all(any(vector) and all(map(math.isfinite, vector)) for vector in vectors):
        raise LoadError("a vector that is not finite, or 0 everywhere")
    return {len(vector) for vector in vectors}


def percentile(ordered: list[float], percent: float) -> float:
    """The value of the nearest rank; not a number where there is none."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def main() -> int:
    """Find out about the server, put each load on it, print."""
    args = _parse_arguments()
    corpus = Lines.read(args.texts) if args.lines else Corpus.read(args.texts)
    arrivals = Arrivals.replay(args.replay, args.speed) if args.replay else None
    if args.seconds is None:
        args.seconds = math.ceil(arrivals.times_s[-1]) if arrivals else _SECONDS
    target = Target.find(args.url, args.model, corpus, args.api_key, kind=args.kind, fields=args.fields)
    lengths = {"query": args.query_tokens, "document": args.document_tokens}
    print(f"{target.model} at {args.url}, {target.tokens_per_word:.2f} tokens a word, {args.seconds:g} s a load")
    columns = ("requests/s", "texts/s", "tokens/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "late ms", "errors")
    heads = "".join(f"{column:>{max(9, len(column) + 2)}}" for column in (*columns, "client cores"))
    loads = _loads(args, arrivals)
    width = max(26, *(len(load.name) + 2 for load in loads))
    print(f"{'load':<{width}}{heads}  goals")
    rows: list[dict[str, object]] = []
    for load in loads:
        report = run_load(load, target, corpus, lengths, args)
        goals = {f"{g.metric} {g.sense} {g.limit:,g}": g.met(getattr(report, g.metric)) for g in load.goals}
        late = "" if report.late_p99_ms is None else f"{report.late_p99_ms:.2f}"
        print(
            f"{load.name:<{width}}{report.requests_per_s:>12,.1f}{report.texts_per_s:>9,.0f}"
            f"{report.tokens_per_s:>10,.0f}{report.p50_ms:>9.2f}{report.p90_ms:>9.2f}{report.p99_ms:>9.2f}"
            f"{report.p999_ms:>10.2f}{late:>9}{sum(report.errors.values()):>9}{report.client_cores:>14.2f}  "
            + ", ".join(f"{text}: {'yes' if met else 'NO'}" for text, met in goals.items())
        )
        if report.errors or len(report.dimensions) > 1:
            print(f"  errors {report.errors}, widths of vectors {report.dimensions}")
        # Not the times of a replay: there may be a million of them.
        rows.append({**asdict(replace(load, arrivals=None)), **asdict(report), "goals": goals})
    result: dict[str, object] = {"benchmark": "load", "url": args.url, "model": target.model, "loads": rows}
    if args.report is not None:
        shown = {**result, **origin()}
        profiles = [json.loads(path.read_text(encoding="utf-8")) for path in args.profile]
        write_report([shown, *profiles], args.report)
        print(f"{args.report}: open it in a browser")
    write_result(result, args.output)
    return 0


def _loads(args: argparse.Namespace, arrivals: Arrivals | None) -> list[Load]:
    """The loads that are asked for, in order."""
    if args.table:
        return list(TABLE)
    what = f"{args.texts_per_request} {args.kind}" + ("" if args.kind == "rerank" else f", {args.encoding}")
    load = Load("", _OPEN_CLIENTS, args.kind, args.texts_per_request, args.encoding)
    if arrivals is None and not args.rate:
        counts = args.clients or [_CLOSED_CLIENTS]
        return [replace(load, name=f"{count} × {what}", num_clients=count) for count in counts]
    most = max(args.clients or [_OPEN_CLIENTS])
    if arrivals is not None:
        return [replace(load, name=f"{args.replay.name}, {what}", num_clients=most, arrivals=arrivals)]
    kind: Literal["poisson", "bursts"] = "poisson" if args.burst == 1 else "bursts"
    how = "" if args.burst == 1 else f" in {args.burst}s"
    return [
        replace(load, name=f"{rate:g}/s{how}, {what}", num_clients=most, arrivals=Arrivals(kind, rate, args.burst))
        for rate in args.rate
    ]


def _listed(number: Callable[[str], float]) -> Callable[[str], list[float]]:
    """What reads numbers with commas between them."""

    def read(text: str) -> list[float]:
        return [number(part) for part in text.split(",")]

    read.__name__ = f"{number.__name__}s"
    return read


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server, or its /v1 [%(default)s]")
    parser.add_argument("--model", help="name to ask for; default: the first that /v1/models lists")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--texts", type=Path, help=".txt, .jsonl or .csv file of text; default: invented words")
    parser.add_argument("--lines", action="store_true", help="send the texts of --texts as they are, in their order")
    parser.add_argument("--table", action="store_true", help="the eight loads with goals; else one load, or several:")
    parser.add_argument("--clients", type=_listed(int), help=f"N or N,N,…: a closed loop of each [{_CLOSED_CLIENTS}]")
    parser.add_argument("--rate", type=_listed(float), help="requests a second, R or R,R,…: an open loop of each")
    parser.add_argument("--burst", type=int, default=1, help="so many of them at once; 1: at random [%(default)s]")
    parser.add_argument("--replay", type=Path, help="file of arrival times, a line each: an open loop as they say")
    parser.add_argument("--speed", type=float, default=1.0, help="so many times as fast as they say [%(default)s]")
    parser.add_argument("--kind", choices=("query", "document", "mixed", "rerank"), default="query")
    parser.add_argument("--texts-per-request", type=int, default=1)
    parser.add_argument("--encoding", choices=("base64", "float"), default="base64")
    parser.add_argument("--fields", type=json.loads, default={}, help="of every body, as JSON: '{\"truncate\": true}'")
    parser.add_argument("--query-tokens", type=int, default=20, help="about so many tokens a query [%(default)s]")
    parser.add_argument("--document-tokens", type=int, default=310, help="and a document [%(default)s]")
    parser.add_argument("--processes", type=int, help=f"of clients; default: one for {_CLIENTS_PER_PROCESS} clients")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before measuring [%(default)s]")
    parser.add_argument("--seconds", type=float, help=f"seconds measured [{_SECONDS:g}, or the length of --replay]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    parser.add_argument("--report", type=Path, help="file for a page with plots, as HTML")
    parser.add_argument(
        "--profile", type=Path, nargs="*", default=[], help="profile_latency.py's --output, for the page"
    )
    args = parser.parse_args()
    if args.lines and args.texts is None:
        parser.error("--lines needs --texts")
    if sum((args.table, bool(args.rate), args.replay is not None)) > 1:
        parser.error("--table, --rate and --replay exclude one another")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LoadError, ValueError, OSError, http.client.HTTPException) as error:
        sys.exit(f"load.py: {type(error).__name__}: {error}")
