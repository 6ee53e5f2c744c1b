"""`hedgerow serve`: checks all that a suite needs, then becomes supervisord.

Models, keys, port and run folder are checked here, so that the operator sees one error at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import runpy
import socket
import sys
from pathlib import Path

from common import config as configuration
from common import environment, hardware, metrics
from common.config import ServeConfig
from common.deploy.programs import SuiteModel, supervisord_conf
from common.errors import EX_CONFIG, EX_FAILURE, ConfigurationRefused, StartRefused
from common.model_flags import devices_of
from common.model_location import ModelFolder, ModelNotFound, find_model
from common.run_dir import RunDir

# The bounds for workers on a CPU without --workers: the bytes of their weights together, as large as in the files, and
# their number, since each takes about 300 MB besides its weights.
_CPU_WEIGHT_BYTES = 1 << 30
_MAX_CPU_WORKERS = 8


def serve(flags: list[str]) -> int:
    """Become the supervisor of a suite. Returns only if the suite cannot start, with the exit status."""
    config = configuration.load(ServeConfig, flags)
    try:
        models = _settle_models(config)
        _check_files(config, models)
        if config.keep_awake:
            hardware.check_keep_awake()
        _take_run_dir(config, models)
        variables = _variables(config, models)
        conf = RunDir(config.run_dir).supervisord_conf
        conf.write_text(supervisord_conf(variables, models))
    except (ModelNotFound, StartRefused, OSError, ValueError) as error:
        sys.stderr.write(f"hedgerow serve: {error}\n")
        return error.exit_status if isinstance(error, StartRefused) else EX_FAILURE
    sys.stderr.write(
        f"hedgerow: starting {', '.join(model.folder.name for model in models)}; "
        f"http://{config.host}:{config.port} is ready when /ready returns 200. Ctrl-C stops it.\n"
    )
    sys.stderr.flush()
    # All processes share standard output. If it is a file, each must append, not overwrite the lines of others.
    fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_APPEND)
    # supervisord finds `hedgerow` beside this Python, even if its environment is not activated. No Python of the suite
    # imports from the current folder, which may be a downloaded model: neither supervisord (-P) nor a child of a
    # library.
    own = {"PATH": environment.path_with(str(Path(sys.executable).parent)), "PYTHONSAFEPATH": "1"}
    environment.update(variables | own)
    return os.execv(sys.executable, [sys.executable, "-P", "-m", "supervisor.supervisord", "-n", "-c", str(conf)])


def _settle_models(config: ServeConfig) -> list[SuiteModel]:
    """Find each model, and decide about its workers and GPUs.

    Raises:
        ModelNotFound: there is no such model.
        ValueError: there is no such GPU.
        StartRefused: with several models, no flag gives each its GPUs.
    """
    planned = config.planned_models()
    if len(planned) > 1 and not config.gpus and _num_gpus(config):
        example = " ".join(f"{model.name}:{number}" for number, model in enumerate(planned))
        raise StartRefused(
            f"with several models on a host with GPUs, each needs its own: give them as in --gpus {example}"
        )
    settled = []
    for model in planned:
        devices = devices_of(model, hardware.visible_gpus())
        found = find_model(model.reference)
        folder = ModelFolder(model.name or config.served_model_name or found.name, found.path)
        num_workers = _num_workers(config, folder, len(planned)) if devices is None else len(devices)
        run_dir = RunDir(config.run_dir).model_dir(model.name)
        settled.append(SuiteModel(model.name, folder, run_dir, model.task, num_workers, devices))
    return settled


def _check_files(config: ServeConfig, models: list[SuiteModel]) -> None:
    """Raises ConfigurationRefused: a worker or gateway would refuse a file at every start, for ever."""
    for model in models:
        _check("worker.checkpoint.declared", str(model.folder.path), model.task)
    if config.api_keys_file:
        _check("gateway.edge.auth", config.api_keys_file)


def _check(module: str, *arguments: str) -> None:
    # The module runs by its name, like a role. It runs in this process: a new one would double the time of a start, and
    # nothing of it remains once this process becomes supervisord.
    says = io.StringIO()
    sys.argv = ["hedgerow serve", *arguments]
    try:
        with contextlib.redirect_stderr(says):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        if ended.code == EX_CONFIG:
            raise ConfigurationRefused(says.getvalue().strip()) from None


def _take_run_dir(config: ServeConfig, models: list[SuiteModel]) -> None:
    """Make the folders of the suite, and delete the counts of an earlier suite.

    Raises:
        AddressInUse: another suite runs there.
        StartRefused: the port cannot be used.
        OSError: a folder cannot be used.
        ValueError: its name is too long.
    """
    suite_dir = RunDir(config.run_dir)
    run_dirs = dict.fromkeys([suite_dir, *(model.run_dir for model in models)])
    for run_dir in run_dirs:
        run_dir.prepare()
        run_dir.address("gateways")
        run_dir.lock("scheduler").close()
    suite_dir.lock("gateway-0").close()  # schedulers of named models have their locks elsewhere
    _check_port(config.host, config.port)
    for run_dir in run_dirs:
        metrics.clear(run_dir.path)
        for path in run_dir.all_starts():
            path.unlink()
    suite_dir.connections.unlink(missing_ok=True)  # it may count gateways that no longer exist


def _variables(config: ServeConfig, models: list[SuiteModel]) -> dict[str, str]:
    """The environment of the suite's processes."""
    first = models[0]
    return configuration.to_environment(config) | {
        "HEDGEROW_MODELS": " ".join(model.name for model in models if model.name),
        "HEDGEROW_MODEL": str(first.folder.path),
        "HEDGEROW_SERVED_MODEL_NAME": first.folder.name,
        "HEDGEROW_TASK": first.task,
        "HEDGEROW_WORKERS": str(sum(model.num_workers for model in models)),
    }


def _check_port(host: str, port: int) -> None:
    """Raises StartRefused: nothing can listen there. supervisord would only log it, and go on without gateways."""
    if ":" in host:
        raise StartRefused(f"--host {host}: supervisord opens IPv4 addresses only. Use one, or put a proxy in front.")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)  # two sockets may be bound with SO_REUSEADDR, only one listens
        except OSError as error:
            raise StartRefused(
                f"--port {port} on --host {host} cannot be opened: {error.strerror}. Choose another port."
            ) from None
    if port == 0:
        raise StartRefused("--port 0 is no port that a client could use. Choose a free one.")


def _num_workers(config: ServeConfig, model: ModelFolder, num_models: int) -> int:
    if config.workers != "auto":
        return int(config.workers)
    return _num_gpus(config) or _num_cpu_workers(config, model, num_models)


def _num_gpus(config: ServeConfig) -> int:
    return 0 if config.device == "cpu" else len(hardware.visible_gpus())


def _num_cpu_workers(config: ServeConfig, model: ModelFolder, num_models: int) -> int:
    """One worker for each share of `--threads`, fewer if their copies of the weights would take too much memory.

    Several models share the cores and the memory equally.

    More workers are better than more threads of one: the threads of a step wait for each other after each operation,
    and operations of a small model are short. With all-MiniLM-L6-v2 on two cores, in steps of 512 tokens, two workers
    of one thread do 1.6 times the work of one worker of two threads in float32, twice in bfloat16 (2026-11-30).
    """
    num_threads = 1 if config.threads == "auto" else int(config.threads)
    num_copies = _CPU_WEIGHT_BYTES // max(model.weight_bytes(), 1)
    most = min(hardware.usable_cpus() // num_threads, num_copies, _MAX_CPU_WORKERS)
    return max(1, most // num_models)
