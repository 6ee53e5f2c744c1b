"""What does a request cost the processes in front of the model, in microseconds of CPU?

    python benchmarks/frontend.py [--parts stages,scheduler,singly,gateway,bulk] [--repeats 300] [--rounds 3]
        [--seconds 3] [--output FILE]

No model and no GPU: the one scheduler is what limits short queries where a GPU is fast, and gateways are what the rest
of the machine is spent on. Everything is measured in CPU time, not in time on the clock, so other work on the machine
disturbs it little; processes take turns, round by round, and the table has the median of the rounds.

- stages: the code alone, without sockets, in this process. Of the scheduler from the frames of requests to Batch frames
  and from a Result's frames to those of its replies, for batches of 25 requests of one sequence of 20 tokens, with rows
  of 4 KB, while as many more wait; these come together in one message, and singly, in one each. Of the gateway from a
  body to the frames of a Request, and back.
- scheduler: the real process and its sockets. In front of it two processes that speak as gateways, 64 requests on their
  way from each, and whatever is asked at one moment goes in one message; behind it an oracle that answers a batch at
  once and says that it took a millisecond.
- singly: the same, each request in a message of its own, as where nobody else asks at that moment.
- relay: the peers of `scheduler` around two bare ROUTERs that read nothing of a message but its number of frames and of
  requests, and send what a scheduler would: one batch for 25 requests, and 25 answers for a batch's rows. That is what
  ZeroMQ and its binding cost by themselves, so it is the ceiling of that line.
- gateway: the real process, `benchmarks/load.py` as its clients, a stand-in for the scheduler that answers at once. Its
  column `a batch` is requests a message.
- bulk: the same with requests of 32 texts of mixed length (most of 8 to 128 words), rows of 384 as JSON floats. There
  is no goal for it; `stages` has what the code alone takes of it.

A process's main thread holds the interpreter's lock and is what saturates; ZeroMQ's own thread runs beside it, on
another core if there is one. Goals: 15,000 sequences a second for each core that the scheduler's main thread has, and
3,000 requests a second for each core of a gateway, all threads together.

Machine: any with Linux, whose /proc tells what a thread has used; the peers want a core or more beside the process that
is measured, or batches get smaller.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors

from benchmarks.clients import Load, Target
from benchmarks.load import run_load
from benchmarks.record import write_result
from benchmarks.texts import Corpus, Lines
from common.metrics import Metrics, open_metrics
from common.run_dir import RunDir
from common.text.tokenization import Tokenizer
from common.wire.codec import Frame, Message, decode, encode
from common.wire.messages import (
    NO_NUMBERS,
    PROTOCOL_VERSION,
    Batch,
    Beat,
    Hello,
    Join,
    ModelFacts,
    Ping,
    Reply,
    Request,
    Result,
    Welcome,
)
from common.wire.packing import Replies, Requests
from common.wire.transport import Dealer, Router, now_ns
from gateway.client import Ledger, OpenRequest, Options
from gateway.model_requests import EmbeddingRequest, Limits, LocalRequest, Outcome, read_request
from gateway.routes import openai
from scheduler.state import Kill, Scheduler

SEQUENCES, TOKENS, DIMENSIONS = 25, 20, 1024
BULK_TEXTS, BULK_DIMENSIONS = 32, 384
NUM_GATEWAYS, OUTSTANDING = 2, 64
NUM_CLIENTS, NUM_BULK_CLIENTS = 32, 4
EPOCH = 7
_LAST, _MORE, _HAS_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.RCVMORE)
PING_S = 0.25
GOALS = {"scheduler": 15_000, "gateway": 3_000}


def facts_of(folder: Path, dimensions: int = DIMENSIONS) -> ModelFacts:
    return ModelFacts(
        name="oracle",
        folder=str(folder),
        fingerprint="0123456789abcdef",
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        architecture="Oracle",
        dtype="float32",
        device="none",
        attention="none",
        dimensions=dimensions,
        max_tokens=512,
        vocab_size=50_000,
        max_batch_tokens=SEQUENCES * TOKENS,
        pooling="mean",
        normalize=True,
        lower_case=False,
        tasks=["embed"],
        encodings=["float32"],
        prompts={},
        default_prompt_name=None,
        num_labels=0,
        labels=[],
        score_activation="",
        pair_template="",
        instruction=None,
        separator_id=None,
        include_prompt=True,
        has_token_types=False,
    )


def write_tokenizer(folder: Path, corpus: Corpus) -> None:
    """A tokenizer of whole words, which frames a text: cheap, since what a real one costs is its own."""
    words = sorted({corpus.text(index, 1).decode() for index in range(20_000)})
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = RustTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # the library's gap
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]  # the library's gap
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(folder / "tokenizer.json"))


def a_request(request_id: int) -> Request:
    return Request(
        request_id=request_id,
        fingerprint="0123456789abcdef",
        deadline_ns=2**62,
        lane="online",
        tenant=0,
        opens=True,
        dimensions=DIMENSIONS,
        normalize=True,
        encoding="float32",
        token_ids=np.arange(1, TOKENS + 1, dtype=np.int32),
        lengths=np.array([TOKENS], dtype=np.int32),
    )


def some_rows(num_rows: int, dimensions: int = DIMENSIONS) -> np.ndarray:
    """uint8 [rows, row bytes] of float32, of unit length."""
    rows = np.random.default_rng(0).standard_normal((num_rows, dimensions), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.view(np.uint8)


def mixed_texts(corpus: Corpus, num_texts: int) -> list[str]:
    """Texts of 2 to 300 words, half of them below 32."""
    lengths = np.random.default_rng(0).lognormal(np.log(32), 0.8, num_texts).astype(int).clip(2, 300)
    return [corpus.text(index, length).decode() for index, length in enumerate(lengths.tolist())]


# --- stages ---


class Stages:
    """CPU microseconds a request, by stage: of each repeat one sample."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._samples: dict[str, list[float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began_ns = time.process_time_ns()
        yield
        cost_us = (time.process_time_ns() - began_ns) / 1000 / self._num_requests
        self._samples.setdefault(name, []).append(cost_us)

    def medians(self) -> dict[str, float]:
        medians = {name: round(statistics.median(samples), 2) for name, samples in self._samples.items()}
        return {**medians, "sum": round(sum(medians.values()), 2)}


def scheduler_stages(repeats: int, metrics: Metrics, facts: ModelFacts, *, together: bool) -> dict[str, float]:
    """In a steady state: both slots of a worker are taken, a batch waits, and a result makes room for it.

    `together`: its requests come in one message.
    """
    now = now_ns()
    core = Scheduler(epoch=EPOCH, workers_total=1, max_queue_ms=10_000, metrics=metrics, now_ns=now)
    core.on_gateway_message(b"gateway", Join(PROTOCOL_VERSION, "gateway-0", 1), now)
    core.on_worker_message(b"worker", Hello(PROTOCOL_VERSION, "worker-0", 2, facts), now)
    ids = itertools.count(1)
    rows = some_rows(SEQUENCES)
    stages = Stages(SEQUENCES)
    sent: deque[Batch] = deque()

    def note(actions: list[Any]) -> list[Message]:
        messages = [action.message for action in actions if not isinstance(action, Kill)]
        sent.extend(message for message in messages if isinstance(message, Batch))
        return messages

    for repeat in range(repeats + 20):
        if repeat == 20:  # the first ones only warm up
            stages = Stages(SEQUENCES)
        now += 1_000_000
        requests = [a_request(next(ids)) for _ in range(SEQUENCES)]
        asked: list[Message] = [Requests.of(requests)] if together else [*requests]
        frames = [_as_received(encode(message)) for message in asked]
        with stages.stage("decode requests"):
            heard = [decode(message) for message in frames]
        with stages.stage("core, requests"):
            for message in heard:
                note(core.on_gateway_message(b"gateway", message, now))
            note(core.form_batches(now))
        if repeat < 2:  # they fill the slots: from here on a batch waits
            continue
        batch = sent.popleft()
        result = Result(EPOCH, batch.batch_id, 0, 1000, True, NO_NUMBERS, rows[: len(batch.lengths)])
        received = _as_received(encode(result))
        with stages.stage("decode result"):
            message = decode(received)
        with stages.stage("core, result and batch"):
            messages = note(core.on_worker_message(b"worker", message, now))
            messages += note(core.form_batches(now))
        with stages.stage("encode batch"):
            for message in messages:
                if isinstance(message, Batch):
                    encode(message)
        with stages.stage("encode replies"):
            for message in messages:
                if not isinstance(message, Batch):
                    encode(message)
    return stages.medians()


async def gateway_stages(
    repeats: int, metrics: Metrics, facts: ModelFacts, texts: list[list[str]], encoding_format: str
) -> dict[str, float]:
    """One request after the other, without HTTP and without the threads that tokenize; of the texts each in turn."""
    frames: list[list[Frame]] = []

    def send(message: Message) -> bool:
        frames.append(encode(message))
        return True

    ledger = Ledger("gateway-0", send, metrics, now_ns())
    ledger.on_message(Welcome(PROTOCOL_VERSION, EPOCH, True, facts, 10**6, 10**6), now_ns())
    tokenizer = Tokenizer(facts)
    limits = Limits(max_inputs=BULK_TEXTS, auto_truncate=False)
    rows = some_rows(max(map(len, texts)), facts.dimensions)
    stages = Stages(1)
    for _, asked_texts in zip(range(repeats), itertools.cycle(texts), strict=False):
        frames.clear()
        body = json.dumps({"model": "oracle", "encoding_format": encoding_format, "input": asked_texts}).encode()
        with stages.stage("parse"):
            asked = read_request(body, [openai.EMBEDDINGS], facts, limits)
        assert not isinstance(asked, LocalRequest)
        request = asked.request
        assert isinstance(request, EmbeddingRequest)
        with stages.stage("tokenize"):
            sequences = tokenizer.encode(request.inputs.texts, request.truncation)
        with stages.stage("ledger and encode"):
            options = Options(facts.fingerprint, facts.dimensions, True, "float32", "online", 2**62)
            opened = OpenRequest.of(sequences, options)
            ledger.open(opened, now_ns())
            ledger.flush()
        (sent,) = frames
        reply = _as_received(encode(Reply(msgpack.unpackb(sent[0])[1], 0, 10, 1000, rows[: len(asked_texts)])))
        with stages.stage("decode and ledger"):
            ledger.on_message(decode(reply), now_ns())
            embedded = opened.future.result()
        with stages.stage("render"):
            asked.render(Outcome(embedded.rows, facts, TOKENS, "", {}, range(len(asked_texts))))
    return stages.medians()


def _as_received(frames: list[Frame]) -> list[Frame]:
    return [bytes(frame) for frame in frames]


# --- peers, each a process of its own ---


@dataclass(frozen=True, slots=True)
class Counts:
    """What peers have counted, in memory that they share."""

    answers: Any
    batches: Any


def _gateway(run_dir: str, number: int, counts: Counts, most_together: int) -> None:
    """Speaks as a gateway: so many requests on their way, the next one whenever one is answered.

    What is asked at one moment goes in messages of at most so many requests.
    """
    # Of each number of requests a message that is sent again and again, with other ids: what it costs to make one is
    # not what is measured.
    messages = {
        num_requests: encode(Requests.of([a_request(0)] * num_requests) if num_requests > 1 else a_request(0))
        for num_requests in range(1, most_together + 1)
    }
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = Dealer(context, RunDir(run_dir).address("gateways"), f"g{number}")
    while not isinstance(message := dealer.receive(), Ping) or not message.workers_ready:
        dealer.send(Join(PROTOCOL_VERSION, f"gateway-{number}", os.getpid()))
        dealer.socket.poll(100)
    reply = Reply(0, 0, 0, 0, some_rows(1))
    kind_of_reply, kind_of_replies = (encode(message)[0][1] for message in (reply, Replies.of([reply, reply])))
    ids = itertools.count(1)

    def ask(num_requests: int) -> None:
        while num_requests > 0:
            size = min(num_requests, most_together)
            num_requests -= size
            first, *arrays = messages[size]
            if size == 1:
                header = msgpack.unpackb(first)
                header[1] = next(ids)
                first = msgpack.packb(header)
            else:
                asked = np.frombuffer(arrays[0], dtype=np.int64).reshape(size, -1).copy()
                asked[:, 0] = [next(ids) for _ in range(size)]
                arrays = [asked.tobytes(), *arrays[1:]]
            dealer.socket.send_multipart([first, *arrays], zmq.DONTWAIT)

    ask(OUTSTANDING)
    next_beat_s = 0.0
    while True:
        if time.monotonic() >= next_beat_s:
            next_beat_s = time.monotonic() + PING_S
            dealer.send(Beat(EPOCH, 0))
        dealer.socket.poll(100)
        num_answers = 0
        with suppress(zmq.Again):
            while True:
                first, *_ = dealer.socket.recv_multipart(zmq.DONTWAIT)
                # Of a header's bytes the first says how many fields follow, the second is the kind.
                num_replies = int(first[1] == kind_of_reply)
                if first[1] == kind_of_replies:
                    num_replies = msgpack.unpackb(first)[-1][0][0]
                ask(num_replies)
                num_answers += num_replies
        with counts.answers.get_lock():
            counts.answers.value += num_answers


def _oracle(run_dir: str, facts: ModelFacts, counts: Counts) -> None:
    """A worker that answers at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = Dealer(context, RunDir(run_dir).address("workers"), "w")
    rows = some_rows(NUM_GATEWAYS * OUTSTANDING)
    epoch: int | None = None
    next_beat_s = 0.0
    while True:
        if time.monotonic() >= next_beat_s:
            next_beat_s = time.monotonic() + PING_S
            dealer.send(Hello(PROTOCOL_VERSION, "worker-0", os.getpid(), facts) if epoch is None else Beat(epoch, 2))
        dealer.socket.poll(100)
        while (message := dealer.receive()) is not None:
            if isinstance(message, Ping):
                epoch = message.epoch
            elif isinstance(message, Batch):
                num_rows = message.num_rows
                dealer.send(Result(message.epoch, message.batch_id, 0, 1000, True, NO_NUMBERS, rows[:num_rows]))
                counts.batches.value += 1


def _relay(run_dir: str) -> None:
    """What passes between the others, by two sockets that know nothing of what passes."""
    receive, get = zmq.backend.Socket.recv, zmq.backend.Socket.get

    def send(socket: zmq.Socket[bytes], *frames: Frame) -> None:
        for frame in frames[:-1]:
            zmq.backend.Socket.send(socket, frame, _MORE)
        zmq.backend.Socket.send(socket, frames[-1], _LAST)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateways, workers = (Router(context, RunDir(run_dir).address(side)) for side in ("gateways", "workers"))
    ping = Ping(EPOCH, 1, 1, True)
    rows = some_rows(SEQUENCES)
    whole = np.ones(SEQUENCES, dtype=np.int32)
    batch = encode(
        Batch(EPOCH, 1, np.ones(SEQUENCES * TOKENS, np.int32), TOKENS * whole, whole, *[whole.astype(np.uint8) * 0] * 2)
    )
    reply = encode(Reply(1, 0, 10, 1000, rows[:1]))
    waiting: deque[bytes] = deque()  # who has asked
    running: deque[bytes] = deque()  # who waits for what a worker has
    worker, num_sent = b"", 0  # batches that are not answered
    poller = zmq.Poller()
    for side in (gateways, workers):
        poller.register(side.socket, zmq.POLLIN)
    while True:
        poller.poll()
        for side in (workers, gateways):
            with suppress(zmq.Again):
                while True:
                    peer, received = receive(side.socket, _LAST), []
                    while get(side.socket, _HAS_MORE):
                        received.append(receive(side.socket, _LAST))
                    num_frames = len(received)
                    if num_frames == 1:  # no arrays: a Join, a Hello or a Beat
                        side.send(peer, ping)
                        worker = peer if side is workers else worker
                    elif side is gateways:
                        # A Request has two arrays, Requests have three, the first of them a row each.
                        waiting.extend([peer] * (1 if num_frames == 3 else msgpack.unpackb(received[0])[-1][0][0]))
                    else:
                        num_sent -= 1
                        for _ in range(SEQUENCES):
                            send(gateways.socket, running.popleft(), *reply)
            while worker and num_sent < 2 and len(waiting) >= SEQUENCES:
                num_sent += 1
                running.extend(waiting.popleft() for _ in range(SEQUENCES))
                send(workers.socket, worker, *batch)


def _scheduler(run_dir: str, facts: ModelFacts, counts: Counts) -> None:
    """A stand-in for the scheduler behind a gateway: answers every request at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Router(context, RunDir(run_dir).address("gateways"))
    rows = some_rows(BULK_TEXTS, facts.dimensions)
    peers: set[bytes] = set()
    next_ping_s = 0.0
    while True:
        if time.monotonic() >= next_ping_s:
            next_ping_s = time.monotonic() + PING_S
            for peer in peers:
                router.send(peer, Ping(EPOCH, 1, 1, True))
        router.socket.poll(100)
        while (received := router.receive()) is not None:
            peer, message = received
            if isinstance(message, Join):
                peers.add(peer)
                router.send(peer, Welcome(PROTOCOL_VERSION, EPOCH, True, facts, 1024, 2048))
                router.send(peer, Ping(EPOCH, 1, 1, True))
            elif isinstance(message, Request | Requests):
                counts.batches.value += 1
                for request in message.each() if isinstance(message, Requests) else [message]:
                    router.send(peer, Reply(request.request_id, 0, 10, 1000, rows[: len(request.lengths)]))
                    counts.answers.value += request.opens  # a long one comes in several


# --- what a process costs ---


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process while it answered so many requests."""

    main_us: float  # CPU of its main thread, a request
    other_us: float  # and of all its other threads
    requests_per_s: float  # on the clock, while others used the machine too
    sequences_per_batch: float | None = None

    @property
    def per_main_core(self) -> float:
        """Requests for each second of CPU that the main thread has."""
        return 1e6 / self.main_us

    @property
    def per_core(self) -> float:
        """Requests for each second of CPU that all its threads have together."""
        return 1e6 / (self.main_us + self.other_us)


@dataclass(frozen=True, slots=True)
class _Reading:
    time_s: float
    main_ns: int
    all_ns: int
    answers: int
    batches: int


class Runner:
    """Starts processes around a run folder and ends them."""

    def __init__(self, folder: Path, facts: ModelFacts) -> None:
        self._folder = folder
        self._facts = facts
        self._spawn = multiprocessing.get_context("spawn")
        self._runs = itertools.count()

    def front(self, part: str, seconds: float) -> Cost:
        """Of `part`, the scheduler (also `singly`) or the bare relay, between two gateways and a worker."""
        with self._processes() as (run_dir, start, counts):
            if part == "relay":
                pid = start(_relay, run_dir)
            else:
                pid = start([sys.executable, "-m", "scheduler", "--run-dir", run_dir])
            start(_oracle, run_dir, self._facts, counts)
            for number in range(NUM_GATEWAYS):
                start(_gateway, run_dir, number, counts, 1 if part == "singly" else OUTSTANDING)
            _wait_for(lambda: counts.answers.value > 1000)
            before = _read(pid, counts)
            time.sleep(seconds)
            return _cost(before, _read(pid, counts))

    def gateway(self, seconds: float, asked: Load, facts: ModelFacts, corpus: Corpus | Lines) -> Cost:
        with self._processes() as (run_dir, start, counts):
            with socket.create_server(("127.0.0.1", 0)) as sock:
                port = sock.getsockname()[1]
            start(_scheduler, run_dir, facts, counts)
            pid = start([sys.executable, "-m", "gateway", "--run-dir", run_dir, "--port", str(port)])
            url = f"http://127.0.0.1:{port}"
            _wait_for(lambda: _is_ready(url))
            target = Target.find(url, None, corpus)
            before = _read(pid, counts)
            args = argparse.Namespace(processes=1, warm_up=0.5, seconds=seconds)
            report = run_load(asked, target, corpus, {"query": TOKENS}, args)
            assert not report.errors, report.errors
            return _cost(before, _read(pid, counts))

    @contextmanager
    def _processes(self) -> Iterator[tuple[str, Callable[..., int], Counts]]:
        run_dir = str(self._folder / f"run-{next(self._runs)}")
        RunDir(run_dir).prepare()
        counts = Counts(self._spawn.Value("q", 0), self._spawn.Value("q", 0))
        started: list[Any] = []

        def start(what: Callable[..., None] | list[str], *args: object) -> int:
            if isinstance(what, list):
                process: Any = subprocess.Popen(what, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            else:
                process = self._spawn.Process(target=what, args=args, daemon=True)
                process.start()
            started.append(process)
            return int(process.pid)

        try:
            yield run_dir, start, counts
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait() if isinstance(process, subprocess.Popen) else process.join()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the processes did not get to work")
        time.sleep(0.05)


def _read(pid: int, counts: Counts) -> _Reading:
    # The first number of a schedstat: nanoseconds on a CPU.
    spent_ns = {
        int(path.parent.name): int(path.read_text().split()[0])
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    }
    return _Reading(time.monotonic(), spent_ns[pid], sum(spent_ns.values()), counts.answers.value, counts.batches.value)


def _cost(before: _Reading, after: _Reading) -> Cost:
    num_answers, num_batches = after.answers - before.answers, after.batches - before.batches
    main_us = (after.main_ns - before.main_ns) / 1000 / num_answers
    return Cost(
        main_us,
        (after.all_ns - before.all_ns) / 1000 / num_answers - main_us,
        num_answers / (after.time_s - before.time_s),
        num_answers / num_batches if num_batches else None,
    )


def _median(costs: list[Cost]) -> Cost:
    """The one in the middle, by its main thread."""
    return sorted(costs, key=lambda cost: cost.main_us)[len(costs) // 2]


def _goal(part: str, cost: Cost) -> str:
    reached = {"scheduler": cost.per_main_core, "gateway": cost.per_core}
    if part not in reached:
        return ""
    return f"  goal {GOALS[part]:,}: {'met' if reached[part] >= GOALS[part] else 'MISSED'}"


def main() -> int:
    args = _parse_arguments()
    parts = args.parts.split(",")
    corpus = Corpus.read(None)
    result: dict[str, object] = {"benchmark": "frontend"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, corpus)
        facts, bulk_facts = facts_of(folder), facts_of(folder, BULK_DIMENSIONS)
        queries = Load("queries", NUM_CLIENTS, "query")
        bulk = Load("bulk", NUM_BULK_CLIENTS, "query", BULK_TEXTS, "float")
        bulk_texts = mixed_texts(corpus, 64 * BULK_TEXTS)
        runner = Runner(folder, facts)
        if "stages" in parts:
            metrics = open_metrics(str(folder / "stages"))
            stages = {
                "scheduler": scheduler_stages(args.repeats, metrics, facts, together=True),
                "scheduler, singly": scheduler_stages(args.repeats, metrics, facts, together=False),
                "gateway": asyncio.run(
                    gateway_stages(
                        4 * args.repeats,
                        metrics,
                        facts,
                        [[corpus.text(index, TOKENS - 2).decode()] for index in range(4 * args.repeats)],
                        "base64",
                    )
                ),
                "gateway, bulk": asyncio.run(
                    gateway_stages(
                        args.repeats,
                        metrics,
                        bulk_facts,
                        [bulk_texts[first : first + BULK_TEXTS] for first in range(0, len(bulk_texts), BULK_TEXTS)],
                        "float",
                    )
                ),
            }
            result["stages_us"] = stages
            for process, medians in stages.items():
                print(f"{process}, CPU µs a request")
                for stage, cost_us in medians.items():
                    print(f"  {stage:<24}{cost_us:>8.2f}")
        costs: dict[str, list[Cost]] = {}
        for _ in range(args.rounds):
            if "scheduler" in parts:
                costs.setdefault("relay", []).append(runner.front("relay", args.seconds))
                costs.setdefault("scheduler", []).append(runner.front("scheduler", args.seconds))
            if "singly" in parts:
                costs.setdefault("singly", []).append(runner.front("singly", args.seconds))
            if "gateway" in parts:
                costs.setdefault("gateway", []).append(runner.gateway(args.seconds, queries, facts, corpus))
            if "bulk" in parts:
                cost = runner.gateway(args.seconds, bulk, bulk_facts, Lines(bulk_texts))
                costs.setdefault("bulk", []).append(cost)
    if costs:
        columns = ("main µs", "other µs", "per main core", "per core", "a second", "a batch")
        print(f"{'process':<12}" + "".join(f"{column:>14}" for column in columns))
    for part, rounds in costs.items():
        cost = _median(rounds)
        print(
            f"{part:<12}{cost.main_us:>14.1f}{cost.other_us:>14.1f}{cost.per_main_core:>14,.0f}{cost.per_core:>14,.0f}"
            f"{cost.requests_per_s:>14,.0f}{cost.sequences_per_batch or 0:>14.1f}" + _goal(part, cost)
        )
    result["processes"] = {part: [asdict(cost) for cost in rounds] for part, rounds in costs.items()}
    write_result(result, args.output)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--parts", default="stages,scheduler,singly,gateway,bulk", help="which of them, with commas [%(default)s]"
    )
    parser.add_argument("--repeats", type=int, default=300, help="of each stage [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="in which processes take turns [%(default)s]")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured of each process a round [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
