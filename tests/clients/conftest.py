"""Other people's clients, unmodified, before a real gateway that they find by their base URL alone.

What is behind the gateway is what tests/gateway has there. A client may call nobody else: no host's name is looked up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import numpy as np
import openai
import pytest

from common.errors import Overloaded
from common.wire.messages import ModelFacts
from tests.fakes import DIMENSIONS, QUANTISING_FACTS
from tests.gateway.conftest import (
    ServeOracle,
    Stub,
    facts,
    pytest_asyncio_loop_factories,
    scoring,
    serve,
    serve_oracle,
    server,
    vector,
)

# The fixtures and the hook of tests/gateway hold here, too.
__all__ = ["facts", "pytest_asyncio_loop_factories", "scoring", "serve", "serve_oracle", "server"]

T = TypeVar("T")

TEXTS = ["w5 w6", "w7"]
IDS = ([1, 9, 10, 2], [1, 11, 2])
VECTORS = np.stack([vector(ids) for ids in IDS])
TOO_LONG = "w1 " * 20


@dataclasses.dataclass(frozen=True, slots=True)
class HttpClients:
    synchronous: openai.DefaultHttpxClient
    asynchronous: openai.DefaultAsyncHttpxClient


ServeQuantising = Callable[[ModelFacts], Awaitable[int]]


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


@pytest.fixture
async def http_clients() -> AsyncIterator[HttpClients]:
    """What the openai package talks through, made here only to be closed again: those built on it never do that."""
    async with openai.DefaultAsyncHttpxClient() as asynchronous:
        with openai.DefaultHttpxClient() as synchronous:
            yield HttpClients(synchronous, asynchronous)


@pytest.fixture
def serve_quantising(serve_oracle: ServeOracle) -> ServeQuantising:
    """Starts a gateway, a scheduler and an oracle worker, of a model that quantises; gives the port."""

    async def start(served: ModelFacts) -> int:
        quantising = dataclasses.replace(served, dimensions=DIMENSIONS, encodings=QUANTISING_FACTS.encodings)
        return (await serve_oracle(quantising)).port

    return start


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
