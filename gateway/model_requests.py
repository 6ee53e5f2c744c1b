"""What can be asked of a model: the requests that every dialect parses its bodies into. No I/O.

    body → a dialect's `parse` → ParsedRequest(request, render) → the gateway runs it → ModelOutput → `render` → body

There are four kinds of request for a worker: vectors of texts, vectors of the chunks of documents, scores of pairs, and
scores of labels. A fifth kind, `LocalRequest`, is answered by the tokenizer in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from common.errors import InvalidRequest, ServiceError
from common.lanes import ONLINE, SCORE
from common.text.pairs import PairNames
from common.text.tokenization import NameOf, Tokenizer, TruncationRule
from common.wire.messages import ModelFacts
from gateway.formats import Logits, RowFormat
from gateway.open_request import Rows


@dataclass(frozen=True, slots=True)
class Inputs:
    """Texts or token ids to embed; one of the two lists is empty."""

    texts: list[str]  # without the prompt
    token_ids: list[list[object]]  # not yet checked against the vocabulary
    name_of: NameOf  # the name of an input in errors, by its index in the client's list
    places: Sequence[int]  # the index in the client's list of each input that is here
    failures: Mapping[int, InvalidRequest] = field(default_factory=dict)  # why others are not here, by the same index
    list_name: str = "input"  # the name of the list in errors

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        """The name in errors of one of the inputs that are here."""
        return self.name_of(self.places[index])


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A row for each text, or for each of its tokens, in `encoding` and in each of `more_encodings`."""

    inputs: Inputs
    prompt: str  # goes before every text
    truncation: TruncationRule
    dimensions: int
    normalize: bool
    encoding: str  # one of common/wire/rows.py
    lane: str | None  # None: the key's own, or `usual_lane`
    partial: bool = False  # an input that cannot be embedded does not fail the others
    by_token: bool = False
    more_encodings: tuple[str, ...] = ()  # none of them is float32

    usual_lane: ClassVar[str] = ONLINE


@dataclass(frozen=True, slots=True)
class ContextualRequest:
    """A row for each chunk of each document. The model reads a document as a whole."""

    documents: list[list[str]]
    dimensions: int
    normalize: bool
    encoding: str
    lane: str | None  # None: the key's own, or `usual_lane`
    max_tokens: int  # of all documents together

    usual_lane: ClassVar[str] = ONLINE

    def name_of(self, document: int) -> str:
        """The name of a document in errors."""
        return f"input[{document}]"


@dataclass(frozen=True, slots=True)
class PairsRequest:
    """A logit for each pair of texts, or one for each label of each pair."""

    queries: list[str]  # one, or one for each document
    documents: list[str]
    names: PairNames
    truncation: TruncationRule
    instruction: str | None  # None: the model's own
    max_document_tokens: int | None
    lane: str | None  # None: the key's own, or `usual_lane`

    # A row has one value for each label, in float32.
    dimensions: int = 1
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"

    usual_lane: ClassVar[str] = SCORE

    def name_of(self, pair: int) -> str:
        """The name of a pair in errors: its document's, since all pairs often share one query."""
        return self.names.document(pair)


@dataclass(frozen=True, slots=True)
class LabelsRequest:
    """A logit for each label of each input, which is a text or a pair of texts."""

    inputs: list[tuple[str, ...]]  # each has one text or two
    name_of: NameOf  # the name of an input in errors
    truncation: TruncationRule
    lane: str | None  # None: the key's own, or `usual_lane`
    dimensions: int  # the number of labels
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"

    usual_lane: ClassVar[str] = SCORE


Request = EmbeddingRequest | ContextualRequest | PairsRequest | LabelsRequest


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """A request that the gateway's own tokenizer answers, one input after the other."""

    answer: Callable[[Tokenizer, int], bytes]  # the JSON for one input; the answer's body is the list of all
    sizes: list[int]  # of each input, in `unit`
    unit: str  # as errors call it
    name: str  # the name of all inputs in errors
    lane: str | None  # it runs in none; it is only checked against what the key allows

    usual_lane: ClassVar[str] = ONLINE


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What the model returned for a request."""

    rows: Rows  # [rows, dimensions]; for scores, float32 logits [inputs, labels]
    facts: ModelFacts
    num_tokens: int  # that the model ran
    request_id: str
    failures: Mapping[int, ServiceError] = field(default_factory=dict)  # of a partial request, by index in its list
    places: Sequence[int] | None = None  # the index in the client's list of each text that has rows; None: all have
    row_counts: Sequence[int] | None = None  # rows of each of these texts; None: one each
    more_rows: Mapping[str, Rows] = field(default_factory=dict)  # the rows in each of `more_encodings`

    @property
    def logits(self) -> Logits:
        """The rows of a request for scores."""
        assert self.rows.dtype == np.float32, "requests for scores have the encoding float32"
        return self.rows  # type: ignore[return-value]  # the assertion has checked it


@dataclass(frozen=True, slots=True)
class Matrix:
    """How rows are written as a bare matrix, without JSON."""

    row_format: RowFormat
    name_of: NameOf  # the name in errors of the input that a row belongs to


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a body asks for: the request to run, and how to write its answer."""

    request: Request
    render: Callable[[ModelOutput], bytes]
    num_chars: int = 0  # of the client's own text in the answer: a long answer is rendered on a thread
    matrix: Matrix | None = None  # set if the client may ask for the bare matrix
