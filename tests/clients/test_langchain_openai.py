"""langchain-openai's OpenAIEmbeddings against /v1/embeddings.

Left as it is, it sends token ids of OpenAI's own vocabulary, which mean other words to any other model, and fetches
that vocabulary over the network first. With `check_embedding_ctx_length=False` it sends text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openai
import pytest
import requests
from langchain_openai import OpenAIEmbeddings

from tests.clients.conftest import HttpClients, after_refusal
from tests.gateway.conftest import Running, vector

TEXTS = ["w5 w6", "w7"]
VECTORS = np.stack([vector([1, 9, 10, 2]), vector([1, 11, 2])])
TOO_LONG = "w1 " * 20


Connect = Callable[..., OpenAIEmbeddings]


@pytest.fixture
def connect(server: Running, http_clients: HttpClients) -> Connect:
    """Makes clients that send text."""

    def connect(model: str = "tiny", **settings: object) -> OpenAIEmbeddings:
        return OpenAIEmbeddings(
            base_url=f"http://127.0.0.1:{server.port}/v1",
            api_key="any",
            model=model,
            http_client=http_clients.synchronous,
            http_async_client=http_clients.asynchronous,
            **{"check_embedding_ctx_length": False} | settings,
        )

    return connect


async def test_texts_become_their_vectors(connect: Connect) -> None:
    embeddings = connect()
    documents = await asyncio.to_thread(embeddings.embed_documents, TEXTS)
    query = await embeddings.aembed_query("w5 w6")
    np.testing.assert_array_equal(np.array(documents, dtype=np.float32), VECTORS)
    np.testing.assert_array_equal(np.array(query, dtype=np.float32), VECTORS[0])


async def test_dimensions_and_our_own_fields_get_through(connect: Connect) -> None:
    embeddings = connect(dimensions=3, model_kwargs={"extra_body": {"prompt_name": "query"}})
    query = await embeddings.aembed_query("w5 w6")
    np.testing.assert_allclose(query, vector([1, 5, 6, 9, 10, 2], dimensions=3), rtol=1e-6)


async def test_left_as_it_is_it_wants_openais_vocabulary_before_it_asks_anybody(
    server: Running, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody is: also on a machine that has a network
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    embeddings = connect(check_embedding_ctx_length=True)
    with pytest.raises(requests.exceptions.ConnectionError):
        await asyncio.to_thread(embeddings.embed_documents, TEXTS)
    assert server.stub.submitted == []


async def test_errors_are_of_the_class_that_says_what_they_are(connect: Connect) -> None:
    with pytest.raises(openai.NotFoundError, match="This model is not served here"):
        await connect(model="other").aembed_query("w5")
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 22 tokens; this model takes at most 16"):
        await asyncio.to_thread(connect().embed_documents, ["w5", TOO_LONG])


async def test_an_overloaded_server_is_asked_again(server: Running, connect: Connect) -> None:
    documents = await after_refusal(server.stub, asyncio.to_thread(connect().embed_documents, TEXTS))
    np.testing.assert_allclose(documents, VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 2
