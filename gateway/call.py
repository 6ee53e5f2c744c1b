"""One HTTP request on its way through the gateway: its id, key, deadline, timing, and the headers of its answer."""

from __future__ import annotations

from collections.abc import MutableMapping

from aiohttp import web

from common.config import GatewayConfig
from common.errors import InvalidRequest
from common.wire.transport import now_ns
from gateway.edge.auth import Key
from gateway.edge.memory_budget import RequestMemory
from gateway.error_responses import request_id_of, server_timing
from gateway.models import ServedModel
from gateway.trace import RequestTrace


class Stage:
    """The time that a part of a request takes: that of every `with` block, also of one that raises."""

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
    """An HTTP request, whose time counts from when its header was read."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.start_ns = now_ns()
        self.request = request
        raw_path = request.raw_path
        # The path as it was sent: /v1/%65mbeddings or //v1/embeddings is no route, whatever it decodes to.
        path = (raw_path if raw_path.startswith("/") else request.rel_url.raw_path).partition("?")[0]
        self.path = path[:-1] if len(path) > 1 and path.endswith("/") else path  # one trailing slash is ignored
        self.request_id = request_id_of(request.headers.get("X-Request-Id"))
        self.deadline_ns = 0
        self.fingerprint: str | None = None  # of the model, set when its work is submitted
        self.held: RequestMemory  # the bytes that it holds; set when it is admitted
        self.served: ServedModel  # the model that it means; set when its body is read
        self.key: Key | None = None
        self.closes = False  # whether its answer closes the connection
        self.lane = ""
        self.parse, self.tokenize, self.render = Stage(), Stage(), Stage()
        self.queue_us = self.step_us = 0
        self.trace = RequestTrace() if request.headers.get("X-Trace") == "1" else None

    @property
    def tenant(self) -> int:
        """The number of its key; 0 if no key is needed."""
        return 0 if self.key is None else self.key.tenant

    @property
    def remaining_s(self) -> float:
        """The time until its deadline."""
        return (self.deadline_ns - now_ns()) / 1e9

    def set_deadline(self, config: GatewayConfig) -> None:
        """Take the deadline from its header, or the configured one.

        Raises:
            InvalidRequest: invalid_header.
        """
        timeout_ms = config.default_timeout_s * 1000
        text = self.request.headers.get("X-Request-Timeout-Ms")
        if text is not None:
            maximum = config.max_timeout_s * 1000
            if not (text.isascii() and text.isdecimal()) or not text.strip("0"):
                raise InvalidRequest(
                    f"X-Request-Timeout-Ms must be a whole number from 1; above {maximum} it is cut to that.",
                    code="invalid_header",
                    param="X-Request-Timeout-Ms",
                )
            # The length is checked first: int() refuses thousands of digits.
            timeout_ms = maximum if len(text.lstrip("0")) > 15 else min(int(text), maximum)
        self.deadline_ns = self.start_ns + timeout_ms * 1_000_000

    def write_headers(self, headers: MutableMapping[str, str], total_us: int) -> None:
        """Write the headers that every answer has. The request took `total_us`."""
        parse, tokenize, render = self.parse, self.tokenize, self.render
        timing = server_timing(parse.us, tokenize.us, self.queue_us, self.step_us, render.us, total_us)
        headers["X-Request-Id"] = self.request_id
        headers["Server"] = "hedgerow"
        headers["Server-Timing"] = timing
        if self.trace is not None:
            before_ns = (self.start_ns, parse.began_ns, parse.ended_ns, tokenize.ended_ns)
            headers.update(self.trace.headers(before_ns, (render.began_ns, render.ended_ns), timing))
        if self.fingerprint is not None:
            headers["X-Model-Fingerprint"] = self.fingerprint
