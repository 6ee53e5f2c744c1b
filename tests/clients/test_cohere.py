"""The cohere package, version 2 of its API and version 1, against /v2/embed, /v1/embed and the rerank routes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator

import cohere
import numpy as np
import pytest

from common.wire.messages import ModelFacts
from tests.clients.conftest import IDS, TEXTS, TOO_LONG, VECTORS, ServeQuantising, after_refusal
from tests.fakes import oracle_row
from tests.gateway.conftest import Running, Serve, vector

# Version 1's client puts answers together in ways that pydantic will give up.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the 'model_fields' attribute:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `parse_obj` method is deprecated:DeprecationWarning"),
]


Connect = Callable[[int], cohere.ClientV2]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients of version 2."""
    clients: list[cohere.ClientV2] = []

    def connect(port: int) -> cohere.ClientV2:
        clients.append(cohere.ClientV2(api_key="any", base_url=f"http://127.0.0.1:{port}"))
        return clients[-1]

    yield connect
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(server: Running, connect: Connect) -> cohere.ClientV2:
    return connect(server.port)


@pytest.fixture
async def async_client(server: Running) -> AsyncIterator[cohere.AsyncClientV2]:
    async with cohere.AsyncClientV2(api_key="any", base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client


async def test_texts_become_their_vectors(client: cohere.ClientV2) -> None:
    answer = await asyncio.to_thread(client.embed, model="tiny", input_type="search_document", texts=TEXTS)
    np.testing.assert_array_equal(np.array(answer.embeddings.float_, dtype=np.float32), VECTORS)
    assert answer.response_type == "embeddings_by_type"
    assert answer.texts == TEXTS
    assert answer.meta.api_version.version == "2"
    assert answer.meta.billed_units.input_tokens == 7


async def test_a_query_has_its_prompt_and_what_is_too_long_is_cut(async_client: cohere.AsyncClientV2) -> None:
    query = await async_client.embed(model="tiny", input_type="search_query", texts=["w5 w6"])
    cut = await async_client.embed(model="tiny", input_type="search_document", texts=[TOO_LONG])
    np.testing.assert_allclose(query.embeddings.float_, [vector([1, 5, 6, 9, 10, 2])], rtol=1e-6)
    np.testing.assert_allclose(cut.embeddings.float_, [vector([1, *[5] * 14, 2])], rtol=1e-6)


async def test_inputs_and_dimensions_get_through(async_client: cohere.AsyncClientV2) -> None:
    inputs = [cohere.EmbedInput(content=[cohere.TextEmbedContent(text=text)]) for text in TEXTS]
    answer = await async_client.embed(
        model="tiny", input_type="search_document", inputs=inputs, output_dimension=3, embedding_types=["base64"]
    )
    rows = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in answer.embeddings.base64]
    np.testing.assert_array_equal(rows, [vector(ids, dimensions=3) for ids in IDS])


async def test_a_quantising_model_makes_every_type(
    serve_quantising: ServeQuantising, facts: ModelFacts, connect: Connect
) -> None:
    client = connect(await serve_quantising(facts))
    types = ["float", "int8", "uint8", "binary", "ubinary"]
    answer = await asyncio.to_thread(
        client.embed, model="tiny", input_type="search_document", texts=TEXTS, embedding_types=types
    )
    int8 = np.stack([oracle_row(ids, "int8") for ids in IDS])
    bits = np.unpackbits(np.stack([oracle_row(ids, "binary") for ids in IDS]), axis=1, bitorder="little")
    assert answer.embeddings.float_ == [oracle_row(ids, "float32").tolist() for ids in IDS]
    assert answer.embeddings.int8 == int8.tolist()
    assert answer.embeddings.uint8 == (int8.astype(int) + 128).tolist()
    assert answer.embeddings.ubinary == np.packbits(bits, axis=1).tolist()
    assert answer.embeddings.binary == (np.packbits(bits, axis=1).astype(int) - 128).tolist()


async def test_version_1_splits_its_texts_and_puts_the_answers_together(server: Running) -> None:
    with cohere.Client(api_key="any", base_url=f"http://127.0.0.1:{server.port}") as client:
        answer = await asyncio.to_thread(client.embed, model="tiny", texts=TEXTS * 60)
        by_type = await asyncio.to_thread(client.embed, model="tiny", texts=TEXTS, embedding_types=["float"])
    np.testing.assert_allclose(answer.embeddings, np.tile(VECTORS, (60, 1)), rtol=1e-6)
    np.testing.assert_allclose(by_type.embeddings.float_, VECTORS, rtol=1e-6)
    assert sorted(len(sent["sequences"]) for sent in server.stub.submitted) == [2, 24, 96]


async def test_documents_are_put_in_order(serve: Serve, scoring: ModelFacts, connect: Connect) -> None:
    running = await serve(served=scoring)
    running.stub.logit_of = lambda ids: float(ids[-2] - 10)  # of the last word's number
    client = connect(running.port)
    answer = await asyncio.to_thread(client.rerank, model="tiny", query="w1", documents=["w5", "w8", "w6"], top_n=2)
    assert [result.index for result in answer.results] == [1, 2]
    logits = np.array([2.0, 0.0])
    np.testing.assert_allclose([result.relevance_score for result in answer.results], 1 / (1 + np.exp(-logits)), 1e-6)
    assert answer.meta.billed_units.search_units == 1


async def test_errors_are_of_the_class_that_says_what_they_are(
    client: cohere.ClientV2, async_client: cohere.AsyncClientV2
) -> None:
    with pytest.raises(cohere.NotFoundError) as unknown:
        await asyncio.to_thread(client.embed, model="other", input_type="search_query", texts=["w5"])
    with pytest.raises(cohere.BadRequestError) as long:
        await async_client.embed(model="tiny", input_type="search_document", texts=["w5", TOO_LONG], truncate="NONE")
    assert unknown.value.body["error"]["code"] == "model_not_found"
    assert long.value.body["error"]["param"] == "texts[1]"
    assert long.value.body["error"]["message"].startswith("texts[1] has 22 tokens; this model takes at most 16.")


async def test_an_overloaded_server_is_asked_again(server: Running, client: cohere.ClientV2) -> None:
    embed = asyncio.to_thread(client.embed, model="tiny", input_type="search_document", texts=TEXTS)
    answer = await after_refusal(server.stub, embed)
    np.testing.assert_allclose(answer.embeddings.float_, VECTORS, rtol=1e-6)
    assert len(server.stub.submitted) == 2
