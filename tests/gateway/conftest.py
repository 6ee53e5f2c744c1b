"""A real gateway on a real socket; behind it a scheduler's client that answers by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import uvloop
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from common.config import GatewayConfig
from common.errors import Overloaded, ServiceError
from common.metrics import Metrics
from common.wire.messages import ModelFacts
from gateway.app import Gateway
from gateway.client import SchedulerClient
from gateway.edge.auth import Key, KeyCheck
from gateway.open_request import Embedded, Options
from gateway.status import Readiness
from gateway.threads import Threads
from tests.fakes import FACTS, FakeWorker, RunningScheduler

T = TypeVar("T")

DIMENSIONS = 12
MAX_TOKENS = 16
VOCAB_SIZE = 64


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """As in the gateway's process."""
    return {"uvloop": uvloop.new_event_loop}


def vector(ids: npt.ArrayLike, *, dimensions: int = DIMENSIONS, normalize: bool = True) -> npt.NDArray[np.float32]:
    """What the stand-in makes of token ids: float32 [dimensions], cut first and normalised then."""
    digest = hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()
    row = np.random.default_rng(list(digest)).standard_normal(DIMENSIONS, dtype=np.float32)[:dimensions]
    return row / np.linalg.norm(row) if normalize else row


def sparse_row(ids: list[int]) -> bytes:
    """What it makes of them where rows are sparse: half of each id at its own place, nothing for special tokens."""
    columns = np.unique([number for number in ids if number > 3]).astype("<i4")
    return np.array([len(columns)], dtype="<i4").tobytes() + columns.tobytes() + (columns / 2).astype("<f4").tobytes()


class Stub:
    """SchedulerClient's surface, its rows made on the spot, float32 and sparse ones only."""

    def __init__(self, facts: ModelFacts | None, model: str | None = None) -> None:
        self.model = model
        self.facts = facts
        self.on_facts: Callable[[ModelFacts], None] | None = None
        self.on_refused: Callable[[], None] | None = None
        self.status = Readiness("ready", 1, 1, "")
        self.error: ServiceError | None = None
        self.poison: float | None = None  # a value that every answer gets somewhere
        self.gate = asyncio.Event()  # submit waits for it
        self.gate.set()
        self.entered = asyncio.Event()  # a submit has begun to wait
        self.cancelled = asyncio.Event()
        self.submitted: list[dict[str, object]] = []
        self.full: dict[tuple[str, int], Overloaded] = {}  # by lane and tenant: refused before anything is done
        # Of a model that scores, from a sequence's ids; of one with several labels the logit of each.
        self.logit_of: Callable[[list[int]], float | list[float]] | None = None

    def readiness(self) -> Readiness:
        return self.status

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def check_queue(self, lane: str, tenant: int) -> None:
        if (lane, tenant) in self.full:
            raise self.full[lane, tenant]

    async def submit(
        self,
        sequences: list[npt.NDArray[np.int32]],
        options: Options,
        *,
        type_starts: list[int] | None = None,
        spans: list[npt.NDArray[np.int32]] | None = None,
    ) -> Embedded:
        self.submitted.append(
            {
                "sequences": [row.tolist() for row in sequences],
                "lane": options.lane,
                "deadline_ns": options.deadline_ns,
                "tenant": options.tenant,
                "type_starts": type_starts,
                "spans": None if spans is None else [of_sequence.tolist() for of_sequence in spans],
            }
        )
        assert options.encoding in ("float32", "sparse")
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        if self.logit_of is not None:
            rows = np.array([np.atleast_1d(self.logit_of(row.tolist())) for row in sequences])
        elif options.encoding == "sparse":
            written = [sparse_row(row.tolist()) for row in sequences]
            padded = [row.ljust(max(map(len, written)), b"\xa5") for row in written]
            sparse = np.frombuffer(b"".join(padded), dtype=np.uint8).reshape(len(padded), -1)
            return Embedded(sparse, queue_us=1500, step_us=2500)
        else:
            parts = sequences
            if spans is not None:
                parts = [row[a:b] for row, found in zip(sequences, spans, strict=True) for a, b in found]
            shape = {"dimensions": options.dimensions, "normalize": options.normalize}
            rows = np.stack([vector(part, **shape) for part in parts])
        if self.poison is not None:
            rows[-1, 0] = self.poison
        return Embedded(rows.astype(np.float32), queue_us=1500, step_us=2500)


@dataclasses.dataclass
class Running:
    port: int
    stub: Stub
    gateway: Gateway


Serve = Callable[..., Awaitable[Running]]


@dataclasses.dataclass(frozen=True)
class Oracle:
    port: int
    worker: FakeWorker


ServeOracle = Callable[..., Awaitable[Oracle]]


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A model whose tokenizer knows the words w0 … w59, and frames a text with [CLS] and [SEP]."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3} | {f"w{index}": index + 4 for index in range(60)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return dataclasses.replace(
        FACTS,
        name="tiny",
        folder=str(folder),
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        dimensions=DIMENSIONS,
        max_tokens=MAX_TOKENS,
        vocab_size=VOCAB_SIZE,
        prompts={"query": "w1 w2 ", "document": ""},
        default_prompt_name=None,
    )


def with_tokenizer(facts: ModelFacts, tokenizer: Tokenizer, folder: Path, **changes: object) -> ModelFacts:
    """The same model with this tokenizer, saved in this folder, and other facts changed."""
    tokenizer.save(str(folder / "tokenizer.json"))
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return dataclasses.replace(facts, folder=str(folder), tokenizer_sha256=digest, **changes)


@pytest.fixture(scope="session")
def scoring(facts: ModelFacts, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A cross-encoder with the same words: [CLS] query [SEP] document [SEP], the document's part of type 1."""
    tokenizer = Tokenizer.from_file(f"{facts.folder}/tokenizer.json")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return with_tokenizer(
        facts,
        tokenizer,
        tmp_path_factory.mktemp("scoring"),
        dimensions=1,
        normalize=False,
        tasks=["score"],
        num_labels=1,
        score_activation="sigmoid",
        pair_template="pair",
        has_token_types=True,
    )


@pytest.fixture(scope="session")
def answering(facts: ModelFacts, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A reranker with a template and an instruction; most of the template's words are unknown to its vocabulary."""
    tokenizer = Tokenizer.from_file(f"{facts.folder}/tokenizer.json")
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return with_tokenizer(
        facts,
        tokenizer,
        tmp_path_factory.mktemp("answering"),
        dimensions=1,
        max_tokens=80,
        vocab_size=tokenizer.get_vocab_size(),
        tasks=["score"],
        num_labels=1,
        score_activation="sigmoid",
        pair_template="qwen3-reranker",
        instruction="w20",
    )


@pytest.fixture(scope="session")
def everything(scoring: ModelFacts) -> ModelFacts:
    """A model that answers on every route: it embeds texts, chunks and tokens, weighs the vocabulary, and scores."""
    return dataclasses.replace(
        scoring,
        dimensions=DIMENSIONS,
        normalize=True,
        tasks=["embed", "score", "sparse", "tokens"],
        labels=["relevant"],
        separator_id=2,
    )


@pytest.fixture
async def serve(facts: ModelFacts, metrics: Metrics, run_dir: str) -> AsyncIterator[Serve]:
    """Starts gateways: `await serve(max_inputs=3)` gives one with its configuration changed so."""
    running: list[Gateway] = []
    (Path(run_dir) / "metrics").mkdir(parents=True)

    async def start(
        *,
        served: ModelFacts | None = facts,
        api_key: str | None = None,
        keys: KeyCheck | None = None,
        **changes: int | bool | str,
    ) -> Running:
        stub = Stub(served)
        if api_key is not None:
            keys = KeyCheck([Key.of(api_key)])
        config = GatewayConfig(run_dir=run_dir, **{"drain_timeout_s": 5} | changes)
        gateway = Gateway(config, [stub], metrics, keys=keys)
        sock = listening_socket()
        port = sock.getsockname()[1]
        await gateway.start(sock)
        running.append(gateway)
        if served is not None:
            await gateway.wait_loaded()
        return Running(port, stub, gateway)

    yield start
    for gateway in running:
        await gateway.close()


@pytest.fixture
async def serve_oracle(
    run_dir: str,
    start_scheduler: Callable[[], RunningScheduler],
    start_worker: Callable[..., FakeWorker],
    metrics: Metrics,
) -> AsyncIterator[ServeOracle]:
    """Starts a gateway, the real scheduler and an oracle worker; arguments beside the facts are the worker's."""
    gateways: list[Gateway] = []

    async def start(served: ModelFacts, **of_worker: object) -> Oracle:
        (Path(run_dir) / "metrics").mkdir(parents=True, exist_ok=True)
        start_scheduler()
        worker = start_worker(facts=served, **of_worker)
        client = SchedulerClient(run_dir, "gateway-0", metrics)
        gateways.append(Gateway(GatewayConfig(run_dir=run_dir), [client], metrics))
        sock = listening_socket()
        port: int = sock.getsockname()[1]
        await gateways[0].start(sock)
        async with asyncio.timeout(10):
            while client.facts is None:
                await asyncio.sleep(0.005)
        await gateways[0].wait_loaded()
        return Oracle(port, worker)

    yield start
    for gateway in gateways:
        await gateway.close()


class CountingThreads(Threads):
    num_runs = 0

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        self.num_runs += 1
        return super().run(function)


@pytest.fixture
async def server(serve: Serve) -> Running:
    return await serve()


def listening_socket() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock
