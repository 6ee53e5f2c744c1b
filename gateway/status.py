"""The status of a gateway and of each of its models: whether it can serve, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ready", "starting", "draining", "unavailable"]
_WORST_FIRST: tuple[Status, ...] = ("unavailable", "draining", "starting", "ready")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served."""

    status: Status
    workers_ready: int
    workers_total: int
    reason: str  # one sentence; empty when ready

    @classmethod
    def of_all(cls, models: Mapping[str | None, Readiness]) -> Readiness:
        """The readiness of all models together, given by name. They are ready if each is; `reason` names the others.

        A model without a name (None) adds its reason only.
        """
        missing = {name: one for name, one in models.items() if one.status != "ready"}
        statuses = {one.status for one in models.values()}
        return cls(
            next(status for status in _WORST_FIRST if status in statuses),
            sum(one.workers_ready for one in models.values()),
            sum(one.workers_total for one in models.values()),
            " ".join(one.reason if name is None else f"{name}: {one.reason}" for name, one in missing.items()),
        )

    def draining(self) -> Readiness:
        """The same in a gateway that is stopping."""
        return replace(self, status="draining", reason="This gateway is stopping.")
