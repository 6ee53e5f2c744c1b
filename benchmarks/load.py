"""How many texts a second does a server embed over HTTP, and how long does a client wait?

    python benchmarks/load.py --url http://127.0.0.1:8080 --table [--texts DATA/scifact/corpus.jsonl] [--output FILE]
    python benchmarks/load.py --url http://127.0.0.1:8080 --clients 64 [--kind document] [--texts-per-request 32]
        [--encoding float] [--seconds 6]

For any server with OpenAI's `POST /v1/embeddings`, so that the same program measures others. A closed loop: each client
has one connection with one request on its way, and sends the next when it has the answer. Latency is from before a
request's first byte is written to its answer's last byte. What was answered in the measured seconds counts.

`--table` runs the eight loads that the project has goals for, one after the other. The goals are for one H200 with 16
cores, which the clients share, and a model of Qwen3-0.6B's shape; the ceiling is the engine alone (`engine.py`): 512
tokens in 0.6 ms are 43,000 queries a second, 16,384 in 21 ms are 790,000 tokens a second.

The clients must not be what is measured. Their requests are bytes that are only joined; of an answer they read its
length and its token count: about 15 µs a request on one core, measured against a server that does nothing, so a quarter
of a core at 15,000 requests a second. Some answers (the 1st, 2nd, 4th, 8th …) are kept and looked into afterwards: one
vector a text, finite, all of one width. The table has the cores that the clients kept busy beside each load; near one
for each process means that the clients were the limit: give more `--processes`.

The texts are runs of words of `--texts` (a .jsonl or .csv file; else invented words from a seed), none sent twice, so
nothing is answered from a cache. How many words make 20 or 310 tokens is found out from the server's own `usage` first.

Rejected: a general HTTP client, several times that cost in cores that the server needs.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import math
import multiprocessing
import re
import resource
import sys
import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.record import write_result
from benchmarks.texts import LONGEST_TEXT, Corpus

_CLIENTS_PER_PROCESS = 128
_PAUSE_S = 0.1  # after an error, so that a closed loop does not become a storm
_FINISH_S = 30.0  # for what is on its way when the measured time is over
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)")
_NUM_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')


class LoadError(Exception):
    """The server, or the text, cannot be used for this; the text says why."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What one number of a report may be at most (≤) or must be at least (≥)."""

    metric: str
    sense: str
    limit: float

    def met(self, value: float) -> bool:
        return value <= self.limit if self.sense == "≤" else value >= self.limit


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    num_clients: int
    kind: str  # query or document
    texts_per_request: int = 1
    encoding: str = "base64"
    goals: tuple[Goal, ...] = ()


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


@dataclass(slots=True)
class Target:
    """A server, what it calls its model, and how its tokenizer counts words."""

    host: str
    port: int
    path: str
    model: str
    tokens_per_word: float = 1.0
    special_tokens: float = 0.0
    api_key: str | None = None

    @classmethod
    def find(cls, url: str, model: str | None, corpus: Corpus, api_key: str | None = None) -> Target:
        """Ask a server for its model's name, and for the tokens of texts of two lengths.

        Raises:
            LoadError: it does not answer as it should.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise LoadError(f"--url {url}: http://HOST:PORT expected")
        root = parts.path.rstrip("/")
        target = cls(parts.hostname, parts.port or 80, f"{root}/v1/embeddings", model or "", api_key=api_key)
        if model is None:
            target.model = str(target._ask(f"{root}/v1/models", None)["data"][0]["id"])
        short, long = 4, 64
        few, many = (target._mean_tokens(corpus, num_words) for num_words in (short, long))
        target.tokens_per_word = (many - few) / (long - short)
        target.special_tokens = few - short * target.tokens_per_word
        return target

    def num_words(self, num_tokens: int) -> int:
        """How many words make a text of about so many tokens."""
        return min(max(1, round((num_tokens - self.special_tokens) / self.tokens_per_word)), LONGEST_TEXT)

    def body(self, texts: list[bytes], encoding: str) -> bytes:
        fields = json.dumps({"model": self.model, "encoding_format": encoding}).encode()
        quoted = b'["%b"]' % b'","'.join(texts) if len(texts) > 1 else b'"%b"' % texts[0]
        return b'%b,"input":%b}' % (fields[:-1], quoted)

    def request(self, texts: list[bytes], encoding: str) -> bytes:
        body = self.body(texts, encoding)
        head = f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
        if self.api_key is not None:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)

    def _mean_tokens(self, corpus: Corpus, num_words: int) -> float:
        texts = [corpus.text(corpus.next_index + index, num_words) for index in range(16)]
        corpus.next_index += len(texts)
        return float(self._ask(self.path, self.body(texts, "base64"))["usage"]["prompt_tokens"]) / len(texts)

    def _ask(self, path: str, body: bytes | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if response.status != 200:
            raise LoadError(f"{path} answered {response.status}: {content[:300].decode(errors='replace')}")
        return cast("dict[str, Any]", json.loads(content))


# --- a process of clients ---


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one process does. Its texts are those of `first_index`, one `stride` further, and so on."""

    load: Load
    target: Target
    corpus: Corpus
    num_words: int
    num_clients: int
    first_index: int
    stride: int
    warm_up_s: float
    measured_s: float


@dataclass(slots=True)
class Tally:
    """What the clients of one process saw in the measured time."""

    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    samples: list[bytes] = field(default_factory=list)
    next_index: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def add(self, latency_s: float, chunks: list[bytes]) -> None:
        """One good answer, in the pieces in which it arrived."""
        self.latencies_s.append(latency_s)
        tail = b"".join(chunks[-2:])[-256:]
        found = _NUM_TOKENS.search(tail) or _NUM_TOKENS.search(b"".join(chunks))
        self.num_tokens += int(found[1]) if found else 0
        if (count := len(self.latencies_s)) & (count - 1) == 0:
            self.samples.append(b"".join(chunks))


class Connection(asyncio.Protocol):
    """One connection with at most one request on its way. Knows as much of HTTP/1.1 as it needs."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        self._header = b""
        self.header = b""  # of the last answer
        self._status = 0
        self._missing = 0  # bytes of the body
        self.chunks: list[bytes] = []  # of the body

    async def ask(self, request: bytes) -> int:
        """The status of the answer; its body is in `chunks`. Raises ConnectionError: the connection is of no use."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError
        self._header, self.chunks = b"", []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self.chunks:
            self._header += data
            end = self._header.find(b"\r\n\r\n")
            if end < 0:
                return
            self.header, data = self._header[:end], self._header[end + 4 :]
            header = self.header.lower()
            if (length := _LENGTH.search(header)) is None:
                raise LoadError("an answer without Content-Length")  # the loop logs it and closes the connection
            self._status, self._missing = int(header[9:12]), int(length[1])
        self.chunks.append(data)
        self._missing -= len(data)
        if self._missing <= 0 and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())


async def open_connection(target: Target) -> Connection:
    """Raises OSError: nobody is there."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, target.host, target.port)
    return connection


class _Clients:
    """All clients of one process."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._tally = Tally(next_index=plan.first_index)
        self._measuring = False
        self._stopping = False

    async def run(self, barrier: Barrier) -> Tally:
        try:
            connections = [await open_connection(self._plan.target) for _ in range(self._plan.num_clients)]
        except OSError:
            barrier.abort()
            raise
        barrier.wait(60)  # until all processes are connected; meanwhile nothing else is to be done here
        tasks = [asyncio.ensure_future(self._client(connection)) for connection in connections]
        await asyncio.sleep(self._plan.warm_up_s)
        self._measuring, began_s, cpu_before_s = True, time.monotonic(), _cpu_s()
        await asyncio.sleep(self._plan.measured_s)
        self._measuring, self._stopping = False, True
        self._tally.seconds, self._tally.cpu_s = time.monotonic() - began_s, _cpu_s() - cpu_before_s
        _, late = await asyncio.wait(tasks, timeout=_FINISH_S)
        if late:
            self._tally.errors["no answer"] += len(late)
        return self._tally

    async def _client(self, connection: Connection) -> None:
        while not self._stopping:
            request = self._next_request()
            sent_s = time.monotonic()
            try:
                status = await connection.ask(request)
            except OSError as error:
                await self._rest(type(error).__name__)
                try:
                    connection = await open_connection(self._plan.target)
                except OSError:
                    continue  # the next request then fails, and is counted
            else:
                if status != 200:
                    await self._rest(str(status))
                elif self._measuring:
                    self._tally.add(time.monotonic() - sent_s, connection.chunks)

    def _next_request(self) -> bytes:
        plan, first = self._plan, self._tally.next_index
        self._tally.next_index += plan.load.texts_per_request * plan.stride
        indices = range(first, self._tally.next_index, plan.stride)
        texts = [plan.corpus.text(index, plan.num_words) for index in indices]
        return plan.target.request(texts, plan.load.encoding)

    async def _rest(self, error: str) -> None:
        self._tally.errors[error] += self._measuring
        await asyncio.sleep(_PAUSE_S)


def _client_process(plan: _Plan, barrier: Barrier, results: Pipe) -> None:
    import uvloop  # here, since the parent and the tests do without

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results.send(runner.run(_Clients(plan).run(barrier)))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- one load ---


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


def run_load(load: Load, target: Target, corpus: Corpus, num_tokens: int, args: argparse.Namespace) -> Report:
    """Put one load of texts of about `num_tokens` on a server.

    Raises:
        LoadError: a client process died, for example since the server refuses connections.
    """
    num_processes = min(args.processes or -(-load.num_clients // _CLIENTS_PER_PROCESS), load.num_clients)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    children = []
    for number in range(num_processes):
        plan = _Plan(
            load=load,
            target=target,
            corpus=corpus,
            num_words=target.num_words(num_tokens),
            num_clients=len(range(number, load.num_clients, num_processes)),
            first_index=corpus.next_index + number,
            stride=num_processes,
            warm_up_s=args.warm_up,
            measured_s=args.seconds,
        )
        receiver, sender = context.Pipe(duplex=False)
        children.append((context.Process(target=_client_process, args=(plan, barrier, sender)), receiver))
        children[-1][0].start()
        sender.close()
    try:
        tallies: list[Tally] = [receiver.recv() for _, receiver in children]
    except EOFError:
        raise LoadError(f"{load.name}: a client process died; its error is above") from None
    for child, _ in children:
        child.join()
    corpus.next_index = max(tally.next_index for tally in tallies)
    return summarize(tallies, load)


def summarize(tallies: list[Tally], load: Load) -> Report:
    """One report of what all processes saw."""
    latencies_s = sorted(latency_s for tally in tallies for latency_s in tally.latencies_s)
    seconds = sum(tally.seconds for tally in tallies) / len(tallies)
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
        client_cores=sum(tally.cpu_s for tally in tallies) / seconds,
        tokens_per_text=num_tokens / max(1, num_texts),
        dimensions=sorted(widths),
        sampled=len(samples),
    )


def check_answer(body: bytes, load: Load) -> set[int]:
    """The widths of an answer's vectors. Raises LoadError: there is not one finite vector a text, in order."""
    rows = json.loads(body)["data"]
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
    corpus = Corpus.read(args.texts)
    target = Target.find(args.url, args.model, corpus)
    name = f"{args.clients} × {args.texts_per_request} {args.kind}, {args.encoding}"
    loads = TABLE if args.table else (Load(name, args.clients, args.kind, args.texts_per_request, args.encoding),)
    print(f"{target.model} at {args.url}, {target.tokens_per_word:.2f} tokens a word, {args.seconds:g} s a load")
    columns = ("requests/s", "texts/s", "tokens/s", "p50 ms", "p90 ms", "p99 ms", "errors", "client cores")
    print(f"{'load':<26}" + "".join(f"{column:>{max(9, len(column) + 2)}}" for column in columns) + "  goals")
    rows = []
    for load in loads:
        num_tokens = args.query_tokens if load.kind == "query" else args.document_tokens
        report = run_load(load, target, corpus, num_tokens, args)
        goals = {f"{g.metric} {g.sense} {g.limit:,g}": g.met(getattr(report, g.metric)) for g in load.goals}
        print(
            f"{load.name:<26}{report.requests_per_s:>12,.1f}{report.texts_per_s:>9,.0f}{report.tokens_per_s:>10,.0f}"
            f"{report.p50_ms:>9.2f}{report.p90_ms:>9.2f}{report.p99_ms:>9.2f}{sum(report.errors.values()):>9}"
            f"{report.client_cores:>14.2f}  "
            + ", ".join(f"{text}: {'yes' if met else 'NO'}" for text, met in goals.items())
        )
        if report.errors or len(report.dimensions) > 1:
            print(f"  errors {report.errors}, widths of vectors {report.dimensions}")
        rows.append({**asdict(load), **asdict(report), "goals": goals})
    write_result({"benchmark": "load", "url": args.url, "model": target.model, "loads": rows}, args.output)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server [%(default)s]")
    parser.add_argument("--model", help="name to ask for; default: the first that /v1/models lists")
    parser.add_argument("--texts", type=Path, help=".jsonl or .csv file of running text; default: invented words")
    parser.add_argument("--table", action="store_true", help="the eight loads with goals; else one load:")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kind", choices=("query", "document"), default="query")
    parser.add_argument("--texts-per-request", type=int, default=1)
    parser.add_argument("--encoding", choices=("base64", "float"), default="base64")
    parser.add_argument("--query-tokens", type=int, default=20, help="about so many tokens a query [%(default)s]")
    parser.add_argument("--document-tokens", type=int, default=310, help="and a document [%(default)s]")
    parser.add_argument("--processes", type=int, help=f"of clients; default: one for {_CLIENTS_PER_PROCESS} clients")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before measuring [%(default)s]")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds measured [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LoadError, ValueError, OSError, http.client.HTTPException) as error:
        sys.exit(f"load.py: {type(error).__name__}: {error}")
