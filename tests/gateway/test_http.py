"""The connection: time limits, caps, what is no HTTP, stopping. Runs on small limits of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from common.config import GatewayConfig
from gateway.edge.http import HttpLimits, Server
from tests.gateway.conftest import Serve, listening_socket
from tests.gateway.wire import Wire, answer_to, ask, embed, request_bytes
from tests.timing import against_the_clock, assert_in_time

EMBED = request_bytes("POST", "/v1/embeddings", b'{"input":"w1"}')
CHUNKED = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Bare:
    """A Server around a handler that says `ok`, once its gate is open."""

    def __init__(self, limits: HttpLimits) -> None:
        self.refusals: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.closes = False
        self.body = b"ok"
        self.server = Server(self.handle, limits, self.refusals.append, lambda origin: {})

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.entered.set()
        await self.gate.wait()
        response = web.Response(body=self.body)
        if self.closes:
            response.force_close()
        return response


@pytest.fixture
async def bare() -> AsyncIterator[Callable]:
    listeners: list[tuple[asyncio.Server, Bare]] = []

    async def start(**changes: float) -> tuple[Bare, int]:
        bare = Bare(HttpLimits(**{"header_timeout_s": 10, "keepalive_timeout_s": 75, "max_connections": 100} | changes))
        sock = listening_socket()
        listener = await asyncio.get_running_loop().create_server(bare.server, sock=sock)
        listeners.append((listener, bare))
        return bare, sock.getsockname()[1]

    yield start
    for listener, bare in listeners:
        listener.close()
        bare.server.abort()


# --- time ---


async def test_a_silent_connection_is_closed_without_an_answer(bare: Callable) -> None:
    _, port = await bare(header_timeout_s=0.05)
    wire = await Wire.connect(port)
    assert await wire.rest() == b""
    await wire.close()


@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r"])
async def test_a_header_that_does_not_end_is_408(bare: Callable, start: bytes) -> None:
    server, port = await bare(header_timeout_s=0.05)
    answer = await answer_to(port, start)
    assert (answer.version, answer.status, answer.error["code"]) == ("HTTP/1.1", 408, "request_timeout")
    assert answer.headers["connection"] == "close"
    assert {"x-request-id", "server-timing"} <= answer.headers.keys()
    assert server.refusals == [408]


@against_the_clock
async def test_a_second_request_that_does_not_end_is_408(bare: Callable) -> None:
    _, port = await bare(header_timeout_s=0.05)
    wire = await Wire.connect(port)
    assert (await wire.ask(request_bytes("GET", "/"))).status == 200
    assert (await wire.ask(b"GET / HT")).status == 408
    await wire.close()


async def test_a_header_in_pieces_is_served(bare: Callable) -> None:
    _, port = await bare()
    wire = await Wire.connect(port)
    for byte in request_bytes("GET", "/"):
        await wire.send(bytes([byte]))
    assert (await wire.answer()).status == 200
    await wire.close()


@against_the_clock
async def test_a_connection_is_kept_for_the_keepalive_time_and_no_longer(bare: Callable) -> None:
    _, port = await bare(keepalive_timeout_s=0.1, header_timeout_s=0.05)
    wire = await Wire.connect(port)
    await wire.send(request_bytes("GET", "/"))
    assert "connection" not in (await wire.answer()).headers
    begin = asyncio.get_running_loop().time()
    assert await wire.rest() == b""
    taken_s = asyncio.get_running_loop().time() - begin
    assert taken_s > 0.09
    assert_in_time(taken_s, 1)
    await wire.close()


@against_the_clock
async def test_a_request_that_is_coming_when_the_keepalive_time_ends_is_served(bare: Callable) -> None:
    _, port = await bare(keepalive_timeout_s=0.1)
    wire = await Wire.connect(port)
    for _ in range(3):
        await wire.send(request_bytes("GET", "/")[:10])
        await asyncio.sleep(0.12)
        assert (await wire.ask(request_bytes("GET", "/")[10:])).status == 200
    assert await wire.rest() == b""
    await wire.close()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("idle_s", [0.01, 0.6, 1.8, 2.2])
async def test_a_pooled_connection_serves_below_the_idle_time_and_is_closed_above_it(
    serve: Serve, idle_s: float
) -> None:
    running = await serve(keepalive_timeout_s=2)
    clock = asyncio.get_running_loop().time

    async def is_served_again() -> bool:
        while True:
            wire = await Wire.connect(running.port)
            assert (await wire.ask(EMBED)).status == 200
            begin_s = clock()
            await asyncio.sleep(idle_s)
            in_time = clock() - begin_s < 1.95
            try:
                await wire.send(EMBED)
                served = (await wire.answer()).status == 200
            except (ConnectionError, asyncio.IncompleteReadError):
                served = False
            await wire.close()
            if in_time == (idle_s < 2):
                return served  # else this end slept too long to say anything of the other

    assert await asyncio.gather(*(is_served_again() for _ in range(20))) == [idle_s < 2] * 20


def test_idle_connections_are_kept_longer_than_clients_keep_theirs() -> None:
    assert GatewayConfig(run_dir="x").keepalive_timeout_s >= 60


async def test_a_thousand_requests_go_over_one_connection(bare: Callable) -> None:
    _, port = await bare()
    wire = await Wire.connect(port)
    for _ in range(1000):
        assert (await wire.ask(request_bytes("GET", "/"))).body == b"ok"
    await wire.close()


# --- caps ---


async def test_a_connection_over_the_cap_is_503_and_the_next_one_is_served(bare: Callable) -> None:
    _, port = await bare(max_connections=1)
    first = await Wire.connect(port)
    assert (await first.ask(request_bytes("GET", "/"))).status == 200
    second = await Wire.connect(port)
    answer = await second.ask(request_bytes("GET", "/"))
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "no_capacity", "1")
    assert await second.rest() == b""
    await second.close()
    assert (await first.ask(request_bytes("GET", "/", headers={"Connection": "close"}))).status == 200
    assert await first.rest() == b""
    await first.close()
    assert (await ask(port, "GET", "/")).status == 200


async def test_a_client_that_still_sends_gets_to_read_the_413(serve: Serve) -> None:
    running = await serve(max_body_bytes=1000)
    assert (await ask(running.port, "POST", "/v1/embeddings", b" " * 4_000_000)).status == 413


async def test_a_large_body_in_packets_leaves_the_connection_open(serve: Serve) -> None:
    running = await serve()
    body = b'{"input":"w1"}'.ljust(2_000_000)
    wire = await Wire.connect(running.port)
    for _ in range(3):
        answer = await wire.ask(request_bytes("POST", "/v1/embeddings", body))
        assert (answer.status, answer.headers.get("connection")) == (200, None)
    await wire.close()


async def test_a_body_is_asked_for_where_the_client_waits(serve: Serve) -> None:
    running = await serve()
    body = b'{"input":"w1"}'
    wire = await Wire.connect(running.port)
    assert (
        await wire.ask(request_bytes("POST", "/v1/embeddings", b"", {"Content-Length": "14", "Expect": "100-continue"}))
    ).status == 100
    assert (await wire.ask(body)).status == 200
    await wire.close()


async def test_a_chunk_that_breaks_later_ends_the_handlers_wait(serve: Serve) -> None:
    running = await serve()
    wire = await Wire.connect(running.port)
    await wire.send(CHUNKED + b"9\r\n" + b'{"input":' + b"\r\n")
    await asyncio.sleep(0.02)  # so that the handler waits for the rest when it comes
    answer = await wire.ask(b"zz\r\n")
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (400, "bad_request", "close")
    assert await wire.rest() == b""
    await wire.close()


@pytest.mark.parametrize("closes", [False, True], ids=["kept open", "closed"])
async def test_the_last_of_an_answer_that_is_not_read_is_dropped_too(bare: Callable, closes: bool) -> None:
    # Less than aiohttp waits for: it counts as sent, and a transport that is closed would go on holding it.
    server, port = await bare(write_timeout_s=0.05, keepalive_timeout_s=0.1)
    server.body = b"x" * 40_000
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    async with asyncio.timeout(5):
        while not server.server.connections:
            await asyncio.sleep(0.001)
        [connection] = server.server.connections
        transport = connection.transport
        while not transport.get_write_buffer_size():
            server.entered.clear()
            sock.send(request_bytes("GET", "/"))
            await server.entered.wait()
            await asyncio.sleep(0.001)
        server.closes = closes
        if closes:
            sock.send(request_bytes("GET", "/"))
        while server.server.connections:
            await asyncio.sleep(0.01)
    sock.close()


async def test_an_answer_that_is_not_read_is_cut_off(bare: Callable) -> None:
    server, port = await bare(write_timeout_s=0.05)
    server.body = b"x" * 50_000_000
    wire = await Wire.connect(port)
    await wire.send(request_bytes("GET", "/"))
    async with asyncio.timeout(5):
        while server.server.connections:
            await asyncio.sleep(0.01)
    assert len(await wire.rest()) < 50_000_000
    await wire.close()


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_all_of_an_answer(bare: Callable) -> None:
    server, port = await bare(write_timeout_s=0.2)
    server.body = b"x" * 30_000_000
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    await loop.sock_sendall(sock, request_bytes("GET", "/", headers={"Connection": "close"}))
    num_bytes, begin_s = 0, loop.time()
    async with asyncio.timeout(60):
        while data := await loop.sock_recv(sock, 65_536):
            num_bytes += len(data)
            await asyncio.sleep(0.001)
    sock.close()
    assert num_bytes > 30_000_000  # and the header
    assert loop.time() - begin_s > 0.4


# --- stopping ---


async def test_draining_answers_what_runs_and_closes_what_is_idle_at_once(bare: Callable) -> None:
    server, port = await bare(drain_grace_s=0.01)
    idle = await Wire.connect(port)
    await idle.ask(request_bytes("GET", "/"))
    server.gate.clear()
    server.entered.clear()
    busy = await Wire.connect(port)
    await busy.send(request_bytes("GET", "/"))
    await server.entered.wait()
    server.closes = True
    drained = asyncio.ensure_future(server.server.drain(5))
    assert await idle.rest() == b""
    assert not drained.done()
    server.gate.set()
    answer = await busy.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await drained is True
    await idle.close()
    await busy.close()


async def test_a_request_on_its_way_while_draining_is_still_answered(serve: Serve) -> None:
    running = await serve()
    wire = await Wire.connect(running.port)
    await wire.ask(EMBED)
    drained = asyncio.ensure_future(running.gateway.drain())
    await asyncio.sleep(0)
    ready = await wire.ask(request_bytes("GET", "/ready"))
    assert (ready.status, ready.json["status"], ready.headers["connection"]) == (503, "draining", "close")
    await drained
    await wire.close()


async def test_draining_cuts_off_what_does_not_finish(bare: Callable) -> None:
    server, port = await bare()
    server.gate.clear()
    wire = await Wire.connect(port)
    await wire.send(request_bytes("GET", "/"))
    await server.entered.wait()
    assert await server.server.drain(0.05) is False
    assert await wire.rest() == b""
    await wire.close()


async def test_a_handler_that_raises_is_a_500_that_tells_nothing(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    running = await serve()
    running.stub.error = ZeroDivisionError("secret")
    answer = await embed(running.port, {"input": "w1"}, {"X-Request-Id": "find-me"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert "find-me" in caplog.text
    running.stub.error = None
    assert (await embed(running.port, {"input": "w1"})).status == 200
