"""What does attention of one layer take, by backend, and how far is that from the least it could take?

    python benchmarks/attention.py [--shapes qwen3,xlmr,minilm] [--backends NAME,...] [--causal] [--output FILE]

Shapes of work as an embedding server has them: one short query, queries batched, documents, one long text. Each in
tokens padded to a bucket (by a dummy sequence) and rows of cu_seqlens padded to a capacity S, since some kernels pay
for empty rows and some do not. Eight calls are captured in a graph, as the engine does it, and replayed; microseconds
of one call, the median of the turns that all backends take. In brackets what the host prepares once a batch, for all
layers.

The floor is the larger of two ceilings measured on an H200: inputs and output over 4.3 TB/s, or the two products over
790 TFLOP/s (bf16, of the sequences' own lengths; half of that if causal). Results are compared with the formula in
float32 on up to 16 sequences; the largest error of each backend, relative where outputs are above 1, is printed below.
A backend that fails has no time in that row. One that breaks the device (an illegal access) ends the run: it is named,
what was measured before is written, and the status is 1.

Without --backends all that are ready take part; those named are compiled first if they have to be. Machine: any CUDA
device; the table takes about a minute. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.record import write_result
from worker.attention import AttentionUnavailable, HeadShape
from worker.attention.measure import GraphPool, compare, elapsed_ms, qkv, ragged
from worker.attention.reference import attend
from worker.attention.registry import BACKENDS
from worker.batch.capacity import MAX_DUMMY_LENGTH, Capacity

if TYPE_CHECKING:
    import numpy.typing as npt

    from worker.attention import Attention
    from worker.batch.ragged import RaggedBatch

logger = logging.getLogger(__name__)

BYTES_PER_S = 4.3e12
OPERATIONS_PER_S = 790e12

NUM_CALLS = 8
NUM_TURNS = 15
NUM_TURNS_IF_LONG = 3
LONG_MS = 20.0
NUM_PREPARES = 9
NUM_CHECKED = 16

SHAPES = {
    "qwen3": HeadShape(num_heads=16, num_kv_heads=8, head_dim=128, causal=False, dtype=torch.bfloat16),
    "xlmr": HeadShape(num_heads=16, num_kv_heads=16, head_dim=64, causal=False, dtype=torch.bfloat16),
    "minilm": HeadShape(num_heads=12, num_kv_heads=12, head_dim=32, causal=False, dtype=torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Work:
    """`num_sequences` of up to `longest` tokens, padded to a capacity."""

    num_sequences: int
    longest: int
    capacity: Capacity

    def lengths(self) -> npt.NDArray[np.int32]:
        """One of the longest, the others as near to it as fits."""
        room = self.capacity.tokens - self.longest
        others = min(self.longest, room // max(1, self.num_sequences - 1))
        lengths = np.full(self.num_sequences, others, dtype=np.int32)
        lengths[0] = self.longest
        return lengths


WORKS = (
    Work(1, 32, Capacity(32, 1)),
    Work(1, 20, Capacity(32, 8)),
    Work(1, 20, Capacity(32, 64)),
    Work(1, 20, Capacity(32, 512)),
    Work(25, 20, Capacity(512, 32)),
    Work(25, 20, Capacity(512, 512)),
    Work(4, 128, Capacity(512, 8)),
    Work(1, 512, Capacity(512, 8)),
    Work(6, 300, Capacity(512, 16)),
    Work(12, 320, Capacity(3840, 16)),
    Work(12, 320, Capacity(3840, 512)),
    Work(200, 20, Capacity(4000, 256)),
    Work(32, 512, Capacity(16384, 64)),
    Work(2, 2048, Capacity(4096, 8)),
    Work(1, 8192, Capacity(8192, 8)),
    Work(1, 32768, Capacity(32768, 8)),
)


def floor_us(shape: HeadShape, capacity: Capacity, lengths: npt.NDArray[np.int32]) -> float:
    """What no kernel can be below: dummies are written too, but their products are not counted."""
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads  # query, output; key, value
    num_bytes = capacity.tokens * heads * shape.head_dim * shape.dtype.itemsize
    pairs = float((lengths.astype(np.int64) ** 2).sum()) / (2 if shape.causal else 1)
    operations = 4 * pairs * shape.num_heads * shape.head_dim
    return max(num_bytes / BYTES_PER_S, operations / OPERATIONS_PER_S) * 1e6


@dataclass(slots=True)
class Timing:
    us: float
    prepare_us: float
    error: float
    cosine: float


class DeviceLost(RuntimeError):
    """The device answers nothing but errors any more; the text says what it was doing."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one backend launches, and all that its graph reads: that must not be freed before it."""

    instance: Attention
    offsets: npt.NDArray[np.int32]
    batch: RaggedBatch
    launch: Callable[[], object]


class Run:
    """One shape of work: its inputs, and what the formula makes of them."""

    def __init__(self, shape: HeadShape, work: Work, device: torch.device) -> None:
        self._shape = shape
        self._work = work
        self._device = device
        lengths = work.lengths()
        num_dummies = -(-(work.capacity.tokens - int(lengths.sum())) // MAX_DUMMY_LENGTH)
        assert len(lengths) + num_dummies <= work.capacity.sequences
        starts = np.cumsum(lengths) - lengths
        checked = np.unique(np.linspace(0, len(lengths) - 1, NUM_CHECKED).astype(int))
        self._spans = [slice(int(starts[i]), int(starts[i] + lengths[i])) for i in checked]
        self._query, self._key, self._value = qkv(shape, work.capacity.tokens, device)
        expected = [attend(self._query[span], self._key[span], self._value[span], shape.mask) for span in self._spans]
        self._expected = torch.cat(expected)

    def measure(self, backends: list[Attention], pool: GraphPool) -> dict[str, Timing]:
        """All backends take turns; one that fails is left out, and said.

        Raises DeviceLost: a backend broke the device.
        """
        timings: dict[str, Timing] = {}
        turns: dict[str, Turn] = {}
        for backend in backends:
            try:
                turns[backend.name], timings[backend.name] = self._begin(backend, pool)
            except Exception:  # other people's kernels raise what they like
                logger.exception("%s failed at %s", backend.name, self._work)
                self._check_device(backend.name)
        samples_ms: dict[str, list[float]] = {name: [] for name in turns}
        index, num_turns = -1, NUM_TURNS
        while index < num_turns:
            for name, turn in list(turns.items()):
                try:
                    turn.instance.prepare(turn.offsets)
                    launch_ms = elapsed_ms(turn.launch)
                except Exception:  # as above
                    logger.exception("%s failed at %s", name, self._work)
                    self._check_device(name)
                    del turns[name], timings[name]
                    continue
                if index >= 0:
                    samples_ms[name].append(launch_ms)
                elif launch_ms > LONG_MS:
                    num_turns = NUM_TURNS_IF_LONG
            index += 1
        for name, timing in timings.items():
            timing.us = statistics.median(samples_ms[name]) * 1e3 / NUM_CALLS
        return timings

    def _begin(self, backend: Attention, pool: GraphPool) -> tuple[Turn, Timing]:
        """A checked backend, ready to take turns, and its timing but for the device's part."""
        batch, offsets = ragged(self._work.lengths(), self._work.capacity, self._device, backend)
        instance = backend.at(self._work.capacity.tokens, self._work.capacity.sequences)
        prepares_us = []
        for _ in range(NUM_PREPARES):
            started_ns = time.perf_counter_ns()
            instance.prepare(offsets)
            prepares_us.append((time.perf_counter_ns() - started_ns) / 1e3)
        output = self._call(instance, batch)
        error, cosine = compare(torch.cat([output[span] for span in self._spans]), self._expected)
        launch = pool.repeated(lambda: self._call(instance, batch), NUM_CALLS)
        return Turn(instance, offsets, batch, launch), Timing(0.0, statistics.median(prepares_us), error, cosine)

    def _check_device(self, name: str) -> None:
        """Raises DeviceLost: what just failed left the device unusable."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(f"{name} at {self._work}: {error}") from error

    def _call(self, instance: Attention, batch: RaggedBatch) -> torch.Tensor:
        return instance(self._query, self._key, self._value, batch, self._shape.mask)


def open_backends(names: list[str], shape: HeadShape, device: torch.device) -> list[Attention]:
    """Those named, or without names all that are ready; what is left out is said."""
    backends = []
    for name in names or [row.name for row in BACKENDS.values() if row.is_measured]:
        backend = BACKENDS[name]
        reason = backend.unavailable(shape, device) or (None if names else backend.unready(shape))
        if reason is None:
            try:
                backends.append(backend.open(shape, device))
            except AttentionUnavailable as error:
                reason = str(error)
        if reason is not None:
            print(f"without {name}: {reason}")
    return backends


@torch.inference_mode()
def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--backends", default="", help=f"some of {', '.join(BACKENDS)}")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda")
    device_name = torch.cuda.get_device_name(device)
    rows: list[dict[str, object]] = []
    started_s = time.monotonic()
    failure = None
    with torch.cuda.stream(torch.cuda.Stream(device)):
        pool = GraphPool(device)
        try:
            for shape_name in args.shapes.split(","):
                shape = replace(SHAPES[shape_name], causal=args.causal)
                backends = open_backends([name for name in args.backends.split(",") if name], shape, device)
                print_rows(shape_name, shape, backends, pool, device, rows)
        except DeviceLost as error:
            failure = str(error)
            print(f"the device is lost, stopping: {failure}")
    result = {
        "benchmark": "attention",
        "device": device_name,
        "torch": torch.__version__,
        "causal": args.causal,
        "took_s": round(time.monotonic() - started_s, 1),
        "failure": failure,
        "rows": rows,
    }
    write_result(result, args.output)
    if failure is not None:
        raise SystemExit(1)


def print_rows(
    shape_name: str,
    shape: HeadShape,
    backends: list[Attention],
    pool: GraphPool,
    device: torch.device,
    rows: list[dict[str, object]],
) -> None:
    """Measure one head shape, print its table and add it to `rows`.

    Raises DeviceLost: a backend broke the device.
    """
    print(f"\n{shape_name}, {'causal' if shape.causal else 'bidirectional'}: µs of one layer (host µs of a batch)")
    columns = [backend.name for backend in backends]
    print(f"{'sequences':>14}{'tokens':>7}{'S':>5}" + "".join(f"{name:>20}" for name in columns) + f"{'floor':>10}")
    worst: dict[str, float] = dict.fromkeys(columns, 0.0)
    for work in WORKS:
        timings = Run(shape, work, device).measure(backends, pool)
        torch.cuda.empty_cache()
        floor = floor_us(shape, work.capacity, work.lengths())
        cells = ""
        for name in columns:
            timing = timings.get(name)
            cells += f"{'–' if timing is None else f'{timing.us:.1f} ({timing.prepare_us:.0f})':>20}"
            worst[name] = max(worst[name], 0.0 if timing is None else timing.error)
        head = f"{work.num_sequences} × ≤{work.longest}"
        print(f"{head:>14}{work.capacity.tokens:>7}{work.capacity.sequences:>5}{cells}{floor:>10.2f}", flush=True)
        rows.append(
            {
                "shape": shape_name,
                "sequences": work.num_sequences,
                "longest": work.longest,
                "tokens": work.capacity.tokens,
                "capacity": work.capacity.sequences,
                "floor_us": floor,
                "backends": {name: asdict(timing) for name, timing in timings.items()},
            }
        )
    print("largest error: " + ", ".join(f"{name} {error:.4f}" for name, error in worst.items()))


if __name__ == "__main__":
    main()
