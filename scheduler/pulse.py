"""What every peer is told of the scheduler's state, four times a second and whenever the fleet changes.

Whether work moves is judged here too: a batch has finished lately, or no batch is due. Pure: time is an argument.
"""

from __future__ import annotations

from common.metrics import Metrics
from common.wire.messages import PROTOCOL_VERSION, Ping, Welcome
from scheduler.accounts import Accounts
from scheduler.actions import Outbox
from scheduler.admission import Admission
from scheduler.batching import BatchQueue
from scheduler.fleet import Fleet

PING_NS = 250_000_000

# The least time without a finished batch that counts as no progress.
_STALLED_NS = 10_000_000_000

_DEFAULT_PIECE_TOKENS = 1024  # until a worker has told its own budget


class Pulse:
    def __init__(
        self,
        *,
        epoch: int,
        workers_total: int,
        accounts: Accounts,
        admission: Admission,
        queue: BatchQueue,
        fleet: Fleet,
        outbox: Outbox,
        metrics: Metrics,
        now_ns: int,
    ) -> None:
        self._epoch = epoch
        self._workers_total = workers_total
        self._accounts = accounts
        self._admission = admission
        self._queue = queue
        self._fleet = fleet
        self._outbox = outbox
        self._metrics = metrics
        self._last_ready_ns = now_ns
        self._last_progress_ns = now_ns
        self.next_ns = now_ns  # when the next ping is due

    def note_ready(self, now_ns: int) -> None:
        """A worker is ready."""
        self._last_ready_ns = now_ns

    def note_progress(self, now_ns: int) -> None:
        """A batch has finished, or a worker has come."""
        self._last_progress_ns = now_ns

    def without_workers_ns(self, now_ns: int) -> int:
        """For how long no worker has been ready."""
        return now_ns - self._last_ready_ns

    def forgive(self, lag_ns: int, now_ns: int) -> None:
        """The scheduler itself stood still for this long."""
        self._last_ready_ns = min(self._last_ready_ns + lag_ns, now_ns)
        self._last_progress_ns = min(self._last_progress_ns + lag_ns, now_ns)

    def status(self, now_ns: int) -> Ping:
        ready = self._fleet.ready(now_ns)
        total = max(self._workers_total, ready)
        return Ping(self._epoch, ready, total, self._progressing(now_ns), self._admission.full(now_ns))

    def greet(self, peer: bytes, now_ns: int) -> None:
        """Answer a gateway's join."""
        self._outbox.to_gateway(peer, self._welcome(answers_join=True, now_ns=now_ns))
        self._outbox.to_gateway(peer, self.status(now_ns))

    def announce(self, now_ns: int) -> None:
        """The fleet has changed."""
        self._note_workers(self.status(now_ns))  # before any gateway is told, since it may look at the metrics then
        for gateway in self._accounts.all():
            self._outbox.to_gateway(gateway.peer, self._welcome(answers_join=False, now_ns=now_ns))
            self._outbox.to_gateway(gateway.peer, self.status(now_ns))

    def ping(self, now_ns: int) -> None:
        """Tell every peer, if it is time again."""
        if now_ns < self.next_ns:
            return
        self.next_ns = now_ns + PING_NS
        status = self.status(now_ns)
        for gateway in self._accounts.all():
            self._outbox.to_gateway(gateway.peer, status)
        for worker in self._fleet.all():
            self._outbox.to_worker(worker.peer, status)
        self._metrics.queued_tokens.set(self._queue.num_tokens)
        self._metrics.queued_sequences.set(self._queue.num_sequences)
        self._note_workers(status)
        self._metrics.gateways.set(len(self._accounts.all()))

    def _note_workers(self, status: Ping) -> None:
        self._metrics.workers.labels("ready").set(status.workers_ready)
        self._metrics.workers.labels("total").set(status.workers_total)

    def _welcome(self, *, answers_join: bool, now_ns: int) -> Welcome:
        facts = self._accounts.facts
        piece_tokens = facts.max_batch_tokens if facts else _DEFAULT_PIECE_TOKENS
        # Enough of one long request to keep every worker's two slots full. More would only stand before the others'.
        window_tokens = piece_tokens * 2 * max(self._fleet.ready(now_ns), 1)
        return Welcome(PROTOCOL_VERSION, self._epoch, answers_join, facts, piece_tokens, window_tokens)

    def _progressing(self, now_ns: int) -> bool:
        running = [batch for worker in self._fleet.all() for batch in worker.in_flight.values()]
        if not running and not len(self._queue):
            return True
        allowed_ns = max([_STALLED_NS, *(5 * batch.predicted_ns for batch in running)])
        # An idle fleet makes no progress, and needs none: count from the oldest batch that still runs.
        since_ns = max([self._last_progress_ns, *([min(b.sent_ns for b in running)] if running else [])])
        return now_ns - since_ns < allowed_ns
