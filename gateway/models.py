"""The models of a gateway: which one a request means, whether its tokenizer is loaded, and whether it is ready.

Each model has its own scheduler and its own tokenizer. So a dead scheduler, a full queue or a tokenizer that cannot be
loaded concerns that model alone. All models share the threads of this process and the number of requests that it may
hold. Each model has an equal part of that number. Otherwise requests that wait for a hung model would take all places.

A model without a name is the only one, and its worker tells how it is called. It gets every request, and the dialect's
parser refuses a request that names another model. Models with names are known from the start. A request that names
none goes to the first.
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
from gateway.parsing import is_served, model_not_found
from gateway.status import Readiness, Status
from gateway.threads import Threads
from gateway.tokenizing import Model, RequestTokenizer

logger = logging.getLogger(__name__)

# How long a request waits for a model that is not loaded yet. A gateway or a small model's worker starts in less, so
# that a restart fails no request. A client that waits longer is better told to come back.
_PATIENCE_S = 10.0


class ServedModel:
    """A model, its scheduler's client and its tokenizer. Within a `with` it has one running request more."""

    def __init__(self, client: SchedulerClient, threads: Threads, *, max_request_tokens: int) -> None:
        self.name = client.model  # None: its worker tells
        self.client = client
        self.tokenizer = RequestTokenizer(threads, max_tokens=max_request_tokens)
        self.num_running = 0  # requests
        self._threads = threads
        self._model: Model | None = None
        self._status: Status = "starting"
        self._reason = "No worker has loaded the model yet."
        self._loading: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # the model is loaded, or cannot be

    def __enter__(self) -> ServedModel:
        self.num_running += 1
        return self

    def __exit__(self, *raised: object) -> None:
        self.num_running -= 1

    @property
    def known_name(self) -> str | None:
        """Its name, also if its worker told it; None if no worker has."""
        if self.name is None and self.client.facts is not None:
            return self.client.facts.name
        return self.name

    @property
    def model(self) -> Model:
        """The model that is served now.

        Raises:
            Unavailable: no worker has loaded it yet, or its tokenizer is not loaded.
        """
        if self._model is None:
            raise Unavailable(self._reason + " Try again.", retry_after_s=1)
        return self._model

    async def wait_for_model(self, deadline_ns: int) -> Model:
        """The model that is served, after a bounded wait if it is starting or being replaced.

        Raises:
            Unavailable: it was not there in time, or its tokenizer cannot be loaded.
        """
        if self._model is None and not self._settled.is_set():
            patience_s = min(_PATIENCE_S, (deadline_ns - now_ns()) / 1e9)
            try:
                async with asyncio.timeout(patience_s):
                    await self._settled.wait()
            except TimeoutError:
                pass  # `model` raises with the reason
        return self.model

    def readiness(self) -> Readiness:
        readiness = self.client.readiness()
        if readiness.status == "ready" and self._model is None:
            return replace(readiness, status=self._status, reason=self._reason)
        return readiness

    def start(self) -> None:
        """Begin to talk to the scheduler, on the running event loop."""
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
        """Serve the model of `facts`: at once if it keeps its tokenizer, otherwise when the new one is loaded."""
        # With another tokenizer there is no model until it is loaded: the old one's tokens would give wrong vectors.
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
    """The models of a gateway, the default first.

    Args:
        clients: one for each model.
        max_requests: how many the gateway may hold at once.
        max_request_tokens: how many tokens one request may have.
    """

    def __init__(
        self, clients: Sequence[SchedulerClient], threads: Threads, *, max_requests: int, max_request_tokens: int
    ) -> None:
        self._all = [ServedModel(client, threads, max_request_tokens=max_request_tokens) for client in clients]
        self.by_name = {served.name: served for served in self._all if served.name is not None}
        self._max_requests = max(1, max_requests // len(self._all))

    @property
    def is_multi_model(self) -> bool:
        """Whether models have names that a request may choose by."""
        return bool(self.by_name)

    @property
    def default(self) -> ServedModel:
        """The model of a request that names none."""
        return self._all[0]

    @property
    def names(self) -> list[str]:
        """The names of all models. Raises Unavailable: the worker of a model without a name has not told it yet."""
        return [served.model.facts.name if served.name is None else served.name for served in self._all]

    def find(self, name: object) -> ServedModel:
        """The model that a client calls `name`; the default if this is no name.

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
        """The model that a client calls `name`, if it may have one request more. Enter it to count the request.

        Raises:
            NotFound: model_not_found.
            Overloaded: the gateway holds as many requests for it as it may.
        """
        served = self.find(name)
        if served.num_running >= self._max_requests:
            raise Overloaded(
                "This gateway holds as many requests for this model as it may. Try again a little later.",
                retry_after_s=1,
            )
        return served

    def readiness(self) -> Readiness:
        """That of all models together."""
        return Readiness.of_all({served.name: served.readiness() for served in self._all})

    def start(self) -> None:
        """Begin to talk to the schedulers, on the running event loop."""
        for served in self._all:
            served.start()

    async def wait_loaded(self) -> None:
        """Return when no tokenizer is being loaded."""
        await asyncio.gather(*(served.wait_loaded() for served in self._all))

    async def close(self) -> None:
        for served in self._all:
            await served.close()
