"""How large a step with work of the lower lanes may be, while lanes above are active. Pure: no clock.

An online request waits for the step that runs, then for its own. So while online traffic is active, steps of the lanes
below are small. A step that is shared with an online request is smaller still, possibly without work from below.

What this costs the lanes below is bounded. A step without an online request does nine tenths of a full step's work a
millisecond. All steps together do four fifths, by how many were shared lately; if no size does, a shared step is as
large as one without. On a CPU reading the weights is much of a step, so small steps do little work. There an online
request runs alone as long as such requests are rare; if they are always there, most steps are shared, and large.

A size of which nothing is known is tried for some steps. On a GPU time rises in stairs, and a line from small steps to
full ones hides the best size (on an H200 2,048 tokens, at a full step's rate, where the line said 0.9 of it). A full
step is tried first: without it any small one seems to do as much.

Rejected: one size for both kinds of steps (with 5 queries a second on a CPU queries took a quarter longer, and the
backfill kept 78 % where it keeps 86 %); a fixed part of a full step, since the best size depends on the machine, the
model and the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.lanes import ONLINE
from scheduler.batching import Part
from scheduler.steptime import TYPICAL_LENGTH, StepTime

_PARTS = (6, 4, 3, 2, 1.5)  # the sizes of small steps: a full step's tokens divided by these
_LEAST_RATE, _LEAST_RATE_OF_ALL = 0.9, 0.8  # work a millisecond, of a full step's: without online requests, and in all
_REACH = 0.8  # a step of this share of a full step's tokens tells the full step's rate

# A small step takes no less than this. A worker holds two batches, and these cover the way to it and back only if one
# takes as long as that.
_LEAST_MS = 1.5

_SMOOTHING = 0.05  # a mean of about the last twenty steps


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens up to which work of the lanes below may fill a step."""

    alone: int  # of a step without online requests
    beside: int  # of a step with the online requests that wait now


class StepSizes:
    def __init__(self) -> None:
        self._shared = 0.0  # the share of the last steps that had an online request in them

    def note(self, parts: list[Part]) -> None:
        """A step of these parts was formed while work of the lanes below waited."""
        is_shared = any(part.pending.request.lane == ONLINE for part in parts)
        self._shared += _SMOOTHING * (is_shared - self._shared)

    def small(self, step_time: StepTime, most: int, mean_length: float, num_online: int) -> Sizes:
        """The sizes of a worker whose full step has `most` tokens: `most`, as long as nothing is known of its steps.

        Args:
            mean_length: tokens of a sequence of the lanes below. Sequences are not cut, so a small step is not filled.
            num_online: tokens of the online requests that wait, which come first.
        """

        def filled(num_tokens: float) -> float:
            return max(num_tokens // mean_length, 1) * mean_length

        longest = round(mean_length)

        def ms(num_tokens: float) -> float:
            return step_time.predict_ms(round(num_tokens), longest) or 0.0

        full = filled(most) if mean_length else 0.0
        full_ms = ms(full) if mean_length else 0.0
        if not full_ms:
            return Sizes(most, most)
        largest = min(full, most)
        if step_time.reach < _REACH * largest and step_time.take_try(round(largest), longest):
            return Sizes(most, most)
        rate = full / full_ms
        parts = [max(1, round(most / part)) for part in _PARTS]

        def is_worth(size: int) -> bool:
            num_tokens, took_ms = filled(size), ms(filled(size))
            if took_ms < _LEAST_MS:
                return False
            # While an online request waits, a step of another size will run.
            is_tried = not num_online and step_time.take_try(round(num_tokens), longest)
            return is_tried or num_tokens >= _LEAST_RATE * rate * took_ms

        alone = next(filter(is_worth, parts), most)
        if not num_online:
            return Sizes(alone, alone)
        # An online request shares its step with no more than a step without one has.
        most_beside = min(most, max(alone, num_online + round(filled(alone))))

        def does(size: int) -> bool:
            """Whether shared steps of this size leave the lanes below their share of a full step's rate."""
            often, beside = self._shared, max(size - num_online, 0) // mean_length * mean_length
            shared_ms = ms(num_online + beside) if beside else step_time.predict_ms(num_online, TYPICAL_LENGTH) or 0.0
            took_ms = (1 - often) * ms(filled(alone)) + often * shared_ms
            num_tokens = (1 - often) * filled(alone) + often * beside
            return shared_ms >= _LEAST_MS and num_tokens >= _LEAST_RATE_OF_ALL * rate * took_ms

        sizes = (size for size in (num_online, *parts) if size < most_beside)
        return Sizes(alone, next(filter(does, sizes), most_beside))
