"""text-embeddings-inference (TEI): scores, that is `/rerank` with `texts`, and `/predict`. No sockets.

As with TEI, one score becomes a probability by the sigmoid and several by the softmax, whatever activation the
checkpoint declares; `raw_scores` asks for the logits. Lists are ordered by the logits, the best first.

huggingface_hub's InferenceClient sends `parameters` when it classifies, and reads the first list in the answer. So the
answer to a body with `parameters` is a list of lists, as from the hub's own servers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta, UnsetType

from common.errors import InvalidRequest
from common.text.pairs import PairNames
from common.text.tokenization import NameOf
from common.wire.messages import OWN_PAIRS, ModelFacts
from gateway.formats import check_finite, decimals, json_list, probabilities_of, scores_of
from gateway.model_requests import LabelsRequest, ModelOutput, PairsRequest, ParsedRequest
from gateway.parsing import (
    TEXT_SCHEMA,
    TEXTS_SCHEMA,
    Limits,
    Operation,
    check_cut,
    check_list,
    check_one_score,
    check_text,
    check_texts,
    unsupported,
)
from gateway.routes.tei import DIALECT, ROOT, TruncatingBody, truncation_of

# The function that is applied to the logits of an input.
Scale = Literal["sigmoid", "softmax", "none"]

_PAIR = TEXTS_SCHEMA | {"maxItems": 2}
_INPUTS = {"anyOf": [TEXT_SCHEMA, _PAIR, {"type": "array", "items": _PAIR, "minItems": 1}]}

Inputs = Annotated[
    Any,
    Meta(description="A text, [a text], a pair of texts, or a list of such lists.", extra_json_schema=_INPUTS),
]


# What `inputs` may be, as errors describe it.
_TAKEN = "a text, a list of one, a pair of texts, or a list of such lists"


@dataclass(frozen=True, slots=True)
class _Texts:
    """The inputs to label."""

    inputs: list[tuple[str, ...]]  # each has one text or two
    name_of: NameOf
    lone: bool  # one input without a list around it; its answer has no list around it either


class RankBody(TruncatingBody, kw_only=True):
    """A query, and texts to rank."""

    query: Annotated[
        str, Meta(description="The query that the texts should be relevant to.", extra_json_schema={"minLength": 1})
    ]
    texts: Annotated[Any, Meta(description="Strings.", extra_json_schema=TEXTS_SCHEMA)]
    raw_scores: Annotated[bool | None, Meta(description="Return logits instead of probabilities.")] = None
    return_text: Annotated[bool | None, Meta(description="Return each text with its rank.")] = None


class PredictBody(TruncatingBody, kw_only=True):
    """Texts, or pairs of texts, to classify."""

    inputs: Inputs
    raw_scores: Annotated[bool | None, Meta(description="Return logits instead of probabilities.")] = None


class ClassifyParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which labels are returned, and with which scores."""

    function_to_apply: Annotated[
        Scale | None, Meta(description="By default softmax for several labels, and sigmoid for one.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Return only this many labels of each input, the best ones."),
    ] = None


class ClassifyBody(TruncatingBody, kw_only=True):
    """Texts, or pairs of texts, to classify, as huggingface_hub sends them."""

    inputs: Inputs
    parameters: Annotated[
        ClassifyParameters | None, Meta(description="Which labels are returned, and with which scores.")
    ] = None


class Rank(msgspec.Struct):
    index: Annotated[int, Meta(description="The index of the text in the request.")]
    score: float
    text: str | UnsetType = UNSET


class Prediction(msgspec.Struct):
    score: float
    label: str


def parse_rerank(body: RankBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    """Make the request that a body asks for, with every check that needs no tokenizer. The other parsers do the same.

    Raises:
        InvalidRequest: the code and `param` say which field is wrong first.
    """
    check_one_score(facts)
    check_text(body.query, "query", "compare with")
    texts = check_list(body.texts, "texts", "a list of strings", limits.max_inputs, "rank", "texts")
    texts = check_texts(texts, "texts", "rank")
    truncation = truncation_of(body.truncate, body.truncation_direction, limits)
    check_cut(truncation, facts, "truncation_direction")
    request = PairsRequest(
        queries=[body.query],
        documents=texts,
        names=PairNames("query", "texts"),
        truncation=truncation,
        instruction=None,
        max_document_tokens=None,
        lane=body.lane,
    )
    returned = texts if body.return_text else None
    return ParsedRequest(
        request,
        partial(render_ranks, texts=returned, raw=bool(body.raw_scores)),
        num_chars=sum(map(len, returned or ())),
    )


def parse_predict(body: PredictBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    scale: Scale | None = "none" if body.raw_scores else None
    return _labels_asked(body, _parse_texts(body.inputs, limits.max_inputs), facts, limits, scale)


def parse_classify(body: ClassifyBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    parameters = body.parameters or ClassifyParameters()
    texts = replace(_parse_texts(body.inputs, limits.max_inputs), lone=False)
    return _labels_asked(body, texts, facts, limits, parameters.function_to_apply, top_k=parameters.top_k)


def render_ranks(output: ModelOutput, *, texts: list[str] | None, raw: bool) -> bytes:
    """Write each text's index and score, the best first; equal logits keep the order of the texts.

    Raises:
        NonfiniteOutput: a logit is a NaN or an infinity; `render_labels` raises the same.
    """
    check_finite(output.rows, PairNames("query", "texts").document)
    logits = output.logits[:, 0]
    scores = decimals(scores_of(logits, "sigmoid", raw=raw))
    ranks = []
    for index in np.argsort(-logits, kind="stable").tolist():
        text = b"" if texts is None else b',"text":%b' % orjson.dumps(texts[index])  # one in each call: see `json_rows`
        ranks.append(b'{"index":%d%b,"score":%b}' % (index, text, scores[index]))
    return json_list(ranks)


def render_labels(output: ModelOutput, *, name_of: NameOf, scale: Scale, top_k: int | None, lone: bool) -> bytes:
    """Write a list for each input, with its labels, the likeliest first; only that list for a `lone` input."""
    check_finite(output.rows, name_of)
    logits = output.logits
    labels = [orjson.dumps(label) for label in output.facts.labels]
    scores = probabilities_of(logits) if scale == "softmax" else scores_of(logits, "sigmoid", raw=scale == "none")
    lists = []
    for row, order in zip(scores, np.argsort(-logits, axis=1, kind="stable")[:, :top_k].tolist(), strict=True):
        written = decimals(row)
        lists.append(json_list(b'{"score":%b,"label":%b}' % (written[at], labels[at]) for at in order))
    return lists[0] if lone else json_list(lists)


def _labels_asked(
    body: PredictBody | ClassifyBody,
    texts: _Texts,
    facts: ModelFacts,
    limits: Limits,
    scale: Scale | None,
    *,
    top_k: int | None = None,
) -> ParsedRequest:
    if facts.pair_template != OWN_PAIRS:
        for index, of_input in enumerate(texts.inputs):
            if len(of_input) == 1:
                raise unsupported(texts.name_of(index), "this model scores only pairs")
    truncation = truncation_of(body.truncate, body.truncation_direction, limits)
    check_cut(truncation, facts, "truncation_direction")
    request = LabelsRequest(
        inputs=texts.inputs,
        name_of=texts.name_of,
        truncation=truncation,
        lane=body.lane,
        dimensions=facts.num_labels,
    )
    if scale is None:
        scale = "softmax" if facts.num_labels > 1 else "sigmoid"
    return ParsedRequest(
        request,
        partial(render_labels, name_of=texts.name_of, scale=scale, top_k=top_k, lone=texts.lone),
        num_chars=len(texts.inputs) * sum(map(len, facts.labels)),
    )


def _parse_texts(value: object, max_inputs: int) -> _Texts:
    """Parse a text, [text], [text, text], or a list of such lists."""
    if type(value) is str:
        return _Texts([(check_text(value, "inputs", "label"),)], lambda _: "inputs", lone=True)
    if type(check_list(value, "inputs", _TAKEN, purpose="label")[0]) is not list:
        return _Texts([_parse_one(value, "inputs", _TAKEN)], lambda _: "inputs", lone=True)
    value = check_list(value, "inputs", _TAKEN, max_inputs, "label")
    return _Texts(
        [_parse_one(texts, f"inputs[{index}]", "a list of a text, or of a pair") for index, texts in enumerate(value)],
        lambda index: f"inputs[{index}]",
        lone=False,
    )


def _parse_one(value: object, name: str, taken: str) -> tuple[str, ...]:
    """The one or two texts of an input."""
    texts = check_list(value, name, taken, purpose="label")
    if len(texts) > 2:
        raise InvalidRequest(
            f"{name} has {len(texts)} texts; an input is one text or a pair. Send each input in a list of its own.",
            param=name,
        )
    return tuple(check_texts(texts, name, "label"))


RERANK = Operation(
    paths=("/rerank",),
    dialect=DIALECT,
    summary="Rank texts, in a bare list",
    description="With `texts`, as in TEI: returns the index and score of each text, the most relevant first. Needs a "
    "model that scores pairs.",
    body=RankBody,
    answer=list[Rank],
    parse=parse_rerank,
    task="score",
    marker="texts",
)

PREDICT = Operation(
    paths=("/predict",),
    dialect=DIALECT,
    summary="Classify texts, or pairs of texts",
    description="Returns the labels of a text or a pair, the likeliest first, or a list of such lists. Needs a model "
    "that classifies.",
    body=PredictBody,
    answer=list[Prediction | list[Prediction]],
    parse=parse_predict,
    task="score",
)

CLASSIFY = Operation(
    paths=("/predict",),
    dialect=DIALECT,
    summary="Classify texts, or pairs of texts",
    description="With `parameters`: returns a list for each input, with its labels, the likeliest first.",
    body=ClassifyBody,
    answer=list[list[Prediction]],
    parse=parse_classify,
    task="score",
    marker="parameters",
)

ROOT_CLASSIFY = replace(CLASSIFY, paths=(ROOT,), only_for_task=True)
ROOT_RERANK = replace(RERANK, paths=(ROOT,), only_for_task=True)
ROOT_PREDICT = replace(PREDICT, paths=(ROOT,), only_for_task=True)
