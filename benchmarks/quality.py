"""Does the engine, or a running server, give the vectors and scores that a checkpoint is known for?

    python benchmarks/quality.py --data DIR [--tasks stsb,xquad:en-de,...] [--compare-folder FOLDER]
        (--url http://127.0.0.1:8080 | --engine MODEL [--task score])

It scores what comes back for real texts. `--url` asks a server's `POST /v1/embeddings`, as a client would; `--engine`
runs worker.engine.Engine in this process on the CPU, in float32 and without a server, which is how models of scores and
of sparse rows are measured, too. A task may name its part:

- stsb[:LANGUAGE]: Spearman correlation of the similarity of two sentences with people's judgement of how alike they
  are, on the 1,379 pairs of a language's test split (`DIR/stsb/en-test.csv`).
- scifact, cranfield: nDCG@10 of retrieval, 300 claims against 5,183 abstracts (339 judgements) and 225 questions
  against 1,400 abstracts (1,837 judgements, graded), in BEIR's layout (`DIR/scifact/{corpus,queries}.jsonl`,
  `DIR/scifact/qrels/test.tsv`).
- xquad[:LANGUAGE[-LANGUAGE]]: mean reciprocal rank of the paragraph that a question was asked of among all 240, 1,190
  questions; of two languages the first is the questions' (`DIR/xquad/xquad.en.json`).
- rerank:scifact, rerank:cranfield: nDCG@10 of a cross-encoder that puts the best 100 of an embedding model into a new
  order. These come from an earlier run: `--save-rankings FILE` there, `--rankings FILE` here.

Conventions, those of the published numbers: a document is its title, a space and its text; only queries with a relevant
document count; too long texts are cut at the model's limit. The prompt is the checkpoint's default one unless
`--query-prompt` (for the sentences of stsb, too) and `--document-prompt` say otherwise: e5's "query: " and "passage: "
are in no file. Dense rows are compared by cosine in float64, sparse ones by their product. Scores lie in 0..1, where
leaderboards print 100 times that. Equal similarities keep the order of the corpus.

The ceiling is not 1 but what the same weights give in float32: stsb 0.8203 and scifact 0.6451 for all-MiniLM-L6-v2 (its
own limit of 256 tokens). Over its 300 queries scifact has a standard error of 0.023, so it does not tell apart two
*models* closer than that; two *servings of one checkpoint* answer the same queries and should agree to 0.0005.
`--compare-folder` measures that: sentence-transformers, where it is installed, runs the same texts from that folder in
float32 on this machine's CPU, and the table has both, the largest difference of a number of the rows (of an embedding's
component, of a score before any activation), and the text where it is. `--limit` takes every so manyth query or pair of
sentences where minutes are too long; documents are always all.

It measures no speed. Machine: any; a client of `--url` needs numpy and nothing else.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import csv
import http.client
import json
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from common.wire.messages import ModelFacts

Vector = npt.NDArray[np.floating[Any]]
Rows: TypeAlias = "Vector | csr_array"  # [texts, dimensions], or scores: [pairs]

T = TypeVar("T")

_TIMEOUT_S = 120.0
_RETRY_BUDGET_S = 300.0

# Of a similarity: what is smaller comes of rounding float32, and would put texts of the same tokens into an order.
# (all-MiniLM-L6-v2 reads most of a Chinese text as [UNK]; of 150 pairs the order of four cosines of 1 made 0.001.)
_DECIMALS = 6

_NUM_CANDIDATES = 100  # of a query, for reranking


class QualityError(Exception):
    """The answers, or the data, cannot be scored; the text says why."""


class System(Protocol):
    """Something that answers: our server, our engine, or what they are compared with."""

    num_tokens: int  # that it has run so far

    def embed(self, texts: list[str], prompt: str | None) -> Rows:
        """A row for each text, in float32; `prompt` None is the checkpoint's default."""

    def rank(self, query: str, documents: list[str]) -> Vector:
        """The score of each document, float32 [documents], before any activation."""


# --- tasks ---


class Task(Protocol):
    metric: str
    texts: list[str]  # what each row of an answer is of

    def score(self, system: System) -> tuple[float, Rows]:
        """The metric's value, in 0..1, and the rows that it was computed of."""


@dataclass(slots=True)
class Similarity:
    """Two sentences a row and the judged similarity of each row."""

    left: list[str]
    right: list[str]
    judged: list[float]
    prompt: str | None
    metric: str = "Spearman"
    texts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = self.left + self.right

    def score(self, system: System) -> tuple[float, Rows]:
        """Spearman correlation of similarity and judgement, and the rows of left then right."""
        rows = system.embed(self.texts, self.prompt)
        comparable = _comparable(rows)
        left, right = comparable[: len(self.left)], comparable[len(self.left) :]
        similarities = np.round((left * right).sum(axis=1), _DECIMALS)
        return spearman(similarities, np.array(self.judged)), rows


@dataclass(slots=True)
class Retrieval:
    """Queries, documents, and for each query the grade of its judged documents by their index."""

    queries: list[str]
    documents: list[str]
    grades: list[dict[int, float]]
    prompts: tuple[str | None, str | None]  # of queries and of documents
    metric: str = "nDCG@10"
    texts: list[str] = field(init=False)
    ranking: npt.NDArray[np.int64] | None = None  # [queries, documents], best first, of the last system that was scored

    def __post_init__(self) -> None:
        self.texts = self.queries + self.documents

    def score(self, system: System) -> tuple[float, Rows]:
        """Mean of the metric over the queries, and the rows of queries then documents."""
        queries = system.embed(self.queries, self.prompts[0])
        documents = system.embed(self.documents, self.prompts[1])
        products = _comparable(queries) @ _comparable(documents).T  # [queries, documents]
        dense = products if isinstance(products, np.ndarray) else products.toarray()
        self.ranking = np.argsort(-np.round(dense, _DECIMALS), axis=1, kind="stable")
        value = _mean(_METRICS[self.metric], self.ranking.tolist(), self.grades)
        return value, _stack([queries, documents])


@dataclass(slots=True)
class Rerank:
    """Queries, the documents that an embedding model found for each, best first, and their grades."""

    queries: list[str]
    documents: list[str]
    grades: list[dict[int, float]]
    candidates: list[list[int]]
    metric: str = "nDCG@10"
    texts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [
            f"{query} / {self.documents[index]}"
            for query, found in zip(self.queries, self.candidates, strict=True)
            for index in found
        ]

    def score(self, system: System) -> tuple[float, Rows]:
        """Mean nDCG@10 of the new order, and the scores of all pairs."""
        scores = [
            system.rank(query, [self.documents[index] for index in found])
            for query, found in zip(self.queries, self.candidates, strict=True)
        ]
        rankings = [
            [found[place] for place in np.argsort(-row, kind="stable")]
            for row, found in zip(scores, self.candidates, strict=True)
        ]
        return _mean(ndcg_at_10, rankings, self.grades), np.concatenate(scores)

    def value_before(self) -> float:
        """nDCG@10 of the order in which the candidates came."""
        return _mean(ndcg_at_10, self.candidates, self.grades)


# --- metrics ---


def average_ranks(values: Vector) -> npt.NDArray[np.float64]:
    """The rank of each value, from 1; equal values share the mean of the ranks that they take up.

    Source: Kendall, Rank Correlation Methods, chapter 3 ("mid-rank" method).
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    stops = np.r_[starts[1:], len(values)]
    ranks = np.empty(len(values))
    # A run [start, stop) takes up the ranks start + 1 .. stop.
    ranks[order] = np.repeat((starts + 1 + stops) / 2, stops - starts)
    return ranks


def spearman(a: Vector, b: Vector) -> float:
    """Spearman's rank correlation of two columns: Pearson's of their ranks, right with ties too.

    Raises:
        QualityError: a column has the same value everywhere, so that there is no correlation.

    Source: Kendall, Rank Correlation Methods, chapter 3.
    """
    x, y = average_ranks(a), average_ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    if scale == 0:
        raise QualityError("all values are equal: a rank correlation is not defined")
    return float(x @ y) / scale


def ndcg_at_10(ranking: list[int], grades: dict[int, float]) -> float:
    """nDCG@10 of one ranking of document indices, best first; documents without a grade count 0.

    The gain is the grade itself, not 2^grade - 1, as trec_eval's `ndcg_cut` and BEIR have it.
    Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques (2002), with
    the discount log2(rank + 1).
    """
    discounts = 1 / np.log2(np.arange(2, 12))
    gains = [grades.get(document, 0.0) for document in ranking[:10]]
    ideal = sorted(grades.values(), reverse=True)[:10]
    return float(gains @ discounts[: len(gains)]) / float(ideal @ discounts[: len(ideal)])


def reciprocal_rank(ranking: list[int], grades: dict[int, float]) -> float:
    """One over the rank, from 1, of the first document with a grade above 0; 0 where there is none."""
    found = (rank for rank, document in enumerate(ranking, start=1) if grades.get(document, 0.0) > 0)
    return 1 / next(found, np.inf)


_METRICS: dict[str, Callable[[list[int], dict[int, float]], float]] = {"nDCG@10": ndcg_at_10, "MRR": reciprocal_rank}


def _mean(
    metric: Callable[[list[int], dict[int, float]], float],
    rankings: Sequence[list[int]],
    grades: Sequence[dict[int, float]],
) -> float:
    return float(np.mean([metric(ranking, judged) for ranking, judged in zip(rankings, grades, strict=True)]))


# --- data ---


@dataclass(frozen=True, slots=True)
class Options:
    """What a task is made of, beside its name."""

    data: Path
    limit: int | None  # of queries, or of pairs of sentences
    prompts: tuple[str | None, str | None]  # before queries and documents
    rankings: dict[str, dict[str, list[int]]]  # task → a query's text → the indices of documents, best first


def load_task(name: str, options: Options) -> Task:
    """The task of a name such as `stsb:de`.

    Raises:
        QualityError: there is no such task, or rankings are missing.
        OSError: its files cannot be read.
    """
    task, _, part = name.partition(":")
    folder = options.data / task
    if task == "stsb":
        return _load_stsb(folder / f"{part or 'en'}-test.csv", options)
    if task == "xquad":
        asked_in, _, answered_in = (part or "en").partition("-")
        return _load_xquad(folder, asked_in, answered_in or asked_in, options)
    if task in _BEIR and not part:
        queries, documents, grades = _load_beir(folder)
        queries, grades = _some(queries, options.limit), _some(grades, options.limit)
        return Retrieval(queries, documents, grades, options.prompts)
    if task == "rerank" and part in _BEIR:
        queries, documents, grades = _load_beir(options.data / part)
        queries, grades = _some(queries, options.limit), _some(grades, options.limit)
        rankings = options.rankings.get(part, {})
        missing = next((query for query in queries if query not in rankings), None)
        if missing is not None:
            raise QualityError(f"{name}: --rankings has none for {part}'s query {missing!r}")
        return Rerank(queries, documents, grades, [rankings[query] for query in queries])
    raise QualityError(f"there is no task {name}")


_BEIR = ("scifact", "cranfield")


def _load_stsb(path: Path, options: Options) -> Similarity:
    """A CSV without header: sentence1, sentence2, score."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = _some(list(csv.reader(file)), options.limit)
    return Similarity([r[0] for r in rows], [r[1] for r in rows], [float(r[2]) for r in rows], options.prompts[0])


def _load_beir(folder: Path) -> tuple[list[str], list[str], list[dict[int, float]]]:
    """Queries, documents and grades of the test split; queries without a relevant document are left out."""
    documents = _read_jsonl(folder / "corpus.jsonl")
    index = {document["_id"]: i for i, document in enumerate(documents)}
    grades: dict[str, dict[int, float]] = {}
    lines = (folder / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines[1:]:
        query_id, document_id, grade = line.split("\t")
        grades.setdefault(query_id, {})[index[document_id]] = float(grade)
    judged = [
        query
        for query in _read_jsonl(folder / "queries.jsonl")
        if any(grade > 0 for grade in grades.get(query["_id"], {}).values())
    ]
    texts = [f"{document['title']} {document['text']}".strip() for document in documents]
    # Two of Cranfield's have no text at all. A server refuses an empty one; a space is text without a token.
    texts = [text or " " for text in texts]
    return [query["text"] for query in judged], texts, [grades[query["_id"]] for query in judged]


def _load_xquad(folder: Path, asked_in: str, answered_in: str, options: Options) -> Retrieval:
    """In SQuAD's layout, whose paragraphs and questions are in the same order in all languages."""
    asked, answered = (_read_paragraphs(folder / f"xquad.{language}.json") for language in (asked_in, answered_in))
    questions = [(qa["question"], index) for index, paragraph in enumerate(asked) for qa in paragraph["qas"]]
    questions = _some(questions, options.limit)
    return Retrieval(
        queries=[question for question, _ in questions],
        documents=[paragraph["context"] for paragraph in answered],
        grades=[{index: 1.0} for _, index in questions],
        prompts=options.prompts,
        metric="MRR",
    )


def _read_paragraphs(path: Path) -> list[dict[str, Any]]:
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [paragraph for article in articles for paragraph in article["paragraphs"]]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _some(values: list[T], limit: int | None) -> list[T]:
    """At most `limit` of them, evenly spread."""
    if limit is None or limit >= len(values):
        return values
    return [values[place * len(values) // limit] for place in range(limit)]


# --- a server ---


class Server:
    """The embeddings route of one server, over connections that stay open.

    `models` and `fingerprints` collect what the answers named; `num_tokens` sums their `usage`.
    Owns its threads and connections: use it as a context manager.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        texts_per_request: int,
        num_connections: int,
    ) -> None:
        """`url` is the root of the server; requests go out on `num_connections` at once."""
        self.models: set[str] = set()
        self.fingerprints: set[str] = set()
        self.num_tokens = 0
        self._model = model
        self._texts_per_request = texts_per_request
        self._path = urlsplit(url).path.rstrip("/") + "/v1/embeddings"
        self._threads = ThreadPoolExecutor(num_connections)
        # As many connections as threads, so that `get` never waits.
        self._connections: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()
        for _ in range(num_connections):
            self._connections.put(_open_connection(url))

    def __enter__(self) -> Server:
        """The server itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Drop the requests not yet sent, wait for the others and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        while not self._connections.empty():
            self._connections.get().close()

    def embed(self, texts: list[str], prompt: str | None) -> Vector:
        """The server's vectors, float32 [texts, dimensions].

        Raises:
            QualityError: an answer is not 200, or not one finite vector a text, or of another model than before.
        """
        size = self._texts_per_request
        requests = [texts[start : start + size] for start in range(0, len(texts), size)]
        parts: list[Vector] = []
        answers = self._threads.map(lambda request: self._post(request, prompt), requests)
        for request, (answer, headers) in zip(requests, answers, strict=True):
            parts.append(_parse_vectors(answer, len(request)))
            self.models.add(str(answer.get("model")))
            self.num_tokens += int(answer.get("usage", {}).get("prompt_tokens", 0))
            fingerprint = headers.get("X-Model-Fingerprint")
            if fingerprint is not None:
                self.fingerprints.add(fingerprint)
        if len(self.models) > 1 or len(self.fingerprints) > 1:
            raise QualityError(f"the model changed meanwhile: {sorted(self.models)} {sorted(self.fingerprints)}")
        vectors = np.concatenate(parts)
        if not np.isfinite(vectors).all():
            raise QualityError("the server gave a vector that is not finite")
        return vectors

    def rank(self, query: str, documents: list[str]) -> Vector:
        raise QualityError("reranking is measured with --engine")

    def _post(self, texts: list[str], prompt: str | None) -> tuple[dict[str, Any], http.client.HTTPMessage]:
        """The answer to one request; 429 and 503 are asked again after the time that they name."""
        request: dict[str, Any] = {"input": texts, "encoding_format": "base64", "truncate": True}
        if self._model is not None:
            request["model"] = self._model
        if prompt is not None:
            request["prompt"] = prompt
        body = json.dumps(request).encode()
        give_up_at = time.monotonic() + _RETRY_BUDGET_S
        connection = self._connections.get()
        try:
            while True:
                status, headers, answer = _exchange(connection, self._path, body)
                if status == 200:
                    return json.loads(answer), headers
                retry_after_s = _retry_after_s(headers)
                again = status == 429 or (status == 503 and "Retry-After" in headers)
                if not again or time.monotonic() + retry_after_s > give_up_at:
                    text = answer[:500].decode(errors="replace")
                    raise QualityError(f"POST {self._path} answered {status}: {text}")
                time.sleep(retry_after_s)
        finally:
            self._connections.put(connection)


def _open_connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme not in ("http", "https"):
        raise QualityError(f"--url {url}: http://HOST:PORT expected")
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def _exchange(
    connection: http.client.HTTPConnection, path: str, body: bytes
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of one POST; http.client connects again after a close by itself."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
    except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
        # The server may close an idle connection just as it is used. An embedding has no side
        # effect, so asking once more is safe; a second failure is real.
        connection.close()
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
    return response.status, response.headers, response.read()


def _retry_after_s(headers: http.client.HTTPMessage) -> float:
    """The wait that an answer asks for in whole seconds; one second where it names none."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 1.0


def _parse_vectors(answer: dict[str, Any], count: int) -> Vector:
    """The little-endian float32 vectors of an answer, [count, dimensions]."""
    data = answer["data"]
    if [item["index"] for item in data] != list(range(count)):
        raise QualityError(f"{count} texts sent, and the answer's indices are not 0..{count - 1}")
    return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])


# --- the engine, in this process ---


class InProcess:
    """The engine on this machine's CPU in float32, fed as gateway and scheduler feed it: in order of arrival, as many
    sequences a step as its budget of tokens holds."""

    def __init__(self, model: str, task: str) -> None:
        """Raises QualityError: the model is not here, or cannot be served."""
        from common.config import WorkerConfig
        from common.metrics import Metrics
        from common.model_location import ModelNotFound, find_model
        from common.text.pairs import pair_tokenizer
        from common.text.tokenization import Tokenizer, TruncationRule
        from worker.checkpoint.files import ModelError
        from worker.engine.engine import Engine

        config = WorkerConfig(run_dir="unused", device="cpu", dtype="float32", task=task)
        try:
            self.engine = Engine(find_model(model), config, Metrics())
        except (ModelNotFound, ModelError) as error:
            raise QualityError(f"--engine {model}: {error}") from error
        self.facts: ModelFacts = self.engine.hello()
        self.num_tokens = 0
        self._tokenizer = Tokenizer(self.facts)
        self._pairs = pair_tokenizer(self.facts, self._tokenizer) if "score" in self.facts.tasks else None
        self._truncation = TruncationRule(allowed=True)

    def embed(self, texts: list[str], prompt: str | None) -> Rows:
        facts = self.facts
        if self._pairs is not None:
            raise QualityError(f"{facts.name} scores pairs: its task is rerank")
        if prompt is None:
            prompt = "" if facts.default_prompt_name is None else facts.prompts[facts.default_prompt_name]
        sequences = self._tokenizer.encode([prompt + text for text in texts], self._truncation)
        starts = None
        if prompt and not facts.include_prompt:
            starts = [self._tokenizer.prompt_length(prompt)] * len(sequences)
        return self._run(sequences, row_starts=starts)

    def rank(self, query: str, documents: list[str]) -> Vector:
        if self._pairs is None:
            raise QualityError(f"{self.facts.name} scores no pairs: its tasks are {', '.join(self.facts.tasks)}")
        if self.facts.num_labels != 1:
            raise QualityError(f"{self.facts.name} gives {self.facts.num_labels} scores; reranking needs one")
        pairs = self._pairs.encode(query, documents, self._truncation)
        starts = [pair.type_start for pair in pairs] if self.facts.has_token_types else None
        rows: Vector = self._run([pair.ids for pair in pairs], type_starts=starts)
        return rows[:, 0]

    def _run(
        self,
        sequences: list[npt.NDArray[np.int32]],
        *,
        row_starts: list[int] | None = None,
        type_starts: list[int] | None = None,
    ) -> Rows:
        from common.wire.messages import Batch
        from common.wire.rows import ENCODINGS

        facts = self.facts
        sparse = "sparse" in facts.tasks
        parts: list[Rows] = []
        for start, stop in _steps([len(ids) for ids in sequences], facts.max_batch_tokens):
            lengths = np.array([len(ids) for ids in sequences[start:stop]], dtype=np.int32)
            optional: dict[str, npt.NDArray[np.int32]] = {}
            if row_starts is not None:
                spans = np.stack([np.array(row_starts[start:stop], dtype=np.int32), lengths], axis=1)
                optional = {"span_counts": np.ones_like(lengths), "spans": spans}
            if type_starts is not None:
                optional["type_starts"] = np.array(type_starts[start:stop], dtype=np.int32)
            batch = Batch(
                epoch=0,
                batch_id=0,
                token_ids=np.concatenate(sequences[start:stop]),
                lengths=lengths,
                dimensions=np.full_like(lengths, facts.dimensions),
                normalize=np.full(len(lengths), facts.normalize, dtype=np.uint8),
                encodings=np.full(len(lengths), ENCODINGS["sparse" if sparse else "float32"], dtype=np.uint8),
                **optional,
            )
            answer = self.engine.step(batch).numpy()
            if not answer.finite.all():
                raise QualityError("the engine gave a row that is not finite")
            parts.append(_read_sparse(answer.rows, facts.dimensions) if sparse else answer.rows.view("<f4"))
            self.num_tokens += int(lengths.sum())
        return _stack(parts)


def _steps(lengths: list[int], budget: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of sequences, each of at most `budget` tokens, or of one sequence."""
    start, num_tokens = 0, 0
    for index, length in enumerate(lengths):
        if index > start and num_tokens + length > budget:
            yield start, index
            start, num_tokens = index, 0
        num_tokens += length
    yield start, len(lengths)


def _read_sparse(rows: npt.NDArray[np.uint8], dimensions: int) -> csr_array:
    from scipy.sparse import csr_array

    from common.wire.rows import read_sparse

    columns, values = zip(*map(read_sparse, rows), strict=True)
    offsets = np.cumsum([0, *map(len, columns)])
    return csr_array((np.concatenate(values), np.concatenate(columns), offsets), shape=(len(rows), dimensions))


# --- what they are compared with ---


class Reference:
    """sentence-transformers on a checkpoint's folder, float32 on the CPU."""

    def __init__(self, folder: Path, task: str) -> None:
        """`task` is embed, score or sparse. Raises ImportError: it is not installed."""
        import torch
        from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

        classes = {"embed": SentenceTransformer, "score": CrossEncoder, "sparse": SparseEncoder}
        options = {"dtype": torch.float32}
        self._model: Any = classes[task](str(folder), device="cpu", local_files_only=True, model_kwargs=options)
        self._identity = torch.nn.Identity()
        self._sparse = task == "sparse"
        self.num_tokens = 0  # not counted

    def embed(self, texts: list[str], prompt: str | None) -> Rows:
        rows = self._model.encode(texts, prompt=prompt, batch_size=32, show_progress_bar=False)
        if not self._sparse:
            return rows
        from scipy.sparse import csr_array

        rows = rows.coalesce()
        return csr_array((rows.values().numpy(), rows.indices().numpy()), shape=tuple(rows.shape))

    def rank(self, query: str, documents: list[str]) -> Vector:
        pairs = [(query, document) for document in documents]
        scores: Vector = self._model.predict(
            pairs, batch_size=32, activation_fn=self._identity, show_progress_bar=False
        )
        return scores


def compare(task: Task, rows: Rows, expected: Rows) -> dict[str, Any]:
    """How far apart the rows of two systems are: the largest difference of a number, where it is, and, of embeddings,
    the lowest cosine."""
    if rows.shape != expected.shape:  # so with a model that the server cuts down
        return {}
    by_row = abs(rows - expected)
    if by_row.ndim == 2:
        maxima = by_row.max(axis=1)
        by_row = maxima if isinstance(maxima, np.ndarray) else maxima.toarray().ravel()
    worst = int(np.argmax(by_row))
    compared: dict[str, Any] = {"max_difference": float(by_row[worst]), "worst_text": task.texts[worst]}
    if isinstance(rows, np.ndarray) and rows.ndim == 2:
        compared["min_cosine"] = float((_comparable(rows) * _comparable(expected)).sum(axis=1).min())
    return compared


def _comparable(rows: Rows) -> Any:  # noqa: ANN401  # both kinds have the same operators
    """Rows in float64 whose products say how alike they are: dense ones at length 1."""
    wide = rows.astype(np.float64)
    if not isinstance(wide, np.ndarray):
        return wide
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    if not (norms > 0).all():
        raise QualityError("a vector has length 0: its cosine is not defined")
    return wide / norms


def _stack(parts: list[Rows]) -> Rows:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


# --- a run ---


def main() -> int:
    """Score each task, and against the reference where one is asked for."""
    args = _parse_arguments()
    rankings = {} if args.rankings is None else json.loads(args.rankings.read_text(encoding="utf-8"))
    options = Options(args.data, args.limit, (args.query_prompt, args.document_prompt), rankings)
    tasks = {name: load_task(name, options) for name in args.tasks.split(",")}
    if args.engine is not None:
        engine = InProcess(args.engine, args.task)
        results = _measure(tasks, engine, _open_reference(args.compare_folder, engine.facts.tasks[0]))
        model, fingerprint = engine.facts.name, engine.facts.fingerprint
    else:
        with Server(
            args.url,
            model=args.model,
            texts_per_request=args.texts_per_request,
            num_connections=args.connections,
        ) as server:
            results = _measure(tasks, server, _open_reference(args.compare_folder, "embed"))
            model, fingerprint = (next(iter(seen), None) for seen in (server.models, server.fingerprints))
    summary = {
        "benchmark": "quality",
        "url": args.url if args.engine is None else None,
        "model": model,
        "fingerprint": fingerprint,
        "limit": args.limit,
        "tasks": results,
    }
    if args.save_rankings is not None:
        _save_rankings(args.save_rankings, tasks)
    _print_table(summary)
    print(json.dumps(summary))
    return 0


def _open_reference(folder: Path | None, task: str) -> Reference | None:
    if folder is None:
        return None
    try:
        return Reference(folder, task)
    except ImportError:
        print("sentence-transformers is not installed: no comparison", file=sys.stderr)
        return None


def _measure(tasks: dict[str, Task], system: System, reference: Reference | None) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        tokens_before = system.num_tokens
        expected, expected_rows = (None, None) if reference is None else task.score(reference)
        value, rows = task.score(system)
        results[name] = {
            "metric": task.metric,
            "value": value,
            "num_texts": len(task.texts),
            "num_tokens": system.num_tokens - tokens_before,
        }
        if isinstance(task, Rerank):
            results[name]["value_before"] = task.value_before()
        if expected is not None and expected_rows is not None:
            results[name] |= {"reference": expected, "difference": value - expected}
            results[name] |= compare(task, rows, expected_rows)
    return results


def _save_rankings(path: Path, tasks: dict[str, Task]) -> None:
    saved = {
        name: dict(zip(task.queries, task.ranking[:, :_NUM_CANDIDATES].tolist(), strict=True))
        for name, task in tasks.items()
        if isinstance(task, Retrieval) and task.ranking is not None
    }
    path.write_text(json.dumps(saved), encoding="utf-8")


def _print_table(summary: dict[str, Any]) -> None:
    print(f"model {summary['model']}, fingerprint {summary['fingerprint']}")
    columns = (
        ("value", "value", "9.5f"),
        ("reference", "reference", "9.5f"),
        ("difference", "difference", "+11.5f"),
        ("max_difference", "largest", "9.1e"),
        ("min_cosine", "min cosine", "11.7f"),
        ("num_texts", "texts", "6d"),
        ("num_tokens", "tokens", "9d"),
    )
    widths = [int(form.lstrip("+").rstrip("def").partition(".")[0]) for _, _, form in columns]
    titles = (f"{title:>{width}}" for (_, title, _), width in zip(columns, widths, strict=True))
    print(f"{'task':17} {'metric':9} {' '.join(titles)}")
    for name, result in summary["tasks"].items():
        cells = (
            f"{result[key]:{form}}" if key in result else f"{'-':>{width}}"
            for (key, _, form), width in zip(columns, widths, strict=True)
        )
        print(f"{name:17} {result['metric']:9} {' '.join(cells)}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score the vectors, or the scores, of a server or of the engine.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server")
    parser.add_argument("--engine", help="no server: run this model (a folder, or a name) here on the CPU")
    parser.add_argument("--task", default="auto", help="the engine's --task")
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder a task")
    parser.add_argument("--tasks", default="stsb,scifact", help="default: %(default)s")
    parser.add_argument("--limit", type=_parse_count, help="take this many queries, or pairs, of each task")
    parser.add_argument("--query-prompt", help="goes before queries and the sentences of stsb")
    parser.add_argument("--document-prompt", help="goes before documents")
    parser.add_argument("--save-rankings", type=Path, help="where to write the best 100 documents of each query")
    parser.add_argument("--rankings", type=Path, help="what rerank puts into a new order")
    parser.add_argument("--compare-folder", type=Path, help="checkpoint that sentence-transformers runs here as well")
    parser.add_argument("--model", help="model to ask for, where the server has several")
    parser.add_argument("--texts-per-request", type=_parse_count, default=64)
    parser.add_argument("--connections", type=_parse_count, default=4)
    return parser.parse_args()


def _parse_count(value: str) -> int:
    count = int(value)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (QualityError, OSError, http.client.HTTPException) as error:
        sys.exit(f"quality.py: {type(error).__name__}: {error}")
