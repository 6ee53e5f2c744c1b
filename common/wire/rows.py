"""How a row of an answer is written in bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError

# The most that a frame may hold: the transport drops the connection of a peer that sends more.
MAX_FRAME_BYTES = 64 * 1024 * 1024

# The most rows that one message may ask for: one for each token of a sequence longer than models take today.
MAX_ROWS = 64 * 1024

# The encodings of a row. Dense: little-endian float32; int8; or one bit for each dimension, the first in the lowest bit
# of the first byte. Sparse: an int32 count, that many ascending int32 columns, that many float32 values, all
# little-endian. A Batch has the number, a Request and ModelFacts the name. Among dense encodings the smallest number
# has the widest rows. A sparse row is as wide as it needs, so a batch is all sparse or has no sparse row.
FLOAT32, INT8, BINARY, SPARSE = 0, 1, 2, 3

ENCODINGS = {"float32": FLOAT32, "int8": INT8, "binary": BINARY, "sparse": SPARSE}


def row_bytes(encoding: int, dimensions: int) -> int:
    """The bytes of one row. `encoding` is FLOAT32, INT8 or BINARY."""
    assert encoding != SPARSE, "a sparse row has no fixed width"
    if encoding == FLOAT32:
        return 4 * dimensions
    return dimensions if encoding == INT8 else (dimensions + 7) // 8


def sparse_bytes(rows: npt.NDArray[np.uint8]) -> int:
    """The bytes of the widest row by the counts of the rows. `rows`: uint8 [rows, bytes], sparse.

    Raises:
        ProtocolError: the count of a row is negative, or more than the row has room for.
    """
    num_bytes = rows.shape[1]
    if num_bytes < 4:
        raise ProtocolError(f"a sparse row of {num_bytes} bytes")
    counts = rows[:, :4].view("<i4")
    if int(counts.min(initial=0)) < 0 or (widest := 4 + 8 * int(counts.max(initial=0))) > num_bytes:
        raise ProtocolError("a sparse row whose count is not that of its values")
    return widest


def read_sparse(row: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Columns and values of a sparse row that `sparse_bytes` has checked: int32 and float32 [count], views of it."""
    count = int(row[:4].view("<i4")[0])
    columns, values = np.split(row[4 : 4 + 8 * count], [4 * count])
    return columns.view("<i4"), values.view("<f4")
