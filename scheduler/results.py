"""How a batch's result becomes replies and traces: each request gets its own rows, from its own sequences."""

from __future__ import annotations

import logging

import numpy as np

from common.errors import NonfiniteOutput
from common.wire.codec import Message
from common.wire.messages import Reply, Result, StepTimes, Trace
from common.wire.packing import Replies
from scheduler.accounts import Accounts
from scheduler.actions import Outbox
from scheduler.batching import Part
from scheduler.fleet import Worker
from scheduler.inflight import InFlight

logger = logging.getLogger(__name__)


class Results:
    def __init__(self, epoch: int, accounts: Accounts, outbox: Outbox) -> None:
        self._epoch = epoch
        self._accounts = accounts
        self._outbox = outbox

    def answer(self, batch: InFlight, result: Result) -> None:
        """Send the gateways the rows of a result that fits its batch (`check_result`)."""
        nonfinite = set(result.nonfinite.tolist())
        replies: dict[bytes, list[Reply]] = {}  # by gateway
        row = 0
        for part in batch.parts:
            reply = self._reply_of(part, row, batch, result, nonfinite)
            if reply is not None:
                replies.setdefault(part.pending.gateway, []).append(reply)
            row += part.num_rows
        for peer, of_gateway in replies.items():
            self._reply(peer, of_gateway)

    def _reply_of(self, part: Part, row: int, batch: InFlight, result: Result, nonfinite: set[int]) -> Reply | None:
        """A part's rows, which begin at `row` of the result; None where its request has ended, or ends here."""
        pending = part.pending
        if pending.settled:
            return None
        first_row = pending.first_row(part.start)
        num_rows = part.num_rows
        if nonfinite and (bad := nonfinite.intersection(range(row, row + num_rows))):
            error = NonfiniteOutput("The model's output for this input is not finite.")
            self._accounts.settle(pending, error, pending.sequence_of(first_row + min(bad) - row))
            return None
        pending.unanswered -= part.num_sequences
        if pending.unanswered == 0:
            self._accounts.close(pending)
        return Reply(
            request_id=pending.request.request_id,
            first_row=first_row,
            queue_us=max(0, batch.sent_ns - pending.arrived_ns) // 1000,
            step_us=result.step_us,
            rows=result.rows[row : row + num_rows],
        )

    def _reply(self, peer: bytes, replies: list[Reply]) -> None:
        """Send a gateway its rows of a batch: single rows in one message, larger parts uncopied, each in its own."""
        single = [reply for reply in replies if len(reply.rows) == 1]
        messages: list[Message] = [reply for reply in replies if len(reply.rows) > 1]
        messages += [Replies.of(single)] if len(single) > 1 else single
        for message in messages:
            self._outbox.to_gateway(peer, message)

    def trace(self, worker: Worker, times: StepTimes, batch: InFlight, now_ns: int) -> None:
        """Tell the gateways when what happened to the requests of this batch that are traced."""
        if (times.epoch, times.batch_id) != (self._epoch, batch.batch_id):
            return
        num_sequences = sum(part.num_sequences for part in batch.parts)
        for part in batch.parts:
            pending = part.pending
            sent_ns = pending.request.times_ns.tolist()
            if pending.settled or not sent_ns:
                continue
            times_ns = np.array([*sent_ns, pending.arrived_ns, batch.sent_ns, *times.times_ns.tolist(), now_ns])
            if bool((times_ns[1:] < times_ns[:-1]).any()):
                logger.warning("%s or a gateway has another clock: request not traced", worker.name)
                return
            trace = Trace(
                pending.request.request_id, batch.batch_id, worker.name, num_sequences, batch.num_tokens, times_ns
            )
            self._outbox.to_gateway(pending.gateway, trace)
