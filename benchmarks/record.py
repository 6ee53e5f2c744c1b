"""How a benchmark's result is written: one line on standard output, and a file that says where it comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

_PACKAGES = ("torch", "triton", "numpy", "flashinfer-python", "flash-attn-4", "aiohttp", "uvloop")


def write_result(result: dict[str, object], path: Path | None) -> None:
    """Print a result as the last line of a run; where a path is given, write it there with its origin."""
    whole = {**result, **origin()}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(whole))


def origin() -> dict[str, object]:
    """Command, commit, date, machine and versions of this run."""
    cpus = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": _output_of("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
    }


def _output_of(*command: str) -> str | None:
    """What a command says; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
