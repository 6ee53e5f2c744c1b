"""The models of a gateway: which one a request means, and what is true of all of them together.

Each has a client of its own scheduler and its own tokenizer, so that one whose scheduler is dead, whose queue is full
or whose tokenizer cannot be loaded says so of itself alone. What they share is this process: its threads, and how many
requests it may hold at once, of which no model may have more than its part; else the clients of one that stands still
would, by waiting, take the place of everybody's.

A model that was given no name is the only one, and is called as its worker says: whatever is asked is asked of it, and
the dialect's parser refuses what names another. Otherwise names are known from the start, and the first model is meant
where a request names none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.errors import InternalError, Overloaded, Unavailable
from common.wire.messages import ModelFacts
from common.wire.transport import now_ns
from gateway.client import SchedulerClient
from gateway.schema import is_served, model_not_found
from gateway.status import Readiness, Status
from gateway.threads import Threads
from gateway.tokenizing import Model, RequestTokenizer

logger = logging.getLogger(__name__)

# How long a request waits for the first model: longer than a gateway or a small model's worker takes to start, so that
# a restart fails nobody; not much longer, since a client is better told that nothing is there.
_PATIENCE_S = 10.0


class ServedModel:
    """A model: its scheduler's client, and what tokenizes for it. As a context, it is held for one request more."""

    def __init__(self, client: SchedulerClient, threads: Threads, *, max_request_tokens: int) -> None:
        self.name = client.model  # None: called as its worker says
        self.client = client
        self.tokenizer = RequestTokenizer(threads, max_tokens=max_request_tokens)
        self.num_running = 0  # requests that are held for it
        self._threads = threads
        self._model: Model | None = None
        self._status: Status = "starting"
        self._reason = "No worker has loaded the model yet."
        self._loading: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # there is a model, or there will be none

    def __enter__(self) -> ServedModel:
        self.num_running += 1
        return self

    def __exit__(self, *raised: object) -> None:
        self.num_running -= 1

    @property
    def known_name(self) -> str | None:
        if self.name is None and self.client.facts is not None:
            return self.client.facts.name
        return self.name

    @property
    def model(self) -> Model:
        """The model that is served now.

        Raises:
            Unavailable: none yet, or its tokenizer cannot be loaded.
        """
        if self._model is None:
            raise Unavailable(self._reason + " Try again.", retry_after_s=1)
        return self._model

    async def wait_for_model(self, deadline_ns: int) -> Model:
        """The model that is served; while a process starts or a model is replaced, a request waits for it here.

        Raises:
            Unavailable: none came in good time, or its tokenizer cannot be loaded.
        """
        if self._model is None and not self._settled.is_set():
            patience_s = min(_PATIENCE_S, (deadline_ns - now_ns()) / 1e9)
            try:
                async with asyncio.timeout(patience_s):
                    await self._settled.wait()
            except TimeoutError:
                pass  # `model` says what is missing
        return self.model

    def readiness(self) -> Readiness:
        readiness = self.client.readiness()
        if readiness.status == "ready" and self._model is None:
            return replace(readiness, status=self._status, reason=self._reason)
        return readiness

    def start(self) -> None:
        """Begin to talk to the scheduler, on the running loop."""
        self.client.on_facts = self._on_facts
        self.client.start()
        if self.client.facts is not None:
            self._on_facts(self.client.facts)

    async def wait_loaded(self) -> None:
        """Return when no tokenizer is being loaded."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.client.close()

    def _on_facts(self, facts: ModelFacts) -> None:
        """Serve the model of `facts`; where it has another tokenizer, from when that is loaded."""
        # None: what workers run now is a new model, and the old one's tokens would give wrong vectors.
        self._model = None if self._model is None else self._model.with_facts(facts)
        if self._model is not None:
            return
        self._settled.clear()
        self._status, self._reason = "starting", "The model's tokenizer is being loaded."
        if self._loading is not None:
            self._loading.cancel()
        self._loading = asyncio.ensure_future(self._load(facts))

    async def _load(self, facts: ModelFacts) -> None:
        try:
            model = await self._threads.run(partial(Model.load, facts))
        except (OSError, ValueError, InternalError) as error:
            self._status = "unavailable"
            self._reason = "The model's tokenizer cannot be loaded; the gateway's log says why."
            self._settled.set()
            logger.error("the tokenizer of %s cannot be loaded: %s", facts.name, error)  # noqa: TRY400  # the text says it all
            return
        self._model = model
        self._settled.set()
        logger.info("serving %s: %d dimensions, %d tokens", facts.name, facts.dimensions, facts.max_tokens)


class Models:
    """All that are served, in the order in which they were named.

    Args:
        max_requests: that the gateway may hold at once.
        max_request_tokens: of one request.
    """

    def __init__(
        self, clients: Sequence[SchedulerClient], threads: Threads, *, max_requests: int, max_request_tokens: int
    ) -> None:
        self._all = [ServedModel(client, threads, max_request_tokens=max_request_tokens) for client in clients]
        self.by_name = {served.name: served for served in self._all if served.name is not None}
        self._max_requests = max(1, max_requests // len(self._all))

    @property
    def is_multi_model(self) -> bool:
        """Whether models have names of their own, which choose between them."""
        return bool(self.by_name)

    @property
    def default(self) -> ServedModel:
        """The one that is meant where none is named."""
        return self._all[0]

    @property
    def names(self) -> list[str]:
        """Raises Unavailable: one is not known yet."""
        return [served.model.facts.name if served.name is None else served.name for served in self._all]

    def find(self, name: object) -> ServedModel:
        """The model that a client calls `name`; the default where this is no name at all.

        Raises:
            NotFound: model_not_found.
        """
        if not isinstance(name, str) or not name:
            return self.default
        for served in self._all:
            if served.name is None or is_served(name, served.name):
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
        return Readiness.of_all({served.name: served.readiness() for served in self._all})

    def start(self) -> None:
        """Begin to talk to the schedulers, on the running loop."""
        for served in self._all:
            served.start()

    async def wait_loaded(self) -> None:
        """Return when no tokenizer is being loaded."""
        await asyncio.gather(*(served.wait_loaded() for served in self._all))

    async def close(self) -> None:
        for served in self._all:
            await served.close()
