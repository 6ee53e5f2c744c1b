"""How long does a step of the engine take, against plain torch, against a graph of plain torch, against the hardware?

    python benchmarks/engine.py MODEL [--shapes 32x1,512x16] [--batches 5000] [--output FILE]

The engine alone: no gateway, no scheduler, no sockets; from a batch of token ids to rows on the host. MODEL is a folder
of a Qwen3 model (for other families there are no peers to compare with). One run has:

- The step table: tokens × sequences of equal length, for four variants that take turns, so that a machine that slows
  down slows all of them. *eager torch* is the forward pass as transformers writes it (separate q, k, v, gate and up;
  RMSNorm and rotary positions of single operations; scaled_dot_product_attention), *torch in a graph* the same as one
  CUDA graph a shape, what graphs alone would give; *eager* and *graphs* are this engine with `--graphs` off and lazy.
  Medians of milliseconds, back to back (from the end of a step to that of those behind it, as a busy worker has them)
  and alone (from the call to the rows on the host, as a lone request sees it).
- The floor of each shape: max(weights / 4.3 TB/s, products / 790 TFLOP/s) + attention / 790 TFLOP/s, what one H200 was
  measured to do at best. The embedding table is gathered, not read, and does not count. Causal attention is half.
- The lowest cosine of the rows to the same weights computed in float32 by the plain forward (torch, no kernel of ours),
  for eager torch and for the engine, and between the two: a fast variant that is wrong would show.
- What the host pays for a step that replays a graph, to an idle device and to a busy one; how long the device is idle
  between back-to-back steps (see `trace.py`).
- A mixed hour: batches as they form at loads that come and go (lengths log-normal with median 15 and 90th percentile
  182, a fifth documents of about 310), through one engine that starts without graphs: how many graphs it comes to, what
  capturing one takes, what they hold, how many steps are replays, how much is padding.
- How long it takes from the start of loading to being able to serve, without and with what an earlier start kept.

The token ids are random and seeded, which costs the same as text. Machine: any CUDA device, the floor is an H200's; on
a CPU it runs what makes sense there, to try the script itself.

Prints tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.plain import Launch, PlainQwen3, Read, Rows, as_matrix
from benchmarks.record import write_result
from benchmarks.trace import Started, batch_of, profile, run_ahead, start_engine, summarize, warm
from common.model_location import find_model
from worker.checkpoint.architectures import ARCHITECTURES
from worker.checkpoint.declared import Checkpoint
from worker.models.families.qwen3 import Qwen3Config

if TYPE_CHECKING:
    from common.metrics import Metrics
    from common.wire.messages import Batch, ModelFacts
    from worker.engine.engine import Engine

_BYTES_PER_S = 4.3e12
_OPERATIONS_PER_S = 790e12
_REFERENCE_OPERATIONS = 1e14  # no float32 reference beyond: it would take longer than everything else

_NUM_TURNS = 5
_SAMPLE_S = 0.08  # of steps in a turn of a variant
_MAX_STEPS = 20  # in a turn
_HOST_SHAPE = [20] * 25
_CAPTURE_SUM = "hedgerow_graph_capture_seconds_sum"


@dataclass(frozen=True, slots=True)
class Shape:
    """So many sequences of equal length."""

    length: int
    num_sequences: int

    @property
    def name(self) -> str:
        return f"{self.length * self.num_sequences}x{self.num_sequences}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """TOKENSxSEQUENCES, the tokens rounded to a multiple of the sequences below."""
        num_tokens, _, num_sequences = text.partition("x")
        return cls(int(num_tokens) // int(num_sequences), int(num_sequences))


_SHAPES = "32x1,512x16,512x25,2048x16,4096x16,16384x32,32768x1"


# --- what the hardware allows ---


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model needs, from its checkpoint."""

    linear_weights: int
    num_layers: int
    attention_width: int  # query heads × head_dim
    causal: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint, config: Qwen3Config | None) -> Costs:
        values = checkpoint.config.integer
        weights = sum(
            math.prod(shape)
            for name, shape in _shapes_of(checkpoint.folder)
            if len(shape) == 2 and not any(part in name for part in ("embed", "lm_head", "pooler"))
        )
        width = config.num_heads * config.head_dim if config is not None else values("hidden_size")
        return cls(weights, values("num_hidden_layers"), width, config is not None and config.causal)

    def products(self, shape: Shape) -> float:
        return 2.0 * self.linear_weights * shape.length * shape.num_sequences

    def attention(self, shape: Shape) -> float:
        operations = 4.0 * self.num_layers * self.attention_width * shape.length**2 * shape.num_sequences
        return operations / 2 if self.causal else operations

    def floor_ms(self, shape: Shape) -> float:
        """Of 16-bit weights."""
        linear_s = max(2 * self.linear_weights / _BYTES_PER_S, self.products(shape) / _OPERATIONS_PER_S)
        return 1e3 * (linear_s + self.attention(shape) / _OPERATIONS_PER_S)


def _shapes_of(folder: Path) -> Iterator[tuple[str, list[int]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_slice(name).get_shape()


def engine_variant(engine: Engine) -> Launch:
    """This engine, its bytes read as the float32 that they are."""

    def launch(batch: Batch) -> Read:
        lazy = engine.step(batch)
        return lambda: lazy.numpy().rows.view(np.float32)

    return launch


# --- measuring ---


def back_to_back_ms(launch: Launch, batch: Batch, num_steps: int) -> float:
    """A step's share of many in flight: from the end of one step, as its reader sees it, to the end of the last."""
    unread: deque[Read] = deque([launch(batch), launch(batch)])
    unread.popleft()()
    began_s = time.perf_counter()
    for _ in range(num_steps - 1):
        unread.append(launch(batch))
        unread.popleft()()
    unread.popleft()()
    return (time.perf_counter() - began_s) / num_steps * 1e3


def alone_ms(launch: Launch, batch: Batch) -> float:
    began_s = time.perf_counter()
    launch(batch)()
    return (time.perf_counter() - began_s) * 1e3


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds: medians, and the 90th percentile of a lone step."""

    back_to_back_ms: float
    alone_ms: float
    alone_p90_ms: float
    num_steps: int


def measure(variants: dict[str, Launch], batch: Batch) -> dict[str, Timing]:
    """All variants in turns; those that are slow get fewer steps."""
    expected_s = {name: min(alone_ms(launch, batch) for _ in range(2)) / 1e3 for name, launch in variants.items()}
    counts = {name: min(max(1, int(_SAMPLE_S / took_s)), _MAX_STEPS) for name, took_s in expected_s.items()}
    together: dict[str, list[float]] = {name: [] for name in variants}
    alone: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3 if max(expected_s.values()) > 0.3 else _NUM_TURNS):
        for name, launch in variants.items():
            together[name].append(back_to_back_ms(launch, batch, counts[name]))
            alone[name] += [alone_ms(launch, batch) for _ in range(counts[name])]
    return {
        name: Timing(
            float(np.median(together[name])),
            float(np.median(alone[name])),
            float(np.percentile(alone[name], 90)),
            len(alone[name]),
        )
        for name in variants
    }


def lowest_cosine(rows: Rows, expected: Rows) -> float:
    left, right = rows.astype(np.float64), expected.astype(np.float64)
    scales = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float((np.einsum("ij,ij->i", left, right) / scales).min())


def host_us(engine: Engine, batch: Batch, *, busy: bool) -> dict[str, float]:
    """How long `step` keeps the host, in microseconds, while the device runs what was launched before or nothing."""
    samples: list[float] = []
    unread: deque[Callable[[], object]] = deque()
    for turn in range(-10, 300):
        if len(unread) > (1 if busy else 0):
            unread.popleft()()
        began_ns = time.perf_counter_ns()
        unread.append(engine.step(batch).numpy)
        if turn >= 0:
            samples.append((time.perf_counter_ns() - began_ns) / 1e3)
    while unread:
        unread.popleft()()
    return {"p50": float(np.percentile(samples, 50)), "p99": float(np.percentile(samples, 99))}


# --- a mixed hour ---


def mixed_lengths(facts: ModelFacts, generator: np.random.Generator) -> tuple[list[int], bool]:
    """A batch as it forms from what waits at a load between idle and busy, and whether more was waiting."""
    load = math.exp(generator.uniform(math.log(0.5), math.log(64)))  # sequences that arrive during a step
    waiting = 1 + int(generator.exponential(load))
    texts = np.exp(generator.normal(math.log(15), 1.947, waiting))
    documents = generator.normal(310, 60, waiting)
    lengths = np.where(generator.random(waiting) < 0.2, documents, texts)
    lengths = np.clip(lengths.astype(int), 3, min(2048, facts.max_tokens))
    fits = int(np.searchsorted(np.cumsum(lengths), facts.max_batch_tokens, side="right"))
    return lengths[: max(1, fits)].tolist(), fits < waiting or load > 8


def mixed_hour(started: Started, num_batches: int, limit_s: float) -> dict[str, float]:
    """Steps of an hour's shapes, two in flight; the engine tends its graphs where nobody waits."""
    engine, metrics, generator = started.engine, started.metrics, np.random.default_rng(0)
    facts = engine.hello()
    before, began_s = counters(metrics), time.monotonic()
    captures_s = [before[_CAPTURE_SUM]]  # running totals
    done = 0
    unread: deque[Callable[[], object]] = deque()
    while done < num_batches and time.monotonic() - began_s < limit_s:
        lengths, waits = mixed_lengths(facts, generator)
        unread.append(engine.step(batch_of(lengths, facts, seed=done)).numpy)
        done += 1
        while len(unread) > (2 if waits else 0):
            unread.popleft()()
        if not waits:
            engine.idle_work()
        if (total_s := counters(metrics)[_CAPTURE_SUM]) > captures_s[-1]:
            captures_s.append(total_s)
    while unread:
        unread.popleft()()
    after = counters(metrics)
    runs = {kind: after.get(f"hedgerow_graph_runs_total {kind}", 0.0) for kind in ("replay", "eager", "large")}
    runs = {kind: count - before.get(f"hedgerow_graph_runs_total {kind}", 0.0) for kind, count in runs.items()}
    tokens = {
        kind: after[name] - before.get(name, 0.0)
        for kind in ("padding", "real")
        if (name := f"hedgerow_step_tokens_total {kind}") in after
    }
    captures_ms = 1e3 * np.diff(captures_s) if len(captures_s) > 1 else np.zeros(1)
    return {
        "batches": done,
        "seconds": time.monotonic() - began_s,
        "graphs": after["hedgerow_graphs"],
        "bytes_per_graph": after["hedgerow_graph_bytes"] / max(1.0, after["hedgerow_graphs"]),
        "captures": len(captures_s) - 1,
        "capture_ms_p50": float(np.median(captures_ms)),
        "capture_ms_max": float(captures_ms.max()),
        "evictions": after["hedgerow_graph_evictions_total"] - before["hedgerow_graph_evictions_total"],
        **{f"share_{kind}": count / max(1, done) for kind, count in runs.items()},
        "padding_share": tokens.get("padding", 0.0) / max(1.0, sum(tokens.values())),
    }


def counters(metrics: Metrics) -> dict[str, float]:
    """What the engine counts of its graphs, by name and label."""
    kept = (
        metrics.graph_runs,
        metrics.step_tokens,
        metrics.graph_capture_seconds,
        metrics.graph_evictions,
        metrics.graphs,
        metrics.graph_bytes,
    )
    samples = [sample for metric in kept for family in metric.collect() for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


# --- the run ---


def main() -> int:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a model's folder")
    parser.add_argument("--shapes", default=_SHAPES, help="TOKENSxSEQUENCES, ... [%(default)s]")
    parser.add_argument("--batches", type=int, default=5_000, help="of the mixed hour [%(default)s]")
    parser.add_argument("--mixed-seconds", type=float, default=20, help="at most, for the mixed hour [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    args = parser.parse_args()
    shapes = [Shape.parse(text) for text in args.shapes.split(",")]
    with tempfile.TemporaryDirectory() as cache_dir:
        result = _run(args.model, shapes, args.batches, args.mixed_seconds, cache_dir)
    write_result(result, args.output)
    return 0


def _run(model: str, shapes: list[Shape], num_batches: int, mixed_s: float, cache_dir: str) -> dict[str, object]:
    cuda = torch.cuda.is_available()
    eager = start_engine(model, "off", cache_dir)
    facts = eager.engine.hello()
    print(f"{facts.name}, {facts.dtype} on {facts.device}, attention {facts.attention}")
    result: dict[str, object] = {"benchmark": "engine", "model": facts.name, "attention": facts.attention}
    result |= {"dtype": facts.dtype, "max_batch_tokens": facts.max_batch_tokens, "ready_first_s": eager.ready_s}
    variants = {"eager": engine_variant(eager.engine)}
    graphs = None
    if cuda:
        graphs = start_engine(model, "lazy", cache_dir)
        variants["graphs"] = engine_variant(graphs.engine)
        result["ready_again_s"] = graphs.ready_s
        print(f"ready after {eager.ready_s:.1f} s, and after {graphs.ready_s:.1f} s with what the first start kept")
        # First, while the engine has no graphs but those of its own check.
        result["mixed_hour"] = mixed = mixed_hour(graphs, num_batches, mixed_s)
        _print_values("mixed hour", mixed)
    checkpoint = Checkpoint.read(find_model(model).path)
    is_qwen3 = ARCHITECTURES[checkpoint.architecture].family == "qwen3"
    config = Qwen3Config.parse(checkpoint.architecture, checkpoint.config) if is_qwen3 else None
    peer = None
    if config is not None:
        dtype = getattr(torch, facts.dtype)
        peer = PlainQwen3(checkpoint.folder, config, checkpoint.poolings[0], torch.device(facts.device), dtype)
    result["steps"] = _step_table(
        shapes, variants, graphs.engine if graphs is not None else None, peer, Costs.read(checkpoint, config), facts
    )
    if graphs is not None:
        result |= _host_costs(graphs.engine, Path(cache_dir) / "trace.json.gz")
    return result


def _step_table(
    shapes: list[Shape],
    engines: dict[str, Launch],
    graphs: Engine | None,
    peer: PlainQwen3 | None,
    costs: Costs,
    facts: ModelFacts,
) -> dict[str, object]:
    names = [*(["eager torch"] if peer else []), *(["torch in a graph"] if peer and graphs else []), *engines]
    print(f"\n{'back to back / alone, ms':<26}" + "".join(f"{name:>20}" for name in names), end="")
    print(f"{'floor':>9}{'to floor':>10}{'to torch':>10}{'1 - cosine':>11}{'of torch':>11}{'between':>11}")
    table: dict[str, object] = {}
    for shape in shapes:
        if shape.length > facts.max_tokens:
            print(f"{shape.name:<26} longer than the model takes")
            continue
        batch = batch_of([shape.length] * shape.num_sequences, facts)
        if graphs is not None:
            warm(graphs, batch)
        variants: dict[str, Launch] = {}
        if peer is not None:
            variants["eager torch"] = peer.variant()
            if graphs is not None:
                variants["torch in a graph"] = peer.graph_variant(batch)
        variants |= engines
        rows = {name: launch(batch)().copy() for name, launch in variants.items()}
        timings = measure(variants, batch)
        del variants  # and with it the memory of the peer's graph
        ours, last = rows[names[-1]], timings[names[-1]]
        cosines: dict[str, float] = {}
        if peer is not None:
            cosines["between"] = lowest_cosine(ours, rows["eager torch"])
            if costs.products(shape) + costs.attention(shape) < _REFERENCE_OPERATIONS:
                expected = peer(as_matrix(batch).to(facts.device), reference=True).cpu().numpy()
                cosines |= {name: lowest_cosine(got, expected) for name, got in rows.items()}
        floor_ms = costs.floor_ms(shape)
        to_floor = last.back_to_back_ms / floor_ms
        to_torch = last.back_to_back_ms / timings[names[0]].back_to_back_ms
        columns = [f"{timings[name].back_to_back_ms:.2f} / {timings[name].alone_ms:.2f}" for name in names]
        misses = [cosines.get(name) for name in (names[-1], "eager torch", "between")]
        print(
            f"{shape.name:<26}" + "".join(f"{column:>20}" for column in columns) + f"{floor_ms:>9.2f}"
            f"{to_floor:>10.2f}{to_torch:>10.3f}"
            + "".join(f"{'-' if value is None else f'{1 - value:.1e}':>11}" for value in misses),
            flush=True,
        )
        table[shape.name] = {
            "variants": {name: asdict(timing) for name, timing in timings.items()},
            "floor_ms": floor_ms,
            "to_floor": to_floor,
            "to_torch": to_torch,
            "lowest_cosine": cosines,
        }
    return table


def _host_costs(engine: Engine, trace: Path) -> dict[str, object]:
    batch = batch_of(_HOST_SHAPE, engine.hello())
    warm(engine, batch)
    costs = {"idle": host_us(engine, batch, busy=False), "busy": host_us(engine, batch, busy=True)}
    for name, values in costs.items():
        print(f"host cost of a replayed step, {name} device: p50 {values['p50']:.0f} µs, p99 {values['p99']:.0f} µs")
    run_ahead(lambda: engine.step(batch).numpy, 10)
    profile(engine, batch, 3, trace)
    timeline = asdict(summarize(profile(engine, batch, 30, trace), 30))
    del timeline["top"]
    _print_values("device, 25 queries of 20 tokens back to back", timeline)
    return {"host_us": costs, "device": timeline}


def _print_values(title: str, values: dict[str, float]) -> None:
    shown = (
        f"{name} {value:,.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
    print(f"{title}: {', '.join(shown)}")


if __name__ == "__main__":
    sys.exit(main())
