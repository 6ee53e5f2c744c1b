"""What the gateway reads of its dependencies beyond their documents: private fields of aiohttp, texts of errors.

One test for each, on the dependency alone, so that a new release which changes one fails with that name. The versions
are bounded in pyproject.toml: raise a bound when these tests, test_http.py, test_raw_http.py and test_schema.py pass.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
import orjson
import pytest
from aiohttp import HttpVersion11, web, web_protocol
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from msgspec import Meta

from gateway.edge import aiohttp_internals
from gateway.edge.aiohttp_internals import OpenHandler
from tests.gateway.conftest import listening_socket
from tests.gateway.wire import Wire, request_bytes

GATEWAY = Path(aiohttp_internals.__file__).parent.parent
HOME = GATEWAY / "edge/aiohttp_internals.py"

GET = request_bytes("GET", "/")
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

AIOHTTP = f"aiohttp {aiohttp.__version__} differs: see gateway/edge/aiohttp_internals.py"
MSGSPEC = f"msgspec {version('msgspec')} says it in other words: see gateway/schema.py"
ORJSON = f"orjson {version('orjson')} says it in other words: see gateway/schema.py"


# --- aiohttp's private fields ---


class Plain:
    """aiohttp's own server, without ours, around a handler that waits for its gate."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.errors: list[tuple[object, object]] = []  # of each call of handle_error its message and its exception
        self.handlers: list[web.RequestHandler] = []
        self.requests: list[object] = []  # the messages that the request factory got
        plain = self

        class Recording(web.RequestHandler):
            __slots__ = ()

            def handle_error(
                self,
                request: web.BaseRequest,
                status: int = 500,
                exc: BaseException | None = None,
                message: str | None = None,
            ) -> web.StreamResponse:
                plain.errors.append((status, exc))
                return super().handle_error(request, 400, None, "refused")

        class Server(web.Server):
            def __call__(self) -> web.RequestHandler:
                handler = Recording(
                    self,
                    loop=asyncio.get_running_loop(),
                    keepalive_timeout=30,
                    max_line_size=1000,
                    max_field_size=2000,
                    max_headers=5,
                    read_bufsize=64,
                )
                plain.handlers.append(handler)
                return handler

        self.server = Server(self.handle, request_factory=self.make_request)

    def make_request(self, message: Any, payload: Any, *rest: Any) -> web.BaseRequest:  # noqa: ANN401  # aiohttp's
        self.requests.append(message)
        protocol, writer, task = rest
        return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.entered.set()
        await self.gate.wait()
        return web.Response(body=b"ok")

    @property
    def handler(self) -> web.RequestHandler:
        """That of the only connection."""
        [handler] = self.handlers
        return handler


class Connected(Plain):
    """The same with one connection to it."""

    wire: Wire

    async def until(self, name: str, value: object) -> None:
        """Wait until a private field has this value."""
        try:
            async with asyncio.timeout(2):
                while getattr(self.handler, name) != value:
                    await asyncio.sleep(0.001)
        except TimeoutError:
            pytest.fail(f"{name} is {getattr(self.handler, name)!r} and never {value!r}; {AIOHTTP}")


@pytest.fixture
async def plain() -> AsyncIterator[Connected]:
    connected = Connected()
    sock = listening_socket()
    listener = await asyncio.get_running_loop().create_server(connected.server, sock=sock)
    connected.wire = await Wire.connect(sock.getsockname()[1])
    async with asyncio.timeout(2):
        while not connected.handlers or connected.handler.transport is None:
            await asyncio.sleep(0.001)
    yield connected
    connected.gate.set()
    await connected.wire.close()
    listener.close()
    await connected.server.shutdown(0.1)


async def test_loop_is_the_connections_event_loop(plain: Connected) -> None:
    assert plain.handler._loop is asyncio.get_running_loop(), AIOHTTP


async def test_request_count_grows_with_each_request_that_was_read(plain: Connected) -> None:
    assert plain.handler._request_count == 0, AIOHTTP
    await plain.wire.send(GET + GET)
    await plain.until("_request_count", 2)


async def test_what_the_parser_refuses_counts_as_a_request(plain: Connected) -> None:
    await plain.wire.send(b"nonsense\r\n\r\n")
    await plain.until("_request_count", 1)


async def test_messages_holds_what_was_read_and_has_no_handler_yet(plain: Connected) -> None:
    assert plain.handler._messages == deque(), AIOHTTP
    await plain.wire.send(GET + request_bytes("GET", "/next"))
    await plain.entered.wait()
    [(message, body)] = plain.handler._messages
    assert (message.path, message.version, body.is_eof()) == ("/next", HttpVersion11, True), AIOHTTP
    plain.gate.set()
    assert [(await plain.wire.answer()).status, (await plain.wire.answer()).status] == [200, 200]
    assert plain.handler._messages == deque(), AIOHTTP


async def test_an_entry_of_messages_may_be_replaced_by_an_error(plain: Connected) -> None:
    error = ValueError("ours")
    await plain.wire.send(GET + GET)
    await plain.entered.wait()
    plain.handler._messages[0] = (aiohttp_internals.queued_error(error), plain.handler._messages[0][1])
    plain.gate.set()
    assert [(await plain.wire.answer()).status, (await plain.wire.answer()).status] == [200, 400], AIOHTTP
    assert plain.errors == [(400, error)], AIOHTTP


def test_an_error_in_the_queue_has_a_status_an_exception_and_a_message() -> None:
    assert list(inspect.signature(web_protocol._ErrInfo).parameters) == ["status", "exc", "message"], AIOHTTP


async def test_waiter_is_there_while_the_next_request_is_waited_for(plain: Connected) -> None:
    await asyncio.sleep(0)
    assert plain.handler._waiter is not None, AIOHTTP
    await plain.wire.send(GET)
    await plain.entered.wait()
    assert plain.handler._waiter is None, AIOHTTP
    plain.gate.set()
    await plain.wire.answer()
    async with asyncio.timeout(2):
        while plain.handler._waiter is None:
            await asyncio.sleep(0.001)


async def test_request_in_progress_is_true_from_the_handler_to_the_end_of_the_answer(plain: Connected) -> None:
    assert plain.handler._request_in_progress is False, AIOHTTP
    await plain.wire.send(GET)
    await plain.entered.wait()
    assert plain.handler._request_in_progress is True, AIOHTTP
    plain.gate.set()
    await plain.wire.answer()
    await plain.until("_request_in_progress", False)


async def test_close_drops_what_arrives_and_ends_the_connection_after_the_answer(plain: Connected) -> None:
    await plain.wire.send(GET)
    await plain.entered.wait()
    assert plain.handler._close is False, AIOHTTP
    plain.handler._close = True
    await plain.wire.send(GET)
    await asyncio.sleep(0.01)
    assert (plain.handler._request_count, len(plain.handler._messages)) == (1, 0), AIOHTTP
    plain.gate.set()
    assert (await plain.wire.answer()).status == 200
    assert await plain.wire.rest() == b"", AIOHTTP


async def test_next_keepalive_close_time_is_the_end_of_the_last_answer_and_the_keepalive_time(plain: Connected) -> None:
    clock = asyncio.get_running_loop().time
    for begun_s in (clock() - 1, clock()):
        idle_since_s = plain.handler._next_keepalive_close_time - plain.handler.keepalive_timeout
        assert begun_s - 0.1 <= idle_since_s <= clock(), AIOHTTP
        plain.gate.set()
        await plain.wire.send(GET)
        await plain.wire.answer()
        await plain.until("_request_in_progress", False)
        await asyncio.sleep(0)


async def test_keepalive_handle_is_the_timer_of_process_keepalive_and_is_set_again_where_there_is_none(
    plain: Connected,
) -> None:
    timer = plain.handler._keepalive_handle
    assert timer is not None, AIOHTTP
    timer.cancel()
    plain.handler._keepalive_handle = None
    plain.gate.set()
    await plain.wire.send(GET)
    await plain.wire.answer()
    async with asyncio.timeout(2):
        while plain.handler._keepalive_handle is None:
            await asyncio.sleep(0.001)


async def test_process_keepalive_closes_an_idle_connection_whose_time_is_over(plain: Connected) -> None:
    await asyncio.sleep(0)
    plain.handler._next_keepalive_close_time = 0.0
    plain.handler._process_keepalive()
    assert plain.handler._keepalive_handle is None, AIOHTTP
    assert await plain.wire.rest() == b"", AIOHTTP


async def test_process_keepalive_is_what_the_timer_calls() -> None:
    called = asyncio.Event()

    class Handler(OpenHandler):
        __slots__ = ()

        def is_request_coming(self) -> bool:
            called.set()
            return False

    def make() -> OpenHandler:
        return Handler(server, loop=asyncio.get_running_loop(), keepalive_timeout=0.01)

    server = web.Server(Plain().handle)
    sock = listening_socket()
    listener = await asyncio.get_running_loop().create_server(make, sock=sock)
    wire = await Wire.connect(sock.getsockname()[1])
    async with asyncio.timeout(2):
        await called.wait()
    assert await wire.rest() == b"", AIOHTTP
    await wire.close()
    listener.close()


async def test_reading_paused_is_true_while_a_bodys_buffer_is_full(plain: Connected) -> None:
    await plain.wire.send(CHUNKED + b"400\r\n" + b"x" * 1024 + b"\r\n")
    await plain.until("_reading_paused", True)
    plain.handler.resume_reading(resume_parser=False)
    assert plain.handler._reading_paused is False, AIOHTTP


async def test_reading_pauses_at_max_msg_queue_size_and_goes_on_at_msg_queue_resume_size(plain: Connected) -> None:
    assert (type(plain.handler._max_msg_queue_size), type(plain.handler._msg_queue_resume_size)) == (int, int), AIOHTTP
    plain.handler._max_msg_queue_size, plain.handler._msg_queue_resume_size = 2, 0
    for _ in range(8):
        await plain.wire.send(GET)
        await asyncio.sleep(0.005)  # so that each is a packet of its own
    assert len(plain.handler._messages) <= 3, AIOHTTP
    plain.gate.set()
    assert [(await plain.wire.answer()).status for _ in range(8)] == [200] * 8, AIOHTTP


async def test_what_stands_for_a_request_that_was_no_http_is_web_protocols_error(plain: Connected) -> None:
    await plain.wire.send(b"nonsense\r\n\r\n")
    assert (await plain.wire.answer()).status == 400
    assert plain.requests == [web_protocol.ERROR], AIOHTTP
    assert plain.requests[0] is web_protocol.ERROR, AIOHTTP


# --- what aiohttp's parser says ---


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        (b"GET /" + b"x" * 1500 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 1000),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2500 + b"\r\n\r\n", 2000),
    ],
    ids=["target", "field"],
)
async def test_a_line_that_is_too_long_names_its_limit(plain: Connected, sent: bytes, limit: int) -> None:
    await plain.wire.send(sent)
    await plain.wire.answer()
    [(_, error)] = plain.errors
    assert isinstance(error, LineTooLong), AIOHTTP
    assert aiohttp_internals.exceeded_bytes(error) == limit, AIOHTTP


async def test_too_many_lines_of_a_header_are_told_by_the_message(plain: Connected) -> None:
    await plain.wire.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 10 + b"\r\n")
    await plain.wire.answer()
    [(_, error)] = plain.errors
    assert isinstance(error, HttpProcessingError), AIOHTTP
    assert aiohttp_internals.has_too_many_headers(error), f"{error.message!r}; {AIOHTTP}"


async def test_an_unknown_version_is_told_by_the_first_line_of_the_message(plain: Connected) -> None:
    await plain.wire.send(b"GET / HTTP/7.3\r\nHost: Invalid HTTP version\r\n\r\n")
    await plain.wire.answer()
    [(_, error)] = plain.errors
    assert isinstance(error, HttpProcessingError), AIOHTTP
    assert aiohttp_internals.has_unknown_version(error), f"{error.message!r}; {AIOHTTP}"


async def test_a_clients_words_are_not_taken_for_the_parsers(plain: Connected) -> None:
    await plain.wire.send(b"nonsense Invalid HTTP version\r\n\r\n")
    await plain.wire.answer()
    [(_, error)] = plain.errors
    assert isinstance(error, HttpProcessingError), AIOHTTP
    assert not aiohttp_internals.has_unknown_version(error), f"{error.message!r}; {AIOHTTP}"


# --- one home ---


def _names_of_self(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}


def test_every_private_name_of_aiohttp_has_its_one_home_and_a_test() -> None:
    private = {name for owner in (web.RequestHandler, web.Server, web.BaseRequest) for name in dir(owner)}
    private = {name for name in private if name.startswith("_") and not name.startswith("__")}
    used = _names_of_self(ast.parse(HOME.read_text())) & private
    text = Path(__file__).read_text()
    assert {name for name in used if f"handler.{name}" not in text} == set(), "a test for each of them is here"
    # The other classes there have fields of their own; a connection is what aiohttp's names would be read from.
    connection = _names_of_self(ast.parse((GATEWAY / "edge/http.py").read_text())) & private
    assert connection == set()
    for path in sorted(GATEWAY.rglob("*.py")):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imported if (node.module or "").startswith("aiohttp") for alias in node.names}
        assert path == HOME or not {name for name in names if name.startswith("_")} | (names & {"ERROR"}), path


# --- msgspec's words ---


class Item(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Words(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1, le=9)] = 1
    eights: Annotated[int, Meta(multiple_of=8)] = 8
    letters: Annotated[str, Meta(pattern="^a+$")] = "a"
    short: Annotated[str, Meta(min_length=2)] = "ab"
    choice: Literal["x", "y"] = "x"
    either: bool | str | None = None
    items: list[Item] = msgspec.field(default_factory=list)
    by_name: dict[str, int] = msgspec.field(default_factory=dict)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"number": "x"}, "Expected `int`, got `str` - at `$.number`"),
        ({"number": 0}, "Expected `int` >= 1 - at `$.number`"),
        ({"number": 10}, "Expected `int` <= 9 - at `$.number`"),
        ({"eights": 7}, "Expected `int` that's a multiple of 8 - at `$.eights`"),
        ({"letters": "b"}, "Expected `str` matching regex '^a+$' - at `$.letters`"),
        ({"short": "a"}, "Expected `str` of length >= 2 - at `$.short`"),
        ({"either": 1}, "Expected `bool | str | null`, got `int` - at `$.either`"),
        ({"choice": "z"}, "Invalid enum value 'z' - at `$.choice`"),
        ({"items": 1}, "Expected `array`, got `int` - at `$.items`"),
        ({"items": [{}]}, "Object missing required field `number` - at `$.items[0]`"),
        ({"items": [{"number": 1, "z": 1}]}, "Object contains unknown field `z` - at `$.items[0]`"),
        ({"items": [1]}, "Expected `object`, got `int` - at `$.items[0]`"),
        ({"by_name": {"a": "x"}}, "Expected `int`, got `str` - at `$.by_name[...]`"),
    ],
    ids=repr,
)
def test_msgspec_names_types_bounds_and_places_in_these_words(fields: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(fields, Words)
    assert str(raised.value) == message, MSGSPEC


def test_msgspec_names_a_missing_field_of_the_body_without_a_place() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({}, Item)
    assert str(raised.value) == "Object missing required field `number`", MSGSPEC


# --- orjson's words ---


@pytest.mark.parametrize(
    ("body", "words", "position"),
    [
        (b'{"input":"\\ud800"}', "surrogate in string", 10),
        (b"[" * 3000, "depth limit", None),
        (b'{"a":1' + b"0" * 400 + b"}", "infinity", 5),
        (b'{"a":-1' + b"0" * 400 + b"}", "infinity", 5),
        (b'{"a":1e999}', "infinity", 5),
    ],
    ids=["surrogate", "depth", "number", "negative number", "exponent"],
)
def test_orjson_says_what_is_no_json_in_these_words_and_where(body: bytes, words: str, position: int | None) -> None:
    with pytest.raises(orjson.JSONDecodeError) as raised:
        orjson.loads(body)
    assert words in raised.value.msg, ORJSON
    assert position is None or raised.value.pos == position, ORJSON
    assert raised.value.doc == body.decode(), ORJSON
