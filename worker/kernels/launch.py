"""What every launch of a kernel shares: it can be compiled instead, and it may start before the previous kernel has
ended.

A thread can have its launches compiled instead of run (`compiling`). The same call does both, so a later launch with
such arguments finds the compiled kernel.

A step of a small batch is a chain of some 250 short kernels, and the gap between two of them is as long as the kernels.
With programmatic dependent launch, a kernel's programs start while the previous kernel still runs. They wait at
`gdc_wait` until it has ended and everything it wrote can be seen. Three rules make this safe:

1. Every program of every kernel calls `gdc_wait` once, before it reads or writes anything that another kernel writes.
   The previous kernel has itself waited, so the end of one kernel means the end of all before it.
2. Before `gdc_wait` a program may read only what no kernel of a step writes: weights, tables, the batch's own integers.
3. The kernel that writes a step's inputs (`step.fetch`) does not start early, and no kernel starts early behind it. The
   next kernel (`embedding.py`) lets its own successor start only after its own wait. So the inputs are written, and can
   be seen, before any later kernel of the step starts. Rule 2 relies on that.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from concurrent.futures import Executor

    from triton.runtime import JITFunction

# The first compute capability that has `griddepcontrol` (Hopper).
_FIRST_CAPABILITY = 9

# The launches that a compiling thread has seen, so that those of 28 layers cost as much as those of one.
_seen: ContextVar[set[Hashable] | None] = ContextVar("_seen", default=None)


@triton.jit
def _nothing() -> None:
    pass


def open_compiler() -> None:
    """Have at hand what compiling any kernel begins with: Triton's driver, made by the C compiler in a first start, the
    release of its assembler, and a hash over its own files, 0.4 GB."""
    _nothing.warmup(grid=(1,))


def launch(kernel: JITFunction, grid: tuple[int, ...], /, *arguments: object, **options: object) -> None:
    """Launch a kernel with these arguments, its constants and Triton's options among them, on the current stream."""
    seen = _seen.get()
    if seen is None:
        kernel[grid](*arguments, **options)
        return
    kind = (id(kernel), *map(_kind, arguments), *((name, _kind(value)) for name, value in options.items()))
    if kind not in seen:
        seen.add(kind)
        kernel.warmup(*arguments, grid=grid, **options)


@contextmanager
def compiling(executor: Executor) -> Iterator[None]:
    """What this thread launches meanwhile is not launched but compiled by the executor, once for all that are alike; it
    ends when all are compiled. What does not compile says so when it is launched."""
    with triton.AsyncCompileMode(executor, ignore_errors=True):
        token = _seen.set(set())
        try:
            yield
        finally:
            _seen.reset(token)


def _kind(argument: object) -> Hashable:
    """A key for an argument, at least as fine as what Triton specialises on: dtype and alignment of a tensor."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a descriptor of blocks, Triton's or Gluon's
        layout = str(getattr(argument, "layout", None))
        return _kind(argument.base), tuple(argument.shape), tuple(argument.strides), tuple(argument.block_shape), layout
    return argument  # type: ignore[return-value]  # a number, a text or None


def pdl_options(tensor: torch.Tensor) -> Mapping[str, bool]:
    """Keywords for a launch on the tensor's device: the kernel's constexpr `PDL`, and Triton's option where it is true.

    A kernel with `PDL` calls `tl.extra.cuda.gdc_wait` and `gdc_launch_dependents`; elsewhere, and in Triton's
    interpreter, which runs on CPU tensors and knows neither, it runs without.
    """
    if tensor.is_cuda and _has_pdl(tensor.get_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache  # a fact about the hardware; asking costs more than a launch
def _has_pdl(device_index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index)[0] >= _FIRST_CAPABILITY
