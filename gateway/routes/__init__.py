"""One module an API dialect (two for TEI): body → request, output → body. No sockets; no dialect knows another."""

from __future__ import annotations

from typing import Any

from gateway.parsing import Operation
from gateway.routes import cohere, contextual, openai, rerank, tei, tei_scores

# On a path that several dialects share, in the order in which they are asked whether a body is theirs.
OPERATIONS: tuple[Operation[Any], ...] = (
    openai.EMBEDDINGS,
    contextual.CONTEXTUAL,
    tei_scores.RERANK,
    rerank.RERANK,
    rerank.SCORE,
    cohere.EMBED,
    cohere.EMBED_V1,
    tei.EMBED,
    tei.EMBED_ALL,
    tei.EMBED_SPARSE,
    tei.SIMILARITY,
    tei.TOKENIZE,
    tei.DECODE,
    tei_scores.CLASSIFY,
    tei_scores.PREDICT,
    # What is posted to the root is for the model's own task.
    tei_scores.ROOT_CLASSIFY,
    tei_scores.ROOT_RERANK,
    tei_scores.ROOT_PREDICT,
    tei.ROOT_SPARSE,
    tei.ROOT_SIMILARITY,
    tei.ROOT_EMBED,
)


def operations_by_path() -> dict[str, list[Operation[Any]]]:
    """What may be meant by a body that is posted to a path."""
    found: dict[str, list[Operation[Any]]] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            found.setdefault(path, []).append(operation)
    return found
