"""Scores of pairs of texts: `/rerank` as clients of Cohere, Jina and Voyage send it, `/score` as vLLM's. No sockets.

The model returns a logit for each pair. `relevance_score` is the logit after the checkpoint's own activation, usually
the sigmoid, or with `raw_scores` the logit itself. Results are ordered by the logits: in float32 a sigmoid is 1.0 from
17 on, so scores would not order the best documents. Equal logits keep the order of the documents. Equal documents have
equal logits, since each different one runs once.

The defaults are those of the servers that these routes copy: `/rerank` cuts what is too long, as Cohere does, and
`/score` refuses it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta, UnsetType

from common.errors import InvalidRequest
from common.text.pairs import PairNames
from common.text.tokenization import TruncationRule
from common.wire.messages import ModelFacts
from gateway.error_responses import Usage, render_usage
from gateway.formats import check_finite, decimals, json_list, scores_of
from gateway.model_requests import ModelOutput, PairsRequest, ParsedRequest
from gateway.parsing import (
    TEXT_OR_TEXTS_SCHEMA,
    TEXT_SCHEMA,
    TRUNCATION,
    Limits,
    Operation,
    Truncation,
    check_cut,
    check_list,
    check_one_score,
    check_text,
    check_texts,
    empty_input,
    unsupported,
)
from gateway.schema import Body, wrong_type

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")

# The limit of Voyage's server, and the most that Cohere recommends.
MAX_DOCUMENTS = 1000

_DOCUMENTS_PER_SEARCH_UNIT = 100  # a unit in `billed_units`, as Cohere defines it

# Cohere's fields that would change scores or results, and why each is refused. (`rank_fields` may be ["text"].)
_UNSUPPORTED = {
    "rank_fields": "only the text of a document is read",
    "max_chunks_per_doc": "documents are not split; max_tokens_per_doc shortens them",
    "relevant_spans": "a document is scored as a whole",
}

_TEXT_OBJECT = {"type": "object", "properties": {"text": TEXT_SCHEMA}, "required": ["text"]}
_DOCUMENT = {"anyOf": [TEXT_SCHEMA, _TEXT_OBJECT]}
_COUNT = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}


class PairsBody(Body, kw_only=True):
    """Fields of both routes."""

    truncate: Annotated[
        Truncation | bool | None,
        Meta(
            description="What happens to a pair that is too long: it is refused, or cut at its document's start or end."
        ),
    ] = None
    truncation: Annotated[bool | UnsetType | None, Meta(description="The same as `truncate`, for Voyage's client.")] = (
        UNSET
    )
    instruction: Annotated[
        str | None, Meta(description="Replaces the instruction in the template of a model that has one.")
    ] = None
    raw_scores: Annotated[bool | None, Meta(description="Return logits, without the checkpoint's activation.")] = None


class RerankBody(PairsBody, kw_only=True):
    """A query, and documents to rank."""

    query: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    documents: Annotated[
        Any,
        Meta(
            description="Strings, or objects with a `text`. Their other fields are ignored.",
            extra_json_schema={"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": MAX_DOCUMENTS},
        ),
    ]
    top_n: Annotated[Any, Meta(description="The number of results. By default all.", extra_json_schema=_COUNT)] = None
    top_k: Annotated[
        Any | UnsetType, Meta(description="The same as `top_n`, for Voyage's client.", extra_json_schema=_COUNT)
    ] = UNSET
    return_documents: Annotated[bool | None, Meta(description="Return each document's text with its result.")] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="Cut each document to this many tokens.")
    ] = None
    rank_fields: Annotated[
        Any, Meta(description='Must be ["text"] or left out.', extra_json_schema={"enum": [["text"], None]})
    ] = None
    max_chunks_per_doc: Annotated[Any, Meta(description="Not supported.", extra_json_schema={"type": "null"})] = None
    relevant_spans: Annotated[Any, Meta(description="Not supported.", extra_json_schema={"type": "null"})] = None


class ScoreBody(PairsBody, kw_only=True):
    """Texts to compare: one with one, one with each of a list, or two lists of the same length in pairs."""

    text_1: Annotated[Any, Meta(extra_json_schema=TEXT_OR_TEXTS_SCHEMA)]
    text_2: Annotated[Any, Meta(extra_json_schema=TEXT_OR_TEXTS_SCHEMA)]


class Document(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: Annotated[int, Meta(description="The index of the document in the request.")]
    relevance_score: float
    document: Document | UnsetType = UNSET


class VoyageResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: str | UnsetType = UNSET


class Reranked(msgspec.Struct):
    """Results, the most relevant first."""

    id: str
    object: Literal["rerank"]
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: Annotated[
        dict[str, dict[str, int]], Meta(description="`billed_units` and `tokens`, which Cohere's client reads.")
    ]
    data: Annotated[
        list[VoyageResult] | UnsetType,
        Meta(description="`results` in Voyage's form, if the body is from Voyage's client."),
    ] = UNSET


class Score(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    """A score for each pair, in the order of the pairs."""

    id: str
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: Usage


def parse_rerank(body: RerankBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    """Make the request that a body asks for, with every check that needs no tokenizer.

    Raises:
        InvalidRequest: the code and `param` say which field is wrong first.
    """
    check_one_score(facts)
    for name, reason in _UNSUPPORTED.items():
        value = getattr(body, name)
        if value is not None and (name, value) != ("rank_fields", ["text"]):
            raise unsupported(name, reason)
    top_n = _parse_top_n(body)
    check_text(body.query, "query", "compare with")
    documents = _parse_documents(body.documents, min(limits.max_inputs, MAX_DOCUMENTS))
    return ParsedRequest(
        _pairs_request(body, facts, [body.query], documents, PairNames(), "END", body.max_tokens_per_doc),
        partial(
            render_rerank,
            documents=documents,
            top_n=top_n,
            return_documents=bool(body.return_documents),
            raw_scores=bool(body.raw_scores),
            # Voyage's client always sends both.
            voyage=body.top_k is not UNSET or body.truncation is not UNSET,
        ),
        num_chars=sum(map(len, documents)) if body.return_documents else 0,
    )


def parse_score(body: ScoreBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    """Make the request that a body asks for. Raises as `parse_rerank` does."""
    check_one_score(facts)
    first, first_lone = _parse_texts(body.text_1, "text_1", limits.max_inputs)
    second, second_lone = _parse_texts(body.text_2, "text_2", limits.max_inputs)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: send one text_1, or the same number of both.",
            param="text_2",
        )
    query = "text_1" if first_lone or len(first) > 1 else "text_1[0]"
    names = PairNames(query, "text_2", None if second_lone else 0)
    request = _pairs_request(body, facts, first, second, names, "END" if limits.auto_truncate else "NONE")
    return ParsedRequest(request, partial(render_score, names=names, raw_scores=bool(body.raw_scores)))


def render_rerank(
    output: ModelOutput,
    *,
    documents: list[str],
    top_n: int | None,
    return_documents: bool,
    raw_scores: bool,
    voyage: bool,
) -> bytes:
    """Write the answer's body. Documents are in it only if the client asks for them.

    Voyage's client, recognised by its fields, also gets `data`: the same list with documents as bare strings.

    Raises:
        NonfiniteOutput: a logit is a NaN or an infinity.
    """
    check_finite(output.rows, PairNames().document)
    logits = output.logits[:, 0]
    scores = decimals(scores_of(logits, output.facts.score_activation, raw=raw_scores))
    order = np.argsort(-logits, kind="stable")[:top_n].tolist()

    def results(document: bytes) -> bytes:
        """The list of results; `document` is the template for a document's text."""
        written = []
        for index in order:
            # One text in each call: see `json_rows`.
            text = document % orjson.dumps(documents[index]) if return_documents else b""
            written.append(b'{"index":%d,"relevance_score":%b%b}' % (index, scores[index], text))
        return json_list(written)

    meta = {
        "billed_units": {"search_units": -(-len(documents) // _DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": output.num_tokens},
    }
    pieces = [*_head(output, b"rerank"), b',"results":', results(b',"document":{"text":%b}')]
    if voyage:
        pieces += (b',"data":', results(b',"document":%b'))
    pieces += (b",", render_usage(output.num_tokens), b',"meta":', orjson.dumps(meta), b"}")
    return b"".join(pieces)


def render_score(output: ModelOutput, *, names: PairNames, raw_scores: bool) -> bytes:
    """Write the answer's body, in the order of the pairs. Raises as `render_rerank` does."""
    check_finite(output.rows, names.document)
    scores = decimals(scores_of(output.logits[:, 0], output.facts.score_activation, raw=raw_scores))
    data = [b'{"index":%d,"object":"score","score":%b}' % numbered for numbered in enumerate(scores)]
    pieces = [*_head(output, b"list"), b',"data":[', b",".join(data), b"],", render_usage(output.num_tokens), b"}"]
    return b"".join(pieces)


def _pairs_request(
    body: PairsBody,
    facts: ModelFacts,
    queries: list[str],
    documents: list[str],
    names: PairNames,
    truncation: Truncation,
    max_document_tokens: int | None = None,
) -> PairsRequest:
    """The request for these pairs. `truncation` is the route's default."""
    return PairsRequest(
        queries=queries,
        documents=documents,
        names=names,
        truncation=_parse_truncation(body, facts, truncation),
        instruction=body.instruction,
        max_document_tokens=max_document_tokens,
        lane=body.lane,
    )


def _parse_truncation(body: PairsBody, facts: ModelFacts, default: Truncation) -> TruncationRule:
    """The rule for pairs that are too long: Cohere's words, or true and false, in either of two fields."""
    asked = body.truncate
    if isinstance(body.truncation, bool):
        if asked is not None:
            raise InvalidRequest("truncate and truncation mean the same: send one of them.", param="truncation")
        asked = body.truncation
    if asked is None:
        asked = default
    word: Truncation = ("END" if asked else "NONE") if isinstance(asked, bool) else asked
    check_cut(TRUNCATION[word], facts, "truncate")
    return TRUNCATION[word]


def _parse_top_n(body: RerankBody) -> int | None:
    given = {name: value for name in ("top_n", "top_k") if (value := getattr(body, name)) not in (None, UNSET)}
    if len(given) > 1:
        raise InvalidRequest("top_n and top_k mean the same: send one of them.", param="top_k")
    if not given:
        return None
    ((name, value),) = given.items()
    if type(value) is not int or value < 1:
        raise InvalidRequest(
            f"{name} must be a whole number of at least 1. If it exceeds the documents, all are returned.",
            param=name,
            code="out_of_range",
        )
    return value


def _parse_documents(value: object, max_documents: int) -> list[str]:
    wanted = 'a list of strings, or of objects with a "text"'
    documents = check_list(value, "documents", wanted, max_documents, "rank", "documents")
    # An object's other fields are ignored, as by Cohere.
    texts: list[object] = [document.get("text") if type(document) is dict else document for document in documents]
    for index, text in enumerate(texts):
        if type(text) is not str:
            raise wrong_type(f"documents[{index}]", 'a string, or an object whose "text" is one')
        if not text:
            raise empty_input(f"documents[{index}]", "rank")
    return texts  # type: ignore[return-value]  # checked in a way that mypy cannot follow


def _parse_texts(value: object, name: str, max_inputs: int) -> tuple[list[str], bool]:
    """The texts of a field, and whether it holds one text without a list around it."""
    if type(value) is str:
        if not value:
            raise empty_input(name, "score")
        return [value], True
    texts = check_list(value, name, "a string or a list of strings", max_inputs, "score", "texts")
    return check_texts(texts, name, "score"), False


def _head(output: ModelOutput, kind: bytes) -> tuple[bytes, ...]:
    name = orjson.dumps(output.facts.name)
    return b'{"id":', orjson.dumps(output.request_id), b',"object":"%b","model":' % kind, name


RERANK = Operation(
    paths=RERANK_PATHS,
    dialect="Cohere, Jina, Voyage",
    summary="Rank documents",
    description="Returns each document's relevance to the query, the most relevant first. Needs a model that scores "
    "pairs.",
    body=RerankBody,
    answer=Reranked,
    parse=parse_rerank,
    task="score",
)

SCORE = Operation(
    paths=SCORE_PATHS,
    dialect="vLLM",
    summary="Score pairs of texts",
    description="Returns a score for each pair, in the order of the pairs. Needs a model that scores pairs.",
    body=ScoreBody,
    answer=Scores,
    parse=parse_score,
    task="score",
)
