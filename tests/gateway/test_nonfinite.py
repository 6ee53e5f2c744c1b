"""A NaN or an infinity is an error that names the input as its client sent it, and never a null, on every route."""

from __future__ import annotations

import pytest

from common.errors import NonfiniteOutput
from common.wire.messages import ModelFacts
from tests.gateway.conftest import Running, Serve
from tests.gateway.wire import post

# The last of the sequences that a body comes to is not finite; of equal texts there is one sequence.
ROUTES = [
    ("/v1/embeddings", {"input": "w1"}, 0, "input"),
    ("/v1/embeddings", {"input": ["w1", "w2"]}, 1, "input[1]"),
    ("/v1/contextualizedembeddings", {"input": [["w8"], ["w5", "w6", "w7"]]}, 1, "input[1]"),
    ("/v2/embed", {"texts": ["w1", "w2"]}, 1, "texts[1]"),
    ("/embed", {"inputs": ["w1", "w2"]}, 1, "inputs[1]"),
    ("/embed_all", {"inputs": [[5, 6], [9]]}, 1, "inputs[1]"),
    ("/similarity", {"inputs": {"source_sentence": "w1", "sentences": ["w2"]}}, 1, "inputs.sentences[0]"),
    ("/v1/rerank", {"query": "w1", "documents": ["w5", "w5", "w6"]}, 1, "documents[2]"),
    ("/score", {"text_1": "w1", "text_2": "w6"}, 0, "text_2"),
    ("/score", {"text_1": ["w1", "w2"], "text_2": ["w5", "w6"]}, 1, "text_2[1]"),
    ("/rerank", {"query": "w1", "texts": ["w1", "w2"]}, 1, "texts[1]"),
    ("/predict", {"inputs": [["w1"], ["w1"], ["w1", "w2"]]}, 1, "inputs[2]"),
]
IDS = [f"{path} {param}" for path, _, _, param in ROUTES]
SCORES = {"/v1/rerank", "/score", "/rerank", "/predict"}


@pytest.fixture
async def server(serve: Serve, everything: ModelFacts) -> Running:
    return await serve(served=everything)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("path", "fields", "sequence", "param"), ROUTES, ids=IDS)
async def test_a_row_that_is_not_finite_is_an_error_and_never_a_null(
    server: Running, path: str, fields: dict[str, object], sequence: int, param: str, value: float
) -> None:
    server.stub.poison = value
    if path in SCORES:
        server.stub.logit_of = lambda ids: 0.5
    # The chunk is known by its row, but not by the sequence that a worker names.
    named = f"{param}[2]" if "contextualized" in path else param
    assert (await post(server.port, path, fields)).refusal == (500, "nonfinite_output", named)


@pytest.mark.parametrize(("path", "fields", "sequence", "param"), ROUTES, ids=IDS)
async def test_an_input_that_the_worker_fails_on_is_named(
    server: Running, path: str, fields: dict[str, object], sequence: int, param: str
) -> None:
    server.stub.error = NonfiniteOutput("The model made a NaN of it.", sequence=sequence)
    assert (await post(server.port, path, fields)).refusal == (500, "nonfinite_output", param)
