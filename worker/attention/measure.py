"""How fast an attention backend is in one class of batches, and how right.

A class is given by the most that its batches hold: tokens, rows of cu_seqlens, the longest sequence. A backend is timed
on a batch that is typical of the class, at its real job: a replayed graph of a capacity that the engine would use, or
plain launches if there is none. Its results for some of the sequences are compared with the formula in float32.

`table` decides which classes are measured, `select` what follows from it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.wire.messages import Batch
from common.wire.rows import FLOAT32
from worker.attention import HeadShape
from worker.attention.reference import ReferenceAttention, attend
from worker.batch.capacity import Capacity, HostArrays, choose_capacity, worked_out
from worker.batch.ragged import Mask, RaggedBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from worker.attention import Attention

logger = logging.getLogger(__name__)

# The most that a class holds. The last size of each also takes everything above.
TOKENS = (64, 512, 2048, 4096, 16384)
SEQUENCES = (8, 32, 128, 512)
LONGEST = (32, 128, 512, 2048, 8192, 32768)

MAX_ERROR = 0.01  # of an output, relative to its size if that is above 1
MIN_COSINE = 0.9999
_SHORT_STEP_TOKENS = 4096  # up to this size the device may wait for the host

_NUM_CHECKED = 8  # sequences of a class that are compared with the formula
_NUM_CHECKED_TOKENS = 32  # of each such sequence
_MAX_MASKED = 2048  # up to this length the formula takes a sequence at once, with a mask of length² numbers


@dataclass(frozen=True, slots=True)
class Cell:
    """A class of batches, by the most that they hold."""

    tokens: int
    sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One backend in one class."""

    us: float  # of one layer on the device
    prepare_us: float  # of one batch on the host
    error: float  # the largest difference to the formula, relative to the output if that is above 1
    cosine: float  # to the formula

    def cost_us(self, cell: Cell, num_layers: int) -> float:
        """The cost of one layer, which backends are compared by."""
        return self.us + (self.prepare_us / num_layers if cell.tokens <= _SHORT_STEP_TOKENS else 0.0)

    @property
    def is_right(self) -> bool:
        return self.error <= MAX_ERROR and self.cosine >= MIN_COSINE


class Measurer:
    """Times backends on the current device. Inputs and the formula's results are computed once for each class."""

    _NUM_CALLS = 4  # of a launch
    _NUM_LONG_CALLS = 2
    _NUM_LAUNCHES = 5
    _NUM_PREPARES = 5

    def __init__(self, shape: HeadShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._pool = GraphPool(device)
        self._qkv: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # by tokens
        self._inputs: dict[Cell, _Inputs] = {}

    @torch.inference_mode()
    def __call__(self, backend: Attention, cell: Cell) -> Measurement:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._run(backend, self._inputs_of(cell))

    @torch.inference_mode()
    def warm_up(self, backends: Mapping[str, Attention], cells: list[Cell]) -> None:
        """Make all inputs, and run each backend once in each class, so that it compiles what it needs.

        Nothing is timed here: a thread that imports meanwhile takes the interpreter for milliseconds at a time.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            working = dict(backends)
            for cell in cells:
                inputs = self._inputs_of(cell)
                for name, backend in list(working.items()):
                    try:
                        backend.prepare(inputs.offsets)
                        backend(inputs.query, inputs.key, inputs.value, inputs.batch, self._shape.mask)
                    except Exception:  # it will fail again when it is measured, and that is logged
                        logger.debug("attention %s failed while warming up", name, exc_info=True)
                        del working[name]
            self._stream.synchronize()

    def _inputs_of(self, cell: Cell) -> _Inputs:
        inputs = self._inputs.get(cell)
        if inputs is None:
            lengths = lengths_of(cell)
            assert lengths is not None, "only classes that have batches are measured"
            capacity, replayed = choose_capacity(int(lengths.sum()), len(lengths))
            tensors = self._qkv.get(capacity.tokens)
            if tensors is None:
                tensors = self._qkv[capacity.tokens] = qkv(self._shape, capacity.tokens, self._device)
            batch, offsets = ragged(lengths, capacity, self._device, ReferenceAttention())
            rows, expected = _formula(*tensors, lengths, offsets, causal=self._shape.causal)
            inputs = self._inputs[cell] = _Inputs(*tensors, batch, offsets, replayed, rows, expected)
        return inputs

    def _run(self, backend: Attention, inputs: _Inputs) -> Measurement:
        batch = inputs.batch
        if inputs.replayed:
            backend = backend.at(len(batch.token_ids), len(batch.cu_seqlens) - 1)
        prepares_us = []
        for _ in range(self._NUM_PREPARES):
            started_ns = time.perf_counter_ns()
            backend.prepare(inputs.offsets)
            prepares_us.append((time.perf_counter_ns() - started_ns) / 1e3)

        def call() -> torch.Tensor:
            return backend(inputs.query, inputs.key, inputs.value, batch, self._shape.mask)

        error, cosine = compare(call().index_select(0, inputs.rows), inputs.expected)
        num_calls = self._NUM_CALLS if inputs.replayed else self._NUM_LONG_CALLS
        launch = self._pool.repeated(call, num_calls)
        elapsed_ms(launch)
        launches_ms = [elapsed_ms(launch) for _ in range(self._NUM_LAUNCHES)]
        us = statistics.median(launches_ms) * 1e3 / num_calls
        return Measurement(us, statistics.median(prepares_us), error, cosine)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All tensors that the graphs of one class read; kept as long as any of these graphs."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    batch: RaggedBatch
    offsets: npt.NDArray[np.int32]
    replayed: bool
    rows: torch.Tensor  # int64, the tokens that are compared
    expected: torch.Tensor  # float32, the formula's results of these


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int32],
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of some sequences, the longest among them, and the formula's results for them."""
    evenly = np.linspace(0, len(lengths) - 1, min(_NUM_CHECKED, len(lengths))).astype(int)
    tokens: list[int] = []
    expected: list[torch.Tensor] = []
    for i in sorted({*evenly.tolist(), int(lengths.argmax())}):
        start, stop = int(offsets[i]), int(offsets[i + 1])
        chosen = np.unique(np.linspace(start, stop - 1, _NUM_CHECKED_TOKENS).astype(int)).tolist()
        tokens += chosen
        keys = slice(start, stop)
        if not causal:
            expected.append(attend(query[chosen], key[keys], value[keys], Mask(causal=False)))
        elif stop - start <= _MAX_MASKED:
            rows = attend(query[keys], key[keys], value[keys], Mask(causal=True))
            expected.append(rows[[t - start for t in chosen]])
        else:  # token by token, each with the keys up to itself and no mask
            for t in chosen:
                keys = slice(start, t + 1)
                expected.append(attend(query[t : t + 1], key[keys], value[keys], Mask(causal=False)))
    return torch.tensor(tokens, device=query.device), torch.cat(expected)


class GraphPool:
    """Memory of graphs that are made and dropped one after the other, on the current stream.

    torch frees a pool with the last graph that uses it, so one graph is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._kept = torch.cuda.CUDAGraph()
        self._kept.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        self._output = torch.ones(1, device=device)
        self._kept.capture_end()

    def repeated(self, call: Callable[[], object], num_calls: int) -> Callable[[], object]:
        """A function that launches `num_calls` calls: the replay of a graph, or the calls if they cannot be captured.

        One call must have been made before, so that everything is compiled.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        try:
            for _ in range(num_calls):
                call()
        except Exception as error:
            try:
                graph.capture_end()
            except RuntimeError:
                pass  # the capture is invalid, which is why it ends
            if not isinstance(error, RuntimeError):
                raise
            logger.debug("timed eagerly, since it cannot be captured: %s", error)
            return lambda: [call() for _ in range(num_calls)]
        graph.capture_end()
        return graph.replay


def elapsed_ms(launch: Callable[[], object]) -> float:
    """The time that a launch takes on the device; waits for it."""
    started, stopped = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    launch()
    stopped.record()
    stopped.synchronize()
    return float(started.elapsed_time(stopped))


def index_of(sizes: tuple[int, ...], value: int) -> int:
    return min(bisect_left(sizes, value), len(sizes) - 1)


def lengths_of(cell: Cell) -> npt.NDArray[np.int32] | None:
    """Lengths of a typical batch of a class; None if no batch falls into it. Seeded: the same lengths each time.

    It has as many tokens as the class holds and half as many sequences. One sequence is as long as the class allows, up
    to three quarters of the tokens.
    """
    shortest = 1 + LONGEST[index_of(LONGEST, cell.longest) - 1] if cell.longest > LONGEST[0] else 1
    fewest = 1 + SEQUENCES[index_of(SEQUENCES, cell.sequences) - 1] if cell.sequences > SEQUENCES[0] else 1
    longest = min(cell.longest, max(shortest, 3 * cell.tokens // 4))
    rest = cell.tokens - longest
    if rest < 0:
        return None
    fewest = max(fewest, 1 + math.ceil(rest / longest))
    most = min(cell.sequences, 1 + rest)
    if fewest > most:
        return None
    count = min(max(cell.sequences // 2, fewest), most)
    lengths = np.full(count, longest, dtype=np.int32)
    if count > 1:
        base, extra = divmod(rest, count - 1)
        lengths[1:] = base
        lengths[1 : 1 + extra] += 1
        # Uneven lengths: of each pair, one sequence loses what the other gains.
        generator = np.random.default_rng(0)
        for i in range(1, count - 1, 2):
            shift = int(generator.integers(0, min(lengths[i] - 1, longest - lengths[i + 1]) + 1))
            lengths[i] -= shift
            lengths[i + 1] += shift
    return np.random.default_rng(0).permutation(lengths)  # unsorted, as requests arrive


def ragged(
    lengths: npt.NDArray[np.int32], capacity: Capacity, device: torch.device, attention: Attention
) -> tuple[RaggedBatch, npt.NDArray[np.int32]]:
    """A batch of these lengths, laid out for a GPU, and its cu_seqlens on the host. For measurements and tests."""
    ones = np.ones(len(lengths), dtype=np.int32)
    batch = Batch(
        epoch=0,
        batch_id=0,
        token_ids=np.zeros(int(lengths.sum()), dtype=np.int32),
        lengths=lengths,
        dimensions=ones,
        normalize=ones.astype(np.uint8),
        encodings=np.full(len(lengths), FLOAT32, dtype=np.uint8),
    )
    words = np.zeros(capacity.host_words, dtype=np.int32)
    offsets = HostArrays(capacity, words).fill(batch)
    # The bound that the engine gives to backends whose launch depends on it.
    bound = max(128, 1 << (int(lengths.max()) - 1).bit_length())
    block = torch.from_numpy(worked_out(words, capacity)).to(device)
    return capacity.views(block, attention, bound), offsets


def qkv(shape: HeadShape, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, keys and values, seeded: views of one merged projection, as in a model."""
    generator = torch.Generator(device).manual_seed(0)
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    merged = torch.randn(num_tokens, sum(heads), shape.head_dim, generator=generator, device=device)
    query, key, value = merged.to(shape.dtype).split(heads, dim=1)
    return query, key, value


def compare(output: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The largest difference, relative to the expected number if that is above 1, and the cosine of all numbers."""
    output, expected = output.double(), expected.double()
    error = ((output - expected).abs() / expected.abs().clamp_min(1.0)).max()
    cosine = (output * expected).sum() / (output.norm() * expected.norm())
    return float(error), float(cosine)
