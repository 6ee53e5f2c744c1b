"""Lost workers and failed batches: what runs again, among whom, and what is given up. Pure: time is an argument.

Work that comes back goes to its old place in the queue. An input that was running when a worker died is a suspect
(`batching.py` has the steps); after three deaths its request fails (`quarantine.py` remembers it).

A connection that is gone may mean a death or not. Only a third loss waits until that is known: its parts are pending
until the process has exited, has come back, or 5 seconds have passed. After one or two losses an input runs again at
once. To be suspected wrongly costs it no more than a step with few others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from common.errors import InputQuarantined, InputTooLarge, InternalError, ServiceError, Unavailable
from common.metrics import Metrics
from scheduler.accounts import Accounts
from scheduler.actions import Outbox
from scheduler.batching import MAX_LOSSES, BatchQueue, Part
from scheduler.fleet import Fleet, Worker
from scheduler.inflight import BadResult, InFlight, without
from scheduler.pulse import Pulse
from scheduler.quarantine import Quarantine

logger = logging.getLogger(__name__)

# A worker whose connection is gone has died or lives. A death is known within milliseconds, or within a second where a
# GPU's memory has to be given back first; a living worker introduces itself again within a second. After 5 seconds
# without either, we assume that it lives.
_RESOLVED_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class PendingLoss:
    """What goes into quarantine if the worker that ran it has died, and did not just lose its connection."""

    pid: int
    parts: list[Part]  # this loss is counted in each
    until_ns: int


class Losses:
    def __init__(
        self,
        quarantine: Quarantine,
        queue: BatchQueue,
        fleet: Fleet,
        accounts: Accounts,
        pulse: Pulse,
        outbox: Outbox,
        metrics: Metrics,
    ) -> None:
        self.pending_losses: dict[bytes, PendingLoss] = {}  # by the worker that is gone
        self._quarantine = quarantine
        self._queue = queue
        self._fleet = fleet
        self._accounts = accounts
        self._pulse = pulse
        self._outbox = outbox
        self._metrics = metrics

    # --- workers ---

    def lose(self, worker: Worker, reason: str, now_ns: int) -> None:
        """Forget a worker, have what it held run again, and tell the gateways."""
        batches = self._fleet.leave(worker.peer)
        parts = [part for batch in batches for part in batch.parts]
        if reason != "goodbye":
            self._metrics.worker_losses.labels(reason).inc()
            logger.warning(
                "%s (pid %d) lost: %s; %d sequences run again",
                worker.name,
                worker.pid,
                reason,
                sum(part.num_sequences for part in parts),
            )
            # Only the batch that was running can have to do with the worker's end.
            running = batches[0].parts if batches and _may_have_run(worker, batches[0], reason) else []
            suspects = [replace(part, losses=part.losses + 1) for part in running]
            parts = parts[len(suspects) :]
            if reason == "disconnected" and any(part.losses >= MAX_LOSSES for part in suspects):
                self.pending_losses[worker.peer] = PendingLoss(worker.pid, suspects, now_ns + _RESOLVED_NS)
            else:
                self._blame(suspects, now_ns)
        for part in parts:
            self.retry(part, now_ns)
        self._pulse.announce(now_ns)

    def drop_untrusted(self, worker: Worker, batch: InFlight, error: BadResult, now_ns: int) -> None:
        """End a worker whose answer to a batch makes no sense, as if it had died of the batch."""
        logger.error("%s answered batch %d with nonsense: %s", worker.name, batch.batch_id, error)
        worker.in_flight = {batch.batch_id: batch, **worker.in_flight}
        self._outbox.kill(worker.peer)
        self.lose(worker, "bad_result", now_ns)

    def resolve_loss(self, peer: bytes, now_ns: int, *, has_died: bool) -> None:
        """The end of a worker whose connection was gone is known, or assumed.

        If it has not died, its input runs again, alone as before, and this loss is taken back.
        """
        loss = self.pending_losses.pop(peer, None)
        if loss is None:
            return
        if has_died:
            self._blame(loss.parts, now_ns)
            return
        for part in loss.parts:
            self.retry(replace(part, losses=part.losses - 1), now_ns)

    def resolve_returned(self, pid: int, now_ns: int) -> None:
        """This process lives: it has introduced itself."""
        for peer in [peer for peer, loss in self.pending_losses.items() if loss.pid == pid]:
            self.resolve_loss(peer, now_ns, has_died=False)

    def resolve_overdue(self, now_ns: int) -> None:
        """Processes of which nothing was heard for 5 seconds are assumed to live."""
        for peer in [peer for peer, loss in self.pending_losses.items() if loss.until_ns <= now_ns]:
            self.resolve_loss(peer, now_ns, has_died=False)

    def _blame(self, parts: list[Part], now_ns: int) -> None:
        """Run sequences again that have lost a worker. After the third loss refuse them and all copies that wait."""
        for part in parts:
            self._quarantine.blame(part, now_ns)
        for part in parts:
            self.retry(part, now_ns)
        deadly = [part for part in parts if part.losses >= MAX_LOSSES]
        for part in deadly:
            logger.warning("an input of %d tokens is in quarantine: three workers died of it", part.num_tokens)
        for pending in self._queue.pending() if deadly else ():
            whole = Part(pending, 0, len(pending.request.lengths))
            self._refuse_deadly(self._quarantine.split_by_suspicion(whole, now_ns))

    # --- batches ---

    def run_again(self, worker: Worker, batches: list[InFlight], now_ns: int) -> None:
        """Queue again what never arrived at a worker: a broken connection may come back without what it carried."""
        for batch in batches:
            logger.warning("batch %d never arrived at %s; it runs again", batch.batch_id, worker.name)
            for part in batch.parts:
                self.retry(part, now_ns)

    def on_failed(self, batch: InFlight, now_ns: int) -> None:
        """A batch has failed and its worker lives.

        The question is the same as after a death, which of these sequences did it, so the steps are the same.
        """
        for part in batch.parts:
            self.retry_failed(part, InternalError("The model failed on this input."), now_ns)

    def on_too_large(self, worker: Worker, batch: InFlight, position: int, now_ns: int) -> None:
        """The device had no memory for one sequence of a batch, even alone; its neighbours run again without blame."""
        try:
            others, part = without(batch, position)
        except BadResult as nonsense:
            self.drop_untrusted(worker, batch, nonsense, now_ns)
            return
        if part.num_tokens <= self._fleet.longest:
            # Inputs as long have run: this device has less memory, now or always, and another may have more.
            short = Unavailable("A worker is short of memory for inputs of this length. Try again.", retry_after_s=5)
            self.retry_failed(part, short, now_ns)
            self._fleet.rest(worker, now_ns)
        elif not part.pending.settled:
            too_large = InputTooLarge(
                f"This input has {part.num_tokens} tokens, more than the device has memory for. Split it or cut it."
            )
            self._accounts.settle(part.pending, too_large, part.start)
        for other in others:
            self.retry(other, now_ns)

    def retry_failed(self, part: Part, error: ServiceError, now_ns: int) -> None:
        """Run sequences again that may have failed a batch. After the third failure their request ends with `error`."""
        part = replace(part, failures=part.failures + 1)
        if part.suspicion < MAX_LOSSES:
            self.retry(part, now_ns)
        elif not part.pending.settled:
            self._accounts.settle(part.pending, error, part.start)

    def retry(self, part: Part, now_ns: int) -> None:
        """Queue sequences again, unless nothing waits for them or the model is another one by now."""
        pending = part.pending
        if pending.settled or self._accounts.refuse_other_model(pending):
            return
        if self.enqueue(part, now_ns):
            self._metrics.retried_sequences.inc(part.num_sequences)

    def enqueue(self, part: Part, now_ns: int) -> bool:
        """Queue sequences, suspects as such. False if one is deadly: then its request has failed."""
        if not self._quarantine and not part.losses:  # the common case: no input is suspected
            self._queue.push(part)
            return True
        parts = self._quarantine.split_by_suspicion(part, now_ns) if self._quarantine else [part]
        if self._refuse_deadly(parts):
            return False
        for known in parts:
            self._queue.push(known)
        return True

    def acquit(self, part: Part) -> None:
        """These sequences have run, and nothing happened."""
        if part.suspicion:
            self._quarantine.acquit(part)

    def _refuse_deadly(self, parts: list[Part]) -> bool:
        """Fail the request of these parts if workers are known to die of one of them; whether it did."""
        deadly = next((part for part in parts if part.losses >= MAX_LOSSES), None)
        if deadly is None:
            return False
        error = InputQuarantined(
            f"{MAX_LOSSES} workers died while they ran this input, lately. Leave it out of the request."
        )
        self._accounts.settle(deadly.pending, error, deadly.start)
        return True


def _may_have_run(worker: Worker, batch: InFlight, reason: str) -> bool:
    """Whether a worker that is lost for this reason may have run the first of the batches that it was sent."""
    if reason in {"desynchronized", "reconnected"} or batch.batch_id in worker.undelivered:
        return False
    return reason == "bad_result" or not worker.is_empty_handed
