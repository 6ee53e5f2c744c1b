"""The private names of aiohttp that the gateway depends on, each of them used in this file alone.

`http.py` needs facts that aiohttp's connection handler keeps private: which requests are queued, whether one runs, and
since when the connection is idle. `OpenHandler` gives each of those private fields a public name.

pyproject.toml keeps aiohttp below the next minor version. tests/gateway/test_canaries.py has a test for each name and
each error text used here, and fails when a release changes one. Before you raise the bound, run it with test_http.py
and test_raw_http.py. Rejected: a server of our own; requiring a proxy in front of the gateway.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import ERROR, _ErrInfo

# What stands in the queue for a request that was refused before its handler.
QueuedError = _ErrInfo

# aiohttp answers a protocol error through a stand-in for the request, which is an HTTP/1.0 one.
_STAND_IN = ERROR._replace(version=HttpVersion11)


class OpenHandler(web.RequestHandler):
    """aiohttp's handler of one connection, with its private state under public names."""

    __slots__ = ()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the connection belongs to."""
        return self._loop

    @property
    def num_requests(self) -> int:
        """Requests that the parser has read on this connection; what it refused counts, too."""
        return self._request_count

    @property
    def queued(self) -> deque[tuple[RawRequestMessage | QueuedError, StreamReader]]:
        """Requests that were read and have no handler yet, each with its body. An entry may be replaced."""
        return self._messages

    @property
    def is_waiting(self) -> bool:
        """Whether the handler waits for the next request: every answer so far is written."""
        return self._waiter is not None

    @property
    def is_running(self) -> bool:
        """Whether a request is in its handler, or its answer is being written."""
        return self._request_in_progress

    @property
    def idle_since_s(self) -> float:
        """When the last answer was written, or the connection began, on the loop's clock."""
        return self._next_keepalive_close_time - self.keepalive_timeout

    @property
    def is_reading_paused(self) -> bool:
        """Whether a body's buffer is full, so that the parser holds back what follows."""
        return self._reading_paused

    def is_request_coming(self) -> bool:
        """Whether a request has begun to arrive: then the end of the keep-alive time does not close the connection."""
        return False

    def limit_read_ahead(self, num_requests: int) -> None:
        """Pause reading when this many requests are queued, until all of them have begun to run."""
        self._max_msg_queue_size = num_requests
        self._msg_queue_resume_size = 0

    def take_no_more(self) -> None:
        """Drop whatever else arrives; the connection closes after the answer that is being written."""
        self._close = True

    def _process_keepalive(self) -> None:
        if self.is_request_coming():
            self._keepalive_handle = None  # or aiohttp would not set the timer again after the answer
            return
        super()._process_keepalive()


def queued_error(error: Exception) -> QueuedError:
    """An entry of `queued` that makes aiohttp call `handle_error` with this error."""
    return _ErrInfo(status=400, exc=error, message="")


def make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    handler: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
    loop: asyncio.AbstractEventLoop,
) -> web.BaseRequest:
    """aiohttp's request factory; what stands for a request that was no HTTP is an HTTP/1.1 request here."""
    return web.BaseRequest(_STAND_IN if message is ERROR else message, payload, handler, writer, task, loop)


def exceeded_bytes(error: LineTooLong) -> object:
    """The limit that a line of the header exceeds. The parser has one error for the target and the fields."""
    return error.args[1]


def has_too_many_headers(error: HttpProcessingError) -> bool:
    """Whether the parser refused the number of the header's lines."""
    return error.message == "Too many headers received"


def has_unknown_version(error: HttpProcessingError) -> bool:
    """Whether the parser refused the HTTP version. What follows the first line of its message quotes the client."""
    return "Invalid HTTP version" in error.message.partition(":\n\n")[0]
