"""The environment of this process. No other module reads or writes it.

`config.py` reads the variables of flags from `variables`. Each other variable that is read has a function here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "HEDGEROW_"


def variables() -> Mapping[str, str]:
    """All variables."""
    return os.environ


def update(values: Mapping[str, str]) -> None:
    """Set variables for this process, its libraries and the processes that it starts."""
    os.environ.update(values)


def api_key() -> str | None:
    """The single key of HEDGEROW_API_KEY. It is no flag, since flags show in the list of processes."""
    return os.environ.get(PREFIX + "API_KEY") or None


def under_supervisord() -> bool:
    """Whether supervisord started this process: it restarts us, and we are to die with it."""
    return os.environ.get("SUPERVISOR_ENABLED") == "1"


def process_name() -> str | None:
    """What supervisord calls this process, unique within a suite; None without supervisord."""
    return os.environ.get("SUPERVISOR_PROCESS_NAME") if under_supervisord() else None


def visible_cuda_devices() -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES allows; None if it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [device for device in text.split(",") if device.strip()]


def runtime_folder() -> str | None:
    """The user's folder for sockets and locks; None if there is none that can be written to."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return folder if folder and os.access(folder, os.W_OK) else None


def cache_folder() -> str | None:
    """The folder that XDG_CACHE_HOME names for caches; None if it is not set."""
    return os.environ.get("XDG_CACHE_HOME") or None


def path_with(folder: str) -> str:
    """PATH with a folder in front."""
    return os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
