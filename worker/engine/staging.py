"""The way to a GPU and back: buffers that belong to steps, and one block of inputs at a fixed address.

    batch → a slot's pinned input → `fetch` → the block (fixed address: graphs read it) → forward pass
          → `publish` → the slot's device output → the slot's pinned output → LazyTensor

`fetch` and `publish` are kernels (`worker.kernels.step`), the first and the last of a step. So a captured step is one
launch. That matters because between two steps the device waits for the launching thread.

A graph is captured once and runs on any slot, so slots take turns. The kernels count turns on the device as the host
counts them here. Every step has both kernels or ends in `give_back`, which corrects the device's count after an error
between the two.

A slot is on loan to a step from its launch until its rows were read. So nothing reads a buffer while it is written:
once there are rows, the pinned input has been read. The output is copied to the host on a stream of its own. The thread
that waits for the rows launches that copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.batch.capacity import HEAD_WORDS, NEXT_SLOT, OUTPUT_ADDRESS, OUTPUT_WORDS, Capacity, HostArrays
from worker.batch.lazy import FLAG_BYTES, LazyTensor, Progress, Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.wire.messages import Batch
    from worker.engine.driver import Driver

# One slot runs, one is launched behind it, one is being filled.
_NUM_SLOTS = 3
_LEAST_OUTPUT_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    words: npt.NDArray[np.int32]  # its pinned input
    head: memoryview  # the first of them
    device_output: torch.Tensor  # uint8, grown as needed
    pinned_output: torch.Tensor  # uint8, likewise
    launched: torch.cuda.Event  # the rows are in device_output
    copied: torch.cuda.Event  # and in pinned_output
    launched_handle: int  # the same event, for the driver
    free: threading.Lock = field(default_factory=threading.Lock)  # held while the slot is on loan
    size: int = 0  # bytes of each output


class Staging:
    """For the thread that launches. Rows may be read on that thread or on one other.

    Every result has to be read. Its buffers are on loan until then, and a step waits for the one three before it.
    """

    def __init__(self, largest: Capacity, row_bytes: int, stream: torch.cuda.Stream, driver: Driver) -> None:
        """Room for any capacity with at most the words of the largest one.

        Steps run on `stream`, and their rows have `row_bytes` bytes, a multiple of 4.
        """
        from worker.kernels import step  # brings Triton, which only a GPU needs

        device = stream.device
        self._kernels = step
        self._device = device
        self._row_bytes = row_bytes
        self._stream = stream
        self._stream_handle: int = stream.cuda_stream
        self._driver = driver
        self._copy_stream = torch.cuda.Stream(device)
        self.block = torch.zeros(largest.num_words, dtype=torch.int32, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._ring = torch.zeros((_NUM_SLOTS, largest.host_words), dtype=torch.int32, pin_memory=True)
        self._turn = 0  # the slot that the next step takes
        self._slots = [self._slot(index) for index in range(_NUM_SLOTS)]

    def _slot(self, index: int) -> _Slot:
        words = self._ring[index].numpy()
        head = words[:HEAD_WORDS].data
        head[NEXT_SLOT] = (index + 1) % _NUM_SLOTS
        empty = torch.empty(0, dtype=torch.uint8)
        launched = torch.cuda.Event()
        launched.record(self._stream)  # the first record creates the event
        copied = torch.cuda.Event(blocking=True)
        return _Slot(index, words, head, empty.to(self._device), empty, launched, copied, launched.cuda_event)

    def host_views(self, capacity: Capacity) -> list[HostArrays]:
        """Views of each slot's input for a capacity, which `load` writes through. The caller keeps them."""
        return [HostArrays(capacity, slot.words) for slot in self._slots]

    def load(self, batch: Batch | None, host_views: list[HostArrays]) -> tuple[_Slot, npt.NDArray[np.int32]]:
        """Write a checked batch where the next `fetch` reads it; None: dummies alone, without rows.

        Returns its slot and its cu_seqlens on the host. Waits while the step three before is unread. `fetch`, `publish`
        and `collect` have to follow, or `give_back`.
        """
        slot = self._slots[self._turn]
        slot.free.acquire()
        try:
            size = 0 if batch is None else batch.num_rows * self._row_bytes
            if slot.size < size:
                self._grow(slot, size)
            offsets = host_views[slot.index].fill(batch)
            slot.head[OUTPUT_WORDS] = size // 4
        except BaseException:
            slot.free.release()
            raise
        self._turn = slot.head[NEXT_SLOT]
        return slot, offsets

    def _grow(self, slot: _Slot, size: int) -> None:
        """Make room for an output. The slot is on loan, so nothing reads the old buffers any more."""
        size = max(size, 2 * slot.size, _LEAST_OUTPUT_BYTES)
        device_output = torch.empty(size, dtype=torch.uint8, device=self._device)
        pinned_output = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        # Only now that both are allocated: a slot never claims room that it lacks.
        slot.device_output, slot.pinned_output, slot.size = device_output, pinned_output, size
        slot.words[OUTPUT_ADDRESS : OUTPUT_ADDRESS + 2].view(np.int64)[0] = device_output.data_ptr()

    def fetch(self, capacity: Capacity) -> None:
        """Launch the kernel that copies a loaded batch into the block."""
        self._kernels.fetch(self._ring, self._counter, self.block, capacity)

    def publish(self, output: torch.Tensor) -> None:
        """Launch the kernel that saves the rows of the batch in the block, and lets the next batch follow.

        Args:
            output: uint8 [at least the batch's rows, row_bytes], contiguous, as `pooling.finish` gives it; the next
                step may overwrite it.
        """
        assert output.shape[1] == self._row_bytes
        self._kernels.publish(output, self.block, self._counter)

    def collect(
        self,
        slot: _Slot,
        num_rows: int,
        width: Callable[[], int],
        progress: Progress | None = None,
        *,
        is_typical: bool = True,
    ) -> LazyTensor:
        """The result of the step that has been launched: `width()` bytes of each of its rows.

        `width` is called when the rows are read, off the launching thread.
        """
        self._driver.record(slot.launched_handle, self._stream_handle)

        def read() -> Rows:
            try:
                num_bytes = FLAG_BYTES + width()
                torch.cuda.set_device(self._device)  # a new thread starts out at device 0
                # Whole rows, cut on the host: to cut them on the device, torch would allocate memory there.
                size = num_rows * self._row_bytes
                if progress is not None:
                    slot.launched.synchronize()  # else only the end of the copy would be known
                    progress.computed_ns = time.monotonic_ns()
                with torch.cuda.stream(self._copy_stream):
                    slot.launched.wait()
                    slot.pinned_output[:size].copy_(slot.device_output[:size], non_blocking=True)
                    slot.copied.record()
                slot.copied.synchronize()
                rows = slot.pinned_output[:size].numpy().reshape(num_rows, self._row_bytes)
                return Rows(rows[:, FLAG_BYTES:num_bytes].copy(), rows[:, 0].copy())
            finally:
                slot.free.release()

        return LazyTensor(read, slot.launched.query, progress, is_typical=is_typical)

    def give_back(self, slot: _Slot) -> None:
        """Drop the step that was loaded last, wherever it has failed. The next step takes its turn.

        Waits until nothing reads its input, and sets the device's count to the host's.
        """
        self._turn = slot.index
        try:
            self._stream.synchronize()
            with torch.cuda.stream(self._stream):
                self._counter.fill_(slot.index)
        finally:
            slot.free.release()
