"""Short requests and replies that travel together are what they were alone."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import numpy.typing as npt
import pytest

from common.errors import ProtocolError
from common.wire.codec import decode, encode
from common.wire.messages import (
    Request,
)
from common.wire.packing import MAX_REQUESTS, Replies, Requests
from tests.common.samples import (
    PIECE_TIMES,
    REQUEST,
    REQUESTS,
    TOGETHER,
    TYPES_AND_SPANS,
    assert_equal,
    frames_with,
    int32,
)


@pytest.mark.parametrize(
    "answers",
    [np.zeros((1, 3)), np.zeros((2, 2)), np.zeros((3, 3)), [[1, 0, 10], [-2, 0, 10]], [[1, 0, 10], [2, -1, 10]]],
    ids=["too few", "too short", "too many", "no id", "no row"],
)
def test_replies_need_three_numbers_for_each_row(answers: npt.ArrayLike) -> None:
    with pytest.raises(ValueError, match="three non-negative numbers"):
        Replies(20, np.asarray(answers, dtype=np.int64), np.zeros((2, 8), dtype=np.uint8))


def test_requests_that_travel_together_are_what_they_were_and_their_arrays_are_views() -> None:
    message = decode([bytes(frame) for frame in encode(REQUESTS)])
    assert isinstance(message, Requests)
    requests = list(message.each())
    assert len(requests) == 2
    for request, sent in zip(requests, TOGETHER, strict=True):
        assert_equal(Request(*(getattr(request, field.name) for field in dataclasses.fields(request))), sent)
        assert np.shares_memory(request.token_ids, message.token_ids)
        assert np.shares_memory(request.lengths, message.lengths)
        assert not request.token_ids.flags.writeable


def test_requests_that_travel_together_are_four_frames_however_many_they_are() -> None:
    requests = [dataclasses.replace(REQUEST, request_id=number) for number in range(MAX_REQUESTS)]
    frames = encode(Requests.of(requests))
    assert len(frames) == 4
    back = decode([bytes(frame) for frame in frames])
    assert isinstance(back, Requests)
    assert [request.request_id for request in back.each()] == list(range(64))


@pytest.mark.parametrize(
    "changes",
    [
        {"type_starts": TYPES_AND_SPANS["type_starts"]},
        {"span_counts": TYPES_AND_SPANS["span_counts"], "spans": TYPES_AND_SPANS["spans"]},
        {"times_ns": PIECE_TIMES[:1]},
    ],
    ids=["types", "spans", "times"],
)
def test_a_request_that_would_lose_something_does_not_travel_together_with_others(
    changes: dict[str, np.ndarray],
) -> None:
    assert Requests.may_hold(REQUEST)
    other = dataclasses.replace(REQUEST, **changes)
    assert not Requests.may_hold(other)
    with pytest.raises(AssertionError, match="would be lost"):
        Requests.of([REQUEST, other])


def test_requests_of_several_models_do_not_travel_together() -> None:
    with pytest.raises(AssertionError, match="several models"):
        Requests.of([REQUEST, dataclasses.replace(REQUEST, fingerprint="f2")])


# Of TOGETHER as Requests has them: request_id, deadline_ns, lane, tenant, opens, dimensions, normalize, encoding, and
# number of sequences.
ASKED = [[1, 2**62, 0, 5, 1, 384, 0, 1, 2], [2, 2**63 - 1, 2, 0, 0, 64, 1, 3, 1]]


def asked_with(column: int, value: int) -> np.ndarray:
    """ASKED, of its second request another number."""
    asked = np.array(ASKED, dtype=np.int64)
    asked[1, column] = value
    return asked


def test_the_numbers_of_requests_that_travel_together_stand_in_the_order_of_their_fields() -> None:
    assert REQUESTS.asked.tolist() == ASKED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"asked": asked_with(column, -1)}, "negative") for column in range(9)),
        ({"asked": asked_with(2, 3)}, "a lane or an encoding that there is not"),
        ({"asked": asked_with(4, 2)}, "0 or 1"),
        ({"asked": asked_with(5, 2**31)}, "more dimensions"),
        ({"asked": asked_with(6, 2)}, "0 or 1"),
        ({"asked": asked_with(7, 4)}, "a lane or an encoding that there is not"),
        ({"asked": asked_with(8, 0)}, "a sequence in each request"),
        ({"asked": asked_with(8, 2)}, "a sequence in each request"),
        ({"asked": asked_with(8, 2**63 - 1)}, "a sequence in each request"),
        ({"asked": np.array(ASKED[:1])}, "a sequence in each request"),
        ({"asked": np.zeros((0, 9), dtype=np.int64)}, "1 to 64 requests"),
        ({"asked": np.array(ASKED)[:, :8]}, "nine numbers"),
        ({"asked": np.zeros((3, 0), dtype=np.int64)}, "nine numbers"),
        (
            {
                "asked": np.array([[*ASKED[0][:-1], 1]] * 65),
                "lengths": np.ones(65, dtype=np.int32),
                "token_ids": np.ones(65, dtype=np.int32),
            },
            "1 to 64 requests",
        ),
        ({"lengths": int32()}, "at least one sequence"),
        ({"lengths": int32(3, 5, 0)}, "at least one token"),
        ({"lengths": int32(3, 4, 2)}, "do not add up"),
        ({"lengths": int32(-1, 8, 1)}, "at least one token"),
        ({"lengths": int32(3, 4, 1).reshape(3, 1)}, "axes"),
        ({"token_ids": int32(*range(7), -8)}, "a token id is negative"),
        ({"token_ids": int32(*range(7))}, "do not add up"),
    ],
)
def test_requests_that_do_not_fit_their_arrays_are_a_protocol_error(
    changes: dict[str, np.ndarray], reason: str
) -> None:
    decode(frames_with(REQUESTS))
    with pytest.raises(ProtocolError, match=reason):
        decode(frames_with(REQUESTS, **changes))


@pytest.mark.parametrize("fingerprint", [1, None, b"f1", "x" * 20_000])
def test_requests_need_a_model_to_be_of(fingerprint: object) -> None:
    frames = frames_with(REQUESTS)
    header = msgpack.unpackb(frames[0])
    header[1] = fingerprint
    with pytest.raises(ProtocolError, match="needs text"):
        decode([msgpack.packb(header), *frames[1:]])
