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
import re
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import unquote

import numpy as np
from aiohttp import web

from common import metrics as metrics_module
from common.config import GatewayConfig
from common.errors import (
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
from common.protocol import ModelFacts, Spans
from common.tokenization import TokenIds
from common.transport import now_ns
from gateway.answers import JSON, error_headers, render_error, request_id_of, server_timing
from gateway.auth import KeyCheck
from gateway.body import BadRequest, read_body
from gateway.client import Embedded, Options, Readiness, SchedulerClient
from gateway.encoding import Encoder, Model, Threads
from gateway.http import HttpLimits, Server
from gateway.routes import contextual, openai, operations, rerank

logger = logging.getLogger(__name__)

_SPARE_FILES = 64  # descriptors for everything that is no client's connection
_PARSE_ON_LOOP = 262_144  # bytes of a body; larger ones are parsed on a thread
_RENDER_ON_LOOP = 65_536  # values, or characters of documents, of an answer; more are rendered on a thread

_OCTETS = "application/octet-stream"
_MODELS_PATH = "/v1/models"

# How a failure names a sequence: its place among those that were submitted.
_SEQUENCE = re.compile(r"input\[(\d+)\]")

T = TypeVar("T")


class Call:
    """One HTTP request on its way through: its name, its clock, and what its answer's headers say."""

    __slots__ = (
        "closes",
        "deadline_ns",
        "fingerprint",
        "parse_us",
        "path",
        "queue_us",
        "render_us",
        "request",
        "request_id",
        "start_ns",
        "step_us",
        "tokenize_us",
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
        self.closes = False
        self.parse_us = self.tokenize_us = self.queue_us = self.step_us = self.render_us = 0


Handler = Callable[[Call], Awaitable[web.Response]]


class _Asked(Protocol):
    """What any dialect's request says of the rows that it wants."""

    @property
    def dimensions(self) -> int: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def encoding(self) -> str: ...
    @property
    def lane(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Route:
    pattern: str  # the metrics' label
    methods: tuple[str, ...]
    handler: Handler


class Gateway:
    """The HTTP side of a running event loop. `client` is started and closed here."""

    def __init__(
        self, config: GatewayConfig, client: SchedulerClient, metrics: Metrics, *, api_key: str | None = None
    ) -> None:
        self._config = config
        self._client = client
        self._metrics = metrics
        self._key_check = KeyCheck(api_key)
        self._threads = Threads(config.tokenizer_threads)
        self._encoder = Encoder(self._threads)
        self._server = Server(
            self._handle,
            HttpLimits(
                config.header_timeout_s,
                config.keepalive_timeout_s,
                _max_connections(config),
            ),
            partial(self._count, "none"),
        )
        self._listener: asyncio.Server | None = None
        self._num_running = 0
        self._draining = False
        self._created_s = int(time.time())
        get = ("GET", "HEAD")
        answers: dict[str, Handler] = {
            openai.PATH: self._embed,
            contextual.PATH: self._embed_in_context,
            **dict.fromkeys(rerank.RERANK_PATHS, self._rerank),
            **dict.fromkeys(rerank.SCORE_PATHS, self._score),
        }
        self._routes = {
            **{path: _Route(path, ("POST",), partial(self._admitted, answer)) for path, answer in answers.items()},
            "/health": _Route("/health", get, self._health),
            "/ready": _Route("/ready", get, self._ready),
            "/info": _Route("/info", get, self._info),
            "/metrics": _Route("/metrics", get, self._metrics_text),
            _MODELS_PATH: _Route(_MODELS_PATH, get, self._models),
        }
        self._model_route = _Route(_MODELS_PATH + "/{id}", get, self._one_model)

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket, which is this object's from here on."""
        self._client.on_facts = self._encoder.on_facts
        self._client.start()
        if self._client.facts is not None:
            self._encoder.on_facts(self._client.facts)
        self._listener = await asyncio.get_running_loop().create_server(self._server, sock=sock)

    async def wait_loaded(self) -> None:
        """Return when the tokenizer of the facts that were told last is loaded, or cannot be."""
        await self._encoder.wait_loaded()

    async def drain(self) -> None:
        """Accept nothing more; return when what was accepted is answered, or cut off at the end of its time."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        await self._server.drain(self._config.drain_timeout_s)

    def abort(self) -> None:
        """Stop waiting: cut off every connection."""
        self._draining = True
        self._server.abort()

    async def close(self) -> None:
        """Let go of threads and sockets. Comes after `drain`."""
        if self._listener is not None:
            self._listener.close()
        self._server.abort()
        await self._encoder.close()
        await self._client.close()
        self._threads.close()

    # --- every request ---

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        call = Call(request)
        pattern = "unknown"
        try:
            self._key_check.check(request, call.path)
            route = self._route(call.path)
            pattern = route.pattern
            _check_method(request.method, route)
            response = await route.handler(call)
        except ServiceError as error:
            response = self._refusal(call, error)
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
            call.parse_us, call.tokenize_us, call.queue_us, call.step_us, call.render_us, total_us
        )
        if call.fingerprint is not None:
            headers["X-Model-Fingerprint"] = call.fingerprint
        if response.status == 405:
            headers["Allow"] = ", ".join(self._route(call.path).methods)
        if self._draining or call.closes:
            response.force_close()
        self._count(pattern, response.status)
        self._metrics.request_seconds.labels(pattern).observe(total_us / 1e6)
        return response

    def _route(self, path: str) -> _Route:
        route = self._routes.get(path)
        if route is not None:
            return route
        if path.startswith(_MODELS_PATH + "/"):
            return self._model_route
        raise NotFound("There is no such route; see the README for those that there are.")

    def _refusal(self, call: Call, error: ServiceError) -> web.Response:
        # Where the next request begins is unknown: its body was not read to its end, or may not be sent at all.
        unread = isinstance(error, TooLarge | RequestTimeout | BadRequest) or "Expect" in call.request.headers
        call.closes = call.closes or unread
        return web.Response(body=render_error(error), status=error.status, headers=error_headers(error))

    def _count(self, pattern: str, status: int) -> None:
        self._metrics.requests.labels(pattern, status).inc()

    # --- what a model answers ---

    async def _admitted(self, answer: Handler, call: Call) -> web.Response:
        if self._num_running >= self._config.max_concurrent_requests:
            raise Overloaded(
                "This gateway holds as many requests as it may. Try again a little later.", retry_after_s=1
            )
        self._num_running += 1
        try:
            return await answer(call)
        finally:
            self._num_running -= 1

    async def _embed(self, call: Call) -> web.Response:
        config = self._config
        model, asked = await self._read(
            call, partial(openai.parse, max_inputs=config.max_inputs, auto_truncate=config.auto_truncate)
        )
        sequences, spans = await self._in_time(call, self._sequences(model, asked))
        num_tokens = sum(map(len, sequences))
        try:
            embedded = await self._submit(call, model, asked, sequences, spans=spans)
            rows = embedded.rows
            if _OCTETS in call.request.headers.get("Accept", ""):
                headers = {
                    "Content-Type": _OCTETS,
                    "X-Embedding-Shape": f"{rows.shape[0]},{rows.shape[1]}",
                    "X-Embedding-Dtype": rows.dtype.name,
                }
                response = web.Response(body=openai.render_raw(rows, asked.encoding_format), headers=headers)
            else:
                render = partial(openai.render, rows, asked.encoding_format, model.facts.name, num_tokens)
                response = await self._render(call, render, rows.size)
        except ServiceError as error:
            if asked.lone and error.param == "input[0]":
                error.param = "input"
            raise
        self._count_inputs(len(sequences), num_tokens)
        return response

    async def _sequences(
        self, model: Model, asked: openai.EmbeddingRequest
    ) -> tuple[list[TokenIds], list[Spans] | None]:
        """The sequences of a request, and the span of each that is pooled where that is not the whole."""
        max_tokens = self._config.max_request_tokens
        if not asked.texts:
            sequences = await self._encoder.check(
                model, asked.token_ids, truncation=asked.truncation, lone=asked.lone, max_tokens=max_tokens
            )
            return sequences, None
        sequences = await self._encoder.encode(
            model,
            asked.texts,
            prompt=asked.prompt,
            truncation=asked.truncation,
            lone=asked.lone,
            max_tokens=max_tokens,
        )
        return sequences, await self._encoder.spans_after(model, asked.prompt, sequences, lone=asked.lone)

    async def _embed_in_context(self, call: Call) -> web.Response:
        model, asked = await self._read(call, contextual.parse)
        assert model.chunks is not None, "no other model passes `parse`"
        max_tokens = min(self._config.max_request_tokens, contextual.MAX_TOKENS)
        documents = await self._in_time(
            call, self._encoder.encode_documents(model.chunks, asked.documents, max_tokens=max_tokens)
        )
        sequences = [document.ids for document in documents]
        num_tokens = sum(map(len, sequences))
        embedded = await self._submit(call, model, asked, sequences, spans=[document.spans for document in documents])
        render = partial(contextual.render, embedded.rows, asked, model.facts.name, num_tokens)
        response = await self._render(call, render, embedded.rows.size)
        self._count_inputs(len(embedded.rows), num_tokens)
        return response

    async def _rerank(self, call: Call) -> web.Response:
        model, asked = await self._read(call, partial(rerank.parse_rerank, max_inputs=self._config.max_inputs))
        logits, num_tokens = await self._logits(call, model, asked.pairs)
        render = partial(
            rerank.render_rerank, logits, asked, model.facts, request_id=call.request_id, num_tokens=num_tokens
        )
        num_chars = sum(map(len, asked.pairs.documents)) if asked.return_documents else 0
        return await self._render(call, render, num_chars)

    async def _score(self, call: Call) -> web.Response:
        config = self._config
        model, asked = await self._read(
            call, partial(rerank.parse_score, max_inputs=config.max_inputs, auto_truncate=config.auto_truncate)
        )
        logits, num_tokens = await self._logits(call, model, asked)
        render = partial(
            rerank.render_score, logits, asked, model.facts, request_id=call.request_id, num_tokens=num_tokens
        )
        return await self._render(call, render, len(logits))

    async def _logits(self, call: Call, model: Model, asked: rerank.PairsRequest) -> tuple[rerank.Logits, int]:
        """What the model makes of each pair, and how many tokens it ran for that."""
        assert model.pairs is not None, "a model that scores takes pairs"
        pairs = await self._in_time(
            call,
            self._encoder.encode_pairs(
                model.pairs,
                asked.queries,
                asked.documents,
                truncation=asked.truncation,
                instruction=asked.instruction,
                max_document_tokens=asked.max_document_tokens,
                names=asked.names,
                max_tokens=self._config.max_request_tokens,
            ),
        )
        type_starts = pairs.type_starts if model.facts.has_token_types else None
        try:
            embedded = await self._submit(call, model, asked, pairs.sequences, type_starts=type_starts)
        except ServiceError as error:
            sequence = _SEQUENCE.fullmatch(error.param or "")
            if sequence is not None:
                error.param = asked.names.document(pairs.first_pairs[int(sequence[1])])
            raise
        num_tokens = sum(map(len, pairs.sequences))
        self._count_inputs(len(pairs.places), num_tokens)
        return np.asarray(embedded.rows[pairs.places, 0], dtype=np.float32), num_tokens

    # --- its steps ---

    async def _read(self, call: Call, parse: Callable[[bytes, ModelFacts], T]) -> tuple[Model, T]:
        """The model that is served, and what `parse` makes of the body."""
        config = self._config
        call.deadline_ns = self._deadline_ns(call)
        timeout_s = min(config.body_timeout_s, (call.deadline_ns - now_ns()) / 1e9)
        body = await read_body(call.request, config.max_body_bytes, timeout_s)
        model = await self._encoder.wait_for_model(call.deadline_ns)
        begin = now_ns()
        if len(body) <= _PARSE_ON_LOOP:
            asked = parse(body, model.facts)
        else:
            asked = await self._threads.run(partial(parse, body, model.facts))
        _lap(call, "parse_us", begin)
        return model, asked

    async def _in_time(self, call: Call, tokenization: Awaitable[T]) -> T:
        """What it comes to before the deadline. Raises DeadlineExceeded."""
        begin = now_ns()
        try:
            async with asyncio.timeout((call.deadline_ns - begin) / 1e9):
                result = await tokenization
        except TimeoutError:
            raise DeadlineExceeded(
                "The deadline passed while the input was tokenized. Allow more time, or send less."
            ) from None
        _lap(call, "tokenize_us", begin)
        return result

    async def _submit(
        self,
        call: Call,
        model: Model,
        asked: _Asked,
        sequences: list[TokenIds],
        *,
        type_starts: list[int] | None = None,
        spans: list[Spans] | None = None,
    ) -> Embedded:
        call.fingerprint = model.facts.fingerprint
        embedded = await self._client.submit(
            sequences,
            Options(
                fingerprint=model.facts.fingerprint,
                dimensions=asked.dimensions,
                normalize=asked.normalize,
                encoding=asked.encoding,
                lane=asked.lane,
                deadline_ns=call.deadline_ns,
            ),
            type_starts=type_starts,
            spans=spans,
        )
        call.queue_us, call.step_us = embedded.queue_us, embedded.step_us
        return embedded

    async def _render(self, call: Call, render: Callable[[], bytes], size: int) -> web.Response:
        """The answer; one of more than a few values or characters is rendered on a thread."""
        begin = now_ns()
        body = render() if size <= _RENDER_ON_LOOP else await self._threads.run(render)
        _lap(call, "render_us", begin)
        return _json(body)

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
        return _json(operations.render_health())

    async def _ready(self, call: Call) -> web.Response:
        readiness = self._readiness()
        response = _json(operations.render_ready(readiness, self._client.facts))
        if readiness.status != "ready":
            response.set_status(503)
            response.headers["Retry-After"] = "1"
        return response

    def _readiness(self) -> Readiness:
        readiness = self._client.readiness()
        if self._draining:
            return replace(readiness, status="draining", reason="This gateway is stopping.")
        if readiness.status == "ready" and self._encoder.reason:
            return replace(readiness, status=self._encoder.status, reason=self._encoder.reason)
        return readiness

    async def _models(self, call: Call) -> web.Response:
        return _json(operations.render_models(self._encoder.model.facts, self._created_s))

    async def _one_model(self, call: Call) -> web.Response:
        name = unquote(call.path.removeprefix(_MODELS_PATH + "/").removesuffix("/"))
        return _json(operations.render_model(name, self._encoder.model.facts, self._created_s))

    async def _info(self, call: Call) -> web.Response:
        return _json(operations.render_info(self._config, self._client.facts))

    async def _metrics_text(self, call: Call) -> web.Response:
        body = await asyncio.to_thread(metrics_module.render, self._config.run_dir)
        return web.Response(body=body, headers={"Content-Type": metrics_module.CONTENT_TYPE})


def _max_connections(config: GatewayConfig) -> int:
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(1, max_files - _SPARE_FILES))


def _check_method(method: str, route: _Route) -> None:
    if method not in route.methods:
        raise MethodNotAllowed(f"This route takes {' and '.join(route.methods)}.")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": JSON})


def _lap(call: Call, stage: str, begin: int) -> int:
    """Note how long a stage took; when the next one begins."""
    end = now_ns()
    setattr(call, stage, (end - begin) // 1000)
    return end
