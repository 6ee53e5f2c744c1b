"""Scores of pairs of texts: `/rerank` as clients of Cohere, Jina and Voyage speak it, `/score` as vLLM's. No sockets.

What the model makes of a pair is a logit. `relevance_score` is what the checkpoint's own activation (mostly the
sigmoid) makes of it, or with `raw_scores` the logit. Results are in the order of the logits: a sigmoid in float32 is
1.0 from 17 on, and the best of several such documents would be whichever came first. Equal logits keep the order of
the documents, and equal documents have equal logits, since each is run once.

Defaults differ where the servers' own do: `/rerank` cuts what is too long, as Cohere's does, `/score` refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InvalidRequest
from common.pairs import PairNames
from common.protocol import OWN_PAIRS, ModelFacts
from common.tokenization import TruncationRule
from gateway.answers import render_usage
from gateway.formats import check_finite
from gateway.schema import (
    IGNORED,
    Fields,
    check_model,
    check_names,
    check_not_streamed,
    check_task,
    check_texts,
    check_user,
    empty_input,
    lane_of,
    optional_flag,
    optional_integer,
    optional_text,
    parse_object,
    too_many_inputs,
    unsupported,
    wrong_task,
    wrong_type,
)

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")

Truncation = Literal["NONE", "START", "END"]
Logits = npt.NDArray[np.float32]  # [pairs]

_SHARED = frozenset({"model", "truncate", "truncation", "instruction", "raw_scores", "lane", "user", "stream"})
_VOYAGE = frozenset({"top_k", "truncation"})  # its client sends both, always
# Of Cohere's: each would change scores or results if it were read. (`rank_fields` may ask for what is done.)
_UNSUPPORTED = {
    "rank_fields": "of a document only its text is read",
    "max_chunks_per_doc": "a document is one text; max_tokens_per_doc shortens it",
    "relevant_spans": "a document is scored as a whole",
}
_RERANK_KNOWN = (
    _SHARED
    | IGNORED
    | _UNSUPPORTED.keys()
    | {"query", "documents", "top_n", "top_k", "return_documents", "max_tokens_per_doc"}
)
_SCORE_KNOWN = _SHARED | IGNORED | {"text_1", "text_2"}

# Cohere's words for truncation, and the rule that each is.
_TRUNCATION: dict[str, TruncationRule] = {
    "NONE": TruncationRule(allowed=False),
    "START": TruncationRule(allowed=True, direction="left"),
    "END": TruncationRule(allowed=True, direction="right"),
}

# As Voyage's own server has it, and as much as Cohere advises.
MAX_DOCUMENTS = 1000

_DOCUMENTS_PER_SEARCH_UNIT = 100  # what Cohere's clients read in `billed_units`: one query with so many documents
_INTEGER_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PairsRequest:
    """The pairs that a client asks scores of, every default filled in."""

    queries: list[str]  # one, or one for each document
    documents: list[str]
    names: PairNames  # how errors name them
    truncation: TruncationRule
    instruction: str | None  # None: the model's own
    max_document_tokens: int | None
    raw_scores: bool
    lane: str

    # A logit is a row of one value, in float32 and as the model makes it.
    dimensions: ClassVar[int] = 1
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"


@dataclass(frozen=True, slots=True)
class RerankRequest:
    pairs: PairsRequest
    top_n: int | None  # None: all
    return_documents: bool
    voyage: bool  # its client reads results in a field of another name


def parse_rerank(body: bytes, facts: ModelFacts, *, max_inputs: int) -> RerankRequest:
    """The request of a body, checked as far as it can be without a tokenizer.

    Raises:
        InvalidRequest: with the code and `param` of the first thing that is wrong.
        NotFound: model_not_found.
    """
    fields = parse_object(body)
    check_names(fields, _RERANK_KNOWN)
    _check_model(fields, facts)
    for name, reason in _UNSUPPORTED.items():
        if fields.get(name) is not None and (name, fields[name]) != ("rank_fields", ["text"]):
            raise unsupported(name, reason)
    top_n = _parse_top_n(fields)
    return_documents = optional_flag(fields, "return_documents")
    max_document_tokens = optional_integer(fields, "max_tokens_per_doc", 1, _INTEGER_LIMIT)
    query = fields.get("query")
    if type(query) is not str:
        raise wrong_type("query", "a string")
    if not query:
        raise empty_input("query", "compare with")
    documents = _parse_documents(fields, min(max_inputs, MAX_DOCUMENTS))
    pairs = _pairs_request(fields, facts, [query], documents, PairNames(), "END", max_document_tokens)
    return RerankRequest(pairs, top_n, bool(return_documents), voyage=not _VOYAGE.isdisjoint(fields))


def parse_score(body: bytes, facts: ModelFacts, *, max_inputs: int, auto_truncate: bool) -> PairsRequest:
    """The request of a body, checked as far as it can be without a tokenizer. Raises as `parse_rerank` does."""
    fields = parse_object(body)
    check_names(fields, _SCORE_KNOWN)
    _check_model(fields, facts)
    first, first_lone = _parse_texts(fields, "text_1", max_inputs)
    second, second_lone = _parse_texts(fields, "text_2", max_inputs)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: send one text_1 for all of text_2, or as many of "
            "the one as of the other.",
            param="text_2",
        )
    query = "text_1" if first_lone or len(first) > 1 else "text_1[0]"
    names = PairNames(query, "text_2", None if second_lone else 0)
    return _pairs_request(fields, facts, first, second, names, "END" if auto_truncate else "NONE")


def scores_of(logits: Logits, activation: str, *, raw: bool) -> npt.NDArray[np.float32]:
    """What clients read: float32 [pairs]. The sigmoid is computed in float64 and rounded once."""
    if raw or activation == "identity":
        return logits
    assert activation == "sigmoid", f"the worker told of an activation {activation!r}: this is a bug"
    with np.errstate(over="ignore"):  # of exp(-logit): an infinity there is a score of 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def render_rerank(
    logits: Logits, asked: RerankRequest, facts: ModelFacts, *, request_id: str, num_tokens: int
) -> bytes:
    """The answer's body. A document in it is the client's own text, and its key is there only where it was asked for.

    Beside `results` Voyage's client, told by its fields, gets the same list as it reads it: `data`, documents as bare
    strings.

    Raises:
        NonfiniteOutput: a logit is a NaN or an infinity.
    """
    check_finite(logits[:, None], asked.pairs.names.document)
    documents = asked.pairs.documents
    scores = _decimals(scores_of(logits, facts.score_activation, raw=asked.pairs.raw_scores))
    results, data = [], []
    for index in np.argsort(-logits, kind="stable")[: asked.top_n].tolist():
        result = b'{"index":%d,"relevance_score":%b' % (index, scores[index])
        if not asked.return_documents:
            results.append(result + b"}")
            data.append(result + b"}")
            continue
        text = orjson.dumps(documents[index])  # one at a time: see formats.py
        results.append(result + b',"document":{"text":%b}}' % text)
        data.append(result + b',"document":%b}' % text)
    meta = {
        "billed_units": {"search_units": -(-len(documents) // _DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": num_tokens},
    }
    pieces = [*_head(request_id, b"rerank", facts), b',"results":[', b",".join(results), b"]"]
    if asked.voyage:
        pieces += (b',"data":[', b",".join(data), b"]")
    pieces += (b",", render_usage(num_tokens), b',"meta":', orjson.dumps(meta), b"}")
    return b"".join(pieces)


def render_score(logits: Logits, asked: PairsRequest, facts: ModelFacts, *, request_id: str, num_tokens: int) -> bytes:
    """The answer's body, in the order of the pairs. Raises as `render_rerank` does."""
    check_finite(logits[:, None], asked.names.document)
    scores = _decimals(scores_of(logits, facts.score_activation, raw=asked.raw_scores))
    data = [b'{"index":%d,"object":"score","score":%b}' % numbered for numbered in enumerate(scores)]
    pieces = [*_head(request_id, b"list", facts), b',"data":[', b",".join(data), b"],", render_usage(num_tokens), b"}"]
    return b"".join(pieces)


def _check_model(fields: Fields, facts: ModelFacts) -> None:
    check_model(fields, facts.name)
    check_task("score", facts.tasks)
    if facts.num_labels != 1:
        raise wrong_task(f"gives a pair {facts.num_labels} scores, one a label; this route is for models that give one")
    check_not_streamed(fields)


def _pairs_request(
    fields: Fields,
    facts: ModelFacts,
    queries: list[str],
    documents: list[str],
    names: PairNames,
    truncation: Truncation,
    max_document_tokens: int | None = None,
) -> PairsRequest:
    """The request for these pairs, with what both routes have; `truncation` is what holds where a client is silent."""
    check_user(fields)
    return PairsRequest(
        queries=queries,
        documents=documents,
        names=names,
        truncation=_parse_truncation(fields, facts, truncation),
        instruction=optional_text(fields, "instruction"),
        max_document_tokens=max_document_tokens,
        raw_scores=bool(optional_flag(fields, "raw_scores")),
        lane=lane_of(fields),
    )


def _parse_truncation(fields: Fields, facts: ModelFacts, default: Truncation) -> TruncationRule:
    """Cohere's words, or true and false in a field of either name."""
    truncate, truncation = fields.get("truncate"), optional_flag(fields, "truncation")
    if truncate is None:
        word: str = default if truncation is None else "END" if truncation else "NONE"
    elif truncation is not None:
        raise InvalidRequest("truncate and truncation are the same: send one of them.", param="truncation")
    elif type(truncate) is bool:
        word = "END" if truncate else "NONE"
    elif type(truncate) is not str:
        raise wrong_type("truncate", "NONE, START or END, or true or false")
    elif truncate not in _TRUNCATION:
        raise InvalidRequest("truncate must be NONE, START or END, or true or false.", param="truncate")
    else:
        word = truncate
    if word == "START" and facts.pair_template != OWN_PAIRS:
        raise unsupported("truncate", "in this model's template a document is cut at its end only: use END")
    return _TRUNCATION[word]


def _parse_top_n(fields: Fields) -> int | None:
    names = [name for name in ("top_n", "top_k") if fields.get(name) is not None]
    if len(names) > 1:
        raise InvalidRequest("top_n and top_k are the same: send one of them.", param="top_k")
    if not names:
        return None
    value = fields[names[0]]
    if type(value) is not int or value < 1:
        raise InvalidRequest(
            f"{names[0]} must be a whole number from 1; more than there are documents means all of them.",
            param=names[0],
            code="out_of_range",
        )
    return value


def _parse_documents(fields: Fields, max_documents: int) -> list[str]:
    value = fields.get("documents")
    if type(value) is not list:
        raise wrong_type("documents", 'a list of strings, or of objects with a "text"')
    if not value:
        raise empty_input("documents", "rank")
    if len(value) > max_documents:
        raise too_many_inputs("documents", len(value), max_documents, "documents")
    # Of an object only its text counts, as at Cohere's.
    texts: list[object] = [document.get("text") if type(document) is dict else document for document in value]
    for index, text in enumerate(texts):
        if type(text) is not str:
            raise wrong_type(f"documents[{index}]", 'a string, or an object whose "text" is one')
        if not text:
            raise empty_input(f"documents[{index}]", "rank")
    return texts  # type: ignore[return-value]  # checked, in a way that mypy cannot follow


def _parse_texts(fields: Fields, name: str, max_inputs: int) -> tuple[list[str], bool]:
    """The texts of a field, and whether it is a lone one."""
    value = fields.get(name)
    if type(value) is str:
        if not value:
            raise empty_input(name, "score")
        return [value], True
    if type(value) is not list:
        raise wrong_type(name, "a string or a list of strings")
    if not value:
        raise empty_input(name, "score")
    if len(value) > max_inputs:
        raise too_many_inputs(name, len(value), max_inputs, "texts")
    return check_texts(value, name, "score"), False


def _decimals(scores: npt.NDArray[np.float32]) -> list[bytes]:
    """Each as the shortest decimal that gives float32 back."""
    return orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def _head(request_id: str, kind: bytes, facts: ModelFacts) -> tuple[bytes, ...]:
    name = orjson.dumps(facts.name)
    return b'{"id":', orjson.dumps(request_id), b',"object":"%b","model":' % kind, name
