"""Clients that mean harm, as a process of their own: `python attacks.py PORT KIND` until it is killed.

Each strikes again and again, with a pause so long that its work for the gateway's one core stays well below all of it:
what is looked for is a single strike that stops the gateway, not that a full core is full.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Callable, Iterator

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"

Connect = Callable[[], socket.socket]


def main(port: int, kind: str) -> None:
    def connect() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        return sock

    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for pause_s in ATTACKS[kind](connect):
        time.sleep(pause_s)


def send(sock: socket.socket, data: bytes) -> None:
    """What the kernel takes of it."""
    try:
        sock.send(data)
    except OSError:
        pass  # cut off, which is as it should be


def slow_headers(connect: Connect) -> Iterator[float]:
    """A hundred headers, byte by byte."""
    socks = [connect() for _ in range(100)]
    for byte in GET + b"X: " + b"a" * 1_000_000:
        for sock in socks:
            send(sock, bytes([byte]))
        yield 0.05


def slow_bodies(connect: Connect) -> Iterator[float]:
    """A hundred bodies, byte by byte."""
    socks = [connect() for _ in range(100)]
    for sock in socks:
        send(sock, HEAD + b"Content-Length: 1000000\r\n\r\n")
    while True:
        for sock in socks:
            send(sock, b" ")
        yield 0.05


def unread_answers(connect: Connect) -> Iterator[float]:
    """Requests by the hundred on connections of which nobody reads the answers."""
    socks = [connect() for _ in range(20)]
    while True:
        for sock in socks:
            send(sock, (GET + b"\r\n") * 100)
            yield 0.05


def chunks(connect: Connect) -> Iterator[float]:
    """As many chunks of one byte as a packet takes."""
    while True:
        sock = connect()
        send(sock, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 40_000)
        yield 0.25
        sock.close()


def headers(connect: Connect) -> Iterator[float]:
    """Headers as large as they may be, and a line more."""
    while True:
        sock = connect()
        send(sock, GET + b"".join(b"X-%d: " % index + b"a" * 640 + b"\r\n" for index in range(120)) + b"\r\n")
        yield 0.02
        sock.close()


def garbage(connect: Connect) -> Iterator[float]:
    rng = random.Random(4)
    while True:
        sock = connect()
        send(sock, rng.randbytes(rng.randint(1, 60_000)))
        yield 0.02
        sock.close()


def early_closers(connect: Connect) -> Iterator[float]:
    """Clients that leave in the middle of a request."""
    request = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b'e\r\n{"input":"w1"}\r\n0\r\n\r\n'
    while True:
        for stop in range(0, len(request), 7):
            sock = connect()
            send(sock, request[:stop])
            sock.close()
            yield 0.01


ATTACKS = {
    attack.__name__: attack
    for attack in (slow_headers, slow_bodies, unread_answers, chunks, headers, garbage, early_closers)
}

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
