"""The formats of vectors and scores, and how they are written, on every route that returns some. No I/O.

`float` and `base64` are float32 for every model. The quantised formats need a model that declares a quantiser. They are
made from the pooled vector before any normalisation, so `normalize` with one of them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from common.errors import NonfiniteOutput
from gateway.open_request import Rows

Logits = npt.NDArray[np.float32]  # [pairs], or [pairs, labels]

# The values of `encoding_format`, as OpenAI's and Perplexity's clients send it.
EncodingFormat = Literal["float", "base64", "base64_int8", "base64_binary", "base64_ubinary"]

# The types of a vector's numbers, as Cohere's and Voyage's clients name them.
Dtype = Literal["float", "int8", "uint8", "binary", "ubinary"]

# All ways to write a row: a Dtype is a list of numbers, the others are base64. `binary`, `ubinary` and
# `base64_signed_binary` (`binary` in base64) have the first dimension in a byte's highest bit; Perplexity's
# `base64_binary` has it in the lowest bit.
RowFormat = Literal[
    "float",
    "base64",
    "base64_int8",
    "base64_binary",
    "base64_ubinary",
    "int8",
    "uint8",
    "binary",
    "ubinary",
    "base64_uint8",
    "base64_signed_binary",
]

# The encoding (see common/wire/rows.py) that the worker returns for each format.
ENCODINGS: dict[RowFormat, str] = {
    "float": "float32",
    "base64": "float32",
    "base64_int8": "int8",
    "base64_binary": "binary",
    "base64_ubinary": "binary",
    "int8": "int8",
    "uint8": "int8",
    "binary": "binary",
    "ubinary": "binary",
    "base64_uint8": "int8",
    "base64_signed_binary": "binary",
}

# The format that writes a type's numbers in base64.
IN_BASE64: dict[Dtype, RowFormat] = {
    "float": "base64",
    "int8": "base64_int8",
    "uint8": "base64_uint8",
    "binary": "base64_signed_binary",
    "ubinary": "base64_ubinary",
}

OCTETS = "application/octet-stream"

_WEIGHT = re.compile(r"0(\.\d*)?|1(\.0*)?")  # the `q` of a media range

_NUMBERS: tuple[Dtype, ...] = get_args(Dtype)

# Rows have the first dimension in a byte's lowest bit; this table moves it to the highest.
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

_HIGHEST_BIT = np.uint8(0x80)  # flipping it adds or subtracts 128


def prefers_octets(accept: Sequence[str]) -> bool:
    """Whether these `Accept` headers rank application/octet-stream above JSON, which is the default."""
    if all(header == "*/*" for header in accept):  # the usual case
        return False
    weights = dict(_media_range(text) for header in accept for text in header.split(","))

    def weight_of(media_type: str) -> float:
        # The most specific range that contains the type counts.
        ranges = (media_type, "application/*", "*/*")
        return next((weights[one] for one in ranges if one in weights), 0.0)

    return weight_of(OCTETS) > weight_of("application/json")


def check_finite(rows: Rows, name_of: Callable[[int], str]) -> None:
    """Raises NonfiniteOutput if a row has a NaN or an infinity; `name_of` names the first such row."""
    if rows.dtype.kind != "f":
        return
    finite = np.isfinite(rows)
    if not finite.all():
        name = name_of(int(np.argmin(finite.all(axis=1))))
        raise NonfiniteOutput(f"The model returned a NaN or an infinity for {name}.", param=name)


def json_rows(rows: Rows, row_format: RowFormat) -> Iterator[bytes]:
    """Write each row as JSON. Floats are the shortest decimals that parse to the same float32.

    Rows are written one at a time, because the JSON writer holds the interpreter's lock during a call: a large matrix
    in one call would stop the event loop, even from another thread.
    """
    rows = as_written(rows, row_format)
    if row_format in _NUMBERS:
        for row in rows:
            yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    else:
        data = rows.data.cast("B")
        num_bytes = len(data) // len(rows)
        for start in range(0, len(data), num_bytes):
            yield b'"%b"' % pybase64.b64encode(data[start : start + num_bytes])


def list_pieces(elements: Iterable[bytes]) -> list[bytes]:
    """A JSON list of these elements, in pieces that the caller joins with the text around them.

    `bytes.join` releases the interpreter's lock while it copies megabytes, and formatting into b"[%b]" does not: that
    would stop the event loop, even from another thread.
    """
    pieces = [b"["]
    for element in elements:
        pieces += (element, b",")
    if len(pieces) == 1:
        return [b"[]"]
    pieces[-1] = b"]"
    return pieces


def json_list(elements: Iterable[bytes]) -> bytes:
    """A JSON list of these elements, copied once; see `list_pieces`."""
    return b"".join(list_pieces(elements))


def scores_of(logits: Logits, activation: str, *, raw: bool) -> npt.NDArray[np.float32]:
    """The scores that clients read: float32 [pairs]. The sigmoid is computed in float64 and rounded once."""
    if raw or activation == "identity":
        return logits
    assert activation == "sigmoid", f"the worker declares an activation {activation!r}: this is a bug"
    with np.errstate(over="ignore"):  # exp(-logit) may overflow to infinity, which gives a score of 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def probabilities_of(logits: Logits) -> npt.NDArray[np.float32]:
    """The softmax over the labels of each row: float32 [rows, labels], computed in float64 and rounded once."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)


def decimals(scores: npt.NDArray[np.float32]) -> list[bytes]:
    """Each score as the shortest decimal that parses to the same float32."""
    return orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def as_written(rows: Rows, row_format: RowFormat) -> Rows:
    """Rows of a format's encoding, as the format writes their bytes; most formats leave them unchanged.

    uint8 is int8 plus 128. `ubinary` moves the first of eight dimensions from a byte's lowest bit to its highest, and
    `binary` is `ubinary` minus 128. Both are what numpy.packbits and sentence-transformers produce.
    """
    if row_format in ("uint8", "base64_uint8"):
        return rows.view(np.uint8) ^ _HIGHEST_BIT
    if row_format in ("ubinary", "base64_ubinary"):
        return _highest_bit_first(rows)
    if row_format in ("binary", "base64_signed_binary"):
        return (_highest_bit_first(rows) ^ _HIGHEST_BIT).view(np.int8)
    return rows


def _media_range(text: str) -> tuple[str, float]:
    """A media range of `Accept` and its weight, which is 0 if it is malformed."""
    media_range, *parameters = (part.strip().lower() for part in text.split(";"))
    weight = next((value.removeprefix("q=") for value in parameters if value.startswith("q=")), "1")
    return media_range, float(weight) if _WEIGHT.fullmatch(weight) else 0.0


def _highest_bit_first(rows: Rows) -> npt.NDArray[np.uint8]:
    return np.frombuffer(rows.tobytes().translate(_REVERSED_BITS), dtype=np.uint8).reshape(rows.shape)
