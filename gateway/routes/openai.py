"""`POST /v1/embeddings` as OpenAI's clients speak it: body → request, vectors → body. No sockets.

Fields that mean something are checked; those in `IGNORED` and `_IGNORED` are sent by OpenAI, LangChain, LlamaIndex,
LiteLLM or vLLM clients, cannot change a vector, and are accepted unread. Anything else is refused: it may be a misspelt
field, and a vector made without it would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from common.errors import InvalidRequest
from common.protocol import ModelFacts
from common.tokenization import TruncationRule
from gateway.answers import render_usage
from gateway.client import Rows
from gateway.formats import (
    ENCODINGS,
    EncodingFormat,
    check_finite,
    json_rows,
    parse_dimensions,
    parse_encoding_format,
    parse_normalize,
    raw_rows,
)
from gateway.schema import (
    IGNORED,
    Fields,
    check_model,
    check_names,
    check_not_streamed,
    check_task,
    check_texts,
    check_user,
    empty_input,
    lane_of,
    optional_choice,
    optional_flag,
    optional_text,
    parse_object,
    too_many_inputs,
    unsupported,
)

PATH = "/v1/embeddings"

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
_IGNORED = frozenset({"safety_identifier", "service_tier", "store", "stream_options"})
_KNOWN = _FIELDS | IGNORED | _IGNORED

_DIRECTIONS = ("left", "right")


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
        return ENCODINGS[self.encoding_format]


def parse(body: bytes, facts: ModelFacts, *, max_inputs: int, auto_truncate: bool) -> EmbeddingRequest:
    """The request of a body, checked as far as it can be without a tokenizer.

    Raises:
        InvalidRequest: with the code and `param` of the first thing that is wrong.
        NotFound: model_not_found.
    """
    fields = parse_object(body)
    check_names(fields, _KNOWN)
    check_model(fields, facts.name)
    check_task("embed", facts.tasks)
    check_not_streamed(fields)
    encoding_format = parse_encoding_format(fields, facts)
    dimensions = parse_dimensions(fields, facts, encoding_format)
    normalize = parse_normalize(fields, facts, encoding_format)
    truncate = optional_flag(fields, "truncate")
    direction = optional_choice(fields, "truncation_direction", _DIRECTIONS)
    lane = lane_of(fields)
    check_user(fields)
    texts, token_ids, lone = _parse_input(fields, max_inputs)
    prompt = _parse_prompt(fields, facts, for_texts=bool(texts))
    if prompt and direction == "left" and not facts.include_prompt:
        raise unsupported("truncation_direction", "this model's prompt, which comes first, is not part of the vector")
    return EmbeddingRequest(
        texts=texts,
        token_ids=token_ids,
        lone=lone,
        prompt=prompt,
        truncation=TruncationRule(
            auto_truncate if truncate is None else truncate, "left" if direction == "left" else "right"
        ),
        dimensions=dimensions,
        normalize=normalize,
        lane=lane,
        encoding_format=encoding_format,
    )


def render(rows: Rows, encoding_format: EncodingFormat, model: str, num_tokens: int) -> bytes:
    """The answer's body for rows of the format's encoding.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which JSON would turn into a null with status 200.
    """
    check_finite(rows, _name_of)
    pieces = [b'{"object":"list","model":', orjson.dumps(model), b',"data":[']
    for index, row in enumerate(json_rows(rows, encoding_format)):
        pieces += (b'{"object":"embedding","index":%d,"embedding":' % index, row, b"},")
    pieces[-1] = pieces[-1][:-1]
    pieces += (b"],", render_usage(num_tokens), b"}")
    return b"".join(pieces)


def render_raw(rows: Rows, encoding_format: EncodingFormat) -> bytes:
    """The bare matrix, little-endian, row after row. Raises NonfiniteOutput as `render` does."""
    check_finite(rows, _name_of)
    return raw_rows(rows, encoding_format)


def _name_of(index: int) -> str:
    return f"input[{index}]"


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
        raise too_many_inputs("input", len(value), max_inputs)
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
