"""`POST /v1/contextualizedembeddings`, as Perplexity's client sends it: chunks → a vector of each. No sockets.

The chunks of a document are read together, and each gets its own vector (see common/text/chunks.py). A document is
never cut, so `truncate: true` is refused. `normalize`, `lane`, `user` and the formats are as on `/v1/embeddings`; the
default format is `float` here, too.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta

from common.wire.messages import ModelFacts, cu_seqlens
from gateway.error_responses import Usage, render_usage
from gateway.formats import ENCODINGS, EncodingFormat, check_finite, json_rows
from gateway.model_requests import ContextualRequest, ModelOutput, ParsedRequest
from gateway.parsing import (
    TEXTS_SCHEMA,
    Limits,
    Operation,
    check_dimensions,
    check_encoding_format,
    check_list,
    check_normalize,
    check_texts,
    too_many_inputs,
    unsupported,
    wrong_task,
)
from gateway.schema import Body

PATH = "/v1/contextualizedembeddings"

# Limits of one request, the same as those of Perplexity's server.
MAX_TOKENS = 120_000
MAX_DOCUMENTS = 512
MAX_CHUNKS = 16_000

_INPUT_SCHEMA = {"type": "array", "items": TEXTS_SCHEMA, "minItems": 1, "maxItems": MAX_DOCUMENTS}


class ContextualBody(Body, kw_only=True):
    """Documents, each a list of chunks."""

    input: Annotated[Any, Meta(description="Documents, each a list of chunks.", extra_json_schema=_INPUT_SCHEMA)]
    encoding_format: Annotated[
        EncodingFormat | None, Meta(description="As for /v1/embeddings. By default `float`.")
    ] = None
    dimensions: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="As for /v1/embeddings.")] = None
    normalize: Annotated[bool | None, Meta(description="As for /v1/embeddings.")] = None
    truncate: Annotated[
        bool | None,
        Meta(
            description="Must be false: a chunk that is cut off would have no vector.",
            extra_json_schema={"enum": [False, None]},
        ),
    ] = None


class ChunkEmbedding(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64.")]


class DocumentEmbeddings(msgspec.Struct):
    """A vector for each chunk of a document, in the order of the chunks."""

    object: Literal["list"]
    index: int
    data: list[ChunkEmbedding]


class ContextualEmbeddings(msgspec.Struct):
    object: Literal["list"]
    model: str
    data: list[DocumentEmbeddings]
    usage: Usage


def parse(body: ContextualBody, facts: ModelFacts, limits: Limits) -> ParsedRequest:
    """Make the request that a body asks for, with every check that needs no tokenizer.

    Raises:
        InvalidRequest: the code and `param` say which field is wrong first.
    """
    if facts.separator_id is None:
        raise wrong_task("has no separator token for the chunks of a document; use /v1/embeddings")
    encoding_format = check_encoding_format(body.encoding_format, facts)
    encoding = ENCODINGS[encoding_format]
    if body.truncate:
        raise unsupported("truncate", "a chunk that is cut off would have no vector")
    documents = _parse_input(body.input)
    request = ContextualRequest(
        documents=documents,
        dimensions=check_dimensions(body.dimensions, facts, encoding),
        normalize=check_normalize(body.normalize, facts, encoding),
        encoding=encoding,
        lane=body.lane,
        max_tokens=MAX_TOKENS,
    )
    return ParsedRequest(request, partial(render, documents=documents, encoding_format=encoding_format))


def render(output: ModelOutput, *, documents: list[list[str]], encoding_format: EncodingFormat) -> bytes:
    """Write the answer's body: a list for each document, with a vector for each chunk.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which would become a null with status 200 in JSON.
    """
    starts = cu_seqlens(np.fromiter(map(len, documents), dtype=np.int32, count=len(documents)))

    def name_of(row: int) -> str:
        document = int(np.searchsorted(starts, row, side="right")) - 1
        return f"input[{document}][{row - starts[document]}]"

    check_finite(output.rows, name_of)
    written = json_rows(output.rows, encoding_format)
    pieces = [b'{"object":"list","model":', orjson.dumps(output.facts.name), b',"data":[']
    for index, chunks in enumerate(documents):
        pieces.append(b'{"object":"list","index":%d,"data":[' % index)
        for chunk in range(len(chunks)):
            pieces += (b'{"object":"embedding","index":%d,"embedding":' % chunk, next(written), b"},")
        pieces[-1] = b"}]},"
    pieces[-1] = b"}]}"
    pieces += (b"],", render_usage(output.num_tokens), b"}")
    return b"".join(pieces)


def _parse_input(value: object) -> list[list[str]]:
    wanted = "a list of documents, each a list of chunks"
    documents = []
    num_chunks = 0
    for index, document in enumerate(check_list(value, "input", wanted, MAX_DOCUMENTS, noun="documents")):
        name = f"input[{index}]"
        chunks = check_list(document, name, "a document: a list of strings, its chunks")
        num_chunks += len(chunks)
        if num_chunks <= MAX_CHUNKS:
            documents.append(check_texts(chunks, name))
    if num_chunks > MAX_CHUNKS:
        raise too_many_inputs("input", num_chunks, MAX_CHUNKS, "chunks")
    return documents


CONTEXTUAL = Operation(
    paths=(PATH,),
    dialect="OpenAI, Perplexity",
    summary="Embed the chunks of documents",
    description="Returns a vector for each chunk; the model reads the whole document for it. Needs a model that "
    "declares a separator.",
    body=ContextualBody,
    answer=ContextualEmbeddings,
    parse=parse,
    task="embed",
)
