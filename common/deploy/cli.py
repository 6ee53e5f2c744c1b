"""The command `hedgerow`: one process of a suite, the whole suite, or a look at a model.

A role is run by the name of its module (`python -m worker` is the same), so this module imports none of them.
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

  serve [MODEL]   the whole suite on this host, under supervisord; of several models NAME=MODEL ...
  inspect [MODEL] what is understood of a model's folder, and whether it can be served
  gateway         one HTTP gateway
  scheduler       the scheduler
  worker          one worker
  awake           what keeps cores from sleeping, of a suite with --keep-awake

hedgerow COMMAND --help lists the flags; each is also a HEDGEROW_ variable."""

_ROLES = {"gateway": "gateway", "scheduler": "scheduler", "worker": "worker", "awake": "common.deploy.awake"}


def main() -> int:
    """The console script. Exit statuses: 0 stopped, 1 cannot start, 2 wrong flags, 75 the place is taken, 78 bad
    model or configuration."""
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
    """Returns only when the model is not found."""
    config = configuration.load(InspectConfig, flags)
    environment.update({"HF_HUB_OFFLINE": "1"})  # the hub's own switch: looking at a model downloads nothing
    try:
        model = find_model(config.model)
    except ModelNotFound as error:
        sys.stderr.write(f"hedgerow inspect: {error} What is not on this disk is not inspected.\n")
        return EX_FAILURE
    sys.argv = ["hedgerow inspect", model.name, str(model.path), config.task, "json" if config.json else "text"]
    runpy.run_module("worker.process.inspection", run_name="__main__")  # ends with an exit status
    raise AssertionError("an inspection has returned without an exit status")
