"""The gateway: its routes, what every answer has in common, start and stop.

A request goes one way: `_handle` (id, key, route) → `_run` (body, model) → a dialect's `parse` → `Executor.run` → the
dialect's `render` → back through `_handle`, which turns an exception into the error body and writes the headers.
aiohttp's own router and middlewares are not used. A dictionary is enough for a few fixed paths, and at thousands of
requests a second they would cost as much as everything in this file.

A gateway that stops is not ready and accepts no connection. It still answers each request that has arrived, or arrives
on an open connection, with `Connection: close`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web

from common import metrics as metrics_module
from common.config import GatewayConfig
from common.errors import (
    BadRequest,
    InternalError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestTimeout,
    ServiceError,
    TooLarge,
)
from common.metrics import Metrics
from common.wire.transport import now_ns
from gateway import openapi
from gateway.call import Call
from gateway.client import SchedulerClient
from gateway.edge import cors
from gateway.edge.auth import KeyCheck, settle_lane
from gateway.edge.body import BodyLimits, read_body
from gateway.edge.connection_balancer import Acceptor, ConnectionCounts
from gateway.edge.http import HttpLimits, Server
from gateway.edge.memory_budget import MemoryBudget
from gateway.error_responses import JSON, error_headers, render_error
from gateway.execute import Executor
from gateway.formats import OCTETS, as_written, check_finite, json_list, prefers_octets
from gateway.model_requests import EmbeddingRequest, LocalRequest, Matrix, ParsedRequest
from gateway.models import Models, ServedModel
from gateway.open_request import Rows
from gateway.parsing import Limits, Operation, read_fields, unsupported
from gateway.routes import operations, operations_by_path, pages
from gateway.schema import Fields, parse_object
from gateway.status import Readiness
from gateway.threads import JOIN_ON_LOOP, PARSE_ON_LOOP, RENDER_ON_LOOP, Threads
from gateway.tokenizing import Model

logger = logging.getLogger(__name__)

_SPARE_FILES = 64  # descriptors for everything but clients' connections
_MODELS_PATH = "/v1/models"

T = TypeVar("T")

Handler = Callable[[Call], Awaitable[web.Response]]


@dataclass(frozen=True, slots=True)
class _Route:
    pattern: str  # the metrics' label
    handlers: dict[str, Handler]  # by method


class Gateway:
    """The HTTP side of a running event loop.

    Args:
        clients: one for each model, the default's first. The gateway starts and closes them.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clients: Sequence[SchedulerClient],
        metrics: Metrics,
        *,
        keys: KeyCheck | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        # Cached, since finding a label's own metric by its name takes 2 µs.
        self._requests_of, self._seconds_of = cache(metrics.requests.labels), cache(metrics.request_seconds.labels)
        self._keys = keys or KeyCheck()
        self._executor = Executor(config, metrics)
        self._origins = cors.parse_origins(config.cors_origins)
        self._threads = Threads(config.tokenizer_threads)
        self._models = Models(
            clients,
            self._threads,
            max_requests=config.max_concurrent_requests,
            max_request_tokens=config.max_request_tokens,
        )
        http_limits = HttpLimits(
            config.header_timeout_s, config.keepalive_timeout_s, _max_connections(config), config.write_timeout_s
        )
        self._body_limits = BodyLimits(config.max_body_bytes, config.body_timeout_s, config.min_body_bytes_per_s)
        self._memory = MemoryBudget(config.max_held_bytes)
        self._server_facts = operations.ServerFacts(config, http_limits, self._body_limits)
        self._server = Server(
            self._handle, http_limits, partial(self._count, "none"), partial(cors.answer_headers, self._origins)
        )
        self._acceptor: Acceptor | None = None
        self._num_running = 0
        self._draining = False
        self._created_s = int(time.time())
        self._document = openapi.document(self._server_facts.version)
        self._limits = Limits(config.max_inputs, config.auto_truncate)
        questions: dict[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/info": self._info,
            "/openapi.json": self._openapi,
            "/metrics": self._metrics_text,
            _MODELS_PATH: self._list_models,
            **{path: partial(self._page, page) for path, page in pages.load().items()},
        }
        self._routes = {path: _Route(path, {"GET": answer, "HEAD": answer}) for path, answer in questions.items()}
        for path, operations_there in operations_by_path().items():
            route = self._routes.setdefault(path, _Route(path, {}))
            route.handlers["POST"] = partial(self._admit, operations_there)
        self._model_route = _Route(_MODELS_PATH + "/{id}", {"GET": self._one_model, "HEAD": self._one_model})

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket, which the gateway owns from now on."""
        self._models.start()
        counts = ConnectionCounts(self._config.run_dir, self._config.slot)
        self._acceptor = Acceptor(sock, self._server, lambda: self._server.num_open, counts)

    async def wait_loaded(self) -> None:
        """Return when no tokenizer is being loaded."""
        await self._models.wait_loaded()

    async def drain(self) -> None:
        """Accept no connection; return when every request is answered, or cut off at the end of the drain's time."""
        self._draining = True
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._server.drain(self._config.drain_timeout_s)

    def abort(self) -> None:
        """Cut off every connection at once."""
        self._draining = True
        self._server.abort()

    async def close(self) -> None:
        """Close threads and sockets. Call `drain` first."""
        if self._acceptor is not None:
            await self._acceptor.close()
        self._server.abort()
        await self._models.close()
        self._threads.close()

    # --- every request ---

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        call = Call(request)
        route = self._route(call.path)
        pattern = "unknown" if route is None else route.pattern
        try:
            response = await self._answer(call, route)
        except ServiceError as error:
            if isinstance(error, InternalError):
                logger.error(  # noqa: TRY400  # only the traceback of a cause is of use
                    "request %s failed: %s", call.request_id, error, exc_info=error.__cause__
                )
            response = self._refusal(call, error)
            # Its frames hold a body, and the future that holds the error: free them now, without the garbage collector.
            error.__traceback__ = None
        except asyncio.CancelledError:
            # The connection is gone, so no client would read an answer.
            self._metrics.clients_gone.inc()
            self._count(pattern, 499)
            logger.debug("request %s: 499, its client left", call.request_id)
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the request fails, not its connection; a panic in Rust is no Exception
            logger.exception("request %s failed", call.request_id)
            response = self._refusal(call, InternalError("This server failed; its log says why under the request id."))
        total_us = (now_ns() - call.start_ns) // 1000
        call.write_headers(response.headers, total_us)
        if self._origins:
            response.headers.update(cors.answer_headers(self._origins, request.headers.get("Origin")))
        if response.status == 405 and route is not None:
            response.headers["Allow"] = ", ".join(route.handlers)
        if self._draining or call.closes or self._memory.is_short:
            response.force_close()
        self._count(pattern, response.status)
        self._seconds_of(pattern).observe(total_us / 1e6)
        return response

    async def _answer(self, call: Call, route: _Route | None) -> web.Response:
        request = call.request
        if request.method == "OPTIONS" and route is not None:
            # A browser's preflight has no key. A page that is not allowed gets 405, as does any other OPTIONS.
            preflight = cors.preflight_headers(self._origins, request.headers, route.handlers)
            if preflight is not None:
                return web.Response(status=204, headers=preflight)
        else:
            call.key = self._keys.check(request, call.path)
        if route is None:
            raise NotFound("There is no such route; see the README for those that there are.")
        handler = route.handlers.get(request.method)
        if handler is None:
            raise MethodNotAllowed(f"This route takes {' and '.join(route.handlers)}.")
        return await handler(call)

    def _route(self, path: str) -> _Route | None:
        route = self._routes.get(path)
        if route is None and path.startswith(_MODELS_PATH + "/"):
            return self._model_route
        return route

    def _refusal(self, call: Call, error: ServiceError) -> web.Response:
        # The start of the next request is unknown: this body was not read to its end, or may never be sent.
        unread = isinstance(error, TooLarge | RequestTimeout | BadRequest) or "Expect" in call.request.headers
        call.closes = call.closes or unread
        return web.Response(body=render_error(error), status=error.status, headers=error_headers(error))

    def _count(self, pattern: str, status: int) -> None:
        self._requests_of(pattern, status).inc()

    # --- what a model answers ---

    async def _admit(self, operations: Sequence[Operation[Any]], call: Call) -> web.Response:
        if self._num_running >= self._config.max_concurrent_requests:
            raise Overloaded(
                "This gateway holds as many requests as it may. Try again a little later.", retry_after_s=1
            )
        with self._memory.hold() as call.held:
            self._num_running += 1
            try:
                return await self._run(operations, call)
            finally:
                self._num_running -= 1

    async def _run(self, operations: Sequence[Operation[Any]], call: Call) -> web.Response:
        fields, size_bytes = await self._read(call)
        with self._models.reserve(fields.get("model")) as call.served:
            model = await call.served.wait_for_model(call.deadline_ns)
            read = partial(read_fields, fields, operations, model.facts, self._limits)
            parsed = await self._parsed(call, read, size_bytes)
            if isinstance(parsed, LocalRequest):
                return await self._answer_locally(call, model, parsed)
            return await self._answer_from_model(call, model, parsed)

    async def _read(self, call: Call) -> tuple[Fields, int]:
        """The fields of a body, with the header's model if the body names none; the body's size in bytes."""
        call.set_deadline(self._config)
        try:
            body = await read_body(call.request, self._body_limits, call.remaining_s, call.held.grow_body_to)
        except Overloaded:
            call.closes = True  # there is no room to read the rest of the body
            raise
        fields = await self._parsed(call, partial(parse_object, body), len(body))
        if self._models.is_multi_model and "X-Model" in call.request.headers:
            fields.setdefault("model", call.request.headers["X-Model"])
        return fields, len(body)

    async def _answer_from_model(self, call: Call, model: Model, parsed: ParsedRequest) -> web.Response:
        request = parsed.request
        call.lane = settle_lane(call.key, request.lane, request.usual_lane)
        matrix = parsed.matrix if prefers_octets(call.request.headers.getall("Accept", ())) else None
        if matrix is not None and isinstance(request, EmbeddingRequest) and request.partial:
            raise unsupported("partial", "a bare matrix cannot tell whose rows are missing")
        output = await self._executor.run(call, model, request)
        size = output.rows.size + parsed.num_chars
        if matrix is not None:
            response = await self._rendered(call, partial(_octets, output.rows, matrix), size, RENDER_ON_LOOP)
        else:
            response = _json(await self._rendered(call, partial(parsed.render, output), size, RENDER_ON_LOOP))
        if call.key is not None and call.key.name is not None:
            self._metrics.key_tokens.labels(call.key.name).inc(output.num_tokens)
        return response

    async def _answer_locally(self, call: Call, model: Model, request: LocalRequest) -> web.Response:
        call.lane = settle_lane(call.key, request.lane, request.usual_lane)
        answers = await self._executor.answer_locally(call, model, request)
        return _json(await self._rendered(call, partial(json_list, answers), sum(map(len, answers)), JOIN_ON_LOOP))

    async def _parsed(self, call: Call, parse: Callable[[], T], size_bytes: int) -> T:
        """What `parse` returns. It runs on a thread if the body is large."""
        with call.parse:
            return parse() if size_bytes <= PARSE_ON_LOOP else await self._threads.run(parse)

    async def _rendered(self, call: Call, render: Callable[[], T], size: int, size_on_loop: int) -> T:
        """What `render` returns. It runs on a thread if the answer is larger than `size_on_loop`."""
        with call.render:
            return render() if size <= size_on_loop else await self._threads.run(render)

    # --- operations ---

    async def _health(self, call: Call) -> web.Response:
        return _typed(operations.health())

    async def _ready(self, call: Call) -> web.Response:
        served = self._asked_about(call)
        each: dict[str, Readiness] = {}
        if "X-Model" in call.request.headers:
            readiness = self._settled(served.readiness())
        else:
            readiness = self._settled(self._models.readiness())
            each = {name: self._settled(one.readiness()) for name, one in self._models.by_name.items()}
        response = _typed(operations.ready(readiness, served.known_name, each or None))
        if readiness.status != "ready":
            response.set_status(503)
            response.headers["Retry-After"] = "1"
        return response

    def _settled(self, readiness: Readiness) -> Readiness:
        """The same, unless this gateway is stopping."""
        return readiness.draining() if self._draining else readiness

    def _asked_about(self, call: Call) -> ServedModel:
        """The model that the header names, or the default. Raises NotFound."""
        return self._models.find(call.request.headers.get("X-Model"))

    async def _list_models(self, call: Call) -> web.Response:
        return _typed(operations.models(self._models.names, self._created_s))

    async def _one_model(self, call: Call) -> web.Response:
        name = unquote(call.path.removeprefix(_MODELS_PATH + "/").removesuffix("/"))
        return _typed(operations.model(name, self._models.names, self._created_s))

    async def _info(self, call: Call) -> web.Response:
        each = {name: one.client.facts for name, one in self._models.by_name.items()}
        return _typed(self._server_facts.info(self._asked_about(call).client.facts, each or None))

    async def _metrics_text(self, call: Call) -> web.Response:
        body = await asyncio.to_thread(metrics_module.render, self._config.run_dir, list(self._models.by_name))
        return web.Response(body=body, headers={"Content-Type": metrics_module.CONTENT_TYPE})

    async def _openapi(self, call: Call) -> web.Response:
        return _json(self._document)

    async def _page(self, page: pages.Page, call: Call) -> web.Response:
        return web.Response(body=page.body, headers=page.headers)


def _max_connections(config: GatewayConfig) -> int:
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(1, max_files - _SPARE_FILES))


def _octets(rows: Rows, matrix: Matrix) -> web.Response:
    """The bytes of the rows, little-endian, one row after the other. Raises NonfiniteOutput."""
    check_finite(rows, matrix.name_of)
    rows = as_written(rows, matrix.row_format)
    headers = {
        "Content-Type": OCTETS,
        "X-Embedding-Shape": f"{rows.shape[0]},{rows.shape[1]}",
        "X-Embedding-Dtype": rows.dtype.name,
    }
    return web.Response(body=rows.tobytes(), headers=headers)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": JSON})


def _typed(answer: msgspec.Struct) -> web.Response:
    return _json(msgspec.json.encode(answer))
