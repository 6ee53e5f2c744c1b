"""Weights from safetensors into a model's parameters, by exact name.

Promises: every parameter is filled, every tensor is used or known to be unneeded, shapes agree, all numbers are
finite; else a `ModelError` that lists what is missing and what was not expected. Nothing is ever left random.

Each file is read once into private memory, and the hash is taken of those very bytes, so what is served is what was
hashed, whatever happens to the file afterwards.
"""

from __future__ import annotations

import hashlib
import logging
import math
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
    missing = set(destinations)
    unexpected: list[str] = []
    unused: list[str] = []
    digest = hashlib.sha256()
    paths = _weight_files(folder)
    for path in paths:
        content = read_file(path)
        digest.update(hashlib.sha256(content).digest())
        for stored_name, tensor in _tensors(path, content):
            name = model.canonical_name(stored_name)
            if name is None:
                unused.append(stored_name)
            elif name not in destinations:
                unexpected.append(stored_name)
            elif name not in missing:
                raise ModelError(f"{path}: tensor {stored_name}: {name} is there twice.")
            else:
                missing.remove(name)
                _fill(destinations[name], tensor, f"{path}: tensor {stored_name}")
    if missing or unexpected:
        raise ModelError(
            f"{', '.join(str(path) for path in paths)}: does not fit the model. "
            f"Missing tensors: {_listed(sorted(missing))}. Unexpected tensors: {_listed(sorted(unexpected))}."
        )
    if unused:
        logger.info("%d tensors of the checkpoint are not needed: %s", len(unused), _listed(sorted(unused)))
    return digest.hexdigest()


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
    yield from sorted(tensors.items())  # the library's order differs from run to run


def _fill(destination: torch.Tensor, tensor: torch.Tensor, place: str) -> None:
    if tensor.shape != destination.shape:
        raise ModelError(f"{place}: shape {list(tensor.shape)}, but the model needs {list(destination.shape)}.")
    if tensor.dtype not in _DTYPES:
        raise ModelError(f"{place}: dtype {tensor.dtype} is not supported.")
    destination.copy_(tensor)
    # Looked for after the conversion, which may overflow. A sum is finite if all numbers are; isfinite is 5 x slower.
    if not math.isfinite(float(destination.sum(dtype=torch.float64))):
        raise ModelError(f"{place}: holds a NaN or an infinity in {destination.dtype}.")


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
