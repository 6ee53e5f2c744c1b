"""How gateways that wait for one listening socket share its connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from gateway.edge.connection_balancer import Acceptor, ConnectionCounts
from tests.gateway.conftest import listening_socket


class Counting:
    """A gateway as far as connections are concerned, on the loop that runs the test."""

    def __init__(self, sock: socket.socket, run_dir: Path, slot: int = 0) -> None:
        self.transports: list[asyncio.Transport] = []
        counts = ConnectionCounts(str(run_dir), slot)
        self.acceptor = Acceptor(sock, lambda: _Taken(self.transports), lambda: len(self.transports), counts)

    async def close(self) -> None:
        await self.acceptor.close()
        for transport in self.transports:
            transport.abort()
        while self.transports:
            await asyncio.sleep(0)


class _Taken(asyncio.Protocol):
    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transports.append(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transports.remove(self._transport)


Connect = Callable[["Counting", int], Awaitable[None]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes so many connections that wait for somebody to accept them, all at once; they end with the test."""
    clients: list[socket.socket] = []

    async def connect(one: Counting, count: int) -> None:
        clients.extend(socket.create_connection(("127.0.0.1", port_of(one))) for _ in range(count))

    yield connect
    for client in clients:
        client.close()


async def taken(counted: list[Counting], number: int) -> None:
    async with asyncio.timeout(5):
        while sum(len(one.transports) for one in counted) < number:
            await asyncio.sleep(0.001)


Start = Callable[[int], "list[Counting]"]


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts so many that wait for one socket, as they inherit it."""
    started: list[Counting] = []

    def start(number: int) -> list[Counting]:
        first = listening_socket()
        socks = [first, *(socket.socket(fileno=socket.dup(first.fileno())) for _ in range(number - 1))]
        started.extend(Counting(sock, tmp_path, slot) for slot, sock in enumerate(socks))
        return started

    yield start
    for one in started:
        await one.close()


def port_of(one: Counting) -> int:
    return int(one.acceptor._sock.getsockname()[1])


async def test_connections_that_come_at_once_are_shared_evenly(gateways: Start, connect: Connect) -> None:
    counted = gateways(4)
    await connect(counted[0], 40)
    await taken(counted, 40)

    assert [len(one.transports) for one in counted] == [10] * 4


async def test_connections_that_come_one_by_one_are_shared_evenly(gateways: Start, connect: Connect) -> None:
    counted = gateways(3)
    for number in range(1, 13):
        await connect(counted[0], 1)
        await taken(counted, number)

    assert [len(one.transports) for one in counted] == [4] * 3


async def test_who_is_busy_gets_no_more_than_a_moment(gateways: Start, connect: Connect) -> None:
    counted = gateways(2)
    await connect(counted[0], 2)
    await taken(counted, 2)
    counted[1].acceptor._loop.remove_reader(counted[1].acceptor._sock)  # it has other things to do

    await connect(counted[0], 3)
    await taken(counted, 5)

    assert [len(one.transports) for one in counted] == [4, 1]


async def test_who_is_gone_without_a_word_is_waited_for_some_times_and_no_more(
    tmp_path: Path, gateways: Start, connect: Connect
) -> None:
    gone = ConnectionCounts(str(tmp_path), 1)
    gone.least_of_others(0)
    [counted] = gateways(1)
    waits: list[float] = []
    later = counted.acceptor._later
    counted.acceptor._later = lambda delay_s, what: (waits.append(delay_s), later(delay_s, what))[1]  # type: ignore[method-assign]
    await connect(counted, 100)
    await taken([counted], 100)
    assert waits == [0.001] * 64  # the first of them finds both with none

    gone.least_of_others(2)  # it is back
    await connect(counted, 1)
    await taken([counted], 101)
    assert waits == [0.001] * 65
    gone.close()


async def test_an_answer_does_not_wait_for_more_of_it(gateways: Start, connect: Connect) -> None:
    [counted] = gateways(1)
    await connect(counted, 1)
    await taken([counted], 1)

    accepted = counted.transports[0].get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_what_waits_when_a_gateway_stops_is_for_the_others(gateways: Start, connect: Connect) -> None:
    stopped, other = gateways(2)
    await connect(other, 3)
    await stopped.close()
    await stopped.close()  # once more does nothing
    await taken([other], 3)

    assert (len(stopped.transports), len(other.transports)) == (0, 3)


def test_a_gateway_that_has_stopped_is_not_waited_for(tmp_path: Path) -> None:
    first, second, third = (ConnectionCounts(str(tmp_path), slot) for slot in range(3))
    assert first.least_of_others(5) is None
    assert second.least_of_others(7) == 5
    assert third.least_of_others(1) == 5
    assert first.least_of_others(6) == 1
    third.close()
    assert first.least_of_others(6) == 7
    first.close()
    second.close()


async def test_without_a_run_folder_each_takes_what_it_finds(caplog: pytest.LogCaptureFixture) -> None:
    counts = ConnectionCounts("/nowhere", 0)
    assert counts.least_of_others(3) is None
    assert "cannot share connections evenly" in caplog.text
    counts.close()


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptors left, for a while."""

    num_failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_descriptors_connections_wait_and_the_log_says_so(
    tmp_path: Path, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    sock = listening_socket()
    counted = Counting(Exhausted(fileno=sock.detach()), tmp_path)
    with caplog.at_level(logging.ERROR):
        await connect(counted, 1)
        await taken([counted], 1)

    assert [record.getMessage() for record in caplog.records] == ["no connection can be accepted: Too many open files"]

    await counted.close()
