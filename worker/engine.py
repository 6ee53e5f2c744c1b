"""A model on a device: batches in, rows of vectors out.

`step` launches a batch and returns at once (see `lazy`); on a CPU that means when it is done. The whole of what a
sequence asks for (columns, unit length) is computed on the device, so that only finished rows travel.

One thread builds an engine and calls it: the one thread that touches the device.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.protocol import Batch, ModelFacts
from worker.attention.sdpa import SdpaAttention
from worker.checkpoint import Checkpoint, ModelError
from worker.layers import pack_linears
from worker.lazy import LazyTensor
from worker.loader import load_weights
from worker.models import build
from worker.pooling import finish, pool
from worker.ragged import Limits, RaggedBatch

if TYPE_CHECKING:
    from common.config import WorkerConfig
    from common.models import ModelFolder

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_SUPPORTED_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
_AUTO_MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}

_WARM_UP_S = 1.0


class Engine:
    def __init__(self, model: ModelFolder, config: WorkerConfig) -> None:
        """Load, check and warm up a model.

        Raises:
            ModelError: the folder's files cannot be served as they are, or not on this device in this dtype.
        """
        started_s = time.monotonic()
        self._device = _choose_device(config)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dtype_name = _choose_dtype(config, self._device)
        checkpoint = Checkpoint.read(model.path)
        attention = SdpaAttention()
        with torch.device(self._device):
            self._model = build(checkpoint.architecture, checkpoint.config, attention).to(_DTYPES[dtype_name])
        weights_sha256 = load_weights(checkpoint.folder, self._model)
        packed = self._device.type == "cpu" and pack_linears(self._model)
        self._pooling = checkpoint.pooling
        self._copy_stream = _copy_stream(self._device)
        max_tokens = min(checkpoint.length_limit or self._model.max_positions, self._model.max_positions)
        self._limits = Limits(self._model.vocab_size, max_tokens, self._model.hidden_size)
        self._facts = ModelFacts(
            name=config.served_model_name or model.name,
            folder=str(checkpoint.folder),
            fingerprint=_fingerprint(checkpoint, weights_sha256, dtype_name, self._limits),
            tokenizer_sha256=checkpoint.tokenizer_sha256,
            architecture=checkpoint.architecture,
            dtype=dtype_name,
            device=str(self._device),
            attention=attention.name,
            dimensions=self._limits.dimensions,
            max_tokens=max_tokens,
            vocab_size=self._limits.vocab_size,
            max_batch_tokens=_choose_max_batch_tokens(config, self._device),
            pooling=checkpoint.pooling,
            normalize=checkpoint.normalize,
            lower_case=checkpoint.lower_case,
            tasks=["embed"],
            prompts=checkpoint.prompts,
            default_prompt_name=checkpoint.default_prompt_name,
        )
        self._warm_up()
        logger.info(
            "%s (%s, %s) is ready on %s after %.1f s: dtype %s, attention %s, %s linear layers, %d CPU threads",
            self._facts.name,
            self._facts.architecture,
            self._facts.fingerprint,
            self._facts.device,
            time.monotonic() - started_s,
            dtype_name,
            attention.name,
            "packed" if packed else "plain",
            torch.get_num_threads(),
        )

    def hello(self) -> ModelFacts:
        """What the other processes need to know of the model."""
        return self._facts

    @torch.inference_mode()
    def step(self, batch: Batch) -> LazyTensor:
        """Launch a batch. Its rows come in the batch's order, float32 [sequences, model dimensions].

        Columns from `batch.dimensions[i]` on are 0. A row that is not finite is NaN in all its columns.

        Raises:
            BadBatch: the batch is outside the model's limits; nothing was launched.
            RuntimeError: the device failed, or has no memory left.
        """
        ragged = RaggedBatch.load(batch, self._limits, self._device)
        hidden = self._model(ragged)
        rows = pool(hidden, ragged.cu_seqlens, self._pooling)
        rows = finish(rows, ragged.dimensions, ragged.normalize)
        return LazyTensor.start(rows.index_select(0, ragged.restore), self._copy_stream)

    def _warm_up(self) -> None:
        """Run what first comes along once, so that no request pays for it: kernels made, memory grown.

        Bounded in time: a step of the full budget is skipped where it would take too long.
        """
        deadline_s = time.monotonic() + _WARM_UP_S
        longest = self._limits.max_tokens
        budget = self._facts.max_batch_tokens
        ms_per_token = 0.0
        for lengths in ([1], [3], [min(10, longest)], [1, min(30, longest), min(7, longest)], _full(budget, longest)):
            started_s = time.monotonic()
            if started_s + ms_per_token * sum(lengths) / 1000 > deadline_s:
                break
            self.step(self._warm_up_batch(lengths)).numpy()
            ms_per_token = (time.monotonic() - started_s) * 1000 / sum(lengths)

    def _warm_up_batch(self, lengths: list[int]) -> Batch:
        return Batch(
            epoch=0,
            batch_id=0,
            token_ids=np.arange(sum(lengths), dtype=np.int32) % self._limits.vocab_size,
            lengths=np.array(lengths, dtype=np.int32),
            dimensions=np.full(len(lengths), self._limits.dimensions, dtype=np.int32),
            normalize=np.ones(len(lengths), dtype=np.uint8),
        )


def _full(budget: int, longest: int) -> list[int]:
    """Lengths of sequences that fill a budget, none above the longest."""
    length = min(budget, longest, 128)
    return [length] * (budget // length)


def _choose_device(config: WorkerConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ModelError("--device cuda: this machine has no CUDA device that torch can use.")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", config.slot % torch.cuda.device_count())


def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's gap


def _choose_dtype(config: WorkerConfig, device: torch.device) -> str:
    name = _AUTO_DTYPES[device.type] if config.dtype == "auto" else config.dtype
    supported = _SUPPORTED_DTYPES[device.type]
    if name not in supported:
        raise ModelError(f"--dtype {name}: on {device.type} use one of {', '.join(supported)}.")
    return name


def _choose_max_batch_tokens(config: WorkerConfig, device: torch.device) -> int:
    if config.max_batch_tokens == "auto":
        return _AUTO_MAX_BATCH_TOKENS[device.type]
    return int(config.max_batch_tokens)


def _fingerprint(checkpoint: Checkpoint, weights_sha256: str, dtype_name: str, limits: Limits) -> str:
    """16 hex digits that are equal where the vectors of the same token ids are (a prompt changes the ids)."""
    parts = (
        weights_sha256,
        checkpoint.config_sha256,
        checkpoint.tokenizer_sha256,
        dtype_name,
        checkpoint.pooling,
        str(checkpoint.normalize),
        str(checkpoint.lower_case),
        str(limits.dimensions),
        str(limits.max_tokens),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
