"""/rerank and /score of the real suite against sentence-transformers' CrossEncoder, which reads the same folder."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import processors

from tests import parity
from tests.models import tokenizer
from tests.parity import VOCAB_SIZE
from tests.suite import Suite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 40  # tokens
QUERY = "w3 w9 w14"
DOCUMENTS = [
    "w3 w9 w14",
    "w4 w9 w14 w20",
    "w60 w61 w62 w63 w64 w65 w66",
    "w1",
    " ",
    "w14 w9 w3 unknown",
    " ".join(f"w{3 + 7 * i % 53}" for i in range(LIMIT + 20)),  # is cut
    "w3 w9 w14",
    "w50 w51",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT cross-encoder as transformers saves it."""
    path = tmp_path_factory.mktemp("cross-encoder")
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=LIMIT,
        num_labels=1,
    )
    parity.seeded(transformers.BertForSequenceClassification(config)).save_pretrained(path)
    words = tokenizer(VOCAB_SIZE - 3)
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=LIMIT,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[UNK]",
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def suite(folder: Path) -> Iterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="hr-") as run:
        suite = Suite(f"{run}/run", str(folder), "--workers", "1", "--gateways", "1", "--threads", "1")
        try:
            suite.wait_until_ready()
            yield suite
        finally:
            suite.stop()


def post(suite: Suite, path: str, fields: dict[str, object]) -> dict:
    body = json.dumps(fields).encode()
    request = urllib.request.Request(suite.url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_scores_and_their_order_are_those_of_sentence_transformers(folder: Path, suite: Suite) -> None:
    library = CrossEncoder(str(folder), device="cpu").predict([(QUERY, document) for document in DOCUMENTS])

    ranked = post(suite, "/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": True})["results"]
    raw = post(suite, "/rerank", {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True})["results"]
    scored = post(suite, "/score", {"text_1": QUERY, "text_2": DOCUMENTS, "truncate": True})["data"]

    order = np.argsort(-library, kind="stable").tolist()
    assert [result["index"] for result in ranked] == [result["index"] for result in raw] == order
    assert [result["document"]["text"] for result in ranked] == [DOCUMENTS[index] for index in order]
    np.testing.assert_allclose([result["relevance_score"] for result in ranked], library[order], rtol=0, atol=1e-5)
    np.testing.assert_allclose([item["score"] for item in scored], library, rtol=0, atol=1e-5)
    logits = np.array([result["relevance_score"] for result in raw])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), library[order], rtol=0, atol=1e-5)
    assert np.ptp(library) > 0.05


def test_teis_routes_have_the_same_scores_and_label_single_texts_as_transformers_does(
    folder: Path, suite: Suite
) -> None:
    texts = [text for text in DOCUMENTS if text != " "]
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    encoded = [words(text, return_tensors="pt", truncation=True, max_length=LIMIT) for text in texts]
    library = [model(**text).logits.item() for text in encoded]

    raw = post(suite, "/rerank", {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True})["results"]
    ranks = post(suite, "/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "truncate": True})
    pairs = [[QUERY, document] for document in DOCUMENTS]
    pairs_and_texts = [*pairs, *([text] for text in texts)]
    labels = post(suite, "/predict", {"inputs": pairs_and_texts, "raw_scores": True, "truncate": True})

    assert [rank["index"] for rank in ranks] == [result["index"] for result in raw]
    scores = {result["index"]: result["relevance_score"] for result in raw}
    assert [rank["score"] for rank in ranks] == list(scores.values())
    assert {label["label"] for [label] in labels} == {"LABEL_0"}
    found = [label["score"] for [label] in labels]
    np.testing.assert_allclose(found, [scores[i] for i in range(len(pairs))] + library, rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_a_thousand_documents_score_as_each_of_them_alone(suite: Suite) -> None:
    rng = np.random.default_rng(5)
    documents = [" ".join(f"w{n}" for n in rng.integers(0, 80, rng.integers(1, 30))) for _ in range(1000)]
    chosen = list(range(0, 1000, 97))

    together = post(suite, "/rerank", {"query": QUERY, "documents": documents, "raw_scores": True})["results"]
    alone = [post(suite, "/score", {"text_1": QUERY, "text_2": documents[i], "raw_scores": True}) for i in chosen]

    found = {result["index"]: result["relevance_score"] for result in together}
    assert len(found) == 1000
    assert list(found.values()) == sorted(found.values(), reverse=True)
    np.testing.assert_allclose(
        [found[i] for i in chosen], [answer["data"][0]["score"] for answer in alone], rtol=0, atol=1e-5
    )
