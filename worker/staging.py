"""The way to a GPU and back: buffers that belong to steps, and one block of inputs at a fixed address.

    batch → a slot's pinned input → the block (fixed address: graphs read it) → forward pass
          → the slot's device output → the slot's pinned output → LazyTensor

A slot is on loan to a step from its launch until its rows were read, so a buffer is never written while a copy reads
it. The input's copy is in the compute stream: the block may be written only once the step before has read it, so
there is nothing that a stream of its own could overlap (512 tokens are 9 KB, about 3 µs). The output's copy is on a
stream of its own, and it is whoever waits for the rows that launches it: what the launching thread does for a step is
what the device waits for between two steps. That thread only has the rows moved out of the way of the next step, within
the device.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from worker.driver import Driver
from worker.lazy import LazyTensor, Rows
from worker.pooling import FLAG_BYTES
from worker.ragged import Capacity, HostArrays

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from common.protocol import Batch

# One runs, one is launched behind it, one is being filled.
_NUM_SLOTS = 3
_MAX_KEPT_INPUTS = 256  # of a slot: more capacities than graphs have; what large steps need besides is made anew


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """A capacity's part of a slot's pinned input."""

    arrays: HostArrays
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Slot:
    pinned_input: torch.Tensor  # int32
    inputs: dict[Capacity, _Input]
    device_output: torch.Tensor  # uint8, grown as needed
    pinned_output: torch.Tensor  # uint8, likewise
    launched: torch.cuda.Event  # the rows are in device_output
    copied: torch.cuda.Event  # and in pinned_output
    input_address: int
    output_address: int = 0
    size: int = 0  # bytes of each of the outputs


class Staging:
    """`load` and `collect` are for the thread that launches; rows may be read on any one other, or on the same.

    Every result has to be read: its buffers are on loan until then, and `load` waits where all are.
    """

    def __init__(self, largest: Capacity, stream: torch.cuda.Stream, driver: Driver) -> None:
        """Room for any capacity whose `num_words` are at most those of the largest. `stream` is what computes."""
        device = stream.device
        self._device = device
        self._stream = stream
        self._stream_handle: int = stream.cuda_stream
        self._driver = driver
        self._copy_stream = torch.cuda.Stream(device)
        num_words = largest.num_words
        self.block = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._block_address = self.block.data_ptr()
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_NUM_SLOTS):
            pinned = torch.zeros(num_words, dtype=torch.int32, pin_memory=True)
            empty = torch.empty(0, dtype=torch.uint8)
            launched = torch.cuda.Event()
            copied = torch.cuda.Event(blocking=True)
            self._free.put(_Slot(pinned, {}, empty.to(device), empty, launched, copied, pinned.data_ptr()))

    def load(self, batch: Batch | None, capacity: Capacity) -> tuple[_Slot, npt.NDArray[np.int32]]:
        """Start a checked batch (None: nothing but dummies) on its way into the block; its slot, and its cu_seqlens on
        the host.

        Waits for a slot where three steps are unread.
        """
        slot = self._free.get()
        try:
            place = slot.inputs.get(capacity) or self._cut(slot, capacity)
            offsets = place.arrays.fill(batch)
            self._driver.copy_in(self._block_address, slot.input_address, place.num_bytes, self._stream_handle)
        except BaseException:
            self._free.put(slot)
            raise
        return slot, offsets

    def _cut(self, slot: _Slot, capacity: Capacity) -> _Input:
        place = _Input(HostArrays(capacity, slot.pinned_input.numpy()), 4 * capacity.num_words)
        if len(slot.inputs) < _MAX_KEPT_INPUTS:
            slot.inputs[capacity] = place
        return place

    def give_back(self, slot: _Slot) -> None:
        """Of a step that nobody will read. Waits until nothing reads its input any more."""
        try:
            self._stream.synchronize()
        finally:
            self._free.put(slot)

    def collect(
        self, slot: _Slot, output: torch.Tensor, num_rows: int, width: int, count: Callable[[], None]
    ) -> LazyTensor:
        """Keep `width` bytes of each of the first rows for whoever reads them.

        Args:
            output: uint8 [at least num_rows, FLAG_BYTES + at least width], contiguous, as `pooling.finish` gives it;
                the next step may overwrite it.
            count: called by whoever reads the rows: bookkeeping that nothing has to wait for.
        """
        whole = output.shape[1]
        if slot.size < num_rows * whole:
            self._grow(slot, num_rows * whole)
        # Whole rows, in one piece: on the device that costs nothing.
        self._driver.copy_within(slot.output_address, output.data_ptr(), num_rows * whole, self._stream_handle)
        slot.launched.record(self._stream)

        def read() -> Rows:
            try:
                count()
                torch.cuda.set_device(self._device)  # a thread of its own starts out at device 0
                wanted = slot.device_output[: num_rows * whole].view(num_rows, whole)[:, : FLAG_BYTES + width]
                host = slot.pinned_output[: wanted.numel()].view(wanted.shape)
                with torch.cuda.stream(self._copy_stream):
                    slot.launched.wait()
                    host.copy_(wanted, non_blocking=True)
                    slot.copied.record()
                slot.copied.synchronize()
                rows = host.numpy()
                return Rows(rows[:, FLAG_BYTES:].copy(), rows[:, 0].copy())
            finally:
                self._free.put(slot)

        return LazyTensor(read, slot.launched.query)

    def _grow(self, slot: _Slot, size: int) -> None:
        """Make room for an output. The slot is on loan, so nothing reads the old buffers any more."""
        size = max(size, 2 * slot.size, 1 << 18)
        device_output = torch.empty(size, dtype=torch.uint8, device=self._device)
        pinned_output = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        # Only now that there is memory for both: a slot never claims room that it lacks.
        slot.device_output, slot.pinned_output = device_output, pinned_output
        slot.output_address, slot.size = device_output.data_ptr(), size
