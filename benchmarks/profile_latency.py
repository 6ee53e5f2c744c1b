"""Where does the time of a request go, from its client through every process and back?

    python benchmarks/profile_latency.py --url http://127.0.0.1:8080 [--clients 1] [--requests 400] [--kind document]
        [--texts DATA/scifact/corpus.jsonl] [--trace trace.json] [--output FILE]

Every second request (`--sample 0.5`) asks with `X-Trace: 1` to be followed; the server's processes then note when it
passes through them, on CLOCK_MONOTONIC, which all of a host share, so this has to run on the server's host. Between two
moments lies a stage (`gateway/trace.py` names them); "accept" is before them, from the client's first byte on, and
"write" after them, to the answer's last byte. Requests that are not followed cost the server nothing for it; they are
here to be compared with, since following costs something itself: a few messages a batch, and on a GPU one wait more.

A table has p50 and p99 of each stage and its share of the time; another one groups them as the budget of one short
query on an idle server with an H200 does, 1.8 ms. As the stages lie between moments of one clock they add up to the
client's own measure, unless a moment is missing or out of order: the sum is compared with it request by request, and
more than 5 % of difference is an error. Quantiles do not add up; shares do.

On a GPU "launch" ends when all is launched and "device" when the rows are computed; where the device began before the
launch was over, that counts as "launch". On a CPU "device" is the step.

`--trace` writes Chrome's JSON, which https://ui.perfetto.dev and chrome://tracing open: lanes for clients, gateways,
scheduler, and each worker's threads and device; arrows follow each request through the batch it ran in.

Prints tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.clients import Connection, LoadError, Target, open_connection
from benchmarks.load import percentile
from benchmarks.record import write_result
from benchmarks.texts import Corpus
from common.wire.messages import PIECE_MOMENTS
from common.wire.transport import now_ns
from gateway.trace import MOMENTS, STAGES

ALL_STAGES = ("accept", *STAGES, "write")

# Microseconds of one short query, idle server, one H200; four hand-overs of 40 between processes are in "scheduler".
BUDGET_US = {
    "accept, parse": (("accept", "body", "parse"), 100),
    "tokenize": (("tokenize",), 100),
    "send": (("send",), 30),
    "scheduler, both ways": (("to_scheduler", "queue", "to_worker", "from_worker", "relay"), 300),
    "worker": (("batch_wait", "stage", "launch"), 100),
    "device": (("device_wait", "device"), 1_000),
    "copy back": (("copy_back", "answer"), 40),
    "render, write": (("resume", "render", "write"), 100),
}

_MOST_DIFFERENCE = 0.05
_TRACE = re.compile(rb"\r\nx-trace:[ \t]*([^\r]*)", re.IGNORECASE)


class ProfileError(Exception):
    """What the server says of a request cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A request's way, or a piece's of it, through scheduler and worker: nanoseconds of CLOCK_MONOTONIC."""

    batch: int
    worker: str
    num_sequences: int  # of the batch
    num_tokens: int
    times_ns: dict[str, int]  # by PIECE_MOMENTS, and when the gateway had heard


@dataclass(frozen=True, slots=True)
class Followed:
    """One request, from its first byte to its answer's last."""

    client: int
    gateway_pid: int
    sent_ns: int
    answered_ns: int
    times_ns: dict[str, int]  # by MOMENTS; of several pieces those of the one that came back last
    pieces: list[Piece]

    @classmethod
    def of(cls, header: bytes, client: int, sent_ns: int, answered_ns: int) -> Followed:
        """What an answer's header says.

        Raises:
            ProfileError: it says nothing, or is of another clock.
        """
        if (found := _TRACE.search(header)) is None:
            raise ProfileError("an answer without X-Trace: is this a Hedgerow that knows it?")
        said: dict[str, Any] = json.loads(found[1])
        start_ns = said["start_ns"]
        pieces = [
            Piece(
                piece["batch"],
                piece["worker"],
                piece["sequences"],
                piece["tokens"],
                dict(zip((*PIECE_MOMENTS, "heard"), _from(start_ns, piece["times_ns"]), strict=True)),
            )
            for piece in said["pieces"]
        ]
        around = _from(start_ns, [*said["before_ns"], *said["after_ns"]])
        names = [name for name in MOMENTS if name not in pieces[-1].times_ns]
        known = {**dict(zip(names, around, strict=True)), **pieces[-1].times_ns}
        times_ns = {name: known[name] for name in MOMENTS}
        ordered = [sent_ns, *times_ns.values(), answered_ns]
        if ordered != sorted(ordered):
            raise ProfileError("moments that are out of order: is this another host than the server's?")
        return cls(client, said["pid"], sent_ns, answered_ns, times_ns, pieces)

    @property
    def latency_ms(self) -> float:
        """As the client measures it."""
        return (self.answered_ns - self.sent_ns) / 1e6

    def stages_ms(self) -> dict[str, float]:
        """How long each of ALL_STAGES took."""
        ends_ns = [self.sent_ns, *self.times_ns.values(), self.answered_ns]
        return {name: (end - begin) / 1e6 for name, (begin, end) in zip(ALL_STAGES, pairwise(ends_ns), strict=True)}


def _from(start_ns: int, times_ns: Sequence[int]) -> list[int]:
    return [start_ns + time_ns for time_ns in times_ns]


# --- asking ---


@dataclass(frozen=True, slots=True)
class Measured:
    followed: list[Followed]
    others_ms: list[float]  # latencies of requests that were not followed


async def ask_all(target: Target, corpus: Corpus, num_words: int, args: argparse.Namespace) -> Measured:
    """Closed loops of `args.clients` clients, until `args.requests` are answered besides those that warm up.

    Raises:
        LoadError, ProfileError: an answer is not what it should be.
    """
    numbers = itertools.count(-args.warm_up)
    measured = Measured([], [])

    async def one_client(client: int, connection: Connection) -> None:
        while (number := next(numbers)) < args.requests:
            first, corpus.next_index = corpus.next_index, corpus.next_index + args.texts_per_request
            texts = [corpus.text(index, num_words) for index in range(first, corpus.next_index)]
            request = target.request(texts, "base64")
            follows = int((number + 1) * args.sample) > int(number * args.sample)
            if follows:
                request = request.replace(b"\r\n", b"\r\nX-Trace: 1\r\n", 1)
            sent_ns = now_ns()
            status = await connection.ask(request)
            answered_ns = now_ns()
            if status != 200:
                raise LoadError(f"the server answered {status}: {b''.join(connection.chunks)[:300].decode()}")
            if number < 0:
                continue
            if follows:
                measured.followed.append(Followed.of(connection.header, client, sent_ns, answered_ns))
            else:
                measured.others_ms.append((answered_ns - sent_ns) / 1e6)

    connections = [await open_connection(target) for _ in range(args.clients)]
    try:
        await asyncio.gather(*(one_client(client, connection) for client, connection in enumerate(connections)))
    finally:
        for connection in connections:
            connection.close()
    return measured


# --- what it says ---


@dataclass(frozen=True, slots=True)
class Row:
    """Of a stage, or of several: over all requests that were followed."""

    p50_ms: float
    p99_ms: float
    share: float  # of all requests' time

    @classmethod
    def of(cls, times_ms: list[float], total_ms: float) -> Row:
        ordered = sorted(times_ms)
        return cls(percentile(ordered, 50), percentile(ordered, 99), sum(ordered) / total_ms)


def stage_rows(followed: list[Followed]) -> dict[str, Row]:
    """A row for each of ALL_STAGES, and for their sum.

    Raises:
        ProfileError: a request's stages do not add up to what its client measured.
    """
    of_each = [one.stages_ms() for one in followed]
    total_ms = sum(one.latency_ms for one in followed)
    for one, stages_ms in zip(followed, of_each, strict=True):
        difference = abs(sum(stages_ms.values()) / one.latency_ms - 1)
        if difference > _MOST_DIFFERENCE:
            raise ProfileError(f"stages that add up to {difference:.1%} more or less than the client measured")
    rows = {name: Row.of([stages_ms[name] for stages_ms in of_each], total_ms) for name in ALL_STAGES}
    return {**rows, "sum of the stages": Row.of([sum(stages_ms.values()) for stages_ms in of_each], total_ms)}


def budget_rows(followed: list[Followed]) -> dict[str, Row]:
    """A row for each group of BUDGET_US."""
    of_each = [one.stages_ms() for one in followed]
    total_ms = sum(one.latency_ms for one in followed)
    return {
        group: Row.of([sum(stages_ms[name] for name in names) for stages_ms in of_each], total_ms)
        for group, (names, _) in BUDGET_US.items()
    }


# --- Chrome's trace ---

# Numbers of groups of lanes, each a process to who draws them.
_CLIENTS, _SCHEDULER, _FIRST_GATEWAY, _FIRST_WORKER = 1, 2, 10, 1000

# What a worker's threads and its device do, each a lane: from one moment of a batch to another.
_WORKER_LANES = {
    "batch waits": (("received", "taken", "batch_wait"),),
    "launcher": (("taken", "staged", "stage"), ("staged", "launched", "launch")),
    "collector": (("computed", "copied", "copy_back"),),
    "socket": (("copied", "answered", "answer"),),
}


def chrome_trace(followed: list[Followed]) -> dict[str, object]:
    """Slices, arrows and the names of lanes, microseconds from the first request on."""
    origin_ns = min(one.sent_ns for one in followed)
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(followed, origin_ns))}


def _events(followed: list[Followed], origin_ns: int) -> Iterator[dict[str, object]]:
    gateways = {
        pid: _FIRST_GATEWAY + number for number, pid in enumerate(sorted({one.gateway_pid for one in followed}))
    }
    names = sorted({piece.worker for one in followed for piece in one.pieces})
    workers = {name: _FIRST_WORKER + 2 * number for number, name in enumerate(names)}

    def slice_(name: str, process: int, lane: int, begin_ns: int, end_ns: int, **args: object) -> dict[str, object]:
        at = {"ts": (begin_ns - origin_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        return {"ph": "X", "name": name, "pid": process, "tid": lane, **at, "args": args}

    def arrow(phase: str, name: str, process: int, lane: int, at_ns: int) -> dict[str, object]:
        at = {"pid": process, "tid": lane, "ts": (at_ns - origin_ns) / 1e3}
        return {"ph": phase, "cat": "batch", "name": "batch", "id": name, **at, **({"bp": "e"} if phase != "s" else {})}

    yield _name("process_name", "clients", _CLIENTS)
    yield _name("process_name", "scheduler", _SCHEDULER)
    for pid, process in gateways.items():
        yield _name("process_name", f"gateway (pid {pid})", process)
    for name, process in workers.items():
        yield _name("process_name", f"{name}: CPU", process)
        yield _name("process_name", f"{name}: device", process + 1)
        for lane, title in enumerate(_WORKER_LANES):
            yield _name("thread_name", title, process, lane)
    for client in sorted({one.client for one in followed}):
        for process in (_CLIENTS, _SCHEDULER, *gateways.values()):
            yield _name("thread_name", f"client {client}", process, client)
    seen: set[tuple[str, int]] = set()
    for number, one in enumerate(followed):
        lane, gateway, times_ns = one.client, gateways[one.gateway_pid], one.times_ns
        yield slice_(f"request {number}", _CLIENTS, lane, one.sent_ns, one.answered_ns, **one.stages_ms())
        first = one.pieces[0].times_ns["sent"]
        sides = [("accepted", "read"), ("read", "parsed"), ("parsed", "tokenized")]
        for begin, end in sides:
            yield slice_(STAGES[MOMENTS.index(begin)], gateway, lane, times_ns[begin], times_ns[end], request=number)
        yield slice_("send", gateway, lane, times_ns["tokenized"], first, request=number)
        for begin, end in (("heard", "resumed"), ("resumed", "rendered")):
            yield slice_(STAGES[MOMENTS.index(begin)], gateway, lane, times_ns[begin], times_ns[end], request=number)
        for piece in one.pieces:
            process, batch, flow = workers[piece.worker], f"batch {piece.batch}", f"{number}-{piece.batch}"
            about = {"sequences": piece.num_sequences, "tokens": piece.num_tokens}
            at = piece.times_ns
            yield slice_("queue", _SCHEDULER, lane, at["arrived"], at["formed"], request=number, batch=piece.batch)
            yield slice_("to_worker", _SCHEDULER, lane, at["formed"], at["received"], request=number, batch=piece.batch)
            yield slice_("relay", _SCHEDULER, lane, at["returned"], at["heard"], request=number, batch=piece.batch)
            if (piece.worker, piece.batch) not in seen:
                seen.add((piece.worker, piece.batch))
                for tid, parts in enumerate(_WORKER_LANES.values()):
                    for begin, end, stage in parts:
                        yield slice_(f"{stage}, {batch}", process, tid, at[begin], at[end], **about)
                yield slice_(batch, process + 1, 0, at["began"], at["computed"], **about)
            yield arrow("s", flow, gateway, lane, times_ns["tokenized"])
            yield arrow("t", flow, _SCHEDULER, lane, at["formed"])
            yield arrow("t", flow, process, 1, at["taken"])
            yield arrow("t", flow, process + 1, 0, at["began"])
            yield arrow("t", flow, _SCHEDULER, lane, at["returned"])
            yield arrow("f", flow, gateway, lane, times_ns["heard"])


def _name(kind: str, name: str, process: int, lane: int = 0) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


# --- the command ---


def main() -> int:
    """Ask, print, write the trace."""
    args = _parse_arguments()
    corpus = Corpus.read(args.texts)
    target = Target.find(args.url, args.model, corpus, api_key=args.api_key)
    num_words = target.num_words(args.tokens or {"query": 20, "document": 310}[args.kind])
    measured = asyncio.run(ask_all(target, corpus, num_words, args))
    followed = measured.followed
    if not followed:
        raise ProfileError("no request was followed; raise --requests or --sample")
    stages, budget = stage_rows(followed), budget_rows(followed)
    traced = Row.of([one.latency_ms for one in followed], sum(one.latency_ms for one in followed))
    others = sorted(measured.others_ms)
    print(f"{target.model} at {args.url}: {len(followed)} requests followed, {args.clients} at a time")
    print(f"\n{'stage':<22}{'p50 ms':>10}{'p99 ms':>10}{'share':>8}")
    for name, row in (*stages.items(), ("the client's measure", traced)):
        print(f"{name:<22}{row.p50_ms:>10.3f}{row.p99_ms:>10.3f}{row.share:>8.1%}")
    print(f"{'of those not followed':<22}{percentile(others, 50):>10.3f}{percentile(others, 99):>10.3f}")
    print(f"\n{'p50, µs':<22}{'measured':>10}{'budget':>10}")
    for name, row in budget.items():
        print(f"{name:<22}{row.p50_ms * 1e3:>10.0f}{BUDGET_US[name][1]:>10,}")
    if args.trace is not None:
        args.trace.write_text(json.dumps(chrome_trace(followed)), encoding="utf-8")
        print(f"\n{args.trace}: open it at https://ui.perfetto.dev")
    result: dict[str, object] = {
        "benchmark": "profile_latency",
        "url": args.url,
        "model": target.model,
        "clients": args.clients,
        "followed": len(followed),
        "stages": {name: _rounded(row) for name, row in stages.items()},
        "budget": {name: {**_rounded(row), "budget_us": BUDGET_US[name][1]} for name, row in budget.items()},
        "client": _rounded(traced),
        "not_followed": {"p50_ms": percentile(others, 50), "p99_ms": percentile(others, 99), "requests": len(others)},
    }
    write_result(result, args.output)
    return 0


def _rounded(row: Row) -> dict[str, float]:
    return {"p50_ms": round(row.p50_ms, 4), "p99_ms": round(row.p99_ms, 4), "share": round(row.share, 4)}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of a server of this host [%(default)s]")
    parser.add_argument("--model", help="name to ask for; default: the first that /v1/models lists")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--texts", type=Path, help=".jsonl or .csv file of running text; default: invented words")
    parser.add_argument("--kind", choices=("query", "document"), default="query", help="20 or 310 tokens [%(default)s]")
    parser.add_argument("--tokens", type=int, help="about so many tokens a text instead")
    parser.add_argument("--texts-per-request", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="requests at a time [%(default)s]")
    parser.add_argument("--requests", type=int, default=400, help="in all [%(default)s]")
    parser.add_argument("--warm-up", type=int, default=40, help="requests before them [%(default)s]")
    parser.add_argument("--sample", type=float, default=0.5, help="the share that is followed [%(default)s]")
    parser.add_argument("--trace", type=Path, help="file for Chrome's and Perfetto's JSON")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LoadError, ProfileError, ValueError, OSError, http.client.HTTPException) as error:
        sys.exit(f"profile_latency.py: {type(error).__name__}: {error}")
