"""Rotary positions: what a checkpoint declares of them, and the angles by which it turns.

Source: Su et al., RoFormer (2021); scaling as in transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from worker.checkpoint import JsonFile

# Rotary scaling that changes nothing, under the names that config.json files give it.
_ROPE_FIELDS = frozenset({"rope_theta", "rope_type", "type"})


@dataclass(frozen=True, slots=True)
class Rope:
    dim: int  # columns of a head that turn, column i together with column i + dim / 2
    theta: float  # base of the frequencies
    num_positions: int

    @classmethod
    def parse(cls, config: JsonFile, dim: int, num_positions: int) -> Rope:
        """What config.json says, in `rope_theta` and `rope_scaling` or, in later files, in `rope_parameters`.

        Raises:
            ModelError: the base is missing, or the scaling is one that is not implemented.
        """
        return cls(dim, _theta(config), num_positions)

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians a position, float32 [dim / 2]."""
        import torch  # config.json can be checked without it

        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return 1.0 / self.theta**exponents


def _theta(config: JsonFile) -> float:
    if config.values.get("partial_rotary_factor") not in (None, 1):
        config.refuse("partial_rotary_factor", "heads that are rotated in part are not supported.")
    found: dict[str, float] = {}
    if config.values.get("rope_theta") is not None:
        found["rope_theta"] = config.positive_number("rope_theta")
    for field in ("rope_scaling", "rope_parameters"):
        values = config.values.get(field)
        if values is None:
            continue
        if not isinstance(values, dict) or not _ROPE_FIELDS.issuperset(values):
            config.refuse(field, f"scaled rotary positions are not supported: {values!r}.")
        if any(values.get(name) not in (None, "default") for name in ("rope_type", "type")):
            config.refuse(field, f"only the type 'default' is supported: {values!r}.")
        if values.get("rope_theta") is not None:
            found[field] = replace(config, values=values).positive_number("rope_theta")
    if not found:
        config.refuse("rope_theta", "missing, and not in rope_parameters either.")
    if len(set(found.values())) > 1:
        config.refuse(", ".join(found), f"they disagree: {found!r}.")
    return next(iter(found.values()))
