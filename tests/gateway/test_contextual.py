"""/v1/contextualizedembeddings: what a good request is answered with, and what a bad one."""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import pytest

from common.wire.messages import ModelFacts
from tests.fakes import DIMENSIONS as ORACLE_DIMENSIONS
from tests.fakes import QUANTISING_FACTS, oracle_row
from tests.gateway.conftest import DIMENSIONS, Running, Serve, ServeOracle, vector
from tests.gateway.wire import Answer, embed, post

PATH = "/v1/contextualizedembeddings"
DOCUMENTS = [["w5 w6", "w7"], ["w8"]]
SEPARATOR = 2  # [SEP], which stands at the end of every text, too


@pytest.fixture(scope="module")
def late_chunking(facts: ModelFacts) -> ModelFacts:
    """A model that embeds chunks in context; with its 16 tokens, two for the text's own frame."""
    return dataclasses.replace(facts, separator_id=SEPARATOR)


@pytest.fixture
async def server(serve: Serve, late_chunking: ModelFacts) -> Running:
    return await serve(served=late_chunking)


async def contextual(port: int, fields: object) -> Answer:
    return await post(port, PATH, fields)


def rows(answer: Answer) -> list[list[list[float]]]:
    assert answer.status == 200, answer.body
    return [[item["embedding"] for item in document["data"]] for document in answer.json["data"]]


def close_to(row: np.ndarray) -> object:
    return pytest.approx(row.tolist(), rel=1e-6)


async def test_every_chunk_gets_its_vector_in_the_form_that_perplexitys_client_reads(server: Running) -> None:
    answer = await contextual(server.port, {"model": "tiny", "input": DOCUMENTS})
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-model-fingerprint"] == "0123456789abcdef"
    assert answer.json == {
        "object": "list",
        "model": "tiny",
        "data": [
            {
                "object": "list",
                "index": 0,
                "data": [
                    {"object": "embedding", "index": 0, "embedding": close_to(vector([9, 10]))},
                    {"object": "embedding", "index": 1, "embedding": close_to(vector([11]))},
                ],
            },
            {
                "object": "list",
                "index": 1,
                "data": [{"object": "embedding", "index": 0, "embedding": close_to(vector([12]))}],
            },
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }


async def test_chunks_of_a_document_run_as_one_sequence_with_a_span_each(server: Running) -> None:
    await contextual(server.port, {"input": DOCUMENTS, "lane": "backfill"})
    [sent] = server.stub.submitted
    assert sent["sequences"] == [[1, 9, 10, 2, 11, 2], [1, 12, 2]]
    assert sent["spans"] == [[[1, 3], [4, 5]], [[1, 2]]]
    assert sent["type_starts"] is None
    assert sent["lane"] == "backfill"


async def test_text_that_spells_the_separator_is_text(server: Running) -> None:
    await contextual(server.port, {"input": [["w5 [SEP] w6", "w7"]]})
    [sent] = server.stub.submitted
    assert sent["sequences"] == [[1, 9, 0, 10, 2, 11, 2]]
    assert sent["spans"] == [[[1, 4], [5, 6]]]


async def test_many_documents_keep_their_order(server: Running) -> None:
    documents = [[f"w{n % 60}", f"w{n // 60} w{chunk}"] for n in range(300) for chunk in [n % 7]]
    found = rows(await contextual(server.port, {"input": documents}))
    expected = [[vector([n % 60 + 4]), vector([n // 60 + 4, n % 7 + 4])] for n in range(300)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


async def test_dimensions_and_normalize_are_as_for_any_vector(server: Running) -> None:
    cut = rows(await contextual(server.port, {"input": [["w5"]], "dimensions": 3}))
    plain = rows(await contextual(server.port, {"input": [["w5"]], "normalize": False}))
    np.testing.assert_allclose(cut, [[vector([9], dimensions=3)]], rtol=1e-6)
    np.testing.assert_allclose(plain, [[vector([9], normalize=False)]], rtol=1e-6)


async def test_base64_holds_little_endian_float32(server: Running) -> None:
    found = rows(await contextual(server.port, {"input": DOCUMENTS, "encoding_format": "base64"}))
    decoded = [[np.frombuffer(base64.b64decode(text), dtype="<f4").tolist() for text in chunks] for chunks in found]
    assert decoded == [[vector([9, 10]).tolist(), vector([11]).tolist()], [vector([12]).tolist()]]


@pytest.mark.parametrize(
    "extra",
    [
        dict.fromkeys(("encoding_format", "dimensions", "normalize", "truncate", "user", "lane", "stream")),
        {"truncate": False, "stream": False, "user": "u1", "metadata": {}},
        {"model": "some-org/tiny", "encoding_format": "float", "dimensions": DIMENSIONS},
    ],
)
async def test_what_clients_send_along_changes_no_vector(server: Running, extra: dict[str, object]) -> None:
    found = rows(await contextual(server.port, {"input": [["w5"]]} | extra))
    np.testing.assert_allclose(found, [[vector([9])]], rtol=1e-6)


async def test_the_same_model_embeds_plain_texts_as_ever(server: Running) -> None:
    answer = await embed(server.port, {"input": "w5"})
    assert answer.json["data"][0]["embedding"] == close_to(vector([1, 9, 2]))


# Beside what bad_input.toml has of the fields that all routes have.
BAD: list[tuple[dict[str, object], str, str]] = [
    ({"inputs": [["w1"]]}, "unknown_field", "inputs"),
    ({"prompt_name": "query"}, "unknown_field", "prompt_name"),
    ({"input": None}, "invalid_type", "input"),
    ({"input": "w1"}, "invalid_type", "input"),
    ({"input": ["w1", "w2"]}, "invalid_type", "input[0]"),
    ({"input": [["w1"], "w2"]}, "invalid_type", "input[1]"),
    ({"input": []}, "empty_input", "input"),
    ({"input": [["w1"], []]}, "empty_input", "input[1]"),
    ({"input": [["w1"], ["w2", ""]]}, "empty_input", "input[1][1]"),
    ({"input": [["w1"], ["w2", " \n"]]}, "empty_input", "input[1][1]"),
    ({"input": [["w1", 5]]}, "invalid_type", "input[0][1]"),
    ({"input": [["w1"]] * 513}, "too_many_inputs", "input"),
    ({"input": [["w1"] * 8000, ["w1"] * 8001]}, "too_many_inputs", "input"),
    ({"input": [["w1"], ["w1 " * 7, "w1 " * 7]]}, "context_length_exceeded", "input[1]"),
    ({"input": [["w1"], ["a" * 300, "b" * 300]]}, "input_too_long", "input[1]"),
    ({"truncate": True}, "unsupported_parameter", "truncate"),
    ({"dimensions": DIMENSIONS + 1}, "out_of_range", "dimensions"),
    ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
    ({"encoding_format": "base64_int8"}, "unsupported_parameter", "encoding_format"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD, ids=lambda value: repr(value)[:40])
async def test_bad_requests(server: Running, fields: dict[str, object], code: str, param: str) -> None:
    assert (await contextual(server.port, {"input": [["w1"]]} | fields)).refusal == (400, code, param)
    assert server.stub.submitted == []


async def test_as_many_documents_and_chunks_as_are_allowed(serve: Serve, late_chunking: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(late_chunking, max_tokens=64))
    chunks = ["w1"] * 31
    answer = await contextual(running.port, {"input": [chunks] * 512})
    assert [len(document) for document in rows(answer)] == [31] * 512
    assert answer.json["usage"]["total_tokens"] == 512 * 63


@pytest.mark.parametrize(("limit", "told"), [(1_000_000, "120000"), (20, "20")])
async def test_tokens_are_counted_over_the_whole_request(
    serve: Serve, late_chunking: ModelFacts, limit: int, told: str
) -> None:
    running = await serve(served=dataclasses.replace(late_chunking, max_tokens=600), max_request_tokens=limit)
    answer = await contextual(running.port, {"input": [["w1 " * 500]] * 250})
    assert answer.refusal == (400, "too_many_tokens", "input")
    assert f"more than {told} tokens" in answer.error["message"]


@pytest.mark.parametrize(
    ("tasks", "separator_id", "said"), [(["embed"], None, "/v1/embeddings"), (["score"], SEPARATOR, "no embeddings")]
)
async def test_a_model_that_makes_no_such_embeddings_says_so(
    serve: Serve, facts: ModelFacts, tasks: list[str], separator_id: int | None, said: str
) -> None:
    running = await serve(served=dataclasses.replace(facts, tasks=tasks, separator_id=separator_id))
    answer = await contextual(running.port, {"input": DOCUMENTS})
    assert answer.refusal == (400, "wrong_task", "model")
    assert said in answer.error["message"]


# --- through the real scheduler ---


@pytest.fixture
async def port(serve_oracle: ServeOracle, late_chunking: ModelFacts) -> int:
    """A gateway before an oracle that quantises and embeds chunks in context."""
    changes = {"dimensions": ORACLE_DIMENSIONS, "encodings": QUANTISING_FACTS.encodings}
    return (await serve_oracle(dataclasses.replace(late_chunking, **changes))).port


@pytest.mark.parametrize(
    ("encoding_format", "encoding"), [("base64_int8", "int8"), ("base64_binary", "binary"), ("base64", "float32")]
)
async def test_each_format_holds_the_row_of_its_own_span(port: int, encoding_format: str, encoding: str) -> None:
    answer = await contextual(port, {"input": DOCUMENTS, "encoding_format": encoding_format})
    found = [[base64.b64decode(text, validate=True) for text in chunks] for chunks in rows(answer)]
    first, second = [1, 9, 10, 2, 11, 2], [1, 12, 2]
    expected = [[(first, (1, 3)), (first, (4, 5))], [(second, (1, 2))]]
    assert found == [[oracle_row(ids, encoding, span=span).tobytes() for ids, span in chunks] for chunks in expected]


async def test_many_chunks_are_the_same_as_each_alone(port: int) -> None:
    documents = [[f"w{n % 60}", f"w{n // 60}"] for n in range(400)]
    together = rows(await contextual(port, {"input": documents, "encoding_format": "base64_int8"}))
    expected = []
    for n in range(400):
        ids = [1, n % 60 + 4, 2, n // 60 + 4, 2]
        expected.append([base64.b64encode(oracle_row(ids, "int8", span=s)).decode() for s in [(1, 2), (3, 4)]])
    assert together == expected
