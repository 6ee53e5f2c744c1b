"""What does the GPU do during a step, and when does it do nothing?

    python benchmarks/trace.py MODEL [--folder DIR] [--output FILE]

Profiles back-to-back steps of the engine (as many in flight as a worker has) at two shapes of about 512 tokens, 25
sequences of 20 and 16 of 32: where a sub-billion model begins to fill a GPU, and where online traffic is. It says

- which share of the time between the first kernel and the last no kernel ran. The ceiling is 0; what is lost between
  steps is the host's (launch too late, inputs copied too late), what is lost within a step the kernels' (each waits for
  the one before, about 1 µs a pair);
- which kernels take the time: their share, how often a step runs them, and how long each takes.

For each shape it writes a Chrome trace (`<shape>.json.gz`, for ui.perfetto.dev) and a picture of two consecutive steps
(`<shape>.png` where matplotlib is installed, else `<shape>.svg`).

The profiler itself costs up to about 1 µs a kernel, so times are a little longer here than in `engine.py`; compare
shares and means, not steps a second. Machine: any CUDA device; one H200 unless the log says otherwise.

Prints tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.record import write_result
from common.config import WorkerConfig
from common.metrics import Metrics
from common.model_location import find_model
from tests.models import make_batch, random_sequences
from worker.engine.engine import Engine

if TYPE_CHECKING:
    from common.wire.messages import Batch, ModelFacts

SHAPES = {"25x20": [20] * 25, "16x32": [32] * 16}
_NUM_STEPS = 40
_NUM_TOP = 9
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
_OTHER_COLOR = "#b0b0b0"
_CATEGORIES = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}

# Read the rows of a step that was launched.
Read = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran on the device, in microseconds of the profiler's clock."""

    lane: str
    name: str
    start_us: float
    stop_us: float

    @property
    def duration_us(self) -> float:
        return self.stop_us - self.start_us


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel."""

    name: str
    share: float  # of the time of all kernels
    per_step: float
    mean_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the kernels of equal steps did; times are medians over the steps."""

    num_steps: int
    idle_share: float  # of the time between the first kernel and the last
    kernels_per_step: float
    step_us: float | None  # from a step's first kernel to its last; None: the kernels cannot be told apart by step
    within_us: float | None  # of it, without any kernel
    between_us: float | None  # from a step's last kernel to the next one's first
    top: list[Kernel]


# --- the engine, also for engine.py ---


@dataclass(frozen=True, slots=True)
class Started:
    engine: Engine
    metrics: Metrics
    ready_s: float  # from the start of loading to being able to serve


def start_engine(model: str, graphs: str, cache_dir: str, device: str = "auto") -> Started:
    """An engine, with what earlier engines measured in `cache_dir`."""
    metrics = Metrics()
    config = WorkerConfig(run_dir="unused", device=device, graphs=graphs, cache_dir=cache_dir)
    began_s = time.monotonic()
    engine = Engine(find_model(model), config, metrics)
    return Started(engine, metrics, time.monotonic() - began_s)


def batch_of(lengths: list[int], facts: ModelFacts, seed: int = 0) -> Batch:
    """Random token ids, which cost the same as text; float32 rows of unit length."""
    sequences = random_sequences(lengths, seed, facts.vocab_size)
    return make_batch(sequences, width=facts.dimensions, normalize=[1] * len(lengths))


def warm(engine: Engine, batch: Batch) -> None:
    """Run a batch until its graph is replayed, if it has one."""
    for _ in range(3):
        engine.step(batch).numpy()
        while engine.has_idle_work:
            engine.idle_work()


def run_ahead(launch: Callable[[], Read], num_steps: int) -> None:
    """Steps back to back: two are launched before the oldest is waited for."""
    unread: deque[Read] = deque()
    for _ in range(num_steps):
        unread.append(launch())
        if len(unread) > 2:
            unread.popleft()()
    while unread:
        unread.popleft()()


# --- the profile ---


def profile(engine: Engine, batch: Batch, num_steps: int, path: Path) -> list[Span]:
    """The device's work of so many steps of a warm batch, in order of start; `path` (.json.gz) gets the trace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_ahead(lambda: engine.step(batch).numpy, num_steps)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return read_spans(path)


def read_spans(path: Path) -> list[Span]:
    """Kernels and copies of a Chrome trace, in order of start."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = []
    for event in events:
        what = _CATEGORIES.get(event.get("cat", ""))
        if what is not None and event.get("ph") == "X":
            start_us, lane = float(event["ts"]), f"{what}, stream {event['args'].get('stream', '?')}"
            spans.append(Span(lane, event["name"], start_us, start_us + float(event["dur"])))
    return sorted(spans, key=lambda span: span.start_us)


def idle_us(spans: list[Span]) -> float:
    """Time between the first start and the last stop in which none of the spans (in order of start) ran."""
    idle, busy_until_us = 0.0, spans[0].start_us
    for span in spans:
        idle += max(0.0, span.start_us - busy_until_us)
        busy_until_us = max(busy_until_us, span.stop_us)
    return idle


def split_steps(kernels: list[Span], num_steps: int) -> list[list[Span]] | None:
    """The kernels of each step: equal steps run equally many, one step after the other."""
    per_step, rest = divmod(len(kernels), num_steps)
    if rest or not per_step:
        return None
    return [kernels[first : first + per_step] for first in range(0, len(kernels), per_step)]


def summarize(spans: list[Span], num_steps: int) -> Timeline:
    """Raises ValueError: no kernel was seen."""
    kernels = [span for span in spans if span.lane.startswith("kernels")]
    if not kernels:
        raise ValueError("the profiler saw no kernel: is another profiler attached to the device?")
    whole_us = max(kernel.stop_us for kernel in kernels) - kernels[0].start_us
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.duration_us)
    total_us = sum(map(sum, by_name.values()))
    steps = split_steps(kernels, num_steps)
    step_us = within_us = between_us = None
    if steps is not None and len(steps) > 1:
        ends_us = [max(kernel.stop_us for kernel in step) for step in steps]
        step_us = statistics.median(end - step[0].start_us for step, end in zip(steps, ends_us, strict=True))
        within_us = statistics.median(map(idle_us, steps))
        between_us = statistics.median(
            step[0].start_us - end for end, step in zip(ends_us[:-1], steps[1:], strict=True)
        )
    return Timeline(
        num_steps=num_steps,
        idle_share=idle_us(kernels) / whole_us,
        kernels_per_step=len(kernels) / num_steps,
        step_us=step_us,
        within_us=within_us,
        between_us=between_us,
        top=[
            Kernel(name, sum(times) / total_us, len(times) / num_steps, statistics.mean(times))
            for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
        ],
    )


# --- the picture ---


def draw(spans: list[Span], timeline: Timeline, title: str, path: Path) -> Path:
    """Two consecutive steps of the middle, one lane a stream; the path with the ending of what could be made."""
    kernels = [span for span in spans if span.lane.startswith("kernels")]
    per_step, middle = round(timeline.kernels_per_step), timeline.num_steps // 2
    shown_kernels = kernels[middle * per_step : (middle + 2) * per_step] or kernels
    first_us, last_us = shown_kernels[0].start_us, max(kernel.stop_us for kernel in shown_kernels)
    shown = [span for span in spans if span.stop_us >= first_us and span.start_us <= last_us]
    colors = {kernel.name: color for kernel, color in zip(timeline.top, _COLORS, strict=False)}
    try:
        from matplotlib import pyplot
    except ImportError:
        path = path.with_suffix(".svg")
        path.write_text(svg(shown, colors, title), encoding="utf-8")
        return path
    lanes = sorted({span.lane for span in shown}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(18, 2 + 0.7 * len(lanes)))
    for number, lane in enumerate(lanes):
        inside = [span for span in shown if span.lane == lane]
        axes.broken_barh(
            [(span.start_us - first_us, span.duration_us) for span in inside],
            (number - 0.4, 0.8),
            facecolors=[colors.get(span.name, _OTHER_COLOR) for span in inside],
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("µs")
    axes.set_title(title)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axes.legend(handles, [short(name) for name in colors], loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    figure.savefig(path.with_suffix(".png"), dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path.with_suffix(".png")


def svg(shown: list[Span], colors: dict[str, str], title: str) -> str:
    """The same picture by hand: 1,600 units wide, names as tooltips and below."""
    first_us = min(span.start_us for span in shown)
    scale = 1400 / (max(span.stop_us for span in shown) - first_us)
    lanes = sorted({span.lane for span in shown})
    height = 70 + 40 * len(lanes) + 18 * len(colors)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1600 {height}" font-family="sans-serif" font-size="12">',
        f'<text x="10" y="20">{html.escape(title)}</text>',
    ]
    for number, lane in enumerate(lanes):
        top = 40 + 40 * number
        parts.append(f'<text x="10" y="{top + 20}">{html.escape(lane)}</text>')
        for span in (span for span in shown if span.lane == lane):
            x, width = 180 + (span.start_us - first_us) * scale, span.duration_us * scale
            tip = html.escape(f"{short(span.name)}: {span.duration_us:.1f} µs from {span.start_us - first_us:.1f} on")
            parts.append(
                f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="30" '
                f'fill="{colors.get(span.name, _OTHER_COLOR)}"><title>{tip}</title></rect>'
            )
    for number, (name, color) in enumerate(colors.items()):
        y = 60 + 40 * len(lanes) + 18 * number
        parts.append(f'<rect x="180" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="200" y="{y}">{html.escape(short(name))}</text>')
    return "\n".join([*parts, "</svg>\n"])


def short(name: str) -> str:
    """The beginning of a kernel's name without what every C++ name begins with."""
    name = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= 70 else name[:67] + "..."


def main() -> int:
    """Profile each shape, print, write the traces and the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a model's folder")
    parser.add_argument("--folder", type=Path, default=Path("trace"), help="for traces and pictures [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("trace.py: needs a CUDA device")
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache_dir:
        result = _run(args.model, args.folder, cache_dir)
    write_result(result, args.output)
    return 0


def _run(model: str, folder: Path, cache_dir: str) -> dict[str, object]:
    engine = start_engine(model, "lazy", cache_dir).engine
    facts = engine.hello()
    print(f"{facts.name}, {facts.dtype} on {torch.cuda.get_device_name()}, attention {facts.attention}")
    results = {}
    for shape, lengths in SHAPES.items():
        batch = batch_of(lengths, facts)
        warm(engine, batch)
        path = folder / f"{shape}.json.gz"
        profile(engine, batch, 3, path)  # the profiler's own first use takes long, and is not what is looked for
        spans = profile(engine, batch, _NUM_STEPS, path)
        timeline = summarize(spans, _NUM_STEPS)
        picture = draw(spans, timeline, f"{facts.name}, two steps of {shape} (sequences x tokens)", folder / shape)
        _print_timeline(shape, timeline)
        print(f"{path} and {picture}\n")
        results[shape] = {**asdict(timeline), "trace": str(path), "picture": str(picture)}
    return {"benchmark": "trace", "model": facts.name, "attention": facts.attention, "shapes": results}


def _print_timeline(shape: str, timeline: Timeline) -> None:
    print(f"{shape}: idle {timeline.idle_share:.1%} of the time, {timeline.kernels_per_step:.0f} kernels a step")
    if timeline.step_us is not None:
        print(
            f"a step takes {timeline.step_us:.0f} µs, of which {timeline.within_us:.0f} between its kernels; "
            f"{timeline.between_us:.1f} µs from step to step"
        )
    print(f"{'share':>7}{'a step':>8}{'mean µs':>9}  kernel")
    for kernel in timeline.top[:_NUM_TOP]:
        print(f"{kernel.share:>7.1%}{kernel.per_step:>8.1f}{kernel.mean_us:>9.2f}  {short(kernel.name)}")


if __name__ == "__main__":
    sys.exit(main())
