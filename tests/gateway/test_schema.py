"""What is said of a body that its type does not allow, for every kind of thing that a type can say.

msgspec finds what is wrong and says it in its own words, the client's among them; what a client reads is made of our
names, types and bounds alone. A change of msgspec's words fails here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

import msgspec
import orjson
import pytest
from msgspec import Meta

from common.errors import InvalidRequest
from gateway.routes import OPERATIONS
from gateway.schema import Body, parse_fields, parse_object

# What a client may send to be taken for a part of the message: a place, a type, an end.
HOSTILE = [
    "x` - at `$.flag`",
    "' - at `$.flag`",
    "a`, got `int` - at `$.flag`",
    "\n - at `$.flag`\n",
    "`" * 50,
    "`" * 65 + " - at `$.flag`",
    "$.flag",
    "\u2028$.flag",
]


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    kind: Literal["b", "a"] = "a"
    number: int = 0


class Every(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A field of every kind."""

    text: str
    number: Annotated[int, Meta(ge=1, le=9)] = 1
    maybe: Annotated[int, Meta(ge=1)] | None = None
    ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    eights: Annotated[int, Meta(multiple_of=8)] = 8
    short: Annotated[str, Meta(min_length=2, max_length=3)] = "ab"
    letters: Annotated[str, Meta(pattern="^a+$")] = "a"
    flag: bool = False
    choice: Literal["y", "x"] | None = None
    level: Literal[1, 2] = 1
    mixed: Literal["x", "y"] | bool | None = None
    choices: list[Literal["x", "y"]] = msgspec.field(default_factory=list)
    numbers: Annotated[list[int], Meta(max_length=2)] = msgspec.field(default_factory=list)
    rows: list[list[int]] = msgspec.field(default_factory=list)
    by_name: dict[str, int] = msgspec.field(default_factory=dict)
    inner: Inner | None = None
    inners: list[Inner] = msgspec.field(default_factory=list)
    either: str | list[str] = ""
    anything: Any = None


FIRST_KIND = "inners[0].kind must be one of: a, b."


def refusal(fields: dict[str, object], body: type[msgspec.Struct] = Every) -> InvalidRequest:
    """What is said of these fields, once they have been through JSON."""
    with pytest.raises(InvalidRequest) as raised:
        parse_fields(parse_object(orjson.dumps(fields)), body)
    return raised.value


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        ({}, "invalid_type", "text", "text is missing."),
        ({"inner": {}}, "invalid_type", "inner.text", "inner.text is missing."),
        ({"inners": [{"text": "a"}, {}]}, "invalid_type", "inners[1].text", "inners[1].text is missing."),
        ({"text": 5}, "invalid_type", "text", "text must be a string."),
        ({"text": None}, "invalid_type", "text", "text must be a string."),
        ({"flag": 1}, "invalid_type", "flag", "flag must be true or false."),
        ({"ratio": "x"}, "invalid_type", "ratio", "ratio must be a number."),
        ({"numbers": "x"}, "invalid_type", "numbers", "numbers must be a list."),
        ({"by_name": []}, "invalid_type", "by_name", "by_name must be an object."),
        ({"inner": 5}, "invalid_type", "inner", "inner must be an object."),
        ({"maybe": "x"}, "invalid_type", "maybe", "maybe must be a whole number."),
        ({"either": 5}, "invalid_type", "either", "either must be a string or a list."),
        ({"mixed": 5}, "invalid_type", "mixed", "mixed must be true or false or a string."),
        ({"either": ["x", 5]}, "invalid_type", "either[1]", "either[1] must be a string."),
        ({"numbers": [1, "x"]}, "invalid_type", "numbers[1]", "numbers[1] must be a whole number."),
        ({"rows": [[1], [2, "x"]]}, "invalid_type", "rows[1][1]", "rows[1][1] must be a whole number."),
        ({"by_name": {"x": "x"}}, "invalid_type", "by_name[...]", "by_name[...] must be a whole number."),
        ({"inner": {"text": 5}}, "invalid_type", "inner.text", "inner.text must be a string."),
        ({"number": 0}, "out_of_range", "number", "number must be a whole number >= 1."),
        ({"number": 10}, "out_of_range", "number", "number must be a whole number <= 9."),
        ({"maybe": 0}, "out_of_range", "maybe", "maybe must be a whole number >= 1."),
        ({"ratio": 1}, "out_of_range", "ratio", "ratio must be a number < 1.0."),
        ({"eights": 7}, "out_of_range", "eights", "eights must be a whole number that's a multiple of 8."),
        ({"number": 1.5}, "invalid_type", "number", "number must be a whole number."),
        ({"number": True}, "invalid_type", "number", "number must be a whole number."),
        ({"number": 2**63}, "out_of_range", "number", "number must be a whole number <= 9."),
        ({"number": 2.0**70}, "out_of_range", "number", "number is too large."),
        ({"number": -(2.0**70)}, "out_of_range", "number", "number is too large."),
        ({"maybe": 2.0**70}, "out_of_range", "maybe", "maybe is too large."),
        ({"rows": [[1], [2.0**70]]}, "out_of_range", "rows[1][0]", "rows[1][0] is too large."),
        ({"inner": {"text": "a", "number": 1e30}}, "out_of_range", "inner.number", "inner.number is too large."),
        ({"by_name": {"x": 1e30}}, "invalid_type", "by_name[...]", "by_name[...] must be a whole number."),
        ({"text": 1e30}, "invalid_type", "text", "text must be a string."),
        ({"short": "a"}, "invalid_type", "short", "short must be a string of length >= 2."),
        ({"short": "abcd"}, "invalid_type", "short", "short must be a string of length <= 3."),
        ({"numbers": [1, 2, 3]}, "invalid_type", "numbers", "numbers must be a list of length <= 2."),
        ({"letters": "b"}, "invalid_value", "letters", "letters must be a string matching regex '^a+$'."),
        ({"choice": "z"}, "invalid_value", "choice", "choice must be one of: x, y."),
        ({"choice": 5}, "invalid_type", "choice", "choice must be a string."),
        ({"level": 3}, "invalid_value", "level", "level must be one of: 1, 2."),
        ({"mixed": "z"}, "invalid_value", "mixed", "mixed must be one of: x, y."),
        ({"choices": ["x", "z"]}, "invalid_value", "choices[1]", "choices[1] must be one of: x, y."),
        ({"inner": {"text": "a", "kind": "z"}}, "invalid_value", "inner.kind", "inner.kind must be one of: a, b."),
        ({"inners": [{"text": "a", "kind": ""}]}, "invalid_value", "inners[0].kind", FIRST_KIND),
    ],
    ids=repr,
)
def test_what_is_wrong_is_named_and_said(fields: dict[str, object], code: str, param: str | None, message: str) -> None:
    given = fields if fields == {} else {"text": "t"} | fields
    error = refusal(given)
    assert (error.code, error.param, error.message) == (code, param, message)


NAMED = "There is no field {}. Check its spelling."


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"inner": {"text": "a", "z": 1}}, "inner.z", NAMED),
        ({"inners": [{"text": "a"}, {"text": "a", "z z": 1}]}, "inners[1].z z", NAMED),
        ({"inner": {"text": "a", "": 1}}, "inner", "{} has an unknown field."),
        ({"inner": {"text": "a", "z" * 65: 1}}, "inner", "{} has an unknown field."),
        ({"inner": {"text": "a", "$.flag": 1}}, "inner.$.flag", NAMED),
        ({"z": 1}, "z", NAMED),
        *(({name: 1}, None, "The body has an unknown field.") for name in ("", "z\n", "z" * 65)),
    ],
    ids=repr,
)
def test_an_unknown_field_is_named_where_its_name_can_be(
    fields: dict[str, object], param: str | None, message: str
) -> None:
    error = refusal({"text": "t"} | fields)
    assert (error.code, error.param, error.message) == ("unknown_field", param, message.format(param))


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"choice": ...}, "invalid_value", "choice"),
        ({"mixed": ...}, "invalid_value", "mixed"),
        ({"choices": ["x", ...]}, "invalid_value", "choices[1]"),
        ({"inner": {"text": "a", "kind": ...}}, "invalid_value", "inner.kind"),
        ({"by_name": {...: ...}}, "invalid_type", "by_name[...]"),
        ({"letters": ...}, "invalid_value", "letters"),
        ({"short": ...}, "invalid_type", "short"),
        ({"number": ...}, "invalid_type", "number"),
        ({"numbers": [...]}, "invalid_type", "numbers[0]"),
        ({"flag": ...}, "invalid_type", "flag"),
        ({"inner": ...}, "invalid_type", "inner"),
    ],
    ids=repr,
)
def test_a_clients_text_is_neither_quoted_nor_taken_for_a_place(
    fields: dict[str, object], code: str, param: str, hostile: str
) -> None:
    error = refusal({"text": hostile, "anything": {hostile: hostile}} | _filled(fields, hostile))
    assert (error.code, error.param) == (code, param)
    assert hostile not in error.message
    assert "at `" not in error.message
    assert param == "flag" or "flag" not in error.message


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_unknown_fields_name_is_shown_if_it_can_be_and_is_not_taken_for_a_place(hostile: str) -> None:
    is_shown = hostile.isprintable() and len(hostile) <= 64
    error = refusal({"text": "a", hostile: 1})
    assert (error.code, error.param) == ("unknown_field", hostile if is_shown else None)
    error = refusal({"text": "a", "inners": [{"text": "a"}, {"text": "a", hostile: 1}]})
    assert (error.code, error.param) == ("unknown_field", f"inners[1].{hostile}" if is_shown else "inners[1]")
    assert (hostile in error.message) == is_shown


def _filled(value: object, text: str) -> Any:  # noqa: ANN401  # of the same shape
    """The value with `text` wherever it has an ellipsis."""
    if isinstance(value, dict):
        return {_filled(key, text): _filled(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, text) for item in value]
    return text if value is ... else value


def test_a_body_that_is_right_is_the_type_that_declares_it() -> None:
    body = parse_fields({"text": "t", "maybe": None, "inner": {"text": "a"}, "either": ["x"]}, Every)
    assert (body.text, body.maybe, body.inner, body.either) == ("t", None, Inner("a"), ["x"])


BODIES = list(dict.fromkeys(operation.body for operation in OPERATIONS))
FIELDS = [(body, name) for body in BODIES for name in body.__struct_encode_fields__]


@pytest.mark.parametrize(("body", "name"), FIELDS)
@pytest.mark.parametrize("value", [[{"x": []}], {"x` - at `$.lane`": 1}, "x` - at `$.lane`", -1, 2.0**70, True, [None]])
def test_what_a_route_refuses_of_a_field_it_says_of_that_field(body: type[Body], name: str, value: object) -> None:
    error = _refusal_if_any(_required(body) | {name: value}, body)
    assert error is None or (error.param is not None and re.split(r"[.\[]", error.param)[0] == name)
    assert error is None or error.code == "unknown_field" or "at `" not in error.message
    if isinstance(value, dict) and error is not None and error.code == "unknown_field":
        assert error.param == f"{name}.{next(iter(value))}"


def _required(body: type[msgspec.Struct]) -> dict[str, object]:
    """What a body must have: texts, and objects of what these must have."""
    found: dict[str, object] = {}
    for item in msgspec.structs.fields(body):
        if item.required:
            types = [inner for inner in (item.type, *get_args(item.type)) if isinstance(inner, type)]
            struct = next((inner for inner in types if issubclass(inner, msgspec.Struct)), None)
            found[item.name] = "w1" if struct is None else _required(struct)
    return found


def _refusal_if_any(fields: dict[str, object], body: type[Body]) -> InvalidRequest | None:
    try:
        parse_fields(parse_object(orjson.dumps(fields)), body)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_every_route_is_described(body: type[Body]) -> None:
    _, components = msgspec.json.schema_components([body])
    fields = [(name, found) for schema in components.values() for name, found in schema["properties"].items()]
    undescribed = {name for name, found in fields if "description" not in found}
    assert undescribed <= {"query", "text_1", "text_2"}
