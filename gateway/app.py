"""The gateway: routes, what is true of every answer, start and stop.

A request goes one way: `_handle` (id, key, route) → a route's handler → a dialect's `parse` → `Encoder` →
`SchedulerClient.submit` → the dialect's `render` → back through `_handle`, which turns whatever was raised into the
error body and puts the headers on. aiohttp's own router and middlewares are left out: with a few fixed paths a
dictionary is enough, and at thousands of requests a second they cost as much as everything here together.

Stopping: readiness goes off and nothing more is accepted, but what has arrived, or arrives on a connection that is
already open, is answered, with `Connection: close`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web

from common import metrics as metrics_module
from common.config import GatewayConfig
from common.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestTimeout,
    ServiceError,
    TooLarge,
)
from common.metrics import Metrics
from common.text.tokenization import TokenIds
from common.wire.messages import ModelFacts, Spans, max_rows
from common.wire.transport import now_ns
from gateway import openapi
from gateway.client import Embedded, OpenRequest, Options, Readiness, Rows, SchedulerClient
from gateway.edge import cors
from gateway.edge.auth import Key, KeyCheck, settle_lane
from gateway.edge.body import BodyLimits, read_body
from gateway.edge.budgets import Budgets
from gateway.edge.connection_balancer import Acceptor, ConnectionCounts
from gateway.edge.http import HttpLimits, Server
from gateway.edge.memory_budget import MemoryBudget, RequestMemory
from gateway.error_responses import JSON, error_headers, render_error, request_id_of, server_timing
from gateway.formats import OCTETS, as_written, check_finite, json_list, prefers_octets
from gateway.model_requests import (
    ContextualRequest,
    EmbeddingRequest,
    LabelsRequest,
    LocalRequest,
    Matrix,
    ModelOutput,
    PairsRequest,
    ParsedRequest,
    Request,
)
from gateway.models import Models, ServedModel
from gateway.parsing import Limits, Operation, read_fields, unsupported
from gateway.routes import operations, operations_by_path, pages
from gateway.schema import Fields, parse_object
from gateway.tokenizing import Model, Threads
from gateway.trace import RequestTrace

logger = logging.getLogger(__name__)

_SPARE_FILES = 64  # descriptors for everything that is no client's connection
_PARSE_ON_LOOP = 262_144  # bytes of a body; larger ones are parsed on a thread
_RENDER_ON_LOOP = 65_536  # values, or characters of documents, of an answer; more are rendered on a thread
_JOIN_ON_LOOP = 4_194_304  # bytes of an answer; those of a larger one are put together on a thread

_MODELS_PATH = "/v1/models"

# Of a partial request, each without one more of the inputs that the model fails on.
_MAX_RERUNS = 64

T = TypeVar("T")


class Stage:
    """How long a part of a request takes: as a context, what runs within it, also where that fails."""

    __slots__ = ("_entered_ns", "began_ns", "ended_ns", "us")

    def __init__(self) -> None:
        self.us = self.began_ns = self.ended_ns = 0

    def __enter__(self) -> None:
        self._entered_ns = now_ns()
        self.began_ns = self.began_ns or self._entered_ns

    def __exit__(self, *raised: object) -> None:
        self.ended_ns = now_ns()
        self.us += (self.ended_ns - self._entered_ns) // 1000


class Call:
    """One HTTP request on its way through: its name, its clock, and what its answer's headers say."""

    __slots__ = (
        "closes",
        "deadline_ns",
        "fingerprint",
        "held",
        "key",
        "lane",
        "parse",
        "path",
        "queue_us",
        "render",
        "request",
        "request_id",
        "served",
        "start_ns",
        "step_us",
        "tokenize",
        "trace",
    )

    def __init__(self, request: web.BaseRequest) -> None:
        self.start_ns = now_ns()
        self.request = request
        raw_path = request.raw_path
        # As it was sent: /v1/%65mbeddings or //v1/embeddings is no route, whatever it would decode to.
        path = (raw_path if raw_path.startswith("/") else request.rel_url.raw_path).partition("?")[0]
        self.path = path[:-1] if len(path) > 1 and path.endswith("/") else path  # one trailing slash says nothing
        self.request_id = request_id_of(request.headers.get("X-Request-Id"))
        self.deadline_ns = 0
        self.fingerprint: str | None = None
        self.held: RequestMemory | None = None  # of what a model is asked
        self.served: ServedModel  # the model that is asked, once that is known
        self.key: Key | None = None
        self.closes = False
        self.lane = ""
        self.parse, self.tokenize, self.render = Stage(), Stage(), Stage()
        self.queue_us = self.step_us = 0
        self.trace = RequestTrace() if request.headers.get("X-Trace") == "1" else None

    def trace_headers(self, trace: RequestTrace, timing: str) -> dict[str, str]:
        """What the answer's header says of a request that is followed."""
        parse, tokenize, render = self.parse, self.tokenize, self.render
        before_ns = (self.start_ns, parse.began_ns, parse.ended_ns, tokenize.ended_ns)
        return trace.headers(before_ns, (render.began_ns, render.ended_ns), timing)

    @property
    def tenant(self) -> int:
        """Whose request it is: a number for each key, 0 where none is needed."""
        return 0 if self.key is None else self.key.tenant


Handler = Callable[[Call], Awaitable[web.Response]]


@dataclass(frozen=True, slots=True)
class _Route:
    pattern: str  # the metrics' label
    handlers: dict[str, Handler]  # by method


class Gateway:
    """The HTTP side of a running event loop.

    `client` is that of the only model, or those of several by their names; it is started and closed here.
    """

    def __init__(
        self,
        config: GatewayConfig,
        client: SchedulerClient | Mapping[str, SchedulerClient],
        metrics: Metrics,
        *,
        keys: KeyCheck | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        # A label's own metric is found again by what it is called: 2 µs each.
        self._requests_of, self._seconds_of = cache(metrics.requests.labels), cache(metrics.request_seconds.labels)
        self._keys = keys or KeyCheck()
        self._budgets = Budgets(config.run_dir)
        self._origins = cors.parse_origins(config.cors_origins)
        self._threads = Threads(config.tokenizer_threads)
        self._models = Models(client, self._threads, config.max_concurrent_requests)
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
            route.handlers["POST"] = partial(self._admitted, partial(self._run, operations_there))
        self._model_route = _Route(_MODELS_PATH + "/{id}", {"GET": self._one_model, "HEAD": self._one_model})

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket, which is this object's from here on."""
        self._models.start()
        counts = ConnectionCounts(self._config.run_dir, self._config.slot)
        self._acceptor = Acceptor(sock, self._server, lambda: self._server.num_open, counts)

    async def wait_loaded(self) -> None:
        """Return when the tokenizers of the facts that were told last are loaded, or cannot be."""
        await self._models.wait_loaded()

    async def drain(self) -> None:
        """Accept nothing more; return when what was accepted is answered, or cut off at the end of its time."""
        self._draining = True
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._server.drain(self._config.drain_timeout_s)

    def abort(self) -> None:
        """Stop waiting: cut off every connection."""
        self._draining = True
        self._server.abort()

    async def close(self) -> None:
        """Let go of threads and sockets. Comes after `drain`."""
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
                logger.error(  # noqa: TRY400  # of the cause alone, where there is one, is the traceback of use
                    "request %s failed: %s", call.request_id, error, exc_info=error.__cause__
                )
            response = self._refusal(call, error)
            # Its frames hold the future that holds it, and a body: free now, not when garbage is looked for.
            error.__traceback__ = None
        except asyncio.CancelledError:
            # The connection is gone, and with it whoever would read an answer.
            self._metrics.clients_gone.inc()
            self._count(pattern, 499)
            logger.debug("request %s: 499, its client left", call.request_id)
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the one request fails, not its connection: a panic in Rust is no Exception
            logger.exception("request %s failed", call.request_id)
            response = self._refusal(call, InternalError("This server failed; its log says why under the request id."))
        total_us = (now_ns() - call.start_ns) // 1000
        headers = response.headers
        headers["X-Request-Id"] = call.request_id
        headers["Server"] = "hedgerow"
        headers["Server-Timing"] = server_timing(
            call.parse.us, call.tokenize.us, call.queue_us, call.step_us, call.render.us, total_us
        )
        if call.trace is not None:
            headers.update(call.trace_headers(call.trace, headers["Server-Timing"]))
        headers.update(cors.answer_headers(self._origins, request.headers.get("Origin")))
        if call.fingerprint is not None:
            headers["X-Model-Fingerprint"] = call.fingerprint
        if response.status == 405 and route is not None:
            headers["Allow"] = ", ".join(route.handlers)
        if self._draining or call.closes or self._memory.is_short:
            response.force_close()
        self._count(pattern, response.status)
        self._seconds_of(pattern).observe(total_us / 1e6)
        return response

    async def _answer(self, call: Call, route: _Route | None) -> web.Response:
        request = call.request
        if request.method == "OPTIONS" and route is not None:
            # A browser's preflight brings no key. For a page that is not allowed it is 405, as any OPTIONS is.
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
        # Where the next request begins is unknown: its body was not read to its end, or may not be sent at all.
        unread = isinstance(error, TooLarge | RequestTimeout | BadRequest) or "Expect" in call.request.headers
        call.closes = call.closes or unread
        return web.Response(body=render_error(error), status=error.status, headers=error_headers(error))

    def _count(self, pattern: str, status: int) -> None:
        self._requests_of(pattern, status).inc()

    # --- what a model answers ---

    async def _admitted(self, answer: Handler, call: Call) -> web.Response:
        if self._num_running >= self._config.max_concurrent_requests:
            raise Overloaded(
                "This gateway holds as many requests as it may. Try again a little later.", retry_after_s=1
            )
        with self._memory.hold() as call.held:
            self._num_running += 1
            try:
                return await answer(call)
            finally:
                self._num_running -= 1

    async def _run(self, operations: Sequence[Operation[Any]], call: Call) -> web.Response:
        fields, size_bytes = await self._read(call)
        with self._models.reserve(fields.get("model")) as call.served:
            model = await call.served.encoder.wait_for_model(call.deadline_ns)
            read = partial(read_fields, fields, operations, model.facts, self._limits)
            return await self._answer_parsed(call, model, await self._parsed(call, read, size_bytes))

    async def _answer_parsed(self, call: Call, model: Model, parsed: ParsedRequest | LocalRequest) -> web.Response:
        request = parsed if isinstance(parsed, LocalRequest) else parsed.request
        call.lane = settle_lane(call.key, request.lane, request.usual_lane)
        if isinstance(parsed, LocalRequest):
            return await self._answer_locally(call, model, parsed)
        matrix = parsed.matrix if prefers_octets(call.request.headers.getall("Accept", ())) else None
        if matrix is not None and isinstance(parsed.request, EmbeddingRequest) and parsed.request.partial:
            raise unsupported("partial", "a bare matrix cannot tell whose rows are missing")
        if call.key is not None:
            self._budgets.check(call.key, now_ns())
        call.served.client.check_queue(call.lane, call.tenant)
        output = await self._ask_model(call, model, parsed.request)
        size = output.rows.size + parsed.num_chars
        if matrix is not None:
            response = await self._rendered(call, partial(_octets, output.rows, matrix), size, _RENDER_ON_LOOP)
        else:
            response = _json(await self._rendered(call, partial(parsed.render, output), size, _RENDER_ON_LOOP))
        if call.key is not None and call.key.name is not None:
            self._metrics.key_tokens.labels(call.key.name).inc(output.num_tokens)
        return response

    async def _ask_model(self, call: Call, model: Model, request: Request) -> ModelOutput:
        if isinstance(request, EmbeddingRequest):
            return await self._embed(call, model, request)
        if isinstance(request, PairsRequest | LabelsRequest):
            return await self._score(call, model, request)
        return await self._embed_in_context(call, model, request)

    async def _answer_locally(self, call: Call, model: Model, request: LocalRequest) -> web.Response:
        max_size = self._config.max_request_tokens
        answers = await self._in_time(call, call.served.encoder.answer_locally(model, request, max_size=max_size))
        return _json(await self._rendered(call, partial(json_list, answers), sum(map(len, answers)), _JOIN_ON_LOOP))

    async def _embed(self, call: Call, model: Model, request: EmbeddingRequest) -> ModelOutput:
        max_tokens = self._config.max_request_tokens
        if request.by_token:  # a row of each: no more of them than one message holds, or the answer has gigabytes
            max_tokens = min(max_tokens, max_rows(model.facts))
        encoder = call.served.encoder
        with call.tokenize:
            encoded = encoder.encode_query(model, request, max_tokens=max_tokens)
        if encoded is None:
            encoded = await self._in_time(call, encoder.encode_inputs(model, request, max_tokens=max_tokens))
        runs = _by_encoding(request)
        self._charge(call, encoded.sequences, num_runs=len(runs))
        num_reruns = 0
        while True:
            try:
                embedded, *more = [
                    await self._submit(call, model, one, encoded.sequences, spans=encoded.spans) for one in runs
                ]
                break
            except ServiceError as error:
                if error.sequence is None:
                    raise
                error.param = request.inputs.name_of(encoded.places[error.sequence])
                if not request.partial or num_reruns >= _MAX_RERUNS:
                    raise
                # The scheduler answers a request as a whole: the others run again, which is rare and costs their key
                # nothing more.
                encoded.drop({error.sequence: error.with_traceback(None)})
                num_reruns += 1
        num_tokens = sum(map(len, encoded.sequences))
        self._count_inputs(len(encoded.sequences), num_tokens)
        return ModelOutput(
            embedded.rows,
            model.facts,
            num_tokens,
            call.request_id,
            encoded.failures,
            encoded.places,
            None if encoded.spans is None else list(map(len, encoded.spans)),
            dict(zip(request.more_encodings, (other.rows for other in more), strict=True)),
        )

    async def _embed_in_context(self, call: Call, model: Model, request: ContextualRequest) -> ModelOutput:
        assert model.chunks is not None, "no other model passes the dialect's parser"
        max_tokens = min(self._config.max_request_tokens, request.max_tokens)
        documents = await self._in_time(
            call, call.served.encoder.encode_documents(model.chunks, request.documents, max_tokens=max_tokens)
        )
        sequences = [document.ids for document in documents]
        num_tokens = self._charge(call, sequences)
        spans = [document.spans for document in documents]
        try:
            embedded = await self._submit(call, model, request, sequences, spans=spans)
        except ServiceError as error:
            if error.sequence is not None:
                error.param = request.name_of(error.sequence)
            raise
        self._count_inputs(len(embedded.rows), num_tokens)
        return ModelOutput(embedded.rows, model.facts, num_tokens, call.request_id)

    async def _score(self, call: Call, model: Model, request: PairsRequest | LabelsRequest) -> ModelOutput:
        assert model.pairs is not None, "a model that scores takes pairs"
        max_tokens = self._config.max_request_tokens
        if isinstance(request, LabelsRequest):
            encoding = call.served.encoder.encode_labelled(model.tokenizer, model.pairs, request, max_tokens=max_tokens)
        else:
            encoding = call.served.encoder.encode_pairs(model.pairs, request, max_tokens=max_tokens)
        pairs = await self._in_time(call, encoding)
        type_starts = pairs.type_starts if model.facts.has_token_types else None
        num_tokens = self._charge(call, pairs.sequences)
        try:
            embedded = await self._submit(call, model, request, pairs.sequences, type_starts=type_starts)
        except ServiceError as error:
            if error.sequence is not None:
                error.param = request.name_of(pairs.first_pairs[error.sequence])
            raise
        self._count_inputs(len(pairs.places), num_tokens)
        return ModelOutput(embedded.rows[pairs.places], model.facts, num_tokens, call.request_id)

    # --- its steps ---

    async def _read(self, call: Call) -> tuple[Fields, int]:
        """The fields of a body, among them the model that is meant where a header names it; the body's size."""
        assert call.held is not None, "it was admitted"
        call.deadline_ns = self._deadline_ns(call)
        try:
            remaining_s = (call.deadline_ns - now_ns()) / 1e9
            body = await read_body(call.request, self._body_limits, remaining_s, call.held.grow_body_to)
        except Overloaded:
            call.closes = True  # rather than read what there is no room for, to find the next request behind it
            raise
        fields = await self._parsed(call, partial(parse_object, body), len(body))
        if self._models.is_multi_model and "model" not in fields and "X-Model" in call.request.headers:
            fields["model"] = call.request.headers["X-Model"]
        return fields, len(body)

    async def _parsed(self, call: Call, parse: Callable[[], T], size_bytes: int) -> T:
        """What `parse` makes of a body, on a thread where it is larger than what the loop may stop for."""
        with call.parse:
            return parse() if size_bytes <= _PARSE_ON_LOOP else await self._threads.run(parse)

    async def _in_time(self, call: Call, tokenization: Awaitable[T]) -> T:
        """What it comes to before the deadline. Raises DeadlineExceeded."""
        try:
            with call.tokenize:
                async with asyncio.timeout((call.deadline_ns - now_ns()) / 1e9):
                    return await tokenization
        except TimeoutError:
            raise DeadlineExceeded(
                "The deadline passed while the input was tokenized. Allow more time, or send less."
            ) from None

    async def _rendered(self, call: Call, render: Callable[[], T], size: int, size_on_loop: int) -> T:
        """What `render` makes, on a thread where that is larger than what the loop may stop for."""
        with call.render:
            return render() if size <= size_on_loop else await self._threads.run(render)

    def _charge(self, call: Call, sequences: list[TokenIds], *, num_runs: int = 1) -> int:
        """Take what a request will have run from its key's budget: once, before any of it runs. Its tokens in one run.

        Raises:
            RateLimited: there is less left.
        """
        num_tokens = sum(map(len, sequences))
        if call.key is not None:
            self._budgets.charge(call.key, num_tokens * num_runs, now_ns())
        return num_tokens

    async def _submit(
        self,
        call: Call,
        model: Model,
        request: Request,
        sequences: list[TokenIds],
        *,
        type_starts: list[int] | None = None,
        spans: list[Spans] | None = None,
    ) -> Embedded:
        assert call.held is not None, "it was admitted"
        call.fingerprint = model.facts.fingerprint
        options = Options(
            fingerprint=model.facts.fingerprint,
            dimensions=request.dimensions,
            normalize=request.normalize,
            encoding=request.encoding,
            lane=call.lane,
            deadline_ns=call.deadline_ns,
            tenant=call.tenant,
            trace=call.trace,
        )
        num_bytes = OpenRequest.num_bytes(sequences, options, spans)
        call.held.grow(num_bytes)
        try:
            embedded = await call.served.client.submit(sequences, options, type_starts=type_starts, spans=spans)
        except ServiceError:
            call.held.shrink(num_bytes)  # of a `partial` request what is good runs again
            raise
        call.queue_us += embedded.queue_us
        call.step_us += embedded.step_us
        return embedded

    def _count_inputs(self, num_inputs: int, num_tokens: int) -> None:
        self._metrics.input_tokens.inc(num_tokens)
        self._metrics.inputs.inc(num_inputs)

    def _deadline_ns(self, call: Call) -> int:
        timeout_ms = self._config.default_timeout_s * 1000
        text = call.request.headers.get("X-Request-Timeout-Ms")
        if text is not None:
            maximum = self._config.max_timeout_s * 1000
            if not (text.isascii() and text.isdecimal()) or not text.strip("0"):
                raise InvalidRequest(
                    f"X-Request-Timeout-Ms must be a whole number from 1; above {maximum} it is cut to that.",
                    code="invalid_header",
                    param="X-Request-Timeout-Ms",
                )
            # By length first: int() refuses thousands of digits.
            timeout_ms = maximum if len(text.lstrip("0")) > 15 else min(int(text), maximum)
        return call.start_ns + timeout_ms * 1_000_000

    # --- operations ---

    async def _health(self, call: Call) -> web.Response:
        return _typed(operations.health())

    async def _ready(self, call: Call) -> web.Response:
        served = self._asked_about(call)
        of_each: dict[str, Readiness] | None = None
        if self._models.is_multi_model and "X-Model" not in call.request.headers:
            readiness = self._settled(self._models.readiness())
            of_each = {name: self._settled(one.readiness()) for name, one in self._models.by_name.items()}
        else:
            readiness = self._settled(served.readiness())
        response = _typed(operations.ready(readiness, served.known_name, of_each))
        if readiness.status != "ready":
            response.set_status(503)
            response.headers["Retry-After"] = "1"
        return response

    def _settled(self, readiness: Readiness) -> Readiness:
        """The same while this process serves: of one that stops nothing is ready."""
        if self._draining:
            return replace(readiness, status="draining", reason="This gateway is stopping.")
        return readiness

    def _asked_about(self, call: Call) -> ServedModel:
        """The model that a question is about. Raises NotFound."""
        return self._models.find(call.request.headers.get("X-Model"))

    async def _list_models(self, call: Call) -> web.Response:
        return _typed(operations.models(self._models.names, self._created_s))

    async def _one_model(self, call: Call) -> web.Response:
        name = unquote(call.path.removeprefix(_MODELS_PATH + "/").removesuffix("/"))
        return _typed(operations.model(name, self._models.names, self._created_s))

    async def _info(self, call: Call) -> web.Response:
        of_each: dict[str, ModelFacts | None] | None = None
        if self._models.is_multi_model:
            of_each = {name: one.client.facts for name, one in self._models.by_name.items()}
        return _typed(self._server_facts.info(self._asked_about(call).client.facts, of_each))

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


def _by_encoding(request: EmbeddingRequest) -> list[EmbeddingRequest]:
    """The request, then itself in each of the encodings that are wanted besides."""
    return [request, *(replace(request, encoding=other, normalize=False) for other in request.more_encodings)]


def _octets(rows: Rows, matrix: Matrix) -> web.Response:
    """Rows as they are, little-endian, one after the other. Raises NonfiniteOutput."""
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
