"""The programs that supervisord runs for `hedgerow serve`, and the text of its configuration.

`supervisord.conf` at the top of the repository has the same programs for the default suite, for operators who start
supervisord themselves. It gives the reason for each setting. A test compares the two, program by program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import StartRefused
from common.model_location import ModelFolder
from common.run_dir import RunDir

# supervisord waits this much longer than --drain-timeout-s before it kills a process, which may still be answering.
_STOP_MARGIN_S = 5

# The variables in supervisord's own section. All others reach the processes through the environment.
_SUPERVISORD_VARIABLES = (
    "HEDGEROW_HOST",
    "HEDGEROW_PORT",
    "HEDGEROW_GATEWAYS",
    "HEDGEROW_WORKERS",
    "HEDGEROW_KEEP_AWAKE",
    "HEDGEROW_RUN_DIR",
)

_NUMBER = "%(process_num)d"  # supervisord replaces it by the index of a process within its program


@dataclass(frozen=True, slots=True)
class SuiteModel:
    """A model of a suite, and its processes."""

    name: str | None  # None: the only model, which uses the whole run folder
    folder: ModelFolder  # its name is the one for clients
    run_dir: RunDir
    task: str
    num_workers: int
    devices: Sequence[str] | None  # for CUDA_VISIBLE_DEVICES, one for each worker; None: leave it as it is

    def program(self, role: str) -> str:
        """The section of the program that runs a role of this model."""
        return f"program:{role}" if self.name is None else f"program:{role}-{self.name}"

    def environment(self, **others: str) -> dict[str, str]:
        """The variables that its processes have beyond those of the suite; a model without a name has none."""
        if self.name is None:
            return {}
        values = {
            "HEDGEROW_RUN_DIR": self.run_dir.path,
            "HEDGEROW_MODEL": str(self.folder.path),
            "HEDGEROW_SERVED_MODEL_NAME": self.folder.name,
            "HEDGEROW_TASK": self.task,
            **others,
        }
        if self.devices is not None:
            values["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        return {name: _escaped(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Program:
    """One program of supervisord: processes that start alike."""

    section: str
    command: str
    priority: int
    settings: Mapping[str, str | int] = field(default_factory=dict)  # besides those of every program
    environment: Mapping[str, str] = field(default_factory=dict)


def programs(variables: Mapping[str, str], models: Sequence[SuiteModel]) -> list[Program]:
    """The programs of a suite. `variables` is the environment of all its processes.

    Raises:
        StartRefused: supervisord cannot read a value.
    """
    numbered = {"process_name": f"%(program_name)s-{_NUMBER}"}
    for_torch = {"OMP_WAIT_POLICY": "passive", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    schedulers = [
        Program(
            model.program("scheduler"),
            "hedgerow scheduler",
            10,
            environment=model.environment(HEDGEROW_WORKERS=str(model.num_workers)),
        )
        for model in models
    ]
    workers = [
        Program(
            model.program("worker"),
            "hedgerow worker",
            20,
            numbered | {"numprocs": model.num_workers},
            model.environment() | {"HEDGEROW_SLOT": _NUMBER} | for_torch,
        )
        for model in models
    ]
    endpoint = f"tcp://{_escaped(variables['HEDGEROW_HOST'])}:{variables['HEDGEROW_PORT']}"
    gateways = Program(
        "fcgi-program:gateway",
        "hedgerow gateway",
        30,
        numbered | {"numprocs": variables["HEDGEROW_GATEWAYS"], "socket": endpoint, "socket_backlog": 4096},
        {"HEDGEROW_SLOT": _NUMBER},
    )
    awake = Program("program:awake", "hedgerow awake", 40, {"numprocs": _num_awake(variables)})
    return [*schedulers, *workers, gateways, awake]


def supervisord_conf(variables: Mapping[str, str], models: Sequence[SuiteModel]) -> str:
    """The text of supervisord's configuration. It takes and raises the same as `programs`."""
    run_dir = RunDir(_escaped(variables["HEDGEROW_RUN_DIR"]))
    own = {name: _escaped(variables[name]) for name in _SUPERVISORD_VARIABLES}
    own["HEDGEROW_KEEP_AWAKE"] = _num_awake(variables)
    sections: dict[str, Mapping[str, object]] = {
        "supervisord": {
            "nodaemon": "true",
            "environment": _environment(own),
            "pidfile": run_dir.supervisord_pid,
            "logfile": "/dev/null",
            "logfile_maxbytes": 0,
            "umask": "077",
            "minfds": 8192,
        },
        "unix_http_server": {"file": run_dir.supervisord_socket, "chmod": "0700"},
        "rpcinterface:supervisor": {
            "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
        },
        "rpcinterface:hedgerow": {"supervisor.rpcinterface_factory": "common.deploy.supervision:plug_in"},
        "supervisorctl": {"serverurl": f"unix://{run_dir.supervisord_socket}"},
    }
    stop_wait_s = int(variables["HEDGEROW_DRAIN_TIMEOUT_S"]) + _STOP_MARGIN_S
    for program in programs(variables, models):
        sections[program.section] = {
            "command": program.command,
            **({"environment": _environment(program.environment)} if program.environment else {}),
            **program.settings,
            "priority": program.priority,
            "startsecs": 0,
            "autorestart": "true",
            "stopsignal": "TERM",
            "stopwaitsecs": stop_wait_s,
            "stopasgroup": "true",
            "killasgroup": "true",
            "stdout_logfile": "/dev/fd/1",
            "stdout_logfile_maxbytes": 0,
            "redirect_stderr": "true",
        }
    return "\n".join(
        f"[{section}]\n" + "".join(f"{name}={value}\n" for name, value in settings.items())
        for section, settings in sections.items()
    )


def _num_awake(variables: Mapping[str, str]) -> str:
    """The number of processes that keep cores awake."""
    return "1" if variables["HEDGEROW_KEEP_AWAKE"] == "true" else "0"


def _environment(values: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in values.items())


def _escaped(value: str) -> str:
    if any(character in value for character in '"%\n'):
        raise StartRefused(
            f"supervisord cannot take the value {value!r}: it has a quotation mark, % or a line break; change it"
        )
    return value
