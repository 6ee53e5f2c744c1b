"""The voyageai package against /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import voyageai
import voyageai.error

from common.wire.messages import ModelFacts
from tests.clients.conftest import IDS, TEXTS, TOO_LONG, VECTORS, ServeQuantising, after_refusal
from tests.fakes import oracle_row
from tests.gateway.conftest import Running, Serve, vector


def connect(port: int, max_retries: int = 0) -> voyageai.Client:
    return voyageai.Client(api_key="any", base_url=f"http://127.0.0.1:{port}/v1", max_retries=max_retries)


async def test_texts_become_their_vectors(server: Running) -> None:
    answer = await asyncio.to_thread(connect(server.port).embed, TEXTS, model="tiny")
    np.testing.assert_array_equal(np.array(answer.embeddings, dtype=np.float32), VECTORS)
    assert answer.total_tokens == 7


async def test_texts_become_their_vectors_without_a_thread(server: Running) -> None:
    client = voyageai.AsyncClient(api_key="any", base_url=f"http://127.0.0.1:{server.port}/v1")
    answer = await client.embed(TEXTS, model="tiny", input_type="document")
    np.testing.assert_array_equal(np.array(answer.embeddings, dtype=np.float32), VECTORS)


async def test_a_query_has_its_prompt_and_what_is_too_long_is_cut(server: Running) -> None:
    client = connect(server.port)
    query = await asyncio.to_thread(client.embed, ["w5 w6"], model="tiny", input_type="query", output_dimension=3)
    cut = await asyncio.to_thread(client.embed, [TOO_LONG], model="tiny")
    np.testing.assert_allclose(query.embeddings, [vector([1, 5, 6, 9, 10, 2], dimensions=3)], rtol=1e-6)
    np.testing.assert_allclose(cut.embeddings, [vector([1, *[5] * 14, 2])], rtol=1e-6)


async def test_a_quantising_model_makes_every_type(serve_quantising: ServeQuantising, facts: ModelFacts) -> None:
    client = connect(await serve_quantising(facts))

    async def embed(output_dtype: str) -> list[list[int]]:
        answer = await asyncio.to_thread(client.embed, TEXTS, model="tiny", output_dtype=output_dtype)
        found: list[list[int]] = answer.embeddings
        return found

    int8 = np.stack([oracle_row(ids, "int8") for ids in IDS])
    bits = np.unpackbits(np.stack([oracle_row(ids, "binary") for ids in IDS]), axis=1, bitorder="little")
    assert await embed("float") == [oracle_row(ids, "float32").tolist() for ids in IDS]
    assert await embed("int8") == int8.tolist()
    assert await embed("uint8") == (int8.astype(int) + 128).tolist()
    assert await embed("ubinary") == np.packbits(bits, axis=1).tolist()
    assert await embed("binary") == (np.packbits(bits, axis=1).astype(int) - 128).tolist()


async def test_documents_are_put_in_order(serve: Serve, scoring: ModelFacts) -> None:
    running = await serve(served=scoring)
    running.stub.logit_of = lambda ids: float(ids[-2] - 10)  # of the last word's number
    client = connect(running.port)
    answer = await asyncio.to_thread(client.rerank, "w1", ["w5", "w8", "w6"], model="tiny", top_k=2)
    assert [(result.index, result.document) for result in answer.results] == [(1, "w8"), (2, "w6")]
    logits = np.array([2.0, 0.0])
    np.testing.assert_allclose([result.relevance_score for result in answer.results], 1 / (1 + np.exp(-logits)), 1e-6)


async def test_errors_are_of_the_class_that_says_what_they_are(server: Running) -> None:
    client = connect(server.port)
    with pytest.raises(voyageai.error.APIError, match="This model is not served here") as unknown:
        await asyncio.to_thread(client.embed, ["w5"], model="other")
    with pytest.raises(voyageai.error.InvalidRequestError, match=r"^input\[1\] has 22 tokens; this model") as long:
        await asyncio.to_thread(client.embed, ["w5", TOO_LONG], model="tiny", truncation=False)
    assert (unknown.value.http_status, unknown.value.error.code) == (404, "model_not_found")
    assert (long.value.http_status, long.value.error.code) == (400, "context_length_exceeded")


@pytest.mark.slow  # its client waits for a second or two, whatever the answer's headers say
async def test_an_overloaded_server_is_asked_again(server: Running) -> None:
    embed = asyncio.to_thread(connect(server.port, max_retries=2).embed, TEXTS, model="tiny")
    answer = await after_refusal(server.stub, embed)
    np.testing.assert_allclose(answer.embeddings, VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 2


async def test_a_client_that_does_not_try_again_is_told_of_the_limit(server: Running) -> None:
    embed = asyncio.to_thread(connect(server.port).embed, TEXTS, model="tiny")
    with pytest.raises(voyageai.error.RateLimitError, match="The queue is full") as refused:
        await after_refusal(server.stub, embed)
    assert refused.value.headers["Retry-After"] == "1"
