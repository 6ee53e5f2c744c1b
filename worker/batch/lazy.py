"""A result that is not there yet.

`step` launches work and returns at once. The caller waits for the rows when it needs them, on another thread if it
likes. The thread sleeps on an event of the device, so the interpreter is free for the next step. On a CPU the result
is there from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# Bytes before each row: its flag, then zeros. With the flags in the same buffer, a step copies back one range with one
# launch on the host's critical path. Four bytes keep the float32 numbers behind the flag aligned.
FLAG_BYTES = 4


class DeviceLost(Exception):
    """The device returns nothing but errors. Only a new process can use it again."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch's result on the host, in the batch's order."""

    rows: npt.NDArray[np.uint8]  # [sequences, bytes of the widest row]
    finite: npt.NDArray[np.uint8]  # [sequences] 0: the row is not finite, and no answer
    pieces: tuple[int, ...] = ()  # tokens of each piece, if there was no memory to run the batch at once


@dataclass(slots=True)
class Progress:
    """When the parts of a traced step ended, on time.monotonic_ns()'s clock; 0: not known."""

    staged_ns: int = 0  # its inputs lie where the device reads them
    computed_ns: int = 0  # its rows are computed


class LazyTensor:
    """Rows on their way from the device. One thread may read them."""

    def __init__(
        self,
        read: Callable[[], Rows],
        is_ready: Callable[[], bool] | None = None,
        progress: Progress | None = None,
        *,
        is_typical: bool = True,
    ) -> None:
        """
        Args:
            read: waits for the rows and returns them; called once.
            is_ready: whether `read` would not wait long; None: it never waits.
            progress: of a traced step; complete when the rows are there.
            is_typical: see Result.
        """
        self._read: Callable[[], Rows] | None = read
        self._is_ready = is_ready
        self._rows: Rows | None = None
        self.progress = progress
        self.is_typical = is_typical

    def ready(self) -> bool:
        """Whether the step has ended."""
        return self._rows is not None or self._is_ready is None or self._is_ready()

    def numpy(self) -> Rows:
        """Wait for the rows. They belong to the caller: no later step changes them.

        Raises:
            RuntimeError: the device failed in a kernel that the step launched, in this call or in an earlier one.
        """
        if self._rows is None:
            if self._read is None:
                raise RuntimeError("these rows were asked for before, and the device had failed")
            read, self._read = self._read, None
            self._rows = read()
        return self._rows
