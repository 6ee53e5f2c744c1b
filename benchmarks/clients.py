"""Clients of a server with OpenAI's `POST /v1/embeddings`, or a `/v1/rerank`, that cost next to nothing themselves.

What a load is, how a server is asked, and a process of clients that puts the one on the other and notes what it sees;
`load.py` starts such processes and makes a report of what they have seen.

The clients must not be what is measured. Their requests are bytes that are only joined; of an answer they read its
length and its token count: about 15 µs a request on one core, measured against a server that does nothing, so a quarter
of a core at 15,000 requests a second. Some answers (the 1st, 2nd, 4th, 8th …) are kept, to be looked into afterwards.

Rejected: a general HTTP client, several times that cost in cores that the server needs; timers of the event loop for
due times, since uvloop's tick is a millisecond (a thread sleeps instead, exact to some 60 µs).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import re
import resource
import ssl
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Barrier
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.arrivals import Arrivals
from benchmarks.texts import LONGEST_TEXT, Corpus, Lines

_PAUSE_S = 0.1  # after an error, so that a closed loop does not become a storm
_FINISH_S = 30.0  # for what is on its way when the measured time is over
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)")
_NUM_TOKENS = re.compile(rb'"(?:prompt|total)_tokens"\s*:\s*(\d+)')
_TIMING = re.compile(rb"\r\nserver-timing:[ \t]*([^\r]*)")
_TIMING_EVERY = 16  # answers: of one in so many the server's own timing is read
_QUERY_SHARE = 0.9  # of the requests of "mixed"
_GOLDEN = 0.618033988749895
_TOKENS_PER_WORD = 1.3  # where a server does not say


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
class Plan:
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


class Clients:
    """All clients of one process."""

    def __init__(self, plan: Plan) -> None:
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


def run_plans(plans: list[Plan], show: Callable[[list[Pipe]], None] = lambda _: None) -> list[Tally]:
    """Have a process do each plan, all of them from the same moment on. `show` may look at their pipes meanwhile.

    Raises:
        LoadError: one of them died, for example since the server refuses connections.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(plans))
    children = []
    for plan in plans:
        receiver, sender = context.Pipe(duplex=False)
        children.append((context.Process(target=_client_process, args=(plan, barrier, sender)), receiver))
        children[-1][0].start()
        sender.close()
    try:
        show([receiver for _, receiver in children])
        tallies: list[Tally] = [receiver.recv() for _, receiver in children]
    except EOFError:
        raise LoadError(f"{plans[0].load.name}: a client process died; its error is above") from None
    for child, _ in children:
        child.join()
    return tallies


def _client_process(plan: Plan, barrier: Barrier, results: Pipe) -> None:
    """One process of clients: puts its part of the load on the server, and sends the Tally."""
    import uvloop  # here, since the parent and the tests do without

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results.send(runner.run(Clients(plan).run(barrier)))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
