"""Kernels compiled side by side at the very start, before they are needed one after the other.

Triton takes about a second to compile a kernel, and a model needs some thirty. One after the other they would be most
of a first start. So steps of every kind that selects other kernels run here, on a thread of their own, while the
weights are read. Their launches are compiled instead of run (`worker.kernels.launch`), as many at a time as there are
processors. Nearly all of the compiling is done without the interpreter's lock. Other results of such a step are thrown
away. Later starts find the kernels in Triton's cache, and finish here before the weights are read.

Rejected: launching such steps from several threads, which meet at the same kernels and wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.batch.capacity import Capacity, HostArrays, worked_out

if TYPE_CHECKING:
    from worker.models.interface import Model
    from worker.models.output import Output

logger = logging.getLogger(__name__)

# Tokens and rows: one step of each kind that `worker.kernels.linear` and `worker.attention.triton` distinguish. The
# largest come first, since their kernels take longest to compile.
_STEPS = ((4096, 512), (4096, 8), (2048, 8), (1024, 8), (512, 32), (256, 8), (128, 8), (64, 8))

_load = attrgetter("run")  # reading it makes a compiled kernel's launcher and loads the binary


class Precompilation:
    """Runs beside the rest of the start. Wait for it before a step runs or anything is timed."""

    def __init__(self, device: torch.device) -> None:
        """Begins to open the compiler. `device` is the current one."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._num_threads = torch.get_num_threads()  # this worker's part of the processors
        self._thread = ThreadPoolExecutor(1, "precompile")  # both parts, one after the other
        self._parts = [self._thread.submit(self._open)]

    def start(self, model: Model, output: Output) -> None:
        """Begin to compile. Parameters may be filled meanwhile, since their numbers do not matter."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._parts.append(self._thread.submit(self._run, model, output))

    def wait(self) -> None:
        for part in self._parts:
            if error := part.exception():
                # The same step will fail again when it matters, and say so.
                logger.debug("kernels could not be compiled ahead", exc_info=error)
        self._thread.shutdown()
        self._stream.synchronize()
        torch.cuda.empty_cache()

    def _open(self) -> None:
        from worker.kernels.launch import open_compiler  # brings Triton, which only a GPU needs

        torch.cuda.set_device(self._device)
        open_compiler()

    @torch.inference_mode()
    def _run(self, model: Model, output: Output) -> None:
        from worker.attention.triton import TritonAttention
        from worker.kernels.launch import compiling
        from worker.kernels.step import fetch, publish

        started_s = time.monotonic()
        attention = TritonAttention()
        with (
            _Compilers(self._num_threads, self._device) as compilers,
            torch.cuda.stream(self._stream),
            compiling(compilers),
        ):
            for tokens, rows in _STEPS:
                capacity = Capacity(tokens, rows, types=model.shape.has_token_types)
                words = np.zeros(capacity.host_words, dtype=np.int32)
                HostArrays(capacity, words).fill(None)
                block = torch.from_numpy(worked_out(words, capacity)).to(self._device)
                ragged = capacity.views(block, attention, capacity.tokens)
                fetch(block.view(1, -1), block, block, capacity)
                publish(output(model(ragged), ragged), block, block)
            found_s = time.monotonic()
        logger.debug(
            "%d kernels were found in %.1f s and are ready after %.1f s",
            compilers.num_kernels,
            found_s - started_s,
            time.monotonic() - started_s,
        )


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel and make it ready to be launched."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        super().__init__(num_threads, "compile", lambda: torch.cuda.set_device(device))
        self.num_kernels = 0

    def submit(self, compile_kernel: Callable[[], object], /) -> Future[object]:  # type: ignore[override]  # all it is for
        self.num_kernels += 1
        return super().submit(_compile, compile_kernel)


def _compile(compile_kernel: Callable[[], object]) -> object:
    kernel = compile_kernel()
    _load(kernel)
    return kernel
