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

The clients must not be what is measured. Their requests are bytes that are only joined; of an answer they read its
length and its token count: about 15 µs a request on one core, measured against a server that does nothing, so a quarter
of a core at 15,000 requests a second. Some answers (the 1st, 2nd, 4th, 8th …) are kept and looked into afterwards: one
vector a text, finite, all of one width. The table has the cores that the clients kept busy beside each load; near one
for each process means that the clients were the limit: give more `--processes`.

The texts are runs of words of `--texts` (a .txt, .jsonl or .csv file; else invented words from a seed), none sent
twice, so nothing is answered from a cache; with `--lines` they are the file's own, one after the other and again. How
many words make 20 or 310 tokens is found out from the server's own `usage` first. Kinds: a query, a document, "mixed"
(of ten requests nine queries), or "rerank" (a query and `--texts-per-request` documents).

Percentiles are of all samples, which take 8 bytes each. The result has them as HdrHistogram's encoding too (`hdr`, of
microseconds, three digits): whoever wants to add up runs of several machines can, which percentiles cannot be.

Rejected: a general HTTP client, several times that cost in cores that the server needs; timers of the event loop for
due times, since uvloop's tick is a millisecond (a thread sleeps instead, exact to some 60 µs).

Prints a table; the last line is one JSON object. `--report` writes a page with plots (`report.py`).
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
import ssl
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

from benchmarks.arrivals import Arrivals
from benchmarks.record import origin, write_result
from benchmarks.report import write_report
from benchmarks.texts import LONGEST_TEXT, Corpus, Lines

_CLIENTS_PER_PROCESS = 128
_PAUSE_S = 0.1  # after an error, so that a closed loop does not become a storm
_FINISH_S = 30.0  # for what is on its way when the measured time is over
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)")
_NUM_TOKENS = re.compile(rb'"(?:prompt|total)_tokens"\s*:\s*(\d+)')
_TIMING = re.compile(rb"\r\nserver-timing:[ \t]*([^\r]*)")
_TIMING_EVERY = 16  # answers: of one in so many the server's own timing is read
_SECONDS = 6.0
_CLOSED_CLIENTS, _OPEN_CLIENTS = 16, 256
_QUERY_SHARE = 0.9  # of the requests of "mixed"
_GOLDEN = 0.618033988749895
_TOKENS_PER_WORD = 1.3  # where a server does not say
_BINS_PER_DECADE = 20
_LONGEST_US = 3_600_000_000


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
    kind: str  # query, document, mixed or rerank
    texts_per_request: int = 1  # of rerank: documents
    encoding: str = "base64"
    goals: tuple[Goal, ...] = ()
    arrivals: Arrivals | None = None  # None: a closed loop


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
    path: str  # of embeddings
    model: str
    tokens_per_word: float = 1.0
    special_tokens: float = 0.0
    api_key: str | None = None
    tls: bool = False
    fields: dict[str, object] = field(default_factory=dict)  # of every body, beside what is asked

    @classmethod
    def find(
        cls,
        url: str,
        model: str | None,
        corpus: Corpus | Lines,
        api_key: str | None = None,
        *,
        kind: str = "query",
        fields: dict[str, object] | None = None,
    ) -> Target:
        """Ask a server for its model's name, and for the tokens of texts of two lengths, by requests of this kind.

        Raises:
            LoadError: it does not answer as it should.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise LoadError(f"--url {url}: http://HOST:PORT, or https, expected")
        tls = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if tls else 80)
        path = f"{root}/v1/embeddings"
        target = cls(parts.hostname, port, path, model or "", api_key=api_key, tls=tls, fields=fields or {})
        if model is None:
            target.model = str(target._ask(f"{root}/v1/models", None)["data"][0]["id"])
        short, long = 4, 64
        few, many = (target._mean_tokens(corpus, num_words, kind) for num_words in (short, long))
        if few is None or many is None or many <= few:  # it does not say, or the texts are as long as they are
            target.tokens_per_word = _TOKENS_PER_WORD
        else:
            target.tokens_per_word = (many - few) / (long - short)
            target.special_tokens = few - short * target.tokens_per_word
        return target

    def num_words(self, num_tokens: int) -> int:
        """How many words make a text of about so many tokens."""
        return min(max(1, round((num_tokens - self.special_tokens) / self.tokens_per_word)), LONGEST_TEXT)

    def body(self, texts: list[bytes], encoding: str) -> bytes:
        fields = json.dumps({"model": self.model, "encoding_format": encoding, **self.fields}).encode()
        quoted = b'["%b"]' % b'","'.join(texts) if len(texts) > 1 else b'"%b"' % texts[0]
        return b'%b,"input":%b}' % (fields[:-1], quoted)

    def rerank_body(self, texts: list[bytes]) -> bytes:
        """The first of them is the query."""
        fields = json.dumps({"model": self.model, **self.fields}).encode()
        return b'%b,"query":"%b","documents":["%b"]}' % (fields[:-1], texts[0], b'","'.join(texts[1:]))

    def request(self, texts: list[bytes], encoding: str, kind: str = "query") -> bytes:
        path, body = self._asked(texts, encoding, kind)
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
        if self.api_key is not None:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.tls else None

    def _asked(self, texts: list[bytes], encoding: str, kind: str) -> tuple[str, bytes]:
        if kind == "rerank":
            return self.path.removesuffix("embeddings") + "rerank", self.rerank_body(texts)
        return self.path, self.body(texts, encoding)

    def _mean_tokens(self, corpus: Corpus | Lines, num_words: int, kind: str) -> float | None:
        texts = [corpus.text(corpus.next_index + index, num_words) for index in range(16)]
        corpus.next_index += len(texts)
        if kind == "rerank":
            texts[0] = b"one"
        usage = self._ask(*self._asked(texts, "base64", kind)).get("usage") or {}
        num_tokens = usage.get("prompt_tokens", usage.get("total_tokens"))
        return None if num_tokens is None else float(num_tokens) / (len(texts) - (kind == "rerank"))

    def _ask(self, path: str, body: bytes | None) -> dict[str, Any]:
        make = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = make(self.host, self.port, timeout=120)
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
    corpus: Corpus | Lines
    num_words: dict[str, int]  # of a query, of a document
    num_clients: int
    first_index: int
    stride: int
    warm_up_s: float
    measured_s: float
    due_s: list[float] = field(default_factory=list)  # of an open loop, from the start of warming up on


@dataclass(slots=True)
class Tally:
    """What the clients of one process saw in the measured time."""

    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    samples: list[bytes] = field(default_factory=list)
    next_index: int = 0
    seconds: float = 0.0  # in which it was answered
    measured_s: float = 0.0  # in which it was asked
    cpu_s: float = 0.0
    num_due: int = 0  # requests, in an open loop
    late_s: array[float] = field(default_factory=lambda: array("d"))  # how long after they were due they could be sent
    by_second: Counter[int] = field(default_factory=Counter)  # answers
    stages_ms: Counter[str] = field(default_factory=Counter)  # as the server says, added up
    num_timed: int = 0

    def add(self, latency_s: float, chunks: list[bytes], header: bytes = b"", after_s: float = 0.0) -> None:
        """One good answer, in the pieces in which it arrived, so long after measuring began."""
        self.latencies_s.append(latency_s)
        self.by_second[int(after_s)] += 1
        if len(self.latencies_s) % _TIMING_EVERY == 1 and (timing := _TIMING.search(header.lower())):
            self.num_timed += 1
            for part in timing[1].decode("latin-1").split(","):
                name, _, duration_ms = part.strip().partition(";dur=")
                if duration_ms and name != "total":
                    self.stages_ms[name] += float(duration_ms)  # type: ignore[assignment]  # a Counter of floats
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
        self._received = b""  # of a header
        self._status = 0
        self._missing: int | None = 0  # bytes of the body; None: chunks until the last one
        self.header = b""  # of the last answer
        self.chunks: list[bytes] = []  # of the body

    async def ask(self, request: bytes) -> int:
        """The status of the answer; its body is in `chunks`. Raises ConnectionError: the connection is of no use."""
        if self.is_closed:
            raise ConnectionResetError
        assert self._transport is not None
        self._received, self.chunks = b"", []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self.chunks:
            self._received += data
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            self.header, data = self._received[:end], self._received[end + 4 :]
            header = self.header.lower()
            if (length := _LENGTH.search(header)) is None and b"\r\ntransfer-encoding:" not in header:
                raise LoadError("an answer without a length")  # the loop logs it and closes the connection
            self._status, self._missing = int(header[9:12]), None if length is None else int(length[1])
        self.chunks.append(data)
        if self._missing is not None:
            self._missing -= len(data)
        elif b"".join(self.chunks[-2:]).endswith(b"0\r\n\r\n"):
            self.chunks, self._missing = [_joined(b"".join(self.chunks))], 0
        if self._missing is not None and self._missing <= 0 and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())


def _joined(body: bytes) -> bytes:
    """What a body in chunks says, to its last chunk."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


async def open_connection(target: Target) -> Connection:
    """Raises OSError: nobody is there."""
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, target.host, target.port, ssl=target.ssl_context()
    )
    return connection


class _Clients:
    """All clients of one process."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._tally = Tally(next_index=plan.first_index)
        self._number = 0  # of requests so far
        self._measuring = False
        self._stopping = False
        self._began_s = 0.0
        self._due_between = (0.0, 0.0)
        self._last_s = 0.0  # when the last answer of an open loop came

    async def run(self, barrier: Barrier) -> Tally:
        try:
            connections = [await open_connection(self._plan.target) for _ in range(self._plan.num_clients)]
        except OSError:
            barrier.abort()
            raise
        barrier.wait(60)  # until all processes are connected; meanwhile nothing else is to be done here
        due: asyncio.Queue[float | None] = asyncio.Queue()
        if self._plan.load.arrivals is None:
            tasks = [asyncio.ensure_future(self._client(connection)) for connection in connections]
        else:
            tasks = [asyncio.ensure_future(self._server_of(due, connection)) for connection in connections]
            self._start_clock(due)
        await asyncio.sleep(self._plan.warm_up_s)
        self._measuring, self._began_s, cpu_before_s = True, time.monotonic(), _cpu_s()
        await asyncio.sleep(self._plan.measured_s)
        self._measuring, self._stopping = False, True
        self._tally.seconds = self._tally.measured_s = time.monotonic() - self._began_s
        self._tally.cpu_s = _cpu_s() - cpu_before_s
        done, late = await asyncio.wait(tasks, timeout=_FINISH_S)
        for task in done:
            task.result().close()
        self._tally.seconds = max(self._tally.seconds, self._last_s)
        if late:
            first_s, last_s = self._due_between
            waiting = [due.get_nowait() for _ in range(due.qsize())]
            num_waiting = sum(due_s is not None and first_s <= due_s < last_s for due_s in waiting)
            self._tally.num_due += num_waiting
            self._tally.errors["no answer"] += len(late) + num_waiting
        return self._tally

    # --- a closed loop ---

    async def _client(self, connection: Connection) -> Connection:
        while not self._stopping:
            request = self._next_request()
            sent_s = time.monotonic()
            try:
                if connection.is_closed:
                    connection = await open_connection(self._plan.target)
                status = await connection.ask(request)
            except OSError as error:
                await self._rest(type(error).__name__)
            else:
                if status != 200:
                    await self._rest(str(status))
                elif self._measuring:
                    ended_s = time.monotonic()
                    self._tally.add(ended_s - sent_s, connection.chunks, connection.header, ended_s - self._began_s)
        return connection

    async def _rest(self, error: str) -> None:
        self._tally.errors[error] += self._measuring
        await asyncio.sleep(_PAUSE_S)

    # --- an open loop ---

    def _start_clock(self, due: asyncio.Queue[float | None]) -> None:
        """Have a thread put each due time into the queue when it has come, and then an end for each client."""
        plan, loop, start_s = self._plan, asyncio.get_running_loop(), time.monotonic()
        first_s, last_s = start_s + plan.warm_up_s, start_s + plan.warm_up_s + plan.measured_s
        self._due_between = (first_s, last_s)

        def put(times_s: list[float]) -> None:
            now_s = time.monotonic()
            for time_s in times_s:
                due.put_nowait(time_s)
                if first_s <= time_s < last_s:
                    self._tally.late_s.append(now_s - time_s)

        def end() -> None:
            for _ in range(plan.num_clients):
                due.put_nowait(None)

        def run() -> None:
            times_s = [start_s + time_s for time_s in plan.due_s]
            at = 0
            while at < len(times_s):
                time.sleep(max(0.0, times_s[at] - time.monotonic()))
                now_s, begin = time.monotonic(), at
                while at < len(times_s) and times_s[at] <= now_s:
                    at += 1
                loop.call_soon_threadsafe(put, times_s[begin:at])
            loop.call_soon_threadsafe(end)

        threading.Thread(target=run, name="clock", daemon=True).start()

    async def _server_of(self, due: asyncio.Queue[float | None], connection: Connection) -> Connection:
        """One connection, which takes the next request that is due whenever it is free."""
        first_s, last_s = self._due_between
        while (due_s := await due.get()) is not None:
            counts = first_s <= due_s < last_s
            request = self._next_request()
            self._tally.num_due += counts
            try:
                if connection.is_closed:
                    connection = await open_connection(self._plan.target)
                status = await connection.ask(request)
            except OSError as error:
                self._tally.errors[type(error).__name__] += counts
            else:
                if status != 200:
                    self._tally.errors[str(status)] += counts
                elif counts:
                    ended_s = time.monotonic()
                    self._tally.add(ended_s - due_s, connection.chunks, connection.header, ended_s - first_s)
                    self._last_s = ended_s - first_s
        return connection

    # --- either ---

    def _next_request(self) -> bytes:
        """Those of "mixed" take turns so that any few in a row are mixed as all are."""
        plan, kind = self._plan, self._plan.load.kind
        self._number += 1
        if kind == "mixed":
            kind = "query" if self._number * _GOLDEN % 1 < _QUERY_SHARE else "document"
        num_texts = plan.load.texts_per_request + (kind == "rerank")
        first = self._tally.next_index
        self._tally.next_index += num_texts * plan.stride
        num_words = plan.num_words["document" if kind == "rerank" else kind]
        texts = [plan.corpus.text(index, num_words) for index in range(first, self._tally.next_index, plan.stride)]
        if kind == "rerank":
            texts[0] = plan.corpus.text(first, plan.num_words["query"])
        return plan.target.request(texts, plan.load.encoding, kind)


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
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    children = []
    for number in range(num_processes):
        plan = _Plan(
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
        receiver, sender = context.Pipe(duplex=False)
        children.append((context.Process(target=_client_process, args=(plan, barrier, sender)), receiver))
        children[-1][0].start()
        sender.close()
    try:
        _show_progress(load.name, args.warm_up + args.seconds, [receiver for _, receiver in children])
        tallies: list[Tally] = [receiver.recv() for _, receiver in children]
    except EOFError:
        raise LoadError(f"{load.name}: a client process died; its error is above") from None
    for child, _ in children:
        child.join()
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
