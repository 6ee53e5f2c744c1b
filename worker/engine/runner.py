"""A model's forward pass from a batch to finished rows: plainly on a CPU, by graphs on a GPU.

Both runners have the same methods, so the engine does not ask where it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from common.wire.messages import Batch
from common.wire.rows import SPARSE, row_bytes
from worker.attention import HeadShape
from worker.attention.reference import ReferenceAttention
from worker.attention.select import select
from worker.batch.capacity import (
    SEQUENCE_COUNTS,
    TOKEN_COUNTS,
    Capacity,
    HostArrays,
    bucket_index,
    choose_capacity,
    largest_capacity,
)
from worker.batch.lazy import FLAG_BYTES, LazyTensor, Progress, Rows
from worker.batch.ragged import RaggedBatch, load_sorted
from worker.engine.driver import Driver
from worker.engine.graphs import GraphRunner, Key
from worker.engine.staging import Staging
from worker.models.output import Output
from worker.models.sparse import compress

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.config import WorkerConfig
    from common.metrics import Metrics
    from worker.attention import Attention
    from worker.attention.select import Selection
    from worker.models.interface import Model


# How a step runs: as the graphs decide, or eagerly or by a graph for certain.
Way = Literal["served", "eager", "graph"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How batches of one kind run."""

    key: Key
    attention: Attention  # the instance of the key, or the backend itself if there is no graph
    host_views: list[HostArrays]  # where its inputs are written, one for each slot
    use_graph: bool


class Runner(Protocol):
    @property
    def attention(self) -> str:
        """Which attention runs, for people."""

    def run(self, batch: Batch) -> LazyTensor:
        """Launch a checked batch."""

    def run_ready(self, batch: Batch) -> LazyTensor:
        """As `run`, but first prepare what makes the next run of such a batch fast: measurements begin with it."""

    @property
    def has_idle_work(self) -> bool:
        """Whether `idle_work` has something to do."""

    def idle_work(self) -> None:
        """Do a piece of work that no batch waits for, if there is any."""

    def release_memory(self) -> None:
        """Free the memory that is kept for speed alone."""

    def synchronize(self) -> None:
        """Wait for everything that was launched; on any thread. Raises RuntimeError: the device has failed."""


class HostRunner:
    """On a CPU: the batch has run when `run` returns."""

    def __init__(self, model: Model, output: Output, attention: Attention) -> None:
        self._model = model
        self._output = output
        self._attention = attention
        self._types = model.shape.has_token_types

    @classmethod
    def build(cls, model: Model, output: Output, config: WorkerConfig) -> HostRunner:
        """Raises ModelError: the attention that the configuration asks for is not one for CPUs."""
        selection = select(config.attention, head_shape(model), torch.device("cpu"), Path(config.cache_dir))
        return cls(model, output, selection.backends()[0])

    @property
    def attention(self) -> str:
        return self._attention.name

    def run(self, batch: Batch) -> LazyTensor:
        ragged, restore = load_sorted(batch, self._attention, types=self._types)
        progress = Progress(staged_ns=time.monotonic_ns()) if len(batch.times_ns) else None
        output = _launch(self._model, self._output, ragged).index_select(0, restore)
        if progress is not None:
            progress.computed_ns = time.monotonic_ns()
        stop = FLAG_BYTES + row_width(batch, self._output.dimensions)
        rows = Rows(output[:, FLAG_BYTES:stop].contiguous().numpy(), output[:, 0].numpy())
        lazy = LazyTensor(lambda: rows, progress=progress)
        return _compressed(lazy, batch) if self._output.is_sparse else lazy

    def run_ready(self, batch: Batch) -> LazyTensor:
        return self.run(batch)

    @property
    def has_idle_work(self) -> bool:
        return False

    def idle_work(self) -> None:
        pass

    def release_memory(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class DeviceRunner:
    """On a GPU: `run` returns once everything is launched. One thread calls it.

    It has a stream of its own, since a graph cannot be captured on the default stream. Before each launch on the
    current stream it sets its own, since another one may be set by then. The launch of a graph names its stream.
    """

    def __init__(
        self,
        model: Model,
        output: Output,
        selection: Selection,
        config: WorkerConfig,
        *,
        largest_batch_tokens: int,
        device: torch.device,
        hot_keys: Path,
        metrics: Metrics,
    ) -> None:
        """`largest_batch_tokens` bounds every batch that will come."""
        # Makes another runner for the same steps.
        self._again = partial(
            DeviceRunner,
            model,
            selection=selection,
            config=config,
            largest_batch_tokens=largest_batch_tokens,
            device=device,
            hot_keys=hot_keys,
            metrics=metrics,
        )
        self._model = model
        self._output = output
        self._types = model.shape.has_token_types
        self._selection = selection
        self._replays, self._eager_runs, self._large_runs = (
            metrics.graph_runs.labels(kind) for kind in ("replay", "eager", "large")
        )
        self._real_tokens = metrics.step_tokens.labels("real")
        self._padding_tokens = metrics.step_tokens.labels("padding")
        self._stream = torch.cuda.Stream(device)
        driver = Driver()
        row_bytes = FLAG_BYTES + 4 * output.dimensions
        self._staging = Staging(largest_capacity(largest_batch_tokens), row_bytes, self._stream, driver)
        self._instances: dict[Key, Attention] = {}
        self._plans: dict[tuple[int, int], _Plan] = {}  # by bucket, and a bound of the longest sequence as a power of 2
        self._host_views: dict[Capacity, list[HostArrays]] = {}  # of plans
        self._has_graphs = config.graphs != "off"
        self.graphs = GraphRunner(
            self._forward,
            self._warm_up,
            driver,
            self._stream.cuda_stream,
            lazy=self._has_graphs,
            max_bytes=config.max_graph_bytes,
            hot_keys=hot_keys,
            can_run=self._can_run,
            metrics=metrics,
        )
        torch.cuda.synchronize(device)  # the weights and these buffers were written on other streams

    @classmethod
    def build(
        cls,
        model: Model,
        output: Output,
        config: WorkerConfig,
        *,
        max_tokens: int,
        largest_batch_tokens: int,
        device: torch.device,
        fingerprint: str,
        metrics: Metrics,
    ) -> DeviceRunner:
        """Build a runner with the attention that the configuration asks for.

        Raises:
            ModelError: that attention is missing, or cannot compute this model's heads.
        """
        cache = Path(config.cache_dir)
        selection = select(
            config.attention,
            head_shape(model),
            device,
            cache,
            num_layers=model.shape.num_layers,
            max_tokens=max_tokens,
        )
        return cls(
            model,
            output,
            selection,
            config,
            largest_batch_tokens=largest_batch_tokens,
            device=device,
            hot_keys=cache / f"graphs-{fingerprint}.json",
            metrics=metrics,
        )

    def with_output(self, output: Output) -> DeviceRunner:
        """A runner of the same steps with another output."""
        return self._again(output)

    @property
    def attention(self) -> str:
        """Which backend runs what, for people."""
        return self._selection.describe()

    def backends(self) -> list[Attention]:
        """All backends that may run a batch."""
        return self._selection.backends()

    def capture_ladder(self, longest: int) -> int:
        """Capture all capacities that steps may have if sequences average four tokens or more; returns how many."""
        torch.cuda.set_stream(self._stream)
        for tokens in reversed(TOKEN_COUNTS):  # the largest first: the others reuse its memory
            for sequences in SEQUENCE_COUNTS:
                if sequences <= tokens // 4 and sequences * longest >= tokens:
                    length = min(longest, max(1, tokens // sequences))
                    backend = self._selection.choose(tokens, sequences, length)
                    self.graphs.capture(_key(backend, Capacity(tokens, sequences, self._types), length))
        return len(self.graphs.keys())

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways in which steps may run."""
        return ("eager", "graph") if self._has_graphs else ("eager",)

    def run(self, batch: Batch) -> LazyTensor:
        return self.run_with(batch, None, "served")

    def run_ready(self, batch: Batch) -> LazyTensor:
        return self.run_with(batch, None, self.ways[-1])

    def run_with(self, batch: Batch, backend: Attention | None, way: Way) -> LazyTensor:
        """Launch a checked batch with an attention backend; None: the one for its shape."""
        num_tokens, num_sequences, num_spans = len(batch.token_ids), len(batch.lengths), len(batch.spans)
        longest = int(np.maximum.reduce(batch.lengths))
        # Classes of lengths end at powers of two, and so do the bounds that keys have.
        power = (longest - 1).bit_length()
        bucket = bucket_index(num_tokens, num_sequences, num_spans)
        plan = self._plans.get((bucket, power)) if backend is None and bucket is not None else None
        if plan is None:
            torch.cuda.set_stream(self._stream)
            capacity, use_graph = choose_capacity(num_tokens, num_sequences, num_spans, types=self._types)
            plan = self._plan(capacity, longest, backend, use_graph=use_graph)
            if backend is None and bucket is not None:
                self._plans[bucket, power] = plan
        if way == "graph" and plan.use_graph:
            torch.cuda.set_stream(self._stream)
            self.graphs.capture(plan.key)  # before the inputs are loaded: the capture may load inputs of its own
        slot, offsets = self._staging.load(batch, plan.host_views)
        progress = Progress(staged_ns=time.monotonic_ns()) if len(batch.times_ns) else None
        try:
            if plan.attention.prepares:
                torch.cuda.set_stream(self._stream)
                plan.attention.prepare(offsets)
            replayed, typical = False, True
            if way == "eager" or not plan.use_graph:
                self._forward(plan.key, plan.attention)
            elif not (replayed := self.graphs.replay(plan.key)):
                torch.cuda.set_stream(self._stream)
                typical = not self.graphs.expects(plan.key)
                replayed = self.graphs.run(plan.key)
            lazy = self._staging.collect(
                slot,
                batch.num_rows,
                lambda: self._count(batch, plan, replayed=replayed),
                progress,
                is_typical=typical,
            )
        except BaseException:
            self._staging.give_back(slot)
            raise
        return _compressed(lazy, batch) if self._output.is_sparse else lazy

    def _plan(self, capacity: Capacity, longest: int, backend: Attention | None, *, use_graph: bool) -> _Plan:
        """How a batch of this capacity runs. Without a graph nothing is kept for the next batch."""
        if backend is None:
            backend = self._selection.choose(capacity.tokens, capacity.sequences, longest)
        key = _key(backend, capacity, longest)
        if not use_graph:
            return _Plan(key, backend, self._staging.host_views(capacity), use_graph=False)
        return _Plan(key, self._instance(key, backend), self._host_views_of(capacity), use_graph=True)

    def _host_views_of(self, capacity: Capacity) -> list[HostArrays]:
        """Where batches of a capacity are written; kept for the next ones."""
        views = self._host_views.get(capacity)
        if views is None:
            views = self._host_views[capacity] = self._staging.host_views(capacity)
        return views

    def _count(self, batch: Batch, plan: _Plan, *, replayed: bool) -> int:
        """Count a batch that has run; returns the bytes of its widest row."""
        num_tokens = len(batch.token_ids)
        runs = (self._replays if replayed else self._eager_runs) if plan.use_graph else self._large_runs
        runs.inc()
        self._real_tokens.inc(num_tokens)
        self._padding_tokens.inc(plan.key.capacity.tokens - num_tokens)
        return row_width(batch, self._output.dimensions)

    def reference(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The batch's rows with every product in float32 and attention by its formula; waits for them.

        The weights are those that are served, so a comparison is one of arithmetic.
        """
        torch.cuda.set_stream(self._stream)
        capacity, _ = choose_capacity(len(batch.token_ids), len(batch.lengths), len(batch.spans), types=self._types)
        slot, _ = self._staging.load(batch, self._staging.host_views(capacity))
        try:
            self._staging.fetch(capacity)
            ragged = capacity.views(self._staging.block, ReferenceAttention(), capacity.tokens)
            output = _launch(self._model, self._output, replace(ragged, reference=True))
            return output[: batch.num_rows, FLAG_BYTES:].cpu().numpy().view(np.float32)
        finally:
            self._staging.give_back(slot)

    @property
    def has_idle_work(self) -> bool:
        return self.graphs.has_idle_work

    def idle_work(self) -> None:
        torch.cuda.set_stream(self._stream)
        self.graphs.idle_work()

    def release_memory(self) -> None:
        self.graphs.release()
        self._instances.clear()
        self._plans.clear()

    def synchronize(self) -> None:
        self.graphs.synchronize(self._stream.device)

    def _forward(self, key: Key, attention: Attention | None = None) -> None:
        """Launch a key's kernels on the loaded inputs, with this attention; None: with the key's own instance."""
        torch.cuda.set_stream(self._stream)
        bound = key.max_seqlen or key.capacity.tokens
        ragged = key.capacity.views(self._staging.block, attention or self._instances[key], bound)
        self._staging.fetch(key.capacity)
        self._staging.publish(_launch(self._model, self._output, ragged))

    def _warm_up(self, key: Key) -> None:
        """Run a key on dummies, before a batch has used it."""
        backend = self._selection.named(key.attention)
        slot, offsets = self._staging.load(None, self._host_views_of(key.capacity))
        try:
            self._instance(key, backend).prepare(offsets)
            self._forward(key)
        finally:
            self._staging.give_back(slot)

    def _can_run(self, key: Key) -> bool:
        names = {backend.name for backend in self._selection.backends()}
        return (
            key.attention in names
            and key.capacity.tokens in TOKEN_COUNTS
            and key.capacity.sequences in SEQUENCE_COUNTS
            and key.capacity.types == self._types
        )

    def _instance(self, key: Key, backend: Attention) -> Attention:
        """The attention that the graph of a key captures; made once."""
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = backend.at(key.capacity.tokens, key.capacity.sequences)
        return instance


@torch.inference_mode()
def _launch(model: Model, output: Output, ragged: RaggedBatch) -> torch.Tensor:
    """uint8 [rows, FLAG_BYTES + 4 * dimensions], see `pooling.finish`."""
    rows: torch.Tensor = output(model(ragged), ragged)
    return rows


def head_shape(model: Model) -> HeadShape:
    """The head shape that attention has to compute for this model."""
    shape, dtype = model.shape, next(model.parameters()).dtype
    return HeadShape(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.causal, dtype, shape.windowed, shape.biased
    )


def row_width(batch: Batch, dimensions: int) -> int:
    """Bytes of the widest row that a batch asks for; for sparse rows, before they are compressed."""
    encoding = min(batch.encodings.tobytes())  # few bytes: Python is faster than numpy
    return 4 * dimensions if encoding == SPARSE else row_bytes(encoding, dimensions)


def _compressed(lazy: LazyTensor, batch: Batch) -> LazyTensor:
    """The result of a model of sparse rows, compressed if the batch asks for that; measurements ask for float32."""
    if batch.encodings[0] != SPARSE:
        return lazy
    dimensions = batch.dimensions.repeat(batch.span_counts) if len(batch.spans) else batch.dimensions
    # Never ready, even if the step has ended, so that the launching thread does not compress.
    is_typical = lazy.is_typical
    return LazyTensor(lambda: compress(lazy.numpy(), dimensions), lambda: False, lazy.progress, is_typical=is_typical)


def _key(backend: Attention, capacity: Capacity, longest: int) -> Key:
    """The key of a batch, with a bound on the longest sequence (a power of two from 128 on) if the launch needs one."""
    return Key(backend.name, capacity, max(128, 1 << (longest - 1).bit_length()) if backend.needs_max_seqlen else 0)
