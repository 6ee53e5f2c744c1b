"""A trace of the next steps, on demand: which operators ran when, on the host and on the device, for ui.perfetto.dev.

SIGUSR1 asks for it (README, "Measuring it"). Until then each step reads two numbers more. Steps are counted as they are
launched. The trace ends when its last step has been launched and, on a GPU, has run. Writing it delays the next step by
about half a second: twenty steps of a small model have five thousand operators.

Rejected: a flag that traces from the start, whose first steps are like no later ones; a trace of some seconds, which
for a busy GPU is hundreds of megabytes.
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
    """For the thread that launches steps, except `ask`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_asked = False
        self._num_left = 0  # steps that are left of the running trace
        self._profile: profile | None = None

    def ask(self) -> None:
        """Trace the next steps; from any thread, or from a signal's handler. Has no effect while a trace runs."""
        self._is_asked = True

    def before_step(self) -> None:
        if self._is_asked and self._profile is None:
            # Imported here, since importing torch takes seconds and the process heeds signals before. Not
            # torch.profiler: it imports all of torch.compile first, which would delay a step by seconds.
            import torch
            from torch.autograd.profiler import profile

            begun = profile(use_kineto=True, use_device="cuda" if torch.cuda.is_available() else None)
            try:
                begun.__enter__()
            except RuntimeError as error:  # another process has the device's counters, say; steps go on
                self._is_asked = False
                logger.error("steps cannot be traced: %s", error)  # noqa: TRY400 the text says it all
                return
            self._profile, self._num_left = begun, NUM_STEPS

    def after_step(self) -> None:
        """Call it when a step has been launched."""
        if self._profile is None:
            return
        self._num_left -= 1
        if self._num_left:
            return
        done, self._profile, self._is_asked = self._profile, None, False
        try:
            self._path.unlink(missing_ok=True)  # an older trace would be taken for this one
            done.__exit__(None, None, None)
            done.export_chrome_trace(str(self._path))
            num_bytes = self._path.stat().st_size  # if it cannot write, the library raises nothing
        except (OSError, RuntimeError) as error:  # a full disk, say; steps go on
            logger.error("the trace could not be written to %s: %s", self._path, error)  # noqa: TRY400 the text says it all
        else:
            logger.info("a trace of %d steps is in %s, %d bytes", NUM_STEPS, self._path, num_bytes)
