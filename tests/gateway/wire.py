"""A client that sends exactly the bytes it is given, and the answers it reads."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    version: str
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, object]:
        return self.json["error"]

    @property
    def refusal(self) -> tuple[int, object, object]:
        """Status, code and `param` of an error."""
        return self.status, self.error["code"], self.error["param"]


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @property
    def port(self) -> int:
        """Of this end."""
        return int(self._writer.get_extra_info("sockname")[1])

    @property
    def ended(self) -> bool:
        """Whether the server has closed it, as far as is known, and everything it sent was read."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, *, to_head: bool = False, timeout_s: float = 10) -> Answer:
        """The next answer; the one `to_head` has no body. Raises IncompleteReadError when there is none."""
        async with asyncio.timeout(timeout_s):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.strip().split("\r\n")
            version, status, _ = line.split(" ", 2)
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            size_bytes = 0 if to_head else int(headers.get("content-length", "0"))
            body = await self._reader.readexactly(size_bytes)
            return Answer(version, int(status), headers, body)

    async def ask(self, data: bytes) -> Answer:
        """Send it, and the next answer."""
        await self.send(data)
        return await self.answer()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(10):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""

    def reset(self) -> None:
        """End the connection as a client does that is gone: at once, and without a word."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass  # the server had cut it off already


def request_bytes(method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """A request as clients send it; `headers` add to the usual ones, or replace them."""
    lines = {"Host": "localhost"}
    if body is not None:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b"")


async def ask(
    port: int, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    wire = await Wire.connect(port)
    try:
        await wire.send(request_bytes(method, target, body, headers))
        return await wire.answer(to_head=method == "HEAD")
    finally:
        await wire.close()


async def post(port: int, path: str, fields: object, headers: dict[str, str] | None = None) -> Answer:
    """POST `fields` as JSON."""
    return await ask(port, "POST", path, json.dumps(fields).encode(), headers)


async def answer_to(port: int, sent: bytes) -> Answer:
    """The answer to exactly these bytes, on a connection of its own."""
    wire = await Wire.connect(port)
    try:
        await wire.send(sent)
        return await wire.answer()
    finally:
        await wire.close()


async def embed(port: int, fields: object, headers: dict[str, str] | None = None) -> Answer:
    """POST `fields` to /v1/embeddings."""
    return await post(port, "/v1/embeddings", fields, headers)
