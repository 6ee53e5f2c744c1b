"""langchain-openai's OpenAIEmbeddings and llama-index-embeddings-openai against /v1/embeddings.

Left as it is, langchain's sends token ids of OpenAI's own vocabulary, which mean other words to any other model, and
fetches that vocabulary over the network first. With `check_embedding_ctx_length=False` it sends text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
import requests
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding

from tests.clients.conftest import TEXTS, TOO_LONG, VECTORS, HttpClients, after_refusal
from tests.gateway.conftest import Running, vector


@dataclass(frozen=True)
class Wrapper:
    """A client by what both of them do."""

    embed_texts: Callable[[list[str]], list[list[float]]]
    embed_query: Callable[[str], Awaitable[list[float]]]


Connect = Callable[..., Wrapper]


@pytest.fixture
def connect_langchain(server: Running, http_clients: HttpClients) -> Connect:
    """Makes clients that send text."""

    def connect(model: str = "tiny", body: object = None, **settings: object) -> Wrapper:
        client = OpenAIEmbeddings(
            base_url=f"http://127.0.0.1:{server.port}/v1",
            api_key="any",
            model=model,
            http_client=http_clients.synchronous,
            http_async_client=http_clients.asynchronous,
            model_kwargs={"extra_body": body},
            **{"check_embedding_ctx_length": False} | settings,
        )
        return Wrapper(client.embed_documents, client.aembed_query)

    return connect


@pytest.fixture
def connect_llama_index(server: Running, http_clients: HttpClients) -> Connect:
    def connect(model: str = "tiny", body: object = None, **settings: object) -> Wrapper:
        client = OpenAIEmbedding(
            api_base=f"http://127.0.0.1:{server.port}/v1",
            api_key="any",
            model_name=model,  # `model` is one of OpenAI's names; what `model_name` says is what is sent
            http_client=http_clients.synchronous,
            async_http_client=http_clients.asynchronous,
            additional_kwargs={"extra_body": body},
            **settings,
        )
        return Wrapper(client.get_text_embedding_batch, client.aget_query_embedding)

    return connect


@pytest.fixture(params=["langchain", "llama_index"])
def connect(request: pytest.FixtureRequest) -> Connect:
    found: Connect = request.getfixturevalue(f"connect_{request.param}")
    return found


async def test_texts_become_their_vectors(connect: Connect) -> None:
    client = connect()
    texts = await asyncio.to_thread(client.embed_texts, TEXTS)
    query = await client.embed_query("w5 w6")
    np.testing.assert_array_equal(np.array(texts, dtype=np.float32), VECTORS)
    np.testing.assert_array_equal(np.array(query, dtype=np.float32), VECTORS[0])


async def test_dimensions_and_our_own_fields_get_through(connect: Connect) -> None:
    query = await connect(dimensions=3, body={"prompt_name": "query"}).embed_query("w5 w6")
    np.testing.assert_allclose(query, vector([1, 5, 6, 9, 10, 2], dimensions=3), rtol=1e-6)


async def test_errors_are_of_the_class_that_says_what_they_are(connect: Connect) -> None:
    with pytest.raises(openai.NotFoundError, match="This model is not served here"):
        await connect("other").embed_query("w5")
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 22 tokens; this model takes at most 16"):
        await asyncio.to_thread(connect().embed_texts, ["w5", TOO_LONG])


async def test_an_overloaded_server_is_asked_again(server: Running, connect: Connect) -> None:
    texts = await after_refusal(server.stub, asyncio.to_thread(connect().embed_texts, TEXTS))
    np.testing.assert_allclose(texts, VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 2


async def test_left_as_it_is_langchain_wants_openais_vocabulary_before_it_asks_anybody(
    server: Running, connect_langchain: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody is: also on a machine that has a network
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    client = connect_langchain(check_embedding_ctx_length=True)
    with pytest.raises(requests.exceptions.ConnectionError):
        await asyncio.to_thread(client.embed_texts, TEXTS)
    assert server.stub.submitted == []
