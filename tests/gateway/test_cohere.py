"""/v2/embed and /v1/embed: what Cohere's clients are answered with. (int8 and bits are in test_quantised.py.)"""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import pytest

from common.wire.messages import ModelFacts
from tests.gateway.conftest import DIMENSIONS, Running, Serve, vector
from tests.gateway.wire import Answer, post

# The ids of "w5 w6", alone and with the query prompt before it, and of "w7".
W5_W6 = [1, 9, 10, 2]
QUERY_W5_W6 = [1, 5, 6, 9, 10, 2]
W7 = [1, 11, 2]

LONG = " ".join(f"w{index}" for index in range(20))  # of 22 tokens, where the model takes 16


async def embed(port: int, fields: object, path: str = "/v2/embed") -> Answer:
    return await post(port, path, fields)


async def sequences(running: Running, fields: dict[str, object]) -> list[list[int]]:
    """The token ids that a good request comes to."""
    answer = await embed(running.port, fields)
    assert answer.status == 200, answer.body
    found: list[list[int]] = running.stub.submitted[-1]["sequences"]
    return found


async def test_texts_are_answered_in_the_form_that_cohere_clients_read(server: Running) -> None:
    fields = {"model": "tiny", "texts": ["w5 w6", "w7"], "input_type": "search_document", "embedding_types": ["float"]}
    answer = await post(server.port, "/v2/embed", fields, {"X-Request-Id": "r1"})
    assert answer.status == 200
    assert answer.json == {
        "id": "r1",
        "embeddings": {"float": [pytest.approx(vector(ids).tolist()) for ids in (W5_W6, W7)]},
        "texts": ["w5 w6", "w7"],
        "response_type": "embeddings_by_type",
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 7}},
    }


@pytest.mark.parametrize("embedding_types", [None, ["float"], ["float", "float"]])
async def test_float_is_the_type_unless_others_are_named(server: Running, embedding_types: list[str] | None) -> None:
    answer = await embed(server.port, {"texts": ["w7"], "embedding_types": embedding_types})
    assert answer.json["embeddings"] == {"float": [pytest.approx(vector(W7).tolist())]}


async def test_base64_is_that_of_float32_and_of_the_same_run(server: Running) -> None:
    answer = await embed(server.port, {"texts": ["w5 w6", "w7"], "embedding_types": ["base64", "float"]})
    assert list(answer.json["embeddings"]) == ["base64", "float"]
    rows = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in answer.json["embeddings"]["base64"]]
    np.testing.assert_array_equal(rows, [vector(W5_W6), vector(W7)])
    np.testing.assert_allclose(answer.json["embeddings"]["float"], rows, rtol=1e-6)
    assert len(server.stub.submitted) == 1


async def test_version_1_without_types_has_bare_vectors_and_with_them_answers_by_type(server: Running) -> None:
    bare = (await embed(server.port, {"texts": ["w5 w6"]}, "/v1/embed")).json
    by_type = (await embed(server.port, {"texts": ["w5 w6"], "embedding_types": ["float"]}, "/v1/embed")).json
    row = pytest.approx(vector(W5_W6).tolist())
    assert (bare["response_type"], bare["embeddings"]) == ("embeddings_floats", [row])
    assert (by_type["response_type"], by_type["embeddings"]) == ("embeddings_by_type", {"float": [row]})
    assert bare["meta"]["api_version"] == {"version": "1"}


async def test_inputs_hold_one_text_each(server: Running) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in ("w5 w6", "w7")]
    answer = await embed(server.port, {"inputs": inputs})
    assert answer.json["embeddings"]["float"] == [pytest.approx(vector(ids).tolist()) for ids in (W5_W6, W7)]
    assert answer.json["texts"] == ["w5 w6", "w7"]


async def test_output_dimension_cuts_the_vector_and_normalises_it_again(server: Running) -> None:
    answer = await embed(server.port, {"texts": ["w5 w6"], "output_dimension": 3})
    assert answer.json["embeddings"]["float"] == [pytest.approx(vector(W5_W6, dimensions=3).tolist())]


@pytest.mark.parametrize(
    ("input_type", "ids"),
    [
        ("search_query", QUERY_W5_W6),
        ("query", QUERY_W5_W6),
        ("search_document", W5_W6),
        ("classification", W5_W6),
        ("clustering", W5_W6),
        (None, W5_W6),
    ],
)
async def test_an_input_type_is_the_checkpoints_prompt_for_it(
    server: Running, input_type: str | None, ids: list[int]
) -> None:
    assert await sequences(server, {"texts": ["w5 w6"], "input_type": input_type}) == [ids]


@pytest.mark.parametrize(
    ("input_type", "name"),
    [
        ("query", "search_query"),
        ("search_query", "search_query"),
        ("document", "search_document"),
        ("document", "passage"),
        ("search_document", "corpus"),
        ("classification", "Classification"),
        ("clustering", "clustering"),
    ],
)
async def test_a_prompt_goes_by_several_names(serve: Serve, facts: ModelFacts, input_type: str, name: str) -> None:
    running = await serve(served=dataclasses.replace(facts, prompts={"other": "w9 ", name: "w1 w2 "}))
    assert await sequences(running, {"texts": ["w5 w6"], "input_type": input_type}) == [QUERY_W5_W6]


async def test_without_an_input_type_the_checkpoints_default_prompt_is_used(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, default_prompt_name="query"))
    assert await sequences(running, {"texts": ["w5 w6"]}) == [QUERY_W5_W6]
    assert await sequences(running, {"texts": ["w5 w6"], "input_type": "clustering"}) == [W5_W6]


@pytest.mark.parametrize(
    ("truncate", "words"),
    [(None, range(14)), ("END", range(14)), (True, range(14)), ("START", range(6, 20))],
)
async def test_what_is_too_long_is_cut_at_its_end_unless_said_otherwise(
    server: Running, truncate: str | bool | None, words: range
) -> None:
    fields = {"texts": [LONG], "truncate": truncate}
    assert await sequences(server, fields) == [[1, *(word + 4 for word in words), 2]]


@pytest.mark.parametrize(
    ("fields", "code", "param", "said"),
    [
        ({"texts": ["w1", LONG], "truncate": "NONE"}, "context_length_exceeded", "texts[1]", "at most 16"),
        ({"texts": ["w1", LONG], "truncate": False}, "context_length_exceeded", "texts[1]", "at most 16"),
        (
            {"texts": ["w1 w2 w3"], "max_tokens": 4, "truncate": "NONE"},
            "context_length_exceeded",
            "texts[0]",
            "5 tokens; max_tokens allows at most 4",
        ),
        ({"texts": ["w1 w2 w3"] * 7}, "too_many_tokens", "texts", "30"),
    ],
    ids=["NONE", "false", "max_tokens", "in all"],
)
async def test_what_is_too_long_is_refused_where_nothing_may_be_cut(
    serve: Serve, fields: dict[str, object], code: str, param: str, said: str
) -> None:
    running = await serve(max_request_tokens=30)
    answer = await embed(running.port, fields)
    assert answer.refusal == (400, code, param)
    assert said in answer.error["message"]
    assert running.stub.submitted == []


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"max_tokens": 4}, [1, 5, 6, 2]),
        ({"max_tokens": 4, "truncate": "START"}, [1, 6, 7, 2]),
        ({"max_tokens": 5, "truncate": "NONE"}, [1, 5, 6, 7, 2]),
        ({"max_tokens": 1000}, [1, 5, 6, 7, 2]),
        ({"max_tokens": 4, "input_type": "query"}, [1, 5, 6, 2]),  # a prompt counts
    ],
)
async def test_max_tokens_is_a_limit_of_the_clients_own(
    server: Running, fields: dict[str, object], ids: list[int]
) -> None:
    assert await sequences(server, {"texts": ["w1 w2 w3"], **fields}) == [ids]


async def test_requests_with_other_limits_are_not_tokenized_as_one(server: Running) -> None:
    fields = [{"texts": ["w1 w2 w3"], "max_tokens": 3 + index % 3} for index in range(12)]
    answers = [await embed(server.port, one) for one in fields]
    tokens = [answer.json["meta"]["billed_units"]["input_tokens"] for answer in answers]
    assert tokens == [3, 4, 5] * 4


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"texts": None}, "invalid_type", "texts"),
        ({"texts": "w1"}, "invalid_type", "texts"),
        ({"texts": []}, "empty_input", "texts"),
        ({"texts": ["w1", ""]}, "empty_input", "texts[1]"),
        ({"texts": [[5]]}, "invalid_type", "texts[0]"),
        ({"texts": ["w1"] * 4}, "too_many_inputs", "texts"),
        ({"inputs": [{"content": [{"type": "text", "text": "w1"}]}]}, "invalid_value", "inputs"),
        ({"texts": None, "inputs": "w1"}, "invalid_type", "inputs"),
        ({"texts": None, "inputs": []}, "empty_input", "inputs"),
        ({"texts": None, "inputs": ["w1"]}, "invalid_type", "inputs[0]"),
        ({"texts": None, "inputs": [{"content": "w1"}]}, "invalid_type", "inputs[0]"),
        ({"texts": None, "inputs": [{"content": []}]}, "unsupported_parameter", "inputs[0].content"),
        *(
            ({"texts": None, "inputs": [{"content": [content]}]}, code, f"inputs[0].content[0]{place}")
            for content, code, place in (
                ("w1", "invalid_type", ""),
                ({"type": "text"}, "invalid_type", ""),
                ({"type": "text", "text": ""}, "empty_input", ".text"),
                ({"type": "image_url", "image_url": {"url": "data:,"}}, "unsupported_parameter", ".type"),
            )
        ),
        ({"images": ["data:,"]}, "unsupported_parameter", "images"),
        ({"embedding_types": []}, "invalid_type", "embedding_types"),
        ({"embedding_types": ["float16"]}, "invalid_value", "embedding_types[0]"),
        ({"embedding_types": ["float", "int8"]}, "unsupported_parameter", "embedding_types"),
        ({"output_dimension": 0}, "out_of_range", "output_dimension"),
        ({"output_dimension": DIMENSIONS + 1}, "out_of_range", "output_dimension"),
        ({"max_tokens": 0}, "out_of_range", "max_tokens"),
        ({"max_tokens": 2}, "out_of_range", "max_tokens"),
        ({"truncate": "end"}, "invalid_value", "truncate"),
        ({"input": "w1"}, "unknown_field", "input"),
    ],
    ids=repr,
)
async def test_what_is_wrong_is_told_by_field(serve: Serve, fields: dict[str, object], code: str, param: str) -> None:
    running = await serve(max_inputs=3)
    answer = await embed(running.port, {"texts": ["w1"], **fields})
    assert answer.refusal == (400, code, param)
    assert running.stub.submitted == []


async def test_a_type_that_the_model_does_not_make_is_refused_and_those_it_makes_named(server: Running) -> None:
    answer = await embed(server.port, {"texts": ["w1"], "embedding_types": ["ubinary"]})
    assert answer.error["message"].endswith("use one of: float.")


async def test_the_start_is_not_cut_off_where_a_prompt_would_go_with_it(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, include_prompt=False))
    answer = await embed(running.port, {"texts": ["w1"], "input_type": "query", "truncate": "START"})
    assert answer.refusal == (400, "unsupported_parameter", "truncate")
