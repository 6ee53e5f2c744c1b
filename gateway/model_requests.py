"""What is asked of a model, whatever the dialect: the requests that dialects parse bodies into. No I/O.

    body → a dialect's `parse` → ParsedRequest(request, render) → the gateway runs it → ModelOutput → `render` → body

There are four kinds of request for a worker: vectors of texts, of the chunks of documents, scores of pairs, and of the
labels of texts and pairs. `app.py` runs each of them in one way. What the tokenizer alone can answer is a fifth, which
leads no further than this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from common.errors import InvalidRequest, ServiceError
from common.text.pairs import PairNames
from common.text.tokenization import NameOf, Tokenizer, TruncationRule
from common.wire.messages import ModelFacts
from gateway.client import Rows
from gateway.formats import Logits, RowFormat


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is to be embedded: either `texts` or `token_ids` is empty."""

    texts: list[str]  # without the prompt
    token_ids: list[list[object]]  # not yet checked against the vocabulary
    name_of: NameOf  # from a place in the client's list to how errors call it
    places: Sequence[int]  # in that list, of each that is here
    failures: Mapping[int, InvalidRequest] = field(default_factory=dict)  # of those that are not, by place
    list_name: str = "input"  # how errors call the list

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        """How errors call one of those that are here."""
        return self.name_of(self.places[index])


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A row of each text, or of each of its tokens; the same in each of `more_encodings`."""

    inputs: Inputs
    prompt: str  # goes before every text
    truncation: TruncationRule
    dimensions: int
    normalize: bool
    encoding: str  # of common/wire/rows.py
    lane: str | None  # None: the key's own, or `usual_lane`
    partial: bool = False  # what cannot be embedded leaves the others alone
    by_token: bool = False
    more_encodings: tuple[str, ...] = ()  # besides `encoding`, none of them float32

    usual_lane: ClassVar[str] = "online"


@dataclass(frozen=True, slots=True)
class ContextualRequest:
    """A row of each chunk of documents that are read as a whole."""

    documents: list[list[str]]
    dimensions: int
    normalize: bool
    encoding: str
    lane: str | None  # None: the key's own, or `usual_lane`
    max_tokens: int  # of all of them

    usual_lane: ClassVar[str] = "online"

    def name_of(self, document: int) -> str:
        """How errors call a document."""
        return f"input[{document}]"


@dataclass(frozen=True, slots=True)
class PairsRequest:
    """A logit of each pair, or one for each label."""

    queries: list[str]  # one, or one for each document
    documents: list[str]
    names: PairNames
    truncation: TruncationRule
    instruction: str | None  # None: the model's own
    max_document_tokens: int | None
    lane: str | None  # None: the key's own, or `usual_lane`

    # A row of one value, or of one for each label, in float32 and as the model makes it.
    dimensions: int = 1
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"

    usual_lane: ClassVar[str] = "score"

    def name_of(self, pair: int) -> str:
        """How errors call a pair: by its document, since the query is often everyone's."""
        return self.names.document(pair)


@dataclass(frozen=True, slots=True)
class LabelsRequest:
    """A logit for each label, of texts and of pairs of texts."""

    inputs: list[tuple[str, ...]]  # each one text or two
    name_of: NameOf  # how errors call an input
    truncation: TruncationRule
    lane: str | None  # None: the key's own, or `usual_lane`
    dimensions: int  # labels
    normalize: ClassVar[bool] = False
    encoding: ClassVar[str] = "float32"

    usual_lane: ClassVar[str] = "score"


Request = EmbeddingRequest | ContextualRequest | PairsRequest | LabelsRequest


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What the gateway's own tokenizer answers, input by input."""

    answer: Callable[[Tokenizer, int], bytes]  # as JSON, what stands for an input in the list that is the body
    sizes: list[int]  # of each input, in `unit`
    unit: str  # for people
    name: str  # how errors call all of them
    lane: str | None  # runs in none, and yet its key may not name every one

    usual_lane: ClassVar[str] = "online"


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What the model made of a request."""

    rows: Rows  # [rows, dimensions]; of pairs, float32 logits [pairs, labels]
    facts: ModelFacts
    num_tokens: int  # that were run
    request_id: str
    failures: Mapping[int, ServiceError] = field(default_factory=dict)  # of a partial request, by place
    places: Sequence[int] | None = None  # in the client's list, of each text that has rows; None: all have
    row_counts: Sequence[int] | None = None  # of each of these texts; None: one
    more_rows: Mapping[str, Rows] = field(default_factory=dict)  # by encoding, of those that were asked for besides

    @property
    def logits(self) -> Logits:
        """The rows of a request for scores."""
        assert self.rows.dtype == np.float32, "scores are asked for in float32"
        return self.rows  # type: ignore[return-value]  # of this type


@dataclass(frozen=True, slots=True)
class Matrix:
    """How rows are written as they are."""

    row_format: RowFormat
    name_of: NameOf  # how errors call the input of a row


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, read: what is to be run, and how its answer is written."""

    request: Request
    render: Callable[[ModelOutput], bytes]
    num_chars: int = 0  # of the client's own text in the answer: a long one is rendered on a thread
    matrix: Matrix | None = None  # of rows that may be asked for as they are, without JSON
