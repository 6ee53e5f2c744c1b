"""The command `hedgerow`: one process of a suite, or the whole suite.

`hedgerow scheduler|worker|gateway` is one process. What all of them need around their own `main` is here: logging, one
process a role and slot, dying with the supervisor, and waiting longer and longer after failed starts. `hedgerow serve`
settles what a suite needs before it starts (model, port, run folder), so that what is wrong is said at once and
once, fills the environment, and becomes supervisord.

A role is run by its package's name (`python -P -m worker` is the same), so this module imports none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import logging
import os
import random
import re
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from common import config as configuration
from common import log, metrics
from common.config import Config, InspectConfig, ProcessConfig, ServeConfig
from common.deploy import awake, plan
from common.errors import EX_BUSY, EX_CONFIG, EX_FAILURE, EX_USAGE
from common.model_location import ModelFolder, ModelNotFound, find_model
from common.wire.transport import AddressInUse, Lock, address, prepare_run_dir

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MAX_BACKOFF_S = 30
_UNCOUNTED_BACKOFF_S = 5.0
_STOP_MARGIN_S = 5

# Where the operator names no number of workers, those on a CPU have at most so many copies of the weights (as they are
# in the files), and are so many: each takes some 300 MB besides.
_CPU_WEIGHT_BYTES = 1 << 30
_MAX_CPU_WORKERS = 8

_USAGE = """usage: hedgerow COMMAND [flags]

  serve [MODEL]   the whole suite on this host, under supervisord; of several models NAME=MODEL ...
  inspect [MODEL] what is understood of a model's folder, and whether it can be served
  gateway         one HTTP gateway
  scheduler       the scheduler
  worker          one worker
  awake           what keeps cores from sleeping, of a suite with --keep-awake

hedgerow COMMAND --help lists the flags; each is also a HEDGEROW_ variable."""

# What supervisord.conf itself reads; everything else reaches the processes through the environment.
_SUPERVISORD_VARIABLES = (
    "HEDGEROW_HOST",
    "HEDGEROW_PORT",
    "HEDGEROW_GATEWAYS",
    "HEDGEROW_WORKERS",
    "HEDGEROW_KEEP_AWAKE",
    "HEDGEROW_RUN_DIR",
)


class StartRefused(Exception):
    """A suite or a process cannot start; the text says what to change."""


class _ConfigurationRefused(StartRefused):
    """The model's folder declares what is not served, or the file of keys cannot be used."""


def main() -> int:
    """The console script. Exit statuses: 0 stopped, 1 cannot start, 2 wrong flags, 75 the place is taken, 78 bad
    model or configuration."""
    command, *flags = sys.argv[1:] or ["--help"]
    if command == "serve":
        return _serve(flags)
    if command == "inspect":
        return _inspect(flags)
    if command in {"gateway", "scheduler", "worker"}:
        sys.argv = [f"hedgerow {command}", *flags]
        runpy.run_module(command, run_name="__main__")  # ends with run_process
        raise AssertionError("a process has returned without an exit status")
    if command == "awake":
        sys.argv = ["hedgerow awake", *flags]
        run_process("awake", ProcessConfig, awake.main)
    wanted_help = command in {"--help", "-h", "help"}
    (sys.stdout if wanted_help else sys.stderr).write(_USAGE + "\n")
    return 0 if wanted_help else EX_USAGE


def _inspect(flags: list[str]) -> int:
    """Returns only when the model is not found."""
    config = configuration.load(InspectConfig, flags)
    os.environ.update(HF_HUB_OFFLINE="1")  # the hub's own switch: looking at a model downloads nothing
    try:
        model = find_model(config.model)
    except ModelNotFound as error:
        sys.stderr.write(f"hedgerow inspect: {error} What is not on this disk is not inspected.\n")
        return EX_FAILURE
    sys.argv = ["hedgerow inspect", model.name, str(model.path), config.task, "json" if config.json else "text"]
    runpy.run_module("worker.process.inspection", run_name="__main__")  # ends with an exit status
    raise AssertionError("an inspection has returned without an exit status")


# --- one process ---


def run_process(role: str, config_class: type[Config], run: Callable[[Config, Callable[[], None]], int]) -> NoReturn:
    """The whole life of one process of a suite; each role's `__main__` calls it with its own `main`.

    `run` takes the configuration and what to call once the process can do its work; it returns the exit status.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who starts us may block what we are to hear, and that is inherited
    supervised = configuration.under_supervisord()
    if supervised:
        _die_with_parent()
    _reopen_log_at_hangup()
    config = configuration.load(config_class, sys.argv[1:])
    name = role if role == "scheduler" else f"{role}-{config.slot}"
    history = _StartHistory(config.run_dir, name)
    if supervised and not _wait(history.begin()):
        sys.exit(0)
    try:
        listener = log.set_up(configuration.process_name() or name, config.log_level, config.log_dir)
    except OSError as error:
        sys.stderr.write(f"hedgerow {name}: --log-dir {config.log_dir} cannot be written to: {error.strerror}\n")
        sys.exit(EX_FAILURE)
    status = EX_FAILURE
    try:
        lock = _take_place(config.run_dir, name)
        logger.info("starting: %s", configuration.describe(config))
        status = _run(run, config, history.clear)
        logger.info("stopped with status %d", status)
        lock.close()
    except AddressInUse as error:
        logger.error("%s", error)  # noqa: TRY400 the text says it all
        status = EX_BUSY
    except (StartRefused, metrics.NoRoom) as error:
        logger.error("cannot start: %s", error)  # noqa: TRY400 the text says it all
    finally:
        if not log.stop(listener):
            os._exit(status)  # nobody reads the log; a thread that waits to write it must not keep us
    sys.exit(status)


def _reopen_log_at_hangup() -> None:
    """Have SIGHUP, which ends a process by default, open the log's file anew; without one it does nothing.

    On a thread of its own: a disk that hangs must not keep a loop from its peers. A gateway, which has more to do then,
    takes the signal over.
    """
    hangup_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def reopen_each_time() -> None:
        while os.eventfd_read(hangup_fd):
            try:
                log.reopen()
            except OSError as error:
                logger.error("the log's file stays as it was: %s", error.strerror)  # noqa: TRY400 the text says it all

    threading.Thread(target=reopen_each_time, name="hangup", daemon=True).start()
    signal.signal(signal.SIGHUP, lambda *_: os.eventfd_write(hangup_fd, 1))


def _take_place(run_dir: str, name: str) -> Lock:
    """Raises AddressInUse, or StartRefused: this run folder cannot be used."""
    try:
        prepare_run_dir(run_dir)
        address(run_dir, "gateways")
        return Lock(run_dir, name)
    except (OSError, ValueError) as error:
        raise StartRefused(str(error)) from None


def _run(run: Callable[[Config, Callable[[], None]], int], config: Config, on_ready: Callable[[], None]) -> int:
    try:
        return run(config, on_ready)
    except metrics.NoRoom:
        raise
    except BaseException:
        # Our own bug, or a machine that is out of something: the process dies, and the log must say where.
        logger.critical("this process has failed", exc_info=True)
        raise


class _StartHistory:
    """How often in a row a process was started without becoming ready, kept in the run folder.

    supervisord restarts what dies at once and for ever; a process whose model file is broken would eat a core that way.
    Once ready, a later death is restarted without a wait.
    """

    def __init__(self, run_dir: str, name: str) -> None:
        self._path = Path(run_dir) / f"{name}.starts"

    def begin(self) -> float:
        """Count this start; the seconds to wait before it: 0, 1, 2, 4 … 30, within 20 %."""
        try:
            failed_starts = len(self._read())
            self._path.write_bytes(b"." * min(failed_starts + 1, 16))
        except FileNotFoundError:
            return 0.0  # no run folder yet
        except OSError:
            return _UNCOUNTED_BACKOFF_S  # a full disk, say: what cannot be counted must not spin either
        if failed_starts == 0:
            return 0.0
        return min(2.0 ** (failed_starts - 1), _MAX_BACKOFF_S) * random.uniform(0.8, 1.2)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def _wait(delay_s: float) -> bool:
    """Wait before a start; False when a stop was asked for meanwhile."""
    if delay_s == 0:
        return True
    logger.warning("the last start failed; waiting %.1f s", delay_s)
    stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
    previous = {
        number: signal.signal(number, lambda *_: os.eventfd_write(stop_fd, 1))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    stopped, _, _ = select.select([stop_fd], [], [], delay_s)
    for number, handler in previous.items():
        signal.signal(number, handler)
    os.close(stop_fd)
    return not stopped


def _die_with_parent() -> None:
    """Have the kernel end this process when supervisord dies: an orphan would hold its device and its lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the kernel was told: then our parent is whoever takes in orphans.
    try:
        parent = Path("/proc", str(os.getppid()), "cmdline").read_bytes()
    except OSError:
        parent = b""
    if b"supervisor" not in parent:
        sys.stderr.write(
            "hedgerow: SUPERVISOR_ENABLED is set, yet no supervisord is the parent: it died, or unset that\n"
        )
        sys.stderr.flush()
        os._exit(EX_FAILURE)


# --- the whole suite ---


@dataclass(frozen=True, slots=True)
class _Served:
    """A model, and what runs it."""

    folder: ModelFolder  # by the name that clients use
    run_dir: str
    task: str
    num_workers: int
    devices: Sequence[str] | None  # for CUDA_VISIBLE_DEVICES, one a worker; None: as it is


def _serve(flags: list[str]) -> int:
    """Returns only when the suite cannot start."""
    config = configuration.load(ServeConfig, flags)
    try:
        served = _several(config) if config.models else [_alone(config)]
        for model in served:
            _check("worker.checkpoint.declared", str(model.folder.path), model.task)
        if config.api_keys_file:
            _check("gateway.edge.auth", config.api_keys_file)
        if config.keep_awake:
            awake.check_cores()
        run_dirs = dict.fromkeys([config.run_dir, *(model.run_dir for model in served)])
        for run_dir in run_dirs:
            prepare_run_dir(run_dir)
            address(run_dir, "gateways")
            Lock(run_dir, "scheduler").close()
        Lock(config.run_dir, "gateway-0").close()  # of a suite of several models, which has no scheduler here
        _check_port(config.host, config.port)
        for run_dir in run_dirs:
            metrics.clear(run_dir)
            for path in Path(run_dir).glob("*.starts"):
                path.unlink()
        Path(config.run_dir, "connections").unlink(missing_ok=True)  # of gateways that there may be no more
        environment = configuration.to_environment(config)
        environment["HEDGEROW_MODELS"] = " ".join(model.folder.name for model in served if config.models)
        environment["HEDGEROW_MODEL"] = str(served[0].folder.path)
        environment["HEDGEROW_SERVED_MODEL_NAME"] = served[0].folder.name
        environment["HEDGEROW_TASK"] = served[0].task
        environment["HEDGEROW_WORKERS"] = str(sum(model.num_workers for model in served))
        conf = _write_supervisord_conf(config.run_dir, environment, served if config.models else ())
    except (ModelNotFound, StartRefused, AddressInUse, OSError, ValueError) as error:
        sys.stderr.write(f"hedgerow serve: {error}\n")
        if isinstance(error, _ConfigurationRefused):
            return EX_CONFIG
        return EX_BUSY if isinstance(error, AddressInUse) else EX_FAILURE
    # No Python looks for modules in the folder that this was started in, which may be a model's: not supervisord (-P;
    # with -m alone that folder comes before the standard library), nor what a library starts in a process below it.
    environment["PYTHONSAFEPATH"] = "1"
    # supervisord finds `hedgerow` where this Python found it, also when its environment is not activated.
    environment["PATH"] = configuration.path_with(str(Path(sys.executable).parent))
    sys.stderr.write(
        f"hedgerow serves {', '.join(model.folder.name for model in served)} on http://{config.host}:{config.port} "
        f"once /ready says so; Ctrl-C stops it\n"
    )
    sys.stderr.flush()
    # Several processes share what may be a regular file: each writes at its end, not over the others' lines.
    fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_APPEND)
    os.environ.update(environment)
    supervisord = [sys.executable, "-P", "-m", "supervisor.supervisord", "-n", "-c", str(conf)]
    return os.execv(sys.executable, supervisord)


def _alone(config: ServeConfig) -> _Served:
    """Raises ModelNotFound."""
    folder = find_model(config.model)
    folder = ModelFolder(config.served_model_name or folder.name, folder.path)
    task = plan.parse_tasks(config.task, [config.model], configuration.TASKS)[config.model]
    return _Served(folder, config.run_dir, task, _num_workers(config, folder), None)


def _several(config: ServeConfig) -> list[_Served]:
    """Raises ModelNotFound, ValueError (a GPU that is not there), or StartRefused: who has which GPU is not said."""
    models = plan.parse_models(config.models)
    tasks = plan.parse_tasks(config.task, models, configuration.TASKS)
    devices: dict[str, list[str]] = {}
    if config.gpus:
        devices = plan.devices_of(plan.parse_gpus(config.gpus, models), _gpus())
    elif len(models) > 1 and _num_gpus(config):
        example = " ".join(f"{name}:{number}" for number, name in enumerate(models))
        raise StartRefused(f"several models on a host with GPUs: say which are whose, as in --gpus {example}")
    served = []
    for name, model in models.items():
        folder = ModelFolder(name, find_model(model).path)
        own = devices.get(name)
        num_workers = _num_workers(config, folder) if own is None else len(own)
        served.append(_Served(folder, plan.model_run_dir(config.run_dir, name), tasks[name], num_workers, own))
    return served


def _check(module: str, *arguments: str) -> None:
    """Raises StartRefused for what a worker or gateway would refuse in its files; it would be tried again for ever."""
    # By its name, as a role. In this process, which keeps nothing of it when it becomes supervisord: another one would
    # take as long again to start as all the rest here.
    says = io.StringIO()
    sys.argv = ["hedgerow serve", *arguments]
    try:
        with contextlib.redirect_stderr(says):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        if ended.code == EX_CONFIG:
            raise _ConfigurationRefused(says.getvalue().strip()) from None


def _check_port(host: str, port: int) -> None:
    """Raises StartRefused when nothing can listen there: supervisord would only log it, and go on without."""
    if ":" in host:
        raise StartRefused(f"--host {host}: supervisord opens IPv4 addresses only. Choose one, or a proxy in front.")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)  # two sockets may be bound with SO_REUSEADDR, only one listens
        except OSError as error:
            raise StartRefused(
                f"--port {port} on --host {host} cannot be opened: {error.strerror}. Choose another one."
            ) from None
    if port == 0:
        raise StartRefused("--port 0 is no address that a client could use. Choose a free port.")


def _num_workers(config: ServeConfig, model: ModelFolder) -> int:
    if config.workers != "auto":
        return int(config.workers)
    return _num_gpus(config) or _num_cpu_workers(config, model)


def _num_gpus(config: ServeConfig) -> int:
    return 0 if config.device == "cpu" else len(_gpus())


def _gpus() -> list[str]:
    """The GPUs that this user may see, as CUDA_VISIBLE_DEVICES has them; counted without loading torch."""
    visible = configuration.visible_cuda_devices()
    if visible is not None:
        return visible
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def _num_cpu_workers(config: ServeConfig, model: ModelFolder) -> int:
    """As many as there are threads to give each one, unless their copies of the weights took too much memory. Of
    several models each has its part of both.

    Threads of one step wait for each other after each operation, and an operation of a small model is short. Measured
    on 2026-11-30 with all-MiniLM-L6-v2 on two cores, steps of 512 tokens: two workers of a thread each do 1.6 times
    what one worker of two threads does in float32, twice as much in bfloat16.
    """
    num_threads = 1 if config.threads == "auto" else int(config.threads)
    num_copies = _CPU_WEIGHT_BYTES // max(model.weight_bytes(), 1)
    most = min(configuration.usable_cpus() // num_threads, num_copies, _MAX_CPU_WORKERS)
    return max(1, most // max(1, len(config.models)))


def _write_supervisord_conf(run_dir: str, environment: dict[str, str], several: Sequence[_Served] = ()) -> Path:
    """A copy of the project's supervisord.conf with this suite's run folder, and its values in `environment`.

    Of several models, each has programs of its own.
    """
    source = Path(__file__).with_name("supervisord.conf")  # where a wheel has it
    if not source.exists():
        source = Path(__file__).parent.parent.parent / "supervisord.conf"
    values = {name: environment[name] for name in _SUPERVISORD_VARIABLES}
    values["HEDGEROW_KEEP_AWAKE"] = "1" if values["HEDGEROW_KEEP_AWAKE"] == "true" else "0"  # a number of processes
    line = f"environment={_environment(values)}"
    text, replaced = re.subn(r"^environment=HEDGEROW_HOST=.*$", lambda _: line, source.read_text(), flags=re.MULTILINE)
    assert replaced == 1, "supervisord.conf has lost its environment line"
    # A process that is answering what it accepted must not be killed sooner than it gives up by itself.
    wait_s = int(environment["HEDGEROW_DRAIN_TIMEOUT_S"]) + _STOP_MARGIN_S
    text = re.sub(r"^stopwaitsecs=.*$", f"stopwaitsecs={wait_s}", text, flags=re.MULTILINE)
    text = text.replace("%(here)s/run", _escaped(run_dir))
    if several:
        text, replaced = re.subn(
            r"^\[program:(?P<role>scheduler|worker)\]\n(?P<lines>(?:\w.*\n)+)",
            lambda program: "\n".join(_program_of(model, program["role"], program["lines"]) for model in several),
            text,
            flags=re.MULTILINE,
        )
        assert replaced == 2, "supervisord.conf has lost a program"
    target = Path(run_dir) / "supervisord.conf"
    target.write_text(text)
    return target


def _program_of(model: _Served, role: str, lines: str) -> str:
    """The section of a role's program for one of several models."""
    values = {
        "HEDGEROW_RUN_DIR": model.run_dir,
        "HEDGEROW_MODEL": str(model.folder.path),
        "HEDGEROW_SERVED_MODEL_NAME": model.folder.name,
        "HEDGEROW_TASK": model.task,
    }
    if role == "scheduler":
        values["HEDGEROW_WORKERS"] = str(model.num_workers)
    if model.devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(model.devices)
    own = _environment(values)
    lines = re.sub(r"^numprocs=.*$", f"numprocs={model.num_workers}", lines, flags=re.MULTILINE)
    if "environment=" in lines:
        lines = lines.replace("environment=", f"environment={own},")
    else:
        lines = f"environment={own}\n{lines}"
    return f"[program:{role}-{model.folder.name}]\n{lines}"


def _environment(values: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    if any(character in value for character in '"%\n'):
        raise StartRefused(f"supervisord cannot take the value {value!r}: it holds a quotation mark, % or a line break")
    return value
