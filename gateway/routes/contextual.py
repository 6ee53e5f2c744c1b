"""`POST /v1/contextualizedembeddings` as Perplexity's client speaks it: chunks → a vector of each. No sockets.

The chunks of a document are read together, and each gets its own vector (see common/chunks.py). A document is never
cut, so that `truncate: true` is refused. `normalize`, `truncate`, `lane` and `user` are as on `/v1/embeddings`, and so
are formats: `float` is the default here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import orjson

from common.protocol import ModelFacts, cu_seqlens
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
    optional_flag,
    parse_object,
    too_many_inputs,
    unsupported,
    wrong_task,
    wrong_type,
)

PATH = "/v1/contextualizedembeddings"

# Of one request, as Perplexity's own server has them.
MAX_TOKENS = 120_000
MAX_DOCUMENTS = 512
MAX_CHUNKS = 16_000

_KNOWN = IGNORED | {
    "input",
    "model",
    "encoding_format",
    "dimensions",
    "normalize",
    "truncate",
    "user",
    "lane",
    "stream",
}


@dataclass(frozen=True, slots=True)
class ContextualRequest:
    """What a client asked for, every default filled in."""

    documents: list[list[str]]  # in chunks
    dimensions: int
    normalize: bool
    lane: str
    encoding_format: EncodingFormat

    @property
    def encoding(self) -> str:
        return ENCODINGS[self.encoding_format]


def parse(body: bytes, facts: ModelFacts) -> ContextualRequest:
    """The request of a body, checked as far as it can be without a tokenizer.

    Raises:
        InvalidRequest: with the code and `param` of the first thing that is wrong.
        NotFound: model_not_found.
    """
    fields = parse_object(body)
    check_names(fields, _KNOWN)
    check_model(fields, facts.name)
    check_task("embed", facts.tasks)
    if facts.separator_id is None:
        raise wrong_task("has no token that stands between the chunks of a document; use /v1/embeddings")
    check_not_streamed(fields)
    encoding_format = parse_encoding_format(fields, facts)
    dimensions = parse_dimensions(fields, facts, encoding_format)
    normalize = parse_normalize(fields, facts, encoding_format)
    if optional_flag(fields, "truncate"):
        raise unsupported("truncate", "a chunk that is cut off would have no vector")
    check_user(fields)
    lane = lane_of(fields)
    return ContextualRequest(_parse_input(fields), dimensions, normalize, lane, encoding_format)


def render(rows: Rows, asked: ContextualRequest, model: str, num_tokens: int) -> bytes:
    """The answer's body: a list a document, in it a vector a chunk.

    Raises:
        NonfiniteOutput: a NaN or an infinity, which JSON would turn into a null with status 200.
    """
    starts = cu_seqlens(np.fromiter(map(len, asked.documents), dtype=np.int32, count=len(asked.documents)))

    def name_of(row: int) -> str:
        document = int(np.searchsorted(starts, row, side="right")) - 1
        return f"input[{document}][{row - starts[document]}]"

    check_finite(rows, name_of)
    written = json_rows(rows, asked.encoding_format)
    pieces = [b'{"object":"list","model":', orjson.dumps(model), b',"data":[']
    for index, chunks in enumerate(asked.documents):
        pieces.append(b'{"object":"list","index":%d,"data":[' % index)
        for chunk in range(len(chunks)):
            pieces += (b'{"object":"embedding","index":%d,"embedding":' % chunk, next(written), b"},")
        pieces[-1] = b"}]},"
    pieces[-1] = b"}]}"
    pieces += (b"],", render_usage(num_tokens), b"}")
    return b"".join(pieces)


def _parse_input(fields: Fields) -> list[list[str]]:
    value = fields.get("input")
    if type(value) is not list:
        raise wrong_type("input", "a list of documents, each a list of chunks")
    if not value:
        raise empty_input("input")
    if len(value) > MAX_DOCUMENTS:
        raise too_many_inputs("input", len(value), MAX_DOCUMENTS, "documents")
    documents = []
    num_chunks = 0
    for index, chunks in enumerate(value):
        name = f"input[{index}]"
        if type(chunks) is not list:
            raise wrong_type(name, "a document: a list of strings, its chunks")
        if not chunks:
            raise empty_input(name)
        num_chunks += len(chunks)
        if num_chunks <= MAX_CHUNKS:
            documents.append(check_texts(chunks, name))
    if num_chunks > MAX_CHUNKS:
        raise too_many_inputs("input", num_chunks, MAX_CHUNKS, "chunks")
    return documents
