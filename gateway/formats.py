"""How a client asks for vectors and scores and how they are written, on every route that answers with some. No I/O.

`float` and `base64` are float32 whatever the model. The quantised formats are made, by a model that declares a
quantiser, from the vector as it pools it, so they are the same whatever the checkpoint's own normalisation; asking for
`normalize` with one of them is refused, since the answer would be no vector of unit length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from common.errors import InvalidRequest, NonfiniteOutput
from common.protocol import ModelFacts
from gateway.client import Rows
from gateway.schema import check_at_most, unsupported

Logits = npt.NDArray[np.float32]  # [pairs], or [pairs, labels]

EncodingFormat = Literal["float", "base64", "base64_int8", "base64_binary", "base64_ubinary"]

# The encoding (of common/protocol.py) that a worker is asked for.
ENCODINGS: dict[EncodingFormat, str] = {
    "float": "float32",
    "base64": "float32",
    "base64_int8": "int8",
    "base64_binary": "binary",
    "base64_ubinary": "binary",
}

# From the first dimension in a byte's lowest bit, as rows come, to the first in its highest.
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def check_encoding_format(value: EncodingFormat | None, facts: ModelFacts) -> EncodingFormat:
    """The format; `float` unless named. Raises InvalidRequest (unsupported_parameter) where the model lacks it."""
    if value is None:
        return "float"
    if ENCODINGS[value] not in facts.encodings:
        served = [name for name, encoding in ENCODINGS.items() if encoding in facts.encodings]
        raise unsupported("encoding_format", f"this model does not make it; use one of: {', '.join(served)}")
    return value


def check_dimensions(value: int | None, facts: ModelFacts, encoding: str, name: str = "dimensions") -> int:
    """How many, all of them unless a number was named.

    Raises:
        InvalidRequest: out_of_range; invalid_value where bits would not fill their bytes.
    """
    dimensions = facts.dimensions if value is None else value
    check_at_most(name, dimensions, facts.dimensions)
    if dimensions % 8 and encoding == "binary":
        raise InvalidRequest(f"{name} must be a multiple of 8 where each is one bit, and is {dimensions}.", param=name)
    return dimensions


def check_normalize(value: bool | None, facts: ModelFacts, encoding: str) -> bool:
    """As the checkpoint declares it, unless a client says.

    Raises:
        InvalidRequest: unsupported_parameter where a quantised vector is to be normalised.
    """
    if encoding == "float32":
        return facts.normalize if value is None else value
    if value:
        raise unsupported("normalize", f"{encoding} is made from the vector before any normalisation")
    return False


def check_finite(rows: Rows, name_of: Callable[[int], str]) -> None:
    """Raises NonfiniteOutput naming, as `name_of` does, the first row that holds a NaN or an infinity."""
    if rows.dtype.kind != "f":
        return
    finite = np.isfinite(rows)
    if not finite.all():
        name = name_of(int(np.argmin(finite.all(axis=1))))
        raise NonfiniteOutput(f"The model made a NaN or an infinity of {name}.", param=name)


def json_rows(rows: Rows, encoding_format: EncodingFormat) -> Iterator[bytes]:
    """Each row, of the format's encoding, as JSON; floats as the shortest decimals that give float32 back.

    One row at a time: the JSON writer holds the interpreter's lock for a whole call, so that even on another thread
    a large matrix at once would stop the event loop.
    """
    if encoding_format == "float":
        for row in rows:
            yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    else:
        data = _octets(rows, encoding_format)
        num_bytes = len(data) // len(rows)
        for start in range(0, len(data), num_bytes):
            yield b'"%b"' % pybase64.b64encode(data[start : start + num_bytes])


def scores_of(logits: Logits, activation: str, *, raw: bool) -> npt.NDArray[np.float32]:
    """What clients read: float32 [pairs]. The sigmoid is computed in float64 and rounded once."""
    if raw or activation == "identity":
        return logits
    assert activation == "sigmoid", f"the worker told of an activation {activation!r}: this is a bug"
    with np.errstate(over="ignore"):  # of exp(-logit): an infinity there is a score of 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def decimals(scores: npt.NDArray[np.float32]) -> list[bytes]:
    """Each as the shortest decimal that gives float32 back."""
    return orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def raw_rows(rows: Rows, encoding_format: EncodingFormat) -> bytes:
    """The bare matrix, little-endian, row after row."""
    return bytes(_octets(rows, encoding_format))


def _octets(rows: Rows, encoding_format: EncodingFormat) -> bytes | memoryview:
    """What the rows hold, one after the other; without a copy unless bits change places."""
    if encoding_format == "base64_ubinary":
        return rows.tobytes().translate(_REVERSED_BITS)
    return rows.data.cast("B")
