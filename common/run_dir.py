"""A suite's run folder: every name in it, who may enter it, and its locks. No other file spells such a name.

    gateways.sock, workers.sock   the two ends of the scheduler
    PROCESS.lock                  locked while the process lives: one process for each role and slot
    PROCESS.starts                one byte for each failed start in a row
    PROCESS.trace.json            the profile of a worker, if one was asked for
    metrics/                      the counts of each process
    connections                   the number of connections of each gateway
    budgets/                      the tokens that each key has left
    supervisord.conf, supervisord.pid, supervisor.sock
    MODEL/                        for each named model: a folder with the above for its scheduler and workers

This file is at the top of `common`: `metrics.py`, `config.py` and `deploy/` need it, and it needs none of them.
`supervisord.conf` at the top of the repository repeats three of the names; a test compares them.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import environment
from common.errors import AddressInUse

Side = Literal["gateways", "workers"]

_METRICS = "metrics"
_BUDGETS = "budgets"
_CONNECTIONS = "connections"
_SOCKET = ".sock"
_LOCK = ".lock"
_STARTS = ".starts"
_CONF = ".conf"
_PID = ".pid"

_MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class RunDir:
    """The run folder of a suite, or the folder of one named model within it."""

    path: str

    # --- its content ---

    @property
    def metrics(self) -> Path:
        return self._at(_METRICS)

    @property
    def budgets(self) -> Path:
        return self._at(_BUDGETS)

    @property
    def connections(self) -> Path:
        return self._at(_CONNECTIONS)

    @property
    def supervisord_conf(self) -> Path:
        return self._at(f"supervisord{_CONF}")

    @property
    def supervisord_pid(self) -> Path:
        return self._at(f"supervisord{_PID}")

    @property
    def supervisord_socket(self) -> Path:
        return self._at(f"supervisor{_SOCKET}")

    def starts(self, process: str) -> Path:
        return self._at(f"{process}{_STARTS}")

    def all_starts(self) -> Iterator[Path]:
        return Path(self.path).glob(f"*{_STARTS}")

    def trace(self, process: str) -> Path:
        return self._at(f"{process}.trace.json")

    def address(self, side: Side) -> str:
        """The endpoint of one side of the scheduler.

        Raises:
            ValueError: the run folder's name is too long for a socket.
        """
        path = Path(self.path).resolve() / f"{side}{_SOCKET}"
        if len(str(path)) > _MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"--run-dir {self.path} is too long: a socket path may have {_MAX_SOCKET_PATH_BYTES} bytes; "
                "use a shorter one"
            )
        return f"ipc://{path}"

    def lock(self, process: str) -> Lock:
        """Take the lock of a process.

        Raises:
            AddressInUse: another process holds it.
            OSError: the folder cannot be written to.
        """
        return Lock(self, process)

    def model_dirs(self, names: Sequence[str]) -> dict[str | None, RunDir]:
        """The folder of each model: a subfolder for each name, or this whole folder for a single model without one."""
        return {name: self.model_dir(name) for name in names} or {None: self}

    def model_dir(self, name: str | None) -> RunDir:
        """The folder of one model. A model without a name uses this whole folder."""
        return self if name is None else RunDir(str(self._at(name)))

    # --- the folder itself ---

    def prepare(self) -> None:
        """Make the folder, for this user alone.

        Raises:
            PermissionError: it belongs to another user, or everybody may write to it. Then others could swap our files.
            OSError: it cannot be made.
        """
        path = Path(self.path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                f"--run-dir {self.path} cannot be made: {error.strerror}; choose another folder"
            ) from None
        status = path.stat()
        if status.st_uid != os.getuid():
            raise PermissionError(f"--run-dir {self.path} belongs to another user; choose a folder of your own")
        if stat.S_IMODE(status.st_mode) & 0o002:
            raise PermissionError(f"--run-dir {self.path} is writable by everybody; choose a folder of your own")
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o700)

    def _at(self, name: str) -> Path:
        return Path(self.path) / name


class Lock:
    """An flock on a file of the run folder, held while this process lives: one process for each role and slot.

    Without it, a second process that binds the same ipc path would take it over, without an error on either side.
    """

    def __init__(self, run_dir: RunDir, process: str) -> None:
        path = Path(run_dir.path) / f"{process}{_LOCK}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise AddressInUse(f"another {process} runs in {run_dir.path}; stop it, or use another --run-dir") from None

    def close(self) -> None:
        os.close(self._file)


def is_reserved(name: str) -> bool:
    """Whether the run folder uses this name itself, so that no model may have it."""
    return name in {_METRICS, _BUDGETS, _CONNECTIONS} or name.endswith((_SOCKET, _LOCK, _STARTS, _CONF, _PID))


def default_run_dir(port: int) -> str:
    """The folder of one user and port, so that suites on different ports never meet.

    Its name is short, since the path of a socket may have 107 bytes only.
    """
    parent = environment.runtime_folder() or tempfile.gettempdir()
    return str(Path(parent) / f"hedgerow-{os.getuid()}-{port}")
