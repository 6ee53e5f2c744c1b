"""Which attention backend runs a batch: measured once on the device that will run it, then looked up.

No backend is best everywhere, and which one is depends on the head shape, on the card and on package versions. So every
backend that can be had is timed at its real job, a replayed graph of a capacity that the engine would use (eagerly
above the largest), for each class of batches, and the fastest takes the class. A class is

    tokens (padded)  ×  capacity of the sequence axis  ×  longest sequence

each rounded up to a size of `TOKENS`, `SEQUENCES`, `LONGEST`; the second is there because empty rows cost some kernels
much and others nothing. Each result is compared with the formula in float32 on some of its sequences: a backend that is
wrong once is out.

What a backend's `prepare` costs the host counts in full, spread over the layers: the device may be waiting for it. A
step of many tokens takes longer than any plan for the next one, and there it counts nothing. Within 3 % the
first of `BACKENDS` wins, so that the choice is stable and few backends are in use, each of which has graphs of its own.

What was measured is kept in a file; another card, driver, version, head shape or set of backends measures anew, which
takes some seconds. To keep these few, what takes long to import is imported by a thread while the others compile;
a backend is not timed where it is sure to be slow; and when the time is up, classes that are left are as their
neighbours.

Rejected: a table in the source, which is wrong on the next card; choosing while serving, which makes the first requests
pay and answers depend on timing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from worker.attention import AttentionUnavailable, HeadShape, flash_attention_4, flashinfer, varlen
from worker.attention.flash_attention_4 import FlashAttention4
from worker.attention.flashinfer import FlashInferAttention, Kernels
from worker.attention.measure import LONGEST, SEQUENCES, TOKENS, Cell, Measurement, Measurer, index_of, lengths_of
from worker.attention.reference import ReferenceAttention
from worker.attention.sdpa import SdpaAttention
from worker.attention.varlen import TorchAttention

if TYPE_CHECKING:
    from worker.attention import Attention

logger = logging.getLogger(__name__)

# Classes that are left to their neighbours: with half as many rows or twice as many, all take much the same.
_SEQUENCES_IF_MANY_TOKENS = (8, 128, 512)
_MANY_TOKENS = 2048
_SHORT = 128  # length of sequences that 16,384 tokens of are as 4,096 of

_BUDGET_S = 6.0  # of measuring, once all is imported and most is compiled
_HOPELESS = 2.0  # times slower than another, with fewer rows or tokens
_CLOSE = 1.03

_FORMAT = 2
_PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4")

# Backends that mind the arguments `window` and `bias`.
_WITH_WINDOW_AND_BIAS = frozenset({"triton", "sdpa", "reference"})

Measure = Callable[["Attention", Cell], Measurement]
Table = Mapping[Cell, Mapping[str, float]]  # µs of one layer, by backend


@dataclass(frozen=True, slots=True)
class Backend:
    """How to get at a backend. The first two are quick and import little."""

    unavailable: Callable[[HeadShape, torch.device], str | None]  # why it cannot be used at all
    open: Callable[[HeadShape, torch.device], Attention]
    unready: Callable[[HeadShape], str | None] = lambda shape: None  # why it is used only if asked for by name
    slow_to_open: bool = False  # by seconds of importing, and without touching the device
    instead: str | None = None  # a backend so nearly as fast that where it can be had, this one is not opened
    max_rows: int | None = None  # of cu_seqlens, that it is chosen for


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
        backend = BACKENDS.get(name) or _PLAIN_BACKENDS.get(name)
        if backend is None:
            known = ", ".join(["auto", *BACKENDS, *_PLAIN_BACKENDS])
            raise AttentionUnavailable(f"there is no attention backend {name!r}; there are {known}")
        if (shape.windowed or shape.biased) and name not in _WITH_WINDOW_AND_BIAS:
            raise AttentionUnavailable(f"attention {name}: has no windows and no biases, which this model needs")
        if reason := backend.unavailable(shape, device):
            raise AttentionUnavailable(f"attention {name}: {reason}")
        return cls({name: backend.open(shape, device)}, {_ANY: name}, f"{name}, {why}")

    @classmethod
    def default(cls, shape: HeadShape, device: torch.device) -> Selection:
        """Where there is nothing to measure: on a CPU, or where but one kernel for GPUs does what is needed.

        Raises:
            AttentionUnavailable: it cannot be had.
        """
        if device.type == "cpu":
            return cls._only("sdpa", "the one for CPUs", shape, device)
        why = "windows or biases" if shape.windowed or shape.biased else str(shape.dtype)
        return cls._only("triton", f"the one that computes in {why} on a GPU", shape, device)

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
        candidates, missing = _candidates(BACKENDS if backends is None else backends, shape, device)
        logger.debug("attention: candidates were looked for in %.1f s", time.monotonic() - started_s)
        for name, reason in missing.items():
            logger.info("attention %s is no candidate: %s", name, reason)
        conditions = _conditions(shape, device, list(candidates), max_tokens, num_layers)
        table = _read(cache, conditions)
        if table is not None:
            names = _winners(table)
            opened, failed = _open(
                {name: candidates[name] for name in candidates if name in names.values()}, shape, device
            )
            if not failed:
                return cls(opened, names, _describe(names, "as measured before", missing))
        started_s = time.monotonic()
        cells = _cells(max_tokens)
        if measure is None:
            measurer = Measurer(shape, device)
            opened, failed = _open(candidates, shape, device, lambda quick: measurer.warm_up(quick, cells))
            measure = measurer
        else:
            opened, failed = _open(candidates, shape, device)
        max_rows = {name: backend.max_rows for name, backend in candidates.items()}
        table, wrong = _measure(opened, measure, cells, max_rows, num_layers, budget_s)
        measure = measurer = None  # type: ignore[assignment]  # their inputs and graphs were a gigabyte
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        missing |= failed | wrong
        names = _winners(table)
        if not names:
            raise AttentionUnavailable(f"no attention backend can be had: {missing}")
        _write(cache, conditions, table)
        used = {name: backend for name, backend in opened.items() if name in names.values()}
        return cls(used, names, _describe(names, f"measured in {time.monotonic() - started_s:.1f} s", missing))

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
    path = cache / _file_name(shape, max_tokens)
    return Selection.measured(shape, device, num_layers=num_layers, max_tokens=max_tokens, cache=path)


def look_ahead(requested: str, shape: HeadShape, device: torch.device) -> None:
    """What `select` begins with, for a thread that has seconds to spare: packages are imported, and stay so."""
    if requested == "auto" and _is_measured(shape, device):
        torch.cuda.set_device(device)
        _candidates(BACKENDS, shape, device)


def _is_measured(shape: HeadShape, device: torch.device) -> bool:
    """Whether there is something to choose among."""
    return device.type != "cpu" and shape.dtype != torch.float32 and not shape.windowed and not shape.biased


# --- backends ---


def _triton_unavailable(shape: HeadShape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "is for GPUs"
    if importlib.util.find_spec("triton") is None:
        return "not installed: triton, which torch brings along for GPUs"
    if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in bfloat16, float16 or float32, not {shape.dtype}"
    return None


def _open_triton(shape: HeadShape, device: torch.device) -> Attention:
    from worker.attention.triton import TritonAttention  # needs triton, which a CPU's torch may lack

    del shape, device
    return TritonAttention()


def _flashinfer(kernels: Kernels) -> Backend:
    return Backend(
        lambda shape, device: _on_cuda(device) or flashinfer.unavailable(shape, device, kernels),
        lambda shape, device: FlashInferAttention(shape, device, kernels),
        lambda shape: _not_built(shape, kernels),
    )


def _not_built(shape: HeadShape, kernels: Kernels) -> str | None:
    try:
        if flashinfer.is_built(shape, kernels):
            return None
    except AttentionUnavailable as error:
        return str(error)
    return f"its kernels are not compiled; starting once with --attention flashinfer_{kernels} does it"


def _on_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "is for GPUs"


def _on_cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "is for CPUs"


# In order of preference where they are equally fast: the fewest conditions first.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "triton": Backend(_triton_unavailable, _open_triton),
        "flash_attention_4": Backend(
            lambda shape, device: _on_cuda(device) or flash_attention_4.unavailable(shape),
            lambda shape, device: FlashAttention4(shape),
            slow_to_open=True,
            instead="flashinfer_fa3",  # on an H200 a text of 32,768 tokens takes 423 ms with it and 422 with this one
            max_rows=flash_attention_4.MAX_ROWS,
        ),
        "torch": Backend(
            lambda shape, device: _on_cuda(device) or varlen.unavailable(shape),
            lambda shape, device: TorchAttention(shape),
        ),
        "flashinfer_fa3": _flashinfer("fa3"),
        "flashinfer_fa2": _flashinfer("fa2"),
    }
)

# What is never measured: there is nothing to choose among on a CPU, and the formula is what others are compared with.
_PLAIN_BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "sdpa": Backend(lambda shape, device: _on_cpu(device), lambda shape, device: SdpaAttention()),
        "reference": Backend(lambda shape, device: None, lambda shape, device: ReferenceAttention()),
    }
)


def _candidates(
    backends: Mapping[str, Backend], shape: HeadShape, device: torch.device
) -> tuple[dict[str, Backend], dict[str, str]]:
    """What can be had without compiling for minutes, and why the rest cannot."""
    candidates, missing = {}, {}
    for name, backend in backends.items():
        reason = backend.unavailable(shape, device) or backend.unready(shape)
        if reason is None:
            candidates[name] = backend
        else:
            missing[name] = reason
    for name in [name for name, backend in candidates.items() if backend.instead in candidates]:
        other = candidates.pop(name).instead
        missing[name] = f"{other} is nearly as fast and starts sooner; --attention {name} uses this one"
    return candidates, missing


def _open(
    candidates: Mapping[str, Backend],
    shape: HeadShape,
    device: torch.device,
    meanwhile: Callable[[Mapping[str, Attention]], None] | None = None,
) -> tuple[dict[str, Attention], dict[str, str]]:
    """Those that open, and why the others do not. `meanwhile` gets the quick ones while the slow ones open."""
    opened: dict[str, Attention] = {}
    failed: dict[str, str] = {}

    def collect(name: str, opening: Callable[[], Attention]) -> None:
        started_s = time.monotonic()
        try:
            opened[name] = opening()
        except AttentionUnavailable as error:
            failed[name] = str(error)
            logger.warning("%s", error)
        logger.debug("attention: %s was opened or waited for in %.1f s", name, time.monotonic() - started_s)

    with ThreadPoolExecutor(1, "attention-import") as thread:
        slow = {
            name: thread.submit(backend.open, shape, device)
            for name, backend in candidates.items()
            if backend.slow_to_open
        }
        for name, backend in candidates.items():
            if not backend.slow_to_open:
                collect(name, partial(backend.open, shape, device))
        if meanwhile is not None:
            started_s = time.monotonic()
            meanwhile(dict(opened))
            logger.debug("attention: the quick ones were warmed up in %.1f s", time.monotonic() - started_s)
        for name, future in slow.items():
            collect(name, future.result)
    return {name: opened[name] for name in candidates if name in opened}, failed


# --- classes ---


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


def _cells(max_tokens: int) -> list[Cell]:
    """The classes to measure, with no sequence longer than `max_tokens`: such that there are batches of, but for those
    that others stand for. In order of their size."""
    cells = [
        Cell(tokens, sequences, longest)
        for tokens in TOKENS
        for sequences in (SEQUENCES if tokens < _MANY_TOKENS else _SEQUENCES_IF_MANY_TOKENS)
        for longest in LONGEST[: index_of(LONGEST, max_tokens) + 1]
        if tokens < TOKENS[-1] or longest > _SHORT
    ]
    return [cell for cell in cells if lengths_of(cell) is not None]


# --- measuring ---


def _measure(
    backends: Mapping[str, Attention],
    measure: Measure,
    cells: list[Cell],
    max_rows: Mapping[str, int | None],
    num_layers: int,
    budget_s: float,
) -> tuple[dict[Cell, dict[str, float]], dict[str, str]]:
    """Costs by class and backend, and why some backends are out. When the time is up, the classes left are not in it.

    Raises torch.AcceleratorError: a backend broke the device, and nothing can be run any more.
    """
    table: dict[Cell, dict[str, float]] = {}
    wrong: dict[str, str] = {}
    spent_s: defaultdict[str, float] = defaultdict(float)
    started_s = time.monotonic()
    for cell in cells:
        if table and time.monotonic() - started_s > budget_s:
            logger.warning("attention: %d of %d classes were measured in %.0f s", len(table), len(cells), budget_s)
            break
        costs_us: dict[str, float] = {}
        for name, backend in backends.items():
            bound = max_rows[name]
            if name in wrong or (bound is not None and cell.sequences > bound) or _is_hopeless(name, cell, table):
                continue
            backend_started_s = time.monotonic()
            try:
                result = measure(backend, cell)
            except Exception as error:  # other people's kernels raise what they like; the others may still be fine
                logger.warning("attention %s is out, it failed at %s", name, cell, exc_info=True)
                wrong[name] = f"{type(error).__name__}: {error}"
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # raises if the device itself is broken
                continue
            finally:
                spent_s[name] += time.monotonic() - backend_started_s
            if not result.is_right:
                wrong[name] = f"wrong at {cell}: error {result.error:.2g}, cosine {result.cosine:.6f} to the formula"
                logger.warning("attention %s is out: %s", name, wrong[name])
                continue
            costs_us[name] = round(result.cost_us(cell, num_layers), 2)
        table[cell] = costs_us
    for costs_us in table.values():
        for name in wrong:
            costs_us.pop(name, None)
    logger.debug("attention: %d classes took %s", len(table), {name: round(s, 2) for name, s in spent_s.items()})
    return table, wrong


def _is_hopeless(name: str, cell: Cell, table: Table) -> bool:
    """Whether a backend was slow, or already left out, where rows are fewer, or before the largest class of tokens.

    More rows only make those slow that are slow for them. More tokens may well change what is fastest; but the largest
    class takes the longest to measure, and what is half as fast with 4,096 tokens does not catch up.
    """
    row, column = index_of(SEQUENCES, cell.sequences), index_of(TOKENS, cell.tokens)
    smaller = [Cell(cell.tokens, sequences, cell.longest) for sequences in SEQUENCES[:row]]
    if cell.tokens == TOKENS[-1]:
        smaller.append(Cell(TOKENS[column - 1], cell.sequences, cell.longest))
    return any(
        table[other].get(name, math.inf) > _HOPELESS * min(table[other].values())
        for other in smaller
        if table.get(other)
    )


def _winners(table: Table) -> dict[Cell, str]:
    return {cell: _fastest(costs_us) for cell, costs_us in table.items() if costs_us}


def _fastest(costs_us: Mapping[str, float]) -> str:
    """The first of those that are as fast as the fastest, nearly."""
    bound_us = min(costs_us.values()) * _CLOSE
    order = [name for name in BACKENDS if name in costs_us] + [name for name in costs_us if name not in BACKENDS]
    return next(name for name in order if costs_us[name] <= bound_us)


# --- what was measured before ---


def _conditions(
    shape: HeadShape, device: torch.device, names: list[str], max_tokens: int, num_layers: int
) -> dict[str, object]:
    """All that a table depends on."""
    return {
        "format": _FORMAT,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "driver": _driver(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "shape": asdict(shape) | {"dtype": str(shape.dtype)},
        "max_tokens": LONGEST[index_of(LONGEST, max_tokens)],
        "num_layers": num_layers,
        "backends": names,
        "own_kernels": hashlib.sha256(Path(__file__).with_name("triton.py").read_bytes()).hexdigest(),
    }


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _file_name(shape: HeadShape, max_tokens: int) -> str:
    """Of a table. It tells apart what one machine serves in turn; the file says all that its table depends on."""
    heads = f"{shape.num_heads}-{shape.num_kv_heads}-{shape.head_dim}"
    mask = "causal" if shape.causal else "bidirectional"
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"attention-{heads}-{mask}-{dtype}-{max_tokens}.json"


def _read(cache: Path, conditions: dict[str, object]) -> dict[Cell, dict[str, float]] | None:
    """The table of a file that was written under the same conditions."""
    try:
        content = json.loads(cache.read_text())
        if content["conditions"] != conditions:
            logger.info("%s was measured under other conditions: measuring anew", cache)
            return None
        table = {
            Cell(**entry["cell"]): {str(name): float(cost_us) for name, cost_us in entry["us"].items()}
            for entry in content["cells"]
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is no table of attention backends, measuring anew: %r", cache, error)
        return None
    names = {name for costs_us in table.values() for name in costs_us}
    if not names or not names.issubset(conditions["backends"]):  # type: ignore[arg-type]  # a list of names
        logger.warning("%s is no table of these attention backends, measuring anew", cache)
        return None
    return table


def _write(cache: Path, conditions: dict[str, object], table: Table) -> None:
    """All or nothing. That it cannot be kept costs the next start some seconds, and no more."""
    content = {
        "conditions": conditions,
        "cells": [{"cell": asdict(cell), "us": dict(costs_us)} for cell, costs_us in table.items()],
    }
    temporary = cache.with_suffix(f".{os.getpid()}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(cache)
    except OSError as error:
        logger.warning("%s cannot be written, the next start will measure again: %s", cache, error)


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
