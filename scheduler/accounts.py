"""The gateways, and which requests each of them waits for. Pure: time is an argument.

A request is in its gateway's account from its arrival until its end: answered, failed or cancelled. `close` and
`settle` are the only ways to end one, so each ends exactly once. When a gateway is gone its account is dropped, and
nothing is sent.

The accounts are never the only copy: a gateway keeps each request until it has the answer, and sends it again to the
next scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import ServiceError, Unavailable
from common.metrics import Metrics
from common.wire.messages import Beat, Failure, Join, ModelFacts, Request
from scheduler.actions import Outbox
from scheduler.batching import Pending
from scheduler.fleet import MISSING_NS

logger = logging.getLogger(__name__)

# A gateway that is silent for this long waits for nothing: its work is dropped. If it comes back, it joins again and
# sends its requests again.
_LOST_NS = 5_000_000_000


@dataclass(slots=True, eq=False)
class Gateway:
    peer: bytes
    name: str
    pid: int
    last_heard_ns: int
    requests: dict[int, Pending] = field(default_factory=dict)  # without an end yet, by id
    replaced: frozenset[bytes] = frozenset()  # the peers that this process was before
    short_since_ns: int | None = None  # since when its beats tell of more requests than there are here
    answered: int = 0  # requests since its last beat
    answered_before: int = 0  # and between that beat and the one before it


class Accounts:
    def __init__(self, outbox: Outbox, metrics: Metrics) -> None:
        self.facts: ModelFacts | None = None  # of the model that is served; None until a worker has come
        self._gateways: dict[bytes, Gateway] = {}
        self._outbox = outbox
        self._metrics = metrics
        self._next_arrival = 1
        self._has_settled = False

    # --- gateways ---

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._gateways

    def get(self, peer: bytes) -> Gateway | None:
        return self._gateways.get(peer)

    def all(self) -> list[Gateway]:
        return list(self._gateways.values())

    def join(self, peer: bytes, join: Join, now_ns: int) -> bool:
        """Open an account, or keep the one that there is; False where the message is older than the peer's end.

        A process that joins over a new connection loses its account under the old one.
        """
        known = self._gateways.get(peer)
        former = next((g for g in self._gateways.values() if g.name == join.name and g.pid == join.pid), None)
        if former is not None and peer in former.replaced:
            self._metrics.stale_messages.inc()  # sent before the process came back under its new name
            return False
        replaced = frozenset() if former is None else former.replaced | {former.peer}
        if former is not None and former is not known:
            self.lose(former, "joined again")
        if known is None:
            logger.info("%s joined (pid %d)", join.name, join.pid)
            self._gateways[peer] = Gateway(peer, join.name, join.pid, now_ns, replaced=replaced)
        else:
            known.last_heard_ns = now_ns
        return True

    def on_beat(self, gateway: Gateway, beat: Beat, *, epoch: int, now_ns: int) -> None:
        """Forget a gateway that waits for more requests than are here, so that it joins again and sends them again.

        A beat is older than the answers that were sent since, so the answers of two beats are allowed for. A loss that
        they hide shows once fewer are sent.
        """
        expected = len(gateway.requests) + gateway.answered + gateway.answered_before
        gateway.answered, gateway.answered_before = 0, gateway.answered
        if beat.epoch != epoch or beat.num_held <= expected:
            gateway.short_since_ns = None
        elif gateway.short_since_ns is None:
            gateway.short_since_ns = now_ns
        elif now_ns - gateway.short_since_ns >= MISSING_NS:
            self.lose(gateway, f"it waits for {beat.num_held} requests, {len(gateway.requests)} are here")

    def lose(self, gateway: Gateway, reason: str) -> None:
        """Drop a gateway's account: nothing waits for its requests any more."""
        logger.info(
            "%s (pid %d) is gone: %s; %d requests dropped", gateway.name, gateway.pid, reason, len(gateway.requests)
        )
        del self._gateways[gateway.peer]
        for pending in gateway.requests.values():
            pending.settled = True
        self._has_settled = True

    def lose_silent(self, now_ns: int) -> None:
        for gateway in [g for g in self._gateways.values() if now_ns - g.last_heard_ns >= _LOST_NS]:
            self.lose(gateway, "silent")

    def forgive(self, lag_ns: int, now_ns: int) -> None:
        """The scheduler itself stood still for this long: no gateway was silent meanwhile."""
        for gateway in self._gateways.values():
            gateway.last_heard_ns = min(gateway.last_heard_ns + lag_ns, now_ns)
            if gateway.short_since_ns is not None:
                gateway.short_since_ns = min(gateway.short_since_ns + lag_ns, now_ns)

    # --- requests ---

    def open(self, gateway: Gateway, request: Request, now_ns: int) -> Pending | None:
        """Take a request into its gateway's account; None if it is there already, or has failed at once."""
        pending = Pending(gateway.peer, request, self._next_arrival, now_ns, len(request.lengths))
        self._next_arrival += 1
        if request.request_id in gateway.requests:
            self._metrics.stale_messages.inc()  # sent twice around a reconnection; the first one stands
            return None
        gateway.requests[request.request_id] = pending
        return None if self.refuse_other_model(pending) else pending

    def serve(self, facts: ModelFacts, waiting: Iterable[Pending]) -> None:
        """The model that is served from now on. What waits for another one fails."""
        self.facts = facts
        for pending in waiting:
            self.refuse_other_model(pending)

    def refuse_other_model(self, pending: Pending) -> bool:
        """Fail a request that was tokenized for another model than the one that would run it; whether it did."""
        if self.facts is None or pending.request.fingerprint == self.facts.fingerprint:
            return False
        self.settle(pending, Unavailable("The model was replaced. Send the request again.", retry_after_s=1))
        return True

    def cancel(self, gateway: Gateway, request_id: int) -> None:
        pending = gateway.requests.pop(request_id, None)
        if pending is not None:
            pending.settled = True
            self._has_settled = True
            self._metrics.cancelled.inc()

    def settle(self, pending: Pending, error: ServiceError, sequence: int | None = None) -> None:
        """Answer a request with its failure; `sequence` is the place of the one at fault."""
        self._has_settled = True
        self.close(pending)
        self._metrics.refused.labels(error.code).inc()
        retry_after_ms = None if error.retry_after_s is None else int(error.retry_after_s * 1000)
        failure = Failure(pending.request.request_id, error.code, error.message, sequence, retry_after_ms)
        self._outbox.to_gateway(pending.gateway, failure)

    def close(self, pending: Pending) -> None:
        """A request has its end: its failure, or the reply with its last rows."""
        pending.settled = True
        gateway = self._gateways.get(pending.gateway)
        if gateway is not None and gateway.requests.pop(pending.request.request_id, None) is not None:
            gateway.answered += 1

    def take_settled(self) -> bool:
        """Whether a request has ended while it may still wait in the queue, since this was last asked."""
        has_settled, self._has_settled = self._has_settled, False
        return has_settled
