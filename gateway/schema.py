"""From a body's bytes to checked values: what every dialect's parser is built of. No I/O.

Hand-written checks rather than a schema library, for two reasons: an error must name the field, the place in the
list and the limit in our own codes, and the common body (one text, one model) must cost microseconds.

A field that is null counts as absent, unless a dialect says otherwise. Of a key that comes twice the last one wins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import orjson

from common.errors import InvalidRequest, NotFound

Fields = dict[str, object]

# A JSON parser gives a number above 64 bits as a float.
_BEYOND_INTEGERS = 2.0**63

_MAX_NAME_CHARS = 64
_MAX_USER_CHARS = 256

# What clients send along on every route, and what is accepted unread: none of it can change an answer.
IGNORED = frozenset({"metadata", "priority", "request_id", "timeout"})

_LANES = ("online", "backfill")

# What a model that lacks a task does not do.
_LACKS = {"embed": "makes no embeddings", "score": "gives pairs of texts no scores"}

_ORGANISATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/")


def parse_object(body: bytes) -> Fields:
    """The JSON object of a body.

    Raises:
        InvalidRequest: invalid_json, json_too_deep, invalid_unicode, or invalid_type where it is not an object.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _refusal_of(error) from None
    if type(value) is not dict:
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    return value


def check_names(fields: Fields, known: Collection[str]) -> None:
    """Refuse a field that nobody reads: a silently ignored `dimension` is a wrong vector.

    Raises:
        InvalidRequest: unknown_field, naming the first one.
    """
    for name in fields:
        if name not in known:
            shown = name if name.isprintable() and len(name) <= _MAX_NAME_CHARS else None
            raise InvalidRequest(
                f"There is no field {shown}. Check its spelling." if shown else "A field's name is not one we know.",
                param=shown,
                code="unknown_field",
            )


def optional_text(fields: Fields, name: str) -> str | None:
    """Raises InvalidRequest (invalid_type) for anything but a string or null."""
    value = fields.get(name)
    if value is None or type(value) is str:
        return value
    raise wrong_type(name, "a string")


def optional_flag(fields: Fields, name: str) -> bool | None:
    """Raises InvalidRequest (invalid_type) for anything but true, false or null."""
    value = fields.get(name)
    if value is None or type(value) is bool:
        return value
    raise wrong_type(name, "true or false")


def optional_choice(fields: Fields, name: str, choices: Collection[str]) -> str | None:
    """Raises InvalidRequest: invalid_type for what is no string, invalid_value for a string not among `choices`."""
    value = optional_text(fields, name)
    if value is None or value in choices:
        return value
    raise InvalidRequest(f"{name} must be one of: {', '.join(sorted(choices))}.", param=name)


def optional_integer(fields: Fields, name: str, minimum: int, maximum: int) -> int | None:
    """Raises InvalidRequest: invalid_type for what is no whole number, out_of_range for one outside the bounds."""
    value = fields.get(name)
    if value is None:
        return None
    beyond = type(value) is float and math.fabs(value) >= _BEYOND_INTEGERS
    if type(value) is not int and not beyond:
        raise wrong_type(name, "a whole number")
    if beyond or not minimum <= value <= maximum:  # type: ignore[operator]  # an int by now
        raise InvalidRequest(f"{name} must be from {minimum} to {maximum}.", param=name, code="out_of_range")
    return value  # type: ignore[return-value]  # an int by now


def check_texts(texts: list[object], name: str, purpose: str = "embed") -> list[str]:
    """The list, every member of it a string that is not empty; `purpose` is what an empty one is no use for.

    Raises:
        InvalidRequest: invalid_type or empty_input, naming the first bad one.
    """
    if set(map(type, texts)) == {str} and "" not in texts:
        return texts  # type: ignore[return-value]  # checked, in a way that mypy cannot follow
    for index, text in enumerate(texts):
        if type(text) is not str:
            raise wrong_type(f"{name}[{index}]", "a string")
        if not text:
            raise empty_input(f"{name}[{index}]", purpose)
    raise AssertionError("no text is wrong: this is a bug")


def check_model(fields: Fields, name: str) -> None:
    """Pass where `model` means the one served as `name`, or is left out.

    Raises:
        InvalidRequest: invalid_type or missing_field.
        NotFound: model_not_found.
    """
    if "model" not in fields:
        return
    model = fields["model"]
    if type(model) is not str:
        raise InvalidRequest(
            "model must be a string; leave it out to use the one served.", param="model", code="invalid_type"
        )
    if not model:
        raise InvalidRequest("model is empty; leave it out to use the one served.", param="model", code="missing_field")
    if not is_served(model, name):
        raise NotFound(
            "This model is not served here; GET /v1/models lists what is.", param="model", code="model_not_found"
        )


def check_task(task: str, tasks: Collection[str]) -> None:
    """Raises InvalidRequest (wrong_task) where the model that is served does other things; see ModelFacts.tasks."""
    if task not in tasks:
        raise wrong_task(f"{_LACKS[task]}; what it does is: {', '.join(tasks)}")


def check_user(fields: Fields) -> None:
    """Raises InvalidRequest (invalid_type) for a `user` that is no string, or too long a one. It says nothing here."""
    user = optional_text(fields, "user")
    if user is not None and len(user) > _MAX_USER_CHARS:
        raise InvalidRequest(
            f"user may have {_MAX_USER_CHARS} characters; this one has {len(user)}.", param="user", code="invalid_type"
        )


def check_not_streamed(fields: Fields) -> None:
    """Raises InvalidRequest: unsupported_parameter where `stream` asks for a stream."""
    if optional_flag(fields, "stream"):
        raise unsupported("stream", "what this route answers is not streamed")


def lane_of(fields: Fields) -> str:
    """The scheduler's lane that a client asks for. Raises InvalidRequest for one that there is not."""
    return optional_choice(fields, "lane", _LANES) or "online"


def is_served(model: str, name: str) -> bool:
    """Whether a client that asks for `model` means the model served as `name`.

    The organisation before the slash may be left out or added: clients carry hub ids about.
    """
    if model == name:
        return True
    if "/" in name:
        return model == name.rpartition("/")[2]
    return model.endswith("/" + name) and _ORGANISATION.fullmatch(model[: -len(name)]) is not None


def empty_input(name: str, purpose: str = "embed") -> InvalidRequest:
    return InvalidRequest(f"{name} is empty: there is nothing to {purpose}.", param=name, code="empty_input")


def too_many_inputs(name: str, number: int, limit: int, what: str = "inputs") -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {number} {what}; at most {limit} fit into one request. Send several requests.",
        param=name,
        code="too_many_inputs",
    )


def unsupported(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name} asks for what cannot be done: {reason}.", param=name, code="unsupported_parameter")


def wrong_task(reason: str) -> InvalidRequest:
    return InvalidRequest(f"This model {reason}.", param="model", code="wrong_task")


def wrong_type(name: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}.", param=name, code="invalid_type")


def _refusal_of(error: orjson.JSONDecodeError) -> InvalidRequest:
    """The parser's message in our codes. It never quotes the body; the position it names is of use."""
    if "surrogate in string" in error.msg:
        return InvalidRequest(
            f"The body holds half of a surrogate pair at character {error.pos}: send whole characters.",
            code="invalid_unicode",
        )
    if "depth limit" in error.msg:
        return InvalidRequest("The body is nested too deep.", code="json_too_deep")
    return InvalidRequest(f"The body is not JSON in UTF-8: {error.msg} (character {error.pos}).", code="invalid_json")
