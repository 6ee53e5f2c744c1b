"""What the state machine asks of its loop: messages to send, and processes to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from common.wire.codec import Message
from common.wire.messages import PROTOCOL_VERSION, Refuse


@dataclass(frozen=True, slots=True)
class ToGateway:
    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class ToWorker:
    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process behind this worker: it was given up, and may still be running."""

    peer: bytes


Action: TypeAlias = ToGateway | ToWorker | Kill


class Outbox:
    """The actions of one call, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def to_gateway(self, peer: bytes, message: Message) -> None:
        self._actions.append(ToGateway(peer, message))

    def to_worker(self, peer: bytes, message: Message) -> None:
        self._actions.append(ToWorker(peer, message))

    def kill(self, peer: bytes) -> None:
        self._actions.append(Kill(peer))

    def take(self) -> list[Action]:
        """All of them; the outbox is empty afterwards."""
        actions, self._actions = self._actions, []
        return actions


def version_refusal(version: int) -> Refuse:
    """The answer to a peer that speaks another version of the protocol."""
    return Refuse(
        "version",
        f"this scheduler speaks protocol {PROTOCOL_VERSION}, the peer {version}; install one version of hedgerow",
    )
