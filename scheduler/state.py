"""The scheduler as a state machine: a message or the time goes in, actions come out. No socket, no clock, no pid.

It holds promises, never the only copy: a gateway keeps each request until it has answered it, so the scheduler may die
at any time and nothing is lost. This file is the dispatch: a request is let in and queued, a batch is formed when a
worker has a free slot, its result is taken apart into replies. Each of the other decisions is an object of its own:

- which gateway waits for what, and that each request ends exactly once: `accounts.py`;
- which requests are let in: `admission.py`;
- what waits, and in which order: `batching.py`;
- which worker runs what next: `policy.py`;
- what the workers hold, and when one counts as lost: `fleet.py`;
- what runs again after a loss: `losses.py`.
"""

from __future__ import annotations

import logging

from common.errors import DeadlineExceeded, Overloaded
from common.metrics import Metrics, observe_all
from common.wire.codec import Message
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Goodbye,
    Hello,
    Join,
    Request,
    Result,
    StepTimes,
)
from common.wire.packing import Requests
from scheduler.accounts import Accounts, Gateway
from scheduler.actions import Action, Outbox, version_refusal
from scheduler.admission import RECOVERY_NS, Admission, no_capacity
from scheduler.batching import BatchQueue, Part, Pending
from scheduler.fleet import Fleet, Worker
from scheduler.inflight import BadResult, InFlight, check_result
from scheduler.losses import Losses
from scheduler.policy import Policy
from scheduler.pulse import PING_NS, Pulse
from scheduler.quarantine import Quarantine
from scheduler.results import Results

logger = logging.getLogger(__name__)

# Below this a late tick is the ordinary jitter of a busy machine.
_LAG_NS = 500_000_000


class Scheduler:
    """Every public method returns the actions that it asks for, in order; the caller performs them.

    A message changes only what waits and which worker has room. Batches are formed at every tick, when a worker is
    lost, and when the caller asks (`form_batches`): once for all the messages that it has heard.
    """

    def __init__(
        self,
        *,
        epoch: int,
        workers_total: int,
        max_queue_ms: int,
        metrics: Metrics,
        now_ns: int,
        latency_target_ms: int = 0,
    ) -> None:
        """For `latency_target_ms` see Fleet."""
        self.epoch = epoch
        self._metrics = metrics
        self._outbox = Outbox()
        self._admission = Admission(max_queue_ms)
        self._queue = BatchQueue()
        self._fleet = Fleet(epoch, latency_target_ms)
        self._policy = Policy(self._queue, self._fleet, now_ns)
        self._accounts = Accounts(self._outbox, metrics)
        self._results = Results(epoch, self._accounts, self._outbox)
        self._pulse = Pulse(
            epoch=epoch,
            workers_total=workers_total,
            accounts=self._accounts,
            admission=self._admission,
            queue=self._queue,
            fleet=self._fleet,
            outbox=self._outbox,
            metrics=metrics,
            now_ns=now_ns,
        )
        # An epoch is random, new at every start, and known to our own processes alone.
        quarantine = Quarantine(epoch.to_bytes(8, "little"))
        self._losses = Losses(quarantine, self._queue, self._fleet, self._accounts, self._pulse, self._outbox, metrics)
        self._last_turn_ns = now_ns

    # --- what arrives ---

    def on_gateway_message(self, peer: bytes, message: Message, now_ns: int) -> list[Action]:
        self._note_time(now_ns)
        gateway = self._accounts.get(peer)
        if isinstance(message, Join):
            self._on_join(peer, message, now_ns)
        elif gateway is None:
            # A past scheduler's gateway: it will notice that it gets no answers, and join.
            self._metrics.stale_messages.inc()
        else:
            gateway.last_heard_ns = now_ns
            if isinstance(message, Requests):
                self._on_requests(gateway, list(message.each()), len(message.token_ids), now_ns)
            elif isinstance(message, Request):
                self._on_requests(gateway, [message], len(message.token_ids), now_ns)
            elif isinstance(message, Cancel):
                self._accounts.cancel(gateway, message.request_id)
            elif isinstance(message, Goodbye):
                self._accounts.lose(gateway, f"goodbye, {message.reason}")
            elif isinstance(message, Beat):
                self._accounts.on_beat(gateway, message, epoch=self.epoch, now_ns=now_ns)
            else:
                logger.warning("%s sent a %s; ignored", gateway.name, type(message).__name__)
        return self._outbox.take()

    def form_batches(self, now_ns: int) -> list[Action]:
        """Give workers the requests that wait, as far as they have room now."""
        self._fill_slots(now_ns)
        return self._outbox.take()

    def on_worker_message(self, peer: bytes, message: Message, now_ns: int) -> list[Action]:
        self._note_time(now_ns)
        worker = self._fleet.get(peer)
        if isinstance(message, Hello):
            self._on_hello(peer, worker, message, now_ns)
        elif worker is None:
            self._metrics.stale_messages.inc()
        else:
            worker.last_heard_ns = now_ns
            if isinstance(message, Result):
                self._on_result(worker, message, now_ns)
            elif isinstance(message, BatchFailed):
                self._on_batch_failed(worker, message, now_ns)
            elif isinstance(message, Goodbye):
                logger.info("%s leaves: %s", worker.name, message.reason)
                self._losses.lose(worker, "goodbye", now_ns)
            elif isinstance(message, Beat):
                self._fleet.on_beat(worker, message, now_ns)
            elif isinstance(message, StepTimes):
                worker.times = message
            else:
                logger.warning("%s sent a %s; ignored", worker.name, type(message).__name__)
        return self._outbox.take()

    def on_worker_lost(self, peer: bytes, reason: str, now_ns: int) -> list[Action]:
        """The worker's process or connection is gone."""
        worker = self._fleet.get(peer)
        if worker is not None:
            self._losses.lose(worker, reason, now_ns)
        elif reason == "exited":
            self._losses.resolve_loss(peer, now_ns, has_died=True)
        return self.form_batches(now_ns)

    def on_undelivered(self, peer: bytes, message: Message) -> None:
        """This message could not be sent. That its peer is lost is told separately, in a moment."""
        worker = self._fleet.get(peer)
        if worker is not None and isinstance(message, Batch):
            worker.undelivered.add(message.batch_id)

    def on_gateway_lost(self, peer: bytes, reason: str, now_ns: int) -> list[Action]:
        """The gateway's process or connection is gone, and nothing waits for its work."""
        gateway = self._accounts.get(peer)
        if gateway is not None:
            self._accounts.lose(gateway, reason)
        return self._outbox.take()

    def knows(self, peer: bytes) -> bool:
        """Whether this peer has joined and is not lost, or is a lost worker whose death is still in question."""
        return peer in self._accounts or peer in self._losses.pending_losses or self._fleet.get(peer) is not None

    def on_tick(self, now_ns: int) -> list[Action]:
        """Do what time brings: pulses, expired requests, lost peers. Call it at `next_tick_ns`, or sooner."""
        self._note_time(now_ns)
        for worker, reason in self._fleet.lost(now_ns):
            self._outbox.kill(worker.peer)
            self._losses.lose(worker, reason, now_ns)
        for worker, batches in self._fleet.take_missing(now_ns):
            self._losses.run_again(worker, batches, now_ns)
        self._losses.resolve_overdue(now_ns)
        self._accounts.lose_silent(now_ns)
        if self._fleet.ready(now_ns):
            self._pulse.note_ready(now_ns)
        elif self._pulse.without_workers_ns(now_ns) >= RECOVERY_NS:
            for pending in self._queue.pending():
                self._accounts.settle(pending, no_capacity())
        if self._accounts.take_settled():
            self._queue.prune()
        for worker in self._fleet.recover(now_ns):
            logger.info("%s gets full batches again: it may have memory for them by now", worker.name)
        self._pulse.ping(now_ns)
        return self.form_batches(now_ns)

    def next_tick_ns(self) -> int:
        free_ns = self._fleet.next_free_ns(self._last_turn_ns) if len(self._queue) else None
        return self._pulse.next_ns if free_ns is None else min(self._pulse.next_ns, free_ns)

    def _note_time(self, now_ns: int) -> None:
        """If this process stood still (stopped, starved), forgive the silence of its peers: they were not heard."""
        lag_ns = now_ns - self._last_turn_ns - PING_NS
        self._last_turn_ns = now_ns
        if lag_ns <= _LAG_NS:
            return
        logger.warning("the scheduler stood still for %.1f s", lag_ns / 1e9)
        self._fleet.forgive(lag_ns, now_ns)
        self._accounts.forgive(lag_ns, now_ns)
        self._pulse.forgive(lag_ns, now_ns)

    # --- peers ---

    def _on_join(self, peer: bytes, join: Join, now_ns: int) -> None:
        if join.protocol_version != PROTOCOL_VERSION:
            self._outbox.to_gateway(peer, version_refusal(join.protocol_version))
        elif self._accounts.join(peer, join, now_ns):
            self._pulse.greet(peer, now_ns)

    def _on_hello(self, peer: bytes, known: Worker | None, hello: Hello, now_ns: int) -> None:
        if known is not None:
            known.last_heard_ns = now_ns
            return
        self._losses.resolve_returned(hello.pid, now_ns)
        former = self._fleet.named(hello.name)
        replaced: frozenset[bytes] = frozenset()
        if former is not None and former.pid == hello.pid:
            if peer in former.replaced:
                self._metrics.stale_messages.inc()  # sent before it came back under its new name
                return
            replaced = former.replaced | {former.peer}
            self._losses.lose(former, "reconnected", now_ns)  # the same process under a new routing id
        refusal = self._fleet.refusal(hello)
        if refusal is not None:
            logger.error("%s (pid %d) refused: %s", hello.name, hello.pid, refusal.message)
            self._outbox.to_worker(peer, refusal)
            return
        logger.info("%s is ready (pid %d, %s on %s)", hello.name, hello.pid, hello.facts.name, hello.facts.device)
        self._fleet.join(Worker(peer, hello.name, hello.pid, hello.facts, now_ns, replaced))
        self._pulse.note_ready(now_ns)
        self._pulse.note_progress(now_ns)
        self._accounts.serve(hello.facts, self._queue.pending())
        self._outbox.to_worker(peer, self._pulse.status(now_ns))
        self._pulse.announce(now_ns)

    # --- requests ---

    def _on_requests(self, gateway: Gateway, requests: list[Request], num_tokens: int, now_ns: int) -> None:
        """Requests have come together, with this many tokens in all."""
        # Common case: each would be let in even behind all that waits and all of these, so none is looked at alone.
        most_before = self._queue.num_tokens + num_tokens
        is_open = self._admission.is_open(
            queued_tokens=most_before,
            wait_ms=self._fleet.wait_ms(most_before, now_ns),
            deadline_ns=min(request.deadline_ns for request in requests),
            workers_ready=self._fleet.ready(now_ns),
            now_ns=now_ns,
        )
        for request in requests:
            pending = self._accounts.open(gateway, request, now_ns)
            if pending is None:
                continue
            self._policy.note_arrival(request, now_ns)
            if is_open or not request.opens or self._admit(pending, now_ns):
                self._losses.enqueue(Part(pending, 0, len(request.lengths)), now_ns)

    def _admit(self, pending: Pending, now_ns: int) -> bool:
        """Whether a new request may wait; else it has failed."""
        request = pending.request
        tokens_before = self._queue.tokens_before(request.lane, request.tenant, len(request.token_ids))
        error = self._admission.admit(
            request,
            queued_tokens=self._queue.num_tokens,
            tokens_before=tokens_before,
            wait_ms=self._fleet.wait_ms(tokens_before, now_ns),
            least_wait_ms=lambda: self._fleet.wait_ms(
                self._queue.tokens_before(request.lane, request.tenant, 1), now_ns
            ),
            workers_ready=self._fleet.ready(now_ns),
            without_workers_ns=self._pulse.without_workers_ns(now_ns),
            now_ns=now_ns,
        )
        if error is None:
            return True
        if isinstance(error, Overloaded):  # more will come: their gateway can refuse them by itself
            self._outbox.to_gateway(pending.gateway, self._pulse.status(now_ns))
        self._accounts.settle(pending, error)
        return False

    def _on_result(self, worker: Worker, result: Result, now_ns: int) -> None:
        if result.epoch == self.epoch:
            self._losses.run_again(worker, self._fleet.take_overtaken(worker, result.batch_id), now_ns)
        batch = self._released(worker, result.epoch, result.batch_id, now_ns)
        if batch is None:
            return
        try:
            check_result(batch, result)
        except BadResult as error:
            self._losses.drop_untrusted(worker, batch, error, now_ns)
            return
        worker.learn_dispatch_lead(batch, result.waited_us)
        if len(result.pieces):
            self._fleet.note_pieces(worker, result.pieces, now_ns)
            logger.warning(
                "%s had no memory for %d tokens at once; for a minute it gets %d",
                worker.name,
                batch.num_tokens,
                worker.fitting_tokens,
            )
        else:
            worker.step_time.observe(batch.num_tokens, batch.longest, result.step_us, is_typical=result.is_typical)
            if batch.predicted_ns and result.is_typical:
                self._metrics.step_prediction.observe(result.step_us * 1000 / batch.predicted_ns)
        worker.longest = max(worker.longest, batch.longest)
        self._pulse.note_progress(now_ns)
        self._metrics.batches.labels("done").inc()
        if worker.times is not None:
            times, worker.times = worker.times, None
            self._results.trace(worker, times, batch, now_ns)
        for part in batch.parts:
            self._losses.acquit(part)
        self._results.answer(batch, result)

    def _on_batch_failed(self, worker: Worker, failed: BatchFailed, now_ns: int) -> None:
        batch = self._released(worker, failed.epoch, failed.batch_id, now_ns)
        if batch is None:
            return
        logger.error("%s failed batch %d: %s", worker.name, batch.batch_id, failed.message)
        self._pulse.note_progress(now_ns)
        self._metrics.batches.labels("failed").inc()
        if failed.too_large is not None:
            self._losses.on_too_large(worker, batch, failed.too_large, now_ns)
        else:
            self._losses.on_failed(batch, now_ns)

    def _released(self, worker: Worker, epoch: int, batch_id: int, now_ns: int) -> InFlight | None:
        batch = self._fleet.release(worker, batch_id, now_ns) if epoch == self.epoch else None
        if batch is None:
            self._metrics.stale_messages.inc()
        return batch

    # --- what goes out ---

    def _fill_slots(self, now_ns: int) -> None:
        """Form a batch for every free slot, as long as something waits that is still in time."""
        self._expire(now_ns)
        while self._fleet.has_slot and (waiting := self._queue.waiting_lanes()):
            choice = self._policy.choose_worker(now_ns)
            self._fleet.keep_open(choice)
            worker = choice.worker
            if worker is None:
                return
            # Whatever no worker can begin before its deadline would run in vain.
            self._expire(now_ns + self._fleet.begins_in_ns(now_ns))
            parts = self._policy.take_batch(worker, waiting, now_ns)
            if not parts:
                return
            num_tokens = sum(part.num_tokens for part in parts)
            self._outbox.to_worker(worker.peer, self._fleet.assign(choice, parts, now_ns))
            self._metrics.batch_tokens.observe(num_tokens)
            observe_all(self._metrics.queue_seconds, [(now_ns - part.pending.arrived_ns) / 1e9 for part in parts])

    def _expire(self, begin_ns: int) -> None:
        """Fail the requests whose deadline has passed at `begin_ns`, when they could begin at the soonest."""
        for pending in self._queue.take_expired(begin_ns):
            self._accounts.settle(
                pending, DeadlineExceeded("The deadline passed while the request waited for a worker.")
            )
