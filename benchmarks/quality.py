"""Does the running server give the embeddings that its checkpoint is known for?

    python benchmarks/quality.py --url http://127.0.0.1:8080 --data DIR [--tasks stsb,scifact]
        [--compare-folder MODEL_FOLDER]

It sends real texts through `POST /v1/embeddings`, as a client would, and scores what comes back:

- stsb: Spearman correlation of the cosine of two sentences with people's judgement of how alike
  they are, on the 1,379 pairs of the English test split (`DIR/stsb/en-test.csv`).
- scifact: nDCG@10 of retrieval by cosine, 300 claims against 5,183 abstracts, on the 339 judgements
  of the BEIR test split (`DIR/scifact/{corpus,queries}.jsonl`, `DIR/scifact/qrels/test.tsv`).

Conventions, those of the published numbers: a document is its title, a space and its text; only
queries with a relevant document count; texts over the model's limit are cut by the server
(`truncate: true`); no prompt is asked for. Scores lie in 0..1, where leaderboards print 100 times
that. Cosines are computed in float64. Equal cosines keep the order of the corpus.

The ceiling is not 1 but what the same weights give in float32: 0.8203 and 0.6451 for
all-MiniLM-L6-v2 (its own limit of 256 tokens). Over its 300 queries scifact has a standard error of
0.023, so it does not tell apart two *models* closer than that; two *servings of one checkpoint*
answer the same queries and should agree to 0.0005. `--compare-folder` measures that: where
sentence-transformers is installed, it encodes the same texts from the same folder in float32 on
this machine's CPU (minutes for scifact), and the table has both.

It measures no speed. Machine: any; the client needs numpy and nothing else.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]
Encoder = Callable[[list[str]], Vector]

_TIMEOUT_S = 120.0
_RETRY_BUDGET_S = 300.0


class QualityError(Exception):
    """The server's answer, or the data, cannot be scored; the text says why."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two sentences a row and the judged similarity of each row."""

    left: list[str]
    right: list[str]
    scores: list[float]

    def score(self, encode: Encoder) -> tuple[float, Vector]:
        """Spearman correlation of cosine and judgement, and the vectors of left then right."""
        vectors = encode(self.left + self.right)
        unit = _unit_rows(vectors)
        count = len(self.left)
        cosines = np.einsum("ij,ij->i", unit[:count], unit[count:])
        return spearman(cosines, np.array(self.scores)), vectors


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Queries, documents, and for each query the grade of its judged documents by their index."""

    queries: list[str]
    documents: list[str]
    grades: list[dict[int, float]]

    def score(self, encode: Encoder) -> tuple[float, Vector]:
        """Mean nDCG@10 over the queries, and the vectors of queries then documents."""
        vectors = encode(self.queries + self.documents)
        unit = _unit_rows(vectors)
        count = len(self.queries)
        cosines = unit[:count] @ unit[count:].T  # [queries, documents]
        rankings = np.argsort(-cosines, axis=1, kind="stable")[:, :10]
        values = [ndcg_at_10(r.tolist(), g) for r, g in zip(rankings, self.grades, strict=True)]
        return float(np.mean(values)), vectors


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


def load_stsb(folder: Path) -> Pairs:
    """The English test split from a CSV without header: sentence1, sentence2, score."""
    with (folder / "en-test.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return Pairs([r[0] for r in rows], [r[1] for r in rows], [float(r[2]) for r in rows])


def load_scifact(folder: Path) -> Retrieval:
    """The test split in BEIR's layout; queries without a relevant document are left out."""
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
    return Retrieval(
        queries=[query["text"] for query in judged],
        documents=[f"{document['title']} {document['text']}".strip() for document in documents],
        grades=[grades[query["_id"]] for query in judged],
    )


_LOADERS: dict[str, Callable[[Path], Pairs | Retrieval]] = {
    "stsb": load_stsb,
    "scifact": load_scifact,
}
_METRICS = {"stsb": "Spearman", "scifact": "nDCG@10"}


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

    def encode(self, texts: list[str]) -> Vector:
        """The server's vectors, float32 [texts, dimensions].

        Raises:
            QualityError: an answer is not 200, or not one finite vector a text.
        """
        size = self._texts_per_request
        requests = [texts[start : start + size] for start in range(0, len(texts), size)]
        parts: list[Vector] = []
        answers = self._threads.map(self._post, requests)
        for request, (answer, headers) in zip(requests, answers, strict=True):
            parts.append(_parse_vectors(answer, len(request)))
            self.models.add(str(answer.get("model")))
            self.num_tokens += int(answer.get("usage", {}).get("prompt_tokens", 0))
            fingerprint = headers.get("X-Model-Fingerprint")
            if fingerprint is not None:
                self.fingerprints.add(fingerprint)
        vectors = np.concatenate(parts)
        if not np.isfinite(vectors).all():
            raise QualityError("the server gave a vector that is not finite")
        return vectors

    def _post(self, texts: list[str]) -> tuple[dict[str, Any], http.client.HTTPMessage]:
        """The answer to one request; 429 and 503 are asked again after the time that they name."""
        request: dict[str, Any] = {"input": texts, "encoding_format": "base64", "truncate": True}
        if self._model is not None:
            request["model"] = self._model
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


def reference_encoder(folder: Path) -> Encoder | None:
    """sentence-transformers on that folder, float32 on the CPU; None where it is not installed."""
    try:
        import torch
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    model = SentenceTransformer(
        str(folder),
        device="cpu",
        local_files_only=True,
        model_kwargs={"dtype": torch.float32},
    )

    def encode(texts: list[str]) -> Vector:
        vectors: Vector = model.encode(texts, batch_size=32, show_progress_bar=False)
        return vectors

    return encode


def main() -> int:
    """Score each task through the server, and against the reference where one is asked for."""
    args = _parse_arguments()
    reference = None
    if args.compare_folder is not None:
        reference = reference_encoder(args.compare_folder)
        if reference is None:
            print("sentence-transformers is not installed: no comparison", file=sys.stderr)

    results: dict[str, dict[str, Any]] = {}
    with Server(
        args.url,
        model=args.model,
        texts_per_request=args.texts_per_request,
        num_connections=args.connections,
    ) as server:
        for name in args.tasks:
            task = _LOADERS[name](args.data / name)
            tokens_before = server.num_tokens
            value, vectors = task.score(server.encode)
            results[name] = {
                "metric": _METRICS[name],
                "value": value,
                "num_texts": len(vectors),
                "num_tokens": server.num_tokens - tokens_before,
                "dimensions": vectors.shape[1],
            }
            if reference is not None:
                results[name].update(_compare(task, reference, value, vectors))
        if len(server.models) > 1 or len(server.fingerprints) > 1:
            seen = f"{sorted(server.models)} {sorted(server.fingerprints)}"
            raise QualityError(f"the model changed during the run: {seen}")
        summary = {
            "benchmark": "quality",
            "url": args.url,
            "model": next(iter(server.models), None),
            "fingerprint": next(iter(server.fingerprints), None),
            "tasks": results,
        }
    _print_table(summary)
    print(json.dumps(summary))
    return 0


def _compare(
    task: Pairs | Retrieval,
    reference: Encoder,
    value: float,
    vectors: Vector,
) -> dict[str, float]:
    expected, expected_vectors = task.score(reference)
    compared = {"reference": expected, "difference": value - expected}
    if vectors.shape == expected_vectors.shape:  # not so with a model that the server cuts down
        cosines = np.einsum("ij,ij->i", _unit_rows(vectors), _unit_rows(expected_vectors))
        compared["min_cosine"] = float(cosines.min())
    return compared


def _print_table(summary: dict[str, Any]) -> None:
    print(f"model {summary['model']}, fingerprint {summary['fingerprint']}")
    print(
        f"{'task':8} {'metric':9} {'server':>9} {'reference':>10} {'difference':>11}"
        f" {'min cosine':>11} {'texts':>6} {'tokens':>9}"
    )
    for name, result in summary["tasks"].items():
        columns = [
            f"{result[key]:{form}}" if key in result else f"{'-':>{width}}"
            for key, form, width in (
                ("value", "9.5f", 9),
                ("reference", "10.5f", 10),
                ("difference", "+11.5f", 11),
                ("min_cosine", "11.7f", 11),
                ("num_texts", "6d", 6),
                ("num_tokens", "9d", 9),
            )
        ]
        print(f"{name:8} {result['metric']:9} {' '.join(columns)}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score the embeddings of a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server")
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder a task")
    parser.add_argument("--tasks", type=_parse_tasks, default="stsb,scifact", help="of %(default)s")
    parser.add_argument("--model", help="model to ask for, where the server has several")
    parser.add_argument("--compare-folder", type=Path, help="checkpoint to encode here as well")
    parser.add_argument("--texts-per-request", type=_parse_count, default=64)
    parser.add_argument("--connections", type=_parse_count, default=4)
    return parser.parse_args()


def _parse_tasks(value: str) -> list[str]:
    names = value.split(",")
    unknown = [name for name in names if name not in _LOADERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such task: {', '.join(unknown)}")
    return names


def _parse_count(value: str) -> int:
    count = int(value)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


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


def _unit_rows(vectors: Vector) -> npt.NDArray[np.float64]:
    """The rows in float64 at length 1."""
    unit = vectors.astype(np.float64)
    norms = np.linalg.norm(unit, axis=1, keepdims=True)
    if not (norms > 0).all():
        raise QualityError("a vector has length 0: its cosine is not defined")
    unit /= norms
    return unit


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (QualityError, OSError, http.client.HTTPException) as error:
        sys.exit(f"quality.py: {type(error).__name__}: {error}")
