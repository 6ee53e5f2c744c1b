"""/openapi.json, made from the types that parse bodies and write answers. No I/O.

Nothing in it is written twice: paths and descriptions come from `routes`, fields and bounds from the Structs. The
possible errors are the same on every route (`common/errors.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.error_responses import ErrorBody
from gateway.parsing import Operation
from gateway.routes import operations_by_path
from gateway.routes.operations import Health, Info, ModelCard, ModelList, Ready
from gateway.trace import STAGES, FollowedRequest

_Schemas = Mapping[Any, Mapping[str, object]]

_REF_TEMPLATE = "#/components/schemas/{name}"

# The error statuses of a route that runs a model, and what each means.
_FAILURES = {
    400: "The body is wrong: `param` names the field, `message` says what to change.",
    401: "The key is missing or unknown.",
    403: "The key does not allow this.",
    404: "The model is not served here.",
    405: "The route needs another method.",
    408: "The body did not arrive in time.",
    413: "The body is too large or has too many chunks; or no worker has enough memory for an input.",
    414: "The target is too long.",
    415: "The body must be uncompressed JSON in UTF-8.",
    417: "`Expect` may only be `100-continue`.",
    429: "The server is overloaded, or the key's tokens are used up; `Retry-After` says when to try again.",
    431: "The header is too large.",
    500: "The server failed.",
    503: "No worker is ready; `Retry-After` says when to try again.",
    504: "The request's deadline passed.",
    505: "The HTTP version must be 1.1 or 1.0.",
}

_MODEL = {
    "name": "X-Model",
    "in": "header",
    "description": "The model to use, if several are served and the body names none.",
    "schema": {"type": "string"},
}

# The headers of a request.
_PARAMETERS = [
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "The request's deadline, in milliseconds after its arrival.",
        "schema": {"type": "integer", "minimum": 1},
    },
    {
        "name": "X-Trace",
        "in": "header",
        "description": "`1` traces this request: the answer's `Server-Timing` lists each stage in gateway, scheduler "
        "and worker, and its `X-Trace` says when each began. Other values are ignored.",
        "schema": {"type": "string"},
        "example": "1",
    },
    _MODEL,
]

# The GET routes: path, summary, the type of the answer or its media type, and other statuses.
_QUESTIONS: tuple[tuple[str, str, Any, Sequence[int]], ...] = (
    ("/health", "Whether the gateway is alive", Health, ()),
    ("/ready", "Whether each model has a ready worker; 503 with the reason if not", Ready, (404,)),
    ("/v1/models", "List the models", ModelList, (503,)),
    ("/v1/models/{id}", "Get a model by its name", ModelCard, (404, 503)),
    ("/info", "Facts of the model, versions, and limits", Info, (404,)),
    ("/metrics", "Prometheus metrics of all processes", "text/plain", ()),
    ("/openapi.json", "This document", dict[str, Any], ()),
    ("/", "A web page that shows the model and the load, and lets you try requests", "text/html", ()),
    ("/docs", "A web page that shows this document", "text/html", ()),
)


def document(version: str) -> bytes:
    """The OpenAPI 3.1 document of this version of the server, as JSON."""
    types = _types()
    # One call for all types: it takes milliseconds, and every gateway makes it when it starts.
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for path, summary, answer, failures in _QUESTIONS:
        paths[path] = {"get": _question(path, summary, answer, failures, schema_of)}
    for path, operations in operations_by_path().items():
        paths.setdefault(path, {})["post"] = _operation(path, operations, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Hedgerow",
                "version": version,
                "description": "Text embeddings and relevance scores. Clients of the APIs named here need only a new "
                "base URL.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"key": []}],
        }
    )


def _types() -> list[Any]:
    """All types in the document."""
    types: list[Any] = [ErrorBody, FollowedRequest]
    types += [answer for _, _, answer, _ in _QUESTIONS if not isinstance(answer, str)]
    for operations in operations_by_path().values():
        types += [found for operation in operations for found in (operation.body, operation.answer)]
    return list(dict.fromkeys(types))


def _question(
    path: str,
    summary: str,
    answer: Any,  # noqa: ANN401  # a type, or a string
    failures: Sequence[int],
    schema_of: _Schemas,
) -> dict[str, object]:
    content: Mapping[str, object] = {answer: {}} if isinstance(answer, str) else _json_of([answer], schema_of)
    responses: dict[str, object] = {"200": {"description": "OK", "content": content}}
    if answer is Ready:
        responses["503"] = {"description": "Not ready; `Retry-After` says when to ask again.", "content": content}
    responses |= _failures((401, 405, *failures), schema_of)
    found: dict[str, object] = {"summary": summary, "tags": ["Operations"], "responses": responses}
    if answer in (Ready, Info):
        found["parameters"] = [_MODEL]
    if "{id}" in path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _operation(path: str, operations: Sequence[Operation[Any]], schema_of: _Schemas) -> dict[str, object]:
    answers = _json_of([operation.answer for operation in operations], schema_of)
    if path == "/v1/embeddings":
        answers = answers | {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "summary": operations[-1].summary,
        "description": "\n\n".join(operation.description for operation in reversed(operations)),
        "tags": list(dict.fromkeys(operation.dialect for operation in operations)),
        "requestBody": {"required": True, "content": _json_of([operation.body for operation in operations], schema_of)},
        "parameters": _PARAMETERS,
        "responses": {"200": {"description": "OK", "headers": _headers(schema_of), "content": answers}}
        | _failures(tuple(_FAILURES), schema_of),
    }


def _headers(schema_of: _Schemas) -> dict[str, object]:
    """The headers of an answer that tell where the time went."""
    return {
        "Server-Timing": {
            "description": "Milliseconds of each stage: parse, tokenize, queue, step, render, total; for a traced "
            f"request also the others of {', '.join(STAGES)}.",
            "schema": {"type": "string"},
        },
        "X-Trace": {
            "description": "When each stage of a traced request began, if a model ran it.",
            "content": _json_of([FollowedRequest], schema_of),
        },
    }


def _failures(statuses: Sequence[int], schema_of: _Schemas) -> dict[str, object]:
    content = _json_of([ErrorBody], schema_of)
    return {str(status): {"description": _FAILURES[status], "content": content} for status in sorted(statuses)}


def _json_of(types: Sequence[Any], schema_of: _Schemas) -> dict[str, object]:
    schemas = [schema_of[found] for found in types]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
