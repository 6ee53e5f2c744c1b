"""The configuration of each process: one frozen dataclass, its flags derived from its fields.

A field `port` is the flag `--port` and the variable `HEDGEROW_PORT`. A flag wins over the environment, the environment
over the default. A unit is part of a name (`_s`, `_ms`, `_bytes`, `_tokens`). A process is not configured with what it
can learn from a peer: a gateway hears about the model from the scheduler, the scheduler from its workers.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from common import environment
from common.environment import PREFIX
from common.model_flags import PlannedModel, is_named, plan_models
from common.run_dir import default_run_dir

DEFAULT_MODEL = "all-MiniLM-L6-v2"
TASKS = ("auto", "embed", "score", "sparse")
# A test compares them with the rows of `worker.attention.registry`.
ATTENTION_BACKENDS = ("triton", "flash_attention_4", "torch", "flashinfer_fa3", "flashinfer_fa2", "sdpa", "reference")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


def _option(
    default: object,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: int = 1,
    number_or_auto: bool = False,
) -> Any:  # noqa: ANN401 as dataclasses.field
    """A field, with the help text and the bounds of its flag. `minimum` applies to whole numbers only."""
    metadata = {"help": help_text, "choices": choices, "minimum": minimum, "number_or_auto": number_or_auto}
    return field(default=default, metadata=metadata)


def _task_option() -> Any:  # noqa: ANN401  # a field of a dataclass
    return _option(
        "auto",
        "what the model is for. Needed where its files do not say: score for a Qwen3-Reranker or a "
        "bge-reranker-v2-gemma, sparse for a SPLADE that is declared as a masked language model",
        choices=TASKS,
    )


@dataclass(frozen=True)  # without slots, since ServeConfig has several of these as bases
class ProcessConfig:
    """The flags of every process."""

    run_dir: str = _option(
        "", "folder for the sockets, locks and counts of this suite; default: one for each user and port"
    )
    port: int = _option(8080, "TCP port of the HTTP endpoint; part of the default run folder's name", minimum=0)
    slot: int = _option(0, "number of this process among those of its role, from 0", minimum=0)
    log_level: str = _option("info", "least severe level that is logged", choices=("debug", "info", "warning", "error"))
    log_dir: str = _option("", "folder for rotating log files; default: log to standard error")
    drain_timeout_s: int = _option(20, "seconds that a stopping process has for the work that it has accepted")

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
    max_body_bytes: int = _option(16 * 1024 * 1024, "largest request body; a larger one is answered with 413")
    max_held_bytes: int = _option(
        1024**3,
        "most bytes of bodies, token ids and rows that one gateway holds at once; a request beyond that is answered "
        "with 429",
    )
    max_inputs: int = _option(2048, "most inputs in one request")
    max_request_tokens: int = _option(1_000_000, "most tokens in one request")
    max_concurrent_requests: int = _option(
        4096, "most requests that one gateway holds at once; more are answered with 429"
    )
    max_connections: int = _option(4096, "most connections that one gateway holds at once; more are answered with 503")
    default_timeout_s: int = _option(60, "deadline of a request, in seconds, if the client sends none")
    max_timeout_s: int = _option(
        600, "longest deadline that a client may ask for, in seconds; a longer one is shortened to it"
    )
    header_timeout_s: int = _option(10, "seconds within which the header of a request must arrive")
    body_timeout_s: int = _option(30, "seconds within which the body of a request must arrive")
    min_body_bytes_per_s: int = _option(8192, "slowest pace of a body, over 5 s; a slower one is answered with 408")
    write_timeout_s: int = _option(30, "seconds within which a client must read some more of its answer")
    keepalive_timeout_s: int = _option(
        75, "seconds that an idle connection stays open; client pools usually close theirs after 60"
    )
    tokenizer_threads: int = _option(2, "threads of one gateway that tokenize")
    auto_truncate: bool = _option(False, "truncate inputs that are too long, unless the client says otherwise")
    api_keys_file: str = _option("", "file with the keys that clients need, one a line; its mode must be 0600")
    cors_origins: str = _option("", "origins of the web pages that may read answers, separated by commas; or *")
    models: tuple[str, ...] = _option(
        (), "names of the models, each with a folder of its own in the run folder; default: one model, without a name"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(
                "--max-held-bytes is less than --max-body-bytes, so the largest bodies could never be read; raise it"
            )
        _check_origins(self.cors_origins)


@dataclass(frozen=True)
class SchedulerConfig(ProcessConfig):
    workers: int = _option(1, "workers that this model is meant to have; /ready says how many are ready")
    max_queue_ms: int = _option(
        10_000, "longest predicted wait in the queue; a new request beyond that is answered with 429"
    )
    latency_target_ms: int = _option(
        0,
        "longest duration of a step; it gets fewer tokens if it would take longer; 0: only --max-batch-tokens counts",
        minimum=0,
    )


@dataclass(frozen=True)
class WorkerConfig(ProcessConfig):
    model: str = _option(DEFAULT_MODEL, "a folder, a hub id, or the name of a model in an installed package")
    served_model_name: str = _option("", "name that clients use; default: the name of the model")
    task: str = _task_option()
    device: str = _option(
        "auto", "device that the model runs on; auto: a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    dtype: str = _option(
        "auto",
        "data type that the model computes in; auto: by model and device",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_batch_tokens: str = _option(
        "auto", "most tokens of one step, unless a single sequence is longer: a number, or auto", number_or_auto=True
    )
    attention: str = _option(
        "auto",
        "attention backend; auto: the fastest on this device, as measured there",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    graphs: str = _option(
        "lazy",
        "when CUDA graphs are captured: as needed, all before the worker is ready, or never",
        choices=("lazy", "eager-start", "off"),
    )
    max_graph_bytes: int = _option(4 * 1024**3, "most device memory that captured graphs may take")
    cache_dir: str = _option(
        "", "folder for measurements and compiled kernels; default: hedgerow in the user's cache folder"
    )
    threads: str = _option("auto", "CPU threads of one worker: a number, or auto", number_or_auto=True)
    workers: int = _option(1, "workers on this host; they share its CPU cores")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cache_dir:
            object.__setattr__(self, "cache_dir", _default_cache_dir())


@dataclass(frozen=True)
class ServeConfig(GatewayConfig, SchedulerConfig, WorkerConfig):
    """`hedgerow serve`: the flags of every process, and how many processes of each role there are."""

    gateways: int = _option(
        2, "gateway processes, which share the port; with a single one, its planned restart refuses connections"
    )
    workers: str = _option(  # type: ignore[assignment]  # resolved to a number before any process loads it
        "auto",
        "workers of each model: a number, or auto (one for each GPU; on a CPU one for each core, fewer if the model is "
        "large)",
        number_or_auto=True,
    )
    models: tuple[str, ...] = _option(  # reduced to its names before any process loads it
        (), "several models, each as NAME=MODEL; the same as arguments after `hedgerow serve`"
    )
    task: str = _option(  # one of TASKS to each process
        "auto", f"what the models are for: {', '.join(TASKS)}; or what a single one is for, as in B:score"
    )
    gpus: tuple[str, ...] = _option(
        (), "the GPUs of each model, as in A:0-1 B:2, counted among the visible GPUs from 0; models need names"
    )
    keep_awake: bool = _option(
        False, "keep CPU cores awake: about a third lower single-query latency, at about 20 % of every core"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.models) == 1 and not is_named(self.models[0]):
            object.__setattr__(self, "model", self.models[0])
            object.__setattr__(self, "models", ())
        self.planned_models()
        if self.models and self.served_model_name:
            raise ValueError(
                "--served-model-name is for a model without a name; NAME=MODEL names one already, so leave the flag out"
            )
        if self.gpus and self.device == "cpu":
            raise ValueError("--gpus and --device cpu exclude each other; leave one of them out")
        if self.gpus and self.workers != "auto":
            raise ValueError("--gpus sets the number of workers, one for each GPU; leave --workers out")

    def planned_models(self) -> list[PlannedModel]:
        """The models of the suite, one or several.

        Raises:
            ValueError: the flags cannot be read. It is raised when this object is made, not later.
        """
        return plan_models(self.models, self.model, task=self.task, gpus=self.gpus, tasks=TASKS)


@dataclass(frozen=True)
class InspectConfig:
    """`hedgerow inspect`: the model, and the form of its description."""

    model: str = _option(
        DEFAULT_MODEL, "a folder, a hub id that is in the local cache, or the name of a model in an installed package"
    )
    task: str = _task_option()
    json: bool = _option(False, "print one JSON object instead of text")


Config = TypeVar("Config", bound=ProcessConfig)
_AnyConfig = TypeVar("_AnyConfig", bound=ProcessConfig | InspectConfig)


def load(config_class: type[_AnyConfig], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> _AnyConfig:
    """The configuration of a process: from flags, then from the environment, then from defaults.

    A wrong flag or value ends the process with a message that names it (argparse's exit status 2). `serve` also takes
    models as positional arguments, and `inspect` takes one.
    """
    environ = environment.variables() if environ is None else environ
    parser = argparse.ArgumentParser(
        prog=f"hedgerow {config_class.__name__.removesuffix('Config').lower()}",
        allow_abbrev=False,
    )
    if config_class is ServeConfig:
        parser.add_argument(
            "models",
            nargs="*",
            metavar="MODEL",
            default=argparse.SUPPRESS,
            help="one model as for --model, or NAME=MODEL for each of several",
        )
    elif config_class is InspectConfig:
        parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS)
    hints = get_type_hints(config_class)
    # The flags of a class under its own heading in --help. A field that a class redefines is its.
    reader_of = {name: owner for owner in reversed(config_class.__mro__) for name in get_annotations(owner)}
    for owner in config_class.__mro__:
        group = parser.add_argument_group(f"{owner.__name__.removesuffix('Config').lower()} flags")
        for item in fields(config_class):
            if reader_of[item.name] is owner:
                _add_flag(group.add_argument, item, hints[item.name])
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
    """The variables from which another process loads the same values."""
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
    """The whole configuration on one line, for the log at the start."""
    return " ".join(f"{item.name}={_text(getattr(config, item.name))!r}" for item in fields(config))


def _add_flag(add: Callable[..., object], item: Field[Any], hint: object) -> None:
    flag = "--" + item.name.replace("_", "-")
    assert item.default is not MISSING
    default = f" [{_text(item.default)}]" if item.default not in ("", ()) else ""
    text = f"{item.metadata['help']}{default}".replace("%", "%%")
    if hint is bool:
        add(
            flag,
            dest=item.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    add(
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
    """Raises ValueError: the value is a number below its minimum, or neither a number nor auto."""
    flag = "--" + item.name.replace("_", "-")
    if type(value) is int and value < item.metadata["minimum"]:
        raise ValueError(f"{flag} needs at least {item.metadata['minimum']}")
    if item.metadata["number_or_auto"] and not _is_number_or_auto(str(value)):
        raise ValueError(f"{flag} needs a positive number or auto, not {value!r}")


def _check_origins(text: str) -> None:
    """Raises ValueError: an origin is not written as browsers send it, so it would never match."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    if origins != ["*"] and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError(
            "--cors-origins needs origins as browsers send them (https://app.example.org), separated by commas: in "
            "small letters, without a path, without a slash at the end; or * alone"
        )


def _is_number_or_auto(text: str) -> bool:
    return text == "auto" or (text.isascii() and text.isdecimal() and int(text) > 0)
