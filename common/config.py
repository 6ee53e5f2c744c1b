"""The configuration of each process: one frozen dataclass, its flags derived from its fields.

A field `port` is the flag `--port` and the variable `HEDGEROW_PORT`; a flag wins over the environment, the
environment over the default. A unit is part of a name
(`_s`, `_ms`, `_bytes`, `_tokens`). What a process can learn from a peer is not configured: a gateway hears about the
model from the scheduler, the scheduler from its workers.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from common import environment
from common.environment import PREFIX
from common.model_flags import PlannedModel, is_named, plan_models
from common.run_dir import default_run_dir

DEFAULT_MODEL = "all-MiniLM-L6-v2"
TASKS = ("auto", "embed", "score", "sparse")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


def _option(
    default: object,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: int = 1,
    number_or_auto: bool = False,
) -> Any:  # noqa: ANN401 as dataclasses.field
    """A field with what its flag says and takes. `minimum` is for whole numbers."""
    metadata = {"help": help_text, "choices": choices, "minimum": minimum, "number_or_auto": number_or_auto}
    return field(default=default, metadata=metadata)


def _task_option() -> Any:  # noqa: ANN401  # a field of a dataclass
    return _option(
        "auto",
        "what the model is for; score: a Qwen3-Reranker or a bge-reranker-v2-gemma, whose files do not say that it "
        "scores; sparse: a masked language model, whose files do not say that it is a SPLADE",
        choices=TASKS,
    )


@dataclass(frozen=True)  # without slots, since ServeConfig has several of these as bases
class ProcessConfig:
    """What every process needs."""

    run_dir: str = _option("", "folder of this suite's sockets, locks and logs; default: one a user and port")
    port: int = _option(8080, "TCP port of the HTTP endpoint; also names the default run folder", minimum=0)
    slot: int = _option(0, "which of its kind this process is, from 0", minimum=0)
    log_level: str = _option("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_dir: str = _option("", "folder of rotating log files; default: standard error")
    drain_timeout_s: int = _option(20, "how long a stopping process waits for what it has accepted")

    def __post_init__(self) -> None:
        if not self.run_dir:
            object.__setattr__(self, "run_dir", default_run_dir(self.port))
        for item in fields(self):
            _check(item, getattr(self, item.name))
        if self.port > 65_535:
            raise ValueError("--port needs at most 65535")


@dataclass(frozen=True)
class GatewayConfig(ProcessConfig):
    host: str = _option("127.0.0.1", "address of the HTTP endpoint")
    max_body_bytes: int = _option(16 * 1024 * 1024, "largest request body; larger ones are 413")
    max_held_bytes: int = _option(
        1024**3, "bytes of bodies, token ids and rows that one gateway holds at once; what would make more is 429"
    )
    max_inputs: int = _option(2048, "most inputs in one request")
    max_request_tokens: int = _option(1_000_000, "most tokens in one request")
    max_concurrent_requests: int = _option(4096, "requests one gateway holds at once; more are 429")
    max_connections: int = _option(4096, "connections one gateway holds at once; more are refused with 503")
    default_timeout_s: int = _option(60, "a request's deadline where the client names none")
    max_timeout_s: int = _option(600, "longest deadline that a client may ask for; longer ones are cut to it")
    header_timeout_s: int = _option(10, "time in which a request's header must have arrived")
    body_timeout_s: int = _option(30, "time in which a request's body must have arrived")
    min_body_bytes_per_s: int = _option(8192, "pace of a body below which, over 5 s, a request is 408")
    write_timeout_s: int = _option(30, "time in which a client must have read more of an answer, until it has all")
    keepalive_timeout_s: int = _option(75, "how long an idle connection stays open; pooled clients keep theirs 60 s")
    tokenizer_threads: int = _option(2, "threads that tokenize")
    auto_truncate: bool = _option(False, "cut over-long inputs where the client does not say")
    api_keys_file: str = _option("", "file of the keys that clients need, one a line; mode 0600")
    cors_origins: str = _option("", "origins of web pages that may read answers, with commas between them; or *")
    models: tuple[str, ...] = _option(
        (), "names of the models, each with a scheduler in its part of the run folder; default: one model, in all of it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError("--max-held-bytes needs at least as many as --max-body-bytes, or these are never read")
        _check_origins(self.cors_origins)


@dataclass(frozen=True)
class SchedulerConfig(ProcessConfig):
    workers: int = _option(1, "workers this suite is meant to have; /ready tells how many of them are ready")
    max_queue_ms: int = _option(10_000, "predicted wait above which new requests are refused with 429")
    latency_target_ms: int = _option(
        0,
        "how long a step may take: where it would take longer, fewer tokens run at once; 0: as --max-batch-tokens says",
        minimum=0,
    )


@dataclass(frozen=True)
class WorkerConfig(ProcessConfig):
    model: str = _option(DEFAULT_MODEL, "a folder, a hub id, or a model that an installed package carries")
    served_model_name: str = _option("", "the name that clients use; default: taken from the model")
    task: str = _task_option()
    device: str = _option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = _option("auto", "what it computes in", choices=("auto", "float32", "bfloat16", "float16"))
    max_batch_tokens: str = _option("auto", "tokens one step should not exceed: a number, or auto", number_or_auto=True)
    attention: str = _option(
        "auto",
        "attention backend; auto: the fastest on this device, as measured",
        choices=(
            "auto",
            "triton",
            "flash_attention_4",
            "torch",
            "flashinfer_fa3",
            "flashinfer_fa2",
            "sdpa",
            "reference",
        ),
    )
    graphs: str = _option(
        "lazy",
        "CUDA graphs: captured as they are needed, all before the worker is ready, or never",
        choices=("lazy", "eager-start", "off"),
    )
    max_graph_bytes: int = _option(4 * 1024**3, "device memory that captured graphs may take")
    cache_dir: str = _option("", "folder of what was measured and compiled; default: hedgerow in the user's cache")
    threads: str = _option("auto", "CPU threads of one worker: a number, or auto", number_or_auto=True)
    workers: int = _option(1, "workers on this host, which share its CPU cores")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cache_dir:
            object.__setattr__(self, "cache_dir", _default_cache_dir())


@dataclass(frozen=True)
class ServeConfig(GatewayConfig, SchedulerConfig, WorkerConfig):
    """`hedgerow serve`: every flag of every process, and how many of each there are."""

    gateways: int = _option(
        2, "gateway processes, which share the port; with one, a planned restart refuses connections"
    )
    workers: str = _option(  # type: ignore[assignment]  # resolved to a number before any process loads it
        "auto",
        "workers of each model: a number, or auto (one a GPU; on a CPU one a core, fewer where the model is large)",
        number_or_auto=True,
    )
    models: tuple[str, ...] = _option(  # reduced to its names before any process loads it
        (), "several models, each as NAME=MODEL: what stands after `hedgerow serve`"
    )
    task: str = _option(  # one of TASKS to each process
        "auto", f"what the model is for: {', '.join(TASKS)}; of several models what single ones are for, as in B:score"
    )
    gpus: tuple[str, ...] = _option(
        (), "the GPUs of each of several models, as in A:0-1 B:2; numbers are those of the GPUs that are visible"
    )
    keep_awake: bool = _option(
        False, "keep every core from sleeping: a query's answer comes a third sooner, for a fifth of each core"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.models) == 1 and not is_named(self.models[0]):
            object.__setattr__(self, "model", self.models[0])
            object.__setattr__(self, "models", ())
        self.planned_models()
        if self.models and self.served_model_name:
            raise ValueError("--served-model-name is for one model; of several each is called as in NAME=MODEL")
        if self.gpus and self.device == "cpu":
            raise ValueError("--gpus and --device cpu exclude each other; leave one of them out")
        if self.gpus and self.workers != "auto":
            raise ValueError("--gpus says how many workers there are, one a GPU; leave --workers out")

    def planned_models(self) -> list[PlannedModel]:
        """The models of the suite, one or several.

        Raises:
            ValueError: the flags cannot be read; not once this object is there.
        """
        return plan_models(self.models, self.model, task=self.task, gpus=self.gpus, tasks=TASKS)


@dataclass(frozen=True)
class InspectConfig:
    """`hedgerow inspect`: which model, and in what form it is described."""

    model: str = _option(DEFAULT_MODEL, "a folder, a hub id that is in the local cache, or a packaged model")
    task: str = _task_option()
    json: bool = _option(False, "print one JSON object instead of text")


Config = TypeVar("Config", bound=ProcessConfig)
_AnyConfig = TypeVar("_AnyConfig", bound=ProcessConfig | InspectConfig)


def load(config_class: type[_AnyConfig], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> _AnyConfig:
    """The configuration that flags, then environment, then defaults give.

    A wrong flag or value ends the process with a message that names it (argparse's exit status 2). `serve` also takes
    models as positional arguments, `inspect` one.
    """
    environ = environment.variables() if environ is None else environ
    parser = argparse.ArgumentParser(
        prog=f"hedgerow {config_class.__name__.removesuffix('Config').lower()}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    if config_class is ServeConfig:
        parser.add_argument("models", nargs="*", metavar="MODEL", default=argparse.SUPPRESS)
    elif config_class is InspectConfig:
        parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS)
    hints = get_type_hints(config_class)
    for item in fields(config_class):
        _add_flag(parser, item, hints[item.name])
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    try:
        for item in fields(config_class):
            if item.name in given:
                found = given[item.name]
                values[item.name] = tuple(found) if isinstance(found, list) else found
            elif (text := environ.get(PREFIX + item.name.upper())) is not None and text != "":
                values[item.name] = _parse(item, hints[item.name], text)
        return config_class(**values)
    except ValueError as error:
        parser.error(str(error))


def to_environment(config: ProcessConfig) -> dict[str, str]:
    """The variables that make another process load these same values."""
    return {PREFIX + item.name.upper(): _text(getattr(config, item.name)) for item in fields(config) if item.init}


def _default_cache_dir() -> str:
    parent = environment.cache_folder()
    if parent:
        return str(Path(parent) / "hedgerow")
    try:
        return str(Path.home() / ".cache" / "hedgerow")
    except RuntimeError:  # a user without a home
        return str(Path(tempfile.gettempdir()) / f"hedgerow-cache-{os.getuid()}")


def describe(config: ProcessConfig) -> str:
    """The whole configuration on one line, for the log at start."""
    return " ".join(f"{item.name}={_text(getattr(config, item.name))!r}" for item in fields(config))


def _add_flag(parser: argparse.ArgumentParser, item: Field[Any], hint: object) -> None:
    flag = "--" + item.name.replace("_", "-")
    assert item.default is not MISSING
    text = f"{item.metadata['help']} [{item.default!r}]".replace("%", "%%")
    if hint is bool:
        parser.add_argument(
            flag,
            dest=item.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    parser.add_argument(
        flag,
        dest=item.name,
        default=argparse.SUPPRESS,
        nargs="+" if isinstance(item.default, tuple) else None,
        type=int if hint is int else str,
        choices=item.metadata["choices"],
        help=text,
        metavar=None if item.metadata["choices"] else "N" if hint is int else "VALUE",
    )


def _parse(item: Field[Any], hint: object, text: str) -> object:
    name = PREFIX + item.name.upper()
    if hint is bool:
        lowered = text.lower()
        if lowered not in {"1", "true", "yes", "on", "0", "false", "no", "off"}:
            raise ValueError(f"{name} needs true or false, not {text!r}")
        return lowered in {"1", "true", "yes", "on"}
    if hint is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name} needs a whole number, not {text!r}") from None
    if isinstance(item.default, tuple):
        return tuple(text.split())
    choices = item.metadata["choices"]
    if choices and text not in choices:
        raise ValueError(f"{name} needs one of {', '.join(choices)}, not {text!r}")
    return text


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(item: Field[Any], value: object) -> None:
    """Raises ValueError: a number is too small, or a text neither a number nor auto."""
    flag = "--" + item.name.replace("_", "-")
    if type(value) is int and value < item.metadata["minimum"]:
        raise ValueError(f"{flag} needs at least {item.metadata['minimum']}")
    if item.metadata["number_or_auto"] and not _is_number_or_auto(str(value)):
        raise ValueError(f"{flag} needs a positive number or auto, not {value!r}")


def _check_origins(text: str) -> None:
    """A page's origin is compared as a browser writes it: what never matches is a mistake."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    if origins != ["*"] and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError(
            "--cors-origins needs origins as browsers send them (https://app.example.org), with commas between them: "
            "in small letters, without a path or a slash at the end; or * alone"
        )


def _is_number_or_auto(text: str) -> bool:
    return text == "auto" or (text.isascii() and text.isdecimal() and int(text) > 0)
