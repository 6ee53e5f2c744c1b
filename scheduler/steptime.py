"""How long a step takes, learned from results. Pure: no clock.

One model, several uses: how many tokens make a step of so many milliseconds, how long what waits will take, when the
step that runs will end. Steps are sorted by their number of tokens, in cells a factor of √2 wide, and by their longest
sequence, since attention grows with its square. A cell keeps the mean of its tokens and of its milliseconds, smoothed;
between cells of one class of lengths a line leads from mean to mean, below the smallest a step costs what that one
does, and above the largest it grows with the tokens.

Rejected: one rate for all (a small step costs mostly what any step costs: 5 tokens 7 ms where 512 took 59); a formula
fitted to all steps, which one odd region bends everywhere.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

# A smoothed mean follows a change within some ten steps, and one odd step does not sway it.
_SMOOTHING = 0.1

# What a single step can tell: one that took far longer than its like was stopped, or compiled something.
_MOST_TIMES_EXPECTED = 3.0

# Bounds of the longest sequence, in tokens: below the first one attention is nothing beside the rest.
_LENGTH_CLASSES = (256, 1024, 4096, 16_384)


@dataclass(slots=True)
class _Cell:
    """Steps of about so many tokens."""

    num_tokens: float = 0.0
    ms: float = 0.0
    num_steps: int = 0

    def add(self, num_tokens: int, ms: float) -> None:
        self.num_steps += 1
        weight = max(_SMOOTHING, 1 / self.num_steps)
        if self.num_steps > 1:
            ms = min(ms, _MOST_TIMES_EXPECTED * self.ms)
            if ms * _MOST_TIMES_EXPECTED < self.ms:
                weight = max(weight, 0.5)  # what was believed until now came from such a step
        self.num_tokens += weight * (num_tokens - self.num_tokens)
        self.ms += weight * (ms - self.ms)


@dataclass(slots=True)
class _Curve:
    """Milliseconds over tokens, of one class of lengths. Never falls: what would is noise, and would make no budget."""

    cells: dict[int, _Cell] = field(default_factory=dict)
    num_tokens: list[float] = field(default_factory=list)  # rising
    ms: list[float] = field(default_factory=list)  # never falling

    def add(self, num_tokens: int, ms: float) -> None:
        self.cells.setdefault(_cell_of(num_tokens), _Cell()).add(num_tokens, ms)
        self.num_tokens, self.ms = [], []
        most = 0.0
        for _, cell in sorted(self.cells.items()):
            most = max(most, cell.ms)
            self.num_tokens.append(cell.num_tokens)
            self.ms.append(most)

    def at(self, num_tokens: int) -> float:
        index = bisect_left(self.num_tokens, num_tokens)
        if index == 0:
            return self.ms[0]
        if index == len(self.num_tokens):
            return self.ms[-1] * num_tokens / self.num_tokens[-1]
        left, right = self.num_tokens[index - 1], self.num_tokens[index]
        share = (num_tokens - left) / (right - left)
        return self.ms[index - 1] + share * (self.ms[index] - self.ms[index - 1])


class StepTime:
    """The step times of one worker."""

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    def observe(self, num_tokens: int, longest: int, step_us: int) -> None:
        """Learn from a step of so many tokens, `longest` of them in its longest sequence."""
        self._curves.setdefault(bisect_left(_LENGTH_CLASSES, longest), _Curve()).add(num_tokens, step_us / 1000)

    def predict_ms(self, num_tokens: int, longest: int) -> float | None:
        """Milliseconds that such a step will take; None before anything was observed."""
        curve = self._curve(longest)
        return None if curve is None else curve.at(num_tokens)

    def budget(self, target_ms: float, longest: int, most: int) -> int:
        """The most tokens, at least 1 and at most `most`, of a step that takes no longer than `target_ms`.

        `most` where nothing was observed.
        """
        curve = self._curve(longest)
        if curve is None or curve.at(most) <= target_ms:
            return most
        low, high = 1, most  # what takes no longer (or is the least there is), and what takes longer
        while high - low > 1:
            middle = (low + high) // 2
            if curve.at(middle) <= target_ms:
                low = middle
            else:
                high = middle
        return low

    def queue_ms(self, num_tokens: int, max_batch_tokens: int, longest: int) -> float | None:
        """Milliseconds for what waits, which runs in full batches; None before anything was observed."""
        full_ms = self.predict_ms(max_batch_tokens, longest)
        if full_ms is None:
            return None
        batches, rest = divmod(num_tokens, max_batch_tokens)
        return batches * full_ms + (self.predict_ms(rest, longest) or 0.0 if rest else 0.0)

    def _curve(self, longest: int) -> _Curve | None:
        """The curve of this class of lengths, or of the nearest one that anything is known of."""
        wanted = bisect_left(_LENGTH_CLASSES, longest)
        if wanted in self._curves:
            return self._curves[wanted]
        nearest = min(self._curves, key=lambda found: (abs(found - wanted), found), default=None)
        return None if nearest is None else self._curves[nearest]


def _cell_of(num_tokens: int) -> int:
    return round(2 * math.log2(num_tokens))
