"""A result that is not there yet.

`step` launches work and returns at once; the caller prepares the next batch and reads this one when it is needed. The
copy to the host runs on a stream of its own, behind an event, so that the compute stream goes on with the next step.
On a CPU the result is there from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class LazyTensor:
    """Rows on their way from the device. Belongs to the thread that started it."""

    def __init__(self, source: torch.Tensor, destination: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        # The source is held until the copy is done: else its memory would be given to the next step.
        self._source: torch.Tensor | None = source
        self._destination = destination
        self._copied = copied

    @classmethod
    def start(cls, rows: torch.Tensor, copy_stream: torch.cuda.Stream | None) -> LazyTensor:
        """Begin to copy `rows` to the host: float32 [sequences, dimensions], contiguous, made by the current stream.

        `copy_stream` is needed for a CUDA tensor, and None for one that is on the host already.
        """
        assert rows.dtype == torch.float32
        assert rows.dim() == 2
        assert rows.is_contiguous()
        assert rows.is_cuda == (copy_stream is not None)
        if copy_stream is None:
            return cls(rows, rows, None)
        destination = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        copy_stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(copy_stream):
            destination.copy_(rows, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's gap
            copied.record(copy_stream)
        return cls(rows, destination, copied)

    def ready(self) -> bool:
        """Whether `numpy` would return without waiting."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]  # torch's gap

    def numpy(self) -> npt.NDArray[np.float32]:
        """The rows on the host, float32 [sequences, dimensions]; waits for them.

        Raises:
            RuntimeError: the device failed in a kernel that the step launched.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._source = None
        return self._destination.numpy()
