"""`POST /v2/embed` and `/v1/embed`, as Cohere's clients send them: body → request, vectors by type → body. No sockets.

A body may ask for its vectors in several types at once. Each of the worker's encodings is a run of its own: a model
quantises the vector before normalisation, which cannot be recovered exactly from the normalised float32. Types of one
encoding (`float` and `base64`, `int8` and `uint8`, `binary` and `ubinary`) share a run. Cohere's quantisation is
specific to its own models; here a type other than float32 needs a checkpoint that declares it, or is refused.

A text that is too long is cut at its end unless `truncate` says otherwise, as by Cohere. There is no limit of 96 texts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import UNSET, Meta, UnsetType

from common.errors import InvalidRequest
from common.text.tokenization import NameOf
from common.wire.messages import ModelFacts
from gateway.formats import ENCODINGS, Dtype, check_finite, json_rows, list_pieces
from gateway.model_requests import EmbeddingRequest, Inputs, ModelOutput, ParsedRequest
from gateway.parsing import (
    TEXT_SCHEMA,
    TEXTS_SCHEMA,
    TRUNCATION,
    InputType,
    Limits,
    Operation,
    Truncation,
    check_dimensions,
    check_dtype,
    check_list,
    check_normalize,
    check_text,
    check_texts,
    parse_prompt,
    unsupported,
)
from gateway.schema import Body, wrong_type

EmbeddingType = Dtype | Literal["base64"]

_TEXTS = {"anyOf": [TEXTS_SCHEMA, {"type": "null"}]}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT_SCHEMA},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_INPUT = {
    "type": "object",
    "properties": {"content": {"type": "array", "items": _PART, "minItems": 1, "maxItems": 1}},
    "required": ["content"],
    "additionalProperties": False,
}
_INPUTS = {"anyOf": [{"type": "array", "items": _INPUT, "minItems": 1}, {"type": "null"}]}


class EmbedBody(Body, kw_only=True):
    """Texts to embed: as `texts`, or as the only content of `inputs`."""

    texts: Annotated[Any, Meta(description="Strings.", extra_json_schema=_TEXTS)] = None
    inputs: Annotated[
        Any, Meta(description="Objects with one text each, instead of `texts`.", extra_json_schema=_INPUTS)
    ] = None
    images: Annotated[Any, Meta(description="Not supported.", extra_json_schema={"type": "null"})] = None
    input_type: Annotated[
        InputType | None,
        Meta(description="What the texts are for. The checkpoint's prompt for it, if any, is put before every text."),
    ] = None
    embedding_types: Annotated[
        Annotated[list[EmbeddingType], Meta(min_length=1)] | None,
        Meta(
            description="The types in which every vector is returned; `base64` is base64 of `float`. All types but "
            "these two need a model that declares a quantiser. By default `float`."
        ),
    ] = None
    output_dimension: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep only this many dimensions, the first ones. A model that normalises does so after that."),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="A text with more tokens than this is too long. Special tokens and the prompt count."),
    ] = None
    truncate: Annotated[
        Truncation | bool | None,
        Meta(description="What happens to a text that is too long: it is cut at its end or its start, or refused."),
    ] = None


class EmbeddingsByType(msgspec.Struct):
    """A vector for each text, in each type that the request names."""

    float_: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class ApiVersion(msgspec.Struct):
    version: str


class BilledUnits(msgspec.Struct):
    input_tokens: Annotated[int, Meta(description="Tokens of the texts, whatever the number of types.")]


class EmbedMeta(msgspec.Struct):
    api_version: ApiVersion
    billed_units: BilledUnits


class Embedded(msgspec.Struct):
    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    response_type: Literal["embeddings_by_type"]
    meta: EmbedMeta


class EmbeddedV1(msgspec.Struct):
    """Without `embedding_types`, `embeddings` is a bare list of vectors."""

    id: str
    embeddings: EmbeddingsByType | list[list[float]]
    texts: list[str]
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    meta: EmbedMeta


def parse(body: EmbedBody, facts: ModelFacts, limits: Limits, *, version: str) -> ParsedRequest:
    """Make the request that a body asks for, with every check that needs no tokenizer.

    Raises:
        InvalidRequest: the code and `param` say which field is wrong first.
    """
    types: list[EmbeddingType] = ["float"]
    if body.embedding_types is not None:
        types = list(dict.fromkeys(body.embedding_types))
    for one in types:
        if one != "base64":
            check_dtype(one, facts, "embedding_types")
    # float32 comes first, since only it may be normalised.
    encodings = sorted({ENCODINGS[one] for one in types}, key=["float32", "int8", "binary"].index)
    inputs = _parse_inputs(body, limits.max_inputs)
    truncation = replace(TRUNCATION[_word(body.truncate)], max_tokens=body.max_tokens)
    request = EmbeddingRequest(
        inputs=inputs,
        prompt=parse_prompt(
            None, None, truncation, inputs, facts, input_type=body.input_type, direction_name="truncate"
        ),
        truncation=truncation,
        # Bits come last, and have the strictest rule.
        dimensions=check_dimensions(body.output_dimension, facts, encodings[-1], "output_dimension"),
        normalize=check_normalize(None, facts, encodings[0]),
        encoding=encodings[0],
        lane=body.lane,
        more_encodings=tuple(encodings[1:]),
    )
    return ParsedRequest(
        request,
        partial(
            render,
            texts=inputs.texts,
            name_of=inputs.name_of,
            types=types,
            encoding=encodings[0],
            version=version,
            bare=version == "1" and body.embedding_types is None,
        ),
        num_chars=sum(map(len, inputs.texts)),
    )


def render(
    output: ModelOutput,
    *,
    texts: list[str],
    name_of: NameOf,
    types: list[EmbeddingType],
    encoding: str,
    version: str,
    bare: bool,
) -> bytes:
    """Write the answer's body: a list of vectors for each type, or, if `bare`, only one list without its type.

    `encoding` is the encoding of `output.rows`.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which would become a null with status 200 in JSON.
    """
    check_finite(output.rows, name_of)
    rows = {encoding: output.rows, **output.more_rows}
    embeddings: list[bytes] = []
    for one in types:
        if not bare:
            embeddings.append(b'%b"%b":' % (b"," if embeddings else b"{", one.encode()))
        embeddings += list_pieces(json_rows(rows[ENCODINGS[one]], one))
    if not bare:
        embeddings.append(b"}")
    meta = {"api_version": {"version": version}, "billed_units": {"input_tokens": output.num_tokens}}
    pieces = (
        b'{"id":',
        orjson.dumps(output.request_id),
        b',"embeddings":',
        *embeddings,
        b',"texts":',
        *list_pieces(map(orjson.dumps, texts)),  # one at a time: see formats.py
        b',"response_type":"embeddings_floats","meta":' if bare else b',"response_type":"embeddings_by_type","meta":',
        orjson.dumps(meta),
        b"}",
    )
    return b"".join(pieces)


def _parse_inputs(body: EmbedBody, max_inputs: int) -> Inputs:
    """The texts, from `texts` or from `inputs`."""
    if body.images is not None:
        raise unsupported("images", "only text can be embedded")
    given = {name: value for name in ("texts", "inputs") if (value := getattr(body, name)) is not None}
    if len(given) > 1:
        raise InvalidRequest("texts and inputs exclude each other: send one of them.", param="inputs")
    if not given:
        raise InvalidRequest("texts is missing.", param="texts", code="invalid_type")
    ((name, values),) = given.items()
    wanted = "a list of strings" if name == "texts" else "a list of objects, each with its content"
    values = check_list(values, name, wanted, max_inputs)

    def name_of(index: int) -> str:
        return f"{name}[{index}]"

    if name == "texts":
        texts = check_texts(values, name)
    else:
        texts = [_text_of(value, name_of(index)) for index, value in enumerate(values)]
    return Inputs(texts, [], name_of, range(len(texts)), list_name=name)


def _text_of(value: object, name: str) -> str:
    """The text of one member of `inputs`, which must hold nothing else."""
    if type(value) is not dict or value.keys() != {"content"} or type(value["content"]) is not list:
        raise wrong_type(name, "an object whose only field is content, a list")
    content = value["content"]
    if len(content) != 1:
        raise unsupported(f"{name}.content", "it must have exactly one part, a text")
    (part,) = content
    where = f"{name}.content[0]"
    if type(part) is not dict:
        raise wrong_type(where, "an object with a type")
    if part.get("type") != "text":
        raise unsupported(f"{where}.type", "only text can be embedded")
    if part.keys() != {"type", "text"}:
        raise wrong_type(where, "an object with a type and a text, and nothing else")
    return check_text(part["text"], f"{where}.text")


def _word(truncate: Truncation | bool | None) -> Truncation:
    """Cohere's word for truncation. True and false mean END and NONE, as on the other routes."""
    if truncate is None or truncate is True:
        return "END"
    return truncate or "NONE"


_DESCRIPTION = "Returns a vector for each text, in each type that the request names."

EMBED = Operation(
    paths=("/v2/embed",),
    dialect="Cohere",
    summary="Embed texts",
    description=_DESCRIPTION,
    body=EmbedBody,
    answer=Embedded,
    parse=partial(parse, version="2"),
    task="embed",
)

EMBED_V1 = Operation(
    paths=("/v1/embed",),
    dialect="Cohere",
    summary="Embed texts, as version 1 of Cohere's API does",
    description=_DESCRIPTION + " Without `embedding_types`, returns a bare list of `float` vectors.",
    body=EmbedBody,
    answer=EmbeddedV1,
    parse=partial(parse, version="1"),
    task="embed",
)
