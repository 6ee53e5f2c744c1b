"""`POST /v1/embeddings` as OpenAI's clients speak it: body → request, vectors → body. No sockets.

Fields that mean something are checked; those in `_IGNORED` are sent by OpenAI, LangChain, LlamaIndex, LiteLLM or
vLLM clients, cannot change a vector, and are accepted unread. Anything else is refused: it may be a misspelt field,
and a vector made without it would be wrong.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InvalidRequest, NonfiniteOutput, NotFound
from common.protocol import ModelFacts
from common.tokenization import TruncationRule
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

EncodingFormat = Literal["float", "base64"]

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

_FORMATS = ("float", "base64")
_QUANTISED_FORMATS = ("base64_int8", "base64_binary", "base64_ubinary")
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
    encoding_format = _parse_encoding_format(fields)
    dimensions = optional_integer(fields, "dimensions", 1, facts.dimensions)
    normalize = optional_flag(fields, "normalize")
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
        dimensions=dimensions or facts.dimensions,
        normalize=facts.normalize if normalize is None else normalize,
        lane=lane or "online",
        encoding_format=encoding_format,
    )


def render(rows: npt.NDArray[np.float32], encoding_format: EncodingFormat, model: str, num_tokens: int) -> bytes:
    """The answer's body for `rows` [inputs, dimensions]; floats as the shortest decimals that give float32 back.

    One row at a time: the JSON writer holds the interpreter's lock for a whole call, so that even on another thread
    a large matrix at once would stop the event loop.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which JSON would turn into a null with status 200.
    """
    check_finite(rows)
    pieces = [b'{"object":"list","model":', orjson.dumps(model), b',"data":[']
    separator = b'{"object":"embedding","index":%d,"embedding":'
    if encoding_format == "base64":
        for index, row in enumerate(rows.astype("<f4", copy=False)):
            pieces += (separator % index, b'"', binascii.b2a_base64(row.tobytes(), newline=False), b'"},')
    else:
        for index, row in enumerate(rows):
            pieces += (separator % index, orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY), b"},")
    pieces[-1] = pieces[-1][:-1]
    pieces.append(b'],"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (num_tokens, num_tokens))
    return b"".join(pieces)


def render_raw(rows: npt.NDArray[np.float32]) -> bytes:
    """The bare matrix, little-endian, row after row. Raises NonfiniteOutput as `render` does."""
    check_finite(rows)
    return rows.astype("<f4", copy=False).tobytes()


def check_finite(rows: npt.NDArray[np.float32]) -> None:
    """Raises NonfiniteOutput naming the first row that holds a NaN or an infinity."""
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


def _parse_encoding_format(fields: Fields) -> EncodingFormat:
    value = fields.get("encoding_format")
    if value == "base64":
        return "base64"
    if value is None or value == "float":
        return "float"
    if value in _QUANTISED_FORMATS:
        raise _unsupported("encoding_format", "this model declares no quantiser; use float or base64")
    optional_choice(fields, "encoding_format", _FORMATS)
    raise AssertionError("an encoding_format that is neither known nor refused: this is a bug")


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
