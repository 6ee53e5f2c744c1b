"""Every message survives its bytes; nothing else does."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import time
import tracemalloc

import msgpack
import numpy as np
import pytest

from common.errors import ProtocolError
from common.wire import codec
from common.wire.codec import MAX_HEADER_BYTES, Message, decode, encode
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Hello,
    Reply,
    Request,
)
from tests.common.samples import (
    BATCH,
    MESSAGES,
    REQUEST,
    TYPES_AND_SPANS,
    assert_equal,
    frames_with,
    hello_header,
    int32,
    request_frames,
    uint8,
)
from tests.fakes import FACTS
from tests.rogue import bombs, mutated


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_bytes(message: Message) -> None:
    assert_equal(decode([bytes(frame) for frame in encode(message)]), message)


def test_every_message_class_is_tried_here() -> None:
    assert {type(message) for message in MESSAGES} == set(codec._LAYOUTS_BY_CLASS)


@pytest.mark.parametrize(("message", "num_frames"), [(REQUEST, 3), (BATCH, 6)], ids=["Request", "Batch"])
def test_what_a_plain_text_does_not_need_does_not_travel(message: Request | Batch, num_frames: int) -> None:
    assert len(encode(message)) == num_frames
    assert len(encode(dataclasses.replace(message, **TYPES_AND_SPANS))) == num_frames + 4
    back = decode([bytes(frame) for frame in encode(message)])
    assert isinstance(back, Request | Batch)
    assert (back.type_starts.shape, back.span_counts.shape, back.spans.shape) == ((0,), (0,), (0, 2))


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


@pytest.mark.parametrize("left_out", [1, 2])
def test_of_types_and_spans_all_travel_or_none(left_out: int) -> None:
    frames = frames_with(dataclasses.replace(REQUEST, **TYPES_AND_SPANS))
    header = msgpack.unpackb(frames[0])
    header[-1] = header[-1][:-left_out]
    with pytest.raises(ProtocolError):
        decode([msgpack.packb(header), *frames[1:-left_out]])


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
        [b"\x00" * (codec.MAX_HEADER_BYTES + 1)],
        [msgpack.packb([3, 1, []])] * 10,
        request_frames(request_id=-1),
        request_frames(request_id=True),
        request_frames(request_id=1.0),
        request_frames(request_id=2**63),
        request_frames(dimensions=2**31),
        [msgpack.packb([1, PROTOCOL_VERSION, "gateway-0", 0, []])],
        [msgpack.packb([1, PROTOCOL_VERSION, "gateway-0", 2**31, []])],
        request_frames(tenant=-1),
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
        *(
            [msgpack.packb([5, 1, 1, 1, [[0], shape]]), b"", b""]  # a Result whose rows have no bytes
            for shape in ([2**64 - 1, 0], [2**63, 0], [2**62, 0], [0, 2**62], [0, 2**31], [0, -1], [0, False])
        ),
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


@pytest.mark.slow
def test_of_fifty_thousand_changed_messages_each_decodes_or_is_a_protocol_error() -> None:
    refused = 0
    for seed in range(50_000):
        frames = mutated(random.Random(seed), MESSAGES)
        try:
            message = decode(frames)
        except ProtocolError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"the frames of seed {seed}") from error
        else:
            assert_equal(decode([bytes(frame) for frame in encode(message)]), message)
    assert 35_000 < refused < 49_000  # else the changes are not what they are meant to be


# What a bomb may not be, and what is all well formed and merely much.
COSTLY_HEADERS = bombs() | {
    "texts in a Hello": hello_header(tasks=[""] * 64_000),
    "as many texts as a Hello may have": hello_header(
        tasks=[""] * 12_288, encodings=[""] * 12_288, num_labels=10_900, labels=[""] * 10_900
    ),
    "prompts": hello_header(prompts={f"{number:x}": "" for number in range(10_000)}),
    "prompts that are named by numbers": hello_header(prompts=dict.fromkeys(range(10_000), "")),
}


def test_a_header_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=rf"^a header of {MAX_HEADER_BYTES + 1} bytes; {MAX_HEADER_BYTES} are"):
        decode([bytes(MAX_HEADER_BYTES + 1)])


@pytest.mark.parametrize("header", COSTLY_HEADERS.values(), ids=COSTLY_HEADERS)
def test_no_header_takes_long_or_much_memory(header: bytes) -> None:
    def read() -> float:
        begun_s = time.process_time()
        with contextlib.suppress(ProtocolError):
            decode([header])
        return time.process_time() - begun_s

    assert len(header) <= MAX_HEADER_BYTES
    tracemalloc.start()
    try:
        read()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    gc.disable()  # other tests' objects: going through them is not what a header costs
    try:
        # 5 ms on a core of its own; three are the most that was measured there.
        assert min(read() for _ in range(5)) < 0.01
    finally:
        gc.enable()
    # An integer has 32 bytes and a place of 8 in its list, and the shortest that is not one of Python's own has one.
    assert peak_bytes < 3 * 2**20


def test_a_long_header_of_few_lists_is_read() -> None:
    message = Hello(
        PROTOCOL_VERSION,
        "worker-0",
        12,
        dataclasses.replace(
            FACTS, num_labels=4000, labels=[f"{number}" for number in range(4000)], prompts={"query": "find " * 2000}
        ),
    )
    assert_equal(decode([bytes(frame) for frame in encode(message)]), message)
