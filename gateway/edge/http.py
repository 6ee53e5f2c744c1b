"""The handling of connections that aiohttp lacks.

Without this module, each of these was seen with aiohttp 3.14 and its C parser:

- A client that sends nothing, trickles, or does not read its answers is never cut off.
- Protocol errors are answered in plain text that quotes the client's bytes.
- HTTP/0.9 and 2.0 lines get a 200 in their own version.
- A handler waits for ever behind a broken chunk, and a packet of tiny chunks stops the loop for 90 ms.
- Bytes behind a request for an upgrade are dropped, or run as a request of their own.
- Connections are accepted until the file table is full.
- A stopping server resets connections on which a request is on its way.

`Server` and `Connection` subclass aiohttp's; the private fields that they need are in aiohttp_internals.py.

Not changed: if a packet holds a request and then bytes that are not HTTP, the parser gives up both, and the client gets
one answer, a 400.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import cast

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD

from common.errors import (
    BadRequest,
    HeaderTooLarge,
    InternalError,
    RequestTimeout,
    ServiceError,
    TargetTooLong,
    Unavailable,
    VersionNotSupported,
)
from gateway.edge.aiohttp_internals import (
    OpenHandler,
    QueuedError,
    exceeded_bytes,
    has_too_many_headers,
    has_unknown_version,
    make_request,
    queued_error,
)
from gateway.error_responses import error_headers, render_error, request_id_of, server_timing

logger = logging.getLogger(__name__)

# Some clients send a blank line after a body. Up to this many bytes of blank lines do not begin a header.
_MAX_BLANK_BYTES = 4

# Requests that are read while one runs. The packet that reaches this number may hold more; no other packet is read.
_MAX_READ_AHEAD = 2

# Bytes of one body that may wait for its handler. aiohttp allows a sixteenth of this number as chunks, and parses the
# chunks of a packet in turns of that many, which take about 2 ms each.
_BODY_BUFFER_BYTES = 16 * 1024

# Number of checks, within `write_timeout_s`, whether a client has read more of its answer.
_WRITE_LOOKS = 4

# After an early answer (413, 431) the client's remaining bytes are read and dropped for this time. A client that sends
# while the connection closes gets a reset, and may never see the answer.
_LINGER_S = 2.0
_MAX_LINGERING = 32  # connections over the limit that may linger; others are closed at once


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int
    # A client that reads nothing of its answer for this time is cut off, since the answer occupies memory.
    write_timeout_s: float = 30.0
    # A stopping server closes a connection at once if it was idle for this time; otherwise a request may be coming.
    drain_grace_s: float = 1.0
    max_target_bytes: int = 4096
    max_headers: int = 100
    max_header_line_bytes: int = 16 * 1024  # a line's name, or its value
    max_header_bytes: int = 64 * 1024  # all lines together


class Server(web.Server):
    """Makes a `Connection` for each client, counts them, and closes them when the gateway stops.

    `on_refusal` is called with the status of every answer that the handler did not give. `headers_for` returns the CORS
    headers of such an answer, by the request's Origin (None if it is not known).
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: HttpLimits,
        on_refusal: Callable[[int], None],
        headers_for: Callable[[str | None], Mapping[str, str]],
    ) -> None:
        self._event_loop = asyncio.get_running_loop()
        super().__init__(
            handler,
            request_factory=partial(make_request, loop=self._event_loop),
            handler_cancellation=True,
            loop=self._event_loop,
        )
        self.limits = limits
        self.on_refusal = on_refusal
        self.headers_for = headers_for
        self.num_refused = 0  # connections over the limit that are not closed yet
        self._open: set[Connection] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def num_open(self) -> int:
        """Open connections."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self.limits.max_connections

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._event_loop)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        assert isinstance(handler, Connection)
        self._open.add(handler)
        self._all_closed.clear()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        assert isinstance(handler, Connection)
        self._open.discard(handler)
        if not self._open:
            self._all_closed.set()

    async def drain(self, timeout_s: float) -> bool:
        """Close every connection after its running requests; cut off those that need more than the timeout.

        The handler must answer with `Connection: close` meanwhile. Returns True if no connection was cut off.
        """
        for connection in list(self._open):
            connection.drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            logger.warning("%d connections did not finish within %g s and are cut off", len(self._open), timeout_s)
            self.abort()
            return False
        return True

    def abort(self) -> None:
        """Cut off every connection. Handlers that still run are cancelled."""
        for connection in list(self._open):
            connection.abort()


class Connection(OpenHandler):
    """One client's connection."""

    __slots__ = (
        "_body",
        "_header_timer",
        "_is_broken",
        "_partial_bytes",
        "_refused",
        "_resume_due",
        "_server",
        "_write_timer",
    )

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        limits = server.limits
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.keepalive_timeout_s,
            access_log=None,  # type: ignore[arg-type]  # how aiohttp is told to keep none
            max_line_size=limits.max_target_bytes,
            max_field_size=limits.max_header_line_bytes,
            max_headers=limits.max_headers,
            lingering_time=_LINGER_S,
            read_bufsize=_BODY_BUFFER_BYTES,
            auto_decompress=False,  # aiohttp makes an empty body of a gzip stream that was cut
        )
        self.limit_read_ahead(_MAX_READ_AHEAD)
        self._server = server
        self._body: StreamReader = EMPTY_PAYLOAD  # the body of the last request
        self._partial_bytes = 0  # bytes of a header that is not complete yet
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_broken = False  # the client sent something that is not HTTP; no more is read
        self._refused = False  # it is over the limit on connections
        self._resume_due = False  # bytes that the parser holds back are parsed in the loop's next turn
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # This limit is below that on file descriptors: we refuse with an answer before accept() fails in a loop.
        if self._server.is_full:
            self._refuse(cast("asyncio.Transport", transport))
            return
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        if self._refused:
            self._server.num_refused -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        count = self.num_requests
        in_body = not self._body.is_eof()
        super().data_received(data)
        num_new = self.num_requests - count
        if num_new:
            self._stop_header_timer()
            self._partial_bytes = 0
            for index in range(len(self.queued) - num_new, len(self.queued)):
                self._on_request(index)
        elif not in_body and (len(data) > _MAX_BLANK_BYTES or data.strip(b"\r\n")):
            self._on_partial_header(len(data))

    def resume_reading(self, resume_parser: bool = True) -> None:
        # The reader of a body calls this between two chunks. Parsing at once would parse and read a whole packet of
        # tiny chunks in one turn of the loop.
        if not resume_parser:
            super().resume_reading(resume_parser=False)
        elif not self._resume_due:
            self._resume_due = True
            self.loop.call_soon(self._resume_parsing)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        transport = self.transport
        if transport is None:
            return await super().finish_response(request, resp, start_time)
        # Bytes that do not fit into the kernel's buffers wait for the client to read, even those of a small answer.
        self._stop_write_timer()
        self._start_write_timer(transport, None, self.loop.time())
        result = await super().finish_response(request, resp, start_time)
        # aiohttp does not wait for the last bytes. The timer stays for them: even a closed transport would keep them.
        if not transport.get_write_buffer_size():
            self._stop_write_timer()
        if self._is_broken:
            await self._linger()
        elif not resp.keep_alive and self.transport is not None and not self._body.is_eof():
            # aiohttp lingers here, too; this shows the client the end of the answer meanwhile.
            self.transport.write_eof()
        return result

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that never reached the handler, without aiohttp's `message`, which quotes the client."""
        error = _error_of(exc, self._server.limits)
        if error.status == 500:
            logger.error("a request failed outside its handler", exc_info=exc)
        self._server.on_refusal(error.status)
        self._is_broken = True
        # A request that the parser refused has no header; one that we refused after parsing has.
        given = exc.given if isinstance(exc, _Refused) else request.headers
        headers = self._refusal_headers(error, given)
        response = web.Response(body=render_error(error), status=error.status, headers=headers)
        response.force_close()
        return response

    def drain(self) -> None:
        """Close once idle: at once, or after the grace time if the client may be sending a request."""
        if self.transport is None:
            return
        grace_s = wait_s = self._server.limits.drain_grace_s
        if self._is_idle:
            wait_s = self.idle_since_s + grace_s - self.loop.time()
            if wait_s <= 0:
                self.force_close()
                return
        # A busy connection is checked again, since its answer may have begun without `Connection: close`.
        self.loop.call_later(wait_s, self.drain)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def is_request_coming(self) -> bool:
        return bool(self._partial_bytes)  # the header's own timer counts then

    def _resume_parsing(self) -> None:
        self._resume_due = False
        if self.is_reading_paused and self.transport is not None:
            super().resume_reading()

    def _start_write_timer(self, transport: asyncio.Transport, least_bytes: int | None, since_s: float) -> None:
        interval_s = self._server.limits.write_timeout_s / _WRITE_LOOKS
        self._write_timer = self.loop.call_later(interval_s, self._look_at_writing, transport, least_bytes, since_s)

    def _look_at_writing(self, transport: asyncio.Transport, least_bytes: int | None, since_s: float) -> None:
        """Cut off a client that has read nothing since `since_s`, when `least_bytes` were unread."""
        self._write_timer = None
        if not transport.get_write_buffer_size():
            return
        now_s, num_bytes = self.loop.time(), _unread_bytes(transport)
        if least_bytes is None or num_bytes < least_bytes:
            least_bytes, since_s = num_bytes, now_s
        elif now_s - since_s >= self._server.limits.write_timeout_s:
            transport.abort()
            return
        self._start_write_timer(transport, least_bytes, since_s)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _is_idle(self) -> bool:
        return not (self.is_running or self.queued or self._partial_bytes) and self._body.is_eof()

    def _on_request(self, index: int) -> None:
        """Check a message that aiohttp has queued and not yet given to the handler."""
        message, body = self.queued[index]
        if isinstance(message, QueuedError):
            if not self._body.is_eof():
                # aiohttp queues an error in a body behind the handler that waits for that body.
                self._body.set_exception(web.RequestPayloadError("malformed"))
                self._body.feed_eof()
            return
        self._body = body
        error = self._fault_of(message)
        if error is not None:
            self.queued[index] = (queued_error(_Refused(error, message.headers)), body)
        elif message.upgrade:
            # An upgrade, or CONNECT: the protocol is not switched. But the parser has dropped the rest of the packet,
            # so the start of the next request is unknown.
            self.queued[index] = (message._replace(should_close=True), body)

    def _fault_of(self, message: RawRequestMessage) -> ServiceError | None:
        """The error in a header that the parser accepts; None if there is none."""
        if message.version not in (HttpVersion10, HttpVersion11):
            return _bad_request() if message.version < HttpVersion10 else _version_not_supported()
        if message.chunked and message.headers["Transfer-Encoding"].lower() != "chunked":
            return _bad_request()  # the parser checks only the last of several codings
        limit = self._server.limits.max_header_bytes
        if sum(len(name) + len(value) + 4 for name, value in message.raw_headers) > limit:
            return HeaderTooLarge(f"The header has more than {limit} bytes.")
        return None

    def _on_partial_header(self, num_bytes: int) -> None:
        if self._header_timer is None:
            self._start_header_timer()
        self._partial_bytes += num_bytes
        limits = self._server.limits
        if self._partial_bytes > limits.max_header_bytes + limits.max_target_bytes:
            self._stop_header_timer()
            self._close_with(HeaderTooLarge(f"The header has more than {limits.max_header_bytes} bytes."))

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._partial_bytes:
            self._close_with(RequestTimeout("The header did not arrive in time. Send it again."))
        else:
            self.force_close()

    def _close_with(self, error: ServiceError) -> None:
        if not self.is_waiting:
            # Earlier requests still wait for their answers; this answer would come between them.
            self.close()
            return
        self._write_and_leave(error)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._refused = True
        self._server.num_refused += 1
        self._write_and_leave(
            Unavailable("This gateway has as many connections as it allows. Try again.", retry_after_s=1)
        )
        if self._server.num_refused > _MAX_LINGERING:
            self.force_close()

    def _write_and_leave(self, error: ServiceError) -> None:
        """Answer a connection without a request, bypassing aiohttp, and close it."""
        assert self.transport is not None
        self._server.on_refusal(error.status)
        self.transport.write(_raw_response(error, self._refusal_headers(error, {})))
        self._stop_reading()
        self.loop.call_later(_LINGER_S, self.force_close)

    async def _linger(self) -> None:
        """Wait until the client closes the connection, which cancels this, or until the linger time is over."""
        if self.transport is not None:
            self._stop_reading()
            await asyncio.wait([self.loop.create_future()], timeout=_LINGER_S)

    def _refusal_headers(self, error: ServiceError, given: Mapping[str, str]) -> dict[str, str]:
        """The header of an answer that the handler did not give; `given` is the request's header, or empty."""
        return {
            **error_headers(error),
            "Server": "hedgerow",
            "X-Request-Id": request_id_of(given.get("X-Request-Id")),
            "Server-Timing": server_timing(0, 0, 0, 0, 0, 0),
            **self._server.headers_for(given.get("Origin")),
        }

    def _stop_reading(self) -> None:
        """Send no more answers: the client sees the end, and whatever it still sends is dropped."""
        assert self.transport is not None
        self.take_no_more()
        self.transport.resume_reading()  # or the client's end would go unseen
        self.transport.write_eof()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._server.limits.header_timeout_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _unread_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged, in our buffer and in the kernel's, which refills by the megabyte."""
    in_kernel = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)


class _Refused(HttpProcessingError):
    """A request that the parser accepts and we refuse."""

    def __init__(self, error: ServiceError, headers: Mapping[str, str]) -> None:
        super().__init__()
        self.error = error
        self.given = headers


def _error_of(exc: BaseException | None, limits: HttpLimits) -> ServiceError:
    """The answer for a request that aiohttp's parser or `_fault_of` refused, or that a bug of ours failed."""
    if isinstance(exc, _Refused):
        return exc.error
    if isinstance(exc, LineTooLong):
        # The parser has one exception for target and fields. It names the limit, and our two limits differ.
        if exceeded_bytes(exc) == limits.max_target_bytes:
            return TargetTooLong(f"The request's target has more than {limits.max_target_bytes} bytes.")
        return HeaderTooLarge(f"A line of the header has more than {limits.max_header_line_bytes} bytes.")
    if isinstance(exc, HttpProcessingError):
        if has_too_many_headers(exc):
            return HeaderTooLarge(f"The header has more than {limits.max_headers} lines.")
        if has_unknown_version(exc):
            return _version_not_supported()
        return _bad_request()
    return InternalError("This server failed; its log says why.")


def _bad_request() -> BadRequest:
    return BadRequest("This is not an HTTP/1.1 request that this server understands.")


def _version_not_supported() -> VersionNotSupported:
    return VersionNotSupported("This server speaks HTTP/1.1 and HTTP/1.0.")


def _raw_response(error: ServiceError, headers: dict[str, str]) -> bytes:
    """An answer for a connection without a request, as bytes."""
    body = render_error(error)
    headers = {**headers, "Content-Length": str(len(body)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n".encode() + body
