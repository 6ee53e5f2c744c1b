"""Which values a message may have."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import numpy.typing as npt
import pytest

from common.errors import ProtocolError
from common.wire.codec import decode, encode
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Hello,
    Ping,
    Request,
    StepTimes,
    Trace,
    max_rows,
)
from common.wire.rows import BINARY, FLOAT32, MAX_ROWS, SPARSE
from tests.common.samples import (
    BATCH,
    REQUEST,
    STEP_TIMES,
    TYPES_AND_SPANS,
    frames_with,
    hello_header,
    int32,
    uint8,
)
from tests.fakes import FACTS


@pytest.mark.parametrize(
    "times_ns",
    [STEP_TIMES[:-1], np.append(STEP_TIMES, 200), STEP_TIMES[::-1].copy(), STEP_TIMES - 101],
    ids=["one too few", "one too many", "backwards", "before the clock"],
)
def test_times_are_of_every_moment_and_in_their_order(times_ns: np.ndarray) -> None:
    with pytest.raises(ValueError, match="needs 8 times in the order"):
        StepTimes(9, 4, times_ns)
    with pytest.raises(ValueError, match="needs 12 times in the order"):
        Trace(1, 4, "worker-0", 2, 7, times_ns)
    with pytest.raises(ValueError, match="needs 1 times in the order"):
        dataclasses.replace(REQUEST, times_ns=times_ns)


def test_a_batch_has_a_row_a_sequence_or_a_row_a_span() -> None:
    assert BATCH.num_rows == 2
    assert dataclasses.replace(BATCH, type_starts=int32(3, 1)).num_rows == 2
    assert dataclasses.replace(BATCH, **TYPES_AND_SPANS).num_rows == 3


@pytest.mark.parametrize(
    "change", [{"encodings": uint8(0)}, {"encodings": uint8(0, 4)}, {"normalize": uint8(1)}, {"dimensions": int32(8)}]
)
def test_a_batch_needs_options_for_each_of_its_sequences(change: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="encoding"):
        dataclasses.replace(BATCH, **change)


@pytest.mark.parametrize("encodings", [uint8(FLOAT32, SPARSE), uint8(SPARSE, BINARY)])
def test_a_batch_is_all_sparse_or_has_none(encodings: np.ndarray) -> None:
    with pytest.raises(ValueError, match="sparse next to one that is not"):
        dataclasses.replace(BATCH, encodings=encodings)


@pytest.mark.parametrize(
    ("dimensions", "expected"), [(1, MAX_ROWS), (256, 65_536), (1024, 16_384), (4096, 4096), (2**40, 1)]
)
def test_the_rows_of_a_batch_fit_into_a_frame(dimensions: int, expected: int) -> None:
    assert max_rows(dataclasses.replace(FACTS, dimensions=dimensions)) == expected


def test_sparse_rows_are_planned_for_as_if_they_were_full() -> None:
    assert max_rows(dataclasses.replace(FACTS, dimensions=30_522, encodings=["sparse"])) == 274


@pytest.mark.parametrize("message", [REQUEST, BATCH], ids=["Request", "Batch"])
@pytest.mark.parametrize(
    "changes",
    [
        {"type_starts": int32(3)},
        {"type_starts": int32(3, 1, 1)},
        {"type_starts": int32(-1, 1)},
        {"type_starts": int32(4, 1)},
        {"type_starts": int32(0, 5)},
        {"span_counts": int32(3)},
        {"span_counts": int32(1, 1, 1)},
        {"span_counts": int32(3, 0)},
        {"span_counts": int32(-1, 4)},
        {"span_counts": int32(1, 1)},
        {"span_counts": int32(2, 2)},
        {"span_counts": int32(2**31 - 1, 2**31 - 1)},
        {"span_counts": int32()},
        {"span_counts": int32(), "spans": np.zeros((0, 3), dtype=np.int32)},
        {"spans": int32(0, 2, 2, 3).reshape(2, 2)},
        {"spans": np.zeros((0, 2), dtype=np.int32)},
        {"spans": int32(0, 2, 9, 2, 3, 9, 1, 4, 9).reshape(3, 3)},
        {"spans": int32(0, 2, 2, 3, 1, 4)},
        {"spans": int32(-1, 2, 2, 3, 1, 4).reshape(3, 2)},
        {"spans": int32(2, 2, 2, 3, 1, 4).reshape(3, 2)},
        {"spans": int32(2, 1, 2, 3, 1, 4).reshape(3, 2)},
        {"spans": int32(0, 4, 2, 3, 1, 4).reshape(3, 2)},
        {"spans": int32(0, 2, 2, 3, 1, 5).reshape(3, 2)},
        {
            "span_counts": int32(MAX_ROWS, 1),
            "spans": np.tile(int32(0, 1), (MAX_ROWS + 1, 1)),
        },
    ],
)
def test_types_and_spans_that_do_not_fit_their_sequences_are_a_protocol_error(
    message: Request | Batch, changes: dict[str, np.ndarray]
) -> None:
    whole = dataclasses.replace(message, **TYPES_AND_SPANS)
    decode(frames_with(whole))
    with pytest.raises(ProtocolError):
        decode(frames_with(whole, **changes))


@pytest.mark.parametrize(
    "full",
    [np.zeros((0, 3)), np.zeros((1, 3)), [[3, 0, 5, 6]], [[-1, 0, 5, 6]], [[0, -1, 5, 6]], [[0, 0, -5, 6]]],
    ids=["too few", "too short", "no lane", "no place", "no tenant", "no time"],
)
def test_a_ping_names_lanes_tenants_and_times(full: npt.ArrayLike) -> None:
    with pytest.raises(ValueError, match="a lane that there is, a tenant and two times"):
        Ping(9, 1, 2, True, np.asarray(full, dtype=np.int64))


@pytest.mark.parametrize(
    ("num_labels", "labels"),
    [(2, ["a"]), (0, ["a"]), (1, []), (2**40, ["a"]), (100, ["é" * 300] * 100), (12_000, [""] * 12_000)],
    ids=["too few", "of no score", "none", "a bomb", "too long", "too many"],
)
def test_labels_without_a_name_each_or_without_a_bound_are_a_protocol_error(num_labels: int, labels: list[str]) -> None:
    frames = encode(Hello(PROTOCOL_VERSION, "worker-0", 12, FACTS))
    header = msgpack.unpackb(frames[0])
    names = [field.name for field in dataclasses.fields(FACTS)]
    header[4][names.index("num_labels")] = num_labels
    header[4][names.index("labels")] = labels
    with pytest.raises(ProtocolError, match="a name for each label"):
        decode([msgpack.packb(header)])


@pytest.mark.parametrize("pid", [0, 2**31, 2**63 - 1])
def test_a_number_that_no_process_has_is_a_protocol_error(pid: int) -> None:
    header = msgpack.unpackb(encode(Hello(PROTOCOL_VERSION, "worker-0", 12, FACTS))[0])
    header[3] = pid
    with pytest.raises(ProtocolError, match="no process"):
        decode([msgpack.packb(header)])


@pytest.mark.parametrize("facts", [{"dimensions": 0}, {"dimensions": 2**31}, {"max_batch_tokens": 0}], ids=str)
def test_a_model_that_no_batch_could_be_made_for_is_a_protocol_error(facts: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match="no dimensions"):
        decode([hello_header(**facts)])
