"""A model on a device: batches in, rows out.

`step` launches a batch and returns at once (see `lazy`); on a CPU that means when it is done. The whole of what a
sequence asks for (columns, unit length, quantisation) is computed on the device, so that only finished rows travel.

One thread builds an engine and calls it: the one thread that launches steps on the device. Rows may be read on another.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import time
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from common.wire.messages import Batch, ModelFacts, max_rows
from common.wire.rows import ENCODINGS, FLOAT32
from worker.attention.select import look_ahead
from worker.batch import ragged
from worker.batch.lazy import DeviceLost, LazyTensor
from worker.batch.ragged import Limits
from worker.checkpoint.architectures import check_dtype
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.engine import selfcheck
from worker.engine.facts import check_pairs_and_chunks, describe, length_limit
from worker.engine.oom_split import run_in_pieces
from worker.engine.precompile import Precompilation
from worker.engine.runner import DeviceRunner, HostRunner, Runner, head_shape
from worker.models.build import build
from worker.models.heads import load_scores
from worker.models.layers import pack_linears
from worker.models.loader import check_weights, load_weights
from worker.models.output import Output, load_output
from worker.models.sparse import build_sparse

if TYPE_CHECKING:
    from torch import nn

    from common.config import WorkerConfig
    from common.metrics import Metrics
    from common.model_location import ModelFolder
    from worker.checkpoint.files import JsonFile
    from worker.checkpoint.scoring import Task
    from worker.models.interface import Model

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_SUPPORTED_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}

# Tokens of a step where the operator names none. On a CPU 512 cost least a token. On a GPU as many as take so long: a
# larger step gains little throughput and lets everybody behind it wait.
_CPU_BATCH_TOKENS = 512
_GPU_BATCH_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_GPU_STEP_S = 0.010

_WARM_UP_S = 1.0


class Engine:
    def __init__(self, model: ModelFolder, config: WorkerConfig, metrics: Metrics) -> None:
        """Load, check and warm up a model.

        Raises:
            ModelError: the folder's files cannot be served as they are, or not on this device in this dtype, or what
                the device computes is not what the model says.
        """
        stages = _Stages()
        self._metrics = metrics
        self._device = _choose_device(config)
        compiling: Precompilation | None = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            compiling = Precompilation(self._device)
        dtype_name = _choose_dtype(config, self._device)
        checkpoint = Checkpoint.read(model.path, cast("Task", config.task))
        check_dtype(checkpoint.architecture, dtype_name)
        _check_shapes(checkpoint)
        self._model = _build_empty(checkpoint.architecture, checkpoint.config, self._device, _DTYPES[dtype_name])
        stages.begin("weights")
        # First the little that follows the pooling: what is wrong there shows in a moment.
        if checkpoint.splade is not None:
            self._model, output = build_sparse(checkpoint, self._model, self._device)
            stages_sha256 = ""
        elif checkpoint.scoring is None:
            output, stages_sha256 = load_output(checkpoint, self._device)
        else:
            output, stages_sha256 = load_scores(checkpoint, self._model, self._device)
        # Beside the reading: what takes as long and does not need the numbers.
        looking = Thread(target=look_ahead, args=(config.attention, head_shape(self._model), self._device), daemon=True)
        if compiling is not None:
            compiling.start(self._model, output)
            looking.start()
        try:
            weights_sha256 = load_weights(checkpoint.folder, self._model)
        finally:
            if compiling is not None:
                stages.begin("kernels")
                compiling.wait()
                looking.join()
        max_tokens = length_limit(checkpoint, self._model)
        if max_tokens < (checkpoint.length_limit or 0):
            declared = checkpoint.length_limit
            logger.info("%s: a limit of %d tokens is cut to its %d positions", model.path, declared, max_tokens)
        encodings = frozenset(ENCODINGS[name] for name in checkpoint.encodings)
        self._limits = Limits(
            self._model.shape.vocab_size,
            max_tokens,
            output.dimensions,
            encodings,
            self._model.shape.has_token_types,
        )
        fingerprint = _fingerprint(checkpoint, f"{weights_sha256} {stages_sha256}", dtype_name, self._limits)
        stages.begin("attention")
        runner: DeviceRunner | None = None
        if self._device.type == "cpu":
            packed = pack_linears(cast("nn.Module", self._model))
            host = HostRunner.build(self._model, output, config)
            self._runner: Runner = host
            attention = host.attention
            how = f"{'packed' if packed else 'plain'} linear layers, {torch.get_num_threads()} CPU threads"
        else:
            runner = DeviceRunner.build(
                self._model,
                output,
                config,
                max_tokens=max_tokens,
                largest_batch_tokens=max(max_tokens, _largest_budget(config)),
                device=self._device,
                fingerprint=fingerprint,
                metrics=metrics,
            )
            self._runner = runner
            attention = runner.attention
            how = f"graphs {config.graphs}"
        stages.begin("step size")
        self._facts = describe(
            checkpoint,
            self._model,
            name=config.served_model_name or model.name,
            fingerprint=fingerprint,
            dtype=dtype_name,
            device=str(self._device),
            attention=attention,
            pooling=output.pooling,
            max_batch_tokens=self._choose_max_batch_tokens(config),
        )
        assert self._facts.dimensions == output.dimensions
        check_pairs_and_chunks(self._facts)
        if runner is not None:
            stages.begin("self-check")
            how += f", lowest cosine to float32 {self._self_check(runner, output):.6f}"
            if config.graphs == "eager-start":
                how += f", {runner.capture_ladder(max_tokens)} graphs"
        stages.begin("warm-up")
        self._warm_up()
        logger.info(
            "%s (%s, %s) is ready on %s after %s: dtype %s, attention %s, steps of %d tokens, %s",
            self._facts.name,
            self._facts.architecture,
            self._facts.fingerprint,
            self._facts.device,
            stages.text(),
            dtype_name,
            attention,
            self._facts.max_batch_tokens,
            how,
        )

    def hello(self) -> ModelFacts:
        """What the other processes need to know of the model."""
        return self._facts

    def step(self, batch: Batch) -> LazyTensor:
        """Launch a batch. Its rows come in the batch's order, uint8 [sequences, bytes of the widest row].

        A row begins with what its encoding asks for; of float32, columns from `batch.dimensions[i]` on are 0. A row
        that is not finite is no answer and is marked so; in float32 it is NaN in all its columns.

        Where the device has no memory left for it, graphs give theirs back and the batch runs in pieces, one after the
        other. On a GPU a result has to be read before the third step after its own is launched.

        Raises:
            BadBatch: the batch is outside the model's limits; nothing was launched.
            SequenceTooLarge: one sequence needs more memory than there is.
            DeviceLost: the device failed for good.
            RuntimeError: the batch failed.
        """
        ragged.check(batch, self._limits)
        lazy = self._attempt(batch)
        if lazy is not None:
            return lazy
        rows = run_in_pieces(batch, self._attempt)
        return LazyTensor(lambda: rows, is_typical=False)

    def _attempt(self, batch: Batch) -> LazyTensor | None:
        """Launch a batch; None where there is no memory for it, after all that can be spared was given up."""
        try:
            return self._runner.run(batch)
        except RuntimeError as error:
            if not _lacks_memory(error):
                self.check_device(error)
                raise
        # Outside the handler, whose traceback would hold on to the memory.
        self._metrics.memory_splits.inc()
        logger.warning("no memory on %s for %d tokens at once", self._device, len(batch.token_ids))
        self._runner.release_memory()
        return None

    @property
    def has_idle_work(self) -> bool:
        """Whether `idle_work` has something to do."""
        return self._runner.has_idle_work

    def idle_work(self) -> None:
        """Do a piece of work that nobody waits for (a graph's capture), if there is any; call when no batch waits."""
        self._runner.idle_work()

    def check_device(self, error: Exception) -> None:
        """On any thread. Raises DeviceLost: what followed `error` shows that the device is gone, not just this step."""
        try:
            self._runner.synchronize()
        except RuntimeError as lasting:
            raise DeviceLost(f"{self._device} has failed: {lasting}") from error

    def _self_check(self, runner: DeviceRunner, output: Output) -> float:
        """The lowest cosine to the reference. Raises ModelError: it is too low."""
        if "score" not in self._facts.tasks and not output.is_sparse:
            return selfcheck.verify(runner, self._facts)
        width = self._model.shape.hidden_size
        pooled = runner.with_output(Output([*output.poolings, "mean"][:1], [], width))
        lowest = selfcheck.verify(pooled, replace(self._facts, dimensions=width))
        pooled.release_memory()
        return lowest

    def _choose_max_batch_tokens(self, config: WorkerConfig) -> int:
        if config.max_batch_tokens != "auto":
            return int(config.max_batch_tokens)
        if self._device.type == "cpu":
            return _CPU_BATCH_TOKENS
        chosen = _GPU_BATCH_TOKENS[0]
        for num_tokens in _GPU_BATCH_TOKENS:
            batch = self._warm_up_batch(_full(num_tokens, self._limits.max_tokens))
            try:
                self._runner.run_ready(batch).numpy()
                step_s = statistics.median(self._seconds(batch) for _ in range(3))
            except torch.OutOfMemoryError:
                step_s = math.inf
            if step_s > _GPU_STEP_S:
                break
            chosen = num_tokens
        return chosen

    def _seconds(self, batch: Batch) -> float:
        started_s = time.monotonic()
        self._runner.run(batch).numpy()
        return time.monotonic() - started_s

    def _warm_up(self) -> None:
        """Run what first comes along once, so that no request pays for it: kernels made, memory grown.

        On a CPU bounded in time: a step of the full budget is skipped where it would take too long. On a GPU another
        kernel may be made at every power of two, which takes longer than any step.
        """
        deadline_s = time.monotonic() + (_WARM_UP_S if self._device.type == "cpu" else math.inf)
        most_rows = max_rows(self._facts)
        longest = self._limits.max_tokens
        budget = self._facts.max_batch_tokens
        steps = [[1], [3], [min(10, longest)], [1, min(30, longest), min(7, longest)], _full(budget, longest)]
        if self._device.type == "cuda":
            steps += [_full(1 << power, longest) for power in range(6, budget.bit_length())]
            steps.append([min(8, longest)] * max(1, budget // 8))  # many short ones have a kernel of their own
        s_per_token = 0.0
        for lengths in (step[:most_rows] for step in steps):
            if time.monotonic() + s_per_token * sum(lengths) > deadline_s:
                break
            s_per_token = self._seconds(self._warm_up_batch(lengths)) / sum(lengths)

    def _warm_up_batch(self, lengths: list[int]) -> Batch:
        return Batch(
            epoch=0,
            batch_id=0,
            token_ids=np.arange(sum(lengths), dtype=np.int32) % self._limits.vocab_size,
            lengths=np.array(lengths, dtype=np.int32),
            dimensions=np.full(len(lengths), self._limits.dimensions, dtype=np.int32),
            normalize=np.ones(len(lengths), dtype=np.uint8),
            encodings=np.full(len(lengths), FLOAT32, dtype=np.uint8),
        )


class _Stages:
    """How long each part of a start takes, for whoever wonders why it takes long."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("files", time.monotonic())]

    def begin(self, name: str) -> None:
        self._begun.append((name, time.monotonic()))

    def text(self) -> str:
        ends = [begun_s for _, begun_s in self._begun[1:]] + [time.monotonic()]
        parts = [f"{name} {end_s - begun_s:.1f}" for (name, begun_s), end_s in zip(self._begun, ends, strict=True)]
        return f"{ends[-1] - self._begun[0][1]:.1f} s ({', '.join(parts)})"


def _check_shapes(checkpoint: Checkpoint) -> None:
    """What config.json says of sizes against what the weights' headers say, before memory is asked for.

    Raises ModelError: they do not fit.
    """
    meta = torch.device("meta")
    with meta:
        model = build(checkpoint.architecture, checkpoint.config)
        if checkpoint.splade is not None:
            model, _ = build_sparse(checkpoint, model, meta)
    check_weights(checkpoint.folder, model)


def _build_empty(architecture: str, config: JsonFile, device: torch.device, dtype: torch.dtype) -> Model:
    """A model whose parameters are of this dtype, yet to be filled; tables that it computes keep their own."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build(architecture, config)
    finally:
        torch.set_default_dtype(former)


def _lacks_memory(error: RuntimeError) -> bool:
    # On a CPU torch has no class for it.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _full(budget: int, longest: int) -> list[int]:
    """Lengths of sequences that fill a budget, none above the longest."""
    length = min(budget, longest, 128)
    return [length] * (budget // length)


def _largest_budget(config: WorkerConfig) -> int:
    return _GPU_BATCH_TOKENS[-1] if config.max_batch_tokens == "auto" else int(config.max_batch_tokens)


def _choose_device(config: WorkerConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ModelError("--device cuda: this machine has no CUDA device that torch can use.")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", config.slot % torch.cuda.device_count())


def _choose_dtype(config: WorkerConfig, device: torch.device) -> str:
    name = _AUTO_DTYPES[device.type] if config.dtype == "auto" else config.dtype
    supported = _SUPPORTED_DTYPES[device.type]
    if name not in supported:
        raise ModelError(f"--dtype {name}: on {device.type} use one of {', '.join(supported)}.")
    return name


def _fingerprint(checkpoint: Checkpoint, weights_sha256: str, dtype_name: str, limits: Limits) -> str:
    """16 hex digits that are equal where the vectors of the same token ids are (a prompt changes the ids)."""
    parts = (
        weights_sha256,
        checkpoint.config_sha256,
        checkpoint.tokenizer_sha256,
        dtype_name,
        "+".join(checkpoint.poolings),
        str(checkpoint.include_prompt),
        repr(checkpoint.stages),
        str(checkpoint.normalize),
        " ".join(checkpoint.encodings),
        str(checkpoint.lower_case),
        str(limits.dimensions),
        str(limits.max_tokens),
        repr(checkpoint.scoring),
        repr(checkpoint.splade),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
