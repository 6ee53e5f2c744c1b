"""A suite that may do little: no network but itself, nothing to write to but its run folder, no privileges."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Report
from tests.suite import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# In namespaces of its own: only the loopback, and a file system of which only $1 can be written to.
_CONFINE = """
set -e
ip link set lo up
mount --make-rprivate /
mount --bind "$1" "$1"
mount -o remount,bind,ro /
cd "$2"
shift 2
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield folder


def confined(folder: str, *command: str) -> subprocess.CompletedProcess[str]:
    unshare = ("unshare", "--map-root-user", "--mount", "--net", "sh", "-c", _CONFINE, "sh", folder, str(ROOT))
    return subprocess.run((*unshare, *command), capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def confine(folder: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command so; the test is skipped where this is not permitted."""
    missing = [name for name in ("unshare", "setpriv", "ip", "mount") if shutil.which(name) is None]
    if missing or confined(folder, "true").returncode:
        pytest.skip(f"namespaces of its own are not to be had here (missing: {missing})")
    return lambda *command: confined(folder, *command)


def test_a_suite_serves_without_network_and_privileges_and_writes_only_to_its_run_folder(
    folder: str, confine: Callable[..., subprocess.CompletedProcess[str]], report: Report
) -> None:
    forbidden = (
        ("sh", "-c", f"echo > {ROOT}/written"),
        (sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 5)"),
    )
    assert [confine(*command).returncode == 0 for command in forbidden] == [False, False]

    ended = confine(sys.executable, "-m", "tests.faults.confined", folder)

    assert ended.returncode == 0, ended.stderr[-4000:]
    said = json.loads(ended.stdout)
    answered = said["outcomes"].pop("answered")
    report(f"G8, G10: {answered} answered, {said['outcomes']} else, {said['watched']} processes watched")
    assert answered > 50
    assert said["outcomes"] == {}
    assert said["notes"] == []
    assert said["watched"] >= 7  # supervisord, a scheduler, two gateways, three workers


def test_what_is_watched_for_is_noticed(folder: str) -> None:
    attempts = (
        "import socket, contextlib\n"
        "with contextlib.suppress(OSError): socket.getaddrinfo('host.invalid', 80)\n"
        "with contextlib.suppress(OSError): socket.create_connection(('192.0.2.1', 80), 0.01)\n"
        "with contextlib.suppress(OSError): open('/nowhere/x', 'w')\n"
        "open('/dev/null', 'w').close()\n"
    )
    environment = {"WATCHED": folder, "PYTHONPATH": str(Path(__file__).parent / "watched")}
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"  # the name is looked up where there may be a network
    subprocess.run((sys.executable, "-c", attempts), env=environment, timeout=20, check=True)

    (notes,) = [path.read_text() for path in Path(folder).glob("*.notes")]

    assert "socket.getaddrinfo 'host.invalid'" in notes
    assert "socket.connect ('192.0.2.1', 80)" in notes
    assert "open for writing /nowhere/x" in notes
    assert "/dev/null" not in notes
