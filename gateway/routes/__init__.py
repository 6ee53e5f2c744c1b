"""One module for each API dialect (two for TEI): body type → ParsedRequest, ModelOutput → body. No sockets.

No dialect imports another, except that TEI's two modules share what they have in common.
"""

from __future__ import annotations

from typing import Any

from gateway.parsing import Operation
from gateway.routes import cohere, contextual, openai, rerank, tei, tei_scores

# If several operations share a path, the first that matches a body is chosen: see `Operation`.
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
    # A POST to the root is for the model's own task.
    tei_scores.ROOT_CLASSIFY,
    tei_scores.ROOT_RERANK,
    tei_scores.ROOT_PREDICT,
    tei.ROOT_SPARSE,
    tei.ROOT_SIMILARITY,
    tei.ROOT_EMBED,
)


def operations_by_path() -> dict[str, list[Operation[Any]]]:
    """The operations of each path, in the order in which they are tried."""
    found: dict[str, list[Operation[Any]]] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            found.setdefault(path, []).append(operation)
    return found
