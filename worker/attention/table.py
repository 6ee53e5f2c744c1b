"""What each backend costs in each class of batches: measured class by class, and kept in a file.

Each backend is measured once in each class, and its result is compared with the formula. A backend that is wrong or
fails once is out. Measuring may take some seconds only. So a backend is not timed in classes where it is sure to be
slow, and the table ends when the time is up: `select` gives the other classes the backend of their neighbours.

A table is kept in a file. Another card, driver, version, head shape or set of backends measures anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import torch

from worker.attention import Attention, HeadShape
from worker.attention.measure import LONGEST, SEQUENCES, TOKENS, Cell, Measurement, index_of, lengths_of

logger = logging.getLogger(__name__)

# With many tokens, these stand for all sizes of `SEQUENCES`: half or twice as many rows take about the same time.
_SEQUENCES_IF_MANY_TOKENS = (8, 128, 512)
_MANY_TOKENS = 2048
_SHORT = 128  # up to this length, 16,384 tokens behave as 4,096 do

_HOPELESS = 2.0  # times the fastest: a backend that is slower with fewer rows or tokens is not timed

_FORMAT = 2
_PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4")

Measure: TypeAlias = Callable[[Attention, Cell], Measurement]
Table: TypeAlias = Mapping[Cell, Mapping[str, float]]  # µs of one layer, by backend


def list_cells(max_tokens: int) -> list[Cell]:
    """The classes to measure for sequences of up to `max_tokens`, in order of size.

    Classes that no batch falls into are left out, and those that others stand for.
    """
    cells = [
        Cell(tokens, sequences, longest)
        for tokens in TOKENS
        for sequences in (SEQUENCES if tokens < _MANY_TOKENS else _SEQUENCES_IF_MANY_TOKENS)
        for longest in LONGEST[: index_of(LONGEST, max_tokens) + 1]
        if tokens < TOKENS[-1] or longest > _SHORT
    ]
    return [cell for cell in cells if lengths_of(cell) is not None]


def measure_all(
    backends: Mapping[str, Attention],
    measure: Measure,
    cells: list[Cell],
    max_rows: Mapping[str, int | None],
    num_layers: int,
    budget_s: float,
) -> tuple[dict[Cell, dict[str, float]], dict[str, str]]:
    """The table, and why some backends are out. It lacks the classes that were left when the time was up.

    Raises torch.AcceleratorError: a backend broke the device, so nothing can run any more.
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
            except Exception as error:  # kernels of other packages raise anything; the others may still be fine
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
    """Whether a backend was slow, or already left out, with fewer rows or, for the largest class, fewer tokens.

    A backend that is slow with few rows is slower with more. More tokens may change which backend is the fastest. But
    the largest class takes the longest to measure, and a backend half as fast with 4,096 tokens does not catch up.
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


# --- the file ---


def conditions_of(
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


def file_name(shape: HeadShape, max_tokens: int) -> str:
    """The name of a table's file. It tells apart what one machine usually serves; the file holds all conditions."""
    heads = f"{shape.num_heads}-{shape.num_kv_heads}-{shape.head_dim}"
    mask = "causal" if shape.causal else "bidirectional"
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"attention-{heads}-{mask}-{dtype}-{max_tokens}.json"


def read_table(cache: Path, conditions: dict[str, object]) -> Table | None:
    """The table of a file, if it was written under these conditions."""
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


def write_table(cache: Path, conditions: dict[str, object], table: Table) -> None:
    """Write a table's file, whole or not at all. Without it the next start takes some seconds more."""
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
