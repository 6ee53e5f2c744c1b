"""`POST /v1/embeddings` as OpenAI's clients speak it: body → request, vectors → body. No sockets.

Fields that mean something are checked; those in `_IGNORED` are sent by OpenAI, LangChain, LlamaIndex, LiteLLM or
vLLM clients, cannot change a vector, and are accepted unread. Anything else is refused: it may be a misspelt field,
and a vector made without it would be wrong.

`float` and `base64` are float32 whatever the model. The quantised formats are made, by a model that declares a
quantiser, from the vector as it pools it, so they are the same whatever the checkpoint's own normalisation; asking for
`normalize` with one of them is refused, since the answer would be no vector of unit length.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import Literal

import numpy as np
import orjson

from common.errors import InvalidRequest, NonfiniteOutput, NotFound
from common.protocol import ModelFacts
from common.tokenization import TruncationRule
from gateway.client import Rows
from gateway.schema import (
    Fields,
    check_names,
    check_texts,
    empty_input,
    is_served,
    optional_choice,
    optional_flag,
    optional_integer,
    optional_text,
    parse_object,
)

PATH = "/v1/embeddings"

EncodingFormat = Literal["float", "base64", "base64_int8", "base64_binary", "base64_ubinary"]

_FIELDS = frozenset(
    {
        "input",
        "model",
        "encoding_format",
        "dimensions",
        "normalize",
        "truncate",
        "truncation_direction",
        "prompt_name",
        "prompt",
        "user",
        "lane",
        "stream",
    }
)
_IGNORED = frozenset(
    {"metadata", "priority", "request_id", "safety_identifier", "service_tier", "store", "stream_options", "timeout"}
)
_KNOWN = _FIELDS | _IGNORED

# The encoding (of common/protocol.py) that a worker is asked for.
_ENCODINGS: dict[EncodingFormat, str] = {
    "float": "float32",
    "base64": "float32",
    "base64_int8": "int8",
    "base64_binary": "binary",
    "base64_ubinary": "binary",
}

# From the first dimension in a byte's lowest bit, as rows come, to the first in its highest.
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

_LANES = ("online", "backfill")
_DIRECTIONS = ("left", "right")
_MAX_USER_CHARS = 256


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What a client asked for, every default filled in. Either `texts` or `token_ids` is empty."""

    texts: list[str]  # without the prompt
    token_ids: list[list[object]]  # not yet checked against the vocabulary
    lone: bool  # `input` was no list of inputs: errors name it `input`
    prompt: str  # goes before every text
    truncation: TruncationRule
    dimensions: int
    normalize: bool
    lane: str
    encoding_format: EncodingFormat

    @property
    def encoding(self) -> str:
        return _ENCODINGS[self.encoding_format]


def parse(body: bytes, facts: ModelFacts, *, max_inputs: int, auto_truncate: bool) -> EmbeddingRequest:
    """The request of a body, checked as far as it can be without a tokenizer.

    Raises:
        InvalidRequest: with the code and `param` of the first thing that is wrong.
        NotFound: model_not_found.
    """
    fields = parse_object(body)
    check_names(fields, _KNOWN)
    _check_model(fields, facts)
    if optional_flag(fields, "stream"):
        raise _unsupported("stream", "embeddings are not streamed")
    encoding_format = _parse_encoding_format(fields, facts)
    dimensions = _parse_dimensions(fields, facts, encoding_format)
    normalize = _parse_normalize(fields, facts, encoding_format)
    truncate = optional_flag(fields, "truncate")
    direction = optional_choice(fields, "truncation_direction", _DIRECTIONS)
    lane = optional_choice(fields, "lane", _LANES)
    _check_user(fields)
    texts, token_ids, lone = _parse_input(fields, max_inputs)
    return EmbeddingRequest(
        texts=texts,
        token_ids=token_ids,
        lone=lone,
        prompt=_parse_prompt(fields, facts, for_texts=bool(texts)),
        truncation=TruncationRule(
            auto_truncate if truncate is None else truncate, "left" if direction == "left" else "right"
        ),
        dimensions=dimensions,
        normalize=normalize,
        lane=lane or "online",
        encoding_format=encoding_format,
    )


def render(rows: Rows, encoding_format: EncodingFormat, model: str, num_tokens: int) -> bytes:
    """The answer's body for rows of the format's encoding; floats as the shortest decimals that give float32 back.

    One row at a time: the JSON writer holds the interpreter's lock for a whole call, so that even on another thread
    a large matrix at once would stop the event loop.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which JSON would turn into a null with status 200.
    """
    check_finite(rows)
    pieces = [b'{"object":"list","model":', orjson.dumps(model), b',"data":[']
    separator = b'{"object":"embedding","index":%d,"embedding":'
    if encoding_format == "float":
        for index, row in enumerate(rows):
            pieces += (separator % index, orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY), b"},")
    else:
        data = _octets(rows, encoding_format)
        num_bytes = len(data) // len(rows)
        for index in range(len(rows)):
            row_octets = data[index * num_bytes : (index + 1) * num_bytes]
            pieces += (separator % index, b'"', binascii.b2a_base64(row_octets, newline=False), b'"},')
    pieces[-1] = pieces[-1][:-1]
    pieces.append(b'],"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (num_tokens, num_tokens))
    return b"".join(pieces)


def render_raw(rows: Rows, encoding_format: EncodingFormat) -> bytes:
    """The bare matrix, little-endian, row after row. Raises NonfiniteOutput as `render` does."""
    check_finite(rows)
    return bytes(_octets(rows, encoding_format))


def check_finite(rows: Rows) -> None:
    """Raises NonfiniteOutput naming the first row that holds a NaN or an infinity."""
    if rows.dtype.kind != "f":
        return
    finite = np.isfinite(rows)
    if not finite.all():
        index = int(np.argmin(finite.all(axis=1)))
        raise NonfiniteOutput(f"The model made a NaN or an infinity of input[{index}].", param=f"input[{index}]")


def _check_model(fields: Fields, facts: ModelFacts) -> None:
    if "model" not in fields:
        return
    model = fields["model"]
    if type(model) is not str:
        raise InvalidRequest(
            "model must be a string; leave it out to use the one served.", param="model", code="invalid_type"
        )
    if not model:
        raise InvalidRequest("model is empty; leave it out to use the one served.", param="model", code="missing_field")
    if not is_served(model, facts.name):
        raise NotFound(
            "This model is not served here; GET /v1/models lists what is.", param="model", code="model_not_found"
        )


def _octets(rows: Rows, encoding_format: EncodingFormat) -> bytes | memoryview:
    """What the rows hold, one after the other; without a copy unless bits change places."""
    if encoding_format == "base64_ubinary":
        return rows.tobytes().translate(_REVERSED_BITS)
    return rows.data.cast("B")


def _parse_encoding_format(fields: Fields, facts: ModelFacts) -> EncodingFormat:
    value = optional_text(fields, "encoding_format")
    if value is None:
        return "float"
    served = [name for name, encoding in _ENCODINGS.items() if encoding in facts.encodings]
    if value in _ENCODINGS and value not in served:
        raise _unsupported("encoding_format", f"this model does not make it; use one of: {', '.join(served)}")
    optional_choice(fields, "encoding_format", served)
    return value  # type: ignore[return-value]  # one of those


def _parse_dimensions(fields: Fields, facts: ModelFacts, encoding_format: EncodingFormat) -> int:
    dimensions = optional_integer(fields, "dimensions", 1, facts.dimensions)
    if dimensions is None:
        dimensions = facts.dimensions
    if dimensions % 8 and _ENCODINGS[encoding_format] == "binary":
        raise InvalidRequest(
            f"dimensions must be a multiple of 8 where each is one bit, and is {dimensions}.", param="dimensions"
        )
    return dimensions


def _parse_normalize(fields: Fields, facts: ModelFacts, encoding_format: EncodingFormat) -> bool:
    normalize = optional_flag(fields, "normalize")
    if _ENCODINGS[encoding_format] == "float32":
        return facts.normalize if normalize is None else normalize
    if normalize:
        raise _unsupported("normalize", f"{encoding_format} is made from the vector before any normalisation")
    return False


def _check_user(fields: Fields) -> None:
    user = optional_text(fields, "user")
    if user is not None and len(user) > _MAX_USER_CHARS:
        raise InvalidRequest(
            f"user may have {_MAX_USER_CHARS} characters; this one has {len(user)}.", param="user", code="invalid_type"
        )


def _parse_prompt(fields: Fields, facts: ModelFacts, *, for_texts: bool) -> str:
    prompt = optional_text(fields, "prompt")
    prompt_name = optional_text(fields, "prompt_name")
    if prompt is not None and prompt_name is not None:
        raise InvalidRequest("prompt and prompt_name exclude each other: send one of them.", param="prompt")
    given = "prompt" if prompt is not None else "prompt_name" if prompt_name is not None else None
    if not for_texts:
        if given is not None:
            raise InvalidRequest(f"{given} goes before text; token ids are run as they are.", param=given)
        return ""
    if prompt is not None:
        return prompt
    name = prompt_name if prompt_name is not None else facts.default_prompt_name
    if name is None:
        return ""
    if name not in facts.prompts:
        raise InvalidRequest("This model has no prompt of that name.", param="prompt_name")
    return facts.prompts[name]


def _parse_input(fields: Fields, max_inputs: int) -> tuple[list[str], list[list[object]], bool]:
    """Texts, lists of token ids (one of the two is empty), and whether `input` is a lone one."""
    value = fields.get("input")
    if type(value) is str:
        if not value:
            raise empty_input("input")
        return [value], [], True
    if type(value) is not list:
        raise InvalidRequest(
            "input must be a string, a list of strings, a list of token ids or a list of such lists.",
            param="input",
            code="invalid_type",
        )
    if not value:
        raise empty_input("input")
    first = value[0]
    if isinstance(first, int | float):
        return [], [value], True
    if len(value) > max_inputs:
        raise InvalidRequest(
            f"input has {len(value)} inputs; at most {max_inputs} fit into one request. Send several requests.",
            param="input",
            code="too_many_inputs",
        )
    if type(first) is str:
        return check_texts(value, "input"), [], False
    if type(first) is not list:
        raise InvalidRequest(
            "input[0] must be a string, a token id or a list of token ids.", param="input[0]", code="invalid_type"
        )
    for index, ids in enumerate(value):
        if type(ids) is not list:
            raise InvalidRequest(
                f"input[{index}] must be a list of token ids, as input[0] is.",
                param=f"input[{index}]",
                code="invalid_type",
            )
    return [], value, False


def _unsupported(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name} asks for what cannot be done: {reason}.", param=name, code="unsupported_parameter")
