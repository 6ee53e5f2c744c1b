"""Every metric: its name, unit, buckets and meaning. Nothing else declares one.

The processes of a suite write into small memory-mapped files below the run folder; whichever gateway answers
/metrics adds them all up, so the answer is the same from each (prometheus_client's multiprocess mode). Counters outlive
the process that counted; gauges go with it.

Of several models each has such files in its own part of the run folder. What its scheduler and workers count gets the
label `model`, of which they know nothing; what gateways count has none, since most of it (a connection, a route, a key)
is no model's.
"""

from __future__ import annotations

import fcntl
import os
import sys
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import environment
from common.errors import StartRefused
from common.run_dir import RunDir

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# What gateways alone count, and what they count as well as schedulers do. Every process has all families, at 0.
_OF_GATEWAYS = frozenset(
    {
        "hedgerow_requests",
        "hedgerow_request_seconds",
        "hedgerow_input_tokens",
        "hedgerow_inputs",
        "hedgerow_key_tokens",
        "hedgerow_clients_gone",
        "hedgerow_resubmitted_requests",
        "hedgerow_late_replies",
    }
)
_OF_BOTH = frozenset({"hedgerow_refused_requests", "hedgerow_protocol_errors"})

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAUNCH_SECONDS = (0.00005, 0.0001, 0.00015, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)
_RATIOS = (0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 3, 5, 10)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


# The files of a process, and their lengths. All of it is given room on the disk before any of it is mapped: to touch a
# page that a full disk has none for ends a process at once (SIGBUS), and each new label or bucket may be the first of a
# page. What is counted with the labels of every route and status takes half of this.
_FILE_BYTES = {"counter": 128 * 1024, "gauge_livemostrecent": 16 * 1024, "histogram": 128 * 1024}


class NoRoom(StartRefused):
    """A process cannot keep its metrics."""


class Metrics:
    """The catalogue. One object a process, made by `open_metrics` and handed to whoever counts."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(name, meaning, labels, registry=registry, multiprocess_mode="livemostrecent")

        def histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, meaning, labels, registry=registry, buckets=buckets)

        # Gateway
        self.requests = counter("hedgerow_requests", "HTTP requests answered, by route and status", "route", "status")
        self.request_seconds = histogram(
            "hedgerow_request_seconds", "From a complete header to a complete answer", _SECONDS, "route"
        )
        self.input_tokens = counter("hedgerow_input_tokens", "Tokens of answered requests")
        self.inputs = counter("hedgerow_inputs", "Inputs (texts or lists of ids) of answered requests")
        self.key_tokens = counter("hedgerow_key_tokens", "Tokens of answered requests, by the name of their key", "key")
        self.clients_gone = counter("hedgerow_clients_gone", "Requests whose client left before the answer")
        self.resubmitted = counter("hedgerow_resubmitted_requests", "Requests sent (again) after a gap")
        self.late_replies = counter("hedgerow_late_replies", "Replies to requests that were already answered")

        # Scheduler
        self.queued_tokens = gauge("hedgerow_queued_tokens", "Tokens that wait for a worker")
        self.queued_sequences = gauge("hedgerow_queued_sequences", "Sequences that wait for a worker")
        self.queue_seconds = histogram(
            "hedgerow_queue_seconds", "From arrival at the scheduler to dispatch, by sequence group", _SECONDS
        )
        self.batches = counter("hedgerow_batches", "Batches by outcome", "outcome")
        self.batch_tokens = histogram("hedgerow_batch_tokens", "Tokens of a batch", _TOKENS)
        self.refused = counter(
            "hedgerow_refused_requests",
            "Requests that the scheduler answered with a failure, or a gateway in its stead, by code",
            "code",
        )
        self.step_prediction = histogram(
            "hedgerow_step_prediction_ratio", "How long a step took, as a part of what was predicted", _RATIOS
        )
        self.cancelled = counter("hedgerow_cancelled_requests", "Requests cancelled by their gateway")
        self.retried_sequences = counter("hedgerow_retried_sequences", "Sequences queued again after a worker was lost")
        self.stale_messages = counter(
            "hedgerow_stale_messages", "Messages of a past epoch, batch or incarnation, dropped"
        )
        self.protocol_errors = counter(
            "hedgerow_protocol_errors", "Messages that could not be decoded, by receiving process", "process"
        )
        self.workers = gauge("hedgerow_workers", "Workers by state", "state")
        self.gateways = gauge("hedgerow_gateways", "Gateways that have joined")
        self.worker_losses = counter("hedgerow_worker_losses", "Workers lost, by how it was noticed", "reason")

        # Worker
        self.steps = counter("hedgerow_steps", "Steps run")
        self.step_seconds = histogram("hedgerow_step_seconds", "Duration of a step", _SECONDS)
        self.nonfinite_rows = counter(
            "hedgerow_nonfinite_rows", "Rows withheld because the model made a NaN or an infinity"
        )
        self.step_failures = counter("hedgerow_step_failures", "Steps that raised")
        self.memory_splits = counter("hedgerow_memory_splits", "Steps halved since the device had no memory left")
        self.step_launch_seconds = histogram(
            "hedgerow_step_launch_seconds", "Host time from a batch to its launch, on a GPU", _LAUNCH_SECONDS
        )
        self.step_tokens = counter("hedgerow_step_tokens", "Tokens of steps on a GPU, by kind: real or padding", "kind")
        self.graph_runs = counter(
            "hedgerow_graph_runs",
            "Steps on a GPU, by how they ran: replay of a graph, eager (no graph yet), large (none is worth it)",
            "kind",
        )
        self.graph_captures = counter("hedgerow_graph_captures", "Graphs captured, by outcome", "outcome")
        self.graph_capture_seconds = histogram("hedgerow_graph_capture_seconds", "Duration of a capture", _SECONDS)
        self.graph_evictions = counter("hedgerow_graph_evictions", "Graphs dropped to keep within their memory")
        self.graphs = gauge("hedgerow_graphs", "Graphs held")
        self.graph_bytes = gauge("hedgerow_graph_bytes", "Device memory that graphs hold, in bytes")


def observe_all(histogram: Histogram, amounts: Sequence[float]) -> None:
    """What `histogram.observe` does with each of some amounts.

    A write for each bucket and one for the sum, where `observe` makes two for each amount: 25 amounts take 9 µs, not 39
    (2026-11-30, 2-core VM).
    """
    counts = Counts(bisect_left(histogram._upper_bounds, amount) for amount in amounts)
    histogram._sum.inc(sum(amounts))
    for bucket, count in counts.items():
        histogram._buckets[bucket].inc(count)


def open_metrics(run_dir: str) -> Metrics:
    """This process's metrics, shared through `run_dir`. Call once, before anything is counted.

    Raises:
        NoRoom: the disk has none for them.
    """
    folder = RunDir(run_dir).metrics
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for kind, num_bytes in _FILE_BYTES.items():
            _reserve(folder / f"{kind}_{os.getpid()}.db", num_bytes)
    except OSError as error:
        raise NoRoom(f"--run-dir {run_dir} has no room for metrics: {error.strerror}; make some") from None
    # Read by prometheus_client when it is first imported: hence the imports inside functions.
    environment.update({"PROMETHEUS_MULTIPROC_DIR": str(folder)})
    return Metrics()


def _reserve(path: Path, num_bytes: int) -> None:
    """Have a file that is at least so long, with room on the disk for all of it. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)


def render(run_dir: str, models: Sequence[str] = ()) -> bytes:
    """The text exposition of every process's metrics together, of several models with those of each."""
    from prometheus_client import CollectorRegistry, generate_latest

    suite = RunDir(run_dir)
    labels = {folder: {} if name is None else {"model": name} for name, folder in suite.model_dirs(models).items()}
    families: dict[str, Metric] = {}
    for folder in dict.fromkeys((suite, *labels)):  # of one model without a name it is the same
        for family in _families(folder.metrics):
            is_gateways = folder == suite and family.name in _OF_GATEWAYS | _OF_BOTH
            is_models = folder in labels and family.name not in _OF_GATEWAYS
            if not is_gateways and not is_models:
                continue
            samples = [sample._replace(labels=sample.labels | labels.get(folder, {})) for sample in family.samples]
            family.samples = []
            families.setdefault(family.name, family).samples += samples
    registry = CollectorRegistry()
    registry.register(_Collected(families.values()))
    return generate_latest(registry)


def _families(folder: Path) -> Iterable[Metric]:
    """What the processes of a folder have counted."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
    with (folder / "lock").open("a") as lock:
        # One gateway at a time: nobody reads while counts move from one file to another.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _fold_dead_processes(folder)
        # A process that starts has its files for a moment before there is anything in them; the library cannot read
        # those, and one that is killed in that moment leaves them so.
        files = [str(path) for path in folder.glob("*.db") if not _is_empty(path)]
        return MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Collected:
    """What the library's registry wants to have: something to collect from."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0


def _fold_dead_processes(folder: Path) -> None:
    """Add what dead processes counted to the files of process 0, and forget what they gauged.

    Else a process that dies every half minute leaves thousands of files a day, all of them read by every scrape. Where
    the disk has no room for the sum, files stay as they are until it has.
    """
    from prometheus_client.mmap_dict import MmapedDict

    for path in folder.glob("*_*.db"):
        kind, _, pid = path.stem.rpartition("_")
        if pid == "0" or Path("/proc", pid).exists():
            continue
        if kind in {"counter", "histogram"} and not _is_empty(path):
            sum_path = folder / f"{kind}_0.db"
            try:
                _reserve(sum_path, max(_FILE_BYTES[kind], _used_bytes(sum_path) + _used_bytes(path)))
            except OSError:
                continue
            past = MmapedDict(str(sum_path))  # type: ignore[no-untyped-call]  # the library's gap
            for key, value, timestamp, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
                total, _ = past.read_value(key)  # type: ignore[no-untyped-call]
                past.write_value(key, total + value, timestamp)  # type: ignore[no-untyped-call]
            past.close()  # type: ignore[no-untyped-call]
        path.unlink(missing_ok=True)


def _used_bytes(path: Path) -> int:
    """Of a file of the library's: its first number."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(4), sys.byteorder)
    except FileNotFoundError:
        return 0


def clear(run_dir: str) -> None:
    """Start counting from nothing: called once before a suite starts."""
    for path in RunDir(run_dir).metrics.glob("*.db"):
        path.unlink(missing_ok=True)
