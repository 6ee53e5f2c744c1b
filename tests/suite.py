"""The real suite as a child process, for tests and for whatever wants to look at it from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_hedgerow(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`hedgerow` with these arguments, once it has ended."""
    command = [sys.executable, "-c", "import sys; from common.deploy.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
    )


class Suite:
    """A suite under supervisord. `command` starts it; the default is `hedgerow serve` on the CPU."""

    def __init__(
        self,
        run_dir: str,
        *flags: str,
        command: list[str] | None = None,
        port: int | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = Path(run_dir).with_suffix(".log").open("ab")
        self.log_path = Path(self._log.name)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEDGEROW_")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self.process = subprocess.Popen(
            command
            or [
                *(sys.executable, "-c", "import sys; from common.deploy.cli import main; sys.exit(main())", "serve"),
                *("--device", "cpu", "--workers", "1", "--port", str(self.port), "--run-dir", run_dir, *flags),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
        )

    def get(self, path: str, timeout_s: float = 10) -> tuple[int, bytes]:
        """Status and body of a GET; status 0 while nothing listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def wait_until_ready(self, workers: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        end = time.monotonic() + timeout_s
        while True:
            status, body = self.get("/ready")
            if status == 200 and json.loads(body)["workers"]["ready"] >= workers:
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the suite is not ready ({status} {body!r}):\n{self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def pids(self, role: str) -> dict[str, int]:
        """The processes of a role by name, as the kernel sees them: children of supervisord."""
        found: dict[str, int] = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                status = (path / "stat").read_text().rpartition(")")[2].split()
                arguments = (path / "cmdline").read_bytes().split(b"\0")
                environment = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(status[1]) == self.process.pid and status[0] != "Z" and role.encode() in arguments:
                slot = next((v.partition(b"=")[2] for v in environment if v.startswith(b"HEDGEROW_SLOT=")), b"0")
                found[f"{role}-{slot.decode()}"] = int(path.name)
        return found

    def children(self) -> list[int]:
        return [pid for role in ("scheduler", "worker", "gateway") for pid in self.pids(role).values()]

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM to supervisord; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self._log.close()
