"""Weights from safetensors into a model's parameters, by exact name.

Promises: every parameter is filled, every tensor is used or known to be unneeded, shapes agree, all numbers are
finite; else a `ModelError` that lists what is missing and what was not expected. Nothing is ever left random.

Each file is read once into private memory, and the hash is taken of those very bytes, so what is served is what was
hashed, whatever happens to the file afterwards. Hashing, which would be half of the time, runs on a thread beside the
rest. One file is held at a time, for a moment twice: its bytes, and the tensors that the library makes of them. Parsing
without that copy was rejected: the library's checks of a hostile header are worth the memory. Whether all numbers are
finite is asked of the device once, at the end.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch

from worker.checkpoint import JsonFile, ModelError, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker.models import Model

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_LISTED = 8


def load_weights(folder: Path, model: Model) -> str:
    """Fill the parameters of `model` from the safetensors files of `folder`, converting to their dtype.

    Returns the SHA-256 over the files' contents.

    Raises:
        ModelError: no safetensors, a damaged file, a tensor missing, unknown, twice there, of another shape, not of
            floating point, or with a NaN or an infinity.
    """
    destinations = model.checkpoint_tensors()
    num_filled = sum(tensor.numel() for tensor in destinations.values())
    assert num_filled == sum(parameter.numel() for parameter in model.parameters()), "the name map misses a parameter"
    filling = _Filling(model, destinations)
    digest = hashlib.sha256()
    paths = _weight_files(folder)
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher:
        for path in paths:
            digest.update(filling.fill_from(path, hasher))
    filling.check_complete(paths)
    return digest.hexdigest()


@dataclass(slots=True)
class _Filling:
    """Which of the parameters have been filled, and with what."""

    model: Model
    destinations: dict[str, torch.Tensor]  # canonical name → (part of) a parameter
    places: dict[str, str] = field(default_factory=dict)  # canonical name → file and stored name that filled it
    extremes: list[torch.Tensor] = field(default_factory=list)  # of each of `places` two, on the device
    unexpected: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def fill_from(self, path: Path, hasher: ThreadPoolExecutor) -> bytes:
        """Fill what one file holds; returns its SHA-256."""
        content = read_file(path)
        hashed = hasher.submit(hashlib.sha256, content)
        for stored_name, tensor in _tensors(path, content):
            name = self.model.canonical_name(stored_name)
            if name is None:
                self.unused.append(stored_name)
            elif name not in self.destinations:
                self.unexpected.append(stored_name)
            elif name in self.places:
                raise ModelError(f"{path}: tensor {stored_name}: {name} is there twice.")
            else:
                self.places[name] = f"{path}: tensor {stored_name}"
                self._fill(name, tensor)
        return hashed.result().digest()

    def check_complete(self, paths: list[Path]) -> None:
        """Raises ModelError: something is missing, was not expected or is not finite. Waits for the device."""
        if len(self.places) < len(self.destinations) or self.unexpected:
            missing = sorted(set(self.destinations) - set(self.places))
            raise ModelError(
                f"{', '.join(str(path) for path in paths)}: does not fit the model. "
                f"Missing tensors: {_listed(missing)}. Unexpected tensors: {_listed(sorted(self.unexpected))}."
            )
        finite = torch.stack(self.extremes).isfinite().view(-1, 2).all(dim=1).tolist()
        for (name, place), is_finite in zip(self.places.items(), finite, strict=True):
            if not is_finite:
                raise ModelError(f"{place}: holds a NaN or an infinity in {self.destinations[name].dtype}.")
        if self.unused:
            num_unused = len(self.unused)
            logger.info("%d tensors of the checkpoint are not needed: %s", num_unused, _listed(sorted(self.unused)))

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        destination, place = self.destinations[name], self.places[name]
        if tensor.shape != destination.shape:
            raise ModelError(f"{place}: shape {list(tensor.shape)}, but the model needs {list(destination.shape)}.")
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{place}: dtype {tensor.dtype} is not supported.")
        destination.copy_(tensor)
        # Of the converted numbers: that may overflow. Smallest and largest are finite if and only if all are, since a
        # NaN is both: 5 times as fast on a CPU as a sum in float64, 15 times as isfinite.
        self.extremes.extend(torch.aminmax(destination))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.onnx") for path in folder.glob(pattern))
        found = f" (found {', '.join(others)}, which is not read)" if others else ""
        raise ModelError(f"{folder / _SINGLE} is missing: only safetensors weights are read{found}.")
    index = JsonFile.read(folder / _INDEX)
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        index.refuse("weight_map", "a map of tensor names to files is needed.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if PurePosixPath(name).name != name:
            index.refuse("weight_map", f"{name!r} is not a file name.")
    return [folder / name for name in names]


def _tensors(path: Path, content: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        tensors = safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    for name in sorted(tensors):  # the library's order differs from run to run
        yield name, tensors.pop(name)


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
