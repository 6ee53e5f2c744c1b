"""Which files hold a model's weights, what their headers say of each tensor, and how those fit a model.

Nothing here reads the numbers, and torch is not needed: that a tensor is missing, unknown or of another shape is said
before the first gigabyte is read, and in the same words by `hedgerow inspect`.

A file is opened once, as a stream, and never mapped: a file that is truncated under a reader of its map kills the
reader (SIGBUS). Its header is read here and not by the library, which wants the whole file in memory and copies it
once more; the checks are the library's and stricter, and a test compares the two on damaged headers.

Source of the format: huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import BinaryIO, NoReturn, TypeAlias

from worker.checkpoint.files import JsonFile, ModelError

Shape: TypeAlias = tuple[int, ...]
CanonicalName: TypeAlias = Callable[[str], str | None]  # as `Model.canonical_name`

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
_PYTORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_MAX_LISTED = 8

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library's limit too
_MAX_DIMENSIONS = 32  # of a shape; no more than a few are in use

# What the format calls a type of numbers, and how many bytes one takes.
_DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
        "C64": 8,
    }
)

# What parameters are filled from. Integers would have to be scaled by something that no name tells of.
FLOAT_DTYPES: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, as the header declares it."""

    path: Path
    name: str
    dtype: str  # the format's name, such as F32
    shape: Shape
    start: int  # byte of the file
    num_bytes: int

    @property
    def place(self) -> str:
        """How errors name it."""
        return f"{self.path}: tensor {self.name}"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file whose header has been read and checked; `stream` stands at the first tensor."""

    path: Path
    stream: BinaryIO
    size_bytes: int
    header: bytes  # all that lies before the first tensor
    tensors: dict[str, StoredTensor]  # in the order of their bytes, without gaps, to the end of the file
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> WeightFile:
        """Close `stream` when done.

        Raises:
            ModelError: missing, not a regular file, not readable, or damaged.
        """
        stream = _open_regular(path)
        try:
            return _read_header(path, stream)
        except BaseException:
            stream.close()
            raise

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer with the bytes that come next.

        Raises:
            ModelError: the file ends before, since it was cut short after it was opened, or cannot be read.
        """
        _read_into(self.path, self.stream, buffer)


@dataclass(frozen=True, slots=True)
class Weights:
    """The files of a folder, all of them open."""

    source: Path  # what lists the tensors: the one file, or the index
    files: list[WeightFile]


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """The weights of a folder: one file, or several that an index names. Closed at the end.

    Raises:
        ModelError: no safetensors, a file that is missing or damaged, or an index that does not describe its files.
    """
    with contextlib.ExitStack() as stack:
        if (folder / _SINGLE).exists():
            file = WeightFile.open(folder / _SINGLE)
            stack.enter_context(file.stream)
            yield Weights(file.path, [file])
            return
        if not (folder / _INDEX).exists():
            _refuse_without_safetensors(folder)
        index = JsonFile.read(folder / _INDEX)
        weight_map = _read_weight_map(index)
        files = []
        for name in sorted(set(weight_map.values())):
            files.append(WeightFile.open(folder / name))
            stack.enter_context(files[-1].stream)
        _check_index(index, weight_map, files)
        yield Weights(index.path, files)


@dataclass(frozen=True, slots=True)
class Fit:
    """Which stored tensor fills what, and what does not fit."""

    filled: dict[str, StoredTensor]  # canonical name → what fills it; one may fill two
    unused: list[StoredTensor]  # known and not needed
    wrapper: str  # what was taken off the front of all names, with its last dot
    problems: list[str]  # why these weights cannot be loaded; none if they can


def fit(weights: Weights, shapes: Mapping[str, Shape], canonical_name: CanonicalName) -> Fit:
    """Match the stored tensors with those that a model needs, by exact name; its `Model.canonical_name` says which.

    Names may carry what a wrapper around the model has put before all of them (`_orig_mod.` of torch.compile,
    `0.auto_model.` of sentence-transformers): it is taken off, whatever it is, if without it the names are the model's.
    """
    stored = [tensor for file in weights.files for tensor in file.tensors.values()]
    wrapper = _wrapper([tensor.name for tensor in stored], shapes, canonical_name)
    filled: dict[str, StoredTensor] = {}
    unused: list[StoredTensor] = []
    unexpected: list[StoredTensor] = []
    problems: list[str] = []
    for tensor in sorted(stored, key=lambda tensor: tensor.name):
        name = canonical_name(tensor.name.removeprefix(wrapper))
        if name is None:
            unused.append(tensor)
        elif name not in shapes:
            unexpected.append(tensor)
        elif name in filled:
            problems.append(f"{tensor.place}: {name} is there twice, also as {filled[name].name}.")
        else:
            filled[name] = tensor
    for name, tensor in _shared(weights, wrapper, canonical_name):
        if name in shapes and name not in filled:
            filled[name] = tensor
            unexpected = [other for other in unexpected if other is not tensor]
            unused = [other for other in unused if other is not tensor]
    problems += [problem for name, tensor in filled.items() for problem in _misfit(tensor, shapes[name])]
    missing = sorted(set(shapes) - set(filled))
    if missing or unexpected:
        problems.append(
            f"{weights.source}: does not fit the model. Missing tensors: {listed(missing)}. "
            f"Unexpected tensors: {listed([tensor.name for tensor in unexpected])}."
        )
    return Fit(filled, unused, wrapper, problems)


def listed(names: list[str]) -> str:
    """The first few names, as a text."""
    if not names:
        return "none"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _wrapper(names: list[str], needed: Mapping[str, Shape], canonical_name: CanonicalName) -> str:
    relevant = [name for name in names if canonical_name(name) is not None]
    wrapper = ""
    for part in relevant[0].split(".") if relevant else ():
        if not all(name.startswith(wrapper) for name in relevant):
            break
        if any(canonical_name(name.removeprefix(wrapper)) in needed for name in relevant):
            return wrapper
        wrapper += f"{part}."
    return ""


def _shared(weights: Weights, wrapper: str, canonical_name: CanonicalName) -> Iterator[tuple[str, StoredTensor]]:
    """Canonical names that a file says it holds under another name, and what it holds there.

    safetensors' `save_model` stores parameters that share memory (an embedding table and the head that is tied to it)
    once, under the name that is first in the alphabet, and notes in the metadata which name stands for which.
    """
    for file in weights.files:
        for absent, present in file.metadata.items():
            name = canonical_name(absent.removeprefix(wrapper))
            if name is not None and present in file.tensors:
                yield name, file.tensors[present]


def _misfit(tensor: StoredTensor, shape: Shape) -> Iterator[str]:
    if tensor.shape != shape:
        yield f"{tensor.place}: shape {list(tensor.shape)}, but the model needs {list(shape)}."
    if tensor.dtype not in FLOAT_DTYPES:
        yield f"{tensor.place}: dtype {tensor.dtype} is not supported; supported are {', '.join(FLOAT_DTYPES)}."


def _refuse_without_safetensors(folder: Path) -> NoReturn:
    others = sorted(path.name for path in folder.glob("*") if path.suffix in _OTHER_FORMATS)
    found = f" (found {listed(others)})" if others else ""
    way = _way_to_convert(folder) if any(_PYTORCH.fullmatch(name) for name in others) else ""
    raise ModelError(f"{folder / _SINGLE} is missing: only safetensors weights are read{found}.{way}")


def _way_to_convert(folder: Path) -> str:
    """How transformers writes safetensors of PyTorch's weights, or nothing where that is not known.

    By the very class that config.json names: AutoModel would leave out a head and name another class. Into another
    folder: config.json is written anew beside the weights, and nothing of the original is overwritten.
    """
    try:
        config = JsonFile.read_optional(folder / "config.json")
    except ModelError:  # the reader of the file tells it
        return ""
    architectures = config.values.get("architectures")
    if config.values.get("auto_map") or not isinstance(architectures, list) or len(architectures) != 1:
        return ""
    name = architectures[0]
    if not isinstance(name, str) or not name.isidentifier():
        return ""
    return (
        " If you trust where it comes from, write them with transformers into another folder and move the safetensors "
        f'files here: transformers.{name}.from_pretrained("{folder}").save_pretrained("{folder}-safetensors")'
    )


def _read_weight_map(index: JsonFile) -> dict[str, str]:
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        index.refuse("weight_map", "a map of tensor names to files is needed.")
    for name in weight_map.values():
        if not isinstance(name, str) or PurePosixPath(name).name != name or not name.endswith(".safetensors"):
            index.refuse("weight_map", f"{name!r} is not the name of a safetensors file.")
    return weight_map


def _check_index(index: JsonFile, weight_map: dict[str, str], files: list[WeightFile]) -> None:
    """Raises ModelError: the files hold other tensors than the index says, or one of them twice."""
    for file in files:
        for name in file.tensors:
            listed_in = weight_map.get(name)
            if listed_in is None:
                index.refuse("weight_map", f"tensor {name} of {file.path.name} is not listed.")
            if listed_in != file.path.name:
                index.refuse("weight_map", f"tensor {name} is listed in {listed_in}, but {file.path.name} holds it.")
    held = {name for file in files for name in file.tensors}
    for name, file_name in weight_map.items():
        if name not in held:
            index.refuse("weight_map", f"tensor {name} is listed in {file_name}, which does not hold it.")


def _open_regular(path: Path) -> BinaryIO:
    try:
        # Not blocking: opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path} is not a regular file.")
    return open(descriptor, "rb", buffering=0)  # the opener of a WeightFile closes it


def _read_into(path: Path, stream: BinaryIO, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        try:
            count = stream.readinto(buffer[filled:])  # type: ignore[attr-defined]  # of raw files
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
        if not count:
            raise ModelError(f"{path} is damaged: it was cut short while it was read.")
        filled += count


# --- the header ---


class _Damaged(Exception):
    """The text says in what way."""


def _read_header(path: Path, stream: BinaryIO) -> WeightFile:
    size_bytes = os.fstat(stream.fileno()).st_size
    length = bytearray(_LENGTH_BYTES)
    if size_bytes < len(length):
        raise ModelError(f"{path} is damaged: {size_bytes} bytes are too few.")
    _read_into(path, stream, memoryview(length))
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > min(_MAX_HEADER_BYTES, size_bytes - len(length)):
        raise ModelError(f"{path} is damaged: it has {size_bytes} bytes and says that {num_bytes} are its header.")
    text = bytearray(num_bytes)
    _read_into(path, stream, memoryview(text))
    try:
        tensors, metadata = _parse_header(path, bytes(text), start=len(length) + num_bytes, stop=size_bytes)
    except _Damaged as error:
        raise ModelError(f"{path} is damaged: {error}.") from None
    return WeightFile(path, stream, size_bytes, bytes(length + text), tensors, metadata)


def _parse_header(path: Path, text: bytes, start: int, stop: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors that fill the bytes from start to stop, and the metadata.

    Raises:
        _Damaged: not the JSON that the format asks for, or tensors that overlap, leave a gap, or end elsewhere.
    """
    if not text.startswith(b"{"):
        raise _Damaged("its header is not a JSON object")
    try:
        values = json.loads(text.decode(), object_pairs_hook=_object_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"its header is not JSON: {error}") from None
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Damaged("its metadata is not a map of texts")
    tensors = [_parse_tensor(path, name, value, start) for name, value in values.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    for tensor in tensors:
        if tensor.start != start:
            raise _Damaged(f"tensor {tensor.name} begins at byte {tensor.start}, but the one before ends at {start}")
        start += tensor.num_bytes
    if start != stop:
        raise _Damaged(f"its tensors end at byte {start}, the file at {stop}")
    return {tensor.name: tensor for tensor in tensors}, metadata


def _parse_tensor(path: Path, name: str, value: object, data_start: int) -> StoredTensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _Damaged(f"tensor {name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise _Damaged(f"tensor {name} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        raise _Damaged(f"tensor {name} has no valid shape and data_offsets")
    num_bytes = _DTYPE_BYTES[dtype]
    for size in shape:
        num_bytes *= size
    begin, end = offsets
    if end - begin != num_bytes:
        raise _Damaged(f"tensor {name} takes {num_bytes} bytes, but has {end - begin}")
    return StoredTensor(path, name, dtype, tuple(shape), data_start + begin, num_bytes)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _object_without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is there twice")
    return values
