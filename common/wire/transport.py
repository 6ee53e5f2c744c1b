"""ZeroMQ sockets, opened one way. Every option below answers a trap that was measured with libzmq 4.3.5.

The scheduler binds two `Router`s (gateways, workers); peers connect with a `Dealer`. All on `ipc://` in a folder of
mode 0700 that only this user can enter. Sends never block: a full or missing peer is an answer, not a wait. A
successful send proves nothing (a dying peer takes it along); what must not be lost stays in the sender's own ledger.

Each socket is owned by the loop that polls it, and closed by that owner.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import zmq

from common.errors import VersionMismatch
from common.wire.codec import Frame, Message, decode, encode
from common.wire.rows import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 4096  # messages; a backstop behind the credits, never 0, which means unlimited


class PeerGone(Exception):
    """The peer's connection no longer exists."""


class PeerStuck(Exception):
    """The peer does not read: its pipe is full."""


class Router:
    """The scheduler's end: knows each peer by a routing id that is drawn anew at every start of a peer.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._endpoint = endpoint
        self._path = Path(endpoint.removeprefix("ipc://"))
        self.socket = context.socket(zmq.ROUTER)
        _set_common_options(self.socket)
        # A send to a peer that is gone or full must fail; by default it is dropped without a word.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # 0: a name already in use cannot be taken over; with fresh names nobody needs to.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self._bind()

    def send(self, peer: bytes, message: Message) -> None:
        """Raises PeerGone or PeerStuck; never waits."""
        try:
            _send(self.socket, [peer, *encode(message)])
        except zmq.Again:
            raise PeerStuck from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone from None
            raise

    def receive(self) -> tuple[bytes, Message] | None:
        """The next message and who sent it; None when nothing waits.

        Raises:
            ProtocolError: what came is no message; it was taken off the socket. A VersionMismatch names its peer.
        """
        try:
            peer = self.socket.recv(_LAST)
        except zmq.Again:
            return None
        frames = _receive(self.socket)  # at least one: a ROUTER puts the peer before what there is
        try:
            return peer, decode(frames)
        except VersionMismatch as error:
            error.peer = peer
            raise

    def ensure_bound(self) -> bool:
        """Bind again if the socket's file was deleted or replaced. True when that was needed.

        Who is connected stays so: the old address is not unbound, which would cut off all who came by it. It keeps a
        descriptor instead, until the end.
        """
        try:
            if self._path.stat().st_ino == self._inode:
                return False
        except FileNotFoundError:
            pass
        self._bind()
        return True

    def close(self) -> None:
        self.socket.close(linger=0)
        self._path.unlink(missing_ok=True)

    def _bind(self) -> None:
        self.socket.bind(self._endpoint)
        self._inode = self._path.stat().st_ino


class Dealer:
    """A gateway's or worker's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, role: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self._role = role
        self.socket = self._connect()

    @property
    def fd(self) -> int:
        """Readable at an edge: when it is, take everything (`receive` until None). Changes with `reconnect`."""
        return int(self.socket.getsockopt(zmq.FD))

    def send(self, message: Message) -> bool:
        """Whether a connected scheduler took the message into its pipe; False now means try after its next word."""
        try:
            _send(self.socket, encode(message))
        except zmq.Again:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message; None when nothing waits.

        Raises:
            ProtocolError: what came is no message; it was taken off the socket.
        """
        try:
            frames = _receive(self.socket)
        except zmq.Again:
            return None
        return decode(frames)

    def reconnect(self) -> None:
        """Come back as somebody new: after being fenced off, the old name is never heard again."""
        self.close()
        self.socket = self._connect()

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long last words may take to leave."""
        self.socket.close(linger=linger_ms)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        _set_common_options(socket)
        # A fixed name is a black hole: while the old connection is not yet seen dead, all that the new one sends is
        # swallowed, for good.
        socket.setsockopt(zmq.ROUTING_ID, self._role.encode() + b"." + secrets.token_bytes(8))
        # Without it a DEALER hoards messages for a dead scheduler and hands stale ones to the next.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 25)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        socket.connect(self._endpoint)
        return socket


def now_ns() -> int:
    """CLOCK_MONOTONIC: the one clock that all processes of a host share and nobody sets."""
    return time.monotonic_ns()


# pyzmq's `send_multipart` looks at every frame in Python first, and its `recv_multipart` asks the socket after each
# whether there are more: of three small frames they take 4.9 and 5.4 µs, the functions below 1.2 and 3.1 (2026-11-30,
# 2-core VM).
_send_frame = zmq.backend.Socket.send
_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)

# A larger frame is read where ZeroMQ has put it.
_COPIED_BYTES = 32 * 1024


def _send(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    last = frames.pop()
    for frame in frames:
        _send_frame(socket, frame, _MORE)
    _send_frame(socket, last, _LAST)


def _receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The frames of a message, or what is left of one. Raises zmq.Again: nothing waits."""
    frames: list[Frame] = []
    more = True
    while more:
        frame = socket.recv(_LAST, copy=False)
        frames.append(frame.bytes if len(frame) <= _COPIED_BYTES else frame.buffer)
        more = frame.more  # a message arrives whole: what follows is there
    return frames


def _set_common_options(socket: zmq.Socket[bytes]) -> None:
    # One unclosed socket with messages left would hang the context's end for ever.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    # Not flow control: an unfinished multipart message counts against nothing, which is why only this user may connect
    # at all.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # The default of 30 s lets half-open connections fill the file table.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000)
    # Sees a frozen process (not a hung Python: libzmq's own thread answers these).
    socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2000)
