"""A process that bothers a suite's sockets: what connects to them and is no peer, or a peer with a bug.

    python -m tests.faults.strangers RUN_DIR SEED

It says `ready`, and then does what each line of its input asks for: `changed COUNT`, `guests COUNT`, `garbage COUNT`,
`crowd SECONDS`. When that is done it answers with one line of JSON: what it sent that must count as an error of the
protocol.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import socket
import sys
import time
from collections import deque

import numpy as np
import zmq

from common.errors import ProtocolError, VersionMismatch
from common.run_dir import RunDir
from common.wire.codec import Message, decode
from common.wire.messages import (
    PROTOCOL_VERSION,
    BatchFailed,
    Beat,
    Cancel,
    Goodbye,
    Hello,
    Join,
    Ping,
    Refuse,
    Reply,
    Request,
    Result,
    Welcome,
)
from common.wire.transport import Dealer
from tests.fakes import FACTS
from tests.rogue import mutated

_SIDES = ("gateways", "workers")
_PAUSE_S = 0.001  # between messages, so that it is they and not the loss of a core that others feel
_HALF_OPEN = 500
_CHATTERING = 100
_CHATTER_S = 0.2  # between two messages of one of them

# A model that no worker serves: its requests are answered with a failure, and its workers are refused. Each of
# its ids is three bits or more away from a fault's: a message is changed four times at the most.
_FACTS = dataclasses.replace(FACTS, fingerprint="of a stranger")
_NOBODY = 2**22 + 1  # no process has this number
_IDS = np.arange(3584, 3591, dtype=np.int32)
_LENGTHS = np.array([3, 4], dtype=np.int32)
_GOLDEN: list[Message] = [
    Join(PROTOCOL_VERSION, "stranger", _NOBODY),
    Request(1, _FACTS.fingerprint, 2**62, "online", 0, True, 16, False, "float32", _IDS, _LENGTHS),
    Request(2, FACTS.fingerprint, 2**62, "backfill", 0, True, 16, False, "float32", _IDS, _LENGTHS),
    Cancel(1),
    Hello(PROTOCOL_VERSION, "stranger", _NOBODY, _FACTS),
    Result(1, 1, 0, 10, True, _LENGTHS[:0], np.ones((2, 64), dtype=np.uint8)),
    BatchFailed(1, 1, "raised"),
    Goodbye("left"),
    Beat(1, 0),
    Welcome(PROTOCOL_VERSION, 1, True, _FACTS, 64, 128),
    Ping(1, 1, 2, True),
    Reply(1, 0, 10, 10, np.ones((1, 64), dtype=np.uint8)),
    Refuse("version", "no"),
]

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x06DEALER" + b"\x08Identity" + bytes(4)
_OPENING = _GREETING + b"\x04" + bytes([len(_READY)]) + _READY


class Strangers:
    def __init__(self, run_dir: str, seed: int) -> None:
        self._run_dir = run_dir
        self._rng = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def changed(self, count: int) -> int:
        """Messages that were changed on the way, to both sockets; how many of them are none any more."""
        dealers = [self._dealer(side) for side in _SIDES]
        undecodable = 0
        for number in range(count):
            frames = mutated(self._rng, _GOLDEN) or [b""]
            try:
                decode(frames)
            except VersionMismatch:
                pass  # answered, not counted
            except ProtocolError:
                undecodable += 1
            dealer = dealers[number % 2]
            dealer.socket.send_multipart(frames)
            with contextlib.suppress(ProtocolError):
                while dealer.receive() is not None:
                    pass
            time.sleep(_PAUSE_S)
        for dealer in dealers:
            dealer.send(Goodbye("done"))
            dealer.close(linger_ms=2000)
        return undecodable

    def guests(self, count: int) -> int:
        """A gateway that joins and leaves, and whose process cannot be watched: of each message the log has a line."""
        dealer = self._dealer("gateways")
        for number in range(count):
            dealer.send(Goodbye("seen enough") if number % 2 else _GOLDEN[0])
            while dealer.receive() is not None:
                pass
            time.sleep(_PAUSE_S)
        dealer.close(linger_ms=2000)
        return 0

    def garbage(self, count: int) -> int:
        """Connections that send bytes and leave."""
        for number in range(count):
            with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
                stranger.connect(f"{self._run_dir}/{_SIDES[number % 2]}.sock")
                stranger.sendall(self._bytes(number // 2 % 4))
            time.sleep(_PAUSE_S)
        return 0

    def crowd(self, seconds: int) -> int:
        """Connections that say nothing, or half a greeting, renewed as they are closed, and peers that nobody knows."""
        dealers = [self._dealer(_SIDES[number % 2]) for number in range(_CHATTERING)]
        half_open: deque[socket.socket] = deque()
        next_s = time.monotonic()
        end_s = next_s + seconds
        while next_s < end_s:
            for number, dealer in enumerate(dealers):
                dealer.send(Beat(1, 0) if number % 2 else Cancel(number))
                for _ in range(5):  # each of 500 is renewed once a second, as it is closed
                    self._half_open(half_open)
                next_s += _CHATTER_S / len(dealers)
                time.sleep(max(0.0, next_s - time.monotonic()))
        for stranger in half_open:
            stranger.close()
        for dealer in dealers:
            dealer.close()
        return 0

    def _dealer(self, side: str) -> Dealer:
        dealer = Dealer(self._context, RunDir(self._run_dir).address(side), "x")
        assert dealer.socket.poll(5000, zmq.POLLOUT)
        return dealer

    def _half_open(self, strangers: deque[socket.socket]) -> None:
        if len(strangers) == _HALF_OPEN:
            strangers.popleft().close()
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(f"{self._run_dir}/{_SIDES[len(strangers) % 2]}.sock")
        stranger.sendall(_GREETING[: self._rng.choice((0, 10, 40))])
        strangers.append(stranger)

    def _bytes(self, kind: int) -> bytes:
        random_bytes = self._rng.randbytes(self._rng.randint(1, 2000))
        if kind == 0:
            return random_bytes
        if kind == 1:
            return _GREETING + random_bytes
        # A frame that is announced with more than may come, so that no garbage ends as a message by chance.
        if kind == 2:
            return _OPENING + b"\x03" + (2**40).to_bytes(8, "big") + random_bytes
        flipped = bytearray(_OPENING)
        flipped[self._rng.randrange(len(flipped))] ^= 1 << self._rng.randrange(8)
        return bytes(flipped)


def main() -> None:
    strangers = Strangers(sys.argv[1], int(sys.argv[2]))
    os.write(1, b"ready\n")
    for line in sys.stdin:
        name, count = line.split()
        answer = {"undecodable": getattr(strangers, name)(int(count))}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
