"""The quality benchmark: its metrics by hand-computed values, its tasks by known answers, its engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.quality import (
    InProcess,
    Options,
    QualityError,
    Retrieval,
    Similarity,
    Vector,
    compare,
    load_task,
    ndcg_at_10,
    reciprocal_rank,
    spearman,
)
from tests.models import embed, write_bert

CORPUS = [
    {"_id": "a", "title": "red", "text": "fox"},
    {"_id": "b", "title": "", "text": ""},
    {"_id": "c", "title": "", "text": "grey cat"},
]
QUERIES = [{"_id": "1", "text": "cat"}, {"_id": "2", "text": "unjudged"}, {"_id": "3", "text": "fox"}]
QRELS = "query-id\tcorpus-id\tscore\n1\tc\t2\n1\ta\t1\n3\ta\t1\n2\tb\t0\n"


@dataclass(frozen=True, slots=True)
class Table:
    """Answers what it was told beforehand: a vector for each prompt and text, a score for each document."""

    vectors: dict[str, list[float]]
    scores: dict[str, float]
    num_tokens: int = 0

    def embed(self, texts: list[str], prompt: str | None) -> Vector:
        return np.array([self.vectors[(prompt or "") + text] for text in texts], dtype=np.float32)

    def rank(self, query: str, documents: list[str]) -> Vector:
        return np.array([self.scores[document] for document in documents], dtype=np.float32)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    for name, lines in {"corpus.jsonl": CORPUS, "queries.jsonl": QUERIES}.items():
        path = tmp_path / "scifact" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "scifact" / "qrels").mkdir()
    (tmp_path / "scifact" / "qrels" / "test.tsv").write_text(QRELS)
    return Options(tmp_path, limit=None, prompts=(None, None), rankings={})


def test_equal_values_share_the_mean_of_their_ranks_in_a_rank_correlation() -> None:
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([10.0, 20, 20, 40])) == pytest.approx(0.9486833)


def test_a_rank_correlation_of_equal_values_is_refused() -> None:
    with pytest.raises(QualityError, match="not defined"):
        spearman(np.array([1.0, 2, 3]), np.array([5.0, 5, 5]))


def test_ndcg_weighs_grades_by_the_logarithm_of_their_rank() -> None:
    assert ndcg_at_10([7, 5, 9], {5: 2.0, 9: 1.0}) == pytest.approx((2 / np.log2(3) + 1 / 2) / (2 + 1 / np.log2(3)))


def test_reciprocal_rank_is_that_of_the_first_relevant_document() -> None:
    assert reciprocal_rank([4, 2, 0], {0: 1.0, 2: 0.0}) == pytest.approx(1 / 3)
    assert reciprocal_rank([4, 2, 0], {5: 1.0}) == 0


def test_similarities_that_rounding_alone_tells_apart_are_equal() -> None:
    task = Similarity(["a", "b", "c", "d"], ["A", "B", "C", "D"], [1.0, 2.0, 3.0, 4.0], None)
    vectors = {"a": [1.0, 3.0], "A": [1.0, 3.0], "b": [0.7, 0.3], "B": [0.7, 0.3], "c": [0.1, 0.9], "C": [0.1, 0.9]}

    value, _ = task.score(Table(vectors | {"d": [1.0, 0.0], "D": [0.0, 1.0]}, {}))

    assert value == pytest.approx(-0.7745967)  # ranks 3, 3, 3, 1


def test_retrieval_counts_judged_queries_alone_and_keeps_an_empty_document(options: Options) -> None:
    task = load_task("scifact", options)

    assert isinstance(task, Retrieval)
    assert task.queries == ["cat", "fox"]
    assert task.documents == ["red fox", " ", "grey cat"]
    assert task.grades == [{2: 2.0, 0: 1.0}, {0: 1.0}]


def test_retrieval_ranks_by_cosine_whatever_the_length_of_vectors(options: Options) -> None:
    task = load_task("scifact", replace(options, prompts=("q: ", None)))
    vectors = {"q: cat": [1.0, 0], "q: fox": [0, 3.0], "red fox": [5.0, 9], " ": [0, 1.0], "grey cat": [0.1, 0]}

    value, rows = task.score(Table({text: list(row) for text, row in vectors.items()}, {}))

    # The cat's documents come in the order of their grades; the fox's comes behind the empty one.
    assert value == pytest.approx((1 + 1 / np.log2(3)) / 2)
    assert rows.shape == (5, 2)


def test_reranking_orders_the_candidates_of_an_earlier_run_by_their_scores(options: Options) -> None:
    rankings = {"scifact": {"cat": [1, 2, 0], "fox": [2, 0]}}
    task = load_task("rerank:scifact", replace(options, rankings=rankings))

    value, scores = task.score(Table({}, {"red fox": 1.0, " ": -2.0, "grey cat": 3.0}))

    assert value == pytest.approx((1 + 1 / np.log2(3)) / 2)
    np.testing.assert_array_equal(scores, [-2, 3, 1, 3, 1])
    assert task.texts[1] == "cat / grey cat"


def test_reranking_without_candidates_for_a_query_is_refused(options: Options) -> None:
    with pytest.raises(QualityError, match="--rankings has none for scifact's query 'fox'"):
        load_task("rerank:scifact", replace(options, rankings={"scifact": {"cat": [1]}}))


def test_questions_in_one_language_are_answered_by_paragraphs_in_another(options: Options) -> None:
    for language, context, question in (("en", "paragraph", "question"), ("de", "Absatz", "Frage")):
        paragraphs = [{"context": f"{context} {i}", "qas": [{"question": f"{question} {i}"}]} for i in range(4)]
        path = options.data / "xquad" / f"xquad.{language}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))

    task = load_task("xquad:en-de", replace(options, limit=2))

    assert isinstance(task, Retrieval)
    assert task.queries == ["question 0", "question 2"]  # spread over all, not the first ones
    assert task.documents == ["Absatz 0", "Absatz 1", "Absatz 2", "Absatz 3"]
    assert task.grades == [{0: 1.0}, {2: 1.0}]


def test_an_unknown_task_is_refused(options: Options) -> None:
    with pytest.raises(QualityError, match="no task scifact:en"):
        load_task("scifact:en", options)


def test_a_comparison_names_the_text_whose_rows_are_farthest_apart() -> None:
    task = Similarity(["a", "b"], ["c", "d"], [1.0, 2.0], None)
    rows: npt.NDArray[np.float32] = np.eye(4, dtype=np.float32)
    expected = rows.copy()
    expected[2, 3] = 0.5

    compared = compare(task, rows, expected)

    assert compared["max_difference"] == 0.5
    assert compared["worst_text"] == "c"
    assert compared["min_cosine"] == pytest.approx(1 / np.sqrt(1.25))


@pytest.mark.thorough
@pytest.mark.slow
def test_the_engine_answers_in_the_order_of_the_texts_over_several_steps(tmp_path: Path) -> None:
    system = InProcess(str(write_bert(tmp_path / "model")), "auto")
    texts = [" ".join(f"w{(seed * 7 + i) % 50}" for i in range(1 + seed % 11)) for seed in range(200)]

    rows = system.embed(texts, None)

    alone = [embed(system.engine, [[1, *(int(w[1:]) + 3 for w in text.split()), 2]], normalize=[1]) for text in texts]
    np.testing.assert_allclose(rows, np.concatenate(alone), atol=1e-6)
    assert system.num_tokens == sum(len(text.split()) + 2 for text in texts) > system.facts.max_batch_tokens
