"""A suite that serves, loses a worker and is stopped, in the process's own surroundings: what became of its requests.

    python -m tests.faults.confined FOLDER

It prints one line of JSON: how many requests had which outcome, and what the processes tried that they should not
(watched/sitecustomize.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tests.faults.ledger import Ledger
from tests.faults.promises import PROMISES
from tests.faults.rig import OracleSuite, Process


async def serve(folder: Path) -> dict[str, int]:
    suite = OracleSuite(str(folder))
    try:
        await suite.ready()
        async with Ledger(suite.port, PROMISES["G8, G10"].load, seed=1) as ledger:
            await asyncio.sleep(1)
            victim = Process(suite, "worker-0")
            victim.send(signal.SIGKILL)
            await suite.ready(instead_of=victim)
            victim.close()
            await asyncio.sleep(1)
    finally:
        status = await asyncio.to_thread(suite.stop)
    assert status == 0, suite.log()
    return dict(ledger.counts())


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    os.environ |= {"WATCHED": str(folder), "PYTHONPATH": f"{Path(__file__).parent / 'watched'}:{os.getcwd()}"}
    os.environ["TMPDIR"] = str(folder)  # supervisord wants to have one, though it writes nothing there
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of the tests' own modules, which nobody has compiled yet
    outcomes = asyncio.run(serve(folder))
    notes = [line for path in folder.glob("*.notes") for line in path.read_text().splitlines()]
    said = {"outcomes": outcomes, "watched": len(list(folder.glob("*.notes"))), "notes": notes}
    os.write(1, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
