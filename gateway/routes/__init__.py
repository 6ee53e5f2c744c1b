"""One module an API dialect: body → request, outcome → body. No sockets here, and no dialect knows another."""

from __future__ import annotations

from typing import Any

from gateway.requests import Operation
from gateway.routes import cohere, contextual, openai, rerank

# On a path that several dialects share, in the order in which they are asked whether a body is theirs.
OPERATIONS: tuple[Operation[Any], ...] = (
    openai.EMBEDDINGS,
    contextual.CONTEXTUAL,
    rerank.RERANK,
    rerank.SCORE,
    cohere.EMBED,
    cohere.EMBED_V1,
)


def operations_by_path() -> dict[str, list[Operation[Any]]]:
    """What may be meant by a body that is posted to a path."""
    found: dict[str, list[Operation[Any]]] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            found.setdefault(path, []).append(operation)
    return found
