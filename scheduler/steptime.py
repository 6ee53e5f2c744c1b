"""How long a step takes, learned from results. Pure: no clock.

One model has three uses: how many tokens make a step of a given time, how long the queue will take, when the step that
runs will end. Steps are sorted by their number of tokens, in cells a factor of ⁴√2 wide, and by their longest sequence,
since attention grows with its square. A cell keeps smoothed means of its tokens and of its milliseconds. Within a class
of lengths a line leads from cell to cell. Beyond the smallest and largest cell the nearest class that reaches as far
says how time grows, or how long a step takes if the two classes have no size in common. (That happens where short
queries and long documents come, and each kind fills other steps. Scaled by the ends of the two curves, a full step of
documents was predicted to take as long as a query.) A step smaller than any that was seen costs what the smallest did.

A step that took far more or far less than steps like it says nothing: it was stopped, or it compiled something, or its
end was noticed late. After three such steps in a row things have changed, and they are believed.

Rejected: one rate for all steps (5 tokens take 7 ms where 512 take 59); a formula fitted to all steps, which one odd
region bends everywhere; a running maximum to keep the curve from falling, which one slow small step holds up for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

TYPICAL_LENGTH = 256  # tokens of the longest sequence of a batch that is not formed yet

# A smoothed mean follows a change within some ten steps, and one step does not sway it.
_SMOOTHING = 0.1

_ODD = 3.0  # a step is odd that took this many times what was expected, or less than the same part of it
_ODD_STEPS = 3  # odd steps in a row that are believed

# Fewer steps than this say nothing of larger ones, which then count as no longer: the first steps touch memory and
# compile, and by a second for ten tokens all that waits would be refused. A size, too, is known by this many steps.
_FEW_STEPS = 3

# After this many steps the time of an earlier one says little: clocks fall, neighbours come. Tries of a size have a
# limit, since it may be that no step comes to it: the sequences may be too long.
_FRESH_STEPS = 5000
_MOST_TRIES = 50

# If any step takes longer than a budget allows, steps may cost this many times the least that one costs.
_SMALLEST_TIMES = 1.25

# Bounds of the classes of lengths, in tokens of the longest sequence. Below the first, attention hardly counts.
_LENGTH_CLASSES = (256, 1024, 4096, 16_384)


@dataclass(slots=True)
class _Cell:
    """Steps of about the same number of tokens."""

    num_tokens: float = 0.0
    ms: float = 0.0
    num_steps: int = 0
    num_odd: int = 0  # in a row

    def add(self, num_tokens: int, ms: float, expected_ms: float | None) -> None:
        """`expected_ms`: the prediction; None if nothing is known."""
        if expected_ms is not None and not expected_ms / _ODD <= ms <= expected_ms * _ODD:
            self.num_odd += 1
            if self.num_odd < _ODD_STEPS:
                return
            self.num_steps = 0
        self.num_odd = 0
        self.num_steps += 1
        weight = max(_SMOOTHING, 1 / self.num_steps)
        self.num_tokens += weight * (num_tokens - self.num_tokens)
        self.ms += weight * (ms - self.ms)


@dataclass(slots=True)
class _Curve:
    """Milliseconds over tokens, of one class of lengths. It never falls: a fall is noise, and gives no budget."""

    cells: dict[int, _Cell] = field(default_factory=dict)
    num_tokens: list[float] = field(default_factory=list)  # rising
    ms: list[float] = field(default_factory=list)  # never falling

    def add(self, num_tokens: int, ms: float, expected_ms: float | None) -> None:
        """`expected_ms`: what the curves say; None unless they have seen smaller steps and larger ones."""
        cell = self.cells.setdefault(_cell_of(num_tokens), _Cell())
        cell.add(num_tokens, ms, cell.ms if cell.num_steps else expected_ms)
        known = [cell for _, cell in sorted(self.cells.items()) if cell.num_steps]
        self.num_tokens = [cell.num_tokens for cell in known]
        self.ms = _never_falling([cell.ms for cell in known], [min(cell.num_steps, 10) for cell in known])

    @property
    def reach(self) -> float:
        """Tokens of its largest steps."""
        return self.num_tokens[-1]

    def at(self, num_tokens: float) -> float:
        """Milliseconds of a step of this size; above the curve's reach, in proportion to the tokens."""
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
        self._found: dict[int, list[_Curve]] = {}  # results of `_nearest` since the last step, by class of lengths
        self._num_steps = 0
        self._untypical: StepTime | None = None  # what steps that are not typical took; None until there was one
        self._seen: dict[tuple[int, int], int] = {}  # the number of the last step, by class and cell
        self._tries: dict[tuple[int, int], tuple[int, int]] = {}  # since which step, and how many; by class and cell

    def observe(self, num_tokens: int, longest: int, step_us: int, *, is_typical: bool = True) -> None:
        """Learn from a step of this many tokens, `longest` of them in its longest sequence.

        A step that is not typical (see Result) takes longer than later ones like it: its time is an upper bound for
        steps of its size, until as large a typical one was seen.
        """
        if not is_typical:
            if self._untypical is None:
                self._untypical = StepTime()
            self._untypical.observe(num_tokens, longest, step_us)
            return
        curves = self._nearest(longest)
        is_known = curves and curves[0].num_tokens[0] <= num_tokens <= max(curve.reach for curve in curves)
        expected_ms = _predict(curves, num_tokens) if is_known else None
        self._found.clear()
        self._num_steps += 1
        kind = bisect_left(_LENGTH_CLASSES, longest), _cell_of(num_tokens)
        self._seen[kind] = self._num_steps
        self._tries.pop(kind, None)
        curve = self._curves.setdefault(kind[0], _Curve())
        curve.add(num_tokens, max(step_us, 1) / 1000, expected_ms)

    def predict_ms(self, num_tokens: float, longest: int) -> float | None:
        """Milliseconds that such a step will take; None before anything was observed."""
        curves = self._nearest(longest)
        most_ms = None
        if self._untypical is not None and (not curves or num_tokens > self.reach):
            most_ms = self._untypical.predict_ms(num_tokens, longest)
        if not curves:
            return most_ms
        ms = _predict(curves, num_tokens)
        # The bound is no less than the prediction for a smaller step.
        return ms if most_ms is None else min(ms, max(most_ms, _predict(curves, self.reach)))

    @property
    def reach(self) -> float:
        """Tokens of the largest typical steps of any lengths."""
        return max((curve.reach for curve in self._curves.values() if curve.ms), default=0.0)

    def take_try(self, num_tokens: int, longest: int) -> bool:
        """Whether a step of about this size is to run for trial: its prediction is a guess from others, or old.

        The caller then runs one, or the nearest that it can. Each call counts as a try, and tries are limited.
        """
        kind = bisect_left(_LENGTH_CLASSES, longest), _cell_of(num_tokens)
        curve = self._curves.get(kind[0])
        cell = curve.cells.get(kind[1]) if curve else None
        if cell is not None and cell.num_steps >= _FEW_STEPS and self._num_steps - self._seen[kind] < _FRESH_STEPS:
            return False
        since, tries = self._tries.get(kind, (self._num_steps, 0))
        if self._num_steps - since >= _FRESH_STEPS:
            since, tries = self._num_steps, 0
        self._tries[kind] = since, tries + 1
        return tries < _MOST_TRIES

    def budget(self, target_ms: float, longest: int, most: int) -> int:
        """The most tokens, at least 1 and at most `most`, of a step that takes no longer than `target_ms`.

        If any step takes longer, the most tokens that cost hardly more than one does. `most` before anything was
        observed.
        """
        least_ms = self.predict_ms(1, longest)
        if least_ms is None:
            return most
        target_ms = max(target_ms, _SMALLEST_TIMES * least_ms)

        def is_short(num_tokens: int) -> bool:
            return (self.predict_ms(num_tokens, longest) or 0.0) <= target_ms

        if is_short(most):
            return most
        low, high = 1, most  # a step of `low` tokens is short, one of `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            if is_short(middle):
                low = middle
            else:
                high = middle
        return low

    def queue_ms(self, num_tokens: int, max_batch_tokens: int, longest: int) -> float | None:
        """Milliseconds for queued tokens, which run in full batches; None before anything was observed."""
        if not self._curves:
            return None if self._untypical is None else self._untypical.queue_ms(num_tokens, max_batch_tokens, longest)
        most = self.reach if self._num_steps < _FEW_STEPS else math.inf
        batches, rest = divmod(num_tokens, max_batch_tokens)
        rest_ms = self.predict_ms(min(rest, most), longest) or 0.0 if rest else 0.0
        return batches * (self.predict_ms(min(max_batch_tokens, most), longest) or 0.0) + rest_ms

    def _nearest(self, longest: int) -> list[_Curve]:
        """The curves that have steps: that of this class of lengths first, then the nearest classes."""
        wanted = bisect_left(_LENGTH_CLASSES, longest)
        found = self._found.get(wanted)
        if found is None:
            by_distance = sorted(self._curves.items(), key=lambda item: (abs(item[0] - wanted), item[0]))
            found = self._found[wanted] = [curve for _, curve in by_distance if curve.ms]
        return found


def _predict(curves: list[_Curve], num_tokens: float) -> float:
    """By the first curve; above its reach by the next one that reaches as far, joined where the first one ends.

    A line leads across sizes that neither curve has seen.
    """
    curve = curves[0]
    if num_tokens < curve.num_tokens[0]:
        return _predict_below(curve, curves[1:], num_tokens)
    if num_tokens <= curve.reach:
        return curve.at(num_tokens)
    other = next((other for other in curves[1:] if other.reach >= num_tokens), None)
    if other is None:
        return max(curves, key=lambda found: found.reach).at(num_tokens)
    ends_ms = curve.ms[-1]
    if other.num_tokens[0] <= curve.reach:
        return other.at(num_tokens) * ends_ms / other.at(curve.reach)
    share = min(1.0, (num_tokens - curve.reach) / (other.num_tokens[0] - curve.reach))
    return ends_ms + share * max(0.0, other.at(num_tokens) - ends_ms)


def _predict_below(curve: _Curve, others: list[_Curve], num_tokens: float) -> float:
    """Fewer tokens than a curve has seen: by the next curve that has, from whose end a line leads to the first one."""
    first, first_ms = curve.num_tokens[0], curve.ms[0]
    other = next((other for other in others if other.num_tokens[0] < first), None)
    if other is None:
        return first_ms
    last = other.num_tokens[bisect_left(other.num_tokens, first) - 1]
    last_ms = min(other.at(last), first_ms)
    if num_tokens <= last:
        return min(other.at(num_tokens), last_ms)
    return last_ms + (num_tokens - last) / (first - last) * (first_ms - last_ms)


def _never_falling(values: list[float], weights: list[int]) -> list[float]:
    """The values, where they fall replaced by their weighted median: a slow small step does not move larger ones.

    Source: the pool-adjacent-violators algorithm (Ayer et al. 1955), for the least sum of absolute differences.
    """
    pools: list[list[tuple[float, int]]] = []
    for value in zip(values, weights, strict=True):
        pool = [value]
        while pools and _median(pools[-1]) > _median(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    return [_median(pool) for pool in pools for _ in pool]


def _median(weighted: list[tuple[float, int]]) -> float:
    """The median of values with weights; the lower one of two in the middle."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    raise AssertionError("there is a value: this is a bug")


def _cell_of(num_tokens: int) -> int:
    return round(4 * math.log2(num_tokens))
