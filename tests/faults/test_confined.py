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
from tests.faults.promises import PROMISES, measured
from tests.suite import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]

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


# Likewise, with a disk of its own in $1/run.
_SMALL_DISK = """
set -e
mount --make-rprivate /
mkdir -m 700 "$1/run"
mount -t tmpfs -o size=4m,mode=700 tmpfs "$1/run"
cd "$2"
shift 2
exec "$@"
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


def test_a_full_disk_fails_no_request_and_is_named_where_a_process_starts(folder: str, report: Report) -> None:
    in_namespaces = ("unshare", "--map-root-user", "--mount", "sh", "-c", _SMALL_DISK, "sh")
    with tempfile.TemporaryDirectory(prefix="hr-") as other:
        try:
            subprocess.run((*in_namespaces, other, other, "true"), capture_output=True, timeout=20, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a small disk of its own is not to be had here: {error}")

    command = (sys.executable, "-m", "tests.faults.full_disk", folder)
    ended = subprocess.run(
        (*in_namespaces, folder, str(ROOT), *command), capture_output=True, text=True, timeout=200, check=False
    )

    assert ended.returncode == 0, ended.stderr[-6000:]
    said = json.loads(ended.stdout)
    answered = said["outcomes"].pop("answered")
    assert answered > 50
    assert said["outcomes"] == {}
    before, full = said["others"]
    assert full == before
    texts, broken = measured(PROMISES["G3"].figures, {"ready_again_s": [said["ready_again_s"]]})
    assert broken == []
    assert said["unwritten"] >= 1
    assert "Traceback" not in said["console"]
    assert said["status"] == 1
    assert "has no room for metrics: No space left on device; free some space" in said["said"].splitlines()[-1]
    assert "Traceback" not in said["said"]
    report(f"G3: {answered} answered; {texts[0]}")


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
