"""ZeroMQ sockets and their options. Each option below avoids a trap that was measured with libzmq 4.3.5.

The scheduler binds two `Router`s (for gateways and workers); peers connect with a `Dealer`. All use `ipc://` in the run
folder, which only this user can enter. A send never blocks: that a peer is gone or full is its result. A successful
send proves nothing, since a dying peer loses what it has received. So the sender keeps a ledger of what must not be
lost.

The loop that polls a socket owns it and closes it.
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

_HIGH_WATER_MARK = 4096  # messages; the credits keep below it. Never 0, which means unlimited


class PeerGone(Exception):
    """The peer's connection no longer exists."""


class PeerStuck(Exception):
    """The pipe to the peer is full, since it does not read."""


class Router:
    """The scheduler's end. It knows each peer by a routing id, which the peer draws anew at every start.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._endpoint = endpoint
        self._path = Path(endpoint.removeprefix("ipc://"))
        self.socket = context.socket(zmq.ROUTER)
        _set_common_options(self.socket)
        # A send to a peer that is gone or full must fail; by default it is dropped silently.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # 0: no peer can take over a routing id in use. Since each draws a fresh one, none needs to.
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
        """The next message and its sender; None if nothing waits.

        Raises:
            ProtocolError: the frames are no message; they are off the socket now. A VersionMismatch names its peer.
        """
        try:
            peer = self.socket.recv(_LAST)
        except zmq.Again:
            return None
        frames = _receive(self.socket)  # at least one: a ROUTER puts the peer before the frames
        try:
            return peer, decode(frames)
        except VersionMismatch as error:
            error.peer = peer
            raise

    def ensure_bound(self) -> bool:
        """Bind again if the socket's file was deleted or replaced. Returns whether that was needed.

        Connected peers stay connected: the old address is not unbound, which would disconnect them. It keeps one
        descriptor until the end instead.
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
    """The end of a gateway or a worker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, role: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self._role = role
        self.socket = self._connect()

    @property
    def fd(self) -> int:
        """Edge-triggered: when it is readable, call `receive` until None. It changes with `reconnect`."""
        return int(self.socket.getsockopt(zmq.FD))

    def send(self, message: Message) -> bool:
        """Send, and return whether a scheduler's pipe took the message. If not, try after its next message."""
        try:
            _send(self.socket, encode(message))
        except zmq.Again:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message; None if nothing waits.

        Raises:
            ProtocolError: the frames are no message; they are off the socket now.
        """
        try:
            frames = _receive(self.socket)
        except zmq.Again:
            return None
        return decode(frames)

    def reconnect(self) -> None:
        """Connect again under a new routing id: a scheduler that has fenced off the old one never hears it again."""
        self.close()
        self.socket = self._connect()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Last messages may take `linger_ms` to leave."""
        self.socket.close(linger=linger_ms)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        _set_common_options(socket)
        # With a fixed id, all messages of the new connection are lost for good until the old one is seen to be dead.
        socket.setsockopt(zmq.ROUTING_ID, self._role.encode() + b"." + secrets.token_bytes(8))
        # Without it a DEALER keeps messages for a dead scheduler, and hands the stale ones to the next.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 25)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        socket.connect(self._endpoint)
        return socket


def now_ns() -> int:
    """CLOCK_MONOTONIC, which all processes of a host share and which cannot be set."""
    return time.monotonic_ns()


# pyzmq's `send_multipart` checks every frame in Python first, and its `recv_multipart` asks the socket after each frame
# for more. For three small frames they take 4.9 and 5.4 µs; `_send` and `_receive` take 1.2 and 3.1 (2026-11-30, 2-core
# VM).
_send_frame = zmq.backend.Socket.send
_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)

# A larger frame is not copied but read in ZeroMQ's memory.
_COPIED_BYTES = 32 * 1024


def _send(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    last = frames.pop()
    for frame in frames:
        _send_frame(socket, frame, _MORE)
    _send_frame(socket, last, _LAST)


def _receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The remaining frames of a message. Raises zmq.Again: nothing waits."""
    frames: list[Frame] = []
    more = True
    while more:
        frame = socket.recv(_LAST, copy=False)
        frames.append(frame.bytes if len(frame) <= _COPIED_BYTES else frame.buffer)
        more = frame.more  # a message arrives whole: the next frames are there
    return frames


def _set_common_options(socket: zmq.Socket[bytes]) -> None:
    # Otherwise one unclosed socket with unsent messages would block the end of the context for ever.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    # No protection against memory use: an unfinished multipart message counts against no limit. So only this user may
    # connect at all.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # The default of 30 s lets half-open connections fill the file table.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000)
    # They detect a frozen process, but not a hung Python: libzmq's own thread answers them.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2000)
