"""A suite whose run folder, with its logs, lies on a small disk that fills up under load and is emptied again.

    python -m tests.faults.full_disk FOLDER

FOLDER/run is that disk. It prints one line of JSON with what became of requests and processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.ledger import Ledger
from tests.faults.promises import PROMISES
from tests.faults.rig import OracleSuite, Process
from tests.faults.strangers import Strangers

_ROLES = ("scheduler", "gateway", "worker")


def fill(run_dir: Path) -> Path:
    """Leave no byte on the disk; the file that takes all of them."""
    path = run_dir / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


def pids(suite: OracleSuite) -> dict[str, int]:
    return {name: pid for role in _ROLES for name, pid in suite.pids(role).items()}


async def serve(folder: Path) -> dict[str, object]:
    suite = OracleSuite(str(folder), log_dir=folder / "run" / "logs")
    try:
        await ready(suite)
        before = pids(suite)
        async with Ledger(suite.port, PROMISES["G3"].load, seed=1) as ledger:
            await asyncio.sleep(0.5)
            filler = fill(suite.run_dir)
            victim = Process(suite, "worker-0")
            victim.send(signal.SIGKILL)
            await victim.ended()
            # What nobody has counted yet: each has to be given its place in the files of metrics.
            for path in ("/", "/docs", "/info", "/nowhere", "/v1/models", "/openapi.json", "/metrics", "/metrics"):
                await asyncio.to_thread(suite.get, path)
            await asyncio.to_thread(Strangers(str(suite.run_dir), 1).guests, 200)  # of whom the log says much
            await asyncio.sleep(1)
            full = pids(suite)
            filler.unlink()
            emptied_s = time.monotonic()
            await ready(suite)
            ready_again_s = time.monotonic() - emptied_s
            await asyncio.sleep(0.5)
        victim.close()
        logs = [path.read_text() for path in (suite.run_dir / "logs").iterdir()]
    finally:
        status = await asyncio.to_thread(suite.stop)
    assert status == 0, suite.log()
    return {
        "outcomes": dict(ledger.counts()),
        "others": [{name: pid for name, pid in found.items() if name != "worker-0"} for found in (before, full)],
        "ready_again_s": ready_again_s,
        "unwritten": sum("could not be written" in log for log in logs),
        "console": suite.log(),
    }


async def ready(suite: OracleSuite) -> None:
    """As `OracleSuite.ready`, which reads in the console what goes to files here."""
    async with asyncio.timeout(60):
        while suite.metrics().get('hedgerow_workers{state="ready"}') != suite.num_workers:
            await asyncio.sleep(0.05)


def start_when_full(run_dir: Path) -> dict[str, object]:
    filler = fill(run_dir)
    command = [sys.executable, "-m", "scheduler", "--run-dir", str(run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    filler.unlink()
    return {"status": ended.returncode, "said": ended.stderr}


def main() -> None:
    folder = Path(sys.argv[1])
    said = asyncio.run(serve(folder)) | start_when_full(folder / "run")
    os.write(1, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
