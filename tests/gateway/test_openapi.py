"""/openapi.json is true: every route is in it, every answer is as it says, and what it allows is answered.

What schemathesis makes of the document goes to a real gateway; tests that need less have their requests here.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
import schemathesis

from common import errors
from common.wire.messages import ModelFacts, Trace
from gateway import openapi
from gateway.error_responses import ErrorBody
from gateway.routes import cohere, contextual, openai, operations, rerank, tei, tei_scores
from gateway.status import Readiness
from gateway.trace import RequestTrace
from tests.gateway.bad_input import Case, read_table
from tests.gateway.conftest import DIMENSIONS, VOCAB_SIZE, Running, Serve
from tests.gateway.wire import Answer, Wire, ask

BEARER = {"Authorization": "Bearer sesame"}
HEADERS = ["X-Request-Timeout-Ms", "X-Trace", "X-Model"]  # that requests which run a model may have


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(openapi.document(version("hedgerow")))


@pytest.fixture
async def server(serve: Serve, everything: ModelFacts) -> Running:
    return await serve(served=dataclasses.replace(everything, max_tokens=512))


# --- the document ---


@pytest.mark.slow
def test_the_document_is_of_openapi_3_1(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    untitled = document | {"info": {"version": "1"}}
    with pytest.raises(jsonschema_rs.ValidationError, match="title"):
        schemathesis.openapi.from_dict(untitled).validate()


def test_every_type_in_it_is_a_json_schema(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.Draft202012Validator(schema | {"components": document["components"]})


async def test_every_route_is_in_it_with_its_methods_and_nothing_else(
    server: Running, document: dict[str, Any]
) -> None:
    routes = [*server.gateway._routes.values(), server.gateway._model_route]
    served = {(route.pattern, method.lower()) for route in routes for method in route.handlers if method != "HEAD"}
    described = {(path, method) for path, found in document["paths"].items() for method in found}
    assert described == served


async def test_it_is_served_as_it_is_made(server: Running, document: dict[str, Any]) -> None:
    answer = await ask(server.port, "GET", "/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == document


def test_what_a_followed_request_is_told_is_as_the_document_says(document: dict[str, Any]) -> None:
    described = document["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["headers"]
    trace = RequestTrace()
    trace.add(Trace(1, 5, "worker-0", 2, 30, np.arange(1100, 1112)), heard_ns=1200)

    headers = trace.headers((1000, 1001, 1002, 1003), (1300, 1400), "parse;dur=0.001")

    assert set(headers) == set(described) == {"Server-Timing", "X-Trace"}
    followed = json.loads(headers["X-Trace"])
    schema = described["X-Trace"]["content"]["application/json"]["schema"]
    jsonschema_rs.validate(schema | {"components": document["components"]}, followed)
    assert followed == {
        "pid": os.getpid(),
        "start_ns": 1000,
        "before_ns": [0, 1, 2, 3],
        "after_ns": [300, 400],
        "pieces": [
            {"batch": 5, "worker": "worker-0", "sequences": 2, "tokens": 30, "times_ns": [*range(100, 112), 200]}
        ],
    }


def test_bodies_say_what_the_routes_take(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["EmbeddingsBody"]["required"] == ["input"]
    assert schemas["EmbeddingsBody"]["additionalProperties"] is False
    assert schemas["EmbeddingsBody"]["properties"]["dimensions"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert schemas["EmbeddingsBody"]["properties"]["stream"]["enum"] == [False, None]
    assert schemas["RerankBody"]["required"] == ["query", "documents"]
    assert schemas["RerankBody"]["properties"]["documents"]["maxItems"] == 1000


# --- answers ---

EMBEDDINGS = {"input": ["w5 w6", "w7"]}
RERANK = {"query": "w1", "documents": ["w5", {"text": "w6 w7"}]}
CHUNKS = {"input": [["w5", "w6"], ["w7"]]}
COHERE = {"texts": ["w5 w6", "w7"], "input_type": "search_query"}
RANK = {"query": "w1", "texts": ["w5", "w6 w7"]}
SIMILARITY = {"inputs": {"source_sentence": "w1", "sentences": ["w5", "w6"]}}

ANSWERS: list[tuple[str, str, dict[str, object] | None, Any]] = [
    ("GET", "/health", None, operations.Health),
    ("GET", "/ready", None, operations.Ready),
    ("GET", "/v1/models", None, operations.ModelList),
    ("GET", "/v1/models/tiny", None, operations.ModelCard),
    ("GET", "/info", None, operations.Info),
    ("POST", "/v1/embeddings", EMBEDDINGS, openai.Embeddings),
    ("POST", "/v1/embeddings", {"input": "w5"}, openai.Embeddings),
    ("POST", "/v1/embeddings", EMBEDDINGS | {"encoding_format": "base64", "dimensions": 3}, openai.Embeddings),
    ("POST", "/v1/embeddings", {"input": ["w5", "", 5], "partial": True}, openai.Embeddings),
    ("POST", "/v1/contextualizedembeddings", CHUNKS, contextual.ContextualEmbeddings),
    (
        "POST",
        "/v1/contextualizedembeddings",
        CHUNKS | {"encoding_format": "base64"},
        contextual.ContextualEmbeddings,
    ),
    *(("POST", path, RERANK, rerank.Reranked) for path in rerank.RERANK_PATHS),
    ("POST", "/rerank", RERANK | {"return_documents": True, "raw_scores": True, "top_n": 1}, rerank.Reranked),
    ("POST", "/rerank", RERANK | {"top_k": None, "truncation": True, "return_documents": True}, rerank.Reranked),
    *(("POST", path, {"text_1": "w1", "text_2": ["w5", "w6"]}, rerank.Scores) for path in rerank.SCORE_PATHS),
    ("POST", "/v2/embed", COHERE, cohere.Embedded),
    ("POST", "/v2/embed", COHERE | {"embedding_types": ["base64", "float"]}, cohere.Embedded),
    ("POST", "/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "w5"}]}]}, cohere.Embedded),
    ("POST", "/v1/embed", COHERE, cohere.EmbeddedV1),
    ("POST", "/v1/embed", COHERE | {"embedding_types": ["float"]}, cohere.EmbeddedV1),
    ("POST", "/embed", {"inputs": "w5", "dimensions": 3}, tei.EMBED.answer),
    ("POST", "/embed_all", {"inputs": ["w5 w6", "w7"]}, tei.EMBED_ALL.answer),
    ("POST", "/embed_sparse", {"inputs": ["w5 w6", "w7"]}, tei.EMBED_SPARSE.answer),
    ("POST", "/similarity", SIMILARITY, tei.SIMILARITY.answer),
    ("POST", "/tokenize", {"inputs": ["w5 w6", "w7"]}, tei.TOKENIZE.answer),
    ("POST", "/decode", {"ids": [[1, 5, 2], [6]]}, tei.DECODE.answer),
    ("POST", "/rerank", RANK, tei_scores.RERANK.answer),
    ("POST", "/rerank", RANK | {"return_text": True}, tei_scores.RERANK.answer),
    ("POST", "/predict", {"inputs": "w5"}, tei_scores.PREDICT.answer),
    ("POST", "/predict", {"inputs": [["w5"], ["w6", "w7"]]}, tei_scores.PREDICT.answer),
    ("POST", "/predict", {"inputs": "w5", "parameters": {"top_k": 1}}, tei_scores.CLASSIFY.answer),
    ("POST", "/", {"inputs": "w5"}, tei_scores.PREDICT.answer),
    ("POST", "/", {"inputs": "w5", "parameters": None}, tei_scores.CLASSIFY.answer),
    ("POST", "/", RANK, tei_scores.RERANK.answer),
]

# What a POST to the root means to a model that does not score.
ROOT_ANSWERS: list[tuple[str, dict[str, object], Any]] = [
    ("embed", {"inputs": ["w5", "w6"]}, tei.EMBED.answer),
    ("embed", SIMILARITY | {"parameters": {}}, tei.SIMILARITY.answer),
    ("sparse", {"inputs": ["w5", "w6"]}, tei.EMBED_SPARSE.answer),
]


def pattern_of(document: dict[str, Any], target: str) -> str:
    """The path of the document that a target means."""
    path = target.partition("?")[0]
    return "/v1/models/{id}" if path.startswith("/v1/models/") else path if path in document["paths"] else ""


def check_described(document: dict[str, Any], method: str, target: str, answer: Answer) -> None:
    """An answer has a status that its operation names, and a body of the type that stands there."""
    operation = document["paths"][pattern_of(document, target)][method.lower()]
    content = operation["responses"][str(answer.status)]["content"]
    schema = content[answer.headers["content-type"]]["schema"]
    jsonschema_rs.Draft202012Validator(schema | {"components": document["components"]}).validate(answer.json)


@pytest.mark.parametrize(
    ("method", "path", "body", "answer_type"), ANSWERS, ids=[f"{index} {row[1]}" for index, row in enumerate(ANSWERS)]
)
async def test_an_answer_is_of_the_type_that_declares_it_and_of_its_schema(
    server: Running,
    document: dict[str, Any],
    method: str,
    path: str,
    body: dict[str, object] | None,
    answer_type: type[msgspec.Struct],
) -> None:
    answer = await ask(server.port, method, path, None if body is None else json.dumps(body).encode())
    check_declared(document, method, path, answer, answer_type)


@pytest.mark.parametrize(("task", "body", "answer_type"), ROOT_ANSWERS)
async def test_an_answer_of_the_root_is_of_the_type_that_the_models_task_declares(
    serve: Serve,
    everything: ModelFacts,
    document: dict[str, Any],
    task: str,
    body: dict[str, object],
    answer_type: type[msgspec.Struct],
) -> None:
    running = await serve(served=dataclasses.replace(everything, tasks=[task]))
    answer = await ask(running.port, "POST", "/", json.dumps(body).encode())
    check_declared(document, "POST", "/", answer, answer_type)


def check_declared(document: dict[str, Any], method: str, target: str, answer: Answer, answer_type: type) -> None:
    """An answer is as the document says, and as the type does."""
    assert answer.status == 200, answer.body
    check_described(document, method, target, answer)
    # Nothing is written that is not declared, and nothing declared is missing: both would be lost on the way back.
    assert msgspec.to_builtins(msgspec.json.decode(answer.body, type=answer_type)) == answer.json


async def test_the_bare_matrix_is_described(server: Running, document: dict[str, Any]) -> None:
    octets = await ask(server.port, "POST", "/v1/embeddings", b'{"input":"w5"}', {"Accept": "application/octet-stream"})
    contents = document["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["content"]
    assert octets.headers["content-type"] in contents


@pytest.mark.parametrize("path", ["/metrics", "/", "/docs"])
async def test_text_is_described(server: Running, document: dict[str, Any], path: str) -> None:
    answer = await ask(server.port, "GET", path)
    [content_type] = document["paths"][path]["get"]["responses"]["200"]["content"]
    assert answer.headers["content-type"].partition(";")[0] == content_type


async def test_not_ready_is_described(server: Running, document: dict[str, Any]) -> None:
    server.stub.status = Readiness("unavailable", 0, 1, "No worker is ready.")
    answer = await ask(server.port, "GET", "/ready")
    assert answer.status == 503
    check_described(document, "GET", "/ready", answer)
    assert msgspec.to_builtins(msgspec.json.decode(answer.body, type=operations.Ready)) == answer.json


# --- errors ---

FAILURES = [
    errors.Overloaded("full"),
    errors.InternalError("bug"),
    errors.NonfiniteOutput("nan", sequence=0),
    errors.Unavailable("none"),
    errors.ShuttingDown("stopping"),
    errors.InputQuarantined("died", sequence=0),
    errors.InputTooLarge("long", sequence=0),
    errors.DeadlineExceeded("late"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: error.code)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", EMBEDDINGS),
        ("/v1/contextualizedembeddings", CHUNKS),
        ("/rerank", RERANK),
        ("/score", {"text_1": "w1", "text_2": "w5"}),
        ("/v2/embed", COHERE),
        ("/embed", {"inputs": "w5"}),
        ("/similarity", SIMILARITY),
        ("/predict", {"inputs": "w5"}),
        ("/", RANK),
    ],
)
async def test_a_failure_of_the_scheduler_is_described(
    server: Running, document: dict[str, Any], error: errors.ServiceError, path: str, body: dict[str, object]
) -> None:
    server.stub.error = error
    answer = await ask(server.port, "POST", path, json.dumps(body).encode())
    assert (answer.status, answer.error["code"]) == (error.status, error.code)
    check_described(document, "POST", path, answer)


def test_every_error_that_a_route_raises_has_its_status_in_the_document(document: dict[str, Any]) -> None:
    statuses = {error.status for error in _subclasses(errors.ServiceError) if error.__module__ == "common.errors"}
    described = {int(status) for status in document["paths"]["/v1/embeddings"]["post"]["responses"]}
    assert statuses <= described


def _subclasses(base: type[errors.ServiceError]) -> set[type[errors.ServiceError]]:
    return {base}.union(*map(_subclasses, base.__subclasses__()))


def described_cases(document: dict[str, Any], *scenes: str) -> list[Case]:
    """The cases of bad input that come over a route, as it should be used or otherwise."""
    cases = [case for case in read_table().cases if case.scene in scenes and case.code and not case.needs]
    paths = [(case, document["paths"].get(pattern_of(document, case.target), {})) for case in cases if not case.raw]
    return [case for case, operations in paths if case.method.lower() in operations]


@pytest.mark.slow
async def test_every_answer_to_bad_input_is_described(
    serve: Serve, facts: ModelFacts, scoring: ModelFacts, document: dict[str, Any]
) -> None:
    limits = {"max_inputs": 20, "max_body_bytes": 1_000_000, "max_request_tokens": 200}
    num_checked = 0
    for scene, served in (("embeddings", facts), ("scores", scoring)):
        running = await serve(served=served, **limits)
        for case in described_cases(document, scene):
            wire = await Wire.connect(running.port)
            answer = await wire.ask(case.sent)
            await wire.close()
            assert (answer.status, answer.error["code"]) == (case.status, case.code), case
            check_described(document, case.method, case.target, answer)
            assert msgspec.to_builtins(msgspec.json.decode(answer.body, type=ErrorBody)) == answer.json
            num_checked += 1
    assert num_checked > 150


@pytest.mark.parametrize(
    "target",
    ["/ready", "/v1/models", "/v1/models/tiny", "/info", "/openapi.json", "/v1/embeddings", "/", "/docs", "/tokenize"],
)
async def test_a_missing_key_and_a_wrong_method_are_described(
    serve: Serve, document: dict[str, Any], target: str
) -> None:
    running = await serve(api_key="sesame")
    method = next(iter(document["paths"][pattern_of(document, target)]))
    locked = await ask(running.port, method.upper(), target, headers={"X-Forwarded-For": "192.0.2.1"})
    if target != "/ready":
        assert locked.status == 401
        check_described(document, method, target, locked)
    wrong = await ask(running.port, "DELETE", target, headers=BEARER | {"Connection": "close"})
    assert wrong.status == 405
    check_described(document, method, target, wrong)


# --- schemathesis ---

# /openapi.json is the same whatever is served: it cannot say how many dimensions a model has, or which fields exclude
# each other. `narrowed` says it for one model, so that all it allows must be answered. Whole numbers are lists of them,
# since in a JSON schema 58.0 is one, and here it is none.
WORD = {"type": "string", "pattern": "^w[0-9]( w[0-9]){0,3}$"}  # few tokens, each of them known
WORDS = {"type": "array", "items": WORD, "minItems": 1, "maxItems": 8}
IDS = {"type": "array", "items": {"enum": list(range(VOCAB_SIZE))}, "minItems": 1, "maxItems": 8}
DOCUMENT = {"anyOf": [WORD, {"type": "object", "properties": {"text": WORD}, "required": ["text"]}]}
LISTS_OF_IDS = {"type": "array", "items": IDS, "minItems": 1, "maxItems": 8}
TEXTS_OR_IDS = {"anyOf": [WORD, WORDS, IDS, LISTS_OF_IDS]}
PAIR = WORDS | {"maxItems": 2}
LABELLED = {"inputs": {"anyOf": [WORD, PAIR, {"type": "array", "items": PAIR, "minItems": 1, "maxItems": 4}]}}
FORMATS = {"enum": ["float", "base64", None]}  # there is no quantiser
NARROWED: dict[str, dict[str, Any]] = {  # None: it excludes something else
    "EmbeddingsBody": {"input": TEXTS_OR_IDS, "encoding_format": FORMATS, "input_type": None, "output_dimension": None},
    "ContextualBody": {"input": {"type": "array", "items": WORDS, "minItems": 1, "maxItems": 4}}
    | {"encoding_format": FORMATS},
    "RerankBody": {
        "query": WORD,
        "documents": {"type": "array", "items": DOCUMENT, "minItems": 1, "maxItems": 8},
        "top_n": {"enum": [1, 2, 1000, None]},
        "top_k": None,
        "max_tokens_per_doc": {"enum": [1, 2, 1000, None]},
    },
    "ScoreBody": {"text_1": WORD, "text_2": {"anyOf": [WORD, WORDS]}},  # else as many of the one as of the other
    "gateway.routes.cohere.EmbedBody": {
        "texts": WORDS,
        "inputs": None,
        "embedding_types": {"type": "array", "items": {"enum": ["float", "base64"]}, "minItems": 1},
        "max_tokens": {"enum": [64, 1000, None]},
    },
    "gateway.routes.tei.EmbedBody": {"inputs": TEXTS_OR_IDS},
    "EmbedAllBody": {"inputs": TEXTS_OR_IDS},
    "SimilarityInputs": {"source_sentence": WORD, "sentences": WORDS},
    "SimilarityParameters": {},
    "SimilarityBody": {},
    "TokenizeBody": {"inputs": {"anyOf": [WORD, WORDS]}},
    "DecodeBody": {"ids": {"anyOf": [IDS, LISTS_OF_IDS]}},
    "RankBody": {"query": WORD, "texts": WORDS},
    "PredictBody": LABELLED,
    "ClassifyBody": LABELLED,
    "ClassifyParameters": {"top_k": {"enum": [1, 2, 1000, None]}},
}
DIMENSIONS_ASKED = {"enum": [1, 8, DIMENSIONS, None]}
NARROWED_EVERYWHERE: dict[str, Any] = {
    "model": {"enum": ["tiny", "some-org/tiny"]},
    "dimensions": DIMENSIONS_ASKED,
    "output_dimension": DIMENSIONS_ASKED,
    # Prompts exclude token ids and each other, and Voyage's words ours; an instruction needs a template.
    **dict.fromkeys(("prompt", "prompt_name", "truncation", "output_dtype", "instruction")),
}


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    for name, fields in NARROWED.items():
        properties = schemas[name]["properties"]
        for field, found in (NARROWED_EVERYWHERE | fields).items():
            if found is None:
                properties.pop(field, None)
            elif field in properties:
                properties[field] = found
    schemas["gateway.routes.cohere.EmbedBody"]["required"] = ["texts"]
    # What is posted to the root is for the model's own task.
    root = document["paths"]["/"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    root["anyOf"] = [{"$ref": f"#/components/schemas/{name}"} for name in ("ClassifyBody", "RankBody", "PredictBody")]
    for operation in _operations_in_time(document):
        operation["parameters"][0]["schema"]["minimum"] = 60_000
    return document


def unhurried(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the header that sets a deadline: a millisecond is rightly answered with 504, and were
    60,000 the least, less would be held to be wrong. What is wrong there is a row of bad_input.toml."""
    document = copy.deepcopy(document)
    for operation in _operations_in_time(document):
        del operation["parameters"][0]
    return document


def _operations_in_time(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that take a deadline."""
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    found = [operation for operation in operations if "requestBody" in operation]
    assert all([parameter["name"] for parameter in one["parameters"]] == HEADERS for one in found)
    return found


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "flags", "least"),
    [
        # Wrong requests and right ones. That right ones are accepted cannot be asked of a document that does not know
        # the model.
        (unhurried, ("--mode", "all", "--max-examples", "60", "--exclude-checks", "positive_data_acceptance"), 3000),
        (narrowed, ("--mode", "positive", "--max-examples", "45"), 1500),
    ],
    ids=["anything", "what is right"],
)
async def test_schemathesis_finds_nothing(
    server: Running,
    document: dict[str, Any],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    flags: tuple[str, ...],
    least: int,
) -> None:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(change(document)))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path)]
    command += ["--url", f"http://127.0.0.1:{server.port}", "--phases", "coverage,fuzzing", "--no-color", *flags]
    command += ["--seed", "1", "--generation-deterministic"]
    ended = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", ended.stdout)
    assert found is not None, ended.stdout
    assert int(found[1]) == int(found[2]) >= least
