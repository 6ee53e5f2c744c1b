"""One message of each kind and variant, as tests of the wire send them."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np

from common.wire import codec
from common.wire.codec import Message, encode
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Join,
    Ping,
    Refuse,
    Reply,
    Request,
    Result,
    StepTimes,
    Trace,
    Welcome,
)
from common.wire.packing import Replies, Requests
from common.wire.rows import SPARSE
from tests.fakes import FACTS


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def uint8(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


# Three rows: two spans of the first sequence, one of the second, which also has tokens of type 1.
TYPES_AND_SPANS = {
    "type_starts": int32(3, 1),
    "span_counts": int32(2, 1),
    "spans": int32(0, 2, 2, 3, 1, 4).reshape(3, 2),
}
STEP_TIMES = np.arange(100, 108)
PIECE_TIMES = np.arange(100, 112)
REQUEST = Request(1, "f1", 2**62, "online", 5, True, 384, False, "int8", np.arange(7, dtype=np.int32), int32(3, 4))
# As different as they may be: two sequences and one, of other lanes, tenants and options.
TOGETHER = [
    REQUEST,
    Request(2, "f1", 2**63 - 1, "backfill", 0, False, 64, True, "sparse", int32(8), int32(1)),
]
REQUESTS = Requests.of(TOGETHER)
BATCH = Batch(9, 4, np.arange(7, dtype=np.int32), int32(3, 4), int32(384, 64), uint8(1, 0), uint8(0, 2))
MESSAGES: list[Message] = [
    Join(PROTOCOL_VERSION, "gateway-0", 12),
    Request(1, "f1", 2**62, "online", 0, True, 384, False, "int8", int32(5, 6, 7), int32(1, 2)),
    dataclasses.replace(REQUEST, type_starts=TYPES_AND_SPANS["type_starts"]),
    dataclasses.replace(REQUEST, span_counts=TYPES_AND_SPANS["span_counts"], spans=TYPES_AND_SPANS["spans"]),
    dataclasses.replace(REQUEST, encoding="sparse", **TYPES_AND_SPANS),
    dataclasses.replace(REQUEST, times_ns=PIECE_TIMES[:1]),
    REQUESTS,
    Cancel(3),
    Hello(PROTOCOL_VERSION, "worker-0", 12, FACTS),
    Hello(
        PROTOCOL_VERSION,
        "worker-0",
        12,
        dataclasses.replace(FACTS, prompts={"query": "frage: "}, default_prompt_name="query"),
    ),
    Hello(
        PROTOCOL_VERSION,
        "worker-0",
        12,
        dataclasses.replace(
            FACTS,
            tasks=["score"],
            num_labels=1,
            labels=["relevant"],
            score_activation="sigmoid",
            pair_template="qwen3-reranker",
            instruction="Find it.",
            separator_id=4,
            include_prompt=False,
            has_token_types=True,
        ),
    ),
    Result(9, 4, 0, 1234, True, int32(1), np.arange(6, dtype=np.uint8).reshape(2, 3)),
    Result(9, 4, 0, 1234, True, int32(), np.zeros((0, 384), dtype=np.uint8)),
    Result(9, 4, 0, 1234, True, int32(), np.zeros((2, 3), dtype=np.uint8), int32(60, 64)),
    BatchFailed(9, 4, "raised"),
    BatchFailed(9, 4, "no memory", 1),
    Goodbye("draining"),
    Beat(9, 2),
    Welcome(PROTOCOL_VERSION, 9, True, None, 1024, 4096),
    Welcome(PROTOCOL_VERSION, 9, False, FACTS, 1024, 4096),
    Ping(9, 1, 2, True),
    Ping(9, 1, 2, True, np.array([[0, 7, 5, 6], [2, 0, 5, 9]], dtype=np.int64)),
    BATCH,
    dataclasses.replace(BATCH, type_starts=TYPES_AND_SPANS["type_starts"]),
    dataclasses.replace(BATCH, span_counts=TYPES_AND_SPANS["span_counts"], spans=TYPES_AND_SPANS["spans"]),
    dataclasses.replace(BATCH, encodings=uint8(SPARSE, SPARSE), **TYPES_AND_SPANS),
    dataclasses.replace(BATCH, times_ns=PIECE_TIMES[2:3]),
    StepTimes(9, 4, STEP_TIMES),
    Trace(1, 4, "worker-0", 2, 7, PIECE_TIMES),
    Reply(1, 0, 10, 20, np.ones((1, 3), dtype=np.uint8)),
    Replies.of([Reply(1, 0, 10, 20, np.ones((1, 3), np.uint8)), Reply(2, 4, 11, 20, np.zeros((1, 3), np.uint8))]),
    Failure(1, "overloaded", "full", None, 2500),
    Failure(1, "nonfinite_output", "NaN", 3, None),
    Refuse("version", "install one version"),
]


def assert_equal(left: Message, right: Message) -> None:
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs
            assert type(ours) is type(theirs)


def frames_with(message: Request | Requests | Batch, **changes: np.ndarray) -> list[bytes]:
    """A message's frames with some of its arrays replaced, whatever they are."""
    frames = [bytes(frame) for frame in encode(message)]
    header = msgpack.unpackb(frames[0])
    names = [name for name, _, _ in codec._LAYOUTS_BY_CLASS[type(message)].arrays]
    for name, array in changes.items():
        header[-1][names.index(name)] = list(array.shape)
        frames[1 + names.index(name)] = array.tobytes()
    return [msgpack.packb(header), *frames[1:]]


def request_frames(**changes: object) -> list[bytes]:
    """A Request's frames with some header fields replaced."""
    scalars = ["request_id", "fingerprint", "deadline_ns", "lane", "tenant", "opens", "dimensions"]
    names = ["kind", *scalars, "normalize", "encoding", "shapes"]
    frames = [bytes(frame) for frame in encode(MESSAGES[1])]
    header = msgpack.unpackb(frames[0])
    for name, value in changes.items():
        header[names.index(name)] = value
    return [msgpack.packb(header), *frames[1:]]


def hello_header(**changes: object) -> bytes:
    """Of a Hello, with some of its facts replaced."""
    header = msgpack.unpackb(encode(Hello(PROTOCOL_VERSION, "worker-0", 12, FACTS))[0])
    names = [field.name for field in dataclasses.fields(FACTS)]
    for name, value in changes.items():
        header[4][names.index(name)] = value
    return msgpack.packb(header)
