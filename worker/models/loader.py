"""Weights from safetensors into a model's parameters, by exact name.

Promises: every parameter is filled, every tensor is used or known to be unneeded, shapes agree, and all numbers are
finite. Otherwise a `ModelError` lists what is missing and what was not expected. Nothing is ever left random.

Each file is opened once and read once, from start to end, piece by piece into private memory. Those very bytes are
hashed, so the weights that are served are the ones hashed, whatever happens to the file. Besides the parameters no more
than two pieces are in memory: one is copied while a thread hashes the other, since hashing takes half of the time.
Rejected: reading whole files, which holds each twice, as bytes and as the library's tensors. The device is asked once,
at the end, whether all numbers are finite.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from worker.checkpoint.files import ModelError
from worker.checkpoint.weights import FLOAT_DTYPES, StoredTensor, WeightFile, fit, listed, open_weights

if TYPE_CHECKING:
    from torch import nn

    from worker.checkpoint.weights import CanonicalName, Fit, Weights
    from worker.models.interface import Model

logger = logging.getLogger(__name__)

# Small enough to stay in a CPU's cache: 1, 4 and 16 MiB load at the same speed, 64 MiB takes half as long again.
_PIECE_BYTES = 4 * 1024 * 1024


def load_weights(folder: Path, model: Model) -> str:
    """Fill the parameters of `model` from the safetensors files of `folder`, converting to their dtype.

    Returns the SHA-256 over the files' contents.

    Raises:
        ModelError: no safetensors, a damaged file, a tensor missing, unknown, twice there, of another shape, not of
            floating point, or with a NaN or an infinity.
    """
    return _load(folder, model, model.checkpoint_tensors(), model.canonical_name)


def check_weights(folder: Path, model: Model) -> None:
    """Check by their headers that the files of `folder` hold what `model` needs.

    For a model on torch's meta device. A size in config.json that no machine has the memory for is refused in the words
    of `load_weights`, before memory is asked for.

    Raises:
        ModelError: as `load_weights`, but for numbers that are not finite.
    """
    with open_weights(folder) as weights:
        _fit(weights, model.checkpoint_tensors(), model.canonical_name)


def load_stage(folder: Path, stage: nn.Module) -> str:
    """As `load_weights`, for a module that follows the pooling. Its tensors have the names of its parameters."""
    return _load(folder, stage, dict(stage.named_parameters()), lambda name: name)


def _load(
    folder: Path, module: Model | nn.Module, destinations: dict[str, torch.Tensor], canonical_name: CanonicalName
) -> str:
    num_filled = sum(tensor.numel() for tensor in destinations.values())
    assert num_filled == sum(parameter.numel() for parameter in module.parameters()), "the name map misses a parameter"
    digest = hashlib.sha256()
    with open_weights(folder) as weights, ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher:
        fitted = _fit(weights, destinations, canonical_name)
        filling = _Filling(destinations, fitted.filled, {file.path: file for file in weights.files})
        for file in weights.files:
            digest.update(filling.fill_from(file, hasher))
        filling.check_finite()
    if fitted.wrapper:
        logger.info("%s: taken off the front of all names: %s", weights.source, fitted.wrapper)
    if fitted.unused:
        names = [tensor.name for tensor in fitted.unused]
        logger.info("%d tensors of the checkpoint are not needed: %s", len(names), listed(names))
    return digest.hexdigest()


def _fit(weights: Weights, destinations: dict[str, torch.Tensor], canonical_name: CanonicalName) -> Fit:
    fitted = fit(weights, {name: tuple(tensor.shape) for name, tensor in destinations.items()}, canonical_name)
    if fitted.problems:
        raise ModelError(fitted.problems[0])
    return fitted


@dataclass(slots=True)
class _Filling:
    """Which tensor fills which parameter, and the extremes of the numbers copied so far."""

    destinations: dict[str, torch.Tensor]  # canonical name → (part of) a parameter
    filled: dict[str, StoredTensor]  # canonical name → what fills it
    files: dict[Path, WeightFile]
    pieces: list[str] = field(default_factory=list)  # canonical names, one for each piece that was copied
    extremes: list[torch.Tensor] = field(default_factory=list)  # two for each of `pieces`, on the device

    def fill_from(self, file: WeightFile, hasher: ThreadPoolExecutor) -> bytes:
        """Fill what one file holds; returns its SHA-256."""
        reader = _Reader(file, hasher)
        uses: dict[str, list[str]] = {}
        for name, stored in self.filled.items():
            if stored.path == file.path:
                uses.setdefault(stored.name, []).append(name)
        for stored in file.tensors.values():
            for rows, piece in reader.pieces(stored):
                for name in uses.get(stored.name, ()):
                    self._fill(name, rows, piece.view(_torch_dtype(stored)))
        return reader.digest()

    def check_finite(self) -> None:
        """Raises ModelError: some number is not finite. Waits for the device; the files must still be open."""
        finite = torch.stack(self.extremes).isfinite().view(-1, 2).all(dim=1).tolist()
        for name, is_finite in zip(self.pieces, finite, strict=True):
            if is_finite:
                continue
            stored, dtype = self.filled[name], str(self.destinations[name].dtype).removeprefix("torch.")
            if _is_finite(self.files[stored.path], stored):
                raise ModelError(f"{stored.place}: holds a number too large for {dtype}; choose another --dtype.")
            raise ModelError(f"{stored.place}: holds a NaN or an infinity.")

    def _fill(self, name: str, rows: slice, piece: torch.Tensor) -> None:
        destination = torch.atleast_1d(self.destinations[name])[rows]
        destination.copy_(piece.view(destination.shape))
        # The converted numbers are checked, since converting may overflow. All are finite if and only if the smallest
        # and the largest are, since a NaN is both. On a CPU it is 5 times as fast as a sum in float64, 15 times as
        # fast as isfinite.
        self.extremes.extend(torch.aminmax(destination))
        self.pieces.append(name)


class _Reader:
    """Reads a file from start to end in pieces, which a thread hashes while they are used."""

    def __init__(self, file: WeightFile, hasher: ThreadPoolExecutor) -> None:
        self._file = file
        self._hasher = hasher
        self._hash = hashlib.sha256(file.header)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._hashed: list[Future[None] | None] = [None, None]  # for the piece in each buffer
        self._turn = 0

    def pieces(self, stored: StoredTensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Whole rows of the tensor that comes next, and where they lie in it.

        Each piece is uint8 [bytes], and to be used before the next one is asked for.
        """
        if not stored.num_bytes:
            return
        num_rows = stored.shape[0] if stored.shape else 1
        row_bytes = stored.num_bytes // num_rows
        rows_per_piece = max(1, _PIECE_BYTES // row_bytes)
        for start in range(0, num_rows, rows_per_piece):
            rows = slice(start, min(start + rows_per_piece, num_rows))
            yield rows, self._read((rows.stop - rows.start) * row_bytes)

    def digest(self) -> bytes:
        """SHA-256 of all bytes read, the header included."""
        self._wait(0)
        self._wait(1)
        return self._hash.digest()

    def _read(self, num_bytes: int) -> torch.Tensor:
        self._turn = 1 - self._turn
        self._wait(self._turn)
        if len(self._buffers[self._turn]) < num_bytes:
            self._buffers[self._turn] = torch.empty(max(num_bytes, _PIECE_BYTES), dtype=torch.uint8)
        piece = self._buffers[self._turn][:num_bytes]
        content = piece.numpy().data
        self._file.read_into(content)
        self._hashed[self._turn] = self._hasher.submit(self._hash.update, content)
        return piece

    def _wait(self, turn: int) -> None:
        hashed = self._hashed[turn]
        if hashed is not None:
            hashed.result()


def _is_finite(file: WeightFile, stored: StoredTensor) -> bool:
    """Whether all numbers are, as they are stored."""
    content = bytearray(stored.num_bytes)
    file.stream.seek(stored.start)
    file.read_into(memoryview(content))
    numbers = torch.frombuffer(content, dtype=_torch_dtype(stored))
    return bool(torch.stack(torch.aminmax(numbers)).isfinite().all())


def _torch_dtype(stored: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, FLOAT_DTYPES[stored.dtype])
    return dtype
