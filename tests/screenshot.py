"""Takes the README's picture: `python -m tests.screenshot FILE` starts a suite, keeps it busy and photographs its page.

It takes two minutes and a half, since that is what the page's charts show.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import tempfile
from pathlib import Path

import aiohttp

from tests.browser import launch
from tests.chromium import find
from tests.suite import Suite

_BUSY_S = 130
_WIDTH = 1180
_WORDS = ("hedge", "hawthorn", "lane", "field", "robin", "winter", "bramble", "ditch", "gate", "hazel", "wren")


async def _keep_busy(url: str) -> None:
    """Texts at a rate that swells and falls, sometimes a batch. Ends when it is cancelled."""
    generator = random.Random(7)
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        while True:
            num_texts = generator.choice([1, 1, 1, 1, 1, 40])
            texts = [" ".join(generator.choices(_WORDS, k=generator.randint(3, 30))) for _ in range(num_texts)]
            group.create_task(_post(session, url, texts))
            rate = 6 + 4 * math.sin(loop.time() / 9)
            await asyncio.sleep(generator.expovariate(rate))


async def _post(session: aiohttp.ClientSession, url: str, texts: list[str]) -> None:
    async with session.post(f"{url}/v1/embeddings", json={"input": texts}) as answer:
        await answer.read()


async def _picture(url: str, profile: Path) -> bytes:
    chromium = find()
    if chromium is None:
        sys.exit("There is no Chromium; `python tests/chromium.py` installs one.")
    busy = asyncio.create_task(_keep_busy(url))
    async with launch(chromium, profile) as browser:
        tab = await browser.tab()
        await tab.resize(_WIDTH, 900)
        await tab.open(f"{url}/")
        await asyncio.sleep(_BUSY_S)
        await tab.click("#text-form button")
        await tab.click("#compare-form button")
        await tab.until("document.querySelector('#matrix') && document.querySelector('#vector-head')")
        await tab.resize(_WIDTH, await tab.run("document.documentElement.scrollHeight"))
        picture = await tab.picture()
    busy.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await busy
    return picture


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        suite = Suite(f"{folder}/run")
        try:
            suite.wait_until_ready()
            picture = asyncio.run(_picture(suite.url, Path(folder) / "profile"))
        finally:
            suite.stop()
    Path(sys.argv[1]).write_bytes(picture)


if __name__ == "__main__":
    main()
