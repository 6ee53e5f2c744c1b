"""A result that is not there yet.

`step` launches work and returns at once; whoever needs the rows waits for them, on another thread if it likes. The
wait is on an event of the device with the thread asleep, so that the interpreter is free for the next step.
On a CPU the result is there from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# What precedes each row: its flag, then zeros. What a step copies back is thus one range of one buffer, and one launch
# on the host's critical path where flags apart would be a second; and the float32 numbers behind it stay aligned.
FLAG_BYTES = 4


class DeviceLost(Exception):
    """The device answers nothing but errors; only a new process can use it again."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch's result on the host, in the batch's order."""

    rows: npt.NDArray[np.uint8]  # [sequences, bytes of the widest row]
    finite: npt.NDArray[np.uint8]  # [sequences] 0 where there is no answer
    pieces: tuple[int, ...] = ()  # tokens of each that it ran in, where there was no memory for the batch at once


@dataclass(slots=True)
class Progress:
    """When a step that is followed got how far, on time.monotonic_ns()'s clock; 0 where nobody knows."""

    staged_ns: int = 0  # its inputs are where the device reads them
    computed_ns: int = 0  # its rows are computed


class LazyTensor:
    """Rows on their way from the device. To be read by one thread."""

    def __init__(
        self,
        read: Callable[[], Rows],
        is_ready: Callable[[], bool] | None = None,
        progress: Progress | None = None,
        *,
        is_typical: bool = True,
    ) -> None:
        """`read` waits for the rows and gives them, and is called once; `is_ready` says whether it would not have to
        wait long (None: it never has to); `progress`, of a step that is followed, is complete when the rows are;
        `is_typical`: see Result."""
        self._read: Callable[[], Rows] | None = read
        self._is_ready = is_ready
        self._rows: Rows | None = None
        self.progress = progress
        self.is_typical = is_typical

    def ready(self) -> bool:
        """Whether the step has ended."""
        return self._rows is not None or self._is_ready is None or self._is_ready()

    def numpy(self) -> Rows:
        """Waits for the rows. They are the caller's: no later step changes them.

        Raises:
            RuntimeError: the device failed in a kernel that the step launched, now or when it was asked before.
        """
        if self._rows is None:
            if self._read is None:
                raise RuntimeError("these rows were asked for before, and the device had failed")
            read, self._read = self._read, None
            self._rows = read()
        return self._rows
