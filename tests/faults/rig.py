"""The suite that faults are done to, and what does them: signals to one process, restarts by supervisord's own control.

Gateways, the scheduler, the workers' process and supervisord.conf are the product's own; only a worker's model is a
hash (oracle.py). Nothing here knows what is promised.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xmlrpc.client import ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from tests.faults.ledger import Sent
from tests.faults.oracle import write_model
from tests.gateway.wire import ask
from tests.suite import ROOT, Suite, free_port

NUM_GATEWAYS = 2
NUM_WORKERS = 2
STEP_MS = 10.0
TOKEN_US = 200.0

_LOST = re.compile(
    r"^(?P<when>\S+ \S+) \w+ scheduler scheduler\.\w+: \S+ \(pid (?P<pid>\d+)\) (lost|is gone): (?P<reason>\w+)",
    re.MULTILINE,
)


class Loss(NamedTuple):
    """A worker that the scheduler gave up."""

    pid: int
    when_s: float  # since the epoch
    reason: str


class OracleSuite(Suite):
    """Two gateways, a scheduler and oracle workers under the real supervisord.conf."""

    def __init__(
        self,
        folder: str,
        port: int | None = None,
        *,
        num_workers: int = NUM_WORKERS,
        step_ms: float = STEP_MS,
        token_us: float = TOKEN_US,
        **variables: object,
    ) -> None:
        """In a folder where one was before, with its port: what that one left is found.

        `variables`: fields of the processes' configuration that are not as usual.
        """
        self.num_workers = num_workers
        if not Path(folder, "model").exists():
            write_model(Path(folder, "model"))
        Path(folder, "run").mkdir(mode=0o700, exist_ok=True)
        port = port or free_port()
        conf = (ROOT / "supervisord.conf").read_text()
        more = "".join(f',HEDGEROW_{name.upper()}="{value}"' for name, value in variables.items())
        # What a worker's process is started with, after Python.
        self.oracle = ["-m", "tests.faults.oracle", "worker", "--folder", f"{folder}/model"]
        self.oracle += ["--step-ms", str(step_ms), "--token-us", str(token_us)]
        for shipped, own in (
            ('HEDGEROW_PORT="8080"', f'HEDGEROW_PORT="{port}"'),
            ('HEDGEROW_GATEWAYS="2"', f'HEDGEROW_GATEWAYS="{NUM_GATEWAYS}"'),
            ('HEDGEROW_WORKERS="1"', f'HEDGEROW_WORKERS="{num_workers}"' + more),
            ("command=hedgerow worker", f"command={sys.executable} {' '.join(self.oracle)}"),
        ):
            assert conf.count(shipped) == 1, shipped
            conf = conf.replace(shipped, own)
        Path(folder, "supervisord.conf").write_text(conf)
        command = [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", f"{folder}/supervisord.conf"]
        super().__init__(f"{folder}/run", command=command, port=port)

    async def ready(self, workers: int | None = None, instead_of: Process | None = None) -> float:
        """Wait until all of it serves, another process in the place of one that ended; when that was seen."""
        workers = self.num_workers if workers is None else workers
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(self._is_ready, workers, instead_of):
                await asyncio.sleep(0.02)
        return time.time()

    async def successor(self, ended: Process) -> Process:
        """The process that takes the place of one that has ended, as soon as it is there, ready or not."""
        async with asyncio.timeout(60):
            while (await asyncio.to_thread(self.pids, ended.role)).get(ended.name) in (None, ended.pid):
                await asyncio.sleep(0.005)
        return Process(self, ended.name)

    async def not_ready(self) -> float:
        """Wait until /ready is not 200; when that was seen."""
        async with asyncio.timeout(10):
            while (await asyncio.to_thread(self.get, "/ready"))[0] == 200:
                await asyncio.sleep(0.005)
        return time.time()

    async def fault_began(self) -> float:
        """Wait for the next fault word to be run by a worker, of which there must be none under way; when it was."""
        known = set(self.run_dir.glob("*.fault"))
        async with asyncio.timeout(10):
            while not (new := set(self.run_dir.glob("*.fault")) - known):
                await asyncio.sleep(0.005)
        (path,) = new
        return path.stat().st_mtime

    def _is_ready(self, workers: int, instead_of: Process | None) -> bool:
        if instead_of is not None:
            pid = self.pids(instead_of.role).get(instead_of.name)
            if pid in (None, instead_of.pid):
                return False
            # Gauges are a quarter of a second old; they do not tell it from the one before.
            if instead_of.role != "scheduler" and not re.search(rf"(joined|is ready) \(pid {pid}\W", self.log()):
                return False
        found = self.metrics()
        return (
            found.get('hedgerow_workers{state="ready"}') == workers
            and found.get("hedgerow_gateways") == NUM_GATEWAYS
            and self.get("/ready")[0] == 200
        )

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels, as they are written there; empty while nobody answers."""
        status, body = self.get("/metrics")
        lines = body.decode().splitlines() if status == 200 else []
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def losses(self) -> list[Loss]:
        """The processes that the scheduler has given up so far, in order."""
        return [
            Loss(
                int(match["pid"]),
                datetime.datetime.strptime(match["when"], "%Y-%m-%d %H:%M:%S,%f").timestamp(),
                match["reason"],
            )
            for match in _LOST.finditer(self.log())
        ]

    def loss_of(self, pid: int) -> Loss:
        """The last one of this pid, which the system may have given to others before."""
        return [loss for loss in self.losses() if loss.pid == pid][-1]

    async def start(self, arguments: list[str]) -> asyncio.subprocess.Process:
        """A process of the suite's own kind that nobody supervises; `arguments`: what comes after Python."""
        command = (sys.executable, *arguments, "--run-dir", str(self.run_dir))
        return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)

    async def losses_by_now(self) -> list[Loss]:
        """`losses`, once all that died has been replaced: until then a line may be on its way to the log."""
        await asyncio.sleep(0.3)  # gauges are set four times a second
        await self.ready()
        return self.losses()

    # --- supervisord's control ---

    async def stop_program(self, name: str) -> None:
        """`worker:worker-0`, `gateway:gateway-1`, `scheduler`; returns when it has ended."""
        await asyncio.to_thread(self._control, "stopProcess", name)

    async def start_program(self, name: str) -> None:
        await asyncio.to_thread(self._control, "startProcess", name)

    async def restart_program(self, name: str) -> None:
        await self.stop_program(name)
        await self.start_program(name)

    def _control(self, method: str, name: str) -> None:
        transport = SupervisorTransport(None, None, f"unix://{self.run_dir}/supervisor.sock")
        try:
            getattr(ServerProxy("http://127.0.0.1", transport=transport).supervisor, method)(name, True)
        finally:
            transport.close()


class Loose:
    """Processes of one run folder that are started one by one and alone, as without a supervisor."""

    def __init__(self, folder: str) -> None:
        self.run_dir = Path(folder, "run")
        self.port = free_port()
        self._folder = Path(folder)
        self.log_path = Path(folder, "run.log")
        self._log = self.log_path.open("ab")
        self._started: list[subprocess.Popen[bytes]] = []
        write_model(Path(folder, "model"))

    def start(self, name: str, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        """`name`: worker-0, gateway-1, scheduler-0. `command`: other arguments of Python's than for an oracle suite."""
        role, _, slot = name.partition("-")
        if command is None:
            command = ["-m", role]
            if role == "worker":
                command = ["-m", "tests.faults.oracle", "worker", "--folder", f"{self._folder}/model"]
                command += ["--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US)]
        own = {"RUN_DIR": str(self.run_dir), "PORT": str(self.port), "SLOT": slot, "WORKERS": str(NUM_WORKERS)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEDGEROW_")}
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment | {f"HEDGEROW_{name}": value for name, value in own.items()},
        )
        self._started.append(process)
        return process

    async def ready(self, workers: int = NUM_WORKERS) -> None:
        async with asyncio.timeout(60):
            while await self._workers_ready() != workers:
                await asyncio.sleep(0.02)

    async def _workers_ready(self) -> int:
        try:
            answer = await ask(self.port, "GET", "/ready")
        except (OSError, asyncio.IncompleteReadError):
            return 0
        return answer.json["workers"]["ready"] if answer.status == 200 else 0

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        self._log.close()


class Process:
    """One process of the suite, held by a pidfd: a signal reaches it or nobody."""

    def __init__(self, suite: Suite, name: str) -> None:
        """`name`: worker-0, gateway-1, scheduler-0. Raises ProcessLookupError: it is not there, or ended meanwhile."""
        self.role = name.partition("-")[0]
        self.name = name
        pid = suite.pids(self.role).get(name)
        if pid is None:
            raise ProcessLookupError(name)
        self.pid = pid
        self._pidfd = os.pidfd_open(self.pid)
        if suite.pids(self.role).get(name) != self.pid:
            os.close(self._pidfd)
            raise ProcessLookupError(name)

    def send(self, number: signal.Signals) -> float:
        """When it was sent, in seconds since the epoch, as the log counts. Raises ProcessLookupError: it has ended."""
        signal.pidfd_send_signal(self._pidfd, number)
        return time.time()

    async def ended(self, timeout_s: float = 60) -> float:
        """Wait until it has ended; when that was seen, in seconds since the epoch."""
        readable, _, _ = await asyncio.to_thread(select.select, [self._pidfd], [], [], timeout_s)
        assert readable, f"{self.name} (pid {self.pid}) has not ended after {timeout_s} s"
        return time.time()

    def peer_ports(self) -> set[int]:
        """The far ports of its TCP connections: those of the clients that it has accepted."""
        sockets = set()
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                sockets.add(path.readlink().name)
            except OSError:
                continue
        lines = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        fields = [line.split() for line in lines]
        return {int(row[2].partition(":")[2], 16) for row in fields if f"socket:[{row[9]}]" in sockets} - {0}

    def close(self) -> None:
        os.close(self._pidfd)


class KilledGateways:
    """Gateways that were killed, and the connections that ended with them."""

    def __init__(self) -> None:
        self._gone: list[tuple[float, set[int]]] = []  # when, and the far ends of its connections

    def kill(self, gateway: Process) -> float:
        """When, in seconds since the epoch. Raises OSError: it has ended already."""
        gateway.send(signal.SIGSTOP)  # so that it accepts nobody between the look and the kill
        self._gone.append((time.monotonic(), gateway.peer_ports()))
        return gateway.send(signal.SIGKILL)

    def has_cut(self, sent: Sent) -> bool:
        """Whether this request's connection was one of those."""
        return sent.outcome == "cut" and any(
            sent.port in ports and abs(sent.ended_s - killed_s) < 1 for killed_s, ports in self._gone
        )
