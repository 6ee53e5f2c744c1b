"""What docs/ takes from the product: flags.md, metrics.md, and the table of models.md.

    python -m tests.docs

writes all of it anew. tests/test_docs.py fails while it differs from what the product says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from prometheus_client.metrics import MetricWrapperBase

from common.config import GatewayConfig, ProcessConfig, SchedulerConfig, ServeConfig, WorkerConfig
from common.metrics import Metrics
from worker.checkpoint.architectures import ARCHITECTURES, Architecture

DOCS = Path(__file__).parent.parent / "docs"

_PROCESSES = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}


def pages() -> Mapping[Path, str]:
    """The text of every page that is made."""
    return {DOCS / "flags.md": flags_page(), DOCS / "metrics.md": metrics_page(), DOCS / "models.md": models_page()}


def flags_page() -> str:
    lines = [
        "# Flags",
        "",
        "The flags of `hedgerow serve`. Each flag is also a variable: `--max-queue-ms` is `HEDGEROW_MAX_QUEUE_MS`.",
        "A flag wins over a variable. The last column names the processes that read the flag.",
        "",
        "| flag | default | meaning | read by |",
        "|---|---|---|---|",
    ]
    hints = get_type_hints(ServeConfig)
    for item in fields(ServeConfig):
        if item.name in {"slot", "models"}:
            continue
        lines.append(
            f"| `--{item.name.replace('_', '-')}` | {_default(item.default, hints[item.name])} "
            f"| {_cell(item.metadata['help'], item.metadata['choices'])} | {_readers(item.name)} |"
        )
    lines += [
        "",
        "`HEDGEROW_API_KEY` is a variable only, because flags show in the list of processes. See",
        "[Security](security.md#keys).",
    ]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "`/metrics` is Prometheus text. Every gateway gives the same answer. [Operating](operating.md#metrics) says",
        "which ones to watch.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in catalogue():
        [family] = metric.describe()
        suffix = "_total" if family.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def models_page() -> str:
    """models.md, with its table of families as the architectures have it."""
    before, mark, rest = (DOCS / "models.md").read_text().partition("-->\n")
    _, end, after = rest.partition("<!-- /families -->")
    lines = ["| family | architectures | for example |", "|---|---|---|"]
    for family in dict.fromkeys(row.family for row in ARCHITECTURES.values()):
        rows = [row for row in ARCHITECTURES.values() if row.family == family]
        names = ", ".join(f"`{row.name}`{_uses(row)}" for row in rows)
        lines.append(f"| {family} | {names} | {', '.join(name for row in rows for name in row.examples)} |")
    return "\n".join([before + mark, *lines, "", end + after])


def _uses(row: Architecture) -> str:
    uses = [use for use, is_there in (("scores", row.score_head), ("sparse", row.vocabulary_head)) if is_there]
    return f" ({', '.join(uses)})" if uses else ""


def catalogue() -> list[MetricWrapperBase]:
    """Every metric, in the order of the catalogue."""
    return [value for value in vars(Metrics()).values() if isinstance(value, MetricWrapperBase)]


def _default(default: object, hint: object) -> str:
    if hint is bool:
        return "on" if default else "off"
    if default in ("", ()):
        return ""
    return f"{default:,}" if isinstance(default, int) else f"`{default}`"


def _cell(text: str, choices: tuple[str, ...] | None) -> str:
    return text.replace("|", "\\|") + (f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else "")


def _readers(name: str) -> str:
    if name in {item.name for item in fields(ProcessConfig)}:
        return "all"
    return ", ".join(process for process, config in _PROCESSES.items() if _has(config, name)) or "serve"


def _has(config: type[Any], name: str) -> bool:
    return name in {item.name for item in fields(config)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        sys.stderr.write(f"{path.name} written\n")
