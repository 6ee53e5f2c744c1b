"""The messages between gateway, scheduler and worker: their fields, and which values are valid. No I/O.

Who sends what:

    gateway → scheduler    Join  Request  Requests  Cancel  Beat  Goodbye
    scheduler → gateway    Welcome  Reply  Replies  Trace  Failure  Ping  Refuse
    worker → scheduler     Hello  StepTimes  Result  BatchFailed  Beat  Goodbye
    scheduler → worker     Batch  Ping  Refuse

Requests and Replies are in packing.py. codec.py turns a message into frames and back.

A row is the answer to one span of tokens. Usually a sequence has one span, all of it. A sequence may name several
spans (the chunks of a document), one row each, or a span that leaves tokens out (a prompt). Rows are in the order of
the sequences, and the rows of one sequence are in the order of its spans.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of one host share. Durations are microseconds. A request
may be traced: its messages then carry the time at which they were sent (`times_ns`), and StepTimes and Trace, sent
before the answer, carry the rest. Requests that are not traced pay nothing for it.

`epoch` is drawn anew at every start of the scheduler. A message with another epoch belongs to a dead scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from common.lanes import LANES
from common.wire.rows import ENCODINGS, FLOAT32, MAX_FRAME_BYTES, MAX_ROWS, SPARSE, row_bytes

PROTOCOL_VERSION = 6

Int32Vector: TypeAlias = Annotated[npt.NDArray[np.int32], ("<i4", 1)]
Int32Matrix: TypeAlias = Annotated[npt.NDArray[np.int32], ("<i4", 2)]
Int64Vector: TypeAlias = Annotated[npt.NDArray[np.int64], ("<i8", 1)]
Int64Matrix: TypeAlias = Annotated[npt.NDArray[np.int64], ("<i8", 2)]
FlagVector: TypeAlias = Annotated[npt.NDArray[np.uint8], ("|u1", 1)]
ByteMatrix: TypeAlias = Annotated[npt.NDArray[np.uint8], ("|u1", 2)]

# Of one sequence: [spans, 2] where each starts and stops within it.
Spans: TypeAlias = npt.NDArray[np.int32]

# What an element of an Int32Vector may be, and a process's number.
MAX_INT32 = 2**31 - 1

# The names of a model's labels, all together: Hello has room for as much again beside them.
MAX_LABELS_BYTES = 32 * 1024

# `ModelFacts.pair_template` of a model whose pairs are as its own tokenizer writes them.
OWN_PAIRS = "pair"

# Shared, so read-only, as are all arrays that came from bytes.
NO_NUMBERS: Int32Vector = np.frombuffer(b"", dtype="<i4")
NO_SPANS: Int32Matrix = NO_NUMBERS.reshape(0, 2)
NONE_FULL: Int64Matrix = np.frombuffer(b"", dtype="<i8").reshape(0, 4)
NO_TIMES: Int64Vector = np.frombuffer(b"", dtype="<i8")

# What happens in a worker to a batch that is followed, in order: its socket has it, its launcher takes it up, the
# inputs are where the device reads them, all is launched, the device gets to it (on a CPU with the launch), the rows
# are computed, they are on the host, its socket sends the result.
STEP_MOMENTS = ("received", "taken", "staged", "launched", "began", "computed", "copied", "answered")

# And to a piece of a request, from the gateway to the scheduler and the worker and back to the scheduler.
PIECE_MOMENTS = ("sent", "arrived", "formed", *STEP_MOMENTS, "returned")


def _no_numbers() -> Int32Vector:
    return NO_NUMBERS


def _no_spans() -> Int32Matrix:
    return NO_SPANS


def _none_full() -> Int64Matrix:
    return NONE_FULL


def _no_times() -> Int64Vector:
    return NO_TIMES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a worker knows of its model, told once in `Hello` so that nobody else has to be configured with it."""

    name: str  # the name that clients send and read in answers
    folder: str  # where the gateway finds tokenizer.json; same host
    fingerprint: str  # weights, dtype, pooling and dimensions: equal means equal vectors
    tokenizer_sha256: str
    architecture: str  # the checkpoint's own class name, for example BertModel
    dtype: str
    device: str
    attention: str
    dimensions: int
    max_tokens: int  # special tokens included
    vocab_size: int
    max_batch_tokens: int  # what one step should not exceed
    pooling: str
    normalize: bool  # whether the checkpoint itself ends with a normalisation
    lower_case: bool
    tasks: list[str]  # of embed, score, sparse and tokens
    encodings: list[str]  # names of ENCODINGS: what it may be asked for
    prompts: dict[str, str]
    default_prompt_name: str | None
    num_labels: int  # of a score; 0 where it does not score
    labels: list[str]  # their names, in the order of the scores
    score_activation: str  # identity or sigmoid; empty where it does not score
    pair_template: str  # OWN_PAIRS; a built-in template's name; empty where it takes no pairs
    instruction: str | None  # what a template says where the client says nothing
    separator_id: int | None  # the token between the chunks of a document that is embedded as one sequence
    include_prompt: bool  # whether a prompt's tokens are pooled like any others
    has_token_types: bool  # whether the second text of a pair is marked as such


# --- gateway → scheduler ---


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of a gateway."""

    protocol_version: int
    name: str  # the stable name, for example gateway-0; a socket identity is fresh at every start
    pid: int

    def __post_init__(self) -> None:
        _check_pid(self.pid)


@dataclass(frozen=True, slots=True)
class Request:
    """Sequences to embed: all of a client's request, or one piece of a long one.

    `opens` marks the first piece: admission may refuse only that one, since the pieces that follow belong to a
    request that was accepted. `tenant` says whose it is, a number for each key and 0 for all without one: those of a
    lane take turns. `dimensions`, `normalize` and `encoding` hold for every row.
    """

    request_id: int
    fingerprint: str  # the model that it was tokenized for; another one would answer nonsense
    deadline_ns: int
    lane: str
    tenant: int
    opens: bool
    dimensions: int
    normalize: bool  # of float32 rows; the others are made of the row as the model pools it
    encoding: str  # a name of ENCODINGS
    token_ids: Int32Vector  # [tokens], all sequences one after the other
    lengths: Int32Vector  # [sequences]
    # [sequences] where the tokens of type 1 begin within each: a pair's second text; its length where there are none.
    # Empty where no sequence has any.
    type_starts: Int32Vector = field(default_factory=_no_numbers)
    # [sequences] rows of each, and [rows, 2] where the tokens of each row start and stop within its sequence. Both
    # empty where each sequence makes one row over all of its tokens.
    span_counts: Int32Vector = field(default_factory=_no_numbers)
    spans: Int32Matrix = field(default_factory=_no_spans)
    times_ns: Int64Vector = field(default_factory=_no_times)  # [1] when it was sent; empty where nobody follows it

    def __post_init__(self) -> None:
        _check_sequences(self)
        if self.dimensions > MAX_INT32:
            raise ValueError("more dimensions than a Batch can say")
        if self.encoding not in ENCODINGS:
            raise ValueError("an encoding that there is not")
        if self.lane not in LANES:
            raise ValueError("a lane that there is not")


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more. Advisory: what runs already runs on."""

    request_id: int


# --- worker → scheduler ---


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a worker: its model is loaded and it can take batches."""

    protocol_version: int
    name: str
    pid: int
    facts: ModelFacts

    def __post_init__(self) -> None:
        _check_pid(self.pid)


@dataclass(frozen=True, slots=True)
class Result:
    """A batch's rows, in the batch's order. Rows named in `nonfinite` hold no answer.

    All rows are as wide as the widest that a sequence of the batch needs at the model's full dimensions (`row_bytes` of
    the smallest number among its encodings), or, sparse, as the widest of them is. A row begins with what its own
    encoding needs; the rest means nothing.
    """

    epoch: int
    batch_id: int
    waited_us: int  # from the batch's arrival to the start of its step
    step_us: int  # from there to its last byte on the host
    is_typical: bool  # whether the next of its kind will take as long; not where this one made ready for them
    nonfinite: Int32Vector  # [rows that are NaN or infinite]
    rows: ByteMatrix  # [rows, row bytes]
    # Tokens of each piece that it ran in, one after the other, where the device had no memory for the batch at once.
    pieces: Int32Vector = field(default_factory=_no_numbers)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When what happened to a batch that is followed; right before its Result."""

    epoch: int
    batch_id: int
    times_ns: Int64Vector  # [STEP_MOMENTS]

    def __post_init__(self) -> None:
        _check_times(self.times_ns, len(STEP_MOMENTS))


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The step raised. The worker goes on; the scheduler decides who is retried and who is told."""

    epoch: int
    batch_id: int
    message: str
    too_large: int | None = None  # why: the device has no memory for this sequence of the batch, not even alone


# --- both ---


@dataclass(frozen=True, slots=True)
class Beat:
    """'My Python runs', from a peer's own loop; `num_held` lets the scheduler see that something never arrived."""

    epoch: int
    num_held: int  # batches that a worker holds; Requests that a gateway has sent and that are not answered


@dataclass(frozen=True, slots=True)
class Goodbye:
    """This peer leaves on purpose and holds nothing any more."""

    reason: str


# --- scheduler → peers ---


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Join`, sent again whenever something in it changes. No `facts`: no worker has said Hello yet."""

    protocol_version: int
    epoch: int
    answers_join: bool  # then send again what is unanswered: it may have been lost on either way
    facts: ModelFacts | None
    piece_tokens: int  # the most tokens of one Request, unless a single sequence is longer
    window_tokens: int  # the most tokens of one client's request that may wait here at once


@dataclass(frozen=True, slots=True)
class Ping:
    """The scheduler's own pulse, with what /ready needs to know, and for whom the queue is full.

    A gateway that has just had a request refused is told `full` at once, all others with the next pulse.
    """

    epoch: int
    workers_ready: int
    workers_total: int
    progressing: bool  # nothing outstanding, or something finished lately
    # [refused, 4] of each its lane's place among LANES, its tenant, until when a gateway is to refuse its requests
    # itself, and when what waits before them is expected to be done. The former is at most a second after the queue was
    # looked at: what is older says nothing.
    full: Int64Matrix = field(default_factory=_none_full)

    def __post_init__(self) -> None:
        full = self.full
        if full.shape[1] != 4 or (len(full) and (int(full.min()) < 0 or int(full[:, 0].max()) >= len(LANES))):
            raise ValueError("needs a lane that there is, a tenant and two times of each that is refused")


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step runs: sequences one after the other, no padding between them."""

    epoch: int
    batch_id: int
    token_ids: Int32Vector  # [tokens]
    lengths: Int32Vector  # [sequences]
    dimensions: Int32Vector  # [sequences] columns that count, before any normalisation
    normalize: FlagVector  # [sequences] 0 or 1; says nothing where the encoding is not FLOAT32
    encodings: FlagVector  # [sequences] numbers of ENCODINGS
    # As in a Request. Where only some sequences have them, the others' say what their absence would.
    type_starts: Int32Vector = field(default_factory=_no_numbers)  # [sequences] or empty
    span_counts: Int32Vector = field(default_factory=_no_numbers)  # [sequences] or empty
    spans: Int32Matrix = field(default_factory=_no_spans)  # [rows, 2] or empty
    times_ns: Int64Vector = field(default_factory=_no_times)  # [1] when it was formed; empty where nobody follows it

    @property
    def num_rows(self) -> int:
        """The rows of its result."""
        return len(self.spans) or len(self.lengths)

    def __post_init__(self) -> None:
        _check_sequences(self)
        if not len(self.lengths) == len(self.dimensions) == len(self.normalize) == len(self.encodings):
            raise ValueError("a batch needs dimensions, normalize and an encoding for each of its sequences")
        largest = int(self.encodings.max())
        if largest > SPARSE:
            raise ValueError("an encoding that there is not")
        if largest == SPARSE and int(self.encodings.min()) != SPARSE:
            raise ValueError("an encoding that is sparse next to one that is not")


@dataclass(frozen=True, slots=True)
class Reply:
    """Some rows of a request: first_row … first_row + len(rows) - 1, counted across its sequences.

    Rows are as wide as their batch's: what the request's own encoding and dimensions need comes first (its
    `row_bytes`, or, sparse, what the row itself says), and the rest means nothing.
    """

    request_id: int
    first_row: int
    queue_us: int  # from arrival at the scheduler to dispatch
    step_us: int
    rows: ByteMatrix  # [rows, row bytes]


@dataclass(frozen=True, slots=True)
class Trace:
    """When what happened to a piece of a request that is followed, or to a part of one; before its rows."""

    request_id: int
    batch_id: int
    worker: str  # the name of who ran it
    num_sequences: int  # of the batch that it ran in
    num_tokens: int
    times_ns: Int64Vector  # [PIECE_MOMENTS]

    def __post_init__(self) -> None:
        _check_times(self.times_ns, len(PIECE_MOMENTS))


@dataclass(frozen=True, slots=True)
class Failure:
    """A request's one and final answer when it has none; `code` is one of `errors.py`."""

    request_id: int
    code: str
    message: str
    sequence: int | None  # the sequence at fault, counted within the request
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """This peer may not join: `code` is version, duplicate_name or model_mismatch; it must not ask again."""

    code: str
    message: str


def cu_seqlens(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where each sequence begins and the last one ends: [0, l0, l0 + l1 …], int32 [sequences + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def max_rows(facts: ModelFacts) -> int:
    """The most rows of one batch, so that its result fits into a frame whatever their encoding and their numbers."""
    widest = 4 + 8 * facts.dimensions if "sparse" in facts.encodings else row_bytes(FLOAT32, facts.dimensions)
    return max(1, min(MAX_ROWS, MAX_FRAME_BYTES // widest))


def labels_bytes(labels: Sequence[str]) -> int:
    """What the names of labels count against MAX_LABELS_BYTES: their UTF-8, and what frames each of them."""
    return sum(len(label.encode("utf-8", "surrogatepass")) + 3 for label in labels)


def _check_pid(pid: int) -> None:
    if not 0 < pid <= MAX_INT32:
        raise ValueError("a number that no process has")


def _check_sequences(message: Request | Batch) -> None:
    lengths = message.lengths
    check_tokens(lengths, message.token_ids)
    if len(message.type_starts):
        _check_type_starts(lengths, message.type_starts)
    if len(message.span_counts) or message.spans.shape != (0, 2):
        _check_spans(lengths, message.span_counts, message.spans)
    if len(message.times_ns):
        _check_times(message.times_ns, 1)


def check_tokens(lengths: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
    if len(lengths) == 1:  # as most requests: each reduction of an array takes a microsecond or two
        shortest = num_tokens = lengths.item()
    else:
        shortest = int(np.minimum.reduce(lengths)) if len(lengths) else 0
        num_tokens = int(np.add.reduce(lengths, dtype=np.int64))
    if shortest < 1:
        raise ValueError("needs at least one sequence, and every sequence at least one token")
    if num_tokens != len(token_ids):
        raise ValueError("lengths do not add up to the number of token ids")
    if np.minimum.reduce(token_ids) < 0:
        raise ValueError("a token id is negative")


def _check_times(times_ns: npt.NDArray[np.int64], count: int) -> None:
    if len(times_ns) != count or int(times_ns[0]) < 0 or bool((times_ns[1:] < times_ns[:-1]).any()):
        raise ValueError(f"needs {count} times in the order in which things happen")


def _check_type_starts(lengths: npt.NDArray[np.int32], type_starts: npt.NDArray[np.int32]) -> None:
    if len(type_starts) != len(lengths):
        raise ValueError("type_starts needs a place in each sequence, or nothing")
    if int(type_starts.min()) < 0 or bool((type_starts > lengths).any()):
        raise ValueError("tokens of type 1 begin outside their sequence")


def _check_spans(
    lengths: npt.NDArray[np.int32], span_counts: npt.NDArray[np.int32], spans: npt.NDArray[np.int32]
) -> None:
    if len(span_counts) != len(lengths) or int(span_counts.min()) < 1:
        raise ValueError("span_counts needs at least one for each sequence, or nothing")
    if spans.shape != (int(span_counts.sum(dtype=np.int64)), 2):
        raise ValueError("span_counts do not add up to the number of spans")
    if len(spans) > MAX_ROWS:
        raise ValueError(f"{len(spans)} rows; {MAX_ROWS} are allowed")
    starts, stops = spans.T
    if int(starts.min()) < 0 or bool((starts >= stops).any()) or bool((stops > lengths.repeat(span_counts)).any()):
        raise ValueError("a span has no token, or reaches out of its sequence")
