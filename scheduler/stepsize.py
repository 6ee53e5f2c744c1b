"""How large a step may be that work of the lower lanes is in, while lanes above are in use. Pure: no clock.

Who comes online waits for the step that runs, and for all of the one that he is in. So the lanes below get small steps
while he may come, and smaller ones still where he is there, down to none beside him. What it costs them is bounded: a
step without him does nine tenths of a full one's work a millisecond, and all of them together, by how often he has been
there lately, four fifths; where no size does, one with him is as large as one without. Where reading the weights is
much of a step, as on a CPU, small ones do little work; there a step with him alone takes least, as long as he comes now
and then. Where he is always there, most steps are shared, and so large.

A size that nothing is known of is tried, for some steps: from small ones to full ones time rises in stairs on a GPU,
and a line from one to the other hides the size that does most (on an H200 2,048 tokens, at a full step's rate where the
line said 0.9 of it). The full one first: without it any small one seems to do as much.

Rejected: one size for both (with queries five times a second on a CPU they took a quarter longer, and the backfill kept
78 % for 86); a fixed part of a full step, since what is right depends on the machine, the model and the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.batching import Part
from scheduler.steptime import TYPICAL_LENGTH, StepTime

_PARTS = (6, 4, 3, 2, 1.5)  # of a full step's tokens
_LEAST_RATE, _LEAST_RATE_OF_ALL = 0.9, 0.8
_REACH = 0.8  # of a full step's tokens; what was as large tells its rate

# Nor does a small step take less than this: two batches in a worker's hands cover the way to it and back only if one
# takes as long.
_LEAST_MS = 1.5

_SMOOTHING = 0.05  # a mean of the last twenty steps or so


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens up to which work of the lanes below may fill a step."""

    alone: int  # that nobody who came online is in
    beside: int  # that those are in who wait now


class StepSizes:
    def __init__(self) -> None:
        self._shared = 0.0  # the part of the steps, lately, that somebody who came online was in

    def note(self, parts: list[Part]) -> None:
        """A step was formed of these, while work of the lanes below waited."""
        is_shared = any(part.pending.request.lane == "online" for part in parts)
        self._shared += _SMOOTHING * (is_shared - self._shared)

    def small(self, step_time: StepTime, most: int, mean_length: float, num_online: int) -> Sizes:
        """Small steps of a worker whose full one has `most` tokens: full ones, as long as nothing is known of it.

        Args:
            mean_length: tokens of a sequence of those lanes. They are not cut, so more is left over of a small step.
            num_online: tokens that come first, of whoever came online and waits.
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
            # Where he waits, another size will run.
            is_tried = not num_online and step_time.take_try(round(num_tokens), longest)
            return is_tried or num_tokens >= _LEAST_RATE * rate * took_ms

        alone = next(filter(is_worth, parts), most)
        if not num_online:
            return Sizes(alone, alone)
        # He waits for no more beside him than a step without him has.
        most_beside = min(most, max(alone, num_online + round(filled(alone))))

        def does(size: int) -> bool:
            """Whether shared steps, filled up to so many tokens, leave the lanes below their part of the rate."""
            often, beside = self._shared, max(size - num_online, 0) // mean_length * mean_length
            shared_ms = ms(num_online + beside) if beside else step_time.predict_ms(num_online, TYPICAL_LENGTH) or 0.0
            took_ms = (1 - often) * ms(filled(alone)) + often * shared_ms
            num_tokens = (1 - often) * filled(alone) + often * beside
            return shared_ms >= _LEAST_MS and num_tokens >= _LEAST_RATE_OF_ALL * rate * took_ms

        sizes = (size for size in (num_online, *parts) if size < most_beside)
        return Sizes(alone, next(filter(does, sizes), most_beside))
