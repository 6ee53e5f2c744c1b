"""int8 and binary answers over HTTP: a real gateway, the real scheduler and an oracle worker, on real sockets."""

from __future__ import annotations

import asyncio
import base64
import dataclasses

import numpy as np
import pytest

from common.wire.messages import ModelFacts
from common.wire.rows import BINARY, INT8
from tests.fakes import DIMENSIONS, QUANTISING_FACTS, oracle_row
from tests.gateway.conftest import Serve, ServeOracle
from tests.gateway.wire import Answer, embed, post

# The ids of "w5 w6" and of "w7" in the tiny tokenizer.
IDS = ([1, 9, 10, 2], [1, 11, 2])
TEXTS = ["w5 w6", "w7"]
INT8_ROWS = [oracle_row(ids, "int8") for ids in IDS]
BINARY_ROWS = [oracle_row(ids, "binary") for ids in IDS]

FLOAT_ROWS = [oracle_row(ids, "float32") for ids in IDS]
BITS = np.unpackbits(np.stack(BINARY_ROWS), axis=1, bitorder="little")  # [inputs, dimensions]

# What Cohere's and Voyage's clients mean by each type: ubinary as numpy packs bits, binary 128 below it.
BY_TYPE = {
    "float": [row.tolist() for row in FLOAT_ROWS],
    "int8": [row.tolist() for row in INT8_ROWS],
    "uint8": [(row.astype(int) + 128).tolist() for row in INT8_ROWS],
    "binary": (np.packbits(BITS, axis=1).astype(int) - 128).tolist(),
    "ubinary": np.packbits(BITS, axis=1).tolist(),
}
NUMPY_TYPES = {"float": "<f4", "int8": "int8", "uint8": "uint8", "binary": "int8", "ubinary": "uint8"}


@pytest.fixture(scope="module")
def quantising(facts: ModelFacts) -> ModelFacts:
    """A model that declares a quantiser, and ends with a normalisation too."""
    return dataclasses.replace(facts, dimensions=DIMENSIONS, encodings=QUANTISING_FACTS.encodings, normalize=True)


@pytest.fixture
async def port(serve_oracle: ServeOracle, quantising: ModelFacts) -> int:
    """A gateway before a quantising model."""
    return (await serve_oracle(quantising)).port


def decoded(answer: Answer) -> list[bytes]:
    assert answer.status == 200, answer.body
    return [base64.b64decode(item["embedding"], validate=True) for item in answer.json["data"]]


@pytest.mark.parametrize(
    ("encoding_format", "rows"),
    [
        ("base64", FLOAT_ROWS),
        ("base64_int8", INT8_ROWS),
        ("base64_binary", BINARY_ROWS),
        ("base64_ubinary", list(np.packbits(BITS, axis=1, bitorder="big"))),
    ],
)
async def test_base64_is_of_one_byte_or_one_bit_a_dimension(
    port: int, encoding_format: str, rows: list[np.ndarray]
) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": encoding_format})
    assert decoded(answer) == [row.tobytes() for row in rows]
    assert answer.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(item["object"], item["index"]) for item in answer.json["data"]] == [("embedding", 0), ("embedding", 1)]


@pytest.mark.parametrize("encoding_format", ["float", None])
async def test_a_quantising_model_is_float32_unless_something_else_is_asked_for(
    port: int, encoding_format: str | None
) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": encoding_format})
    assert [item["embedding"] for item in answer.json["data"]] == BY_TYPE["float"]


@pytest.mark.parametrize(
    ("fields", "dtype", "rows"),
    [
        ({"encoding_format": "base64_int8"}, "int8", INT8_ROWS),
        ({"encoding_format": "base64_binary"}, "uint8", BINARY_ROWS),
        ({"encoding_format": "base64_ubinary"}, "uint8", BY_TYPE["ubinary"]),
        ({"encoding_format": "float"}, "float32", FLOAT_ROWS),
        *(({"output_dtype": name}, np.dtype(NUMPY_TYPES[name]).name, BY_TYPE[name]) for name in BY_TYPE),
    ],
)
async def test_the_raw_matrix_says_its_type_and_its_own_shape(
    port: int, fields: dict[str, str], dtype: str, rows: list[np.ndarray]
) -> None:
    answer = await embed(port, {"input": TEXTS, **fields}, {"Accept": "application/octet-stream"})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-embedding-dtype"] == dtype
    shape = tuple(map(int, answer.headers["x-embedding-shape"].split(",")))
    np.testing.assert_array_equal(np.frombuffer(answer.body, dtype).reshape(shape), rows)


@pytest.mark.parametrize(
    ("encoding_format", "dimensions", "num_bytes"),
    [("base64_int8", 3, 3), ("base64_int8", 1, 1), ("base64_binary", 8, 1), ("base64_ubinary", 8, 1)],
)
async def test_dimensions_cut_quantised_rows(port: int, encoding_format: str, dimensions: int, num_bytes: int) -> None:
    whole = await embed(port, {"input": TEXTS, "encoding_format": encoding_format})
    cut = await embed(port, {"input": TEXTS, "encoding_format": encoding_format, "dimensions": dimensions})
    assert decoded(cut) == [row[:num_bytes] for row in decoded(whole)]


@pytest.mark.parametrize("output_dtype", list(BY_TYPE))
async def test_voyages_types_are_numbers_or_base64_of_them(port: int, output_dtype: str) -> None:
    fields = {"input": TEXTS, "output_dtype": output_dtype}
    numbers = await embed(port, {**fields, "encoding_format": None})
    assert [item["embedding"] for item in numbers.json["data"]] == BY_TYPE[output_dtype]
    rows = decoded(await embed(port, {**fields, "encoding_format": "base64"}))
    assert [np.frombuffer(row, NUMPY_TYPES[output_dtype]).tolist() for row in rows] == BY_TYPE[output_dtype]


@pytest.mark.parametrize("encoding_format", ["base64_int8", "float"])
async def test_a_type_is_said_in_one_place(port: int, encoding_format: str) -> None:
    answer = await embed(port, {"input": TEXTS, "output_dtype": "int8", "encoding_format": encoding_format})
    assert answer.refusal == (400, "invalid_value", "encoding_format")


@pytest.mark.parametrize("types", [[name] for name in BY_TYPE] + [list(BY_TYPE), ["ubinary", "int8"]], ids="-".join)
async def test_cohere_has_every_type_that_it_asks_for(port: int, types: list[str]) -> None:
    answer = await post(port, "/v2/embed", {"texts": TEXTS, "embedding_types": types})
    assert answer.status == 200, answer.body
    assert answer.json["embeddings"] == {name: BY_TYPE[name] for name in types}
    assert answer.json["meta"]["billed_units"] == {"input_tokens": 7}


async def test_each_encoding_of_cohere_is_a_run_and_only_float32_is_normalised(
    serve_oracle: ServeOracle, quantising: ModelFacts
) -> None:
    oracle = await serve_oracle(quantising)
    fields = {"texts": ["w1"], "embedding_types": ["ubinary", "uint8", "binary", "base64", "int8", "float"]}
    assert (await post(oracle.port, "/v2/embed", fields)).status == 200
    assert [batch.encodings.tolist() for batch in oracle.worker.batches] == [[0], [INT8], [BINARY]]
    assert [batch.normalize.tolist() for batch in oracle.worker.batches] == [[1], [0], [0]]


async def test_cohere_and_voyage_are_held_to_whole_bytes_too(port: int) -> None:
    cohere = {"texts": TEXTS, "embedding_types": ["float", "binary"], "output_dimension": 12}
    voyage = {"input": TEXTS, "output_dtype": "ubinary", "output_dimension": 12}
    for path, fields in (("/v2/embed", cohere), ("/v1/embeddings", voyage)):
        assert (await post(port, path, fields)).refusal == (400, "invalid_value", "output_dimension")


@pytest.mark.parametrize("encoding_format", ["base64_binary", "base64_ubinary"])
@pytest.mark.parametrize("dimensions", [1, 7, 9, 15])
async def test_bits_come_in_whole_bytes_or_not_at_all(port: int, encoding_format: str, dimensions: int) -> None:
    answer = await embed(port, {"input": "w1", "encoding_format": encoding_format, "dimensions": dimensions})
    assert answer.refusal == (400, "invalid_value", "dimensions")
    assert str(dimensions) in answer.error["message"]


async def test_a_models_own_dimensions_are_held_to_whole_bytes_too(serve: Serve, quantising: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(quantising, dimensions=12))
    answer = await embed(running.port, {"input": "w1", "encoding_format": "base64_binary"})
    assert (answer.status, answer.error["param"]) == (400, "dimensions")
    assert running.stub.submitted == []


@pytest.mark.parametrize("encoding_format", ["base64_int8", "base64_binary", "base64_ubinary"])
async def test_normalisation_of_what_is_quantised_is_refused(port: int, encoding_format: str) -> None:
    fields = {"input": "w5 w6", "encoding_format": encoding_format}
    answer = await embed(port, {**fields, "normalize": True})
    assert answer.refusal == (400, "unsupported_parameter", "normalize")
    assert (await embed(port, {**fields, "normalize": False})).status == 200


async def test_a_quantised_row_is_asked_for_unnormalised_whatever_the_checkpoint_declares(
    serve_oracle: ServeOracle, quantising: ModelFacts
) -> None:
    oracle = await serve_oracle(quantising)
    await embed(oracle.port, {"input": "w1", "encoding_format": "base64_int8"})
    await embed(oracle.port, {"input": "w1", "encoding_format": "base64_ubinary", "dimensions": 8})
    await embed(oracle.port, {"input": "w1"})
    batches = oracle.worker.batches
    assert [batch.encodings.tolist() for batch in batches] == [[INT8], [BINARY], [0]]
    assert [batch.normalize.tolist() for batch in batches] == [[0], [0], [1]]
    assert [batch.dimensions.tolist() for batch in batches] == [[DIMENSIONS], [8], [DIMENSIONS]]


async def test_a_format_is_offered_by_what_the_model_makes(serve: Serve, quantising: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(quantising, encodings=["float32", "int8"]))
    refused = await embed(running.port, {"input": "w1", "encoding_format": "base64_binary"})
    assert refused.refusal == (400, "unsupported_parameter", "encoding_format")
    assert refused.error["message"].endswith("use one of: float, base64, base64_int8.")
    misspelt = await embed(running.port, {"input": "w1", "encoding_format": "int8"})
    assert (
        misspelt.error["message"]
        == "encoding_format must be one of: base64, base64_binary, base64_int8, base64_ubinary, float."
    )


async def test_requests_of_every_format_at_once_each_get_their_own(port: int) -> None:
    formats = ["base64_int8", "base64_binary", "base64", "base64_ubinary"]
    alone = {name: (await embed(port, {"input": TEXTS, "encoding_format": name})).json["data"] for name in formats}
    answers = await asyncio.gather(
        *(embed(port, {"input": TEXTS, "encoding_format": formats[index % 4]}) for index in range(64))
    )
    assert [answer.json["data"] for answer in answers] == [alone[name] for name in formats] * 16


async def test_many_rows_are_the_same_as_each_alone(port: int) -> None:
    texts = [f"w{index % 60}" for index in range(600)]
    together = decoded(await embed(port, {"input": texts, "encoding_format": "base64_int8"}))
    assert together == [oracle_row([1, index % 60 + 4, 2], "int8").tobytes() for index in range(600)]
