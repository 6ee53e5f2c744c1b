"""Kernels compiled side by side at the very start, before one after the other is needed.

Triton takes half a second or more to compile a kernel and a model needs some twenty: one after the other they are half
of a first start. It compiles without the interpreter's lock, so steps of every kind that picks other kernels run here
on threads of their own, while the weights are being read. What they compute is thrown away. Later starts find the
kernels in Triton's cache, and are through with this before the weights are there.

The threads launch on one stream: some kernels share counters that only one of them at a time may use.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.ragged import Capacity, HostArrays

if TYPE_CHECKING:
    from worker.models import Model
    from worker.output import Output

logger = logging.getLogger(__name__)

# Tokens and rows: one of each kind that `worker.kernels.linear` and `worker.attention.triton` tell apart.
_STEPS = ((64, 8), (128, 8), (256, 8), (512, 32), (1024, 8), (2048, 8), (4096, 8), (4096, 512))


class Precompilation:
    """Runs beside whatever comes next. To be waited for before a step runs or anything is timed."""

    def __init__(self, model: Model, output: Output, device: torch.device) -> None:
        """Parameters may be filled meanwhile: any number will do."""
        self._started_s = time.monotonic()
        self._model = model
        self._output = output
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._threads = ThreadPoolExecutor(len(_STEPS), thread_name_prefix="precompile")
        self._steps: list[Future[None]] = [
            self._threads.submit(self._run, Capacity(tokens, rows, types=model.has_token_types))
            for tokens, rows in _STEPS
        ]

    def wait(self) -> None:
        for step in self._steps:
            if error := step.exception():
                # Whatever it is, the same step will say it again where it matters.
                logger.debug("a step failed while its kernels were compiled", exc_info=error)
        self._threads.shutdown()
        self._stream.synchronize()
        torch.cuda.empty_cache()
        logger.debug("kernels were compiled or found in %.1f s", time.monotonic() - self._started_s)

    @torch.inference_mode()
    def _run(self, capacity: Capacity) -> None:
        from worker.attention.triton import TritonAttention

        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            words = np.zeros(capacity.num_words, dtype=np.int32)
            HostArrays(capacity, words).fill(None)
            block = torch.from_numpy(words).to(self._device)
            ragged = capacity.views(block, TritonAttention(), capacity.tokens)
            self._output(self._model(ragged), ragged)
