"""A load's result as one HTML file for people: tables and plots as SVG in it, nothing from any other host.

    python benchmarks/report.py RESULT.json [RESULT.json ...] REPORT.html
    python benchmarks/report.py RESULT.json [RESULT.json ...] PICTURE.svg

The second writes one plot as a picture of its own: of loads latency against load, of a profile its stages, of queries
beside a backfill their latency. The results are those that `load.py --output` has written, of which the loads are put
together, and those of `profile_latency.py --output` and `mixed.py --output`, which are shown as they are.
"""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_COLORS = ("#2563a8", "#d9822b", "#b83a4b", "#3c8d5a", "#7a56a3", "#6b6b6b", "#2a9d9d", "#a8763e")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 300, 64, 44, 16
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1360px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:0 1em 1em 0;vertical-align:top}
figcaption{font-weight:600}svg{max-width:100%}pre{white-space:pre-wrap;color:#555}
"""
_FIGURE = re.compile(
    r'<figure><figcaption>(.*?)</figcaption><svg viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg></figure>', re.DOTALL
)
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("asked/s", lambda row: "as answered" if row["rate"] is None else f"{row['rate']:,.1f}"),
    ("requests/s", lambda row: f"{row['requests_per_s']:,.1f}"),
    ("texts/s", lambda row: f"{row['texts_per_s']:,.0f}"),
    ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
    *(
        (f"{name} ms", lambda row, name=name: _number(row[f"{name}_ms"]))
        for name in ("p50", "p90", "p99", "p999", "max")
    ),
    ("errors", lambda row: f"{sum(row['errors'].values()):,}"),
    ("client cores", lambda row: f"{row['client_cores']:.2f}"),
)


def render(results: Sequence[dict[str, Any]]) -> str:
    """The page of some results of `load.py`, `profile_latency.py` and `mixed.py`."""
    loads = [row for result in results for row in result.get("loads", [])]
    profiles = [result for result in results if result.get("benchmark") == "profile_latency"]
    first = results[0]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{_text(first['model'])}</title><style>{_STYLE}</style>",
        f"<h1>{_text(first['model'])} at {_text(first['url'])}</h1>",
        f"<p>{_text(first['date'])}, {_text(first['cpu'])}, {first['cores']} cores, {_text(first['gpu'] or 'no GPU')}, "
        f"commit {_text(first['commit'] or 'unknown')}</p>",
    ]
    if loads:
        parts += [_table(loads), _latency_against_load(loads), _stages_of_loads(loads)]
        for row in loads:
            parts += [f"<h2>{_text(row['name'])}</h2>", _histogram(row), _throughput(row)]
    parts += [_profile(profile) for profile in profiles]
    parts += [_mixed(result) for result in results if result.get("benchmark") == "mixed"]
    parts += [f"<pre>{_text(result['command'])}</pre>" for result in results]
    return "\n".join(part for part in parts if part) + "\n"


def write_report(results: Sequence[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results), encoding="utf-8")


def picture(results: Sequence[dict[str, Any]]) -> str:
    """The first plot that puts loads, stages or phases beside each other, as an SVG file.

    Raises:
        ValueError: there is none, as of a single load.
    """
    loads = [row for result in results for row in result.get("loads", [])]
    plots = [_latency_against_load(loads)]
    plots += [_profile(result) for result in results if result.get("benchmark") == "profile_latency"]
    plots += [_mixed(result) for result in results if result.get("benchmark") == "mixed"]
    found = _FIGURE.search("".join(plots))
    if found is None:
        raise ValueError("no plot of these results puts anything beside something else")
    title, width, height, parts = found.groups()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -28 {width} {int(height) + 28}" width="{width}" '
        f'height="{int(height) + 28}" font-size="12" font-family="system-ui,sans-serif" fill="#222">'
        f'<rect y="-28" width="100%" height="100%" fill="#fff"/><text x="8" y="-8" font-weight="600">{title}</text>'
        f"{parts}</svg>\n"
    )


def _table(loads: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}" for name in ("load", *(name for name, _ in _COLUMNS)))
    rows = [
        f"<tr><td>{_text(row['name'])}" + "".join(f"<td>{_text(show(row))}" for _, show in _COLUMNS) for row in loads
    ]
    return f"<table><tr>{head}{''.join(rows)}</table>"


def _latency_against_load(loads: list[dict[str, Any]]) -> str:
    """For each kind of load that was put on in several strengths: what was asked, or in a closed loop answered."""

    def kind_of(row: dict[str, Any]) -> tuple[str, int, str, str]:
        loop = "closed loop" if row["rate"] is None else "open loop"
        return row["kind"], row["texts_per_request"], row["encoding"], loop

    def strength_of(row: dict[str, Any]) -> float:
        return float(row["requests_per_s"] if row["rate"] is None else row["rate"])

    figures = []
    for kind in dict.fromkeys(map(kind_of, loads)):
        points = sorted((row for row in loads if kind_of(row) == kind and row["answers"]), key=strength_of)
        if len(points) > 1:
            lines = {name: [(strength_of(row), row[f"{name}_ms"]) for row in points] for name in ("p50", "p90", "p99")}
            x_name = f"requests {'answered' if kind[-1] == 'closed loop' else 'asked'} a second"
            title = f"Latency against load: {kind[0]}, {kind[1]} a request, {kind[2]}, {kind[3]}"
            figures.append(_plot(title, lines, x_name, "ms"))
    return "".join(figures)


def _stages_of_loads(loads: list[dict[str, Any]]) -> str:
    stages = {row["name"]: row["stages_ms"] for row in loads if row["stages_ms"]}
    return _bars("Mean time at each stage, as the server says (Server-Timing), ms", stages) if stages else ""


def _profile(profile: dict[str, Any]) -> str:
    """p50 of every stage, in the order in which they happen."""
    stages = {name: row["p50_ms"] for name, row in profile["stages"].items() if name != "sum of the stages"}
    rows = "".join(
        f"<tr><td>{_text(name)}<td>{row['p50_ms']:.3f}<td>{row['p99_ms']:.3f}<td>{row['share']:.1%}"
        for name, row in profile["stages"].items()
    )
    title = f"Stages of {profile['followed']} requests, {profile['clients']} at a time, p50, ms"
    return (
        f"<h2>{_text(title)}</h2>{_bars(title, {'a request': stages})}"
        f"<table><tr><th>stage<th>p50 ms<th>p99 ms<th>share{rows}</table>"
    )


def _mixed(result: dict[str, Any]) -> str:
    """Queries and backfill, each alone and both at once."""
    phases = result["phases"]
    title = f"{result['rate']:g} queries a second, and a backfill in the lane {result['lane']}"
    curves = {name: [(percent, ms) for percent, ms in row["quantiles_ms"]] for name, row in phases.items()}
    alone = phases["backfill"]["backfill_tokens_per_s"] or 1
    kept = {name: {"backfill": phases[name]["backfill_tokens_per_s"] / alone * 100} for name in ("backfill", "both")}
    return (
        f"<h2>{_text(title)}</h2>"
        + _plot(
            "Latency of queries: so many percent took no longer", {n: c for n, c in curves.items() if c}, "%", "ms", "%"
        )
        + _bars("Backfill, percent of what it does alone", kept, "%")
    )


def _histogram(row: dict[str, Any]) -> str:
    bins = row["bins"]
    if not bins:
        return ""
    bars = [(math.log10(lower), math.log10(upper), count) for lower, upper, count in bins]
    return _bar_plot("Latencies: requests by milliseconds", bars, lambda value: _number(10**value), "ms")


def _throughput(row: dict[str, Any]) -> str:
    bars = [(second, second + 1, count) for second, count in enumerate(row["answers_by_second"])]
    return _bar_plot("Answers in each second", bars, lambda value: f"{value:g}", "s") if bars else ""


# --- SVG ---


def _plot(title: str, lines: dict[str, list[tuple[float, float]]], x_name: str, y_name: str, x_unit: str = "/s") -> str:
    """Lines over a logarithmic height."""
    most = max(x for points in lines.values() for x, _ in points) or 1
    ys = [math.log10(max(y, 1e-3)) for points in lines.values() for _, y in points]
    low, high = math.floor(min(ys)), math.floor(max(ys)) + 1

    def at(x: float, y: float) -> tuple[float, float]:
        return _x(x / most), _y((math.log10(max(y, 1e-3)) - low) / (high - low))

    powers = range(low, high + 1)
    y_ticks = [(at(0, 10**power)[1], _number(10**power) + f" {y_name}" * (power == high)) for power in powers]
    parts = [_axes(y_ticks, [(_x(part / 4), _number(most * part / 4)) for part in range(5)])]
    for number, (name, points) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        places = [at(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{name}: {_number(value)} {y_name} at '
            f"{_number(rate)}{x_unit}</title></circle>"
            for (x, y), (rate, value) in zip(places, points, strict=True)
        ]
        parts.append(f'<text x="{_LEFT + 12 + 60 * number}" y="{_TOP + 8}" fill="{color}">{_text(name)}</text>')
    return _figure(title, parts, x_name)


def _bar_plot(title: str, bars: list[tuple[float, float, int]], label: Callable[[float], str], x_name: str) -> str:
    first, last, most = bars[0][0], bars[-1][1], max(count for *_, count in bars) or 1
    parts = [
        _axes(
            [(_y(part / 4), _number(most * part / 4)) for part in range(5)],
            [(_x(part / 4), label(first + (last - first) * part / 4)) for part in range(5)],
        )
    ]
    for lower, upper, count in bars:
        left, right = (_x((edge - first) / (last - first)) for edge in (lower, upper))
        top = _y(count / most)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.5, right - left - 0.5):.1f}" '
            f'height="{_y(0) - top:.1f}" fill="{_COLORS[0]}"><title>{label(lower)} to '
            f"{label(upper)} {x_name}: {count:,}</title></rect>"
        )
    return _figure(title, parts, x_name)


def _bars(title: str, rows: dict[str, dict[str, float]], unit: str = "ms") -> str:
    """A bar a row, of its parts one behind the other."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(names)}
    longest = max(sum(parts.values()) for parts in rows.values()) or 1
    per_line = 6
    height = 34 * len(rows) + 22 * -(-len(names) // per_line) + 20
    parts = []
    for number, (row, stages) in enumerate(rows.items()):
        y, x = 10 + 34 * number, 240.0
        parts.append(f'<text x="0" y="{y + 16}">{_text(row)}</text>')
        for name, value in stages.items():
            width = value / longest * 920
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{colors[name]}" stroke="#fff" '
                f'stroke-width="0.5"><title>{_text(name)}: {value:.3f} {unit}</title></rect>'
            )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{sum(stages.values()):.2f}</text>')
    for number, name in enumerate(names):
        x, y = 240 + 160 * (number % per_line), 34 * len(rows) + 22 + 22 * (number // per_line)
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colors[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{_text(name)}</text>')
    return _svg(title, parts, 1240, height)


def _axes(y_ticks: list[tuple[float, str]], x_ticks: list[tuple[float, str]]) -> str:
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for y, label in y_ticks
    ]
    for x, label in x_ticks:
        anchor = "middle" if x < _x(1) - 1 else "end"  # the last one would end outside
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{label}</text>')
    return "".join(lines)


def _figure(title: str, parts: list[str], x_name: str) -> str:
    label = f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle" fill="#555">{_text(x_name)}</text>'
    return _svg(title, [*parts, label], _WIDTH, _HEIGHT)


def _svg(title: str, parts: list[str], width: int, height: int) -> str:
    return (
        f"<figure><figcaption>{_text(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-size="12" '
        f'font-family="system-ui,sans-serif" fill="#222">{"".join(parts)}</svg></figure>'
    )


def _x(part: float) -> float:
    return _LEFT + part * (_WIDTH - 16 - _LEFT)


def _y(part: float) -> float:
    return _TOP + (1 - part) * (_HEIGHT - _BOTTOM - _TOP)


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(value: object) -> str:
    return html.escape(str(value))


def main() -> int:
    """Read results, write the page or the picture."""
    if len(sys.argv) < 3:
        sys.exit("report.py: RESULT.json [RESULT.json ...] REPORT.html or PICTURE.svg expected")
    *paths, target = map(Path, sys.argv[1:])
    try:
        results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if target.suffix == ".svg":
            target.write_text(picture(results), encoding="utf-8")
        else:
            write_report(results, target)
    except (OSError, ValueError) as error:
        sys.exit(f"report.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
