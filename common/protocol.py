"""The messages between gateway, scheduler and worker, and their bytes. No I/O.

A message is a list of frames: a header, then one frame an array.

    [ msgpack array: kind, scalar, scalar …, [shape, shape …] ] [ raw array ] [ raw array ] …

Arrays are raw little-endian buffers, never msgpack lists: for 64 texts of 100 tokens that is 2 µs each way against
95–119 µs. Those at a message's end that few have a use for are empty by default; where all of these are, none travels,
so that a plain text pays nothing for what another asks. Nothing is ever unpickled. `decode` bounds every length before
it allocates, checks every scalar's type, and answers anything odd with `ProtocolError`: a peer with a bug (or a
stranger's bytes) cannot raise anything else.

Who sends what:

    gateway → scheduler    Join  Request  Requests  Cancel  Beat  Goodbye
    scheduler → gateway    Welcome  Reply  Replies  Trace  Failure  Ping  Refuse
    worker → scheduler     Hello  StepTimes  Result  BatchFailed  Beat  Goodbye
    scheduler → worker     Batch  Ping  Refuse

A row is the answer to one span of tokens: mostly a whole sequence, but a sequence may name several spans of itself
(the chunks of a document), one row each, or one that leaves tokens out (a prompt). Rows are in the order of the
sequences, and those of one sequence in the order of its spans.

Times are nanoseconds of CLOCK_MONOTONIC, which every process of one host shares; durations are microseconds.
A request may be followed: its messages then say when they were sent (`times_ns`), and what else happened when comes in
messages of its own, StepTimes and Trace, before the answers that they are of. So all others pay nothing for it.

`epoch` is drawn anew by every scheduler start. It fences: what carries another epoch belongs to a dead scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError, VersionMismatch

PROTOCOL_VERSION = 6

# A header is a few hundred bytes; the largest, Hello, carries prompts and labels. Each byte of a hostile one may be an
# empty list of 72 bytes, so what is longer than a plain header may open only so many lists and maps (Hello has eight),
# and hold only so many elements in each: any header is read or refused in milliseconds and with 3 MiB at the most.
MAX_HEADER_BYTES = 64 * 1024
_PLAIN_HEADER_BYTES = 2 * 1024
_MAX_CONTAINERS = 32
_MAX_ELEMENTS = 12 * 1024
MAX_FRAMES = 10

# The most that a frame may hold: the transport drops the connection of a peer that sends more.
MAX_FRAME_BYTES = 64 * 1024 * 1024

# An array up to this size is copied into a frame of its own rather than sent from where it is.
_COPIED_BYTES = 32 * 1024

# The most rows that one message may ask for: one for each token of a sequence longer than models take today.
MAX_ROWS = 64 * 1024

# The most of a Requests: a scheduler looks at nothing else before it has heard all of them, some 10 µs each.
MAX_REQUESTS = 64

Int32Vector: TypeAlias = Annotated[npt.NDArray[np.int32], ("<i4", 1)]
Int32Matrix: TypeAlias = Annotated[npt.NDArray[np.int32], ("<i4", 2)]
Int64Vector: TypeAlias = Annotated[npt.NDArray[np.int64], ("<i8", 1)]
Int64Matrix: TypeAlias = Annotated[npt.NDArray[np.int64], ("<i8", 2)]
FlagVector: TypeAlias = Annotated[npt.NDArray[np.uint8], ("|u1", 1)]
ByteMatrix: TypeAlias = Annotated[npt.NDArray[np.uint8], ("|u1", 2)]

# Of one sequence: [spans, 2] where each starts and stops within it.
Spans: TypeAlias = npt.NDArray[np.int32]

# What an element of an Int32Vector may be, and a process's number.
_MAX_INT32 = 2**31 - 1

# The names of a model's labels, all together: Hello has room for as much again beside them.
MAX_LABELS_BYTES = 32 * 1024

# `ModelFacts.pair_template` of a model whose pairs are as its own tokenizer writes them.
OWN_PAIRS = "pair"

# How a row is written: little-endian float32; int8; one bit a dimension, the first in the lowest bit of the first byte;
# or, sparse, an int32 count, that many int32 columns, ascending, and that many float32 values, all little-endian.
# In a Batch it is the number, and of the dense ones the smallest number has the widest rows. A sparse row is as wide as
# it needs, so a batch is all sparse or has none. A Request and ModelFacts have the name.
FLOAT32, INT8, BINARY, SPARSE = 0, 1, 2, 3
ENCODINGS = {"float32": FLOAT32, "int8": INT8, "binary": BINARY, "sparse": SPARSE}

# What waits in a lane comes after all that waits in the lanes before it, but for its share (scheduler/batching.py).
LANES = ("online", "score", "backfill")

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
        if self.dimensions > _MAX_INT32:
            raise ValueError("more dimensions than a Batch can say")
        if self.encoding not in ENCODINGS:
            raise ValueError("an encoding that there is not")
        if self.lane not in LANES:
            raise ValueError("a lane that there is not")


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one gateway at one moment: short ones, for which a message each costs more than what is in it.

    Each is what it would be alone: it is admitted, answered, failed and cancelled by itself. Of the same model, with no
    tokens of type 1 and a row a sequence, and nobody follows them: such as are most, and any other travels alone.
    """

    fingerprint: str
    # [requests, 9] of each what its fields of these names say: request_id, deadline_ns, the number of its lane among
    # LANES, tenant, opens, dimensions, normalize, the number of its encoding; and how many sequences are its.
    asked: Int64Matrix
    token_ids: Int32Vector  # [tokens], all sequences of all requests one after the other
    lengths: Int32Vector  # [sequences]

    def __post_init__(self) -> None:
        _check_tokens(self.lengths, self.token_ids)
        if self.asked.shape[1] != 9 or not 1 <= len(self.asked) <= MAX_REQUESTS:
            raise ValueError(f"needs nine numbers of each of 1 to {MAX_REQUESTS} requests")
        # Python's own minimum and maximum: of so few numbers numpy's take longer.
        rows = self.asked.tolist()
        _, _, lanes, _, opens, dimensions, normalize, encodings, num_sequences = zip(*rows, strict=True)
        if min(map(min, rows)) < 0:
            raise ValueError("a number of a request is negative")
        if max(lanes) >= len(LANES) or max(encodings) >= len(ENCODINGS):
            raise ValueError("a lane or an encoding that there is not")
        if max(opens) > 1 or max(normalize) > 1:
            raise ValueError("needs 0 or 1 where a request says yes or no")
        if max(dimensions) > _MAX_INT32:
            raise ValueError("more dimensions than a Batch can say")
        if min(num_sequences) < 1 or sum(num_sequences) != len(self.lengths):
            raise ValueError("needs a sequence in each request, and a request for each sequence")

    @staticmethod
    def may_hold(request: Request) -> bool:
        """Whether a request can be one of them, together with others of its model."""
        return not (len(request.type_starts) or len(request.span_counts) or len(request.times_ns))

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Requests:
        """Requests that `may_hold` is true of, at most MAX_REQUESTS, all of one model."""
        assert all(map(cls.may_hold, requests)), "of such a request something would not travel"
        assert len({request.fingerprint for request in requests}) == 1, "requests of several models"
        asked = [
            (
                request.request_id,
                request.deadline_ns,
                LANES.index(request.lane),
                request.tenant,
                request.opens,
                request.dimensions,
                request.normalize,
                ENCODINGS[request.encoding],
                len(request.lengths),
            )
            for request in requests
        ]
        return cls(
            requests[0].fingerprint,
            np.array(asked, dtype=np.int64),
            np.concatenate([request.token_ids for request in requests]),
            np.concatenate([request.lengths for request in requests]),
        )

    def each(self) -> Iterator[Request]:
        """They as they were, in their order; their arrays are views."""
        encodings = list(ENCODINGS)
        token_offsets = list(accumulate(self.lengths.tolist(), initial=0))
        first = 0
        for (
            request_id,
            deadline_ns,
            lane,
            tenant,
            opens,
            dimensions,
            normalize,
            encoding,
            num_sequences,
        ) in self.asked.tolist():
            last = first + num_sequences
            yield _CheckedRequest(
                request_id,
                self.fingerprint,
                deadline_ns,
                LANES[lane],
                tenant,
                opens == 1,
                dimensions,
                normalize == 1,
                encodings[encoding],
                self.token_ids[token_offsets[first] : token_offsets[last]],
                self.lengths[first:last],
                NO_NUMBERS,  # given, since to make a default takes a call
                NO_NUMBERS,
                NO_SPANS,
                NO_TIMES,
            )
            first = last


@dataclass(frozen=True, slots=True)
class _CheckedRequest(Request):
    """One of a Requests, which has been looked at as a whole: again for each would take longer than all else of it."""

    def __post_init__(self) -> None:
        pass


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
class Replies:
    """What a batch gave several requests of one gateway, a row each: short queries, for which a message each costs more
    than what is in it."""

    step_us: int
    answers: Int64Matrix  # [requests, 3]: of each its request_id, first_row and queue_us, as in a Reply
    rows: ByteMatrix  # [requests, row bytes]

    def __post_init__(self) -> None:
        if self.answers.shape != (len(self.rows), 3) or int(self.answers.min(initial=0)) < 0:
            raise ValueError("needs three non-negative numbers for each of its rows")

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> Replies:
        """Replies of one row each, of one batch."""
        answers = [(reply.request_id, reply.first_row, reply.queue_us) for reply in replies]
        rows = np.concatenate([reply.rows for reply in replies])
        return cls(replies[0].step_us, np.array(answers, dtype=np.int64), rows)

    def each(self) -> Iterator[Reply]:
        """They as they were."""
        for index, (request_id, first_row, queue_us) in enumerate(self.answers.tolist()):
            yield Reply(request_id, first_row, queue_us, self.step_us, self.rows[index : index + 1])


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


Message: TypeAlias = (
    Join
    | Request
    | Requests
    | Cancel
    | Hello
    | Result
    | BatchFailed
    | Goodbye
    | Beat
    | Welcome
    | Ping
    | Batch
    | Reply
    | Failure
    | Refuse
    | Replies
    | StepTimes
    | Trace
)
Frame: TypeAlias = bytes | memoryview


def encode(message: Message) -> list[Frame]:
    """The frames of a message: its header, then its arrays, large ones uncopied (keep them unchanged until sent)."""
    layout = _LAYOUTS_BY_CLASS[type(message)]
    sent = layout.required
    if layout.defaults is not None and any(map(len, layout.defaults(message))):
        sent = layout.arrays
    header: list[object] = [layout.kind, *layout.scalars(message)]
    frames: list[Frame] = [b""]  # the header, once the shapes are known
    shapes = []
    for name, dtype, _ in sent:
        array = getattr(message, name)
        assert array.dtype == dtype, f"{name} is {array.dtype} where {dtype} travels: its peer would read other bytes"
        shapes.append(array.shape)
        # A copy of 4 KB takes 0.2 µs, a view that ZeroMQ then copies 0.7.
        frames.append(array.tobytes() if array.nbytes <= _COPIED_BYTES else np.ascontiguousarray(array).data.cast("B"))
    header.append(shapes)
    frames[0] = _pack(header)
    return frames


def decode(frames: Sequence[Frame]) -> Message:
    """The message that frames hold; its arrays are read-only views of them.

    Raises:
        VersionMismatch: an introduction, or the answer to one, of another version.
        ProtocolError: for anything else but the exact frames of a message of this version.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message of {len(frames)} frames; 1 to {MAX_FRAMES} are allowed")
    header = _unpack(frames[0])
    kind = header[0] if header else None
    layout = _LAYOUTS_BY_KIND.get(kind) if type(kind) is int else None
    if layout is None:
        raise ProtocolError("unknown kind of message")
    name = layout.message_class.__name__
    if layout.has_version and len(header) > 1 and type(header[1]) is int and header[1] != PROTOCOL_VERSION:
        raise VersionMismatch(header[1])  # before anything else of it: another version may have other fields
    if len(header) != len(layout.parsers) + 2:
        raise ProtocolError(f"{name} has {len(header)} header fields, not {len(layout.parsers) + 2}")
    shapes = header.pop()
    arrays = layout.required if len(frames) == len(layout.required) + 1 else layout.arrays
    if not isinstance(shapes, list) or len(shapes) != len(arrays) or len(frames) != len(shapes) + 1:
        raise ProtocolError(f"{name} has {len(frames) - 1} buffers, not {len(arrays)}")
    values: list[Any] = []
    try:
        for index, parse in enumerate(layout.parsers, start=1):
            values.append(parse(header[index]))
        for (_, dtype, ndim), shape, frame in zip(arrays, shapes, frames[1:], strict=True):
            values.append(_array(dtype, ndim, shape, frame))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{name}.{layout.names[len(values)]}: {error}") from None
    try:
        return layout.message_class(*values)  # type: ignore[no-any-return]  # built from its own fields
    except ValueError as error:
        raise ProtocolError(f"{name}: {error}") from None


def cu_seqlens(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where each sequence begins and the last one ends: [0, l0, l0 + l1 …], int32 [sequences + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_bytes(encoding: int, dimensions: int) -> int:
    """The bytes of one row: `encoding` is FLOAT32, INT8 or BINARY (a number of a Batch, or of ENCODINGS by name)."""
    assert encoding != SPARSE, "a sparse row has no fixed width"
    if encoding == FLOAT32:
        return 4 * dimensions
    return dimensions if encoding == INT8 else (dimensions + 7) // 8


def max_rows(facts: ModelFacts) -> int:
    """The most rows of one batch, so that its result fits into a frame whatever their encoding and their numbers."""
    widest = 4 + 8 * facts.dimensions if "sparse" in facts.encodings else row_bytes(FLOAT32, facts.dimensions)
    return max(1, min(MAX_ROWS, MAX_FRAME_BYTES // widest))


def labels_bytes(labels: Sequence[str]) -> int:
    """What the names of labels count against MAX_LABELS_BYTES: their UTF-8, and what frames each of them."""
    return sum(len(label.encode("utf-8", "surrogatepass")) + 3 for label in labels)


def sparse_bytes(rows: npt.NDArray[np.uint8]) -> int:
    """The bytes of the widest of some sparse rows, uint8 [rows, bytes], by what they say themselves.

    Raises:
        ProtocolError: a row counts fewer than none, or more than it has room for.
    """
    num_bytes = rows.shape[1]
    if num_bytes < 4:
        raise ProtocolError(f"a sparse row of {num_bytes} bytes")
    counts = rows[:, :4].view("<i4")
    if int(counts.min(initial=0)) < 0 or (widest := 4 + 8 * int(counts.max(initial=0))) > num_bytes:
        raise ProtocolError("a sparse row whose count is not that of its values")
    return widest


def read_sparse(row: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Columns and values of one sparse row that `sparse_bytes` has passed: int32 and float32 [count], views of it."""
    count = int(row[:4].view("<i4")[0])
    columns, values = np.split(row[4 : 4 + 8 * count], [4 * count])
    return columns.view("<i4"), values.view("<f4")


def _check_pid(pid: int) -> None:
    if not 0 < pid <= _MAX_INT32:
        raise ValueError("a number that no process has")


def _check_sequences(message: Request | Batch) -> None:
    lengths = message.lengths
    _check_tokens(lengths, message.token_ids)
    if len(message.type_starts):
        _check_type_starts(lengths, message.type_starts)
    if len(message.span_counts) or message.spans.shape != (0, 2):
        _check_spans(lengths, message.span_counts, message.spans)
    if len(message.times_ns):
        _check_times(message.times_ns, 1)


def _check_tokens(lengths: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
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


def _array(dtype: np.dtype[Any], ndim: int, shape: object, frame: Frame) -> npt.NDArray[Any]:
    """Raises TypeError or ValueError: the shape is none, or not that of the bytes."""
    if not isinstance(shape, list) or len(shape) != ndim:
        raise TypeError(f"needs {ndim} axes")
    size = dtype.itemsize
    for extent in shape:
        # An upper bound, too: next to an axis of none any extent gives the right size, and numpy fails on a huge one.
        if type(extent) is not int or not 0 <= extent <= MAX_FRAME_BYTES:
            raise TypeError("has an axis that is not a count")
        size *= extent
    if size != len(frame):
        raise ValueError(f"has {len(frame)} bytes where its shape says {size}")
    array = np.frombuffer(frame, dtype=dtype)
    return array if ndim == 1 else array.reshape(shape)


def _unpack(header: Frame) -> list[Any]:
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; {MAX_HEADER_BYTES} are allowed")
    try:
        if len(header) <= _PLAIN_HEADER_BYTES:
            value = msgpack.unpackb(header, max_ext_len=0, ext_hook=_refuse_extension)
        else:
            value = _unpack_long(header)
    except Exception as error:  # noqa: BLE001  # msgpack raises ValueError, its own tree and RecursionError
        raise ProtocolError(f"the header is not msgpack ({type(error).__name__})") from None
    if not isinstance(value, list):
        raise ProtocolError("the header is not an array")
    return value


def _unpack_long(header: Frame) -> object:
    containers = 0

    def count(container: list[object] | dict[object, object]) -> list[object] | dict[object, object]:
        nonlocal containers
        containers += 1
        if containers > _MAX_CONTAINERS:
            raise ValueError("too many lists and maps")
        return container

    return msgpack.unpackb(
        header,
        max_ext_len=0,
        ext_hook=_refuse_extension,
        max_array_len=_MAX_ELEMENTS,
        max_map_len=_MAX_ELEMENTS // 4,
        list_hook=count,
        object_hook=count,
    )


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError("extension types do not travel")  # objects of Python's own making, a microsecond each


def _pack(header: list[object]) -> bytes:
    packed: bytes = msgpack.packb(header, default=_pack_facts)
    assert len(packed) <= MAX_HEADER_BYTES, "the sender's own header is too large for any peer"
    return packed


# --- How each annotated field travels ---

_MAX_TEXT_CHARS = 16 * 1024


def _parse_int(value: object) -> int:
    # bool is an int in Python and a different type in msgpack.
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError("needs a non-negative 63-bit integer")
    return value


def _parse_bool(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError("needs a boolean")
    return value


def _parse_str(value: object) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT_CHARS:
        raise TypeError(f"needs text of at most {_MAX_TEXT_CHARS} characters")
    return value


def _parse_str_list(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError("needs a list of texts")
    return [_parse_str(element) for element in value]


def _parse_str_dict(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError("needs a map of texts")
    return {_parse_str(key): _parse_str(element) for key, element in value.items()}


def _parse_facts(value: object) -> ModelFacts:
    parsers = _FACTS_PARSERS
    if not isinstance(value, list) or len(value) != len(parsers):
        raise TypeError(f"needs the {len(parsers)} facts of a model")
    facts = ModelFacts(**{name: parse(item) for (name, parse), item in zip(parsers, value, strict=True)})
    if not 1 <= facts.max_batch_tokens <= _MAX_INT32 or not 1 <= facts.dimensions <= _MAX_INT32:
        raise ValueError("a model of no dimensions, or a step of no tokens")
    if len(facts.labels) != facts.num_labels or labels_bytes(facts.labels) > MAX_LABELS_BYTES:
        raise ValueError(f"needs a name for each label, of at most {MAX_LABELS_BYTES} bytes together")
    return facts


def _pack_facts(facts: ModelFacts) -> list[object]:
    return [getattr(facts, name) for name, _ in _FACTS_PARSERS]


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else parse(value)


_PARSERS: dict[object, Callable[[object], Any]] = {
    int: _parse_int,
    bool: _parse_bool,
    str: _parse_str,
    str | None: _optional(_parse_str),
    int | None: _optional(_parse_int),
    list[str]: _parse_str_list,
    dict[str, str]: _parse_str_dict,
    ModelFacts: _parse_facts,
    ModelFacts | None: _optional(_parse_facts),
}
_FACTS_PARSERS = [(name, _PARSERS[hint]) for name, hint in get_type_hints(ModelFacts).items()]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a message class is laid out: scalars in the header in field order, arrays behind it in field order."""

    kind: int
    message_class: Any
    names: list[str]  # of its fields
    parsers: list[Callable[[object], Any]]  # of the scalars
    scalars: Callable[[Any], Sequence[object]]  # a message's
    has_version: bool  # which is the first of them
    arrays: list[tuple[str, np.dtype[Any], int]]
    required: list[tuple[str, np.dtype[Any], int]]  # those of `arrays` without a default
    defaults: Callable[[Any], Sequence[npt.NDArray[Any]]] | None  # a message's others, if it has any


def _layout(kind: int, message_class: type) -> _Layout:
    hints = get_type_hints(message_class, include_extras=True)
    names = [item.name for item in fields(message_class)]
    in_header = [name for name in names if not hasattr(hints[name], "__metadata__")]
    assert names[: len(in_header)] == in_header, "scalars come before arrays"
    with_default = [item.name for item in fields(message_class) if item.default_factory is not MISSING]
    arrays = []
    for name in names[len(in_header) :]:
        dtype, ndim = hints[name].__metadata__[0]
        arrays.append((name, np.dtype(dtype), ndim))
    return _Layout(
        kind,
        message_class,
        names,
        parsers=[_PARSERS[hints[name]] for name in in_header],
        scalars=_getter(in_header),
        has_version=in_header[0] == "protocol_version",
        arrays=arrays,
        required=[array for array in arrays if array[0] not in with_default],
        defaults=_getter(with_default) if with_default else None,
    )


def _getter(names: list[str]) -> Callable[[Any], Sequence[Any]]:
    """What takes the values of these attributes from an object."""
    # Of a single name attrgetter gives the value itself.
    return attrgetter(*names) if len(names) > 1 else lambda message: (getattr(message, names[0]),)


# The number is the wire's: append, never renumber within a protocol version.
_LAYOUTS_BY_KIND = {
    kind: _layout(kind, message_class)
    for kind, message_class in enumerate(
        (
            Join,
            Request,
            Cancel,
            Hello,
            Result,
            BatchFailed,
            Goodbye,
            Beat,
            Welcome,
            Ping,
            Batch,
            Reply,
            Failure,
            Refuse,
            Replies,
            StepTimes,
            Trace,
            Requests,
        ),
        start=1,
    )
}
_LAYOUTS_BY_CLASS = {layout.message_class: layout for layout in _LAYOUTS_BY_KIND.values()}
