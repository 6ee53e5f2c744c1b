"""From a model's folder to a model on a device.

Cheap checks come first. A mistake in config.json or in a header is refused before memory is asked for, and what follows
the pooling, which is small, is read before the weights. On a GPU kernels are compiled and packages imported while the
weights are read: it takes about as long and does not need the numbers.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, cast

import torch

from common.wire.rows import ENCODINGS
from worker.attention.select import look_ahead
from worker.batch.ragged import Limits
from worker.checkpoint.architectures import check_dtype
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.engine.facts import length_limit
from worker.engine.precompile import Precompilation
from worker.engine.runner import head_shape
from worker.models.build import build
from worker.models.heads import load_scores
from worker.models.loader import check_weights, load_weights
from worker.models.output import Output, load_output
from worker.models.sparse import build_sparse

if TYPE_CHECKING:
    from common.config import WorkerConfig
    from common.model_location import ModelFolder
    from worker.checkpoint.files import JsonFile
    from worker.checkpoint.scoring import Task
    from worker.models.interface import Model

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_SUPPORTED_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose parameters are filled, and what is known about it before it runs."""

    checkpoint: Checkpoint
    model: Model
    output: Output
    dtype_name: str
    limits: Limits
    fingerprint: str


class StartStages:
    """How long each stage of a start takes, for the log."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("files", time.monotonic())]

    def begin(self, name: str) -> None:
        self._begun.append((name, time.monotonic()))

    def text(self) -> str:
        ends = [begun_s for _, begun_s in self._begun[1:]] + [time.monotonic()]
        parts = [f"{name} {end_s - begun_s:.1f}" for (name, begun_s), end_s in zip(self._begun, ends, strict=True)]
        return f"{ends[-1] - self._begun[0][1]:.1f} s ({', '.join(parts)})"


def load_model(folder: ModelFolder, config: WorkerConfig, device: torch.device, stages: StartStages) -> LoadedModel:
    """Read, check and load a model.

    Raises:
        ModelError: the folder's files cannot be served as they are, or not on this device in this dtype.
    """
    compiling = _open_compiler(device)
    dtype_name = _choose_dtype(config, device)
    checkpoint = Checkpoint.read(folder.path, cast("Task", config.task))
    check_dtype(checkpoint.architecture, dtype_name)
    _check_shapes(checkpoint)
    model = _build_empty(checkpoint.architecture, checkpoint.config, device, _DTYPES[dtype_name])
    stages.begin("weights")
    output_sha256 = ""
    if checkpoint.splade is not None:
        model, output = build_sparse(checkpoint, model, device)
    elif checkpoint.scoring is None:
        output, output_sha256 = load_output(checkpoint, device)
    else:
        output, output_sha256 = load_scores(checkpoint, model, device)
    with _kernels_meanwhile(compiling, model, output, config, device, stages):
        weights_sha256 = load_weights(checkpoint.folder, model)
    limits = _limits(checkpoint, model, output)
    if limits.max_tokens < (checkpoint.length_limit or 0):
        declared = checkpoint.length_limit
        logger.info("%s: a limit of %d tokens is cut to its %d positions", folder.path, declared, limits.max_tokens)
    fingerprint = _fingerprint(checkpoint, f"{weights_sha256} {output_sha256}", dtype_name, limits)
    return LoadedModel(checkpoint, model, output, dtype_name, limits, fingerprint)


def choose_device(config: WorkerConfig) -> torch.device:
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


def _open_compiler(device: torch.device) -> Precompilation | None:
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return Precompilation(device)


@contextmanager
def _kernels_meanwhile(
    compiling: Precompilation | None,
    model: Model,
    output: Output,
    config: WorkerConfig,
    device: torch.device,
    stages: StartStages,
) -> Iterator[None]:
    """On a GPU, have kernels compiled and packages imported while the body of the `with` runs."""
    if compiling is None:
        yield
        return
    looking = Thread(target=look_ahead, args=(config.attention, head_shape(model), device), daemon=True)
    compiling.start(model, output)
    looking.start()
    try:
        yield
    finally:
        stages.begin("kernels")
        compiling.wait()
        looking.join()


def _limits(checkpoint: Checkpoint, model: Model, output: Output) -> Limits:
    return Limits(
        model.shape.vocab_size,
        length_limit(checkpoint, model),
        output.dimensions,
        frozenset(ENCODINGS[name] for name in checkpoint.encodings),
        model.shape.has_token_types,
    )


def _check_shapes(checkpoint: Checkpoint) -> None:
    """Compare the sizes in config.json with the headers of the weights, before memory is asked for.

    Raises ModelError: they do not fit.
    """
    meta = torch.device("meta")
    with meta:
        model = build(checkpoint.architecture, checkpoint.config)
        if checkpoint.splade is not None:
            model, _ = build_sparse(checkpoint, model, meta)
    check_weights(checkpoint.folder, model)


def _build_empty(architecture: str, config: JsonFile, device: torch.device, dtype: torch.dtype) -> Model:
    """A model whose parameters have this dtype and are yet to be filled. Tables that it computes keep their own."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build(architecture, config)
    finally:
        torch.set_default_dtype(former)


def _fingerprint(checkpoint: Checkpoint, weights_sha256: str, dtype_name: str, limits: Limits) -> str:
    """16 hex digits, equal for two models that give the same vectors for the same token ids.

    Prompts are not in it: they change the token ids.
    """
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
