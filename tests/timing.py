"""Tests that judge time, on machines that others use as well.

A machine that pauses makes any duration too long, so one that is over its limit is measured once more (`--only-rerun
TooSlow` in pyproject.toml): a fault of ours is there the second time as well, a pause of the machine hardly ever. It
holds for durations alone. What is lost, wrong or not as it should be fails at once.
"""

from __future__ import annotations

import pytest

# For a test in which timers of tens of milliseconds run against each other: a pause of that length decides it.
against_the_clock = pytest.mark.flaky(reruns=2, only_rerun=".*")


class TooSlow(AssertionError):
    """All is as it should be, but took longer than it may."""


def assert_in_time(taken_s: float, most_s: float) -> None:
    """Both in seconds."""
    if not taken_s < most_s:
        raise TooSlow(f"{taken_s:.3f} s, of at most {most_s:g}")
