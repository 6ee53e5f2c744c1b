"""Every message survives its bytes; nothing else does."""

from __future__ import annotations

import dataclasses
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import protocol
from common.errors import ProtocolError
from common.protocol import (
    BINARY,
    ENCODINGS,
    FLOAT32,
    INT8,
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Join,
    Message,
    Ping,
    Refuse,
    Reply,
    Request,
    Result,
    Welcome,
    decode,
    encode,
    row_bytes,
)
from tests.fakes import FACTS


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def uint8(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


MESSAGES: list[Message] = [
    Join(PROTOCOL_VERSION, "gateway-0", 12),
    Request(1, "f1", 2**62, "online", True, 384, False, "int8", int32(5, 6, 7), int32(1, 2)),
    Cancel(3),
    Hello(PROTOCOL_VERSION, "worker-0", 12, FACTS),
    Hello(
        PROTOCOL_VERSION,
        "worker-0",
        12,
        dataclasses.replace(FACTS, prompts={"query": "frage: "}, default_prompt_name="query"),
    ),
    Result(9, 4, 1234, int32(1), np.arange(6, dtype=np.uint8).reshape(2, 3)),
    Result(9, 4, 1234, int32(), np.zeros((0, 384), dtype=np.uint8)),
    BatchFailed(9, 4, "raised"),
    Goodbye("draining"),
    Beat(9, 2),
    Welcome(PROTOCOL_VERSION, 9, True, None, 1024, 4096),
    Welcome(PROTOCOL_VERSION, 9, False, FACTS, 1024, 4096),
    Ping(9, 1, 2, True),
    Batch(9, 4, int32(5, 6, 7), int32(1, 2), int32(384, 64), uint8(1, 0), uint8(0, 2)),
    Reply(1, 0, 10, 20, np.ones((1, 3), dtype=np.uint8)),
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


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_bytes(message: Message) -> None:
    assert_equal(decode([bytes(frame) for frame in encode(message)]), message)


def test_every_message_class_is_tried_here() -> None:
    assert {type(message) for message in MESSAGES} == set(protocol._LAYOUTS_BY_CLASS)


def test_arrays_travel_little_endian_whatever_they_were() -> None:
    message = Batch(1, 1, int32(258), int32(1), int32(8), uint8(1), uint8(0))
    assert bytes(encode(message)[1]) == b"\x02\x01\x00\x00"


def test_a_view_that_is_not_contiguous_is_sent_as_its_values() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(4, 3)[::2]
    reply = decode([bytes(frame) for frame in encode(Reply(1, 0, 0, 0, rows))])
    assert isinstance(reply, Reply)
    np.testing.assert_array_equal(reply.rows, rows)


def test_an_array_of_another_type_is_never_sent_as_if_it_were_right() -> None:
    with pytest.raises(AssertionError, match="rows"):
        encode(Reply(1, 0, 0, 0, np.zeros((1, 3), dtype=np.float32)))


@pytest.mark.parametrize(
    "change", [{"encodings": uint8(0)}, {"encodings": uint8(0, 3)}, {"normalize": uint8(1)}, {"dimensions": int32(8)}]
)
def test_a_batch_needs_options_for_each_of_its_sequences(change: dict[str, np.ndarray]) -> None:
    batch = Batch(9, 4, int32(5, 6, 7), int32(1, 2), int32(384, 64), uint8(1, 0), uint8(0, 2))
    with pytest.raises(ValueError, match="encoding"):
        dataclasses.replace(batch, **change)


@pytest.mark.parametrize(
    ("encoding", "dimensions", "expected"),
    [(FLOAT32, 12, 48), (INT8, 12, 12), (BINARY, 12, 2), (BINARY, 16, 2), (BINARY, 1, 1)],
)
def test_a_row_has_as_many_bytes_as_its_encoding_needs(encoding: int, dimensions: int, expected: int) -> None:
    assert row_bytes(encoding, dimensions) == expected


def test_the_smallest_number_of_an_encoding_has_the_widest_rows() -> None:
    assert ENCODINGS == {"float32": FLOAT32, "int8": INT8, "binary": BINARY}
    assert FLOAT32 < INT8 < BINARY
    assert row_bytes(FLOAT32, 9) > row_bytes(INT8, 9) > row_bytes(BINARY, 9)


def request_frames(**changes: object) -> list[bytes]:
    """A Request's frames with some header fields replaced."""
    scalars = ["request_id", "fingerprint", "deadline_ns", "lane", "opens", "dimensions", "normalize", "encoding"]
    names = ["kind", *scalars, "shapes"]
    frames = [bytes(frame) for frame in encode(MESSAGES[1])]
    header = msgpack.unpackb(frames[0])
    for name, value in changes.items():
        header[names.index(name)] = value
    return [msgpack.packb(header), *frames[1:]]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgpack.packb({})],
        [msgpack.packb([])],
        [msgpack.packb([99, []])],
        [msgpack.packb([True, []])],
        [msgpack.packb([3, 1])],
        [msgpack.packb([3, 1, [], 0])],
        [b"\x91" * 5000],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x00" * (protocol.MAX_HEADER_BYTES + 1)],
        [msgpack.packb([3, 1, []])] * 9,
        request_frames(request_id=-1),
        request_frames(request_id=True),
        request_frames(request_id=1.0),
        request_frames(request_id=2**63),
        request_frames(opens=1),
        request_frames(lane=b"online"),
        request_frames(encoding="int4"),
        request_frames(encoding=1),
        request_frames(lane="x" * 20_000),
        request_frames(shapes=[[3]]),
        request_frames(shapes=[[3], [2], [1]]),
        request_frames(shapes=[[2], [2]]),
        request_frames(shapes=[[3, 1], [2]]),
        request_frames(shapes=[[-3], [2]]),
        request_frames(shapes=[[2**62], [2]]),
        request_frames()[:2],
        [*request_frames(), b""],
        [request_frames()[0], int32(5, 6, -7).tobytes(), int32(1, 2).tobytes()],
        [request_frames()[0], int32(5, 6, 7).tobytes(), int32(1, 1).tobytes()],
        [request_frames()[0], int32(5, 6, 7).tobytes(), int32(3, 0).tobytes()],
        [request_frames()[0], int32(5, 6, 7).tobytes(), int32(-1, 4).tobytes()],
    ],
)
def test_what_is_no_message_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**32), source=st.integers(0, len(MESSAGES) - 1))
def test_mutated_messages_decode_or_are_protocol_errors(seed: int, source: int) -> None:
    rng = random.Random(seed)
    frames = [bytearray(frame) for frame in encode(MESSAGES[source])]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(frames)
        action = rng.randrange(4)
        if action == 0 and frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif action == 1:
            del frame[rng.randint(0, len(frame)) :]
        elif action == 2:
            frame.extend(rng.randbytes(rng.randint(1, 9)))
        else:
            frames.append(bytearray(rng.choice(frames)))
    try:
        message = decode([bytes(frame) for frame in frames])
    except ProtocolError:
        return
    assert_equal(decode([bytes(frame) for frame in encode(message)]), message)
