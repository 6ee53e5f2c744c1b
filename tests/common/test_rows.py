"""How wide rows are, and what is read from sparse ones."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import ProtocolError
from common.wire.rows import BINARY, ENCODINGS, FLOAT32, INT8, SPARSE, read_sparse, row_bytes, sparse_bytes


@pytest.mark.parametrize(
    ("encoding", "dimensions", "expected"),
    [(FLOAT32, 12, 48), (INT8, 12, 12), (BINARY, 12, 2), (BINARY, 16, 2), (BINARY, 1, 1)],
)
def test_a_row_has_as_many_bytes_as_its_encoding_needs(encoding: int, dimensions: int, expected: int) -> None:
    assert row_bytes(encoding, dimensions) == expected


def test_a_sparse_row_has_no_fixed_width() -> None:
    with pytest.raises(AssertionError):
        row_bytes(SPARSE, 12)


def test_the_smallest_number_of_a_dense_encoding_has_the_widest_rows() -> None:
    assert ENCODINGS == {"float32": FLOAT32, "int8": INT8, "binary": BINARY, "sparse": SPARSE}
    assert FLOAT32 < INT8 < BINARY < SPARSE
    assert row_bytes(FLOAT32, 9) > row_bytes(INT8, 9) > row_bytes(BINARY, 9)


def sparse_rows(*counts: int, num_bytes: int) -> np.ndarray:
    """Rows that say these counts, whatever room there is."""
    rows = np.full((len(counts), num_bytes), 0xA5, dtype=np.uint8)
    rows[:, :4] = np.array(counts, dtype="<i4").view(np.uint8).reshape(-1, 4)
    return rows


def test_a_sparse_row_tells_its_columns_and_values() -> None:
    row = np.frombuffer(
        b"\x02\x00\x00\x00" + b"\x03\x00\x00\x00\x00\x01\x00\x00" + b"\x00\x00\x80\x3f\x00\x00\x00\xbf" + b"\xff" * 8,
        dtype=np.uint8,
    )
    columns, values = read_sparse(row)
    assert (columns.dtype, columns.tolist()) == (np.int32, [3, 256])
    assert (values.dtype, values.tolist()) == (np.float32, [1.0, -0.5])
    assert sparse_bytes(row[None]) == 20


def test_a_sparse_row_may_have_no_values() -> None:
    columns, values = read_sparse(sparse_rows(0, num_bytes=4)[0])
    assert (columns.tolist(), values.tolist()) == ([], [])


@pytest.mark.parametrize(("counts", "expected"), [((0, 0), 4), ((1, 2, 0), 20), ((), 4)])
def test_sparse_rows_are_as_wide_as_the_widest_needs(counts: tuple[int, ...], expected: int) -> None:
    assert sparse_bytes(sparse_rows(*counts, num_bytes=24)) == expected


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 3), dtype=np.uint8),
        np.zeros((0, 0), dtype=np.uint8),
        sparse_rows(0, -1, num_bytes=12),
        sparse_rows(0, 2, num_bytes=19),
        sparse_rows(2**31 - 1, num_bytes=20),
    ],
)
def test_a_sparse_row_that_counts_more_than_it_holds_is_a_protocol_error(rows: np.ndarray) -> None:
    with pytest.raises(ProtocolError):
        sparse_bytes(rows)
