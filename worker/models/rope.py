"""Rotary positions: what a checkpoint declares of them, and the angles by which it turns.

Source: Su et al., RoFormer (2021); the scalings, which let a model take longer texts than it was trained on, and the
defaults of their fields as in transformers' `modeling_rope_utils`: linear, dynamic (NTK), yarn (Peng et al., YaRN,
2023), llama3. Another one, or a field in one that is not known of it, stops the start.

How long a text may be is a decision of this file, since transformers turns by any position. `max_position_embeddings`
is the limit that sentence-transformers sets where no `max_seq_length` does. It is kept, but where the scaling itself
says that more was meant: yarn reaches factor times the length that it was trained on (a file made as Qwen's manual says
keeps the trained length in `max_position_embeddings`), and dynamic scaling begins only beyond
`max_position_embeddings`, so it reaches factor times that. Linear is not extended: in most files the field is the
scaled length already, and a table of factor times as many rows would be made for nothing. A text beyond the limit is
never turned by made-up angles: it is refused or cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from worker.checkpoint.files import MAX_POSITIONS

if TYPE_CHECKING:
    import torch

    from worker.checkpoint.files import JsonFile

_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

# Type → its own fields.
_TYPES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "dynamic": frozenset({"factor"}),
        "yarn": frozenset(
            {
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "factor",
                "mscale",
                "mscale_all_dim",
                "original_max_position_embeddings",
                "truncate",
            }
        ),
        "llama3": frozenset({"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"}),
    }
)

# By which texts may become longer. Beyond it tables that are as long as a text may be would not fit anywhere.
_LARGEST_FACTOR = 1024.0

# Of yarn: rotations within the trained length, above which a column keeps its frequency, and below which it is slowed.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided."""

    factor: float

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        """Radians a position, float32 [dim / 2], of `periods`, positions a radian."""
        return 1.0 / periods / self.factor


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Up to the trained length nothing is changed; beyond, the base grows with the text's own length."""

    factor: float
    trained_length: int  # tokens

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        """Of texts of up to the trained length."""
        return 1.0 / periods


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow columns are divided, fast ones are kept, those between change over; all angles' cosines and sines grow."""

    factor: float
    trained_length: int
    attention_factor: float  # of the cosines and sines
    beta_fast: float = _BETA_FAST
    beta_slow: float = _BETA_SLOW
    truncate: bool = True  # whether the change begins and ends at whole columns

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        import torch  # config.json can be checked without it

        dim = 2 * len(periods)
        low, high = (
            dim * math.log(self.trained_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(len(periods), dtype=torch.float32, device="cpu") - low) / (high - low)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """As yarn's, with bounds in wavelengths, and cosines and sines as they are."""

    factor: float
    trained_length: int
    low_factor: float  # times that a wave must fit into the trained length to be changed in part only
    high_factor: float  # and to be kept

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        import torch

        plain = 1.0 / periods
        wavelengths = 2 * math.pi / plain
        longest_kept = self.trained_length / self.high_factor
        longest_changed_in_part = self.trained_length / self.low_factor
        scaled = torch.where(wavelengths > longest_changed_in_part, plain / self.factor, plain)
        kept = (self.trained_length / wavelengths - self.low_factor) / (self.high_factor - self.low_factor)
        between = (1 - kept) * scaled / self.factor + kept * scaled
        is_between = ~(wavelengths < longest_kept) & ~(wavelengths > longest_changed_in_part)
        return torch.where(is_between, between, scaled)


Scaling: TypeAlias = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class Rope:
    dim: int  # columns of a head that turn, column i together with column i + dim / 2
    theta: float  # base of the frequencies
    num_positions: int  # the longest text that there are angles for
    scaling: Scaling | None = None

    @classmethod
    def parse(cls, config: JsonFile, dim: int, num_positions: int, default_theta: float | None = None) -> Rope:
        """What config.json says, in `rope_theta` and `rope_scaling` or, in later files, in `rope_parameters`.

        Args:
            num_positions: what the file says without regard to scaling; the result may have more.
            default_theta: of an architecture whose files may leave the base out.

        Raises:
            ModelError: the base is missing, or the scaling is one that is not implemented, or lacks a field.
        """
        _check_whole(config, "partial_rotary_factor")
        parameters = [
            parsed
            for field in ("rope_scaling", "rope_parameters")
            if (parsed := _parameters(config, field)) is not None
        ]
        theta = _theta(config, parameters, default_theta)
        scalings = [_scaling(config, found, dim, theta, num_positions) for found in parameters]
        if len(set(scalings)) > 1:
            config.refuse("rope_scaling, rope_parameters", "they disagree.")
        scaling = scalings[0] if scalings else None
        if isinstance(scaling, YarnScaling):
            num_positions = max(num_positions, int(scaling.trained_length * scaling.factor))
        elif isinstance(scaling, DynamicScaling):
            num_positions = int(num_positions * scaling.factor)
        if num_positions > MAX_POSITIONS:
            config.refuse("rope_scaling, rope_parameters", f"{num_positions} positions; {MAX_POSITIONS} are supported.")
        return cls(dim, theta, num_positions, scaling)

    @property
    def attention_factor(self) -> float:
        """What all cosines and sines are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def num_lengths(self) -> int:
        """Of texts that turn by frequencies of their own: rows of `frequencies_by_length`, 0 if there are none."""
        if not isinstance(self.scaling, DynamicScaling):
            return 0
        return self.num_positions + 1 - self.scaling.trained_length

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians a position, float32 [dim / 2]; with dynamic scaling those of texts up to the trained length."""
        periods = self.theta ** self._exponents()
        return 1.0 / periods if self.scaling is None else self.scaling.frequencies(periods, self.theta)

    def frequencies_by_length(self) -> torch.Tensor | None:
        """With dynamic scaling, radians a position in a text of trained_length + i tokens: float32 [i, dim / 2], i from
        0 to the longest that there is. None: they are the same for all lengths."""
        if not isinstance(self.scaling, DynamicScaling):
            return None
        import torch

        factor, trained = self.scaling.factor, self.scaling.trained_length
        lengths = torch.arange(trained, self.num_positions + 1, dtype=torch.float32, device="cpu")
        # In float32 throughout, as transformers does with a length that is a tensor.
        bases = self.theta * (factor * lengths / trained - (factor - 1)) ** (self.dim / (self.dim - 2))
        return 1.0 / bases[:, None] ** self._exponents()

    def _exponents(self) -> torch.Tensor:
        import torch

        return torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim


@dataclass(frozen=True, slots=True)
class _Parameters:
    """A map of config.json that holds rotary positions; the names of its fields begin with the map's own."""

    prefix: str
    kind: str
    file: JsonFile

    def has(self, name: str) -> bool:
        return self.file.values.get(self.prefix + name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        if default is not None and not self.has(name):
            return default
        if not self.has(name):
            self.refuse(name, "missing.")
        return self.file.positive_number(self.prefix + name)

    def refuse(self, name: str, why: str) -> NoReturn:
        self.file.refuse(self.prefix + name, why)


def _parameters(config: JsonFile, field: str) -> _Parameters | None:
    values = config.values.get(field)
    if values is None or values == {}:
        return None
    if not isinstance(values, dict):
        config.refuse(field, f"a map is needed, not {values!r}.")
    file = replace(config, values={f"{field}.{name}": value for name, value in values.items()})
    kind, former = file.text(f"{field}.rope_type"), file.text(f"{field}.type")
    if kind is not None and former is not None and kind != former:
        config.refuse(f"{field}.rope_type, {field}.type", f"they disagree: {kind!r}, {former!r}.")
    kind = kind or former or "default"
    if kind not in _TYPES:
        config.refuse(f"{field}.rope_type", f"{kind!r} is not supported; supported are {', '.join(_TYPES)}.")
    for name, value in values.items():
        if value is not None and name not in _COMMON_FIELDS | _TYPES[kind]:
            config.refuse(f"{field}.{name}", f"not understood with the type {kind!r}; it might change the vectors.")
    _check_whole(file, f"{field}.partial_rotary_factor")
    return _Parameters(f"{field}.", kind, file)


def _theta(config: JsonFile, parameters: list[_Parameters], default: float | None) -> float:
    found: dict[str, float] = {}
    if config.values.get("rope_theta") is not None:
        found["rope_theta"] = config.positive_number("rope_theta")
    for one in parameters:
        if one.has("rope_theta"):
            found[f"{one.prefix}rope_theta"] = one.number("rope_theta")
    if len(set(found.values())) > 1:
        config.refuse(", ".join(found), f"they disagree: {found!r}.")
    theta = next(iter(found.values()), default)
    if theta is None:
        config.refuse("rope_theta", "missing, and not in rope_parameters either.")
    return theta


def _scaling(config: JsonFile, parameters: _Parameters, dim: int, theta: float, num_positions: int) -> Scaling | None:
    if parameters.kind == "default":
        return None
    factor = parameters.number("factor")
    if not 1 <= factor <= _LARGEST_FACTOR:
        parameters.refuse("factor", f"a number from 1 to {_LARGEST_FACTOR:g} is needed, not {factor}.")
    if parameters.kind == "linear":
        return LinearScaling(factor)
    if parameters.kind == "dynamic":
        if dim <= 2:
            parameters.refuse("rope_type", f"'dynamic' needs more than the {dim} columns of these heads.")
        return DynamicScaling(factor, num_positions)
    trained_length = _trained_length(config, parameters, num_positions)
    if parameters.kind == "yarn":
        return _yarn(parameters, factor, theta, trained_length)
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        parameters.refuse("high_freq_factor", f"{high} is not above low_freq_factor {low}.")
    return Llama3Scaling(factor, trained_length, low, high)


def _yarn(parameters: _Parameters, factor: float, theta: float, trained_length: int) -> YarnScaling:
    if theta <= 1:
        parameters.refuse("rope_type", f"'yarn' needs a rope_theta above 1, not {theta}.")
    if parameters.has("attention_factor"):
        attention_factor = parameters.number("attention_factor")
    else:
        # Both or neither count. A 0, which some files have for "none", is not there.
        scales = [_number_or_zero(parameters, name) for name in ("mscale", "mscale_all_dim")]
        over, under = scales if all(scales) else (1.0, 0.0)
        attention_factor = _magnitude(factor, over) / _magnitude(factor, under)
    truncate = f"{parameters.prefix}truncate"
    return YarnScaling(
        factor,
        trained_length,
        attention_factor,
        parameters.number("beta_fast", _BETA_FAST),
        parameters.number("beta_slow", _BETA_SLOW),
        parameters.file.flag(truncate, default=truncate not in parameters.file.values),  # null is false there
    )


def _magnitude(factor: float, scale: float) -> float:
    """Source: YaRN, equation 22."""
    return 0.1 * scale * math.log(factor) + 1.0


def _number_or_zero(parameters: _Parameters, name: str) -> float:
    value = parameters.file.values.get(parameters.prefix + name)
    return 0.0 if value is None or value == 0 else parameters.number(name)


def _trained_length(config: JsonFile, parameters: _Parameters, num_positions: int) -> int:
    """`original_max_position_embeddings`, which some files have beside the map and not in it; where it is in neither,
    transformers takes `max_position_embeddings`."""
    name = "original_max_position_embeddings"
    inside = parameters.file.optional_integer(parameters.prefix + name)
    beside = config.optional_integer(name)
    if inside is not None and beside is not None and inside != beside:
        config.refuse(f"{name}, {parameters.prefix}{name}", f"they disagree: {beside}, {inside}.")
    return inside or beside or num_positions


def _check_whole(file: JsonFile, field: str) -> None:
    if file.values.get(field) not in (None, 1):
        file.refuse(field, "heads that are rotated in part are not supported.")
