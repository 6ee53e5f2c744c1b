"""/openapi.json is true: every route is in it, every answer is as it says, and what it allows is answered.

What schemathesis makes of the document goes to a real gateway; tests that need less have their requests here.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis

from common import errors
from common.protocol import ModelFacts
from gateway import openapi
from gateway.answers import ErrorBody
from gateway.client import Readiness
from gateway.routes import contextual, openai, operations, rerank
from tests.gateway.bad_input import Case, read_table
from tests.gateway.conftest import DIMENSIONS, VOCAB_SIZE, Running, Serve
from tests.gateway.wire import Answer, Wire, ask

BEARER = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(openapi.document())


@pytest.fixture(scope="module")
def everything(scoring: ModelFacts) -> ModelFacts:
    """A model that answers on every route: it embeds, also chunks, and scores."""
    return dataclasses.replace(
        scoring, dimensions=DIMENSIONS, normalize=True, tasks=["embed", "score"], separator_id=2, max_tokens=512
    )


@pytest.fixture
async def server(serve: Serve, everything: ModelFacts) -> Running:
    return await serve(served=everything)


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
    served = {(route.pattern, method.lower()) for route in routes for method in route.methods if method != "HEAD"}
    described = {(path, method) for path, found in document["paths"].items() for method in found}
    assert described == served


async def test_it_is_served_as_it_is_made(server: Running, document: dict[str, Any]) -> None:
    answer = await ask(server.port, "GET", "/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == document


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
    assert answer.status == 200, answer.body
    check_described(document, method, path, answer)
    # Nothing is written that is not declared, and nothing declared is missing: both would be lost on the way back.
    assert msgspec.to_builtins(msgspec.json.decode(answer.body, type=answer_type)) == answer.json


async def test_the_bare_matrix_and_the_metrics_are_described(server: Running, document: dict[str, Any]) -> None:
    octets = await ask(server.port, "POST", "/v1/embeddings", b'{"input":"w5"}', {"Accept": "application/octet-stream"})
    contents = document["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["content"]
    assert octets.headers["content-type"] in contents
    metrics = await ask(server.port, "GET", "/metrics")
    contents = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert metrics.headers["content-type"].partition(";")[0] in contents


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
    errors.NonfiniteOutput("nan", param="input[0]"),
    errors.Unavailable("none"),
    errors.ShuttingDown("stopping"),
    errors.InputQuarantined("died", param="input[0]"),
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
            await wire.send(case.sent)
            answer = await wire.answer()
            await wire.close()
            assert (answer.status, answer.error["code"]) == (case.status, case.code), case
            check_described(document, case.method, case.target, answer)
            assert msgspec.to_builtins(msgspec.json.decode(answer.body, type=ErrorBody)) == answer.json
            num_checked += 1
    assert num_checked > 150


@pytest.mark.parametrize(
    "target", ["/ready", "/v1/models", "/v1/models/tiny", "/info", "/openapi.json", "/v1/embeddings"]
)
async def test_a_missing_key_and_a_wrong_method_are_described(
    serve: Serve, document: dict[str, Any], target: str
) -> None:
    running = await serve(api_key="sesame")
    [method] = document["paths"][pattern_of(document, target)]
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
NARROWED: dict[str, dict[str, Any]] = {
    "EmbeddingsBody": {
        "input": {"anyOf": [WORD, WORDS, IDS, {"type": "array", "items": IDS, "minItems": 1, "maxItems": 8}]}
    },
    "ContextualBody": {"input": {"type": "array", "items": WORDS, "minItems": 1, "maxItems": 4}},
    "RerankBody": {
        "query": WORD,
        "documents": {"type": "array", "items": DOCUMENT, "minItems": 1, "maxItems": 8},
        "top_n": {"enum": [1, 2, 1000, None]},
        "max_tokens_per_doc": {"enum": [1, 2, 1000, None]},
    },
    "ScoreBody": {"text_1": WORD, "text_2": {"anyOf": [WORD, WORDS]}},  # else as many of the one as of the other
}
NARROWED_EVERYWHERE = {
    "model": {"enum": ["tiny", "some-org/tiny"]},
    "dimensions": {"enum": [1, 8, DIMENSIONS, None]},
    "encoding_format": {"enum": ["float", "base64", None]},  # there is no quantiser
}
# What excludes something else: prompts token ids and each other, top_k top_n, truncation truncate. An instruction needs
# a template.
LEFT_OUT = {"prompt", "prompt_name", "top_k", "truncation", "instruction"}


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    for name, fields in NARROWED.items():
        properties = document["components"]["schemas"][name]["properties"]
        for field in LEFT_OUT & properties.keys():
            del properties[field]
        properties |= {field: found for field, found in NARROWED_EVERYWHERE.items() if field in properties}
        properties |= fields
    return patient(document)


def patient(document: dict[str, Any]) -> dict[str, Any]:
    """The document, but with deadlines that do not pass: 504 is right for a millisecond, and tells nothing."""
    document = copy.deepcopy(document)
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] == "X-Request-Timeout-Ms":
                    parameter["schema"] = {"type": "integer", "minimum": 60_000}
    return document


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "flags", "least"),
    [
        # Wrong requests and right ones. That right ones are accepted cannot be asked of a document that does not know
        # the model.
        (patient, ("--mode", "all", "--max-examples", "85", "--exclude-checks", "positive_data_acceptance"), 2000),
        (narrowed, ("--mode", "positive", "--max-examples", "60"), 1000),
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
