"""A client that keeps books: requests by timetable, each with one outcome, each answer compared bit by bit.

Arrivals are drawn from the seed and do not wait for answers, so a server that stands still is asked on, and latency
counts from when a request was due. It speaks HTTP/1.1 on sockets of its own, since it has to know what became of each
connection, and so that nothing is tried again behind its back.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from tests.fakes import oracle_vector
from tests.faults.oracle import NUM_WORDS, token_ids
from tests.gateway.wire import Answer, Wire, request_bytes

_MARGIN_S = 5.0  # beyond a request's deadline: who has no answer by then never gets one
_MAX_OPEN = 2000


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests, how many a second, over which connections."""

    rate: float  # requests a second, on average
    inputs: tuple[int, int] = (1, 8)  # of a request
    words: tuple[int, int] = (2, 10)  # of an input
    connections: int = 16  # kept alive, and used in turn
    fresh: float = 0.25  # the part of requests that come on a connection of their own
    timeout_s: float = 30.0  # X-Request-Timeout-Ms
    timeouts_ms: tuple[int, int] | None = None  # drawn between these instead
    key: str = ""
    tries: int = 1  # of a request that is refused with 429, each as late as it is told


@dataclass(slots=True, eq=False)
class Sent:
    """One request and what became of it.

    `outcome`: answered (rightly); wrong (a 200 that is not the oracle's, or somebody else's); refused (another
    status); cut (its connection ended without a byte); torn (amid an answer); unconnected; lost (nothing came).
    """

    request_id: str
    texts: list[str]
    due_s: float
    timeout_s: float = 30.0
    ended_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)  # those before the last one: 429
    outcomes: list[str] = field(default_factory=list)
    detail: str = ""
    port: int = 0  # of our end of its connection

    @property
    def outcome(self) -> str:
        (outcome,) = self.outcomes
        return outcome

    @property
    def deadline_s(self) -> float:
        """At the latest, by what its last answer says of how long it took."""
        (took_ms,) = re.findall(r"total;dur=([\d.]+)", self.answers[-1].headers["server-timing"])
        return self.ended_s - float(took_ms) / 1000 + self.timeout_s

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.due_s


class Ledger:
    """`async with Ledger(...)`: sends until the end of the block, then waits for what is open."""

    def __init__(self, port: int, load: Load, seed: int) -> None:
        self.sent: list[Sent] = []
        self._port = port
        self._load = load
        self._seed = seed
        self._idle: deque[Wire] = deque()
        self._open: set[asyncio.Task[None]] = set()
        self._arrivals: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ledger:
        self._arrivals = asyncio.create_task(self._arrive())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._arrivals is not None
        self._arrivals.cancel()
        await asyncio.gather(self._arrivals, return_exceptions=True)
        await asyncio.gather(*self._open)
        for wire in self._idle:
            await wire.close()

    def stop(self) -> None:
        """Send nothing more."""
        assert self._arrivals is not None
        self._arrivals.cancel()

    def ask(self, *texts: str) -> Sent:
        """Send one request beside those of the timetable; its outcome is there at the end of the block, or `until`."""
        return self._send(list(texts), time.monotonic())

    def rush(self, count: int, *, fresh: bool) -> None:
        """Send so many short requests now, all at once: each on a new connection, or so that many are kept."""
        for number in range(count):
            self._send([f"w{number}"], time.monotonic(), fresh=fresh)

    async def until(self, sent: Sent) -> None:
        while not sent.outcomes:
            await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)

    def in_hand(self) -> list[Sent]:
        return [sent for sent in self.sent if not sent.outcomes]

    def usual_s(self) -> float:
        """The median latency so far."""
        ended = sorted(sent.latency_s for sent in self.sent if sent.outcomes)
        return ended[len(ended) // 2]

    def counts(self) -> Counter[str]:
        return Counter(sent.outcome for sent in self.sent)

    async def _arrive(self) -> None:
        if not self._load.rate:
            return
        rng = random.Random(self._seed)
        due_s = time.monotonic()
        while True:
            due_s += rng.expovariate(self._load.rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            texts = [
                " ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(rng.randint(*self._load.words)))
                for _ in range(rng.randint(*self._load.inputs))
            ]
            timeout_s = self._load.timeout_s
            if self._load.timeouts_ms is not None:
                timeout_s = rng.randint(*self._load.timeouts_ms) / 1000
            self._send(texts, due_s, timeout_s)

    def _send(
        self, texts: list[str], due_s: float, timeout_s: float | None = None, *, fresh: bool | None = None
    ) -> Sent:
        assert len(self._open) < _MAX_OPEN, "the server stands still, or the load is more than it can do"
        timeout_s = self._load.timeout_s if timeout_s is None else timeout_s
        sent = Sent(f"ledger-{self._seed}-{len(self.sent)}", texts, due_s, timeout_s)
        self.sent.append(sent)
        if fresh is None:
            fresh = random.Random(sent.request_id).random() < self._load.fresh
        task = asyncio.create_task(self._run(sent, fresh=fresh))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return sent

    async def _run(self, sent: Sent, *, fresh: bool) -> None:
        outcome, sent.detail = await self._exchange(sent, fresh=fresh)
        for _ in range(1, self._load.tries):
            if outcome != "refused" or sent.answers[-1].status != 429:
                break
            await asyncio.sleep(int(sent.answers[-1].headers["retry-after-ms"]) / 1000)
            outcome, sent.detail = await self._exchange(sent, fresh=fresh)
        sent.ended_s = time.monotonic()
        sent.outcomes.append(outcome)

    async def _exchange(self, sent: Sent, *, fresh: bool) -> tuple[str, str]:
        """An outcome and what else there is to say of it."""
        body = json.dumps({"input": sent.texts, "encoding_format": "base64"}).encode()
        headers = {"X-Request-Id": sent.request_id, "X-Request-Timeout-Ms": str(int(sent.timeout_s * 1000))}
        if self._load.key:
            headers["Authorization"] = f"Bearer {self._load.key}"
        try:
            wire = await self._take(fresh=fresh)
        except OSError as error:
            return "unconnected", repr(error)
        sent.port = wire.port
        keeps = False
        try:
            await wire.send(request_bytes("POST", "/v1/embeddings", body, headers))
            answer = await wire.answer(timeout_s=sent.timeout_s + _MARGIN_S)
            keeps = not fresh and answer.headers.get("connection", "").lower() != "close"
        except asyncio.IncompleteReadError as error:
            began = bool(error.partial) or error.expected is not None
            return ("torn" if began else "cut"), repr(error)
        except ConnectionError as error:
            return "cut", repr(error)
        except TimeoutError:
            return "lost", f"nothing for {sent.timeout_s + _MARGIN_S} s"
        finally:
            if keeps and len(self._idle) < self._load.connections:
                self._idle.append(wire)
            else:
                await wire.close()
        sent.answers.append(answer)
        return judged(sent, answer)

    async def _take(self, *, fresh: bool) -> Wire:
        while self._idle and not fresh:
            wire = self._idle.popleft()
            if not wire.ended:
                return wire
            await wire.close()
        return await Wire.connect(self._port)


def judged(sent: Sent, answer: Answer) -> tuple[str, str]:
    """The outcome that an answer is, and what else there is to say of it."""
    if answer.headers.get("x-request-id") != sent.request_id:
        return "wrong", "the answer to another request"
    if answer.status != 200:
        return "refused", f"{answer.status} {answer.error['code']}"
    sequences = [token_ids(text) for text in sent.texts]
    body = answer.json
    rows = [(row["index"], base64.b64decode(row["embedding"])) for row in body["data"]]
    if rows != [(index, oracle_vector(ids).tobytes()) for index, ids in enumerate(sequences)]:
        return "wrong", "rows"
    if body["usage"]["prompt_tokens"] != sum(map(len, sequences)):
        return "wrong", "the count of tokens"
    return "answered", ""
