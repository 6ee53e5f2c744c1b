"""A model on a device: batches in, rows out.

`step` launches a batch and returns at once (see `worker.batch.lazy`); on a CPU it returns when the batch has run.
Column counts, unit length and quantisation are computed on the device, so that only finished rows travel.

One thread builds an engine and calls it: the one thread that launches steps on the device. Rows may be read on another.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from common.wire.messages import Batch, ModelFacts, max_rows
from common.wire.rows import FLOAT32
from worker.batch import ragged
from worker.batch.lazy import DeviceLost, LazyTensor
from worker.engine import selfcheck
from worker.engine.facts import check_pairs_and_chunks, describe
from worker.engine.loading import LoadedModel, StartStages, choose_device, load_model
from worker.engine.oom_split import run_in_pieces
from worker.engine.runner import DeviceRunner, HostRunner, Runner
from worker.models.layers import pack_linears
from worker.models.output import Output

if TYPE_CHECKING:
    from torch import nn

    from common.config import WorkerConfig
    from common.metrics import Metrics
    from common.model_location import ModelFolder

logger = logging.getLogger(__name__)

# Tokens of a step with `--max-batch-tokens auto`. On a CPU, steps of 512 tokens cost the least for each token. On a GPU
# it is the largest of these sizes whose step takes at most _GPU_STEP_S: a larger step gains little throughput, and
# every request behind it waits longer.
_CPU_BATCH_TOKENS = 512
_GPU_BATCH_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_GPU_STEP_S = 0.010

_WARM_UP_S = 1.0  # on a CPU


class Engine:
    def __init__(self, folder: ModelFolder, config: WorkerConfig, metrics: Metrics) -> None:
        """Load, check and warm up a model.

        Raises:
            ModelError: the folder's files cannot be served as they are, or not on this device in this dtype, or what
                the device computes is not what the model says.
        """
        stages = StartStages()
        self._metrics = metrics
        self._device = choose_device(config)
        loaded = load_model(folder, config, self._device, stages)
        self._model, self._limits = loaded.model, loaded.limits
        stages.begin("attention")
        self._runner, how = self._build_runner(loaded, config)
        stages.begin("step size")
        max_batch_tokens = self._choose_max_batch_tokens(config)
        self._facts = self._describe(loaded, config.served_model_name or folder.name, max_batch_tokens)
        if isinstance(self._runner, DeviceRunner):
            stages.begin("self-check")
            how += self._check(self._runner, loaded.output, config)
        stages.begin("warm-up")
        self._warm_up()
        logger.info(
            "%s (%s, %s) is ready on %s after %s: dtype %s, attention %s, steps of %d tokens, %s",
            self._facts.name,
            self._facts.architecture,
            self._facts.fingerprint,
            self._facts.device,
            stages.text(),
            self._facts.dtype,
            self._facts.attention,
            self._facts.max_batch_tokens,
            how,
        )

    def hello(self) -> ModelFacts:
        """What the other processes need to know of the model."""
        return self._facts

    def step(self, batch: Batch) -> LazyTensor:
        """Launch a batch. Its rows come in the batch's order, uint8 [sequences, bytes of the widest row].

        A row begins with the bytes of its encoding. In float32, columns from `batch.dimensions[i]` on are 0. A row that
        is not finite is no answer and is marked so; in float32 all its columns are NaN.

        If the device has no memory left for the batch, graphs give theirs back and the batch runs in pieces, one after
        the other. On a GPU a result has to be read before the third step after its own is launched.

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
        """Launch a batch; None: there is no memory for it, and everything that can be spared has been given up."""
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
        """Capture one graph, or the like, if there is some: call it when no batch waits."""
        self._runner.idle_work()

    def check_device(self, error: Exception) -> None:
        """Find out whether `error` has taken the device, too; on any thread. Raises DeviceLost: it has."""
        try:
            self._runner.synchronize()
        except RuntimeError as lasting:
            raise DeviceLost(f"{self._device} has failed: {lasting}") from error

    # --- the stages of a start ---

    def _build_runner(self, loaded: LoadedModel, config: WorkerConfig) -> tuple[Runner, str]:
        """The runner of steps, and how it runs them, for the log."""
        if self._device.type == "cpu":
            packed = pack_linears(cast("nn.Module", loaded.model))
            how = f"{'packed' if packed else 'plain'} linear layers, {torch.get_num_threads()} CPU threads"
            return HostRunner.build(loaded.model, loaded.output, config), how
        max_tokens = loaded.limits.max_tokens
        runner = DeviceRunner.build(
            loaded.model,
            loaded.output,
            config,
            max_tokens=max_tokens,
            largest_batch_tokens=max(max_tokens, _largest_budget(config)),
            device=self._device,
            fingerprint=loaded.fingerprint,
            metrics=self._metrics,
        )
        return runner, f"graphs {config.graphs}"

    def _describe(self, loaded: LoadedModel, name: str, max_batch_tokens: int) -> ModelFacts:
        """Raises ModelError: the tokenizer cannot do what the model is for."""
        facts = describe(
            loaded.checkpoint,
            loaded.model,
            name=name,
            fingerprint=loaded.fingerprint,
            dtype=loaded.dtype_name,
            device=str(self._device),
            attention=self._runner.attention,
            pooling=loaded.output.pooling,
            max_batch_tokens=max_batch_tokens,
        )
        assert facts.dimensions == loaded.output.dimensions
        check_pairs_and_chunks(facts)
        return facts

    def _check(self, runner: DeviceRunner, output: Output, config: WorkerConfig) -> str:
        """Compare with the reference, and capture the graphs that are wanted at once; the outcome, for the log."""
        how = f", lowest cosine to float32 {self._self_check(runner, output):.6f}"
        if config.graphs == "eager-start":
            how += f", {runner.capture_ladder(self._limits.max_tokens)} graphs"
        return how

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
        """Run steps of usual sizes once, so that no request waits for kernels to be made or memory to be grown.

        On a CPU the time is bounded: a step of the full budget is skipped if it would take too long. On a GPU every
        power of two may need another kernel, and making it takes longer than any step.
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


def _lacks_memory(error: RuntimeError) -> bool:
    # On a CPU torch has no class for it.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _full(budget: int, longest: int) -> list[int]:
    """Lengths of sequences that fill a budget, none above the longest."""
    length = min(budget, longest, 128)
    return [length] * (budget // length)


def _largest_budget(config: WorkerConfig) -> int:
    return _GPU_BATCH_TOKENS[-1] if config.max_batch_tokens == "auto" else int(config.max_batch_tokens)
