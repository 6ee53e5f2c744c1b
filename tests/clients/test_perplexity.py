"""The perplexityai package against /v1/embeddings and /v1/contextualizedembeddings.

It sends only models and formats of Perplexity's own. Where its user names no format it sends none, as a plain client
of OpenAI's API does, and means int8 where that one means numbers: the two cannot be told apart, and OpenAI's meaning
holds on both routes. `encoding_format` has to be given.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import perplexity
import pytest

from common.wire.messages import ModelFacts
from tests.clients.conftest import IDS, TEXTS, ServeQuantising, after_refusal
from tests.fakes import oracle_row
from tests.gateway.conftest import Running, Serve, vector

MODEL = "pplx-embed-v1-0.6b"
CONTEXT_MODEL = "pplx-embed-context-v1-0.6b"

Connect = Callable[[int], perplexity.Perplexity]


@pytest.fixture
def connect() -> Iterator[Connect]:
    clients: list[perplexity.Perplexity] = []

    def connect(port: int) -> perplexity.Perplexity:
        clients.append(perplexity.Perplexity(api_key="any", base_url=f"http://127.0.0.1:{port}"))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
async def server(serve: Serve, facts: ModelFacts) -> Running:
    return await serve(served=dataclasses.replace(facts, name=MODEL))


@pytest.mark.parametrize(("encoding_format", "encoding"), [("base64_int8", "int8"), ("base64_binary", "binary")])
async def test_texts_become_their_bytes(
    serve_quantising: ServeQuantising, facts: ModelFacts, connect: Connect, encoding_format: str, encoding: str
) -> None:
    client = connect(await serve_quantising(dataclasses.replace(facts, name=MODEL)))
    answer = await asyncio.to_thread(
        client.embeddings.create, model=MODEL, input=TEXTS, encoding_format=encoding_format
    )
    expected = [oracle_row(ids, encoding).tobytes() for ids in IDS]
    assert [base64.b64decode(item.embedding) for item in answer.data] == expected
    assert (answer.model, answer.usage.total_tokens) == (MODEL, 7)


async def test_chunks_become_their_bytes(
    serve_quantising: ServeQuantising, facts: ModelFacts, connect: Connect
) -> None:
    client = connect(await serve_quantising(dataclasses.replace(facts, name=CONTEXT_MODEL, separator_id=2)))
    answer = await asyncio.to_thread(
        client.contextualized_embeddings.create,
        model=CONTEXT_MODEL,
        input=[["w5 w6", "w7"], ["w8"]],
        encoding_format="base64_int8",
    )
    found = [[base64.b64decode(chunk.embedding) for chunk in document.data] for document in answer.data]
    first = [1, 9, 10, 2, 11, 2]
    assert found == [
        [oracle_row(first, "int8", span=(1, 3)).tobytes(), oracle_row(first, "int8", span=(4, 5)).tobytes()],
        [oracle_row([1, 12, 2], "int8", span=(1, 2)).tobytes()],
    ]


async def test_without_a_format_the_answer_has_numbers(server: Running, connect: Connect) -> None:
    answer = await asyncio.to_thread(connect(server.port).embeddings.create, model=MODEL, input=TEXTS)
    np.testing.assert_allclose([item.embedding for item in answer.data], [vector(ids) for ids in IDS], rtol=1e-6)


async def test_errors_are_of_the_class_that_says_what_they_are(server: Running, connect: Connect) -> None:
    create = connect(server.port).embeddings.create
    with pytest.raises(perplexity.NotFoundError, match="This model is not served here"):
        await asyncio.to_thread(create, model="pplx-embed-v1-4b", input="w5")
    with pytest.raises(perplexity.BadRequestError, match=r"input\[1\] has 22 tokens; this model takes at most 16"):
        await asyncio.to_thread(create, model=MODEL, input=["w5", "w1 " * 20])


async def test_an_overloaded_server_is_asked_again(server: Running, connect: Connect) -> None:
    create = asyncio.to_thread(connect(server.port).embeddings.create, model=MODEL, input=TEXTS)
    answer = await after_refusal(server.stub, create)
    np.testing.assert_allclose([item.embedding for item in answer.data], [vector(ids) for ids in IDS], rtol=1e-6)
    assert len(server.stub.submitted) == 2
