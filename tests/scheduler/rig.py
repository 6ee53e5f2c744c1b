"""A scheduler driven by hand: messages and times in, actions out; and requests to drive it with."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from common.metrics import Metrics
from common.wire.codec import Message, decode, encode
from common.wire.messages import (
    NO_NUMBERS,
    PROTOCOL_VERSION,
    Batch,
    Beat,
    Hello,
    Join,
    ModelFacts,
    Reply,
    Request,
    Result,
)
from common.wire.packing import Replies, Requests
from scheduler.actions import Action, Kill
from scheduler.state import Scheduler
from tests.fakes import DIMENSIONS, FACTS, oracle_row, oracle_rows

EPOCH = 7
MS = 1_000_000
SECOND = 1000 * MS

# Spans of three sequences; that of the last is all of it.
SEQUENCES = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
SPANS = [[(0, 1), (1, 3)], [(1, 2)], [(0, 4)]]

M = TypeVar("M")


class Rig:
    """A scheduler and a clock. What it asks for is kept until a test takes it."""

    def __init__(self, metrics: Metrics, *, latency_target_ms: int = 0) -> None:
        self.now_ns = SECOND
        self.core = Scheduler(
            epoch=EPOCH,
            workers_total=2,
            max_queue_ms=10_000,
            metrics=metrics,
            now_ns=self.now_ns,
            latency_target_ms=latency_target_ms,
        )
        self.killed: list[bytes] = []
        self._sent: list[tuple[bytes, Message]] = []

    def gateway(self, message: Message, peer: bytes = b"g0") -> None:
        self._perform(self.core.on_gateway_message(peer, message, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def worker(self, message: Message, peer: bytes = b"w0") -> None:
        self._perform(self.core.on_worker_message(peer, message, self.now_ns))
        self._perform(self.core.form_batches(self.now_ns))

    def worker_lost(self, peer: bytes = b"w0", reason: str = "exited") -> None:
        self._perform(self.core.on_worker_lost(peer, reason, self.now_ns))

    def gateway_lost(self, peer: bytes = b"g0") -> None:
        self._perform(self.core.on_gateway_lost(peer, "exited", self.now_ns))

    def tick(self, after_ns: int) -> None:
        """Let time pass, in the steps in which the loop would see it."""
        end_ns = self.now_ns + after_ns
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + 250 * MS)
            self._perform(self.core.on_tick(self.now_ns))

    def live(self, seconds: int, *, held: int = 0) -> None:
        """Let time pass while the gateway and the worker beat."""
        for _ in range(4 * seconds):
            self.tick(250 * MS)
            self.worker(Beat(EPOCH, held))
            self.gateway(Beat(EPOCH, 0))

    def join(self, peer: bytes = b"g0") -> None:
        self.gateway(Join(PROTOCOL_VERSION, peer.decode(), 1), peer)

    def hello(self, peer: bytes = b"w0", facts: ModelFacts = FACTS) -> None:
        self.worker(Hello(PROTOCOL_VERSION, peer.decode(), 1, facts), peer)

    def request(
        self,
        request_id: int,
        *sequences: list[int],
        deadline_s: float = 60,
        opens: bool = True,
        lane: str = "online",
        tenant: int = 0,
    ) -> None:
        deadline_ns = int(deadline_s * SECOND)
        self.gateway(
            make_request(request_id, *sequences, deadline_ns=deadline_ns, opens=opens, lane=lane, tenant=tenant)
        )

    def finish(
        self,
        batch: Batch,
        peer: bytes = b"w0",
        nonfinite: tuple[int, ...] = (),
        *,
        waited_us: int = 0,
        step_us: int = 5000,
        is_typical: bool = True,
    ) -> None:
        ids, nonfinite_rows = (EPOCH, batch.batch_id), np.array(nonfinite, dtype=np.int32)
        self.worker(Result(*ids, waited_us, step_us, is_typical, nonfinite_rows, oracle_rows(batch)), peer)

    def sent(self) -> list[tuple[bytes, Message]]:
        """All that is on the record, which is empty then."""
        sent, self._sent = self._sent, []
        return sent

    def take(self, kind: type[M], peer: bytes | None = None) -> list[M]:
        """The messages of one kind (to one peer) so far; they are taken off the record."""
        taken = [pair for pair in self._sent if isinstance(pair[1], kind) and peer in (None, pair[0])]
        self._sent = [pair for pair in self._sent if not any(pair is other for other in taken)]
        return [message for _, message in taken]  # type: ignore[misc]

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Kill):
                self.killed.append(action.peer)
            else:
                # What travels together is looked at reply by reply.
                messages = action.message.each() if isinstance(action.message, Replies) else [action.message]
                self._sent.extend((action.peer, message) for message in messages)


def make_request(
    request_id: int,
    *sequences: list[int],
    deadline_ns: int = 2**62,
    opens: bool = True,
    lane: str = "online",
    tenant: int = 0,
    encoding: str = "float32",
    type_starts: list[int] | None = None,
    spans: list[list[tuple[int, int]]] | None = None,
) -> Request:
    """A request for these sequences; `spans` are those of each."""
    return Request(
        request_id=request_id,
        fingerprint=FACTS.fingerprint,
        deadline_ns=deadline_ns,
        lane=lane,
        tenant=tenant,
        opens=opens,
        dimensions=DIMENSIONS,
        normalize=True,
        encoding=encoding,
        token_ids=np.array([token for sequence in sequences for token in sequence], dtype=np.int32),
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        type_starts=np.array(type_starts or [], dtype=np.int32),
        span_counts=np.array([len(own) for own in spans or []], dtype=np.int32),
        spans=np.array([span for own in spans or [] for span in own], dtype=np.int32).reshape(-1, 2),
    )


def assert_rows(replies: list[Reply], sequences: list[list[int]], spans: list[list[tuple[int, int]]]) -> None:
    """The replies are all of a request's rows, each once, and each is the oracle's for its span."""
    expected = [
        oracle_row(ids, "float32", span=span) for ids, own in zip(sequences, spans, strict=True) for span in own
    ]
    places = [reply.first_row + index for reply in replies for index in range(len(reply.rows))]
    assert sorted(places) == list(range(len(expected)))
    rows = np.concatenate([reply.rows for reply in replies]).view(np.float32)
    np.testing.assert_array_equal(rows[np.argsort(places)], expected)


def ids(batch: Batch) -> list[int]:
    return batch.token_ids.tolist()


def in_pieces(rig: Rig, batch: Batch, *pieces: int) -> None:
    rows = oracle_rows(batch)
    rig.worker(Result(EPOCH, batch.batch_id, 0, 5000, True, NO_NUMBERS, rows, np.array(pieces, dtype=np.int32)))


def lengths_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.lengths.tolist() for batch in batches]


def together(*requests: Request) -> Requests:
    """Requests as they come to the scheduler."""
    message = decode([bytes(frame) for frame in encode(Requests.of(requests))])
    assert isinstance(message, Requests)
    return message


def run(rig: Rig, batch: Batch, ms: int) -> None:
    """Let so much time pass, in which this batch runs."""
    rig.tick(ms * MS)
    rig.worker(Beat(EPOCH, 2))
    rig.finish(batch, step_us=ms * 1000)


def learn(rig: Rig) -> None:
    """Show that a step takes a millisecond a token."""
    for request_id in (101, 102, 103):
        rig.request(request_id, [1] * {101: 4, 102: 16, 103: 64}[request_id], lane="backfill")
        (batch,) = rig.take(Batch)
        run(rig, batch, len(batch.token_ids))
