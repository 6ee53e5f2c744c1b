"""Which attention backends there are: a row each, with what the backend can do and how it is built.

A row is read before its backend is imported, since some packages take ten seconds to import and others may be missing.
So what a backend can do is data here, and its file trusts that it gets no more than that.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch

from worker.attention import Attention, AttentionUnavailable, HeadShape, flash_attention_4, flashinfer
from worker.attention.flash_attention_4 import FlashAttention4
from worker.attention.flashinfer import FlashInferAttention, Kernels
from worker.attention.reference import ReferenceAttention
from worker.attention.sdpa import SdpaAttention
from worker.attention.varlen import TorchAttention

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_FLOAT = (*_HALF, torch.float32)


@dataclass(frozen=True, slots=True)
class Backend:
    """A row. By default a backend is for plain masks in half precision on a GPU, and is measured there."""

    name: str
    build: Callable[[HeadShape, torch.device], Attention]  # raises AttentionUnavailable
    device: Literal["cuda", "cpu"] | None = "cuda"  # None: any
    hopper_only: bool = False
    dtypes: tuple[torch.dtype, ...] = _HALF
    head_dims: range | tuple[int, ...] | None = None  # None: any
    has_windows_and_biases: bool = False
    module: str | None = None  # what has to be installed, by the name that it is imported by
    requirement: str = ""  # what to install for that
    is_built: Callable[[HeadShape], bool] | None = None  # whether its kernels are compiled; None: it need not be asked
    is_default: bool = False  # what runs on its device where nothing is measured
    is_measured: bool = True  # a candidate on GPUs
    slow_to_open: bool = False  # by seconds of importing, and without touching the device
    instead: str | None = None  # a backend so nearly as fast that where it can be had, this one is not opened
    max_rows: int | None = None  # of cu_seqlens, that it is chosen for

    def unavailable(self, shape: HeadShape, device: torch.device) -> str | None:
        """Why it cannot be used at all, found without importing it; None if it can."""
        if (shape.windowed or shape.biased) and not self.has_windows_and_biases:
            return "has no windows and no biases, which this model needs"
        if self.device not in (None, device.type):
            return "is for GPUs" if self.device == "cuda" else "is for CPUs"
        if self.module is not None and (reason := _missing(self.module, self.requirement)):
            return reason
        if shape.dtype not in self.dtypes:
            *others, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"computes in {', '.join(others)} or {last}, not {shape.dtype}"
        if isinstance(self.head_dims, range) and shape.head_dim not in self.head_dims:
            return f"head_dim {shape.head_dim} is not a multiple of {self.head_dims.step} up to {self.head_dims[-1]}"
        if self.head_dims is not None and shape.head_dim not in self.head_dims:
            return f"has no kernels for head_dim {shape.head_dim}, only {self.head_dims}"
        if self.hopper_only and torch.cuda.get_device_capability(device) != (9, 0):
            return "is for Hopper GPUs"
        return None

    def unready(self, shape: HeadShape) -> str | None:
        """Why it is used only if it is asked for by name; None if it is a candidate."""
        try:
            if self.is_built is None or self.is_built(shape):
                return None
        except AttentionUnavailable as error:
            return str(error)
        return f"its kernels are not compiled; starting once with --attention {self.name} does it"

    def open(self, shape: HeadShape, device: torch.device) -> Attention:
        """Raises AttentionUnavailable: it cannot do this here, or does not load."""
        if reason := self.unavailable(shape, device):
            raise AttentionUnavailable(f"attention {self.name}: {reason}")
        try:
            attention = self.build(shape, device)
        except AttentionUnavailable as error:
            raise AttentionUnavailable(f"attention {self.name}: {error}") from error
        attention.name = self.name
        return attention


def _missing(module: str, requirement: str) -> str | None:
    try:
        if importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module):
            return None
    except ImportError as error:  # another package of this name is installed, and does not load
        return f"not installed: {requirement} ({error})"
    return f"not installed: {requirement}"


def _build_triton(shape: HeadShape, device: torch.device) -> Attention:
    from worker.attention.triton import TritonAttention  # needs triton, which a CPU's torch may lack

    return TritonAttention()


def _flashinfer(name: str, kernels: Kernels, head_dims: tuple[int, ...], *, hopper_only: bool = False) -> Backend:
    return Backend(
        name,
        lambda shape, device: FlashInferAttention(shape, device, kernels),
        hopper_only=hopper_only,
        head_dims=head_dims,
        module="flashinfer",
        requirement=flashinfer.REQUIREMENTS,
        is_built=lambda shape: flashinfer.is_built(shape, kernels),
    )


# In order of preference where they are equally fast: the fewest conditions first.
_ROWS = (
    Backend(
        "triton",
        _build_triton,
        dtypes=_FLOAT,
        has_windows_and_biases=True,
        module="triton",
        requirement="triton, which torch brings along for GPUs",
        is_default=True,
    ),
    Backend(
        "flash_attention_4",
        lambda shape, device: FlashAttention4(),
        head_dims=range(8, 257, 8),
        module="flash_attn.cute",
        requirement=flash_attention_4.REQUIREMENT,
        slow_to_open=True,
        instead="flashinfer_fa3",  # on an H200 a text of 32,768 tokens takes 423 ms with it and 422 with this one
        max_rows=flash_attention_4.MAX_ROWS,
    ),
    Backend("torch", lambda shape, device: TorchAttention(), head_dims=range(8, 257, 8)),
    _flashinfer("flashinfer_fa3", "fa3", (64, 128, 256), hopper_only=True),
    _flashinfer("flashinfer_fa2", "fa2", (32, 64, 128, 256)),
    Backend(
        "sdpa",
        lambda shape, device: SdpaAttention(),
        device="cpu",
        dtypes=_FLOAT,
        has_windows_and_biases=True,
        is_default=True,
        is_measured=False,  # there is nothing to choose among on a CPU
    ),
    Backend(
        "reference",
        lambda shape, device: ReferenceAttention(),
        device=None,
        dtypes=_FLOAT,
        has_windows_and_biases=True,
        is_measured=False,  # what the others are compared with
    ),
)

BACKENDS: Mapping[str, Backend] = MappingProxyType({row.name: row for row in _ROWS})


def find_candidates(
    backends: Mapping[str, Backend], shape: HeadShape, device: torch.device
) -> tuple[dict[str, Backend], dict[str, str]]:
    """The backends to measure that can be had without compiling for minutes, and why the others cannot."""
    candidates, missing = {}, {}
    for name, backend in backends.items():
        if not backend.is_measured:
            continue
        reason = backend.unavailable(shape, device) or backend.unready(shape)
        if reason is None:
            candidates[name] = backend
        else:
            missing[name] = reason
    for name in [name for name, backend in candidates.items() if backend.instead in candidates]:
        other = candidates.pop(name).instead
        missing[name] = f"{other} is nearly as fast and starts sooner; --attention {name} uses this one"
    return candidates, missing


def open_all(
    candidates: Mapping[str, Backend],
    shape: HeadShape,
    device: torch.device,
    meanwhile: Callable[[Mapping[str, Attention]], None] | None = None,
) -> tuple[dict[str, Attention], dict[str, str]]:
    """Those that open, and why the others do not. `meanwhile` gets the quick ones while the slow ones open."""
    opened: dict[str, Attention] = {}
    failed: dict[str, str] = {}

    def collect(name: str, opening: Callable[[], Attention]) -> None:
        started_s = time.monotonic()
        try:
            opened[name] = opening()
        except AttentionUnavailable as error:
            failed[name] = str(error)
            logger.warning("%s", error)
        logger.debug("attention: %s was opened or waited for in %.1f s", name, time.monotonic() - started_s)

    with ThreadPoolExecutor(1, "attention-import") as thread:
        slow = {
            name: thread.submit(backend.open, shape, device)
            for name, backend in candidates.items()
            if backend.slow_to_open
        }
        for name, backend in candidates.items():
            if not backend.slow_to_open:
                collect(name, partial(backend.open, shape, device))
        if meanwhile is not None:
            started_s = time.monotonic()
            meanwhile(dict(opened))
            logger.debug("attention: the quick ones were warmed up in %.1f s", time.monotonic() - started_s)
        for name, future in slow.items():
            collect(name, future.result)
    return {name: opened[name] for name in candidates if name in opened}, failed
