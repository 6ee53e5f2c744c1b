"""The command `hedgerow`: a whole suite, one process of a suite, or a report on a model.

A role runs by the name of its module, as with `python -m worker`. So this module imports no role.
"""

from __future__ import annotations

import runpy
import sys

from common import config as configuration
from common import environment
from common.config import InspectConfig
from common.deploy import suite
from common.errors import EX_FAILURE, EX_USAGE
from common.model_location import ModelNotFound, find_model

_USAGE = """usage: hedgerow COMMAND [flags]

  serve [MODEL]   start a whole suite on this host, under supervisord; for several models NAME=MODEL ...
  inspect [MODEL] report what Hedgerow reads in a model's folder, and whether it can serve it
  gateway         start one HTTP gateway
  scheduler       start the scheduler
  worker          start one worker
  awake           keep CPU cores awake, as a suite with --keep-awake does

hedgerow COMMAND --help lists the flags. Each flag is also a HEDGEROW_ variable."""

_ROLES = {"gateway": "gateway", "scheduler": "scheduler", "worker": "worker", "awake": "common.deploy.awake"}


def main() -> int:
    """The console script. Its exit statuses are those of common/errors.py."""
    command, *flags = sys.argv[1:] or ["--help"]
    if command == "serve":
        return suite.serve(flags)
    if command == "inspect":
        return _inspect(flags)
    if command in _ROLES:
        sys.argv = [f"hedgerow {command}", *flags]
        runpy.run_module(_ROLES[command], run_name="__main__")  # ends with run_process
        raise AssertionError("a process has returned without an exit status")
    wanted_help = command in {"--help", "-h", "help"}
    (sys.stdout if wanted_help else sys.stderr).write(_USAGE + "\n")
    return 0 if wanted_help else EX_USAGE


def _inspect(flags: list[str]) -> int:
    """Report on a model. Returns only if there is no such model, with the exit status."""
    config = configuration.load(InspectConfig, flags)
    environment.update({"HF_HUB_OFFLINE": "1"})  # the hub library's switch: an inspection downloads nothing
    try:
        model = find_model(config.model)
    except ModelNotFound as error:
        sys.stderr.write(f"hedgerow inspect: {error} Only models on this disk can be inspected.\n")
        return EX_FAILURE
    sys.argv = ["hedgerow inspect", model.name, str(model.path), config.task, "json" if config.json else "text"]
    runpy.run_module("worker.process.inspection", run_name="__main__")  # ends with an exit status
    raise AssertionError("an inspection has returned without an exit status")
