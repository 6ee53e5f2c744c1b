"""int8 and binary answers over HTTP: a real gateway, the real scheduler and an oracle worker, on real sockets."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from common.config import GatewayConfig
from common.metrics import Metrics
from common.wire.messages import Batch, ModelFacts
from common.wire.rows import BINARY, INT8
from gateway.app import Gateway
from gateway.client import SchedulerClient
from tests.fakes import DIMENSIONS, QUANTISING_FACTS, FakeWorker, RunningScheduler, oracle_result, oracle_row
from tests.gateway.conftest import Running, Serve, listening_socket
from tests.gateway.wire import Answer, ask, embed

StartWorker = Callable[..., FakeWorker]
StartGateway = Callable[..., Awaitable[int]]

OCTETS = {"Accept": "application/octet-stream"}

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
async def gateway(
    run_dir: str, start_scheduler: Callable[[], RunningScheduler], metrics: Metrics
) -> AsyncIterator[StartGateway]:
    """Starts a gateway, once its worker runs; gives the port."""
    (Path(run_dir) / "metrics").mkdir(parents=True)
    start_scheduler()
    client = SchedulerClient(run_dir, "gateway-0", metrics)
    gateway = Gateway(GatewayConfig(run_dir=run_dir), [client], metrics)

    async def start() -> int:
        sock = listening_socket()
        port: int = sock.getsockname()[1]
        await gateway.start(sock)
        async with asyncio.timeout(10):
            while client.facts is None:
                await asyncio.sleep(0.005)
        await gateway.wait_loaded()
        return port

    yield start
    await gateway.close()


@pytest.fixture
async def port(gateway: StartGateway, start_worker: StartWorker, quantising: ModelFacts) -> int:
    """A gateway before a quantising model."""
    start_worker(facts=quantising)
    return await gateway()


def decoded(answer: Answer) -> list[bytes]:
    assert answer.status == 200, answer.body
    return [base64.b64decode(item["embedding"], validate=True) for item in answer.json["data"]]


async def test_base64_int8_is_one_signed_byte_a_dimension(port: int) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": "base64_int8"})
    assert decoded(answer) == [row.tobytes() for row in INT8_ROWS]
    assert answer.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(item["object"], item["index"]) for item in answer.json["data"]] == [("embedding", 0), ("embedding", 1)]


async def test_base64_binary_is_one_bit_a_dimension_lowest_bit_first(port: int) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": "base64_binary"})
    assert decoded(answer) == [row.tobytes() for row in BINARY_ROWS]


async def test_base64_ubinary_is_the_same_bits_highest_bit_first(port: int) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": "base64_ubinary"})
    bits = np.unpackbits(np.stack(BINARY_ROWS), axis=1, bitorder="little")
    assert decoded(answer) == [row.tobytes() for row in np.packbits(bits, axis=1, bitorder="big")]


@pytest.mark.parametrize("encoding_format", ["float", None, "base64"])
async def test_a_quantising_model_is_float32_unless_something_else_is_asked_for(
    port: int, encoding_format: str | None
) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": encoding_format})
    expected = np.stack([oracle_row(ids, "float32") for ids in IDS])
    if encoding_format == "base64":
        assert decoded(answer) == [row.tobytes() for row in expected]
    else:
        assert [item["embedding"] for item in answer.json["data"]] == expected.tolist()


@pytest.mark.parametrize(
    ("encoding_format", "dtype", "rows"),
    [
        ("base64_int8", "int8", INT8_ROWS),
        ("base64_binary", "uint8", BINARY_ROWS),
        ("float", "float32", [oracle_row(ids, "float32") for ids in IDS]),
    ],
)
async def test_the_raw_matrix_says_its_type_and_its_own_shape(
    port: int, encoding_format: str, dtype: str, rows: list[np.ndarray]
) -> None:
    answer = await embed(port, {"input": TEXTS, "encoding_format": encoding_format}, OCTETS)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-embedding-dtype"] == dtype
    shape = tuple(map(int, answer.headers["x-embedding-shape"].split(",")))
    np.testing.assert_array_equal(np.frombuffer(answer.body, dtype).reshape(shape), rows)


async def test_the_raw_matrix_of_ubinary_is_highest_bit_first_too(port: int) -> None:
    lowest = await embed(port, {"input": "w5 w6", "encoding_format": "base64_binary"}, OCTETS)
    highest = await embed(port, {"input": "w5 w6", "encoding_format": "base64_ubinary"}, OCTETS)
    assert [f"{byte:08b}"[::-1] for byte in lowest.body] == [f"{byte:08b}" for byte in highest.body]


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


@pytest.mark.parametrize("output_dtype", list(BY_TYPE))
async def test_the_raw_matrix_is_of_voyages_type(port: int, output_dtype: str) -> None:
    answer = await embed(port, {"input": TEXTS, "output_dtype": output_dtype}, OCTETS)
    rows = np.frombuffer(answer.body, answer.headers["x-embedding-dtype"])
    assert np.dtype(answer.headers["x-embedding-dtype"]) == np.dtype(NUMPY_TYPES[output_dtype])
    assert rows.reshape(2, -1).tolist() == BY_TYPE[output_dtype]


@pytest.mark.parametrize("encoding_format", ["base64_int8", "float"])
async def test_a_type_is_said_in_one_place(port: int, encoding_format: str) -> None:
    answer = await embed(port, {"input": TEXTS, "output_dtype": "int8", "encoding_format": encoding_format})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "encoding_format")


@pytest.mark.parametrize("types", [[name] for name in BY_TYPE] + [list(BY_TYPE), ["ubinary", "int8"]], ids="-".join)
async def test_cohere_has_every_type_that_it_asks_for(port: int, types: list[str]) -> None:
    answer = await ask(port, "POST", "/v2/embed", json.dumps({"texts": TEXTS, "embedding_types": types}).encode())
    assert answer.status == 200, answer.body
    assert answer.json["embeddings"] == {name: BY_TYPE[name] for name in types}
    assert answer.json["meta"]["billed_units"] == {"input_tokens": 7}


async def test_each_encoding_of_cohere_is_a_run_and_only_float32_is_normalised(
    gateway: StartGateway, start_worker: StartWorker, quantising: ModelFacts
) -> None:
    worker = start_worker(facts=quantising)
    port = await gateway()
    fields = {"texts": ["w1"], "embedding_types": ["ubinary", "uint8", "binary", "base64", "int8", "float"]}
    assert (await ask(port, "POST", "/v2/embed", json.dumps(fields).encode())).status == 200
    assert [batch.encodings.tolist() for batch in worker.batches] == [[0], [INT8], [BINARY]]
    assert [batch.normalize.tolist() for batch in worker.batches] == [[1], [0], [0]]


async def test_cohere_and_voyage_are_held_to_whole_bytes_too(port: int) -> None:
    fields = {"texts": TEXTS, "embedding_types": ["float", "binary"], "output_dimension": 12}
    cohere = await ask(port, "POST", "/v2/embed", json.dumps(fields).encode())
    voyage = await embed(port, {"input": TEXTS, "output_dtype": "ubinary", "output_dimension": 12})
    assert (cohere.status, cohere.error["code"], cohere.error["param"]) == (400, "invalid_value", "output_dimension")
    assert (voyage.status, voyage.error["code"], voyage.error["param"]) == (400, "invalid_value", "output_dimension")


@pytest.mark.parametrize("encoding_format", ["base64_binary", "base64_ubinary"])
@pytest.mark.parametrize("dimensions", [1, 7, 9, 15])
async def test_bits_come_in_whole_bytes_or_not_at_all(port: int, encoding_format: str, dimensions: int) -> None:
    answer = await embed(port, {"input": "w1", "encoding_format": encoding_format, "dimensions": dimensions})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "dimensions")
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
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "normalize")
    assert (await embed(port, {**fields, "normalize": False})).status == 200


async def test_a_quantised_row_is_asked_for_unnormalised_whatever_the_checkpoint_declares(
    gateway: StartGateway, start_worker: StartWorker, quantising: ModelFacts
) -> None:
    worker = start_worker(facts=quantising)
    port = await gateway()
    await embed(port, {"input": "w1", "encoding_format": "base64_int8"})
    await embed(port, {"input": "w1", "encoding_format": "base64_ubinary", "dimensions": 8})
    await embed(port, {"input": "w1"})
    assert [batch.encodings.tolist() for batch in worker.batches] == [[INT8], [BINARY], [0]]
    assert [batch.normalize.tolist() for batch in worker.batches] == [[0], [0], [1]]
    assert [batch.dimensions.tolist() for batch in worker.batches] == [[DIMENSIONS], [8], [DIMENSIONS]]


@pytest.mark.parametrize("encoding_format", ["base64_int8", "base64_binary", "base64_ubinary"])
async def test_a_model_without_a_quantiser_refuses_and_says_what_it_has(server: Running, encoding_format: str) -> None:
    answer = await embed(server.port, {"input": "w1", "encoding_format": encoding_format})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("unsupported_parameter", "encoding_format")
    assert "float, base64." in answer.error["message"]
    assert server.stub.submitted == []


async def test_a_format_is_offered_by_what_the_model_makes(serve: Serve, quantising: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(quantising, encodings=["float32", "int8"]))
    refused = await embed(running.port, {"input": "w1", "encoding_format": "base64_binary"})
    assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
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


async def test_an_int8_answer_survives_the_death_of_its_worker(
    gateway: StartGateway, start_worker: StartWorker, quantising: ModelFacts
) -> None:
    mute = start_worker("worker-0", facts=quantising, answer=lambda _: None)
    port = await gateway()
    waiting = asyncio.create_task(embed(port, {"input": TEXTS, "encoding_format": "base64_int8"}))
    async with asyncio.timeout(10):
        while not mute.batches:
            await asyncio.sleep(0.005)
    start_worker("worker-1", facts=quantising)
    mute.process.kill()
    assert decoded(await waiting) == [row.tobytes() for row in INT8_ROWS]


async def test_a_quantised_row_of_what_is_not_finite_is_an_error(
    gateway: StartGateway, start_worker: StartWorker, quantising: ModelFacts
) -> None:
    def answer(batch: Batch) -> object:
        return dataclasses.replace(oracle_result(batch), nonfinite=np.array([1], dtype=np.int32))

    start_worker(facts=quantising, answer=answer)
    port = await gateway()
    answered = await embed(port, {"input": TEXTS, "encoding_format": "base64_int8"})
    assert (answered.status, answered.error["code"]) == (500, "nonfinite_output")
    assert answered.error["param"] == "input[1]"
