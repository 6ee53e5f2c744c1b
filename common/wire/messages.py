"""The messages between gateway, scheduler and worker: their fields, and which values are valid. No I/O.

The senders:

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

# The spans of one sequence: [spans, 2], where each starts and stops within it.
Spans: TypeAlias = npt.NDArray[np.int32]

# The largest element of an Int32Vector, and the largest process id.
MAX_INT32 = 2**31 - 1

# The most bytes of all names of a model's labels. Hello has room for as much again beside them.
MAX_LABELS_BYTES = 32 * 1024

# `ModelFacts.pair_template` of a model that uses its own tokenizer for pairs.
OWN_PAIRS = "pair"

# Empty arrays, shared and so read-only, like all arrays from bytes.
NO_NUMBERS: Int32Vector = np.frombuffer(b"", dtype="<i4")
NO_SPANS: Int32Matrix = NO_NUMBERS.reshape(0, 2)
NONE_FULL: Int64Matrix = np.frombuffer(b"", dtype="<i8").reshape(0, 4)
NO_TIMES: Int64Vector = np.frombuffer(b"", dtype="<i8")

# The moments of a traced batch in a worker, in order: its socket has received it; its launcher takes it; its inputs are
# where the device reads them; all kernels are launched; the device begins (on a CPU at the launch); the rows are
# computed; they are on the host; the socket sends the result.
STEP_MOMENTS = ("received", "taken", "staged", "launched", "began", "computed", "copied", "answered")

# The moments of a piece of a traced request, from the gateway to the scheduler, to the worker and back.
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
    """What a worker knows about its model. It is sent once, in `Hello`, so that no other process needs to be
    configured."""

    name: str  # for clients, in requests and answers
    folder: str  # of tokenizer.json, for gateways on the same host
    fingerprint: str  # of weights, dtype, pooling and dimensions: equal fingerprints mean equal vectors
    tokenizer_sha256: str
    architecture: str  # the class name in the checkpoint, for example BertModel
    dtype: str
    device: str
    attention: str
    dimensions: int
    max_tokens: int  # special tokens included
    vocab_size: int
    max_batch_tokens: int  # of one step, unless a single sequence is longer
    pooling: str
    normalize: bool  # whether the checkpoint ends with a normalisation
    lower_case: bool
    tasks: list[str]  # of embed, score, sparse and tokens
    encodings: list[str]  # names in ENCODINGS that requests may use
    prompts: dict[str, str]
    default_prompt_name: str | None
    num_labels: int  # of a score; 0 if it does not score
    labels: list[str]  # in the order of the scores
    score_activation: str  # identity or sigmoid; empty if it does not score
    pair_template: str  # OWN_PAIRS; the name of a built-in template; empty if it takes no pairs
    instruction: str | None  # for the template, unless the client sends one
    separator_id: int | None  # between the chunks of a document that is embedded as one sequence
    include_prompt: bool  # whether the tokens of a prompt are pooled too
    has_token_types: bool  # whether the second text of a pair has tokens of type 1


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

    `opens` marks the first piece. Admission may refuse only that one, since the next pieces belong to an accepted
    request. `tenant` is a number for each key, and 0 without a key; the tenants of a lane take turns. `dimensions`,
    `normalize` and `encoding` apply to every row.
    """

    request_id: int
    fingerprint: str  # of the model that it was tokenized for; another model would answer nonsense
    deadline_ns: int
    lane: str
    tenant: int
    opens: bool
    dimensions: int
    normalize: bool  # float32 rows only; other encodings use the row as the model pools it
    encoding: str  # a name in ENCODINGS
    token_ids: Int32Vector  # [tokens], all sequences one after the other
    lengths: Int32Vector  # [sequences]
    # [sequences] where the tokens of type 1, a pair's second text, begin within each; its length if it has none. Empty
    # if no sequence has any.
    type_starts: Int32Vector = field(default_factory=_no_numbers)
    # [sequences] the number of rows of each, and [rows, 2] where the span of each row starts and stops within its
    # sequence. Both empty if each sequence makes one row over all of its tokens.
    span_counts: Int32Vector = field(default_factory=_no_numbers)
    spans: Int32Matrix = field(default_factory=_no_spans)
    times_ns: Int64Vector = field(default_factory=_no_times)  # [1] when it was sent; empty if it is not traced

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
    """No client waits for this request any more. Advisory: what is already running runs on."""

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
    """The rows of a batch, in the order of the batch. Rows named in `nonfinite` hold no answer.

    All rows have the same width: dense, `row_bytes` of the smallest number among its encodings, at the model's full
    dimensions; sparse, the width of the widest. A row begins with the bytes of its own encoding; the rest means
    nothing.
    """

    epoch: int
    batch_id: int
    waited_us: int  # from the arrival of the batch to the start of its step
    step_us: int  # from there to its last byte on the host
    is_typical: bool  # whether the next such step will take as long; not if this one did one-time work
    nonfinite: Int32Vector  # [rows that are NaN or infinite], their indices
    rows: ByteMatrix  # [rows, row bytes]
    # The tokens of each part, if the device had no memory for the whole batch and it ran in parts.
    pieces: Int32Vector = field(default_factory=_no_numbers)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of the moments of a traced batch, right before its Result."""

    epoch: int
    batch_id: int
    times_ns: Int64Vector  # [STEP_MOMENTS]

    def __post_init__(self) -> None:
        _check_times(self.times_ns, len(STEP_MOMENTS))


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The step raised. The worker goes on; the scheduler decides which requests it retries and which it fails."""

    epoch: int
    batch_id: int
    message: str
    too_large: int | None = None  # the index of a sequence for which the device has no memory, not even alone


# --- both ---


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life from a peer's own loop. By `num_held` the scheduler sees that a message never arrived."""

    epoch: int
    num_held: int  # batches in a worker; unanswered Requests of a gateway


@dataclass(frozen=True, slots=True)
class Goodbye:
    """This peer leaves on purpose, and holds no work any more."""

    reason: str


# --- scheduler → peers ---


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Join`, sent again whenever a field changes. `facts` is None until a worker has said Hello."""

    protocol_version: int
    epoch: int
    answers_join: bool  # then the gateway sends unanswered requests again: they or their answers may be lost
    facts: ModelFacts | None
    piece_tokens: int  # most tokens of one Request, unless a single sequence is longer
    window_tokens: int  # most tokens of one client's request that may wait in the scheduler at once


@dataclass(frozen=True, slots=True)
class Ping:
    """A sign of life of the scheduler, with the state that /ready needs, and the tenants for which the queue is full.

    After a refused request its gateway gets a Ping with `full` at once, the others with their next one.
    """

    epoch: int
    workers_ready: int
    workers_total: int
    progressing: bool  # no batch is outstanding, or one has finished lately
    # [refused, 4] for each: the index of its lane in LANES; its tenant; the time until which a gateway refuses its
    # requests itself; and when the work before them should be done. The third is at most a second after the queue was
    # checked, since older knowledge says nothing.
    full: Int64Matrix = field(default_factory=_none_full)

    def __post_init__(self) -> None:
        full = self.full
        if full.shape[1] != 4 or (len(full) and (int(full.min()) < 0 or int(full[:, 0].max()) >= len(LANES))):
            raise ValueError("needs a lane that there is, a tenant and two times of each that is refused")


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, one after the other, without padding."""

    epoch: int
    batch_id: int
    token_ids: Int32Vector  # [tokens]
    lengths: Int32Vector  # [sequences]
    dimensions: Int32Vector  # [sequences] columns to keep, before any normalisation
    normalize: FlagVector  # [sequences] 0 or 1; ignored unless the encoding is FLOAT32
    encodings: FlagVector  # [sequences] numbers of ENCODINGS
    # As in a Request. If only some sequences have them, the others have the values that mean the same as none.
    type_starts: Int32Vector = field(default_factory=_no_numbers)  # [sequences] or empty
    span_counts: Int32Vector = field(default_factory=_no_numbers)  # [sequences] or empty
    spans: Int32Matrix = field(default_factory=_no_spans)  # [rows, 2] or empty
    times_ns: Int64Vector = field(default_factory=_no_times)  # [1] when it was formed; empty if it is not traced

    @property
    def num_rows(self) -> int:
        """The number of rows of its result."""
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

    Rows are as wide as those of their batch. A row begins with the bytes of the request's own encoding and dimensions
    (its `row_bytes`; if sparse, as the row says); the rest means nothing.
    """

    request_id: int
    first_row: int
    queue_us: int  # from arrival at the scheduler to dispatch
    step_us: int
    rows: ByteMatrix  # [rows, row bytes]


@dataclass(frozen=True, slots=True)
class Trace:
    """The times of the moments of a piece of a traced request, or of a part of one, before its rows."""

    request_id: int
    batch_id: int
    worker: str  # the name of the worker that ran it
    num_sequences: int  # of the batch that it ran in
    num_tokens: int
    times_ns: Int64Vector  # [PIECE_MOMENTS]

    def __post_init__(self) -> None:
        _check_times(self.times_ns, len(PIECE_MOMENTS))


@dataclass(frozen=True, slots=True)
class Failure:
    """The only and final answer to a request that has failed. `code` is one of `errors.py`."""

    request_id: int
    code: str
    message: str
    sequence: int | None  # the sequence at fault, counted within the request
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """This peer may not join, and must not ask again. `code` is version, duplicate_name or model_mismatch."""

    code: str
    message: str


def cu_seqlens(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where each sequence begins, and where the last one ends: [0, l0, l0 + l1 …], int32 [sequences + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def max_rows(facts: ModelFacts) -> int:
    """The most rows of one batch: its result then fits into a frame with any encoding and any values."""
    widest = 4 + 8 * facts.dimensions if "sparse" in facts.encodings else row_bytes(FLOAT32, facts.dimensions)
    return max(1, min(MAX_ROWS, MAX_FRAME_BYTES // widest))


def labels_bytes(labels: Sequence[str]) -> int:
    """The bytes of labels that count against MAX_LABELS_BYTES: their UTF-8, and the frame of each."""
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
    if len(lengths) == 1:  # the usual case; each reduction of an array takes a microsecond or two
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
