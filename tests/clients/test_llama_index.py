"""llama-index-embeddings-openai against /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import openai
import pytest
from llama_index.embeddings.openai import OpenAIEmbedding

from tests.clients.conftest import HttpClients, after_refusal
from tests.gateway.conftest import Running, vector

TEXTS = ["w5 w6", "w7"]
VECTORS = np.stack([vector([1, 9, 10, 2]), vector([1, 11, 2])])
TOO_LONG = "w1 " * 20


Connect = Callable[..., OpenAIEmbedding]


@pytest.fixture
def connect(server: Running, http_clients: HttpClients) -> Connect:
    def connect(model_name: str = "tiny", **settings: object) -> OpenAIEmbedding:
        # `model` is one of OpenAI's names; what `model_name` says is what is sent.
        return OpenAIEmbedding(
            api_base=f"http://127.0.0.1:{server.port}/v1",
            api_key="any",
            model_name=model_name,
            http_client=http_clients.synchronous,
            async_http_client=http_clients.asynchronous,
            **settings,
        )

    return connect


async def test_texts_become_their_vectors(connect: Connect) -> None:
    embedding = connect()
    texts = await asyncio.to_thread(embedding.get_text_embedding_batch, TEXTS)
    query = await embedding.aget_query_embedding("w5 w6")
    np.testing.assert_array_equal(np.array(texts, dtype=np.float32), VECTORS)
    np.testing.assert_array_equal(np.array(query, dtype=np.float32), VECTORS[0])


async def test_dimensions_and_our_own_fields_get_through(connect: Connect) -> None:
    embedding = connect(dimensions=3, additional_kwargs={"extra_body": {"prompt_name": "query"}})
    query = await embedding.aget_query_embedding("w5 w6")
    np.testing.assert_allclose(query, vector([1, 5, 6, 9, 10, 2], dimensions=3), rtol=1e-6)


async def test_errors_are_of_the_class_that_says_what_they_are(connect: Connect) -> None:
    with pytest.raises(openai.NotFoundError, match="This model is not served here"):
        await connect(model_name="other").aget_query_embedding("w5")
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 22 tokens; this model takes at most 16"):
        await asyncio.to_thread(connect().get_text_embedding_batch, ["w5", TOO_LONG])


async def test_an_overloaded_server_is_asked_again(server: Running, connect: Connect) -> None:
    texts = await after_refusal(server.stub, asyncio.to_thread(connect().get_text_embedding_batch, TEXTS))
    np.testing.assert_allclose(texts, VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 2
