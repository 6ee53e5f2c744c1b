"""The openai package against /v1/embeddings and /v1/models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import openai
import pytest

from tests.clients.conftest import TEXTS, TOO_LONG, VECTORS, after_refusal
from tests.gateway.conftest import Running, vector


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client:
        yield client


@pytest.fixture
async def async_client(server: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client:
        yield client


async def test_texts_become_their_vectors(client: openai.OpenAI) -> None:
    answer = await asyncio.to_thread(client.embeddings.create, model="tiny", input=TEXTS)
    np.testing.assert_array_equal(np.array([item.embedding for item in answer.data], dtype=np.float32), VECTORS)
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("tiny", 7, 7)


async def test_numbers_come_as_exactly_as_base64(client: openai.OpenAI) -> None:
    answer = await asyncio.to_thread(client.embeddings.create, model="tiny", input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal(np.array([item.embedding for item in answer.data], dtype=np.float32), VECTORS)


async def test_texts_become_their_vectors_without_a_thread(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.embeddings.create(model="tiny", input=TEXTS)
    np.testing.assert_array_equal(np.array([item.embedding for item in answer.data], dtype=np.float32), VECTORS)


async def test_dimensions_and_token_ids_and_our_own_fields_get_through(async_client: openai.AsyncOpenAI) -> None:
    cut = await async_client.embeddings.create(model="tiny", input="w5 w6", dimensions=3)
    of_ids = await async_client.embeddings.create(model="tiny", input=[[1, 9, 10, 2]])
    query = await async_client.embeddings.create(model="tiny", input="w5", extra_body={"prompt_name": "query"})
    np.testing.assert_allclose(cut.data[0].embedding, vector([1, 9, 10, 2], dimensions=3), rtol=1e-6)
    np.testing.assert_allclose(of_ids.data[0].embedding, VECTORS[0], rtol=1e-6)
    np.testing.assert_allclose(query.data[0].embedding, vector([1, 5, 6, 9, 2]), rtol=1e-6)


async def test_the_model_is_listed(async_client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in async_client.models.list()] == ["tiny"]
    assert (await async_client.models.retrieve("tiny")).id == "tiny"


async def test_errors_are_of_the_class_that_says_what_they_are(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="This model is not served here") as unknown:
        await asyncio.to_thread(client.embeddings.create, model="other", input="w5")
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 22 tokens; this model takes at most 16") as long:
        await async_client.embeddings.create(model="tiny", input=["w5", TOO_LONG])
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input[1]")
    assert long.value.request_id == long.value.response.headers["x-request-id"]


async def test_an_overloaded_server_is_asked_again(
    server: Running, client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    create = asyncio.to_thread(client.embeddings.create, model="tiny", input=TEXTS)
    answer = await after_refusal(server.stub, create)
    np.testing.assert_allclose([item.embedding for item in answer.data], VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 2
    server.stub.entered.clear()
    again = await after_refusal(server.stub, async_client.embeddings.create(model="tiny", input=TEXTS))
    np.testing.assert_allclose([item.embedding for item in again.data], VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 4


async def test_a_client_that_does_not_try_again_is_told_of_the_limit(server: Running, client: openai.OpenAI) -> None:
    create = asyncio.to_thread(client.with_options(max_retries=0).embeddings.create, model="tiny", input="w5")
    with pytest.raises(openai.RateLimitError, match="The queue is full") as refused:
        await after_refusal(server.stub, create)
    assert refused.value.response.headers["retry-after"] == "1"
