"""The dialect of text-embeddings-inference: what a good request is answered with, and what a bad one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from common.errors import InvalidRequest, Overloaded
from common.wire.messages import ModelFacts
from gateway.formats import probabilities_of
from gateway.model_requests import ParsedRequest
from gateway.parsing import Limits, read_request
from gateway.routes import operations_by_path
from tests.gateway.conftest import DIMENSIONS, MAX_TOKENS, Running, Serve, vector
from tests.gateway.wire import Answer, ask, post

# "w1 w2" and "w5" as the tokenizer writes them.
W1_W2 = [1, 5, 6, 2]
W5 = [1, 9, 2]

TEN_WORDS = " ".join(f"w{index}" for index in range(10))
TWENTY_WORDS = " ".join(f"w{index}" for index in range(20))  # the model takes 14 of them


@pytest.fixture(scope="module")
def reranker(scoring: ModelFacts) -> ModelFacts:
    """A cross-encoder with the same words: [CLS] text [SEP], or [CLS] text [SEP] text [SEP], its part of type 1."""
    return dataclasses.replace(scoring, labels=["relevant"], score_activation="identity")


@pytest.fixture(scope="module")
def classifier(reranker: ModelFacts) -> ModelFacts:
    return dataclasses.replace(reranker, dimensions=3, num_labels=3, labels=["bad", 'so "so"', "good"])


@pytest.fixture(scope="module")
def sparse(facts: ModelFacts) -> ModelFacts:
    return dataclasses.replace(facts, tasks=["sparse"], encodings=["sparse"], dimensions=64, normalize=False)


@pytest.fixture(scope="module")
def by_token(facts: ModelFacts) -> ModelFacts:
    return dataclasses.replace(facts, tasks=["embed", "tokens"])


@pytest.fixture
async def rerank_server(serve: Serve, reranker: ModelFacts) -> Running:
    """A text's logit is its last word's number: w7 gets 7."""
    running = await serve(served=reranker)
    running.stub.logit_of = lambda ids: ids[-2] - 4
    return running


@pytest.fixture
async def label_server(serve: Serve, classifier: ModelFacts) -> Running:
    """The logits are 0, the last word's number, and 1."""
    running = await serve(served=classifier)
    running.stub.logit_of = lambda ids: [0, ids[-2] - 4, 1]
    return running


@pytest.fixture
async def sparse_server(serve: Serve, sparse: ModelFacts) -> Running:
    return await serve(served=sparse)


@pytest.fixture
async def token_server(serve: Serve, by_token: ModelFacts) -> Running:
    return await serve(served=by_token)


def good(answer: Answer) -> Any:  # noqa: ANN401  # whatever JSON holds
    assert answer.status == 200, answer.body
    return answer.json


def bad(answer: Answer) -> tuple[object, object]:
    status, code, param = answer.refusal
    assert status == 400, answer.body
    return code, param


def rows(answer: Answer) -> npt.NDArray[np.float32]:
    return np.array(good(answer), dtype=np.float32)


def vectors(*sequences: list[int], normalize: bool = True) -> npt.NDArray[np.float32]:
    return np.stack([vector(ids, normalize=normalize) for ids in sequences])


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


# --- /embed ---


@pytest.mark.parametrize(
    ("inputs", "sequences"),
    [
        ("w1 w2", [W1_W2]),
        (["w1 w2"], [W1_W2]),
        (["w1 w2", "w5"], [W1_W2, W5]),
        ([9, 8, 7], [[9, 8, 7]]),
        ([[9, 8], [7]], [[9, 8], [7]]),
    ],
    ids=str,
)
async def test_embed_answers_with_a_bare_list_of_vectors(
    server: Running, inputs: object, sequences: list[list[int]]
) -> None:
    answer = await post(server.port, "/embed", {"inputs": inputs})
    np.testing.assert_array_equal(rows(answer), vectors(*sequences))
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-model-fingerprint"] == "0123456789abcdef"


@pytest.mark.parametrize(
    ("extra", "normalize"),
    [({}, True), ({"normalize": None}, True), ({"normalize": True}, True), ({"normalize": False}, False)],
)
async def test_vectors_have_unit_length_unless_a_client_says_otherwise(
    serve: Serve, facts: ModelFacts, extra: dict[str, object], normalize: bool
) -> None:
    running = await serve(served=dataclasses.replace(facts, normalize=False))
    answer = await post(running.port, "/embed", {"inputs": "w5"} | extra)
    np.testing.assert_array_equal(rows(answer), vectors(W5, normalize=normalize))


async def test_embed_takes_a_prompt_and_fewer_dimensions(server: Running) -> None:
    answer = await post(server.port, "/embed", {"inputs": ["w5", "w6"], "dimensions": 4, "prompt_name": "query"})
    assert server.stub.submitted[0]["sequences"] == [[1, 5, 6, 9, 2], [1, 5, 6, 10, 2]]
    np.testing.assert_array_equal(
        rows(answer), [vector(ids, dimensions=4) for ids in ([1, 5, 6, 9, 2], [1, 5, 6, 10, 2])]
    )
    assert bad(await post(server.port, "/embed", {"inputs": "w5", "dimensions": 13})) == ("out_of_range", "dimensions")


@pytest.mark.parametrize(
    ("direction", "words"),
    [(None, range(14)), ("right", range(14)), ("Right", range(14)), ("left", range(6, 20)), ("Left", range(6, 20))],
)
async def test_what_is_too_long_is_cut_where_a_client_says_so(
    server: Running, direction: str | None, words: range
) -> None:
    fields = {"inputs": TWENTY_WORDS, "truncate": True, "truncation_direction": direction}
    good(await post(server.port, "/embed", fields))
    assert server.stub.submitted[0]["sequences"] == [[1, *(word + 4 for word in words), 2]]


async def test_what_is_too_long_is_refused_unless_the_deployment_cuts(serve: Serve) -> None:
    refusing, cutting = await serve(), await serve(auto_truncate=True)
    answer = await post(refusing.port, "/embed", {"inputs": ["w1", TWENTY_WORDS]})
    assert bad(answer) == ("context_length_exceeded", "inputs[1]")
    assert rows(await post(cutting.port, "/embed", {"inputs": TWENTY_WORDS})).shape == (1, DIMENSIONS)
    answer = await post(cutting.port, "/embed", {"inputs": TWENTY_WORDS, "truncate": False})
    assert bad(answer) == ("context_length_exceeded", "inputs")


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("text", ["w1 " * 20_000, "w" * 50_000, "é" * 50_000, " " * 50_000 + "w1", "w1 " * 14 + "\x00"])
async def test_no_text_is_too_long_to_be_cut(server: Running, text: str, direction: str) -> None:
    fields = {"inputs": text, "truncate": True, "truncation_direction": direction}
    good(await post(server.port, "/embed", fields))
    [sequence] = server.stub.submitted[0]["sequences"]
    assert 3 <= len(sequence) <= MAX_TOKENS
    assert (sequence[0], sequence[-1]) == (1, 2)


# --- /embed_all ---


async def test_embed_all_has_a_row_for_every_token_as_the_model_makes_it(token_server: Running) -> None:
    answer = await post(token_server.port, "/embed_all", {"inputs": ["w5", "w1 w2"]})
    first, second = good(answer)
    of_tokens = {token: vector([token], normalize=False) for token in (1, 2, 5, 6, 9)}
    np.testing.assert_array_equal(np.array(first, dtype=np.float32), [of_tokens[1], of_tokens[9], of_tokens[2]])
    np.testing.assert_array_equal(np.array(second, dtype=np.float32), [of_tokens[token] for token in W1_W2])


async def test_embed_all_cuts_and_prompts_as_embed_does(token_server: Running) -> None:
    fields = {"inputs": TWENTY_WORDS, "truncate": True, "prompt_name": "query"}
    [found] = good(await post(token_server.port, "/embed_all", fields))
    assert len(found) == MAX_TOKENS
    assert token_server.stub.submitted[0]["sequences"] == [[1, 5, 6, *range(4, 16), 2]]


async def test_embed_all_is_bounded_by_the_rows_of_one_message(serve: Serve, by_token: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(by_token, dimensions=2**20))
    assert (await ask(running.port, "GET", "/info")).json["limits"]["max_embed_all_tokens"] == 16
    assert bad(await post(running.port, "/embed_all", {"inputs": ["w1 w2 w3", TEN_WORDS]})) == (
        "too_many_tokens",
        "inputs",
    )
    assert running.stub.submitted == []


# --- /embed_sparse ---


async def test_embed_sparse_lists_the_weights_of_the_vocabulary(sparse_server: Running) -> None:
    answer = await post(sparse_server.port, "/embed_sparse", {"inputs": ["w2 w1", "nothing known", "w5"]})
    assert good(answer) == [
        [{"index": 5, "value": 2.5}, {"index": 6, "value": 3.0}],
        [],
        [{"index": 9, "value": 4.5}],
    ]
    cut = await post(sparse_server.port, "/embed_sparse", {"inputs": TWENTY_WORDS, "truncate": True})
    assert [len(values) for values in good(cut)] == [14]


@pytest.mark.parametrize(
    ("tasks", "path", "fields"),
    [
        (["embed"], "/embed_all", {"inputs": "w1"}),
        (["embed"], "/embed_sparse", {"inputs": "w1"}),
        (["embed"], "/predict", {"inputs": "w1"}),
        (["embed"], "/rerank", {"query": "w1", "texts": ["w2"]}),
        (["sparse"], "/embed", {"inputs": "w1"}),
        (["sparse"], "/similarity", {"inputs": {"source_sentence": "w1", "sentences": ["w2"]}}),
        (["score"], "/embed_all", {"inputs": "w1"}),
        (["score"], "/rerank", {"query": "w1", "texts": ["w2"]}),  # its pairs have three labels
    ],
)
async def test_a_model_serves_what_it_makes_and_nothing_else(
    serve: Serve, classifier: ModelFacts, tasks: list[str], path: str, fields: dict[str, object]
) -> None:
    running = await serve(served=dataclasses.replace(classifier, tasks=tasks))
    assert bad(await post(running.port, path, fields)) == ("wrong_task", "model")


# --- /similarity ---


async def test_similarities_are_cosines_with_the_source(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, normalize=False))
    sentences = {"source_sentence": "w5", "sentences": ["w1 w2", "w5", "w6"]}
    answer = await post(running.port, "/similarity", {"inputs": sentences})
    source, *others = vectors(W5, W1_W2, W5, [1, 10, 2]).astype(np.float64)
    assert good(answer) == pytest.approx([float(source @ other) for other in others], abs=1e-6)
    assert good(answer)[1] == 1


async def test_a_vector_without_a_length_is_like_nothing(server: Running) -> None:
    server.stub.logit_of = lambda ids: [0.0, 0.0] if ids == W5 else [1e30, 1e30]
    sentences = {"source_sentence": "w1", "sentences": ["w5", "w1"]}
    assert good(await post(server.port, "/similarity", {"inputs": sentences})) == [0, 1]


async def test_similarity_takes_parameters(server: Running) -> None:
    sentences = {"source_sentence": "w5", "sentences": [TWENTY_WORDS]}
    parameters = {"truncate": True, "truncation_direction": "Left", "prompt_name": "document"}
    good(await post(server.port, "/similarity", {"inputs": sentences, "parameters": parameters}))
    assert server.stub.submitted[0]["sequences"] == [W5, [1, *range(10, 24), 2]]
    good(await post(server.port, "/similarity", {"inputs": sentences | {"sentences": ["w1"]}, "parameters": None}))


# --- /tokenize and /decode ---


async def test_tokens_have_their_places_in_the_text_by_characters(server: Running) -> None:
    answer = await post(server.port, "/tokenize", {"inputs": ["İé W1  w2", "w5"]})
    special = {"special": True, "start": None, "stop": None}
    assert good(answer) == [
        [
            {"id": 1, "text": "[CLS]"} | special,
            {"id": 0, "text": "İé", "special": False, "start": 0, "stop": 2},
            {"id": 5, "text": "W1", "special": False, "start": 3, "stop": 5},
            {"id": 6, "text": "w2", "special": False, "start": 7, "stop": 9},
            {"id": 2, "text": "[SEP]"} | special,
        ],
        [
            {"id": 1, "text": "[CLS]"} | special,
            {"id": 9, "text": "w5", "special": False, "start": 0, "stop": 2},
            {"id": 2, "text": "[SEP]"} | special,
        ],
    ]
    assert server.stub.submitted == []


async def test_special_tokens_can_be_left_out_and_may_be_all_that_there_is(server: Running) -> None:
    answer = await post(server.port, "/tokenize", {"inputs": ["w5", "  "], "add_special_tokens": False})
    assert good(answer) == [[{"id": 9, "text": "w5", "special": False, "start": 0, "stop": 2}], []]


async def test_a_prompts_tokens_are_no_part_of_the_text(server: Running) -> None:
    answer = await post(server.port, "/tokenize", {"inputs": "w5", "prompt_name": "query", "add_special_tokens": False})
    assert good(answer) == [
        [
            {"id": 5, "text": "w1", "special": False, "start": None, "stop": None},
            {"id": 6, "text": "w2", "special": False, "start": None, "stop": None},
            {"id": 9, "text": "w5", "special": False, "start": 0, "stop": 2},
        ]
    ]


async def test_a_text_is_tokenized_however_long_it_is(server: Running) -> None:
    answer = await post(server.port, "/tokenize", {"inputs": "w1 " * 10_000})
    [tokens] = good(answer)
    assert len(tokens) == 10_002
    assert tokens[10_000] == {"id": 5, "text": "w1", "special": False, "start": 29_997, "stop": 29_999}
    longest = [{"inputs": "w" * number} for number in (131_072, 131_073)]
    assert good(await post(server.port, "/tokenize", longest[0]))[0][1]["stop"] == 131_072
    assert bad(await post(server.port, "/tokenize", longest[1])) == ("input_too_long", "inputs")


@pytest.mark.slow
async def test_an_answer_of_megabytes_is_one_list(server: Running) -> None:
    answer = await post(server.port, "/tokenize", {"inputs": ["w1 " * 40_000, "w2 " * 30_000]})
    first, second = good(answer)
    assert [len(first), len(second)] == [40_002, 30_002]
    assert (second[1]["id"], second[30_000]["stop"]) == (6, 89_999)


async def test_ids_become_the_text_that_the_tokenizer_makes_of_them(server: Running) -> None:
    assert good(await post(server.port, "/decode", {"ids": W1_W2})) == ["w1 w2"]
    assert good(await post(server.port, "/decode", {"ids": [W5, [1, 2]]})) == ["w5", ""]
    answer = await post(server.port, "/decode", {"ids": W5, "skip_special_tokens": False})
    assert good(answer) == ["[CLS] w5 [SEP]"]


@pytest.mark.parametrize("tasks", [["score"], ["sparse"], ["embed", "tokens"]], ids=str)
async def test_every_model_has_a_tokenizer(serve: Serve, facts: ModelFacts, tasks: list[str]) -> None:
    running = await serve(served=dataclasses.replace(facts, tasks=tasks))
    [tokens] = good(await post(running.port, "/tokenize", {"inputs": "w5"}))
    assert [token["id"] for token in tokens] == W5
    assert good(await post(running.port, "/decode", {"ids": W5})) == ["w5"]


async def test_the_tokenizer_reads_no_more_than_a_request_may_hold(serve: Serve) -> None:
    running = await serve(max_request_tokens=20)
    assert good(await post(running.port, "/decode", {"ids": [[5] * 10, [5] * 10]}))
    assert bad(await post(running.port, "/decode", {"ids": [[5] * 10, [5] * 11]})) == ("too_many_tokens", "ids")
    assert good(await post(running.port, "/tokenize", {"inputs": ["w" * 10, "w" * 10]}))
    assert bad(await post(running.port, "/tokenize", {"inputs": ["w" * 10, "w" * 11]})) == ("too_many_tokens", "inputs")


# --- /rerank with texts ---


async def test_texts_come_best_first_in_a_bare_list(rerank_server: Running) -> None:
    answer = await post(rerank_server.port, "/rerank", {"query": "w1", "texts": ["w5", "w9 w7", "w6"]})
    assert good(answer) == [
        {"index": 1, "score": pytest.approx(sigmoid(7))},
        {"index": 2, "score": pytest.approx(sigmoid(6))},
        {"index": 0, "score": pytest.approx(sigmoid(5))},
    ]
    [sent] = rerank_server.stub.submitted
    assert sent["sequences"] == [[1, 5, 2, 9, 2], [1, 5, 2, 13, 11, 2], [1, 5, 2, 10, 2]]
    assert sent["type_starts"] == [3, 3, 3]


async def test_ranks_bring_their_texts_and_logits_where_a_client_asks(rerank_server: Running) -> None:
    fields = {"query": "w1", "texts": ["w5", "w7"], "return_text": True, "raw_scores": True}
    assert good(await post(rerank_server.port, "/rerank", fields)) == [
        {"index": 1, "text": "w7", "score": 7},
        {"index": 0, "text": "w5", "score": 5},
    ]


async def test_texts_whose_scores_are_all_one_keep_the_order_of_their_logits(rerank_server: Running) -> None:
    answer = await post(rerank_server.port, "/rerank", {"query": "w1", "texts": ["w40", "w59", "w41", "w59"]})
    assert [(rank["index"], rank["score"]) for rank in good(answer)] == [(1, 1), (3, 1), (2, 1), (0, 1)]


async def test_texts_are_cut_only_where_a_client_says_so(rerank_server: Running) -> None:
    fields = {"query": "w1", "texts": ["w2", TWENTY_WORDS]}
    assert bad(await post(rerank_server.port, "/rerank", fields)) == ("context_length_exceeded", "texts[1]")
    good(await post(rerank_server.port, "/rerank", fields | {"truncate": True}))
    good(await post(rerank_server.port, "/rerank", fields | {"truncate": True, "truncation_direction": "Left"}))
    right, left = (sent["sequences"][1] for sent in rerank_server.stub.submitted)
    assert right == [1, 5, 2, *range(4, 16), 2]
    assert left == [1, 5, 2, *range(12, 24), 2]


async def test_there_may_be_as_many_texts_as_inputs_where_documents_have_a_limit_of_their_own(
    serve: Serve, reranker: ModelFacts
) -> None:
    running = await serve(served=reranker)
    running.stub.logit_of = lambda ids: 0
    most = (await ask(running.port, "GET", "/info")).json["max_client_batch_size"]
    assert len(good(await post(running.port, "/rerank", {"query": "w1", "texts": ["w5"] * most}))) == most == 2048
    more = await post(running.port, "/rerank", {"query": "w1", "texts": ["w5"] * (most + 1)})
    assert bad(more) == ("too_many_inputs", "texts")
    documents = await post(running.port, "/rerank", {"query": "w1", "documents": ["w5"] * 1001})
    assert bad(documents) == ("too_many_inputs", "documents")


async def test_rerank_is_told_apart_by_texts_and_documents(rerank_server: Running) -> None:
    good_documents = await post(rerank_server.port, "/rerank", {"query": "w1", "documents": ["w5"]})
    assert good(good_documents)["results"][0]["index"] == 0
    both = await post(rerank_server.port, "/rerank", {"query": "w1", "documents": ["w5"], "texts": ["w5"]})
    assert bad(both) == ("unknown_field", "documents")
    neither = await post(rerank_server.port, "/rerank", {"query": "w1"})
    assert bad(neither) == ("invalid_type", "documents")


# --- /predict ---


async def test_labels_come_likeliest_first_with_the_softmax_of_their_logits(label_server: Running) -> None:
    answer = await post(label_server.port, "/predict", {"inputs": "w1 w2"})
    total = math.exp(0) + math.exp(2) + math.exp(1)
    assert good(answer) == [
        {"score": pytest.approx(math.exp(2) / total), "label": 'so "so"'},
        {"score": pytest.approx(math.exp(1) / total), "label": "good"},
        {"score": pytest.approx(math.exp(0) / total), "label": "bad"},
    ]
    [sent] = label_server.stub.submitted
    assert (sent["sequences"], sent["type_starts"]) == ([W1_W2], [4])


@pytest.mark.parametrize(
    ("inputs", "sequences", "type_starts"),
    [
        (["w2"], [[1, 6, 2]], [3]),
        (["w1", "w2"], [[1, 5, 2, 6, 2]], [3]),
        ([["w2"]], [[1, 6, 2]], [3]),
        ([["w1", "w2"], ["w2"], ["w1", "w2"]], [[1, 5, 2, 6, 2], [1, 6, 2]], [3, 3]),
    ],
    ids=str,
)
async def test_texts_and_pairs_may_be_mixed(
    label_server: Running, inputs: list[object], sequences: list[list[int]], type_starts: list[int]
) -> None:
    answer = await post(label_server.port, "/predict", {"inputs": inputs, "raw_scores": True})
    labels = [{"score": 2, "label": 'so "so"'}, {"score": 1, "label": "good"}, {"score": 0, "label": "bad"}]
    assert good(answer) == ([labels] * len(inputs) if isinstance(inputs[0], list) else labels)
    [sent] = label_server.stub.submitted
    assert (sent["sequences"], sent["type_starts"]) == (sequences, type_starts)


async def test_one_label_has_the_sigmoid_of_its_logit(rerank_server: Running) -> None:
    answer = await post(rerank_server.port, "/predict", {"inputs": [["w1", "w2"], ["w0"]]})
    assert good(answer) == [
        [{"score": pytest.approx(sigmoid(2)), "label": "relevant"}],
        [{"score": 0.5, "label": "relevant"}],
    ]
    answer = await post(rerank_server.port, "/predict", {"inputs": "w3", "raw_scores": True})
    assert good(answer) == [{"score": 3, "label": "relevant"}]


async def test_what_is_labelled_is_cut_only_where_a_client_says_so(label_server: Running) -> None:
    fields = {"inputs": [["w1"], ["w1", TWENTY_WORDS], [TWENTY_WORDS]]}
    assert bad(await post(label_server.port, "/predict", fields)) == ("context_length_exceeded", "inputs[1][1]")
    good(await post(label_server.port, "/predict", fields | {"truncate": True, "truncation_direction": "left"}))
    sequences = label_server.stub.submitted[0]["sequences"]
    assert sequences == [[1, 5, 2], [1, 5, 2, *range(12, 24), 2], [1, *range(10, 24), 2]]


async def test_a_template_holds_pairs_alone(serve: Serve, answering: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(answering, labels=["LABEL_0"]))
    running.stub.logit_of = lambda ids: 0
    single = await post(running.port, "/predict", {"inputs": [["w1", "w2"], ["w1"]]})
    assert bad(single) == ("unsupported_parameter", "inputs[1]")
    pair = await post(running.port, "/predict", {"inputs": ["w1", "w2"]})
    assert good(pair) == [{"score": 0.5, "label": "LABEL_0"}]
    left = {"query": "w1", "texts": ["w2"], "truncate": True, "truncation_direction": "left"}
    assert bad(await post(running.port, "/rerank", left)) == ("unsupported_parameter", "truncation_direction")


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/rerank", {"query": "w1", "texts": ["w2"]}), ("/predict", {"inputs": ["w1", "w2"]})],
    ids=["rerank", "predict"],
)
def test_the_start_is_not_cut_off_in_a_template_and_that_is_said_before_anything_is_tokenized(
    reranker: ModelFacts, path: str, fields: dict[str, object]
) -> None:
    facts = dataclasses.replace(reranker, pair_template="qwen3-reranker")

    def read(**more: object) -> object:
        return read_request(
            json.dumps(fields | more).encode(), operations_by_path()[path], facts, Limits(20, auto_truncate=False)
        )

    with pytest.raises(InvalidRequest, match="only at its end") as refused:
        read(truncate=True, truncation_direction="left")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "truncation_direction")
    assert isinstance(read(truncate=False, truncation_direction="left"), ParsedRequest)
    assert isinstance(read(truncate=True, truncation_direction="right"), ParsedRequest)


def test_a_softmax_is_within_float32_of_the_exact_one_and_never_complains() -> None:
    found = probabilities_of(np.array([[0, 1, 2], [3e38, -3e38, 0], [-3e38] * 3], dtype=np.float32))
    assert found.dtype == np.float32
    exact = [[0.09003057317038046, 0.24472847105479764, 0.6652409557748218], [1, 0, 0], [1 / 3] * 3]
    np.testing.assert_allclose(found, exact, rtol=6e-8)


# --- the root ---


async def test_what_is_posted_to_the_root_is_for_the_models_own_task(
    server: Running, sparse_server: Running, rerank_server: Running, label_server: Running
) -> None:
    np.testing.assert_array_equal(rows(await post(server.port, "/", {"inputs": "w5"})), vectors(W5))
    assert good(await post(sparse_server.port, "/", {"inputs": "w5"})) == [[{"index": 9, "value": 4.5}]]
    assert good(await post(rerank_server.port, "/", {"query": "w1", "texts": ["w0"]})) == [{"index": 0, "score": 0.5}]
    assert good(await post(rerank_server.port, "/", {"inputs": ["w1", "w0"]})) == [{"score": 0.5, "label": "relevant"}]
    labels = good(await post(label_server.port, "/", {"inputs": "w1", "raw_scores": True}))
    assert [label["score"] for label in labels] == [1, 1, 0]


async def test_the_root_is_posted_to_with_a_key_alone(serve: Serve) -> None:
    running = await serve(api_key="sesame")
    assert (await post(running.port, "/", {"inputs": "w5"})).status == 401
    assert (await post(running.port, "/", {"inputs": "w5"}, {"Authorization": "Bearer sesame"})).status == 200


# --- an unmodified client ---


Call = Callable[[InferenceClient], object]


async def hub(running: Running, call: Call, path: str = "") -> Any:  # noqa: ANN401  # of any task
    """What huggingface_hub's client returns for a task, knowing nothing but where the server is."""
    address = f"http://127.0.0.1:{running.port}{path}"
    client = InferenceClient(address, provider="hf-inference", token="unused")
    return await asyncio.to_thread(call, client)


@pytest.mark.parametrize("path", ["", "/embed"])
async def test_the_hubs_client_gets_features(server: Running, path: str) -> None:
    one = await hub(server, lambda client: client.feature_extraction("w5"), path)
    many = await hub(server, lambda client: client.feature_extraction(["w1 w2", "w5"], normalize=False), path)
    np.testing.assert_array_equal(one, vectors(W5))
    np.testing.assert_array_equal(many, vectors(W1_W2, W5, normalize=False))
    cut = {"truncate": True, "truncation_direction": "left", "prompt_name": "query", "dimensions": 4}
    found = await hub(server, lambda client: client.feature_extraction("w5 " * 20, **cut), path)
    assert found.shape == (1, 4)
    assert server.stub.submitted[2]["sequences"] == [[1, *[9] * 14, 2]]


@pytest.mark.parametrize("path", ["", "/similarity"])
async def test_the_hubs_client_compares_sentences(server: Running, path: str) -> None:
    found = await hub(server, lambda client: client.sentence_similarity("w5", other_sentences=["w1 w2", "w5"]), path)
    source, other = vectors(W5, W1_W2)
    assert found == pytest.approx([float(source @ other), 1], abs=1e-6)


@pytest.mark.parametrize("path", ["", "/predict"])
async def test_the_hubs_client_classifies_texts(label_server: Running, path: str) -> None:
    found = await hub(label_server, lambda client: client.text_classification("w2"), path)
    assert [label.label for label in found] == ['so "so"', "good", "bad"]
    assert sum(label.score for label in found) == pytest.approx(1)
    best = await hub(
        label_server, lambda client: client.text_classification("w2", top_k=2, function_to_apply="sigmoid"), path
    )
    assert [(label.label, label.score) for label in best] == [
        ('so "so"', pytest.approx(sigmoid(2))),
        ("good", pytest.approx(sigmoid(1))),
    ]
    raw = await hub(label_server, lambda client: client.text_classification("w2", function_to_apply="none"), path)
    assert [label.score for label in raw] == [2, 1, 0]


async def test_the_hubs_client_reads_what_kind_of_model_is_served(
    server: Running, sparse_server: Running, rerank_server: Running, label_server: Running
) -> None:
    found = await hub(server, lambda client: client.get_endpoint_info())
    assert (found["model_id"], found["model_dtype"]) == ("tiny", "float32")
    assert (found["max_input_length"], found["max_client_batch_size"]) == (MAX_TOKENS, 2048)
    assert (found["model_sha"], found["auto_truncate"]) == (None, False)
    assert found["model_type"] == {"embedding": {"pooling": "mean"}}
    assert found["model"]["name"] == "tiny"
    kinds = [
        (await hub(running, lambda client: client.get_endpoint_info()))["model_type"]
        for running in (sparse_server, rerank_server, label_server)
    ]
    labels = {"0": "bad", "1": 'so "so"', "2": "good"}
    assert kinds == [
        {"embedding": {"pooling": "splade"}},
        {"reranker": {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}},
        {"classifier": {"id2label": labels, "label2id": {"bad": 0, 'so "so"': 1, "good": 2}}},
    ]


async def test_the_hubs_client_shows_what_was_wrong_and_is_told_of_an_overload(server: Running) -> None:
    with pytest.raises(HfHubHTTPError, match="this model takes at most 16") as caught:
        await hub(server, lambda client: client.feature_extraction(TWENTY_WORDS))
    assert caught.value.response.status_code == 400
    server.stub.error = Overloaded("The queue is full. Try again.", retry_after_s=3)
    with pytest.raises(HfHubHTTPError, match="The queue is full") as caught:
        await hub(server, lambda client: client.feature_extraction("w5"))
    assert (caught.value.response.status_code, caught.value.response.headers["retry-after"]) == (429, "3")
    assert (await post(server.port, "/tokenize", {"inputs": "w1"})).status == 200  # which no queue is in the way of


async def test_info_is_there_before_any_model(serve: Serve) -> None:
    running = await serve(served=None)
    answer = await ask(running.port, "GET", "/info")
    assert (answer.json["model_id"], answer.json["model_type"], answer.json["max_input_length"]) == (None, None, None)


# --- what is refused ---


SIMILAR = {"source_sentence": "w1", "sentences": ["w1"]}

# Of a text or a list of ids, which all routes parse alike, bad_input.toml has the rest.
EMBEDDING_ERRORS = [
    ("/embed", {}, "invalid_type", "inputs"),
    ("/embed", {"inputs": ["w1", ""]}, "empty_input", "inputs[1]"),
    ("/embed", {"inputs": [[5], [6, -1]]}, "invalid_token_id", "inputs[1][1]"),
    ("/embed", {"inputs": ["w1"] * 21}, "too_many_inputs", "inputs"),
    ("/embed", {"inputs": [TEN_WORDS] * 9}, "too_many_tokens", "inputs"),
    ("/embed", {"inputs": "w1", "dimension": 4}, "unknown_field", "dimension"),
    ("/embed", {"inputs": "w1", "normalize": "yes"}, "invalid_type", "normalize"),
    ("/embed", {"inputs": "w1", "truncate": 1}, "invalid_type", "truncate"),
    ("/embed", {"inputs": "w1", "truncation_direction": "LEFT"}, "invalid_value", "truncation_direction"),
    ("/embed", {"inputs": "w1", "prompt_name": "nobody's"}, "invalid_value", "prompt_name"),
    ("/embed", {"inputs": "w1", "encoding_format": "base64"}, "invalid_value", "encoding_format"),
    ("/embed_all", {"inputs": ["w1", ""]}, "empty_input", "inputs[1]"),
    ("/embed_all", {"inputs": "w1", "normalize": True}, "unknown_field", "normalize"),
    ("/tokenize", {"inputs": [5, 6]}, "invalid_type", "inputs"),
    ("/tokenize", {"inputs": [5, 6], "prompt_name": "query"}, "invalid_type", "inputs"),
    ("/tokenize", {"inputs": ["w1", ""]}, "empty_input", "inputs[1]"),
    ("/tokenize", {"inputs": "w1", "truncate": True}, "unknown_field", "truncate"),
    ("/tokenize", {"inputs": "w1", "model": "other"}, "model_not_found", "model"),
    ("/decode", {"ids": "w1"}, "invalid_type", "ids"),
    ("/decode", {"ids": []}, "empty_input", "ids"),
    ("/decode", {"ids": [[5], []]}, "empty_input", "ids[1]"),
    ("/decode", {"ids": [5, 64]}, "invalid_token_id", "ids[1]"),
    ("/decode", {"ids": [5, 2**70]}, "invalid_token_id", "ids[1]"),
    ("/decode", {"ids": [[5], [6, -1]]}, "invalid_token_id", "ids[1][1]"),
    ("/decode", {"ids": [[5], [6, True]]}, "invalid_token_id", "ids[1][1]"),
    ("/similarity", {}, "invalid_type", "inputs"),
    ("/similarity", {"inputs": "w1"}, "invalid_type", "inputs"),
    ("/similarity", {"inputs": {"sentences": ["w1"]}}, "invalid_type", "inputs.source_sentence"),
    ("/similarity", {"inputs": {"source_sentence": "w1"}}, "invalid_type", "inputs.sentences"),
    *(
        ("/similarity", {"inputs": SIMILAR | fields}, code, f"inputs.{param}")
        for fields, code, param in (
            ({"sentences": "w"}, "invalid_type", "sentences"),
            ({"sentences": []}, "empty_input", "sentences"),
            ({"source_sentence": ""}, "empty_input", "source_sentence"),
            ({"sentences": ["w1", ""]}, "empty_input", "sentences[1]"),
            ({"sentences": ["w1", TWENTY_WORDS]}, "context_length_exceeded", "sentences[1]"),
            ({"source_sentence": TWENTY_WORDS}, "context_length_exceeded", "source_sentence"),
            ({"sentences": ["w1"] * 20}, "too_many_inputs", "sentences"),
            ({"other": 1}, "unknown_field", "other"),
        )
    ),
    *(
        ("/similarity", {"inputs": SIMILAR, "parameters": parameters}, code, param)
        for parameters, code, param in (
            ({"truncation_direction": "up"}, "invalid_value", "parameters.truncation_direction"),
            ({"truncate": "yes"}, "invalid_type", "parameters.truncate"),
            ({"prompt_name": "nobody's"}, "invalid_value", "parameters.prompt_name"),
            ({"normalize": True}, "unknown_field", "parameters.normalize"),
            ([], "invalid_type", "parameters"),
        )
    ),
]
RELU = {"function_to_apply": "relu"}
SCORING_ERRORS = [
    ("/rerank", {"query": "w1", "texts": []}, "empty_input", "texts"),
    ("/rerank", {"query": "w1", "texts": "w1"}, "invalid_type", "texts"),
    ("/rerank", {"query": "w1", "texts": ["w1", ""]}, "empty_input", "texts[1]"),
    ("/rerank", {"query": "w1", "texts": ["w1", {"text": "w1"}]}, "invalid_type", "texts[1]"),
    ("/rerank", {"query": "", "texts": ["w1"]}, "empty_input", "query"),
    ("/rerank", {"texts": ["w1"]}, "invalid_type", "query"),
    ("/rerank", {"query": "w1", "texts": ["w1"] * 21}, "too_many_inputs", "texts"),
    ("/rerank", {"query": "w1", "texts": ["w1"], "top_n": 1}, "unknown_field", "top_n"),
    ("/predict", {"inputs": ""}, "empty_input", "inputs"),
    ("/predict", {"inputs": 5}, "invalid_type", "inputs"),
    ("/predict", {"inputs": []}, "empty_input", "inputs"),
    ("/predict", {"inputs": [5]}, "invalid_type", "inputs[0]"),
    ("/predict", {"inputs": ["w1", ["w1"]]}, "invalid_type", "inputs[1]"),
    ("/predict", {"inputs": ["w1", "w2", "w3"]}, "invalid_value", "inputs"),
    ("/predict", {"inputs": [["w1"], []]}, "empty_input", "inputs[1]"),
    ("/predict", {"inputs": [["w1"], "w2"]}, "invalid_type", "inputs[1]"),
    ("/predict", {"inputs": [["w1"], ["w2", ""]]}, "empty_input", "inputs[1][1]"),
    ("/predict", {"inputs": [["w1"], ["w2"] * 3]}, "invalid_value", "inputs[1]"),
    ("/predict", {"inputs": [["w1"]] * 21}, "too_many_inputs", "inputs"),
    ("/predict", {"inputs": [[TEN_WORDS]] * 9}, "too_many_tokens", "inputs"),
    ("/predict", {"inputs": [["w1"], [TWENTY_WORDS]]}, "context_length_exceeded", "inputs[1]"),
    ("/", {"inputs": "w1", "parameters": {"top_k": 0}}, "out_of_range", "parameters.top_k"),
    ("/", {"inputs": "w1", "parameters": RELU}, "invalid_value", "parameters.function_to_apply"),
    # A model that is not meant is told before what is wrong with texts, on /predict and its other form.
    *(
        ("/predict", {"inputs": inputs, "model": "another"} | parameters, "model_not_found", "model")
        for inputs in ("", 5, ["w1", "w2", "w3"], [["w1"]] * 21)
        for parameters in ({}, {"parameters": {}})
    ),
]


@pytest.mark.parametrize(
    ("tasks", "path", "fields", "code", "param"),
    [(["embed", "tokens"], *case) for case in EMBEDDING_ERRORS] + [(["score"], *case) for case in SCORING_ERRORS],
    ids=lambda value: repr(value)[-50:],
)
async def test_what_is_wrong_is_named(
    serve: Serve, reranker: ModelFacts, tasks: list[str], path: str, fields: dict[str, object], code: str, param: str
) -> None:
    served = dataclasses.replace(reranker, tasks=tasks, dimensions=1 if tasks == ["score"] else DIMENSIONS)
    running = await serve(served=served, max_inputs=20, max_request_tokens=100)
    answer = await post(running.port, path, fields)
    assert answer.refusal == (404 if code == "model_not_found" else 400, code, param)
    assert running.stub.submitted == []
