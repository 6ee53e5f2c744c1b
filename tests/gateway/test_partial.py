"""`partial: true` of /v1/embeddings: what cannot be embedded leaves the others alone."""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import pytest

from common.errors import DeadlineExceeded, InternalError, NonfiniteOutput, Overloaded, ServiceError
from common.metrics import Metrics
from common.wire.messages import ModelFacts
from gateway.open_request import Embedded, Options
from tests.gateway.conftest import MAX_TOKENS, Running, Serve, Stub, vector
from tests.gateway.wire import Answer, embed

TOO_LONG = "w1 " * MAX_TOKENS


async def partial(port: int, inputs: object, **fields: object) -> Answer:
    return await embed(port, {"input": inputs, "partial": True} | fields)


def indexes(answer: Answer) -> tuple[list[int], list[tuple[int, str, str]]]:
    """Which inputs have a vector; which have an error, and its code and `param`."""
    assert answer.status == 200, answer.body
    failed = [(item["index"], item["error"]["code"], item["error"]["param"]) for item in answer.json.get("errors", [])]
    return [item["index"] for item in answer.json["data"]], failed


def failing_on(*words: int, error: type[ServiceError] = NonfiniteOutput) -> type[Stub]:
    """A stand-in that fails on sequences with these token ids, the first of them at a time, as a scheduler does."""

    class Failing(Stub):
        async def submit(self, sequences: list[np.ndarray], options: Options, **rest: object) -> Embedded:
            embedded = await super().submit(sequences, options, **rest)
            for index, sequence in enumerate(sequences):
                if set(words) & set(sequence.tolist()):
                    raise error("It failed.", sequence=index)
            return embedded

    return Failing


def fail_on(running: Running, *words: int, error: type[ServiceError] = NonfiniteOutput) -> None:
    running.stub.__class__ = failing_on(*words, error=error)


async def test_the_good_ones_have_their_own_vectors_and_places(server: Running) -> None:
    answer = await partial(server.port, ["w5 w6", "", "w7", TOO_LONG, "w8"])
    assert indexes(answer) == (
        [0, 2, 4],
        [(1, "empty_input", "input[1]"), (3, "context_length_exceeded", "input[3]")],
    )
    found = [item["embedding"] for item in answer.json["data"]]
    np.testing.assert_allclose(found, [vector([1, 9, 10, 2]), vector([1, 11, 2]), vector([1, 12, 2])], rtol=1e-6)
    assert answer.json["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert answer.json["errors"][0]["error"] == {
        "message": "input[1] is empty: there is nothing to embed.",
        "type": "invalid_request_error",
        "param": "input[1]",
        "code": "empty_input",
    }
    assert len(server.stub.submitted) == 1


IDS_AS_THE_FIRST = "input[1] must be a list of token ids, as input[0] is."


@pytest.mark.parametrize(
    ("inputs", "code", "param", "message"),
    [
        (["", "w1"], "empty_input", "input[0]", "input[0] is empty: there is nothing to embed."),
        (["w1", 5], "invalid_type", "input[1]", "input[1] must be a string."),
        ([None, "w1"], "invalid_type", "input[0]", "input[0] must be a string."),
        ([{"text": "w2"}, "w1"], "invalid_type", "input[0]", "input[0] must be a string."),
        (["w1", [5]], "invalid_type", "input[1]", "input[1] must be a string."),
        ([[5], "w1"], "invalid_type", "input[1]", IDS_AS_THE_FIRST),
        ([[5], None], "invalid_type", "input[1]", IDS_AS_THE_FIRST),
        ([[4], 5], "invalid_type", "input[1]", IDS_AS_THE_FIRST),
        ([None, [4]], "invalid_type", "input[0]", "input[0] must be a list of token ids, as input[1] is."),
        (["w1", "a" * 10_000], "input_too_long", "input[1]", None),
        ([[5], []], "empty_input", "input[1]", None),
        ([[5], [64]], "invalid_token_id", "input[1][0]", None),
        ([[5, -1], [5]], "invalid_token_id", "input[0][1]", None),
        ([[5], [5, "w1"]], "invalid_type", "input[1][1]", None),
        ([[5], [5] * (MAX_TOKENS + 1)], "context_length_exceeded", "input[1]", None),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_what_is_wrong_with_one_is_told_of_it(
    server: Running, inputs: list[object], code: str, param: str, message: str | None
) -> None:
    answer = await partial(server.port, inputs)
    wrong = int(param[6])
    assert indexes(answer) == ([1 - wrong], [(wrong, code, param)])
    assert message in (None, answer.json["errors"][0]["error"]["message"])


async def test_where_nothing_is_wrong_there_are_no_errors(server: Running) -> None:
    answer = await partial(server.port, ["w5", "w6"])
    assert answer.json == (await embed(server.port, {"input": ["w5", "w6"]})).json


async def test_many_of_many_may_be_wrong(server: Running) -> None:
    inputs = [f"w{index % 60}" if index % 3 else "" for index in range(300)]
    good, failed = indexes(await partial(server.port, inputs))
    assert good == [index for index in range(300) if index % 3]
    assert [index for index, _, _ in failed] == list(range(0, 300, 3))


@pytest.mark.parametrize(
    ("inputs", "code", "param"),
    [
        (["", TOO_LONG], "context_length_exceeded", "input[1]"),
        ([TOO_LONG, ""], "context_length_exceeded", "input[0]"),
        (["", 5], "empty_input", "input[0]"),
        ([[], [64]], "empty_input", "input[0]"),
        ("", "empty_input", "input"),
        (TOO_LONG, "context_length_exceeded", "input"),
        ([], "empty_input", "input"),
        (None, "invalid_type", "input"),
        ([64], "invalid_token_id", "input[0]"),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_where_all_are_wrong_the_request_fails_as_ever(
    server: Running, inputs: object, code: str, param: str
) -> None:
    answer = await partial(server.port, inputs)
    assert answer.refusal == (400, code, param)
    assert server.stub.submitted == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"partial": "yes"}, "invalid_type", "partial"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"dimensions": 0}, "out_of_range", "dimensions"),
        ({"input": ["w1"] * 2049}, "too_many_inputs", "input"),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_what_is_wrong_with_the_request_itself_fails_all(
    server: Running, fields: dict[str, object], code: str, param: str
) -> None:
    answer = await embed(server.port, {"input": ["w1", "w2"], "partial": True} | fields)
    assert answer.refusal == (
        404 if code == "model_not_found" else 400,
        code,
        param,
    )


async def test_tokens_in_all_are_those_of_the_good_ones(serve: Serve) -> None:
    running = await serve(max_request_tokens=8)
    assert indexes(await partial(running.port, ["w1 w2", TOO_LONG, "w3 w4"])) == (
        [0, 2],
        [(1, "context_length_exceeded", "input[1]")],
    )
    answer = await partial(running.port, ["w1 w2", "", "w3 w4 w5"])
    assert answer.refusal == (400, "too_many_tokens", "input")


async def test_formats_and_dimensions_are_as_ever(server: Running) -> None:
    answer = await partial(server.port, ["", "w5"], encoding_format="base64", dimensions=3)
    [item] = answer.json["data"]
    row = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
    np.testing.assert_array_equal(row, vector([1, 9, 2], dimensions=3))
    assert item["index"] == 1


async def test_with_truncation_a_long_text_is_good(server: Running) -> None:
    assert indexes(await partial(server.port, [TOO_LONG, ""], truncate=True)) == (
        [0],
        [(1, "empty_input", "input[1]")],
    )


async def test_a_prompt_goes_before_each_of_the_good_ones(server: Running) -> None:
    await partial(server.port, ["w5", "", "w6"], prompt_name="query")
    assert server.stub.submitted[0]["sequences"] == [[1, 5, 6, 9, 2], [1, 5, 6, 10, 2]]


async def test_a_prompt_that_is_not_pooled_leaves_spans_of_the_good_ones(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, include_prompt=False))
    answer = await partial(running.port, ["w5", TOO_LONG, "w5 w6"], prompt_name="query")
    assert indexes(answer) == ([0, 2], [(1, "context_length_exceeded", "input[1]")])
    assert running.stub.submitted[0]["spans"] == [[[3, 5]], [[3, 6]]]


async def test_a_bare_matrix_cannot_be_partial(server: Running) -> None:
    body = {"input": ["w5", ""], "partial": True}
    answer = await embed(server.port, body, {"Accept": "application/octet-stream"})
    assert answer.refusal == (400, "unsupported_parameter", "partial")
    assert server.stub.submitted == []


@pytest.mark.parametrize("error", [NonfiniteOutput, InternalError])
async def test_what_the_model_fails_on_is_told_of_it_and_the_others_run_again(
    server: Running, error: type[ServiceError], metrics: Metrics
) -> None:
    fail_on(server, 13, error=error)  # w9
    before = metrics.inputs._value.get()
    answer = await partial(server.port, ["w5", "", "w9", "w6"])
    assert indexes(answer) == ([0, 3], [(1, "empty_input", "input[1]"), (2, error.default_code, "input[2]")])
    found = [item["embedding"] for item in answer.json["data"]]
    np.testing.assert_allclose(found, [vector([1, 9, 2]), vector([1, 10, 2])], rtol=1e-6)
    assert [len(sent["sequences"]) for sent in server.stub.submitted] == [3, 2]
    assert metrics.inputs._value.get() - before == 2
    assert answer.json["usage"]["prompt_tokens"] == 6


async def test_spans_stay_with_their_sequences_when_one_is_dropped(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, include_prompt=False))
    fail_on(running, 13)
    answer = await partial(running.port, ["w9", "w5 w6 w7", "w8"], prompt_name="query")
    assert indexes(answer) == ([1, 2], [(0, "nonfinite_output", "input[0]")])
    assert running.stub.submitted[1]["spans"] == [[[3, 7]], [[3, 5]]]


async def test_where_the_model_fails_on_all_of_them_the_request_fails(server: Running) -> None:
    fail_on(server, 13)
    answer = await partial(server.port, ["w9", "", "w9 w9"])
    assert answer.refusal == (500, "nonfinite_output", "input[2]")


@pytest.mark.slow
async def test_so_many_that_the_model_fails_on_end_the_request_and_no_number_that_are_wrong(server: Running) -> None:
    fail_on(server, 13)
    at_most = await partial(server.port, ["w9"] * 64 + ["w5"])
    more = await partial(server.port, ["w9"] * 65 + ["w5"])
    server.stub.submitted.clear()
    wrong = await partial(server.port, ["w1", "w9", *[""] * 200])
    assert (at_most.status, len(at_most.json["errors"])) == (200, 64)
    assert (more.status, more.error["code"]) == (500, "nonfinite_output")
    assert (wrong.status, len(wrong.json["data"]), len(wrong.json["errors"])) == (200, 1, 201)
    assert len(server.stub.submitted) == 2


@pytest.mark.parametrize("error", [Overloaded("full"), DeadlineExceeded("late"), InternalError("of no input")])
async def test_what_is_no_inputs_fault_fails_all(server: Running, error: ServiceError) -> None:
    server.stub.error = error
    answer = await partial(server.port, ["w5", "w6"])
    assert (answer.status, answer.error["code"]) == (error.status, error.code)
    assert len(server.stub.submitted) == 1


async def test_a_row_that_is_not_finite_when_it_is_written_is_an_error(server: Running) -> None:
    server.stub.poison = float("nan")
    answer = await partial(server.port, ["w1", "", "w2"])
    assert answer.refusal == (500, "nonfinite_output", "input[2]")


async def test_a_token_without_a_vector_is_told_of_its_own_text(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, vocab_size=63))
    assert indexes(await partial(running.port, ["w1", "w59", "w2"])) == ([0, 2], [(1, "invalid_token_id", "input[1]")])
