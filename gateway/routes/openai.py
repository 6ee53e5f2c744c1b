"""`POST /v1/embeddings`, as clients of OpenAI, Perplexity and Voyage send it: body → request, vectors → body. No I/O.

Fields that change a vector are checked. Fields that clients of OpenAI, LangChain, LlamaIndex, LiteLLM or vLLM send, and
that cannot change a vector, are accepted and ignored. Every other field is refused, since it may be a misspelt one.

`partial` is ours: inputs that cannot be embedded do not fail the others. They are listed under `errors`, each with its
index and its reason.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from common.errors import InvalidRequest
from common.text.tokenization import NameOf, TruncationRule
from common.wire.messages import ModelFacts
from gateway.error_responses import Error, Usage, error_object, render_usage
from gateway.formats import ENCODINGS, IN_BASE64, Dtype, EncodingFormat, RowFormat, check_finite, json_rows
from gateway.model_requests import EmbeddingRequest, Matrix, ModelOutput, ParsedRequest
from gateway.parsing import (
    INPUT_SCHEMA,
    InputType,
    Limits,
    Operation,
    check_dimensions,
    check_dtype,
    check_encoding_format,
    check_normalize,
    parse_inputs,
    parse_prompt,
)
from gateway.schema import Body

PATH = "/v1/embeddings"


class EmbeddingsBody(Body, kw_only=True):
    """Texts, or token ids, to embed."""

    input: Annotated[
        Any, Meta(description="Texts or token ids to embed. Token ids are not changed.", extra_json_schema=INPUT_SCHEMA)
    ]
    encoding_format: Annotated[
        EncodingFormat | None,
        Meta(
            description="How vectors are written: numbers, or base64 of float32. A model that declares a quantiser "
            "also makes base64 of int8 or of bits. By default `float`."
        ),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep only this many dimensions, the first ones. A model that normalises does so after that."),
    ] = None
    normalize: Annotated[
        bool | None, Meta(description="Whether vectors have unit length. By default as the checkpoint declares.")
    ] = None
    truncate: Annotated[bool | None, Meta(description="Cut inputs that are too long, instead of refusing them.")] = None
    truncation_direction: Annotated[
        Literal["left", "right"] | None, Meta(description="The end at which inputs are cut. By default `right`.")
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="The name of a prompt of the checkpoint, which is put before every text.")
    ] = None
    prompt: Annotated[str | None, Meta(description="A prompt of your own, which is put before every text.")] = None
    partial: Annotated[bool | None, Meta(description="Embed the valid inputs, and list the others under `errors`.")] = (
        None
    )
    input_type: Annotated[
        InputType | None,
        Meta(description="What the texts are for. The checkpoint's prompt for it, if any, is put before every text."),
    ] = None
    truncation: Annotated[bool | None, Meta(description="The same as `truncate`, for Voyage's client.")] = None
    output_dimension: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="The same as `dimensions`, for Voyage's client.")
    ] = None
    output_dtype: Annotated[
        Dtype | None,
        Meta(
            description="The type of a vector's numbers. All types but `float` need a model that declares a quantiser. "
            "`encoding_format` must be `base64`, or be left out for numbers."
        ),
    ] = None
    safety_identifier: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None
    service_tier: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None
    store: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None
    stream_options: Annotated[Any, Meta(description="Accepted for compatibility; ignored.")] = None


class Embedding(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64.")]


class Failed(msgspec.Struct):
    index: int
    error: Error


class Embeddings(msgspec.Struct):
    """A vector for each input, in the order of the inputs."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage
    errors: Annotated[
        list[Failed] | msgspec.UnsetType, Meta(description="The inputs without a vector, if the request is `partial`.")
    ] = msgspec.UNSET


def parse(body: EmbeddingsBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    """Make the request that a body asks for, with every check that needs no tokenizer.

    Raises:
        InvalidRequest: the code and `param` say which field is wrong first.
    """
    row_format = _row_format(body, facts)
    encoding = ENCODINGS[row_format]
    truncate = _either(body, "truncate", "truncation")
    truncation = TruncationRule(
        limits.auto_truncate if truncate is None else truncate, body.truncation_direction or "right"
    )
    dimensions_name = "dimensions" if body.output_dimension is None else "output_dimension"
    inputs = parse_inputs(body.input, "input", limits.max_inputs, partial=bool(body.partial))
    request = EmbeddingRequest(
        inputs=inputs,
        prompt=parse_prompt(body.prompt, body.prompt_name, truncation, inputs, facts, input_type=body.input_type),
        truncation=truncation,
        dimensions=check_dimensions(_either(body, "dimensions", "output_dimension"), facts, encoding, dimensions_name),
        normalize=check_normalize(body.normalize, facts, encoding),
        encoding=encoding,
        lane=body.lane,
        partial=bool(body.partial),
    )
    return ParsedRequest(
        request,
        partial(render, name_of=inputs.name_of, row_format=row_format),
        matrix=Matrix(row_format, inputs.name_of),
    )


def render(output: ModelOutput, *, name_of: NameOf, row_format: RowFormat) -> bytes:
    """Write the answer's body for rows of the format's encoding.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which would become a null with status 200 in JSON.
    """
    rows = output.rows
    places = range(len(rows)) if output.places is None else output.places
    check_finite(rows, lambda row: name_of(places[row]))
    pieces = [b'{"object":"list","model":', orjson.dumps(output.facts.name), b',"data":[']
    for index, row in zip(places, json_rows(rows, row_format), strict=True):
        pieces += (b'{"object":"embedding","index":%d,"embedding":' % index, row, b"},")
    pieces[-1] = b"}]"
    if output.failures:
        failures = [{"index": index, "error": error_object(error)} for index, error in sorted(output.failures.items())]
        pieces += (b',"errors":', orjson.dumps(failures))
    pieces += (b",", render_usage(output.num_tokens), b"}")
    return b"".join(pieces)


def _row_format(body: EmbeddingsBody, facts: ModelFacts) -> RowFormat:
    """The format. OpenAI's and Perplexity's clients name one; Voyage's name a type, and whether it is in base64."""
    if body.output_dtype is None:
        return check_encoding_format(body.encoding_format, facts)
    dtype = check_dtype(body.output_dtype, facts, "output_dtype")
    if body.encoding_format == "base64":
        return IN_BASE64[dtype]
    if body.encoding_format is None or body.encoding_format == dtype:
        return dtype
    raise InvalidRequest(
        "With output_dtype, encoding_format must be base64 or left out.",
        param="encoding_format",
    )


def _either(body: EmbeddingsBody, name: str, other: str) -> Any:  # noqa: ANN401  # a field's value
    """The value of one of two fields that mean the same."""
    value, also = getattr(body, name), getattr(body, other)
    if value is not None and also is not None:
        raise InvalidRequest(f"{name} and {other} mean the same: send one of them.", param=other)
    return also if value is None else value


EMBEDDINGS = Operation(
    paths=(PATH,),
    dialect="OpenAI, Perplexity, Voyage",
    summary="Embed texts",
    description="Returns a vector for each input. If `Accept` ranks `application/octet-stream` above JSON, the answer "
    "is the bare little-endian matrix, with its shape in `X-Embedding-Shape` and its type in `X-Embedding-Dtype`.",
    body=EmbeddingsBody,
    answer=Embeddings,
    parse=parse,
    task="embed",
)
