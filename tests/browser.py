"""A headless Chromium and its tabs, driven over the DevTools protocol: as much of it as the pages' tests need.

A tab notes every request that it makes and every complaint that the browser has (an uncaught error, a refusal of the
Content-Security-Policy, an answer that is no success), so that a test can say that there were none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.chromium import Chromium

_WAIT_S = 15.0

_FLAGS = (
    "--headless",
    "--no-sandbox",  # it opens this project's pages alone, and as root there is no sandbox
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # it can reach no other host at all
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)

# Resolves with the first value of EXPRESSION that is true or like it.
_UNTIL = """new Promise((resolve, reject) => {
  const end = performance.now() + %d;
  const look = () => {
    const value = (() => %s)();
    if (value) resolve(value);
    else if (performance.now() > end) reject(new Error("it never came to be, on:\\n" + document.body.innerText));
    else setTimeout(look, 20);
  };
  look();
})"""


class Tab:
    """One tab. `requests` are the URLs that it asked for, `complaints` what the browser found wrong."""

    def __init__(self, browser: Browser, session_id: str) -> None:
        self._browser = browser
        self._session_id = session_id
        self._answers: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return await self._browser.call(method, session_id=self._session_id, **parameters)

    async def open(self, url: str) -> None:
        """Go there; return when it is loaded, its scripts run once."""
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        await self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    async def run(self, expression: str) -> Any:  # noqa: ANN401  # whatever JSON the page's value is
        """The value of a JavaScript expression, awaited. Raises AssertionError for what it throws."""
        # With a gesture, as a person's click has one.
        parameters = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = await self.call("Runtime.evaluate", expression=expression, **parameters)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:  # noqa: ANN401  # whatever JSON the page's value is
        """The first true value of an expression. Raises AssertionError where there is none in time."""
        return await self.run(_UNTIL % (_WAIT_S * 1000, expression))

    async def texts(self, selector: str) -> list[str]:
        """What the elements say, in the page's order."""
        return await self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText.trim())")

    async def fill(self, selector: str, text: str) -> None:
        """Replace what a field holds, as by typing."""
        await self.run(f"document.querySelector({json.dumps(selector)}).select()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press Tab, Enter or Space."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "Space": (32, " ")}[key]
        name = " " if key == "Space" else key
        for kind in ("keyDown", "keyUp"):
            typed = text if kind == "keyDown" else ""
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=key, windowsVirtualKeyCode=code, text=typed
            )

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def resize(self, width: int, height: int, *, scale: float = 1, dark: bool = False) -> None:
        """The viewport in CSS pixels, and which colours the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the viewport, or of the whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    async def answer_instead(self, path: str, body: bytes) -> None:
        """From now on answer this path with this JSON, without asking the server."""
        self._answers[path] = body
        await self.call("Fetch.enable", patterns=[{"urlPattern": f"*{each}"} for each in self._answers])

    def on_event(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(event["request"]["url"])
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if event["type"] in {"error", "warning", "assert"}:
                self.complaints.append(str([argument.get("value") for argument in event["args"]]))
            case "Log.entryAdded" if event["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Fetch.requestPaused":
                body = base64.b64encode(self._answers[urlsplit(event["request"]["url"]).path]).decode()
                headers = [{"name": "Content-Type", "value": "application/json"}]
                self._browser.send(
                    "Fetch.fulfillRequest",
                    self._session_id,
                    {"requestId": event["requestId"], "responseCode": 200, "responseHeaders": headers, "body": body},
                )


class Browser:
    """A running Chromium. `launch` makes one."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._tabs: dict[str, Tab] = {}

    async def tab(self) -> Tab:
        """A new tab with storage of its own, nothing in it yet."""
        context = await self.call("Target.createBrowserContext")
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context["browserContextId"])
        session = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self._tabs[session["sessionId"]] = Tab(self, session["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        return tab

    async def call(self, method: str, *, session_id: str | None = None, **parameters: object) -> dict[str, Any]:
        """A command's answer. Raises AssertionError where the browser refuses it."""
        async with asyncio.timeout(2 * _WAIT_S):
            answer = await self.send(method, session_id, parameters)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def send(
        self, method: str, session_id: str | None, parameters: dict[str, object]
    ) -> asyncio.Future[dict[str, Any]]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session_id is not None:
            message["sessionId"] = session_id
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        sending = asyncio.create_task(self._socket.send_json(message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return answered

    async def read(self) -> None:
        """Hand answers and events to whom they are for, until the browser closes."""
        async for received in self._socket:
            message = json.loads(received.data)
            if "id" in message:
                answered = self._waiting.pop(message["id"])
                if not answered.done():
                    answered.set_result(message)
            elif message.get("sessionId") in self._tabs:
                self._tabs[message["sessionId"]].on_event(message["method"], message["params"])


@contextlib.asynccontextmanager
async def launch(chromium: Chromium, profile: Path) -> AsyncIterator[Browser]:
    """A browser with an empty profile in the folder `profile`; its processes are gone at the end."""
    process = await asyncio.create_subprocess_exec(
        chromium.path,
        *_FLAGS,
        f"--user-data-dir={profile}",
        env={**os.environ, **chromium.environment, "HOME": str(profile)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        url = await _devtools_url(process)
        draining = asyncio.create_task(process.stderr.read())  # what is not read would stop it one day
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            browser = Browser(socket)
            reading = asyncio.create_task(browser.read())
            try:
                yield browser
            finally:
                await browser.call("Browser.close")
                await reading
        await process.wait()
        await draining
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its group is its own
        await process.wait()


async def _devtools_url(process: asyncio.subprocess.Process) -> str:
    said = ""
    async with asyncio.timeout(2 * _WAIT_S):
        while line := (await process.stderr.readline()).decode(errors="replace"):
            said += line
            found = re.search(r"DevTools listening on (ws://\S+)", line)
            if found:
                return found[1]
    raise AssertionError(f"Chromium has not started:\n{said}")
