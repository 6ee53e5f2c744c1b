"""Peers for tests: real sockets and the real protocol around a model that is a hash.

The oracle's vector depends on every token id of a sequence, on where its tokens of type 1 begin, on the span that is
asked for, and on nothing else, so a mixed-up, stale or half answer is visible in every bit. Its int8, binary and sparse
rows come from hashes of their own, and what a row has beyond its own bytes is noise, so that an answer in another
encoding, or one that reads too far, is wrong as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zmq

from common.config import SchedulerConfig
from common.metrics import Metrics
from common.run_dir import RunDir
from common.wire.codec import Frame, Message
from common.wire.messages import PROTOCOL_VERSION, Batch, Beat, Hello, ModelFacts, Ping, Result, cu_seqlens
from common.wire.rows import ENCODINGS, SPARSE, row_bytes
from common.wire.transport import Dealer
from scheduler.server import Server

DIMENSIONS = 16

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]

FACTS = ModelFacts(
    name="oracle",
    folder="",
    fingerprint="0123456789abcdef",
    tokenizer_sha256="",
    architecture="Oracle",
    dtype="float32",
    device="cpu",
    attention="none",
    dimensions=DIMENSIONS,
    max_tokens=512,
    vocab_size=30_522,
    max_batch_tokens=64,
    pooling="mean",
    normalize=True,
    lower_case=False,
    tasks=["embed"],
    encodings=["float32"],
    prompts={},
    default_prompt_name=None,
    num_labels=0,
    labels=[],
    score_activation="",
    pair_template="",
    instruction=None,
    separator_id=None,
    include_prompt=True,
    has_token_types=False,
)
QUANTISING_FACTS = dataclasses.replace(FACTS, encodings=["float32", "int8", "binary"])


def oracle_vector(token_ids: TokenIds, dimensions: int = DIMENSIONS) -> npt.NDArray[np.float32]:
    """The one right answer for a sequence: float32 [dimensions], from a hash of its ids."""
    vector = oracle_row(token_ids, "float32", dimensions)
    assert vector.dtype == np.float32
    return vector  # type: ignore[return-value]  # of this encoding


def oracle_row(
    token_ids: TokenIds,
    encoding: str,
    dimensions: int = DIMENSIONS,
    *,
    type_start: int | None = None,
    span: tuple[int, int] | None = None,
) -> npt.NDArray[np.float32] | npt.NDArray[np.int8] | npt.NDArray[np.uint8]:
    """The one right answer for a span of a sequence, by default for all of it.

    float32 or int8 [dimensions], uint8 [dimensions / 8] of binary, uint8 [bytes] of sparse: up to four values.
    """
    length = len(token_ids)
    salt = b"" if encoding == "float32" else encoding.encode()
    if type_start not in (None, length):
        salt += b" types %d" % type_start
    if span not in (None, (0, length)):
        salt += b" span %d %d" % span
    if encoding == "float32":
        return np.frombuffer(_digest(token_ids, salt, 2 * DIMENSIONS), dtype="<u2").astype(np.float32)[:dimensions]
    if encoding == "int8":
        return np.frombuffer(_digest(token_ids, salt, DIMENSIONS), dtype=np.int8)[:dimensions]
    if encoding == "sparse":
        count, *numbers = np.frombuffer(_digest(token_ids, salt, 10), dtype="<u2").tolist()
        count %= 5
        columns = np.cumsum(numbers[:count], dtype="<i4")
        parts = (np.array([count], dtype="<i4"), columns, np.array(numbers[:count], dtype="<f4"))
        return np.frombuffer(b"".join(part.tobytes() for part in parts), dtype=np.uint8)
    assert encoding == "binary"
    assert dimensions % 8 == 0
    return np.frombuffer(_digest(token_ids, salt, DIMENSIONS // 8), dtype=np.uint8)[: dimensions // 8]


def oracle_rows(batch: Batch) -> npt.NDArray[np.uint8]:
    """The right answer for each row of a batch: uint8 [rows, row bytes], as a worker sends it."""
    names = list(ENCODINGS)
    type_starts = batch.type_starts if len(batch.type_starts) else batch.lengths
    counts = batch.span_counts if len(batch.span_counts) else np.ones_like(batch.lengths)
    spans = iter(batch.spans.tolist() if len(batch.spans) else [(0, length) for length in batch.lengths.tolist()])
    answers = [
        oracle_row(
            batch.token_ids[start:stop], names[encoding], type_start=int(type_start), span=tuple(next(spans))
        ).view(np.uint8)
        for encoding, (start, stop), type_start, count in zip(
            batch.encodings, pairwise(cu_seqlens(batch.lengths)), type_starts, counts, strict=True
        )
        for _ in range(count)
    ]
    smallest = int(batch.encodings.min())
    num_bytes = max(map(len, answers)) if smallest == SPARSE else row_bytes(smallest, DIMENSIONS)
    rows = np.full((len(answers), num_bytes), 0xA5, dtype=np.uint8)
    for row, answer in zip(rows, answers, strict=True):
        row[: len(answer)] = answer
    return rows


class FakeWorker:
    """A worker on a thread of its own, with the real socket and handshake; `answer` decides what a batch comes to.

    `answer` returns the message to send, its frames where they are to be odd, or None to say nothing. With `released`,
    it answers none until that is set, and its beats go on. Its process, which a scheduler may kill, is a child that
    does nothing. Stop it with `close`; `mute` has it say nothing more, as if it were stopped, `hang_up` ends its
    connection and leaves the process.
    """

    def __init__(
        self,
        run_dir: str,
        name: str = "worker-0",
        *,
        facts: ModelFacts = FACTS,
        answer: Callable[[Batch], Message | list[Frame] | None] | None = None,
        released: threading.Event | None = None,
    ) -> None:
        self.batches: list[Batch] = []
        self.refusals: list[Message] = []
        self.welcomed = False
        self.process = subprocess.Popen(["sleep", "600"])
        self._hello = Hello(PROTOCOL_VERSION, name, self.process.pid, facts)
        self._answer = answer or oracle_result
        self._released = released
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = Dealer(self._context, RunDir(run_dir).address("workers"), "w")
        self._stop = threading.Event()
        self._mute = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._dealer.close()
            self._context.term()

    def mute(self) -> None:
        self._mute.set()

    def _run(self) -> None:
        epoch: int | None = None
        waiting: deque[Batch] = deque()
        num_unanswered = 0
        while not self._stop.is_set():
            if self._mute.is_set():
                self._stop.wait(0.02)
                continue
            self._dealer.send(self._hello if epoch is None else Beat(epoch, num_unanswered + len(waiting)))
            self._dealer.socket.poll(20)
            while (message := self._dealer.receive()) is not None:
                if isinstance(message, Ping):
                    epoch = message.epoch
                    self.welcomed = True
                elif isinstance(message, Batch):
                    self.batches.append(message)
                    waiting.append(message)
                else:
                    self.refusals.append(message)
            while waiting and (self._released is None or self._released.is_set()):
                reply = self._answer(waiting.popleft())
                if isinstance(reply, list):
                    self._dealer.socket.send_multipart(reply)
                elif reply is not None:
                    self._dealer.send(reply)
                else:
                    num_unanswered += 1


def _digest(token_ids: TokenIds, salt: bytes, num_bytes: int) -> bytes:
    return hashlib.shake_256(salt + np.asarray(token_ids, dtype="<i4").tobytes()).digest(num_bytes)


def oracle_result(batch: Batch) -> Result:
    return Result(batch.epoch, batch.batch_id, 0, 1000, True, np.zeros(0, dtype=np.int32), oracle_rows(batch))


class RunningScheduler:
    """The real scheduler's loop on a thread, for tests that need its sockets but not its process."""

    def __init__(self, run_dir: str, metrics: Metrics) -> None:
        RunDir(run_dir).prepare()
        self._stop_fd = os.eventfd(0)
        self._server = Server(SchedulerConfig(run_dir=run_dir), metrics)
        self._thread = threading.Thread(target=self._server.run, args=(self._stop_fd,), name="scheduler")
        self._thread.start()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self._server.close()
        os.close(self._stop_fd)
