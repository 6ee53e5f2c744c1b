"""A trace of the next steps, on demand: which operators ran when, on the host and on the device, for ui.perfetto.dev.

SIGUSR1 asks for it (README, "Measuring it"). Until then it costs a step two looks at a number. Steps are counted as
they are launched; the trace ends when the last of them is on its way and, on a GPU, has run. Writing it keeps the next
step waiting, for half a second or so: the operators of twenty steps of a small model are five thousand lines.

Rejected: a flag that traces from the start, whose first steps are like no later ones; a trace of so many seconds, which
of a busy GPU is hundreds of megabytes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

logger = logging.getLogger(__name__)

NUM_STEPS = 20


class StepProfiler:
    """Belongs to the thread that launches steps, but for `ask`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_asked = False
        self._num_left = 0  # steps, of a trace that has begun
        self._profile: profile | None = None

    def ask(self) -> None:
        """Trace the next steps. From any thread, or a signal's handler; again while a trace runs, it says nothing."""
        self._is_asked = True

    def before_step(self) -> None:
        if self._is_asked and self._profile is None:
            # Imported here: torch takes seconds, and this process heeds signals before it has it. Not torch.profiler's,
            # which imports all of torch.compile before it starts, and keeps a step waiting for seconds.
            import torch
            from torch.autograd.profiler import profile

            begun = profile(use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None)
            try:
                begun.__enter__()
            except RuntimeError as error:  # another one has the device's counters, say; steps go on
                self._is_asked = False
                logger.error("steps cannot be traced: %s", error)  # noqa: TRY400 the text says it all
                return
            self._profile, self._num_left = begun, NUM_STEPS

    def after_step(self) -> None:
        """Of a step that was launched."""
        if self._profile is None:
            return
        self._num_left -= 1
        if self._num_left:
            return
        done, self._profile, self._is_asked = self._profile, None, False
        try:
            self._path.unlink(missing_ok=True)  # an older one would be taken for this
            done.__exit__(None, None, None)
            done.export_chrome_trace(str(self._path))
            num_bytes = self._path.stat().st_size  # where it cannot be written, the library raises nothing
        except (OSError, RuntimeError) as error:  # a full disk, say; steps go on
            logger.error("the trace could not be written to %s: %s", self._path, error)  # noqa: TRY400 the text says it all
        else:
            logger.info("a trace of %d steps is in %s, %d bytes", NUM_STEPS, self._path, num_bytes)
