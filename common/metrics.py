"""Every metric: its name, unit, buckets and meaning. No other file declares one.

The processes of a suite write into small memory-mapped files in the run folder. The gateway that answers /metrics adds
them all up, so each gateway gives the same answer (prometheus_client's multiprocess mode). A counter outlives its
process; a gauge does not. `Metrics.__init__` is longer than other functions since it is the list of all metrics.

Each named model has such files in its own folder. The counts of its scheduler and workers get the label `model` when
they are rendered. What gateways count has no such label, since most of it (a connection, a route, a key) belongs to no
model.
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

# The families that gateways alone count, and those that gateways and schedulers count. Every process has all, at 0.
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


# The files of a process, and their lengths. Each is allocated on the disk before it is mapped. Otherwise a full disk
# would kill a process (SIGBUS) as soon as it touches a new page, and any new label or bucket may begin one. The labels
# of every route and status take half of these lengths.
_FILE_BYTES = {"counter": 128 * 1024, "gauge_livemostrecent": 16 * 1024, "histogram": 128 * 1024}


class NoRoom(StartRefused):
    """The disk has no room for the metrics of a process."""


class Metrics:
    """All metrics. Each process has one object, made by `open_metrics` and passed to whatever counts."""

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
            "hedgerow_request_seconds", "Seconds from a complete header to a complete answer", _SECONDS, "route"
        )
        self.input_tokens = counter("hedgerow_input_tokens", "Tokens of answered requests")
        self.inputs = counter("hedgerow_inputs", "Inputs (texts or lists of token ids) of answered requests")
        self.key_tokens = counter("hedgerow_key_tokens", "Tokens of answered requests, by name of the key", "key")
        self.clients_gone = counter("hedgerow_clients_gone", "Requests whose client disconnected before the answer")
        self.resubmitted = counter(
            "hedgerow_resubmitted_requests", "Requests sent to a scheduler (again) after it was unreachable"
        )
        self.late_replies = counter("hedgerow_late_replies", "Replies that came after their request was answered")

        # Scheduler
        self.queued_tokens = gauge("hedgerow_queued_tokens", "Tokens that wait for a worker")
        self.queued_sequences = gauge("hedgerow_queued_sequences", "Sequences that wait for a worker")
        self.queue_seconds = histogram(
            "hedgerow_queue_seconds",
            "Seconds from arrival at the scheduler to dispatch, for each group of sequences",
            _SECONDS,
        )
        self.batches = counter("hedgerow_batches", "Batches, by outcome", "outcome")
        self.batch_tokens = histogram("hedgerow_batch_tokens", "Tokens of a batch", _TOKENS)
        self.refused = counter(
            "hedgerow_refused_requests",
            "Requests that a scheduler, or a gateway in its place, answered with a failure, by error code",
            "code",
        )
        self.step_prediction = histogram(
            "hedgerow_step_prediction_ratio", "Duration of a step divided by its predicted duration", _RATIOS
        )
        self.cancelled = counter("hedgerow_cancelled_requests", "Requests cancelled by their gateway")
        self.retried_sequences = counter("hedgerow_retried_sequences", "Sequences queued again after a worker was lost")
        self.stale_messages = counter(
            "hedgerow_stale_messages", "Messages dropped since they belong to a past epoch, batch or worker"
        )
        self.protocol_errors = counter(
            "hedgerow_protocol_errors", "Messages that could not be decoded, by receiving process", "process"
        )
        self.workers = gauge("hedgerow_workers", "Workers, by state", "state")
        self.gateways = gauge("hedgerow_gateways", "Gateways that are connected to the scheduler")
        self.worker_losses = counter("hedgerow_worker_losses", "Workers lost, by reason", "reason")

        # Worker
        self.steps = counter("hedgerow_steps", "Steps run")
        self.step_seconds = histogram("hedgerow_step_seconds", "Seconds that a step took", _SECONDS)
        self.nonfinite_rows = counter(
            "hedgerow_nonfinite_rows", "Rows withheld because the model computed a NaN or an infinity"
        )
        self.step_failures = counter("hedgerow_step_failures", "Steps that failed with an exception")
        self.memory_splits = counter(
            "hedgerow_memory_splits", "Steps split in two because the device ran out of memory"
        )
        self.step_launch_seconds = histogram(
            "hedgerow_step_launch_seconds", "Seconds of host time from a batch to its launch, on a GPU", _LAUNCH_SECONDS
        )
        self.step_tokens = counter("hedgerow_step_tokens", "Tokens of steps on a GPU, by kind: real or padding", "kind")
        self.graph_runs = counter(
            "hedgerow_graph_runs",
            "Steps on a GPU, by kind: replay of a graph, eager (no graph yet), large (no graph is worth it)",
            "kind",
        )
        self.graph_captures = counter("hedgerow_graph_captures", "Graphs captured, by outcome", "outcome")
        self.graph_capture_seconds = histogram(
            "hedgerow_graph_capture_seconds", "Seconds that a capture took", _SECONDS
        )
        self.graph_evictions = counter("hedgerow_graph_evictions", "Graphs dropped to stay within --max-graph-bytes")
        self.graphs = gauge("hedgerow_graphs", "Graphs in memory")
        self.graph_bytes = gauge("hedgerow_graph_bytes", "Device memory of all graphs, in bytes")


def observe_all(histogram: Histogram, amounts: Sequence[float]) -> None:
    """Observe many amounts, as `histogram.observe` does one by one.

    This writes once for each bucket and once for the sum; `observe` writes twice for each amount. 25 amounts take 9 µs
    instead of 39 (2026-11-30, 2-core VM).
    """
    counts = Counts(bisect_left(histogram._upper_bounds, amount) for amount in amounts)
    histogram._sum.inc(sum(amounts))
    for bucket, count in counts.items():
        histogram._buckets[bucket].inc(count)


def open_metrics(run_dir: str) -> Metrics:
    """The metrics of this process, shared through `run_dir`. Call it once, before anything is counted.

    Raises:
        NoRoom: the disk is full.
    """
    folder = RunDir(run_dir).metrics
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for kind, num_bytes in _FILE_BYTES.items():
            _reserve(folder / f"{kind}_{os.getpid()}.db", num_bytes)
    except OSError as error:
        raise NoRoom(f"--run-dir {run_dir} has no room for metrics: {error.strerror}; free some space") from None
    # prometheus_client reads it at its first import, so this module imports it inside functions.
    environment.update({"PROMETHEUS_MULTIPROC_DIR": str(folder)})
    return Metrics()


def _reserve(path: Path, num_bytes: int) -> None:
    """Make a file at least this long, and allocate all of it on the disk. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)


def render(run_dir: str, models: Sequence[str] = ()) -> bytes:
    """The metrics of all processes in Prometheus' text format. `models` are the names of named models."""
    from prometheus_client import CollectorRegistry, generate_latest

    suite = RunDir(run_dir)
    labels = {folder: {} if name is None else {"model": name} for name, folder in suite.model_dirs(models).items()}
    families: dict[str, Metric] = {}
    for folder in dict.fromkeys((suite, *labels)):  # they are the same for a single model without a name
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
    """The metrics of the processes of one folder, added up."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # an operator may have removed it
    with (folder / "lock").open("a") as lock:
        # One gateway at a time: none may read while another moves counts from file to file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _fold_dead_processes(folder)
        # The library cannot read empty files. A process that starts has such files for a moment, and leaves them if it
        # is killed then.
        files = [str(path) for path in folder.glob("*.db") if not _is_empty(path)]
        return MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Collected:
    """A collector, as the library's registry needs one."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0


def _fold_dead_processes(folder: Path) -> None:
    """Add the counts of dead processes to the files of process 0, and delete their gauges.

    Otherwise a process that dies every half minute leaves thousands of files a day, and each scrape reads all of them.
    While the disk has no room for the sum, the files stay as they are.
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
    """The number of used bytes of a file of the library, which is its first number."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(4), sys.byteorder)
    except FileNotFoundError:
        return 0


def clear(run_dir: str) -> None:
    """Delete all counts. Called once before a suite starts."""
    for path in RunDir(run_dir).metrics.glob("*.db"):
        path.unlink(missing_ok=True)
