"""Other people's clients, unmodified, before a real gateway that they find by their base URL alone.

What is behind the gateway is what tests/gateway has there. A client may call nobody else: no host's name is looked up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import openai
import pytest
from tokenizers import Tokenizer, processors

from common.config import GatewayConfig
from common.errors import Overloaded
from common.metrics import Metrics
from common.wire.messages import ModelFacts
from gateway.app import Gateway
from gateway.client import SchedulerClient
from tests.fakes import DIMENSIONS, QUANTISING_FACTS, FakeWorker, RunningScheduler
from tests.gateway.conftest import (
    Serve,
    Stub,
    facts,
    listening_socket,
    pytest_asyncio_loop_factories,
    serve,
    server,
    with_tokenizer,
)

# The fixtures and the hook of tests/gateway hold here, too.
__all__ = ["Serve", "facts", "pytest_asyncio_loop_factories", "serve", "server"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class HttpClients:
    synchronous: openai.DefaultHttpxClient
    asynchronous: openai.DefaultAsyncHttpxClient


ServeOracle = Callable[[ModelFacts], Awaitable[int]]


@pytest.fixture(autouse=True)
def no_strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test whose client looks up a host."""
    looked_up: list[object] = []
    look_up = socket.getaddrinfo

    def only_here(host: object, *args: object, **kwargs: object) -> object:
        if host not in ("127.0.0.1", b"127.0.0.1"):
            looked_up.append(host)
            raise socket.gaierror(socket.EAI_FAIL, "a test's client has no business there")
        return look_up(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    yield
    assert looked_up == []


@pytest.fixture(scope="session")
def scoring(facts: ModelFacts, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A cross-encoder with the same words: [CLS] query [SEP] document [SEP]."""
    tokenizer = Tokenizer.from_file(f"{facts.folder}/tokenizer.json")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
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
    )


@pytest.fixture
async def http_clients() -> AsyncIterator[HttpClients]:
    """What the openai package talks through, made here only to be closed again: those built on it never do that."""
    async with openai.DefaultAsyncHttpxClient() as asynchronous:
        with openai.DefaultHttpxClient() as synchronous:
            yield HttpClients(synchronous, asynchronous)


@pytest.fixture
async def serve_oracle(
    run_dir: str,
    start_scheduler: Callable[[], RunningScheduler],
    start_worker: Callable[..., FakeWorker],
    metrics: Metrics,
) -> AsyncIterator[ServeOracle]:
    """Starts a gateway, a scheduler and an oracle worker, of a model that quantises; gives the port."""
    (Path(run_dir) / "metrics").mkdir(parents=True)
    start_scheduler()
    client = SchedulerClient(run_dir, "gateway-0", metrics)
    gateway = Gateway(GatewayConfig(run_dir=run_dir), [client], metrics)

    async def start(served: ModelFacts) -> int:
        quantising = dataclasses.replace(served, dimensions=DIMENSIONS, encodings=QUANTISING_FACTS.encodings)
        start_worker(facts=quantising)
        sock = listening_socket()
        port: int = sock.getsockname()[1]
        await gateway.start(sock)
        async with asyncio.timeout(10):
            while client.facts is None:
                await asyncio.sleep(0.005)
        await gateway.wait_loaded()
        return port

    yield start
    await gateway.close()


async def after_refusal(stub: Stub, answer: Awaitable[T]) -> T:
    """What becomes of a client's request that is refused once as one too many, and is welcome from then on.

    The client waits as long as the answer's headers say, which is a hundredth of a second where it reads milliseconds.
    """
    stub.error = Overloaded("The queue is full. Try again a little later.", retry_after_s=0.01)
    waiting = asyncio.ensure_future(answer)
    async with asyncio.timeout(10):
        await stub.entered.wait()
    stub.error = None
    return await waiting
