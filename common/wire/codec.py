"""A message as frames, and frames as a message. No I/O.

A message is a list of frames: a header, then one frame for each array.

    [ msgpack array: kind, scalar, scalar …, [shape, shape …] ] [ raw array ] [ raw array ] …

Arrays are raw little-endian buffers, never msgpack lists: 64 texts of 100 tokens take 2 µs each way instead of 95 to
119 µs. The last arrays of a message are empty by default. If all of these are empty, none is sent.

Nothing is ever unpickled. `decode` bounds every length before it allocates and checks the type of every scalar. The
only error that a peer's bytes can raise is `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt

from common.errors import ProtocolError, VersionMismatch
from common.wire.messages import (
    MAX_INT32,
    MAX_LABELS_BYTES,
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Join,
    ModelFacts,
    Ping,
    Refuse,
    Reply,
    Request,
    Result,
    StepTimes,
    Trace,
    Welcome,
    labels_bytes,
)
from common.wire.packing import Replies, Requests
from common.wire.rows import MAX_FRAME_BYTES

# A header is a few hundred bytes; the largest, Hello, carries prompts and labels. Each byte of a hostile header may be
# an empty list, which takes 72 bytes of memory. So a header longer than a plain one may have a limited number of lists
# and maps (Hello has eight) and of elements in each. Any header is read or refused in milliseconds, with 3 MiB at most.
MAX_HEADER_BYTES = 64 * 1024
_PLAIN_HEADER_BYTES = 2 * 1024
_MAX_CONTAINERS = 32
_MAX_ELEMENTS = 12 * 1024
MAX_FRAMES = 10

# An array up to this size is copied into a frame of its own rather than sent from where it is.
_COPIED_BYTES = 32 * 1024

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
        raise VersionMismatch(header[1])  # before any other field, which another version may have not
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


def _array(dtype: np.dtype[Any], ndim: int, shape: object, frame: Frame) -> npt.NDArray[Any]:
    """Raises TypeError or ValueError: this is no shape, or not that of the bytes."""
    if not isinstance(shape, list) or len(shape) != ndim:
        raise TypeError(f"needs {ndim} axes")
    size = dtype.itemsize
    for extent in shape:
        # The upper bound matters beside an axis of 0. Any extent then gives the right size, but numpy fails on a huge
        # one.
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
    raise ValueError("extension types do not travel")  # each would make a Python object and take a microsecond


def _pack(header: list[object]) -> bytes:
    packed: bytes = msgpack.packb(header, default=_pack_facts)
    assert len(packed) <= MAX_HEADER_BYTES, "this header is too large for any peer"
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
    if not 1 <= facts.max_batch_tokens <= MAX_INT32 or not 1 <= facts.dimensions <= MAX_INT32:
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
    """The layout of a message class: scalars in the header, then arrays, each in the order of the fields."""

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
    """A function that returns the values of these attributes of an object."""
    # For a single name attrgetter returns the value itself.
    return attrgetter(*names) if len(names) > 1 else lambda message: (getattr(message, names[0]),)


# The numbers travel: append, never renumber within a protocol version.
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
