"""Which attention backend runs a batch: measured once on the device that will run it, then looked up.

No backend is best everywhere, and which one is depends on the head shape, on the card and on package versions. So every
backend that can be had is timed at its real job, a replayed graph of a capacity that the engine would use (eagerly
above the largest), for each class of batches, and the fastest takes the class. A class is

    tokens (padded)  ×  capacity of the sequence axis  ×  longest sequence

each rounded up to a size of `TOKENS`, `SEQUENCES`, `LONGEST`; the second is there because empty rows cost some kernels
much and others nothing. A
backend that is wrong once is out.

What a backend's `prepare` costs the host counts in full, spread over the layers: the device may be waiting for it. A
step of many tokens takes longer than any plan for the next one, and there it counts nothing. Within 3 % the
first of `BACKENDS` wins, so that the choice is stable and few backends are in use, each of which has graphs of its own.

What is measured, and kept in a file, is `table`'s. What takes long to import is imported by a thread while the others
compile. Classes that are not in the table are as their neighbours.

Rejected: a table in the source, which is wrong on the next card; choosing while serving, which makes the first requests
pay and answers depend on timing.
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

_BUDGET_S = 6.0  # of measuring, once all is imported and most is compiled
_CLOSE = 1.03


class Selection:
    """A backend for every batch. `choose` is a look-up of a microsecond."""

    def __init__(self, backends: Mapping[str, Attention], names: Mapping[Cell, str], description: str) -> None:
        """`names` has at least one class; classes that it lacks are as the nearest that it has."""
        self._backends = dict(backends)
        self._description = description
        self._rows = [
            [[self._backends[_nearest(names, Cell(t, s, longest))] for longest in LONGEST] for s in SEQUENCES]
            for t in TOKENS
        ]

    @classmethod
    def forced(cls, name: str, shape: HeadShape, device: torch.device) -> Selection:
        """One backend for everything; where it takes compiling, it is compiled now.

        Raises:
            AttentionUnavailable: there is no such backend, or it cannot do this here.
        """
        return cls._only(name, "as asked for", shape, device)

    @classmethod
    def _only(cls, name: str, why: str, shape: HeadShape, device: torch.device) -> Selection:
        backend = BACKENDS.get(name)
        if backend is None:
            known = ", ".join(["auto", *BACKENDS])
            raise AttentionUnavailable(f"there is no attention backend {name!r}; there are {known}")
        return cls({name: backend.open(shape, device)}, {_ANY: name}, f"{name}, {why}")

    @classmethod
    def default(cls, shape: HeadShape, device: torch.device) -> Selection:
        """Where there is nothing to measure: on a CPU, or where but one kernel for GPUs does what is needed.

        Raises:
            AttentionUnavailable: it cannot be had.
        """
        name = next(row.name for row in BACKENDS.values() if row.is_default and row.device == device.type)
        if device.type == "cpu":
            return cls._only(name, "the one for CPUs", shape, device)
        why = "windows or biases" if shape.windowed or shape.biased else str(shape.dtype)
        return cls._only(name, f"the one that computes in {why} on a GPU", shape, device)

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
        """The fastest of what there is for each class, as the file `cache` says or else as measured now.

        Args:
            num_layers: over which the host's work for a batch is spread.
            max_tokens: of one sequence; longer classes are not measured.
            cache: read if it is there and for the same device, versions, shape and backends; else written.
            backends, measure: what is chosen among, and by what; those of this machine if not given.
            budget_s: after which no further class is measured.

        Raises:
            AttentionUnavailable: no backend that is right can be had.
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
        """For a batch padded to so many tokens and rows of cu_seqlens, whose longest sequence is this."""
        return self._rows[index_of(TOKENS, tokens)][index_of(SEQUENCES, sequences)][index_of(LONGEST, max_seqlen)]

    def named(self, name: str) -> Attention:
        """Raises KeyError: the backend is not in use."""
        return self._backends[name]

    def backends(self) -> list[Attention]:
        """Those that `choose` can answer."""
        return list(self._backends.values())

    def describe(self) -> str:
        """What is chosen for which longest sequence, and why."""
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
    """What a configuration asks for: a backend's name, or `auto` (see `Selection.measured`).

    Args:
        cache: folder of what was measured; it has a file for each head shape and `max_tokens`.
        num_layers, max_tokens: as of `Selection.measured`.

    Raises:
        AttentionUnavailable: it cannot be had here.
    """
    if requested != "auto":
        return Selection.forced(requested, shape, device)
    if not _is_measured(shape, device):
        return Selection.default(shape, device)
    path = cache / file_name(shape, max_tokens)
    return Selection.measured(shape, device, num_layers=num_layers, max_tokens=max_tokens, cache=path)


def look_ahead(requested: str, shape: HeadShape, device: torch.device) -> None:
    """What `select` begins with, for a thread that has seconds to spare: packages are imported, and stay so."""
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
    """The candidates that open, what each costs by class, and why the others are out."""
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
    """The name of the class itself, or of one that is like it: in length first, then in tokens.

    The class of the most sequences has no upper bound, which some backends need; so it stays by itself.
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
    """The first of those that are as fast as the fastest, nearly."""
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
