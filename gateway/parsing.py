"""From a body's fields to a request: choosing the operation, and the checks that dialects share. No I/O.

    fields → `read_fields` → the operation's body type (schema.py) → its dialect's `parse` → ParsedRequest

msgspec's types cannot express every rule, such as "texts or token ids" or what the served model supports. Those checks
are here, so that every dialect refuses the same mistake with the same code and the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from common.errors import InvalidRequest, NotFound
from common.text.tokenization import NameOf, TruncationRule
from common.wire.messages import OWN_PAIRS, ModelFacts
from gateway.formats import ENCODINGS, Dtype, EncodingFormat, RowFormat
from gateway.model_requests import Inputs, LocalRequest, ParsedRequest
from gateway.schema import Body, Fields, parse_fields, parse_object, wrong_type

B = TypeVar("B", bound=Body)
T = TypeVar("T")

# What a text is for, in the words of Cohere's and Voyage's clients; and the names that checkpoints give the prompt for
# it. The first prompt that the checkpoint has is put before the text.
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

# JSON schemas of texts and of what `parse_inputs` takes, for /openapi.json.
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

# How an error describes a model that lacks a task.
_LACKS = {
    "embed": "makes no embeddings",
    "score": "gives texts no scores",
    "sparse": "makes no sparse embeddings",
    "tokens": "gives single tokens no embeddings",
}

_ORGANISATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/")
_OF_OPENAI: tuple[EncodingFormat, ...] = get_args(EncodingFormat)
_NUMBERS: tuple[Dtype, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on a body that are configured for a deployment."""

    max_inputs: int
    auto_truncate: bool


@dataclass(frozen=True, slots=True)
class Operation(Generic[B]):
    """A route of a dialect: its body's type, its parser, and its words in /openapi.json.

    Several operations may share a path. The first whose `marker` is a field of the body is chosen, or else the last.
    One without a marker matches any body. One that is `only_for_task` is skipped if the model lacks its task.
    """

    paths: tuple[str, ...]
    dialect: str
    summary: str
    description: str
    body: type[B]
    answer: Any  # the type of the answer: a Struct, or a list of them
    parse: Callable[[B, ModelFacts, Limits], ParsedRequest | LocalRequest]  # its body has passed `_check_body`
    task: str | None  # the task that the model must have; None: any model, since only its tokenizer runs
    marker: str | None = None
    only_for_task: bool = False

    def is_meant(self, fields: Fields, facts: ModelFacts) -> bool:
        """Whether a body, sent to a path with several operations, may be for this one."""
        does_task = not self.only_for_task or self.task in facts.tasks
        return does_task and (self.marker is None or self.marker in fields)


def read_request(
    body: bytes, operations: Sequence[Operation[Any]], facts: ModelFacts, limits: Limits
) -> ParsedRequest | LocalRequest:
    """Parse the body of a request to a path with these operations.

    Raises:
        InvalidRequest: with the code and `param` of the first thing that is wrong.
        NotFound: model_not_found.
    """
    return read_fields(parse_object(body), operations, facts, limits)


def read_fields(
    fields: Fields, operations: Sequence[Operation[Any]], facts: ModelFacts, limits: Limits
) -> ParsedRequest | LocalRequest:
    """As `read_request`, for a body whose JSON is parsed."""
    operation = next((found for found in operations[:-1] if found.is_meant(fields, facts)), operations[-1])
    body = parse_fields(fields, operation.body)
    _check_body(body, facts, operation.task)
    return operation.parse(body, facts, limits)


def is_served(model: str, name: str) -> bool:
    """Whether a client that asks for `model` means the model served as `name`.

    The organisation before the slash may be missing or extra, since clients send hub ids.
    """
    if model == name:
        return True
    if "/" in name:
        return model == name.rpartition("/")[2]
    return model.endswith("/" + name) and _ORGANISATION.fullmatch(model[: -len(name)]) is not None


def model_not_found(param: str | None = None) -> NotFound:
    return NotFound("This model is not served here; GET /v1/models lists what is.", param=param, code="model_not_found")


def check_one_score(facts: ModelFacts) -> None:
    """Raises InvalidRequest (wrong_task) unless the model gives a pair exactly one score."""
    if facts.num_labels != 1:
        raise wrong_task(
            f"gives a pair {facts.num_labels} scores, one for each label; this route needs a model that gives one"
        )


def check_texts(texts: list[object], name: str, purpose: str = "embed") -> list[str]:
    """The list, if each member is a string that is not empty. `purpose` is a verb for the error about an empty one.

    Raises:
        InvalidRequest: invalid_type or empty_input; it names the first wrong member.
    """
    if set(map(type, texts)) == {str} and "" not in texts:
        return texts  # type: ignore[return-value]  # checked in a way that mypy cannot follow
    for index, text in enumerate(texts):
        check_text(text, f"{name}[{index}]", purpose)
    raise AssertionError("no text is wrong: this is a bug")


def check_text(text: object, name: str, purpose: str = "embed") -> str:
    """The text, if it is a string that is not empty. Raises InvalidRequest: invalid_type or empty_input."""
    if type(text) is not str:
        raise wrong_type(name, "a string")
    if not text:
        raise empty_input(name, purpose)
    return text


def check_list(
    value: object, name: str, wanted: str, maximum: int | None = None, purpose: str = "embed", noun: str = "inputs"
) -> list[Any]:
    """The value of the field `name`, if it is a list that is not empty and has at most `maximum` members.

    The other arguments are words for the error: `wanted` describes what the field takes, `purpose` is a verb, and
    `noun` is what the members are.

    Raises:
        InvalidRequest: invalid_type, empty_input or too_many_inputs.
    """
    if type(value) is not list:
        raise wrong_type(name, wanted)
    if not value:
        raise empty_input(name, purpose)
    if maximum is not None and len(value) > maximum:
        raise too_many_inputs(name, len(value), maximum, noun)
    return value


def parse_inputs(value: object, name: str, max_inputs: int, *, partial: bool = False) -> Inputs:
    """Parse a field that holds a string, a list of strings, a list of token ids, or a list of such lists.

    Raises:
        InvalidRequest: invalid_type, empty_input or too_many_inputs. A wrong input of a `partial` request is listed in
            `Inputs.failures` instead, unless all inputs are wrong.
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
    # The first text or list decides what all inputs must be; in a partial request it need not be the first input.
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
    """The prompt that is put before every text: the client's own, or one of the checkpoint's.

    A client names a prompt of the checkpoint, or an `input_type`, for which the checkpoint may have none. Without
    either, the checkpoint's default prompt is used. `direction_name` is the field that says which end of a text is cut.

    Raises:
        InvalidRequest: more than one of the three is sent, or one with token ids; the checkpoint has no prompt of that
            name; truncation would cut away a prompt that is not part of the vector.
    """
    fields = {"prompt": prompt, "prompt_name": prompt_name, "input_type": input_type}
    given = [name for name, value in fields.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other: send one of them.", param=given[0])
    if not inputs.texts:
        if given:
            raise InvalidRequest(f"{given[0]} is put before text, and cannot be used with token ids.", param=given[0])
        return ""
    if input_type is not None:
        prompt = next((facts.prompts[name] for name in _PROMPTS[input_type] if name in facts.prompts), "")
    elif prompt is None:
        name = prompt_name if prompt_name is not None else facts.default_prompt_name
        if name is not None and name not in facts.prompts:
            raise InvalidRequest("This model has no prompt of that name.", param="prompt_name")
        prompt = "" if name is None else facts.prompts[name]
    if prompt and truncation.direction == "left" and not facts.include_prompt:
        raise unsupported(direction_name, "it would cut away the prompt, which this model's vectors leave out")
    return prompt


def check_cut(truncation: TruncationRule, facts: ModelFacts, name: str) -> None:
    """Raises InvalidRequest (unsupported_parameter), naming a field, if the model's pairs cannot be cut that way."""
    if truncation.allowed and truncation.direction == "left" and facts.pair_template != OWN_PAIRS:
        raise unsupported(name, "this model's template can cut a document only at its end")


def check_encoding_format(value: EncodingFormat | None, facts: ModelFacts) -> EncodingFormat:
    """The format, by default `float`. Raises InvalidRequest (unsupported_parameter) if the model does not make it."""
    if value is None:
        return "float"
    _check_made(value, _OF_OPENAI, facts, "encoding_format")
    return value


def check_dtype(value: Dtype, facts: ModelFacts, name: str) -> Dtype:
    """The type, which the field `name` asks for. Raises as `check_encoding_format` does."""
    _check_made(value, _NUMBERS, facts, name)
    return value


def check_dimensions(value: int | None, facts: ModelFacts, encoding: str, name: str = "dimensions") -> int:
    """The number of dimensions, by default all of the model's.

    Raises:
        InvalidRequest: out_of_range; invalid_value if the dimensions are bits and do not fill whole bytes.
    """
    dimensions = facts.dimensions if value is None else value
    _check_at_most(name, dimensions, facts.dimensions)
    if dimensions % 8 and encoding == "binary":
        raise InvalidRequest(f"{name} must be a multiple of 8 for vectors of bits, and is {dimensions}.", param=name)
    return dimensions


def check_normalize(value: bool | None, facts: ModelFacts, encoding: str) -> bool:
    """Whether vectors are normalised, by default as the checkpoint declares.

    Raises:
        InvalidRequest: unsupported_parameter if a quantised vector is to be normalised.
    """
    if encoding == "float32":
        return facts.normalize if value is None else value
    if value:
        raise unsupported("normalize", f"{encoding} vectors are made before normalisation")
    return False


def empty_input(name: str, purpose: str = "embed") -> InvalidRequest:
    return InvalidRequest(f"{name} is empty: there is nothing to {purpose}.", param=name, code="empty_input")


def too_many_inputs(name: str, number: int, limit: int, what: str = "inputs") -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {number} {what}; at most {limit} fit into one request. Send several requests.",
        param=name,
        code="too_many_inputs",
    )


def unsupported(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported here: {reason}.", param=name, code="unsupported_parameter")


def wrong_task(reason: str) -> InvalidRequest:
    return InvalidRequest(f"This model {reason}.", param="model", code="wrong_task")


def _check_body(body: Body, facts: ModelFacts, task: str | None) -> None:
    """Check that the body names the served model, that the model has the task, and that no stream is asked for.

    Raises:
        NotFound: model_not_found.
        InvalidRequest: missing_field, wrong_task (see ModelFacts.tasks) or unsupported_parameter.
    """
    model = body.model
    if isinstance(model, str):
        if not model:
            raise InvalidRequest(
                "model is empty; leave it out to use the one served.", param="model", code="missing_field"
            )
        if not is_served(model, facts.name):
            raise model_not_found("model")
    if task is not None and task not in facts.tasks:
        raise wrong_task(f"{_LACKS[task]}; its tasks are: {', '.join(facts.tasks)}")
    if body.stream:
        raise unsupported("stream", "answers are not streamed")


def _check_at_most(name: str, value: int, maximum: int) -> None:
    """Raises InvalidRequest (out_of_range) for a value above the maximum."""
    if value > maximum:
        raise InvalidRequest(f"{name} must be from 1 to {maximum}.", param=name, code="out_of_range")


def _check_ids(value: object, name: str, sample_name: str) -> list[object]:
    if type(value) is not list:
        raise wrong_type(name, f"a list of token ids, as {sample_name} is")
    return value


def _good_ones(
    values: list[object], name_of: NameOf, check: Callable[[object, str], T]
) -> tuple[list[T], list[int], dict[int, InvalidRequest]]:
    """The values that pass the check, their indexes, and the errors of the others. If none passes, raises the first."""
    good: list[T] = []
    places: list[int] = []
    failures: dict[int, InvalidRequest] = {}
    for place, value in enumerate(values):
        try:
            good.append(check(value, name_of(place)))
        except InvalidRequest as error:
            failures[place] = error.with_traceback(None)  # its frames would keep this dict and the body alive
        else:
            places.append(place)
    if not good:
        raise failures[0]
    return good, places, failures


def _check_made(value: RowFormat, choices: Sequence[RowFormat], facts: ModelFacts, name: str) -> None:
    if ENCODINGS[value] not in facts.encodings:
        served = [choice for choice in choices if ENCODINGS[choice] in facts.encodings]
        raise unsupported(name, f"this model does not support it; use one of: {', '.join(served)}")
