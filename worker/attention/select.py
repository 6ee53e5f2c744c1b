"""Which attention backend runs a batch: measured once on the device, then looked up.

No backend is the fastest everywhere. Which one is depends on the head shape, the card and the package versions. So each
backend is timed in each class of batches, at its real job: a replayed graph of a capacity that the engine would use, or
eager launches above the largest. The fastest takes the class. A class is

    tokens (padded)  ×  capacity of the sequence axis  ×  longest sequence

each rounded up to a size of `TOKENS`, `SEQUENCES` or `LONGEST`. The second is there because empty rows cost some
kernels much and others nothing.

A backend's `prepare` counts in full, spread over the layers, since the device may wait for it. In steps of many tokens
it counts nothing: such a step takes longer than any plan for the next one. Within 3 % the first row of the registry
wins. So the choice is stable, and few backends are in use, each of which has graphs of its own.

`table` measures and keeps the results in a file. A thread imports what takes long to import while the other backends
compile. A class that is not in the table gets the backend of its nearest neighbour.

Rejected: a table in the source, which is wrong on the next card. Rejected: choosing while serving, since the first
requests would pay for it and answers would depend on timing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from worker.attention import Attention, AttentionUnavailable, HeadShape
from worker.attention.measure import LONGEST, SEQUENCES, TOKENS, Cell, Measurer, index_of
from worker.attention.registry import BACKENDS, Backend, find_candidates, open_all
from worker.attention.table import (
    Measure,
    Table,
    conditions_of,
    file_name,
    list_cells,
    measure_all,
    read_table,
    write_table,
)

logger = logging.getLogger(__name__)

_BUDGET_S = 6.0  # for measuring, once all is imported and most is compiled
_CLOSE = 1.03  # times the fastest: a backend within this counts as equally fast


class Selection:
    """A backend for every batch. `choose` is a look-up of a microsecond."""

    def __init__(self, backends: Mapping[str, Attention], names: Mapping[Cell, str], description: str) -> None:
        """`names` has at least one class. A class that it lacks gets the backend of the nearest one."""
        self._backends = dict(backends)
        self._description = description
        self._rows = [
            [[self._backends[_nearest(names, Cell(t, s, longest))] for longest in LONGEST] for s in SEQUENCES]
            for t in TOKENS
        ]

    @classmethod
    def forced(cls, name: str, shape: HeadShape, device: torch.device, why: str = "as asked for") -> Selection:
        """One backend for everything. It is compiled now if it has to be.

        Raises:
            AttentionUnavailable: there is no such backend, or it cannot do this here.
        """
        backend = BACKENDS.get(name)
        if backend is None:
            known = ", ".join(["auto", *BACKENDS])
            raise AttentionUnavailable(f"there is no attention backend {name!r}; there are {known}")
        return cls({name: backend.open(shape, device)}, {_ANY: name}, f"{name}, {why}")

    @classmethod
    def default(cls, shape: HeadShape, device: torch.device) -> Selection:
        """The backend for work that nothing is measured for: on a CPU, or if one backend for GPUs alone can do it.

        Raises:
            AttentionUnavailable: the backend cannot be used here.
        """
        name = next(row.name for row in BACKENDS.values() if row.is_default and row.device == device.type)
        if device.type == "cpu":
            return cls.forced(name, shape, device, "the one for CPUs")
        why = "windows or biases" if shape.windowed or shape.biased else str(shape.dtype)
        return cls.forced(name, shape, device, f"the one that computes in {why} on a GPU")

    @classmethod
    def measured(
        cls,
        shape: HeadShape,
        device: torch.device,
        *,
        num_layers: int,
        max_tokens: int,
        cache: Path,
        backends: Mapping[str, Backend] | None = None,
        measure: Measure | None = None,
        budget_s: float = _BUDGET_S,
    ) -> Selection:
        """The fastest backend for each class, from the file `cache` or else measured now.

        Args:
            num_layers: the layers that share the host's work for a batch.
            max_tokens: the longest sequence of the model; longer classes are not measured.
            cache: read if it was written under the same conditions (`conditions_of`); else written.
            backends, measure: the candidates and what times them; by default this machine's.
            budget_s: the time after which no further class is measured.

        Raises:
            AttentionUnavailable: no candidate opens and computes what the formula does.
        """
        started_s = time.monotonic()
        candidates, missing = find_candidates(BACKENDS if backends is None else backends, shape, device)
        logger.debug("attention: candidates were looked for in %.1f s", time.monotonic() - started_s)
        for name, reason in missing.items():
            logger.info("attention %s is no candidate: %s", name, reason)
        conditions = conditions_of(shape, device, list(candidates), max_tokens, num_layers)
        table = read_table(cache, conditions)
        if table is not None:
            names = _winners(table)
            used = {name: candidates[name] for name in candidates if name in names.values()}
            opened, failed = open_all(used, shape, device)
            if not failed:
                return cls(opened, names, _describe(names, "as measured before", missing))
        started_s = time.monotonic()
        opened, table, failed = _measure_anew(candidates, measure, shape, device, max_tokens, num_layers, budget_s)
        missing |= failed
        names = _winners(table)
        if not names:
            raise AttentionUnavailable(f"no attention backend can be had: {missing}")
        write_table(cache, conditions, table)
        opened = {name: backend for name, backend in opened.items() if name in names.values()}
        return cls(opened, names, _describe(names, f"measured in {time.monotonic() - started_s:.1f} s", missing))

    def choose(self, tokens: int, sequences: int, max_seqlen: int) -> Attention:
        """The backend for a batch with these padded numbers of tokens and of rows of cu_seqlens."""
        return self._rows[index_of(TOKENS, tokens)][index_of(SEQUENCES, sequences)][index_of(LONGEST, max_seqlen)]

    def named(self, name: str) -> Attention:
        """Raises KeyError: the backend is not in use."""
        return self._backends[name]

    def backends(self) -> list[Attention]:
        """All backends that `choose` may return."""
        return list(self._backends.values())

    def describe(self) -> str:
        """Which backend runs which longest sequence, and why, for people."""
        return self._description


def select(
    requested: str,
    shape: HeadShape,
    device: torch.device,
    cache: Path,
    *,
    num_layers: int = 24,
    max_tokens: int = LONGEST[-1],
) -> Selection:
    """The selection that `--attention` asks for: one backend by name, or `auto` (see `Selection.measured`).

    Args:
        cache: folder of the tables, which has a file for each head shape and `max_tokens`.
        num_layers, max_tokens: see `Selection.measured`.

    Raises:
        AttentionUnavailable: the backend cannot be used here.
    """
    if requested != "auto":
        return Selection.forced(requested, shape, device)
    if not _is_measured(shape, device):
        return Selection.default(shape, device)
    path = cache / file_name(shape, max_tokens)
    return Selection.measured(shape, device, num_layers=num_layers, max_tokens=max_tokens, cache=path)


def look_ahead(requested: str, shape: HeadShape, device: torch.device) -> None:
    """Import the packages that `select` will need, on a thread that has seconds to spare."""
    if requested == "auto" and _is_measured(shape, device):
        torch.cuda.set_device(device)
        find_candidates(BACKENDS, shape, device)


def _is_measured(shape: HeadShape, device: torch.device) -> bool:
    """Whether there is something to choose among."""
    return device.type != "cpu" and shape.dtype != torch.float32 and not shape.windowed and not shape.biased


def _measure_anew(
    candidates: Mapping[str, Backend],
    measure: Measure | None,
    shape: HeadShape,
    device: torch.device,
    max_tokens: int,
    num_layers: int,
    budget_s: float,
) -> tuple[dict[str, Attention], Table, dict[str, str]]:
    """The candidates that open, the table of their costs, and why the others are out."""
    cells = list_cells(max_tokens)
    if measure is None:
        measurer = Measurer(shape, device)
        opened, failed = open_all(candidates, shape, device, lambda quick: measurer.warm_up(quick, cells))
        measure = measurer
    else:
        opened, failed = open_all(candidates, shape, device)
    max_rows = {name: backend.max_rows for name, backend in candidates.items()}
    table, wrong = measure_all(opened, measure, cells, max_rows, num_layers, budget_s)
    measure = measurer = None  # type: ignore[assignment]  # their inputs and graphs were a gigabyte
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return opened, table, failed | wrong


# --- which backend a class gets ---


def _nearest(names: Mapping[Cell, str], cell: Cell) -> str:
    """The backend of the class, or of the measured class nearest to it: in length first, then in tokens.

    The class of the most sequences has no upper bound, and some backends need one. So it stays by itself.
    """
    if cell in names:
        return names[cell]

    def distance(other: Cell) -> tuple[bool, int, int, int]:
        return (
            (cell.sequences == SEQUENCES[-1]) != (other.sequences == SEQUENCES[-1]),
            abs(index_of(LONGEST, cell.longest) - index_of(LONGEST, other.longest)),
            abs(index_of(TOKENS, cell.tokens) - index_of(TOKENS, other.tokens)),
            abs(index_of(SEQUENCES, cell.sequences) - index_of(SEQUENCES, other.sequences)),
        )

    return names[min(names, key=distance)]


def _winners(table: Table) -> dict[Cell, str]:
    return {cell: _fastest(costs_us) for cell, costs_us in table.items() if costs_us}


def _fastest(costs_us: Mapping[str, float]) -> str:
    """The first backend, in the order of the registry, that is nearly as fast as the fastest."""
    bound_us = min(costs_us.values()) * _CLOSE
    order = [name for name in BACKENDS if name in costs_us] + [name for name in costs_us if name not in BACKENDS]
    return next(name for name in order if costs_us[name] <= bound_us)


def _describe(names: Mapping[Cell, str], how: str, missing: Mapping[str, str]) -> str:
    return f"{_summary(names)}; {how}" + (f"; without {', '.join(missing)} (the log says why)" if missing else "")


def _summary(names: Mapping[Cell, str]) -> str:
    """By longest sequence: `≤32: triton; ≤128: triton, torch`; where it is not one for all, the more frequent first."""
    merged: list[tuple[int, str]] = []
    for longest in sorted({cell.longest for cell in names}):
        counts = Counter(name for cell, name in names.items() if cell.longest == longest)
        backends = ", ".join(name for name, _ in counts.most_common())
        if merged and merged[-1][1] == backends:
            merged.pop()
        merged.append((longest, backends))
    return "; ".join(f"≤{longest}: {backends}" for longest, backends in merged)


_ANY = Cell(TOKENS[0], SEQUENCES[0], LONGEST[0])
