"""The scheduler as a state machine: a message or the time goes in, actions come out. No socket, no clock, no pid.

It holds promises, never the only copy: a gateway keeps each request until it has answered it, so the scheduler may
die at any time and nothing is lost. Everything that it was asked is answered exactly once, by `_settle` or by the
last row of a reply; where a gateway is gone, nobody waits and nothing is sent.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from common.errors import (
    DeadlineExceeded,
    InputQuarantined,
    InputTooLarge,
    InternalError,
    NonfiniteOutput,
    Overloaded,
    ServiceError,
    Unavailable,
)
from common.lanes import LANES
from common.metrics import Metrics, observe_all
from common.wire.codec import Message
from common.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    BatchFailed,
    Beat,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Join,
    ModelFacts,
    Ping,
    Refuse,
    Reply,
    Request,
    Result,
    StepTimes,
    Trace,
    Welcome,
    max_rows,
)
from common.wire.packing import Replies, Requests
from scheduler.admission import RECOVERY_NS, Admission, no_capacity
from scheduler.batching import MAX_LOSSES, SHARES, BatchQueue, Part, Pending, Shares
from scheduler.fleet import (
    MISSING_NS,
    BadResult,
    Fleet,
    InFlight,
    Worker,
    check_result,
    with_loss,
    without,
)
from scheduler.quarantine import Quarantine
from scheduler.stepsize import StepSizes

logger = logging.getLogger(__name__)

PING_NS = 250_000_000

# A gateway that has said nothing for so long is not waiting for anything: its work is dropped, and if it comes back it
# joins again and sends it again.
_GATEWAY_LOST_NS = 5_000_000_000

# A worker whose connection is gone has died, and is heard of as a death in milliseconds, or in a second where a GPU's
# memory has to be given back first; or it lives, and introduces itself again within a second. For neither so long.
_FATE_NS = 5_000_000_000

# The least time without a finished batch that counts as no progress.
_STALLED_NS = 10_000_000_000

# Below this a late tick is the ordinary jitter of a busy machine.
_LAG_NS = 500_000_000

# Somebody came in a lane within so long: more may come. (Of queries that come five a second one in a hundred comes
# after a second without any, and in 20,000 one after two.)
_PRESENT_NS = 2_000_000_000

_DEFAULT_PIECE_TOKENS = 1024  # until a worker has told its own budget


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
    """End the process behind this worker: it was given up while it may still be running."""

    peer: bytes


Action: TypeAlias = ToGateway | ToWorker | Kill


@dataclass(frozen=True, slots=True)
class _Accused:
    """What would be in quarantine if the worker that was running it has died, and not just its connection."""

    pid: int
    parts: list[Part]  # with that loss
    until_ns: int


@dataclass(slots=True, eq=False)
class _Gateway:
    peer: bytes
    name: str
    pid: int
    last_heard_ns: int
    requests: dict[int, Pending]
    replaced: frozenset[bytes] = frozenset()  # the peers that this process was before
    short_since_ns: int | None = None  # since when it tells of more requests than there are
    answered: int = 0  # requests since its last beat
    answered_before: int = 0  # and between that and the one before it


class Scheduler:
    """Every public method returns the actions that it asks for, in order; the caller performs them.

    Batches are formed at every tick and where a worker is lost. What is said changes only what waits and who has room:
    a caller that has heard what there is, and has sent what answers it, has them formed then (`form_batches`, or a
    tick), once for all of it.
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
        self._workers_total = workers_total
        self._admission = Admission(max_queue_ms)
        self._queue = BatchQueue()
        self._shares = Shares()
        self._step_sizes = StepSizes()
        self._arrived_ns = dict.fromkeys(LANES, now_ns - _PRESENT_NS)  # when something last came, by lane
        self._last_tenant = 0  # of those who came online
        self._mixed_ns = now_ns - _PRESENT_NS  # when another one than before came
        self._fleet = Fleet(epoch, latency_target_ms)
        # An epoch is random, new at every start, and told to nobody but our own processes.
        self._quarantine = Quarantine(epoch.to_bytes(8, "little"))
        self._accused: dict[bytes, _Accused] = {}  # by the worker that is gone
        self._gateways: dict[bytes, _Gateway] = {}
        self._facts: ModelFacts | None = None
        self._metrics = metrics
        self._actions: list[Action] = []
        self._next_arrival = 1
        self._needs_pruning = False
        self._last_ready_ns = now_ns
        self._last_progress_ns = now_ns
        self._last_turn_ns = now_ns
        self._next_ping_ns = now_ns

    # --- what arrives ---

    def on_gateway_message(self, peer: bytes, message: Message, now_ns: int) -> list[Action]:
        self._note_time(now_ns)
        gateway = self._gateways.get(peer)
        if isinstance(message, Join):
            self._on_join(peer, message, now_ns)
        elif gateway is None:
            # A past scheduler's gateway: it will notice that nobody answers, and join.
            self._metrics.stale_messages.inc()
        else:
            gateway.last_heard_ns = now_ns
            if isinstance(message, Requests):
                self._on_requests(gateway, list(message.each()), len(message.token_ids), now_ns)
            elif isinstance(message, Request):
                self._on_requests(gateway, [message], len(message.token_ids), now_ns)
            elif isinstance(message, Cancel):
                self._on_cancel(gateway, message)
            elif isinstance(message, Goodbye):
                self._lose_gateway(gateway, f"goodbye, {message.reason}")
            elif isinstance(message, Beat):
                self._on_gateway_beat(gateway, message, now_ns)
            else:
                logger.warning("%s sent a %s; ignored", gateway.name, type(message).__name__)
        return self._take_actions()

    def form_batches(self, now_ns: int) -> list[Action]:
        """Give workers what waits, as far as they have room for it now."""
        self._fill_slots(now_ns)
        return self._take_actions()

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
                self._lose(worker, "goodbye", now_ns)
            elif isinstance(message, Beat):
                self._fleet.on_beat(worker, message, now_ns)
            elif isinstance(message, StepTimes):
                worker.times = message
            else:
                logger.warning("%s sent a %s; ignored", worker.name, type(message).__name__)
        return self._take_actions()

    def on_worker_lost(self, peer: bytes, reason: str, now_ns: int) -> list[Action]:
        """The worker's process or connection is gone."""
        worker = self._fleet.get(peer)
        if worker is not None:
            self._lose(worker, reason, now_ns)
        elif reason == "exited":
            self._judge(peer, now_ns, has_died=True)
        return self.form_batches(now_ns)

    def on_undelivered(self, peer: bytes, message: Message) -> None:
        """This could not be sent: nobody takes it. That its worker is lost is told as well, in a moment."""
        worker = self._fleet.get(peer)
        if worker is not None and isinstance(message, Batch):
            worker.undelivered.add(message.batch_id)

    def on_gateway_lost(self, peer: bytes, reason: str, now_ns: int) -> list[Action]:
        """The gateway's process or connection is gone: nobody waits for its work."""
        gateway = self._gateways.get(peer)
        if gateway is not None:
            self._lose_gateway(gateway, reason)
        return self._take_actions()

    def knows(self, peer: bytes) -> bool:
        """Whether this gateway or worker is one that was let in and is not lost, or whose end is still of interest."""
        return peer in self._gateways or peer in self._accused or self._fleet.get(peer) is not None

    def on_tick(self, now_ns: int) -> list[Action]:
        """What time brings: pulses, expired requests, lost peers. Call it at `next_tick_ns`, or sooner."""
        self._note_time(now_ns)
        for worker, reason in self._fleet.lost(now_ns):
            self._actions.append(Kill(worker.peer))
            self._lose(worker, reason, now_ns)
        for worker, batches in self._fleet.take_missing(now_ns):
            self._run_again(worker, batches, now_ns)
        for peer in [peer for peer, accused in self._accused.items() if accused.until_ns <= now_ns]:
            self._judge(peer, now_ns, has_died=False)
        for gateway in [g for g in self._gateways.values() if now_ns - g.last_heard_ns >= _GATEWAY_LOST_NS]:
            self._lose_gateway(gateway, "silent")
        if self._fleet.ready(now_ns):
            self._last_ready_ns = now_ns
        elif now_ns - self._last_ready_ns >= RECOVERY_NS:
            for pending in self._queue.pending():
                self._settle(pending, no_capacity())
        if self._needs_pruning:
            self._queue.prune()
            self._needs_pruning = False
        for worker in self._fleet.recover(now_ns):
            logger.info("%s gets full batches again: it may have memory for them by now", worker.name)
        if now_ns >= self._next_ping_ns:
            self._next_ping_ns = now_ns + PING_NS
            self._ping(now_ns)
        return self.form_batches(now_ns)

    def next_tick_ns(self) -> int:
        free_ns = self._fleet.next_free_ns(self._last_turn_ns) if len(self._queue) else None
        return self._next_ping_ns if free_ns is None else min(self._next_ping_ns, free_ns)

    def _note_time(self, now_ns: int) -> None:
        """See whether this process stood still (stopped, starved): who seems silent since was merely not heard."""
        lag_ns = now_ns - self._last_turn_ns - PING_NS
        self._last_turn_ns = now_ns
        if lag_ns <= _LAG_NS:
            return
        logger.warning("the scheduler stood still for %.1f s", lag_ns / 1e9)
        self._fleet.forgive(lag_ns, now_ns)
        for gateway in self._gateways.values():
            gateway.last_heard_ns = min(gateway.last_heard_ns + lag_ns, now_ns)
            if gateway.short_since_ns is not None:
                gateway.short_since_ns = min(gateway.short_since_ns + lag_ns, now_ns)
        self._last_ready_ns = min(self._last_ready_ns + lag_ns, now_ns)
        self._last_progress_ns = min(self._last_progress_ns + lag_ns, now_ns)

    # --- peers ---

    def _on_join(self, peer: bytes, join: Join, now_ns: int) -> None:
        if join.protocol_version != PROTOCOL_VERSION:
            self._actions.append(ToGateway(peer, version_refusal(join.protocol_version)))
            return
        known = self._gateways.get(peer)
        former = next((g for g in self._gateways.values() if g.name == join.name and g.pid == join.pid), None)
        if former is not None and peer in former.replaced:
            self._metrics.stale_messages.inc()  # said before it came back as somebody new, and found after that
            return
        replaced = frozenset() if former is None else former.replaced | {former.peer}
        if former is not None and former is not known:
            self._lose_gateway(former, "joined again")  # the same process, over a new connection
        if known is None:
            logger.info("%s joined (pid %d)", join.name, join.pid)
            self._gateways[peer] = _Gateway(peer, join.name, join.pid, now_ns, {}, replaced)
        else:
            known.last_heard_ns = now_ns
        self._actions.append(ToGateway(peer, self._welcome(answers_join=True, now_ns=now_ns)))
        self._actions.append(ToGateway(peer, self._status(now_ns)))

    def _on_hello(self, peer: bytes, known: Worker | None, hello: Hello, now_ns: int) -> None:
        if known is not None:
            known.last_heard_ns = now_ns
            return
        for gone in [gone for gone, accused in self._accused.items() if accused.pid == hello.pid]:
            self._judge(gone, now_ns, has_died=False)
        former = self._fleet.named(hello.name)
        replaced: frozenset[bytes] = frozenset()
        if former is not None and former.pid == hello.pid:
            if peer in former.replaced:
                self._metrics.stale_messages.inc()  # said before it came back as somebody new, and found after that
                return
            replaced = former.replaced | {former.peer}
            self._lose(former, "reconnected", now_ns)  # the same process under a new routing id
        refusal = self._refusal(hello)
        if refusal is not None:
            logger.error("%s (pid %d) refused: %s", hello.name, hello.pid, refusal.message)
            self._actions.append(ToWorker(peer, refusal))
            return
        logger.info("%s is ready (pid %d, %s on %s)", hello.name, hello.pid, hello.facts.name, hello.facts.device)
        self._fleet.join(Worker(peer, hello.name, hello.pid, hello.facts, now_ns, replaced))
        self._last_ready_ns = self._last_progress_ns = now_ns
        self._facts = hello.facts
        for pending in self._queue.pending():
            self._refuse_other_model(pending, hello.facts)
        self._actions.append(ToWorker(peer, self._status(now_ns)))
        self._announce(now_ns)

    def _refuse_other_model(self, pending: Pending, facts: ModelFacts) -> bool:
        """Fail a request that was tokenized for another model than the one that would run it."""
        if pending.request.fingerprint == facts.fingerprint:
            return False
        self._settle(pending, Unavailable("The model was replaced. Send the request again.", retry_after_s=1))
        return True

    def _refusal(self, hello: Hello) -> Refuse | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return version_refusal(hello.protocol_version)
        if self._fleet.named(hello.name) is not None:
            return Refuse("duplicate_name", f"a worker named {hello.name} is already here; give each its own --slot")
        others = self._fleet.all()
        if others and others[0].facts.fingerprint != hello.facts.fingerprint:
            return Refuse(
                "model_mismatch",
                f"{others[0].name} serves {others[0].facts.name} ({others[0].facts.fingerprint}), "
                f"this worker {hello.facts.name} ({hello.facts.fingerprint}); one fleet serves one model",
            )
        return None

    def _lose(self, worker: Worker, reason: str, now_ns: int) -> None:
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
            # Only what it was running can have to do with its end.
            running = batches[0].parts if batches and _may_have_run(worker, batches[0], reason) else []
            suspects = [with_loss(part) for part in running]
            parts = parts[len(suspects) :]
            if reason == "disconnected" and any(part.losses >= MAX_LOSSES for part in suspects):
                self._accused[worker.peer] = _Accused(worker.pid, suspects, now_ns + _FATE_NS)
            else:
                self._blame(suspects, now_ns)
        for part in parts:
            self._retry(part, now_ns)
        self._announce(now_ns)

    def _blame(self, parts: list[Part], now_ns: int) -> None:
        """Run sequences again that have lost a worker, or refuse them and all copies that wait, if it was the third."""
        for part in parts:
            self._quarantine.blame(part, now_ns)
        for part in parts:
            self._retry(part, now_ns)
        deadly = [part for part in parts if part.losses >= MAX_LOSSES]
        for part in deadly:
            logger.warning("an input of %d tokens is in quarantine: three workers died of it", part.num_tokens)
        for pending in self._queue.pending() if deadly else ():
            self._refuse_deadly(self._quarantine.parted(Part(pending, 0, len(pending.request.lengths)), now_ns))

    def _judge(self, peer: bytes, now_ns: int, *, has_died: bool) -> None:
        """What became of a worker whose connection was gone is known, or as good as: so is whether its input is deadly.

        Else it runs again, alone as before, and without that loss. Only the third loss waits for this. After one or two
        an input runs at once, among suspects or alone, since to be one for nothing costs it no more than that.
        """
        accused = self._accused.pop(peer, None)
        if accused is None:
            return
        if has_died:
            self._blame(accused.parts, now_ns)
            return
        for part in accused.parts:
            self._retry(replace(part, losses=part.losses - 1), now_ns)

    def _run_again(self, worker: Worker, batches: list[InFlight], now_ns: int) -> None:
        """Queue again what never arrived at a worker: a connection that breaks may come back, without what it took."""
        for batch in batches:
            logger.warning("batch %d never arrived at %s; it runs again", batch.batch_id, worker.name)
            for part in batch.parts:
                self._retry(part, now_ns)

    def _lose_gateway(self, gateway: _Gateway, reason: str) -> None:
        logger.info(
            "%s (pid %d) is gone: %s; %d requests dropped", gateway.name, gateway.pid, reason, len(gateway.requests)
        )
        del self._gateways[gateway.peer]
        for pending in gateway.requests.values():
            pending.settled = True
        self._needs_pruning = True

    # --- requests ---

    def _on_requests(self, gateway: _Gateway, requests: list[Request], num_tokens: int, now_ns: int) -> None:
        """Requests of so many tokens in all have come together."""
        # Mostly each would be let in with all that waits and all of these before it: then no more is asked of any.
        # (More that waits takes no less time, but where a prediction passes from steps of some lengths to others'.)
        most_before = self._queue.num_tokens + num_tokens
        is_open = self._admission.is_open(
            queued_tokens=most_before,
            wait_ms=self._fleet.wait_ms(most_before, now_ns),
            deadline_ns=min(request.deadline_ns for request in requests),
            workers_ready=self._fleet.ready(now_ns),
            now_ns=now_ns,
        )
        for request in requests:
            pending = self._accept(gateway, request, now_ns)
            if pending is not None and (is_open or not request.opens or self._admit(pending, now_ns)):
                self._enqueue(Part(pending, 0, len(request.lengths)), now_ns)

    def _accept(self, gateway: _Gateway, request: Request, now_ns: int) -> Pending | None:
        """Take a request into the gateway's account; None where it is there already, or has failed at once."""
        pending = Pending(gateway.peer, request, self._next_arrival, now_ns, len(request.lengths))
        self._next_arrival += 1
        if request.request_id in gateway.requests:
            self._metrics.stale_messages.inc()  # sent twice around a reconnection; the first one stands
            return None
        gateway.requests[request.request_id] = pending
        if self._facts is not None and self._refuse_other_model(pending, self._facts):
            return None
        self._arrived_ns[request.lane] = now_ns
        if request.lane == "online" and request.tenant != self._last_tenant:
            self._last_tenant, self._mixed_ns = request.tenant, now_ns
        return pending

    def _admit(self, pending: Pending, now_ns: int) -> bool:
        """Whether a new request may wait; else it has failed."""
        request = pending.request
        tokens_before = self._queue.tokens_before(request.lane, request.tenant, len(request.token_ids))
        error = self._admission.refusal(
            request,
            queued_tokens=self._queue.num_tokens,
            tokens_before=tokens_before,
            wait_ms=self._fleet.wait_ms(tokens_before, now_ns),
            least_wait_ms=lambda: self._fleet.wait_ms(
                self._queue.tokens_before(request.lane, request.tenant, 1), now_ns
            ),
            workers_ready=self._fleet.ready(now_ns),
            without_workers_ns=now_ns - self._last_ready_ns,
            now_ns=now_ns,
        )
        if error is None:
            return True
        if isinstance(error, Overloaded):  # there will be more: their gateway can say it by itself
            self._actions.append(ToGateway(pending.gateway, self._status(now_ns)))
        self._settle(pending, error)
        return False

    def _on_gateway_beat(self, gateway: _Gateway, beat: Beat, now_ns: int) -> None:
        """One that waits for more than there is here has lost some of it on either way: have it join again.

        A beat is older than the answers that were sent since, so these are allowed for. Where so many are sent that
        they hide what was lost, it shows as soon as there are fewer.
        """
        expected = len(gateway.requests) + gateway.answered + gateway.answered_before
        gateway.answered, gateway.answered_before = 0, gateway.answered
        if beat.epoch != self.epoch or beat.num_held <= expected:
            gateway.short_since_ns = None
        elif gateway.short_since_ns is None:
            gateway.short_since_ns = now_ns
        elif now_ns - gateway.short_since_ns >= MISSING_NS:
            self._lose_gateway(gateway, f"it waits for {beat.num_held} requests, {len(gateway.requests)} are here")

    def _on_cancel(self, gateway: _Gateway, cancel: Cancel) -> None:
        pending = gateway.requests.pop(cancel.request_id, None)
        if pending is not None:
            pending.settled = True
            self._needs_pruning = True
            self._metrics.cancelled.inc()

    def _on_result(self, worker: Worker, result: Result, now_ns: int) -> None:
        if result.epoch == self.epoch:
            self._run_again(worker, self._fleet.take_overtaken(worker, result.batch_id), now_ns)
        batch = self._released(worker, result.epoch, result.batch_id, now_ns)
        if batch is None:
            return
        try:
            check_result(batch, result)
        except BadResult as error:
            self._distrust(worker, batch, error, now_ns)
            return
        worker.learn_lead(batch, result.waited_us)
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
        self._last_progress_ns = now_ns
        self._metrics.batches.labels("done").inc()
        if worker.times is not None:
            self._trace(worker, worker.times, batch, now_ns)
        nonfinite = set(result.nonfinite.tolist())
        replies: dict[bytes, list[Reply]] = {}  # by gateway
        row = 0
        for part in batch.parts:
            if part.suspicion:
                self._quarantine.acquit(part)
            reply = self._reply_of(part, row, batch, result, nonfinite)
            if reply is not None:
                replies.setdefault(part.pending.gateway, []).append(reply)
            row += part.num_rows
        for peer, of_gateway in replies.items():
            self._reply(peer, of_gateway)

    def _on_batch_failed(self, worker: Worker, failed: BatchFailed, now_ns: int) -> None:
        batch = self._released(worker, failed.epoch, failed.batch_id, now_ns)
        if batch is None:
            return
        logger.error("%s failed batch %d: %s", worker.name, batch.batch_id, failed.message)
        self._last_progress_ns = now_ns
        self._metrics.batches.labels("failed").inc()
        if failed.too_large is not None:
            self._on_too_large(worker, batch, failed.too_large, now_ns)
            return
        # Not this worker's death, yet the same question: which of these sequences did it? So the same ladder.
        for part in batch.parts:
            self._retry_failed(part, InternalError("The model failed on this input."), now_ns)

    def _on_too_large(self, worker: Worker, batch: InFlight, position: int, now_ns: int) -> None:
        """The device had no memory for one sequence of a batch, even alone; its neighbours run again without blame."""
        try:
            others, part = without(batch, position)
        except BadResult as nonsense:
            self._distrust(worker, batch, nonsense, now_ns)
            return
        if part.num_tokens <= self._fleet.longest:
            # As long ones have run: it is this device that has less memory, now or ever, and others may have more.
            short = Unavailable("A worker is short of memory for inputs of this length. Try again.", retry_after_s=5)
            self._retry_failed(part, short, now_ns)
            self._fleet.rest(worker, now_ns)
        elif not part.pending.settled:
            too_large = InputTooLarge(
                f"This input has {part.num_tokens} tokens, more than the device has memory for. Split it or cut it."
            )
            self._settle(part.pending, too_large, part.start)
        for other in others:
            self._retry(other, now_ns)

    def _retry_failed(self, part: Part, error: ServiceError, now_ns: int) -> None:
        """Run sequences again that may have failed a batch; `error` is what is told once they have too often."""
        part = replace(part, failures=part.failures + 1)
        if part.suspicion < MAX_LOSSES:
            self._retry(part, now_ns)
        elif not part.pending.settled:
            self._settle(part.pending, error, part.start)

    def _distrust(self, worker: Worker, batch: InFlight, error: BadResult, now_ns: int) -> None:
        """A worker's answer to a batch makes no sense: end it as if it had died of the batch."""
        logger.error("%s answered batch %d with nonsense: %s", worker.name, batch.batch_id, error)
        worker.in_flight = {batch.batch_id: batch, **worker.in_flight}
        self._actions.append(Kill(worker.peer))
        self._lose(worker, "bad_result", now_ns)

    def _released(self, worker: Worker, epoch: int, batch_id: int, now_ns: int) -> InFlight | None:
        batch = self._fleet.release(worker, batch_id, now_ns) if epoch == self.epoch else None
        if batch is None:
            self._metrics.stale_messages.inc()
        return batch

    def _reply_of(self, part: Part, row: int, batch: InFlight, result: Result, nonfinite: set[int]) -> Reply | None:
        """A part's rows, which begin at `row` of the result; None where nobody waits, or its request has failed."""
        pending = part.pending
        if pending.settled:
            return None
        first_row = pending.first_row(part.start)
        num_rows = part.num_rows
        if nonfinite and (bad := nonfinite.intersection(range(row, row + num_rows))):
            error = NonfiniteOutput("The model's output for this input is not finite.")
            self._settle(pending, error, pending.sequence_of(first_row + min(bad) - row))
            return None
        pending.unanswered -= part.num_sequences
        if pending.unanswered == 0:
            pending.settled = True
            self._forget(pending)
        return Reply(
            request_id=pending.request.request_id,
            first_row=first_row,
            queue_us=max(0, batch.sent_ns - pending.arrived_ns) // 1000,
            step_us=result.step_us,
            rows=result.rows[row : row + num_rows],
        )

    def _trace(self, worker: Worker, times: StepTimes, batch: InFlight, now_ns: int) -> None:
        """Tell the gateways whose requests of this batch are followed what happened to them when."""
        worker.times = None
        if (times.epoch, times.batch_id) != (self.epoch, batch.batch_id):
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
            self._actions.append(ToGateway(pending.gateway, trace))

    def _reply(self, peer: bytes, replies: list[Reply]) -> None:
        """Send a gateway what a batch has for it: single rows in one message, larger parts uncopied each in its own."""
        single = [reply for reply in replies if len(reply.rows) == 1]
        messages: list[Message] = [reply for reply in replies if len(reply.rows) > 1]
        messages += [Replies.of(single)] if len(single) > 1 else single
        self._actions.extend(ToGateway(peer, message) for message in messages)

    def _retry(self, part: Part, now_ns: int) -> None:
        pending = part.pending
        if pending.settled or (self._facts is not None and self._refuse_other_model(pending, self._facts)):
            return
        if self._enqueue(part, now_ns):
            self._metrics.retried_sequences.inc(part.num_sequences)

    def _enqueue(self, part: Part, now_ns: int) -> bool:
        """Let sequences wait, suspects as such; whether they do: else one is deadly, and its request has failed."""
        if not self._quarantine and not part.losses:  # as mostly: nothing is known against any
            self._queue.push(part)
            return True
        parts = self._quarantine.parted(part, now_ns) if self._quarantine else [part]
        if self._refuse_deadly(parts):
            return False
        for known in parts:
            self._queue.push(known)
        return True

    def _refuse_deadly(self, parts: list[Part]) -> bool:
        """Fail the request of sequences if workers are known to die of one; whether it did."""
        deadly = next((part for part in parts if part.losses >= MAX_LOSSES), None)
        if deadly is None:
            return False
        error = InputQuarantined(
            f"{MAX_LOSSES} workers died while they ran this input, lately. Leave it out of the request."
        )
        self._settle(deadly.pending, error, deadly.start)
        return True

    def _settle(self, pending: Pending, error: ServiceError, sequence: int | None = None) -> None:
        """Answer a request with its failure."""
        pending.settled = True
        self._needs_pruning = True
        self._forget(pending)
        self._metrics.refused.labels(error.code).inc()
        retry_after_ms = None if error.retry_after_s is None else int(error.retry_after_s * 1000)
        failure = Failure(pending.request.request_id, error.code, error.message, sequence, retry_after_ms)
        self._actions.append(ToGateway(pending.gateway, failure))

    def _forget(self, pending: Pending) -> None:
        gateway = self._gateways.get(pending.gateway)
        if gateway is not None and gateway.requests.pop(pending.request.request_id, None) is not None:
            gateway.answered += 1

    # --- what goes out ---

    def _fill_slots(self, now_ns: int) -> None:
        """Form a batch for every free slot, as long as something waits that is still in time."""
        self._expire(now_ns)
        # First what is looked at after every message, and mostly ends it.
        while self._fleet.has_slot and (waiting := self._queue.waiting_lanes()):
            worker = self._next_worker(now_ns)
            if worker is None:
                return
            # What nobody can begin in time would be run for nobody.
            self._expire(now_ns + self._fleet.begins_in_ns(now_ns))
            parts = self._next_batch(worker, waiting, now_ns)
            if not parts:
                return
            num_tokens = sum(part.num_tokens for part in parts)
            self._actions.append(ToWorker(worker.peer, self._fleet.assign(worker, parts, now_ns)))
            self._metrics.batch_tokens.observe(num_tokens)
            observe_all(self._metrics.queue_seconds, [(now_ns - part.pending.arrived_ns) / 1e9 for part in parts])

    def _next_batch(self, worker: Worker, waiting: list[str], now_ns: int) -> list[Part]:
        """What this worker is to run next, taken off the queue. `waiting`: the lanes in which something does."""
        most_rows = max_rows(worker.facts)
        if waiting == ["online"]:  # as mostly: nobody has to be asked what would be left for whom
            self._shares.clear()
            return self._queue.next_batch(self._fleet.most_tokens(worker), most_rows)
        budgets, own = self._budgets(worker, now_ns)
        costs_ms = {lane: self._fleet.step_ms(worker, own[lane]) or math.inf for lane in SHARES}
        first = self._shares.first(costs_ms)
        if first in own:
            budgets[first] = own[first]
        parts = self._queue.next_batch(budgets, most_rows, first)
        if parts:
            self._step_sizes.note(parts)
            if (ms := self._fleet.step_ms(worker, sum(part.num_tokens for part in parts))) is not None:
                self._shares.note(parts, ms, waiting, costs_ms)
        return parts

    def _expire(self, begin_ns: int) -> None:
        """Fail what waits and could begin then at the soonest, where its deadline has passed by then."""
        for pending in self._queue.expired(begin_ns):
            self._settle(pending, DeadlineExceeded("The deadline passed while the request waited for a worker."))

    def _next_worker(self, now_ns: int) -> Worker | None:
        """The worker to send a batch to now.

        A second slot is filled as late as it can be, so that who comes meanwhile joins; but at once where that could
        change nothing, since nobody comes whom lanes below would have to wait for, or since the batch is full already
        and nobody comes whose turn it would be.
        """
        num_tokens = self._queue.tokens_in("online")
        late = self._is_present("online", now_ns) and (
            now_ns - self._mixed_ns < _PRESENT_NS
            or any(num_tokens < self._fleet.most_tokens(worker) for worker in self._fleet.all())
        )
        return self._fleet.free_worker(now_ns, late=late)

    def _budgets(self, worker: Worker, now_ns: int) -> tuple[dict[str, int], dict[str, int]]:
        """The tokens of a step that work of each lane may be part of; of those below, also where it comes first.

        That is no less than its share of a step, since it gets no more of one that others fill up.
        """
        most = self._fleet.most_tokens(worker)
        online, score = self._is_present("online", now_ns), self._is_present("score", now_ns)
        if not (online or score):
            return dict.fromkeys(LANES, most), dict.fromkeys(SHARES, most)
        mean_length, num_online = self._queue.mean_length(SHARES), self._queue.tokens_in("online")
        small = self._step_sizes.small(worker.step_time, most, mean_length, num_online)
        budgets = {"online": most, "score": small.beside if online else most, "backfill": small.beside}
        # A sequence more, since what does not fit is not cut.
        shares = {lane: round(share * most + self._queue.mean_length((lane,))) for lane, share in SHARES.items()}
        return budgets, {lane: min(most, max(small.alone, shares[lane])) for lane in SHARES}

    def _is_present(self, lane: str, now_ns: int) -> bool:
        """Whether anybody waits there, or came a moment ago, so that others may come."""
        return now_ns - self._arrived_ns[lane] < _PRESENT_NS or lane in self._queue.waiting_lanes()

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _announce(self, now_ns: int) -> None:
        self._note_workers(self._status(now_ns))  # before anybody is told, who may look
        for peer in self._gateways:
            self._actions.append(ToGateway(peer, self._welcome(answers_join=False, now_ns=now_ns)))
            self._actions.append(ToGateway(peer, self._status(now_ns)))

    def _ping(self, now_ns: int) -> None:
        status = self._status(now_ns)
        self._actions.extend(ToGateway(peer, status) for peer in self._gateways)
        self._actions.extend(ToWorker(worker.peer, status) for worker in self._fleet.all())
        self._metrics.queued_tokens.set(self._queue.num_tokens)
        self._metrics.queued_sequences.set(self._queue.num_sequences)
        self._note_workers(status)
        self._metrics.gateways.set(len(self._gateways))

    def _note_workers(self, status: Ping) -> None:
        self._metrics.workers.labels("ready").set(status.workers_ready)
        self._metrics.workers.labels("total").set(status.workers_total)

    def _welcome(self, *, answers_join: bool, now_ns: int) -> Welcome:
        piece_tokens = self._facts.max_batch_tokens if self._facts else _DEFAULT_PIECE_TOKENS
        # Enough of one long request to keep every worker's two slots full. More would only stand before the others'.
        window_tokens = piece_tokens * 2 * max(self._fleet.ready(now_ns), 1)
        return Welcome(PROTOCOL_VERSION, self.epoch, answers_join, self._facts, piece_tokens, window_tokens)

    def _status(self, now_ns: int) -> Ping:
        ready = self._fleet.ready(now_ns)
        total = max(self._workers_total, ready)
        return Ping(self.epoch, ready, total, self._progressing(now_ns), self._admission.full(now_ns))

    def _progressing(self, now_ns: int) -> bool:
        running = [batch for worker in self._fleet.all() for batch in worker.in_flight.values()]
        if not running and not len(self._queue):
            return True
        allowed_ns = max([_STALLED_NS, *(5 * batch.predicted_ns for batch in running)])
        # An idle fleet makes no progress, and needs none: count from the oldest batch that still runs.
        since_ns = max([self._last_progress_ns, *([min(b.sent_ns for b in running)] if running else [])])
        return now_ns - since_ns < allowed_ns


def _may_have_run(worker: Worker, batch: InFlight, reason: str) -> bool:
    """Whether a worker that is lost for this reason may have run the first of the batches that were for it."""
    if reason in {"desynchronized", "reconnected"} or batch.batch_id in worker.undelivered:
        return False
    return reason == "bad_result" or not worker.is_empty_handed


def version_refusal(version: int) -> Refuse:
    """What a peer is told that speaks another version of the protocol."""
    return Refuse(
        "version",
        f"this scheduler speaks protocol {PROTOCOL_VERSION}, the peer {version}; install one version of hedgerow",
    )
