"""The way to a GPU and back: buffers that belong to steps, and one block of inputs at a fixed address.

    batch → a slot's pinned input → `fetch` → the block (fixed address: graphs read it) → forward pass
          → `publish` → the slot's device output → the slot's pinned output → LazyTensor

`fetch` and `publish` are kernels (`worker.kernels.step`), a step's first and its last, so that a captured step is one
launch: what the launching thread does for a step is what the device waits for between two steps. A graph is captured
once and runs on any slot. So slots take turns: the kernels count on the device what the host counts here, and an error
between the two kernels sets the device's count right again. That is why every step, however it is launched, has both or
ends in `give_back`.

A slot is on loan to a step from its launch until its rows were read, so a buffer is never written while something reads
it: its pinned input was read before there were rows. The output's copy to the host is on a stream of its own, and it is
whoever waits for the rows that launches it.
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

# One runs, one is launched behind it, one is being filled.
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
    size: int = 0  # bytes of each of the outputs


class Staging:
    """All but reading rows is for the thread that launches; rows may be read on any one other, or on the same.

    Every result has to be read: its buffers are on loan until then, and a step waits for the one three before it.
    """

    def __init__(self, largest: Capacity, row_bytes: int, stream: torch.cuda.Stream, driver: Driver) -> None:
        """Room for any capacity whose words are at most those of the largest. `stream` is what computes, and what it
        computes are rows of so many bytes, a multiple of 4."""
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
        launched.record(self._stream)  # which makes it
        copied = torch.cuda.Event(blocking=True)
        return _Slot(index, words, head, empty.to(self._device), empty, launched, copied, launched.cuda_event)

    def host_views(self, capacity: Capacity) -> list[HostArrays]:
        """Where `load` writes a batch of a capacity: cut once, and kept by whoever loads more than one."""
        return [HostArrays(capacity, slot.words) for slot in self._slots]

    def load(self, batch: Batch | None, host_views: list[HostArrays]) -> tuple[_Slot, npt.NDArray[np.int32]]:
        """Write a checked batch (None: nothing but dummies, without rows) where the next `fetch` reads it; its slot,
        and its cu_seqlens on the host.

        Waits where the step three before is unread. After it come `fetch`, `publish` and `collect`, or `give_back`.
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
        # Only now that there is memory for both: a slot never claims room that it lacks.
        slot.device_output, slot.pinned_output, slot.size = device_output, pinned_output, size
        slot.words[OUTPUT_ADDRESS : OUTPUT_ADDRESS + 2].view(np.int64)[0] = device_output.data_ptr()

    def fetch(self, capacity: Capacity) -> None:
        """Launch what brings a loaded batch into the block."""
        self._kernels.fetch(self._ring, self._counter, self.block, capacity)

    def publish(self, output: torch.Tensor) -> None:
        """Launch what keeps the rows of the batch in the block, and lets the next one follow.

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
        """What the step that has been launched gives whoever reads it: `width()` bytes of each of its rows.

        It is who reads the rows that asks how wide they are, since nothing has to wait for that.
        """
        self._driver.record(slot.launched_handle, self._stream_handle)

        def read() -> Rows:
            try:
                num_bytes = FLAG_BYTES + width()
                torch.cuda.set_device(self._device)  # a thread of its own starts out at device 0
                # Whole rows, and cut on the host: torch would make room on the device to cut them there.
                size = num_rows * self._row_bytes
                if progress is not None:
                    slot.launched.synchronize()  # else the copy alone is waited for, and nobody knows when it began
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
        """Of the step that was loaded last, which nobody will read, wherever it has ended: its turn is the next one's.

        Waits until nothing reads its input any more, and sets the device's count to the host's.
        """
        self._turn = slot.index
        try:
            self._stream.synchronize()
            with torch.cuda.stream(self._stream):
                self._counter.fill_(slot.index)
        finally:
            slot.free.release()
