"""The configuration of each process: one frozen dataclass, its flags derived from its fields.

A field `port` is the flag `--port` and the variable `HEDGEROW_PORT`; a flag wins over the environment, the
environment over the default. This is the only module that reads the environment. A unit is part of a name
(`_s`, `_ms`, `_bytes`, `_tokens`). What a process can learn from a peer is not configured: a gateway hears about the
model from the scheduler, the scheduler from its workers.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from common.deploy import plan

DEFAULT_MODEL = "all-MiniLM-L6-v2"
TASKS = ("auto", "embed", "score", "sparse")
# A test compares them with the rows of `worker.attention.registry`.
ATTENTION_BACKENDS = ("triton", "flash_attention_4", "torch", "flashinfer_fa3", "flashinfer_fa2", "sdpa", "reference")
_PREFIX = "HEDGEROW_"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


def _option(default: object, help_text: str, *, choices: tuple[str, ...] | None = None) -> Any:  # noqa: ANN401 as dataclasses.field
    return field(default=default, metadata={"help": help_text, "choices": choices})


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
    port: int = _option(8080, "TCP port of the HTTP endpoint; also names the default run folder")
    slot: int = _option(0, "which of its kind this process is, from 0")
    log_level: str = _option("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_dir: str = _option("", "folder of rotating log files; default: standard error")
    drain_timeout_s: int = _option(20, "how long a stopping process waits for what it has accepted")

    def __post_init__(self) -> None:
        if not self.run_dir:
            object.__setattr__(self, "run_dir", default_run_dir(self.port))
        _at_least(self, 0, "port", "slot")
        if self.port > 65_535:
            raise ValueError("--port needs at most 65535")
        _at_least(self, 1, "drain_timeout_s")


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
        ProcessConfig.__post_init__(self)
        names = {item.name for item in fields(GatewayConfig)} - {item.name for item in fields(ProcessConfig)}
        _at_least(self, 1, *(names - {"host", "auto_truncate", "api_keys_file", "cors_origins", "models"}))
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
    )

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        _at_least(self, 0, "latency_target_ms")
        _at_least(self, 1, "workers", "max_queue_ms")


@dataclass(frozen=True)
class WorkerConfig(ProcessConfig):
    model: str = _option(DEFAULT_MODEL, "a folder, a hub id, or a model that an installed package carries")
    served_model_name: str = _option("", "the name that clients use; default: taken from the model")
    task: str = _task_option()
    device: str = _option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = _option("auto", "what it computes in", choices=("auto", "float32", "bfloat16", "float16"))
    max_batch_tokens: str = _option("auto", "tokens one step should not exceed: a number, or auto")
    attention: str = _option(
        "auto",
        "attention backend; auto: the fastest on this device, as measured",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    graphs: str = _option(
        "lazy",
        "CUDA graphs: captured as they are needed, all before the worker is ready, or never",
        choices=("lazy", "eager-start", "off"),
    )
    max_graph_bytes: int = _option(4 * 1024**3, "device memory that captured graphs may take")
    cache_dir: str = _option("", "folder of what was measured and compiled; default: hedgerow in the user's cache")
    threads: str = _option("auto", "CPU threads of one worker: a number, or auto")
    workers: int = _option(1, "workers on this host, which share its CPU cores")

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if not self.cache_dir:
            object.__setattr__(self, "cache_dir", _default_cache_dir())
        _at_least(self, 1, "workers", "max_graph_bytes")
        for name in ("max_batch_tokens", "threads"):
            _number_or_auto(name, getattr(self, name))


@dataclass(frozen=True)
class ServeConfig(GatewayConfig, SchedulerConfig, WorkerConfig):
    """`hedgerow serve`: every flag of every process, and how many of each there are."""

    gateways: int = _option(
        2, "gateway processes, which share the port; with one, a planned restart refuses connections"
    )
    workers: str = _option(  # type: ignore[assignment]  # resolved to a number before any process loads it
        "auto",
        "workers of each model: a number, or auto (one a GPU; on a CPU one a core, fewer where the model is large)",
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
        GatewayConfig.__post_init__(self)
        if len(self.models) == 1 and not plan.is_named(self.models[0]):
            object.__setattr__(self, "model", self.models[0])
            object.__setattr__(self, "models", ())
        self._check_models()
        if not self.cache_dir:
            object.__setattr__(self, "cache_dir", _default_cache_dir())
        _at_least(self, 0, "latency_target_ms")
        _at_least(self, 1, "gateways", "max_queue_ms", "max_graph_bytes")
        for name in ("max_batch_tokens", "threads", "workers"):
            _number_or_auto(name, str(getattr(self, name)))

    def _check_models(self) -> None:
        models = plan.parse_models(self.models)
        plan.parse_tasks(self.task, models or [self.model], TASKS)
        gpus = plan.parse_gpus(self.gpus, models)
        if self.models and self.served_model_name:
            raise ValueError("--served-model-name is for one model; of several each is called as in NAME=MODEL")
        if gpus and self.device == "cpu":
            raise ValueError("--gpus and --device cpu exclude each other; leave one of them out")
        if gpus and self.workers != "auto":
            raise ValueError("--gpus says how many workers there are, one a GPU; leave --workers out")


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
    environ = os.environ if environ is None else environ
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
            elif (text := environ.get(_PREFIX + item.name.upper())) is not None and text != "":
                values[item.name] = _parse(item, hints[item.name], text)
        return config_class(**values)
    except ValueError as error:
        parser.error(str(error))


def to_environment(config: ProcessConfig) -> dict[str, str]:
    """The variables that make another process load these same values."""
    return {_PREFIX + item.name.upper(): _text(getattr(config, item.name)) for item in fields(config) if item.init}


def default_run_dir(port: int) -> str:
    """One folder a user and port, so that suites on other ports never meet: short, since a socket path may not
    exceed 107 bytes."""
    parent = os.environ.get("XDG_RUNTIME_DIR")
    if not parent or not os.access(parent, os.W_OK):
        parent = tempfile.gettempdir()
    return str(Path(parent) / f"hedgerow-{os.getuid()}-{port}")


def _default_cache_dir() -> str:
    parent = os.environ.get("XDG_CACHE_HOME")
    if parent:
        return str(Path(parent) / "hedgerow")
    try:
        return str(Path.home() / ".cache" / "hedgerow")
    except RuntimeError:  # a user without a home
        return str(Path(tempfile.gettempdir()) / f"hedgerow-cache-{os.getuid()}")


def api_key_from_environment() -> str | None:
    """The one key of HEDGEROW_API_KEY: never a flag, since flags show in the list of processes."""
    return os.environ.get(_PREFIX + "API_KEY") or None


def under_supervisord() -> bool:
    """Whether supervisord started this process: it restarts us, and we are to die with it."""
    return os.environ.get("SUPERVISOR_ENABLED") == "1"


def process_name() -> str | None:
    """What supervisord calls this process, which is its own among all of a suite; None without supervisord."""
    return os.environ.get("SUPERVISOR_PROCESS_NAME") if under_supervisord() else None


def visible_cuda_devices() -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES allows; None where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [device for device in text.split(",") if device.strip()]


def bound_tokenizer_threads(num_threads: int) -> None:
    """Have the tokenizers library use so many threads for the texts of a list; before its first call.

    By itself it takes one a core, in each gateway: of eight on 16 cores each list had all cores, and queries waited for
    one (2026-11-30).
    """
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    if num_threads == 1:  # else each call would wait until that one is awake
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def usable_cpus() -> int:
    """How many CPUs' time this process may use; a container with a quota still sees all of them."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file (version 1), or the quota is "max"
        allowed = sys.maxsize
    return min(len(os.sched_getaffinity(0)), allowed)


def path_with(folder: str) -> str:
    """PATH with a folder in front."""
    return os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


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
    name = _PREFIX + item.name.upper()
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


def _at_least(config: ProcessConfig, minimum: int, *names: str) -> None:
    for name in sorted(names):
        if getattr(config, name) < minimum:
            raise ValueError(f"--{name.replace('_', '-')} needs at least {minimum}")


def _check_origins(text: str) -> None:
    """A page's origin is compared as a browser writes it: what never matches is a mistake."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    if origins != ["*"] and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError(
            "--cors-origins needs origins as browsers send them (https://app.example.org), with commas between them: "
            "in small letters, without a path or a slash at the end; or * alone"
        )


def _number_or_auto(name: str, text: str) -> None:
    if text != "auto" and not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"--{name.replace('_', '-')} needs a positive number or auto, not {text!r}")
