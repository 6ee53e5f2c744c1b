"""What is asked of a model, whatever the dialect: the requests that dialects parse bodies into. No I/O.

    body → a dialect's `parse` → ParsedRequest(request, render) → the gateway runs it → ModelOutput → `render` → body

There are four kinds of request for a worker: vectors of texts, of the chunks of documents, scores of pairs, and of the
labels of texts and pairs. `app.py` runs each of them in one way. What the tokenizer alone can answer is a fifth, which
leads no further than this process. A route is an `Operation`: its body's type, its parser, and what /openapi.json says
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import numpy as np

from common.errors import InvalidRequest, ServiceError
from common.text.pairs import PairNames
from common.text.tokenization import NameOf, Tokenizer, TruncationRule
from common.wire.messages import OWN_PAIRS, ModelFacts
from gateway.client import Rows
from gateway.formats import Logits, RowFormat
from gateway.schema import (
    Fields,
    check_list,
    check_text,
    check_texts,
    empty_input,
    parse_object,
    typed,
    unsupported,
    wrong_type,
)

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

# What a text is for, in the words of Cohere's and Voyage's clients, and what checkpoints call the prompt for it, the
# first of which that there is goes before the text.
InputType = Literal["query", "document", "search_query", "search_document", "classification", "clustering"]
_QUERY_PROMPTS = ("query", "search_query")
_DOCUMENT_PROMPTS = ("document", "search_document", "passage", "corpus")
_PROMPTS: dict[InputType, tuple[str, ...]] = {
    "query": _QUERY_PROMPTS,
    "search_query": _QUERY_PROMPTS,
    "document": _DOCUMENT_PROMPTS,
    "search_document": _DOCUMENT_PROMPTS,
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}

# Cohere's words for truncation.
Truncation = Literal["NONE", "START", "END"]
TRUNCATION: dict[Truncation, TruncationRule] = {
    "NONE": TruncationRule(allowed=False),
    "START": TruncationRule(allowed=True, direction="left"),
    "END": TruncationRule(allowed=True, direction="right"),
}

# Texts, and what `parse_inputs` takes, for /openapi.json: more than msgspec's types can say.
TEXT_SCHEMA: dict[str, object] = {"type": "string", "minLength": 1}
TEXTS_SCHEMA: dict[str, object] = {"type": "array", "items": TEXT_SCHEMA, "minItems": 1}
_TOKEN_IDS: dict[str, object] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
INPUT_SCHEMA = {
    "anyOf": [
        TEXT_SCHEMA,
        TEXTS_SCHEMA,
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}
TEXT_OR_TEXTS_SCHEMA = {"anyOf": INPUT_SCHEMA["anyOf"][:2]}
IDS_OR_LISTS_SCHEMA = {"anyOf": INPUT_SCHEMA["anyOf"][2:]}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a deployment's configuration says of a body."""

    max_inputs: int
    auto_truncate: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is to be embedded: either `texts` or `token_ids` is empty."""

    texts: list[str]  # without the prompt
    token_ids: list[list[object]]  # not yet checked against the vocabulary
    name_of: NameOf  # from a place in the client's list to how errors call it
    places: Sequence[int]  # in that list, of each that is here
    failures: Mapping[int, InvalidRequest] = field(default_factory=dict)  # of those that are not, by place
    list_name: str = "input"  # how errors call the list

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        """How errors call one of those that are here."""
        return self.name_of(self.places[index])


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A row of each text, or of each of its tokens; the same in each of `more_encodings`."""

    inputs: Inputs
    prompt: str  # goes before every text
    truncation: TruncationRule
    dimensions: int
    normalize: bool
    encoding: str  # of common/wire/rows.py
    lane: str | None  # None: the key's own, or `usual_lane`
    partial: bool = False  # what cannot be embedded leaves the others alone
    by_token: bool = False
    more_encodings: tuple[str, ...] = ()  # besides `encoding`, none of them float32

    usual_lane: ClassVar[str] = "online"


@dataclass(frozen=True, slots=True)
class ContextualRequest:
    """A row of each chunk of documents that are read as a whole."""

    documents: list[list[str]]
    dimensions: int
    normalize: bool
    encoding: str
    lane: str | None  # None: the key's own, or `usual_lane`
    max_tokens: int  # of all of them

    usual_lane: ClassVar[str] = "online"


@dataclass(frozen=True, slots=True)
class PairsRequest:
    """A logit of each pair, or one for each label."""

    queries: list[str]  # one, or one for each document
    documents: list[str]
    names: PairNames
    truncation: TruncationRule
    instruction: str | None  # None: the model's own
    max_document_tokens: int | None
    lane: str | None  # None: the key's own, or `usual_lane`

    # A row of one value, or of one for each label, in float32 and as the model makes it.
    dimensions: int = 1
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"

    usual_lane: ClassVar[str] = "score"

    def name_of(self, pair: int) -> str:
        """How errors call a pair: by its document, since the query is often everyone's."""
        return self.names.document(pair)


@dataclass(frozen=True, slots=True)
class LabelsRequest:
    """A logit for each label, of texts and of pairs of texts."""

    inputs: list[tuple[str, ...]]  # each one text or two
    name_of: NameOf  # how errors call an input
    truncation: TruncationRule
    lane: str | None  # None: the key's own, or `usual_lane`
    dimensions: int  # labels
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"

    usual_lane: ClassVar[str] = "score"


Request = EmbeddingRequest | ContextualRequest | PairsRequest | LabelsRequest


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What the gateway's own tokenizer answers, input by input."""

    answer: Callable[[Tokenizer, int], bytes]  # as JSON, what stands for an input in the list that is the body
    sizes: list[int]  # of each input, in `unit`
    unit: str  # for people
    name: str  # how errors call all of them
    lane: str | None  # runs in none, and yet its key may not name every one

    usual_lane: ClassVar[str] = "online"


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What the model made of a request."""

    rows: Rows  # [rows, dimensions]; of pairs, float32 logits [pairs, labels]
    facts: ModelFacts
    num_tokens: int  # that were run
    request_id: str
    failures: Mapping[int, ServiceError] = field(default_factory=dict)  # of a partial request, by place
    places: Sequence[int] | None = None  # in the client's list, of each text that has rows; None: all have
    row_counts: Sequence[int] | None = None  # of each of these texts; None: one
    more_rows: Mapping[str, Rows] = field(default_factory=dict)  # by encoding, of those that were asked for besides

    @property
    def logits(self) -> Logits:
        """The rows of a request for scores."""
        assert self.rows.dtype == np.float32, "scores are asked for in float32"
        return self.rows  # type: ignore[return-value]  # of this type


@dataclass(frozen=True, slots=True)
class Matrix:
    """How rows are written as they are."""

    row_format: RowFormat
    name_of: NameOf  # how errors call the input of a row


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, read: what is to be run, and how its answer is written."""

    request: Request
    render: Callable[[ModelOutput], bytes]
    num_chars: int = 0  # of the client's own text in the answer: a long one is rendered on a thread
    matrix: Matrix | None = None  # of rows that may be asked for as they are, without JSON


@dataclass(frozen=True, slots=True)
class Operation(Generic[B]):
    """A route of a dialect.

    Of several on one path the first is meant whose `marker` the body has and whose `task` the model does, else the
    last; where an operation has no marker, or no task, any will do.
    """

    paths: tuple[str, ...]
    dialect: str  # for people
    summary: str
    description: str
    body: type[B]
    answer: Any  # the type of an answer: a Struct, or a list of some
    parse: Callable[[B, ModelFacts, Limits], ParsedRequest | LocalRequest]
    marker: str | None = None
    task: str | None = None

    def is_meant(self, fields: Fields, facts: ModelFacts) -> bool:
        """Whether it is this one, among others on its path, that a body is for."""
        return (self.marker is None or self.marker in fields) and (self.task is None or self.task in facts.tasks)


def read_request(
    body: bytes, operations: Sequence[Operation[Any]], facts: ModelFacts, limits: Limits
) -> ParsedRequest | LocalRequest:
    """What a body asks for on a path of these operations.

    Raises:
        InvalidRequest: with the code and `param` of the first thing that is wrong.
        NotFound: model_not_found.
    """
    return read_fields(parse_object(body), operations, facts, limits)


def read_fields(
    fields: Fields, operations: Sequence[Operation[Any]], facts: ModelFacts, limits: Limits
) -> ParsedRequest | LocalRequest:
    """The same of a body that is parsed."""
    operation = next((found for found in operations[:-1] if found.is_meant(fields, facts)), operations[-1])
    return operation.parse(typed(fields, operation.body), facts, limits)


def parse_inputs(value: object, name: str, max_inputs: int, *, partial: bool = False) -> Inputs:
    """A string, strings, token ids, or lists of token ids, in a field of this name.

    Raises:
        InvalidRequest: invalid_type, empty_input or too_many_inputs; for an input of a `partial` request only where
            none is right.
    """

    def name_of(index: int) -> str:
        return f"{name}[{index}]"

    if type(value) is str:
        if not value:
            raise empty_input(name)
        return Inputs([value], [], lambda _: name, range(1), list_name=name)
    wanted = "a string, a list of strings, a list of token ids or a list of such lists"
    values = check_list(value, name, wanted)
    first = values[0]
    if isinstance(first, int | float):
        return Inputs([], [values], lambda _: name, range(1), list_name=name)
    check_list(values, name, wanted, max_inputs)
    # Of a partial request the first that is any of these tells what all of them are; the others are wrong.
    places = (place for place, one in enumerate(values) if type(one) in (str, list))
    sample = next(places, 0) if partial else 0
    if type(values[sample]) is list:
        sample_name = name_of(sample)
        if partial:
            good_ids, good_places, failures = _good_ones(
                values, name_of, lambda ids, name: _check_ids(ids, name, sample_name)
            )
            return Inputs([], good_ids, name_of, good_places, failures, name)
        for index, ids in enumerate(values):
            _check_ids(ids, name_of(index), sample_name)
        return Inputs([], values, name_of, range(len(values)), list_name=name)
    if partial:
        good_texts, good_places, failures = _good_ones(values, name_of, check_text)
        return Inputs(good_texts, [], name_of, good_places, failures, name)
    if type(first) is not str:
        raise wrong_type(f"{name}[0]", "a string, a token id or a list of token ids")
    return Inputs(check_texts(values, name), [], name_of, range(len(values)), list_name=name)


def parse_prompt(
    prompt: str | None,
    prompt_name: str | None,
    truncation: TruncationRule,
    inputs: Inputs,
    facts: ModelFacts,
    *,
    input_type: InputType | None = None,
    direction_name: str = "truncation_direction",
) -> str:
    """What goes before every text: a client's own words, or a prompt of the checkpoint, by default its own.

    A prompt is named, or it is what the checkpoint has for texts of this `input_type`: for many types, nothing.
    `direction_name` is the field that says which end of a text is cut.

    Raises:
        InvalidRequest: two of them are given, or one with token ids; there is no prompt of that name; a prompt that is
            not part of the vector would be cut away.
    """
    fields = {"prompt": prompt, "prompt_name": prompt_name, "input_type": input_type}
    given = [name for name, value in fields.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other: send one of them.", param=given[0])
    if not inputs.texts:
        if given:
            raise InvalidRequest(f"{given[0]} goes before text; token ids are run as they are.", param=given[0])
        return ""
    if input_type is not None:
        prompt = next((facts.prompts[name] for name in _PROMPTS[input_type] if name in facts.prompts), "")
    elif prompt is None:
        name = prompt_name if prompt_name is not None else facts.default_prompt_name
        if name is not None and name not in facts.prompts:
            raise InvalidRequest("This model has no prompt of that name.", param="prompt_name")
        prompt = "" if name is None else facts.prompts[name]
    if prompt and truncation.direction == "left" and not facts.include_prompt:
        raise unsupported(direction_name, "this model's prompt, which comes first, is not part of the vector")
    return prompt


def check_cut(truncation: TruncationRule, facts: ModelFacts, name: str) -> None:
    """Raises InvalidRequest (unsupported_parameter), naming the field that says it, where pairs cannot be cut so."""
    if truncation.allowed and truncation.direction == "left" and facts.pair_template != OWN_PAIRS:
        raise unsupported(name, "in this model's template a document is cut at its end only")


def _check_ids(value: object, name: str, sample_name: str) -> list[object]:
    if type(value) is not list:
        raise wrong_type(name, f"a list of token ids, as {sample_name} is")
    return value


def _good_ones(
    values: list[object], name_of: NameOf, check: Callable[[object, str], T]
) -> tuple[list[T], list[int], dict[int, InvalidRequest]]:
    """What passes the check, its places, and what is wrong with the others. Raises the first error if none passes."""
    good: list[T] = []
    places: list[int] = []
    failures: dict[int, InvalidRequest] = {}
    for place, value in enumerate(values):
        try:
            good.append(check(value, name_of(place)))
        except InvalidRequest as error:
            failures[place] = error.with_traceback(None)  # whose frames hold this dict, and so the body
        else:
            places.append(place)
    if not good:
        raise failures[0]
    return good, places, failures
