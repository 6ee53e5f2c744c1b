"""text-embeddings-inference (TEI): vectors (`/embed` and others), `/similarity`, and its tokenizer. No sockets.

Fields and bare lists are those of TEI's public OpenAPI document; errors are this server's own. A vector of `/embed` has
unit length unless `normalize` is false, whatever the checkpoint declares. TEI's have, too, so its users compute dot
products. Rows of single tokens are never normalised. Both spellings of a direction are accepted, because TEI's document
says `Left` and its clients send `left`.

TEI also serves POST on `/`, the only path that huggingface_hub's InferenceClient uses. What a body means there depends
on the model's task, and on `parameters`, which that client sends for every task but embedding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
from msgspec import Meta

from common.errors import InvalidRequest, NonfiniteOutput
from common.text.tokenization import NameOf, Token, Tokenizer, TruncationRule, input_too_long
from common.wire.messages import ModelFacts
from common.wire.rows import read_sparse
from gateway.formats import check_finite, decimals, json_list, json_rows
from gateway.model_requests import EmbeddingRequest, Inputs, LocalRequest, ModelOutput, ParsedRequest
from gateway.parsing import (
    IDS_OR_LISTS_SCHEMA,
    INPUT_SCHEMA,
    TEXT_OR_TEXTS_SCHEMA,
    TEXTS_SCHEMA,
    Limits,
    Operation,
    check_dimensions,
    check_list,
    check_text,
    check_texts,
    parse_inputs,
    parse_prompt,
)
from gateway.schema import Body, wrong_type

DIALECT = "TEI"

Direction = Literal["left", "right", "Left", "Right"]

# A text is tokenized in one call, in which each token takes about 1 kB. A text of this many characters, each a token,
# takes 130 MB, and blocks all other threads for 75 ms (measured 2026-11-30, two cores).
MAX_TOKENIZED_CHARS = 131_072

# Tokens that are written in one call, during which the JSON writer holds the interpreter's lock.
_WRITTEN_TOKENS = 4096

Truncate = Annotated[bool | None, Meta(description="Cut texts that are too long, instead of refusing them.")]
TruncationDirection = Annotated[
    Direction | None, Meta(description="The end at which texts are cut. By default `right`.")
]
PromptName = Annotated[
    str | None, Meta(description="The name of a prompt of the checkpoint, which is put before every text.")
]


class TruncatingBody(Body, kw_only=True):
    """Fields of every TEI route that runs a model."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None


class EmbedAllBody(TruncatingBody, kw_only=True):
    """Texts, or token ids."""

    inputs: Annotated[
        Any, Meta(description="Texts or token ids to embed. Token ids are not changed.", extra_json_schema=INPUT_SCHEMA)
    ]
    prompt_name: PromptName = None


class EmbedBody(EmbedAllBody, kw_only=True):
    """Texts, or token ids, to embed."""

    normalize: Annotated[
        bool | None, Meta(description="Whether vectors have unit length. By default true, for every model.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep only this many dimensions, the first ones, before the vector is normalised."),
    ] = None
    encoding_format: Annotated[
        Literal["float"] | None, Meta(description="Must be `float` or left out: this route writes vectors as numbers.")
    ] = None


class SimilarityInputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A sentence, and the sentences to compare it with."""

    source_sentence: Annotated[
        str,
        Meta(description="The sentence that each of the others is compared with.", extra_json_schema={"minLength": 1}),
    ]
    sentences: Annotated[Any, Meta(description="Strings.", extra_json_schema=TEXTS_SCHEMA)]


class SimilarityParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the sentences are tokenized."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None


class SimilarityBody(Body, kw_only=True):
    """Sentences to compare with one."""

    inputs: Annotated[SimilarityInputs, Meta(description="A sentence, and the sentences to compare it with.")]
    parameters: Annotated[SimilarityParameters | None, Meta(description="How the sentences are tokenized.")] = None


class TokenizeBody(Body, kw_only=True):
    """Texts to tokenize."""

    inputs: Annotated[Any, Meta(description="A text, or a list of texts.", extra_json_schema=TEXT_OR_TEXTS_SCHEMA)]
    add_special_tokens: Annotated[
        bool | None, Meta(description="Add the special tokens around a text. By default true.")
    ] = None
    prompt_name: PromptName = None


class DecodeBody(Body, kw_only=True):
    """Token ids to decode."""

    ids: Annotated[
        Any, Meta(description="A list of token ids, or a list of such lists.", extra_json_schema=IDS_OR_LISTS_SCHEMA)
    ]
    skip_special_tokens: Annotated[
        bool | None, Meta(description="Leave special tokens out of the text. By default true.")
    ] = None


class SparseValue(msgspec.Struct):
    index: Annotated[int, Meta(description="The index of a token in the model's vocabulary.")]
    value: float


def parse_embed(body: EmbedBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    """Make the request that a body asks for, with every check that needs no tokenizer. The other parsers do the same.

    Raises:
        InvalidRequest: the code and `param` say which field is wrong first.
    """
    request = _embedding_request(body, facts, limits)
    request = replace(
        request,
        dimensions=check_dimensions(body.dimensions, facts, request.encoding),
        normalize=body.normalize is not False,
    )
    return ParsedRequest(request, partial(render_rows, name_of=request.inputs.name_of))


def parse_embed_all(body: EmbedAllBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    request = replace(_embedding_request(body, facts, limits), by_token=True)
    return ParsedRequest(request, partial(render_rows_of_tokens, name_of=request.inputs.name_of))


def parse_embed_sparse(body: EmbedAllBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    request = replace(_embedding_request(body, facts, limits), encoding="sparse")
    return ParsedRequest(request, partial(render_sparse_rows, name_of=request.inputs.name_of))


def parse_similarity(body: SimilarityBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    parameters = body.parameters or SimilarityParameters()
    truncation = truncation_of(parameters.truncate, parameters.truncation_direction, limits)
    inputs = _parse_sentences(body.inputs, limits.max_inputs)
    try:
        prompt = parse_prompt(None, parameters.prompt_name, truncation, inputs, facts)
    except InvalidRequest as error:
        error.param = f"parameters.{error.param}"
        raise
    request = EmbeddingRequest(
        inputs=inputs,
        prompt=prompt,
        truncation=truncation,
        dimensions=facts.dimensions,
        normalize=False,
        encoding="float32",
        lane=body.lane,
    )
    return ParsedRequest(request, partial(render_similarities, name_of=inputs.name_of))


def parse_tokenize(body: TokenizeBody, facts: ModelFacts, limits: Limits) -> LocalRequest:
    inputs = parse_inputs(body.inputs, "inputs", limits.max_inputs)
    if not inputs.texts:
        raise wrong_type("inputs", "a string or a list of strings")
    for index, text in enumerate(inputs.texts):
        if len(text) > MAX_TOKENIZED_CHARS:
            raise input_too_long(inputs.name(index), len(text), MAX_TOKENIZED_CHARS, can_cut=False)
    prompt = parse_prompt(None, body.prompt_name, TruncationRule(allowed=False), inputs, facts)
    special_tokens = body.add_special_tokens is not False

    def answer(tokenizer: Tokenizer, index: int) -> bytes:
        return _json_tokens(tokenizer.reader.tokens(inputs.texts[index], prompt=prompt, special_tokens=special_tokens))

    sizes = [len(prompt) + len(text) for text in inputs.texts]
    return LocalRequest(answer, sizes, "characters", "inputs", body.lane)


def parse_decode(body: DecodeBody, facts: ModelFacts, limits: Limits) -> LocalRequest:
    inputs = parse_inputs(body.ids, "ids", limits.max_inputs)
    if inputs.texts:
        raise wrong_type("ids", "a list of token ids, or a list of such lists")
    skip_special_tokens = body.skip_special_tokens is not False

    def answer(tokenizer: Tokenizer, index: int) -> bytes:
        ids = tokenizer.check_tokens(inputs.token_ids[index], inputs.name(index))
        return orjson.dumps(tokenizer.reader.decode(ids, skip_special_tokens=skip_special_tokens))

    return LocalRequest(answer, list(map(len, inputs.token_ids)), "token ids", "ids", body.lane)


def render_rows(output: ModelOutput, *, name_of: NameOf) -> bytes:
    """Write a list of vectors. The other renderers raise the same.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which would become a null with status 200 in JSON.
    """
    check_finite(output.rows, name_of)
    return json_list(json_rows(output.rows, "float"))


def render_rows_of_tokens(output: ModelOutput, *, name_of: NameOf) -> bytes:
    """Write a list for each text, with a vector for each of its tokens."""
    counts = output.row_counts
    assert counts is not None, "the request is by token"
    stops = np.cumsum(counts)
    check_finite(output.rows, lambda row: name_of(int(np.searchsorted(stops, row, side="right"))))
    rows = json_rows(output.rows, "float")
    return json_list(json_list(islice(rows, count)) for count in counts)


def render_sparse_rows(output: ModelOutput, *, name_of: NameOf) -> bytes:
    """Write a list for each text, with its values in the order of the vocabulary."""
    rows = []
    for place, row in enumerate(output.rows):
        columns, values = read_sparse(row)
        if not np.isfinite(values).all():
            name = name_of(place)
            raise NonfiniteOutput(f"The model returned a NaN or an infinity for {name}.", param=name)
        pairs = zip(columns.tolist(), decimals(values), strict=True) if len(values) else ()
        rows.append(json_list(b'{"index":%d,"value":%b}' % pair for pair in pairs))
    return json_list(rows)


def render_similarities(output: ModelOutput, *, name_of: NameOf) -> bytes:
    """Write a list of each sentence's cosine with the source."""
    check_finite(output.rows, name_of)
    return json_list(decimals(_cosines(output.rows.astype(np.float64))))


def truncation_of(truncate: bool | None, direction: Direction | None, limits: Limits) -> TruncationRule:
    """The rule for texts that are too long: the body's, or else the deployment's."""
    allowed = limits.auto_truncate if truncate is None else truncate
    return TruncationRule(allowed, "left" if direction in ("left", "Left") else "right")


def _embedding_request(body: EmbedAllBody, facts: ModelFacts, limits: Limits) -> EmbeddingRequest:
    """The request for rows of all dimensions, not normalised."""
    truncation = truncation_of(body.truncate, body.truncation_direction, limits)
    inputs = parse_inputs(body.inputs, "inputs", limits.max_inputs)
    return EmbeddingRequest(
        inputs=inputs,
        prompt=parse_prompt(None, body.prompt_name, truncation, inputs, facts),
        truncation=truncation,
        dimensions=facts.dimensions,
        normalize=False,
        encoding="float32",
        lane=body.lane,
    )


def _parse_sentences(inputs: SimilarityInputs, max_inputs: int) -> Inputs:
    """The source, followed by the sentences."""
    source = check_text(inputs.source_sentence, "inputs.source_sentence", "compare")
    name = "inputs.sentences"
    sentences = check_list(inputs.sentences, name, "a list of strings", max_inputs - 1, "compare", "sentences")
    texts = [source, *check_texts(sentences, name, "compare")]

    def name_of(index: int) -> str:
        return f"{name}[{index - 1}]" if index else "inputs.source_sentence"

    return Inputs(texts, [], name_of, range(len(texts)), list_name="inputs")


def _cosines(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The cosine of the first row with each other row; 0 if one of the two is all zeros."""
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    products = lengths[0] * lengths[1:]
    cosines = np.divide(rows[1:] @ rows[0], products, out=np.zeros_like(products), where=products > 0)
    return np.asarray(cosines, dtype=np.float32)


def _json_tokens(tokens: list[Token]) -> bytes:
    return json_list(
        orjson.dumps(tokens[at : at + _WRITTEN_TOKENS])[1:-1] for at in range(0, len(tokens), _WRITTEN_TOKENS)
    )


EMBED = Operation(
    paths=("/embed",),
    dialect=DIALECT,
    summary="Embed texts, in a bare list",
    description="Returns a vector for each input, of unit length unless `normalize` is false.",
    body=EmbedBody,
    answer=list[list[float]],
    parse=parse_embed,
    task="embed",
)

EMBED_ALL = Operation(
    paths=("/embed_all",),
    dialect=DIALECT,
    summary="Embed each token of texts",
    description="Returns a vector for each token of each input, special tokens included, without normalisation.",
    body=EmbedAllBody,
    answer=list[list[list[float]]],
    parse=parse_embed_all,
    task="tokens",
)

EMBED_SPARSE = Operation(
    paths=("/embed_sparse",),
    dialect=DIALECT,
    summary="Embed texts as sparse vectors",
    description="Returns each input's weights that are not zero, by token of the vocabulary. Needs a sparse model.",
    body=EmbedAllBody,
    answer=list[list[SparseValue]],
    parse=parse_embed_sparse,
    task="sparse",
)

SIMILARITY = Operation(
    paths=("/similarity",),
    dialect=DIALECT,
    summary="Compare sentences with one",
    description="Returns the cosine similarity of each sentence with the source.",
    body=SimilarityBody,
    answer=list[float],
    parse=parse_similarity,
    task="embed",
)

TOKENIZE = Operation(
    paths=("/tokenize",),
    dialect=DIALECT,
    summary="Tokenize texts",
    description="Returns all tokens of each text. `start` and `stop` are character offsets in the text; special tokens "
    "around the text and tokens of the prompt have none.",
    body=TokenizeBody,
    answer=list[list[Token]],
    parse=parse_tokenize,
    task=None,
)

DECODE = Operation(
    paths=("/decode",),
    dialect=DIALECT,
    summary="Decode token ids",
    description="Returns the text of each list of token ids, by the tokenizer's own decoder.",
    body=DecodeBody,
    answer=list[str],
    parse=parse_decode,
    task=None,
)

ROOT = "/"
ROOT_SPARSE = replace(EMBED_SPARSE, paths=(ROOT,), only_for_task=True)
ROOT_SIMILARITY = replace(SIMILARITY, paths=(ROOT,), only_for_task=True, marker="parameters")
ROOT_EMBED = replace(EMBED, paths=(ROOT,), only_for_task=True)
