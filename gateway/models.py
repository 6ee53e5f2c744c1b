"""The models of a gateway: which one a request means, and what is true of all of them together.

Each has a client of its own scheduler and an encoder with its own tokenizer, so that one whose scheduler is dead, whose
queue is full or whose tokenizer cannot be loaded says so of itself alone. What they share is this process: its threads,
and how many requests it may hold at once, of which none of several may have more than its part; else the clients of one
that stands still would, by waiting, take the place of everybody's.

A suite of one model does not know its name before a worker tells it: whatever is asked of it is asked of that one, and
the dialect's parser refuses what names another. Of several, names are known from the start, and the first is meant
where a request names none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.errors import Overloaded
from gateway.client import Readiness, SchedulerClient
from gateway.parsing import is_served, model_not_found
from gateway.tokenizing import Encoder, Threads


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model: what it is asked by, and what tokenizes for it. As a context, it is held for one request more."""

    name: str | None  # None: it is the only one, and called as its worker says
    client: SchedulerClient
    encoder: Encoder
    num_running: int = 0  # requests that are held for it

    @property
    def known_name(self) -> str | None:
        if self.name is None and self.client.facts is not None:
            return self.client.facts.name
        return self.name

    def __enter__(self) -> ServedModel:
        self.num_running += 1
        return self

    def __exit__(self, *raised: object) -> None:
        self.num_running -= 1

    def readiness(self) -> Readiness:
        readiness = self.client.readiness()
        if readiness.status == "ready" and self.encoder.reason:
            return replace(readiness, status=self.encoder.status, reason=self.encoder.reason)
        return readiness


class Models:
    """All that are served, in the order in which they were named.

    Args:
        clients: of the only model, or of each of several by its name.
        max_requests: that the gateway may hold at once.
    """

    def __init__(
        self, clients: SchedulerClient | Mapping[str, SchedulerClient], threads: Threads, max_requests: int
    ) -> None:
        if isinstance(clients, Mapping):
            self.by_name = {name: ServedModel(name, client, Encoder(threads)) for name, client in clients.items()}
            self._all = list(self.by_name.values())
        else:
            self.by_name = {}  # of several only
            self._all = [ServedModel(None, clients, Encoder(threads))]
        self._max_requests = max(1, max_requests // len(self._all))

    @property
    def is_multi_model(self) -> bool:
        return bool(self.by_name)

    @property
    def default(self) -> ServedModel:
        """The one that is meant where none is named."""
        return self._all[0]

    @property
    def names(self) -> list[str]:
        """Raises Unavailable: of the only model none is known yet."""
        return list(self.by_name) or [self.default.encoder.model.facts.name]

    def find(self, name: object) -> ServedModel:
        """The model that a client calls `name`; the default where this is no name at all, or there is only one.

        Raises:
            NotFound: model_not_found.
        """
        if not self.is_multi_model or not isinstance(name, str) or not name:
            return self.default
        for own_name, served in self.by_name.items():
            if is_served(name, own_name):
                return served
        raise model_not_found("model")

    def reserve(self, name: object) -> ServedModel:
        """The model that is meant, where it may be held for one request more.

        Raises:
            NotFound: model_not_found.
            Overloaded: it has its part of all that the gateway may hold.
        """
        served = self.find(name)
        if served.num_running >= self._max_requests:
            raise Overloaded(
                "This gateway holds as many requests for this model as it may. Try again a little later.",
                retry_after_s=1,
            )
        return served

    def readiness(self) -> Readiness:
        """Of several together: ready where each is. The reason names those that are not."""
        found = {name: served.readiness() for name, served in self.by_name.items()}
        missing = {name: one for name, one in found.items() if one.status != "ready"}
        statuses = {one.status for one in missing.values()}
        return Readiness(
            "ready" if not missing else "unavailable" if "unavailable" in statuses else "starting",
            sum(one.workers_ready for one in found.values()),
            sum(one.workers_total for one in found.values()),
            " ".join(f"{name}: {one.reason}" for name, one in missing.items()),
        )

    def start(self) -> None:
        """Begin to talk to the schedulers, on the running loop."""
        for served in self._all:
            served.client.on_facts = served.encoder.on_facts
            served.client.start()
            if served.client.facts is not None:
                served.encoder.on_facts(served.client.facts)

    async def wait_loaded(self) -> None:
        """Return when no tokenizer is being loaded."""
        await asyncio.gather(*(served.encoder.wait_loaded() for served in self._all))

    async def close(self) -> None:
        for served in self._all:
            await served.encoder.close()
            await served.client.close()
