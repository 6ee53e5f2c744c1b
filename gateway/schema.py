"""How a body's type is declared, and from a body's bytes to that type. No I/O.

A dialect declares its body as a msgspec Struct. The same fields, types and bounds check requests and make
/openapi.json. msgspec's errors are translated into our own codes: a client needs the field, the place in the list and
the limit, and an error must never quote the client's text. parsing.py checks what msgspec's types cannot express.

orjson parses the JSON, because msgspec accepts 1e999; the second pass over the body costs 0.25 µs. A field that is null
counts as absent, unless a dialect says otherwise. If a key comes twice, the last one wins.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
import orjson
from msgspec import UNSET, Meta, UnsetType

from common.errors import InvalidRequest
from common.lanes import Lane

Fields = dict[str, object]

# The JSON parser returns an integer of more than 64 bits as a float.
_BEYOND_INTEGERS = 2.0**63

_MAX_NAME_CHARS = 64

# What an error calls each of msgspec's types.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}

# msgspec's messages. A place consists of our field names, `[3]` and, in a mapping, `[...]`. It comes last; whatever
# the message quotes from the client comes before it.
_PLACE = r" - at `\$\.([\w.\[\]]+)`"
_EXPECTED = re.compile(r"Expected `([\w |]+)`( [^`]+)?(?:, got `\w+`)?" + _PLACE)
_MISSING = re.compile(rf"Object missing required field `(\w+)`(?:{_PLACE})?")
_BAD_CHOICE = re.compile(r"Invalid enum value .*" + _PLACE, re.DOTALL)
_UNKNOWN_INSIDE = re.compile(r"Object contains unknown field `(.*)`" + _PLACE, re.DOTALL)
_OTHER = re.compile(r".*" + _PLACE, re.DOTALL)
_STEP = re.compile(r"([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")  # one step of a place

# The error code by the first word after the expected type: "of length" and "matching regex". All else is a bound.
_CODES = {"of": "invalid_type", "matching": "invalid_value"}

_WHOLE_NUMBER = re.compile(r"-?\d+(?![\d.eE])")


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that every route of every dialect accepts."""

    model: Annotated[
        str | UnsetType,
        Meta(
            description="The model's name, with or without its organisation. By default the served model; with several "
            "models the one that `X-Model` names, or the first.",
            extra_json_schema={"minLength": 1},
        ),
    ] = UNSET
    lane: Annotated[
        Lane | None,
        Meta(
            description="The priority of the request: a lane waits for the lanes before it, and has a guaranteed share "
            "of the time. By default `score` for scores, otherwise `online`."
        ),
    ] = None
    stream: Annotated[
        bool | None,
        Meta(description="Must be false: answers are not streamed.", extra_json_schema={"enum": [False, None]}),
    ] = None
    user: Annotated[
        Annotated[str, Meta(max_length=256)] | None, Meta(description="Accepted for compatibility; ignored.")
    ] = None
    metadata: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None
    priority: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None
    request_id: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None
    timeout: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None


B = TypeVar("B", bound=msgspec.Struct)


def parse_object(body: bytes) -> Fields:
    """Parse a body that must be a JSON object.

    Raises:
        InvalidRequest: invalid_json, json_too_deep, invalid_unicode, out_of_range (a whole number too large for a
            float), or invalid_type if it is not an object.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _refusal_of(error) from None
    if type(value) is not dict:
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    return value


def parse_fields(fields: Fields, body: type[B]) -> B:
    """Convert the fields of an object to the Struct that declares them.

    Raises:
        InvalidRequest: unknown_field (ignoring a misspelt `dimension` would return a wrong vector), invalid_type,
            invalid_value or out_of_range; it names the first wrong field.
    """
    known = body.__struct_encode_fields__
    for name in fields:
        if name not in known:
            raise _unknown_field(name)
    try:
        return msgspec.convert(fields, body)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error), fields, body) from None


def wrong_type(name: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}.", param=name, code="invalid_type")


def _unknown_field(name: str, within: str = "") -> InvalidRequest:
    """The error for an unknown field of the object at `within` ("" is the body). A name is shown only if it is short
    and printable."""
    if name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS:
        place = f"{within}.{name}" if within else name
        message = f"There is no field {place}. Check its spelling."
    else:
        place = within
        message = f"{within} has an unknown field." if within else "The body has an unknown field."
    return InvalidRequest(message, param=place or None, code="unknown_field")


def _mismatch(message: str, fields: Fields, body: type[msgspec.Struct]) -> InvalidRequest:
    """Translate msgspec's message into our codes. It may quote the client, so only types and bounds are passed on.

    tests/gateway/test_canaries.py fails when a release of msgspec changes these messages.
    """
    if found := _MISSING.fullmatch(message):
        name = f"{found[2]}.{found[1]}" if found[2] else found[1]
        return InvalidRequest(f"{name} is missing.", param=name, code="invalid_type")
    if found := _BAD_CHOICE.fullmatch(message):
        name = found[1]
        return InvalidRequest(f"{name} must be one of: {', '.join(_choices(body, name))}.", param=name)
    if found := _UNKNOWN_INSIDE.fullmatch(message):
        return _unknown_field(found[1], found[2])
    if found := _EXPECTED.fullmatch(message):
        types, bound, name = found[1], found[2], found[3]
        if bound:
            code = _CODES.get(bound.split()[0], "out_of_range")
            return InvalidRequest(f"{name} must be {_words(types)}{bound}.", param=name, code=code)
        value = _value_at(fields, name)
        if "int" in types.split(" | ") and type(value) is float and math.fabs(value) >= _BEYOND_INTEGERS:
            return InvalidRequest(f"{name} is too large.", param=name, code="out_of_range")
        return wrong_type(name, _words(types))
    other = _OTHER.fullmatch(message)
    name = "The body" if other is None else other[1]
    return InvalidRequest(
        f"{name} is not what this route takes.", param=None if other is None else name, code="invalid_type"
    )


def _words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | ") if name != "null")


def _value_at(fields: Fields, place: str) -> object:
    """The value that the client sent at a place; None inside a mapping, since a place does not name its keys."""
    value: Any = fields
    for name, index in _STEP.findall(place):
        if index == "...":
            return None
        value = value[name] if name else value[int(index)]
    return value


def _choices(body: type[msgspec.Struct], place: str) -> list[str]:
    """The values that a field allows, sorted."""
    annotation: Any = body
    for name, _ in _STEP.findall(place):
        if name:
            structs = (found for found in _leaves(annotation) if isinstance(found, type))
            struct = next(found for found in structs if issubclass(found, msgspec.Struct))
            annotation = get_type_hints(struct)[name]
    return sorted(str(found) for found in _leaves(annotation) if isinstance(found, str | int))


def _leaves(annotation: object) -> list[object]:
    """The types and values inside a type: Item, "a" and NoneType for `list[Item] | Literal["a"] | None`."""
    arguments = get_args(annotation)
    return [leaf for argument in arguments for leaf in _leaves(argument)] if arguments else [annotation]


def _refusal_of(error: orjson.JSONDecodeError) -> InvalidRequest:
    """Translate orjson's message into our codes. It never quotes the body, and its position helps the client."""
    if "surrogate in string" in error.msg:
        return InvalidRequest(
            f"The body holds half of a surrogate pair at character {error.pos}: send whole characters.",
            code="invalid_unicode",
        )
    if "depth limit" in error.msg:
        return InvalidRequest("The body is nested too deep.", code="json_too_deep")
    if "infinity" in error.msg and _WHOLE_NUMBER.match(error.doc, error.pos):
        # JSON itself has no largest integer, so this is valid JSON out of range; 1e999 is reported as invalid JSON.
        return InvalidRequest(f"The whole number at character {error.pos} is too large.", code="out_of_range")
    return InvalidRequest(f"The body is not JSON in UTF-8: {error.msg} (character {error.pos}).", code="invalid_json")
