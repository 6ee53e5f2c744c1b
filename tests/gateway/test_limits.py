"""Every limit that a request can meet, just under it and just over it; what /info and the docs say of them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.config import GatewayConfig
from common.errors import Overloaded
from gateway.app import _max_connections
from gateway.edge.body import BodyLimits
from gateway.edge.memory_budget import MemoryBudget
from gateway.open_request import OpenRequest, Options
from gateway.routes.operations import LimitsInfo
from tests.gateway.conftest import MAX_TOKENS, Running, Serve
from tests.gateway.wire import Answer, Wire, ask, embed, request_bytes
from tests.timing import against_the_clock, assert_in_time

PATH = "/v1/embeddings"
BODY = b'{"input":"w1"}'
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024
HELD_BYTES = 117_648  # 85 % of it are 100,000


async def settled(port: int, sent: bytes) -> Answer:
    """The answer to these bytes; where it says that the connection closes, it does, else it serves on."""
    wire = await Wire.connect(port)
    answer = await wire.ask(sent)
    if answer.headers.get("connection") == "close":
        assert await wire.rest() == b""
    else:
        assert (await wire.ask(request_bytes("GET", "/health"))).status == 200
    await wire.close()
    return answer


async def until_held(running: Running, num_bytes: int) -> None:
    while running.gateway._memory.num_bytes != num_bytes:
        await asyncio.sleep(0.001)


def told(answer: Answer) -> tuple[int, str | None, bool]:
    """Status, code of the error, and whether the connection closes."""
    code = None if answer.status == 200 else str(answer.error["code"])
    return answer.status, code, answer.headers.get("connection") == "close"


# --- the header ---


def header_of(num_bytes: int) -> bytes:
    """A request whose header lines, line ends included, have so many bytes: four long ones and a short one."""
    lines = b"Host: x\r\n" + (b"X: " + b"a" * 16_000 + b"\r\n") * 4
    lines += b"Y: " + b"a" * (num_bytes - len(lines) - 5) + b"\r\n"
    assert len(lines) == num_bytes
    return b"GET /health HTTP/1.1\r\n" + lines + b"\r\n"


def chunked(num_bytes: int) -> bytes:
    """A chunked body of so many bytes."""
    chunk = b"%x\r\n" % (num_bytes // 4 - 4) + b" " * (num_bytes // 4 - 4) + b"\r\n"
    end = BODY.ljust(num_bytes % 4 + 16)
    return CHUNKED + chunk * 4 + b"%x\r\n" % len(end) + end + b"\r\n0\r\n\r\n"


def lines_of(num_lines: int) -> bytes:
    return request_bytes("GET", "/health", headers={f"X-{index}": "a" for index in range(num_lines - 1)})


def chunks_of(num_chunks: int) -> bytes:
    return CHUNKED + b"1\r\n \r\n" * (num_chunks - 1) + b"e\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("make", "most", "refusal"),
    [
        (lambda n: request_bytes("GET", "/health?".ljust(n, "a")), 4096, (414, "header_too_large", True)),
        (lambda n: request_bytes("GET", "/health", headers={"X": "a" * n}), 16_384, (431, "header_too_large", True)),
        (lines_of, 100, (431, "header_too_large", True)),
        (header_of, 65_536, (431, "header_too_large", True)),
        (chunked, 16 * MIB, (413, "body_too_large", True)),
        (chunks_of, 65_536, (413, "too_many_chunks", True)),
    ],
    ids=["target", "header value", "header lines", "header", "chunked body", "chunks"],
)
async def test_as_much_as_is_allowed_is_read_and_one_more_is_refused(
    server: Running, make: Callable[[int], bytes], most: int, refusal: tuple[int, str, bool]
) -> None:
    assert told(await settled(server.port, make(most))) == (200, None, False)
    assert told(await settled(server.port, make(most + 1))) == refusal


async def test_a_header_in_packets_has_the_same_limit(server: Running) -> None:
    for num_bytes, status in ((65_536, 200), (65_537, 431)):
        wire = await Wire.connect(server.port)
        sent = header_of(num_bytes)
        for start in range(0, len(sent), 10_000):
            await wire.send(sent[start : start + 10_000])
            await asyncio.sleep(0.001)
        assert (await wire.answer()).status == status
        await wire.close()


# --- the body ---


async def test_a_body_of_16_mib_is_read_and_a_byte_more_is_413(server: Running) -> None:
    assert told(await settled(server.port, request_bytes("POST", PATH, BODY.ljust(16 * MIB)))) == (200, None, False)
    declared = HEAD + b"Content-Length: %d\r\n\r\n" % (16 * MIB + 1)
    assert told(await settled(server.port, declared)) == (413, "body_too_large", True)


# --- all bodies together ---


async def test_a_body_that_fits_beside_those_that_are_being_read_is_read_and_a_larger_one_is_429(serve: Serve) -> None:
    running = await serve(max_body_bytes=100_000, max_held_bytes=HELD_BYTES)
    begun = await Wire.connect(running.port)
    await begun.send(HEAD + b"Content-Length: 60000\r\n\r\n" + BODY)
    await asyncio.sleep(0.01)
    assert told(await ask(running.port, "POST", PATH, BODY.ljust(40_000))) == (200, None, False)
    refused = await settled(running.port, HEAD + b"Content-Length: 40001\r\n\r\n")
    assert told(refused) == (429, "overloaded", True)
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("1", "1000")
    assert told(await settled(running.port, request_bytes("POST", PATH, BODY.ljust(16_384)))) == (200, None, False)
    assert (await begun.ask(b" " * (60_000 - len(BODY)))).status == 200
    assert told(await ask(running.port, "POST", PATH, BODY.ljust(100_000))) == (200, None, False)
    await begun.close()


async def test_a_chunked_body_counts_by_what_has_come_of_it(serve: Serve) -> None:
    running = await serve(max_body_bytes=100_000, max_held_bytes=HELD_BYTES)
    chunk = b"7530\r\n" + b" " * 30_000 + b"\r\n"
    first, second = await Wire.connect(running.port), await Wire.connect(running.port)
    await first.send(CHUNKED + chunk * 2)
    await until_held(running, 60_000)
    await second.send(CHUNKED + chunk * 2)
    assert told(await second.answer()) == (429, "overloaded", True)
    assert running.gateway._memory.num_bytes == 60_000
    assert (await first.ask(b"e\r\n" + BODY + b"\r\n0\r\n\r\n")).status == 200
    await first.close()
    await second.close()


async def test_a_body_counts_until_it_is_answered_or_its_client_leaves(serve: Serve) -> None:
    running = await serve(max_body_bytes=100_000, max_held_bytes=HELD_BYTES)
    running.stub.gate.clear()
    runs = asyncio.ensure_future(ask(running.port, "POST", PATH, BODY.ljust(40_000)))
    await running.stub.entered.wait()
    held = running.gateway._memory.num_bytes
    assert 40_000 < held < 41_000  # with its ids and its row
    leaves = await Wire.connect(running.port)
    await leaves.send(HEAD + b"Content-Length: 50000\r\n\r\n")
    await until_held(running, held + 50_000)
    await leaves.close()
    await until_held(running, held)
    running.stub.gate.set()
    assert (await runs).status == 200


def test_a_body_that_could_never_be_held_is_a_wrong_flag() -> None:
    with pytest.raises(ValueError, match="--max-held-bytes is less than --max-body-bytes"):
        GatewayConfig(run_dir="x", max_body_bytes=100, max_held_bytes=99)


# --- all that is held ---


async def test_what_waits_for_its_rows_counts_with_them_until_it_is_answered(serve: Serve) -> None:
    running = await serve(max_body_bytes=100_000, max_held_bytes=HELD_BYTES)
    running.stub.gate.clear()
    waits = asyncio.ensure_future(embed(running.port, {"input": [f"w{index}" for index in range(50)]}))
    await running.stub.entered.wait()
    dimensions = running.stub.facts.dimensions
    assert running.gateway._memory.num_bytes == 50 * (2 * 3 * 4 + 4 * dimensions + 2 * 64)
    running.stub.gate.set()
    assert (await waits).status == 200
    assert running.gateway._memory.num_bytes == 0


async def test_bodies_that_never_come_keep_large_ones_out_and_no_short_query(serve: Serve) -> None:
    running = await serve(max_body_bytes=100_000, max_held_bytes=HELD_BYTES)
    begun = await Wire.connect(running.port)
    await begun.send(HEAD + b"Content-Length: 100000\r\n\r\n")
    await until_held(running, 100_000)
    assert told(await settled(running.port, HEAD + b"Content-Length: 20000\r\n\r\n")) == (429, "overloaded", True)
    assert told(await settled(running.port, request_bytes("POST", PATH, BODY))) == (200, None, False)
    await begun.close()


async def test_from_85_percent_answers_close_and_from_95_nothing_new_is_let_in(serve: Serve) -> None:
    running = await serve(max_body_bytes=100_000, max_held_bytes=HELD_BYTES)
    with running.gateway._memory.hold() as held:
        for num_bytes, expected in (
            (99_000, (200, None, False)),
            (1_500, (200, None, True)),
            (11_500, (429, "overloaded", True)),
        ):
            held.grow(num_bytes)
            assert told(await settled(running.port, request_bytes("POST", PATH, BODY))) == expected
        health = await settled(running.port, request_bytes("GET", "/health"))
        assert told(health) == (200, None, True)
    assert told(await settled(running.port, request_bytes("POST", PATH, BODY))) == (200, None, False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"input": "w1 w2"}, id="answered"),
        pytest.param({"input": "w1 " * 100, "truncate": False}, id="too long for a query"),
        pytest.param({"input": "w1 " * 200, "truncate": False}, id="too long, tokenized with others"),
        pytest.param({"input": ["w1", ""], "partial": True}, id="in part, without an empty one"),
        pytest.param(
            {"input": ["w1", "w1 " * 100], "partial": True, "truncate": False}, id="in part, without a long one"
        ),
        pytest.param({"input": ["", "w1 " * 100], "partial": True, "truncate": False}, id="no part of it is right"),
    ],
)
async def test_what_a_request_held_is_free_when_it_is_answered_and_not_garbage(
    serve: Serve, fields: dict[str, object]
) -> None:
    running = await serve()
    wire = await Wire.connect(running.port)
    sent = request_bytes("POST", PATH, json.dumps(fields).encode())
    gc.collect()
    gc.disable()
    try:
        for _ in range(40):
            await wire.ask(sent)
        assert gc.collect() < 40
    finally:
        gc.enable()
        await wire.close()


def test_a_request_that_is_larger_than_all_is_let_in_alone() -> None:
    memory = MemoryBudget(1000)
    with memory.hold() as large:
        large.grow(2000)
        with pytest.raises(Overloaded), memory.hold():
            pass
    assert memory.num_bytes == 0
    with memory.hold() as small:
        small.grow(10)
        with memory.hold() as large, pytest.raises(Overloaded):
            large.grow(2000)
    assert memory.num_bytes == 0


def test_what_a_request_holds_is_known_before_it_is_there() -> None:
    sequences = [np.arange(length, dtype=np.int32) for length in (3, 5)]
    options = Options("f", 16, normalize=True, encoding="float32", lane="online", deadline_ns=1)
    ids, noted, row = 4 * 8, 64, 4 * 16
    assert OpenRequest.num_bytes(sequences[:1], options) == 4 * 3 + 2 * noted + row
    assert OpenRequest.num_bytes(sequences, options) == 2 * ids + 4 * noted + 2 * row
    spans = [np.zeros((4, 2), np.int32), np.zeros((1, 2), np.int32)]
    assert OpenRequest.num_bytes(sequences, options, spans) == 2 * ids + 7 * noted + 5 * row


def with_body_limits(running: Running, **changes: float) -> None:
    """Shorter limits than flags can ask for."""
    running.gateway._body_limits = dataclasses.replace(running.gateway._body_limits, **changes)


async def trickle(port: int, num_bytes: int, every_s: float, times: int) -> Answer:
    """Send a body of so many pieces, each so large; the last of them ends it."""
    wire = await Wire.connect(port)
    await wire.send(HEAD + b"Content-Length: %d\r\n\r\n" % (num_bytes * times))
    answer = asyncio.ensure_future(wire.answer())
    for piece in range(times):
        if answer.done():
            break
        await wire.send((BODY if piece == times - 1 else b"").rjust(num_bytes))
        await asyncio.sleep(every_s)
    result = await answer
    await wire.close()
    return result


@against_the_clock
async def test_a_body_that_comes_at_twice_the_slowest_pace_is_read(server: Running) -> None:
    with_body_limits(server, min_bytes_per_s=4000, pace_window_s=0.1)
    assert (await trickle(server.port, 80, 0.01, 40)).status == 200  # for four times as long as the window


@against_the_clock
async def test_a_body_that_comes_at_half_the_slowest_pace_is_408(server: Running) -> None:
    with_body_limits(server, min_bytes_per_s=4000, pace_window_s=0.05)
    answer = await trickle(server.port, 20, 0.01, 100)
    assert told(answer) == (408, "request_timeout", True)
    assert answer.error["message"] == "The body came at less than 4000 bytes a second. Send it again."


async def test_a_fast_body_that_stops_is_408_after_the_window(server: Running) -> None:
    with_body_limits(server, min_bytes_per_s=10, pace_window_s=0.1)
    wire = await Wire.connect(server.port)
    await wire.send(HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 900_000)
    begin_s = asyncio.get_running_loop().time()
    assert told(await wire.answer()) == (408, "request_timeout", True)
    taken_s = asyncio.get_running_loop().time() - begin_s
    assert taken_s > 0.05
    assert_in_time(taken_s, 2)
    await wire.close()


async def test_a_body_has_a_time_however_fast_it_comes(server: Running) -> None:
    with_body_limits(server, timeout_s=0.1, min_bytes_per_s=1)
    answer = await trickle(server.port, 1000, 0.01, 100)
    assert told(answer) == (408, "request_timeout", True)
    assert answer.error["message"] == "The body did not arrive within 0.1 s. Send it again."


def test_the_pace_is_8_kib_a_second_over_5_seconds_unless_told_otherwise() -> None:
    limits = BodyLimits(max_bytes=1, timeout_s=1)
    assert (limits.min_bytes_per_s, limits.pace_window_s) == (8192, 5)
    assert GatewayConfig(run_dir="x").min_body_bytes_per_s == 8192


# --- what is in it ---


async def test_2048_inputs_are_embedded_and_one_more_is_400(server: Running) -> None:
    assert (await embed(server.port, {"input": ["w1"] * 2048})).status == 200
    assert told(await embed(server.port, {"input": ["w1"] * 2049})) == (400, "too_many_inputs", False)


@pytest.mark.parametrize(
    ("allowed", "one_more"),
    [
        (["w1 w2 w3 w4"] * 2, ["w1 w2 w3 w4", "w1 w2 w3 w4 w5"]),
        ([[5] * 6] * 2, [[5] * 6, [5] * 7]),
    ],
    ids=["texts", "ids"],
)
async def test_a_request_of_as_many_tokens_as_allowed_is_embedded_and_one_more_is_400(
    serve: Serve, allowed: object, one_more: object
) -> None:
    running = await serve(max_request_tokens=12)
    assert (await embed(running.port, {"input": allowed})).status == 200
    assert told(await embed(running.port, {"input": one_more}))[:2] == (400, "too_many_tokens")


async def test_a_text_of_32_characters_a_token_is_tokenized_and_one_more_is_400(server: Running) -> None:
    text = "w1".ljust(32 * MAX_TOKENS)
    assert (await embed(server.port, {"input": text})).status == 200
    assert told(await embed(server.port, {"input": text + " "})) == (400, "input_too_long", False)


# --- how many at once ---


@pytest.fixture
def set_max_files() -> Iterator[Callable[[int], None]]:
    """Set this process's limit on file descriptors; it is set back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda number: resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("max_files", "expected"), [(10_000, 4096), (1024, 960), (65, 1), (10, 1)])
def test_connections_stay_below_the_limit_on_file_descriptors(
    set_max_files: Callable[[int], None], max_files: int, expected: int
) -> None:
    set_max_files(max_files)
    number = _max_connections(GatewayConfig(run_dir="x"))
    set_max_files(4096)
    assert number == expected


@pytest.mark.parametrize("source", ["gateway", "scheduler"])
@pytest.mark.parametrize(
    "given", ["w1", ["w1"], ["w1", "w2", "w3", "w4", "w5"]], ids=["a string", "a list of one", "a list of five"]
)
async def test_each_shape_of_input_gets_the_same_answer_at_the_limit_and_is_served_after_it(
    serve: Serve, given: object, source: str
) -> None:
    running = await serve(max_concurrent_requests=2)
    running.stub.gate.clear()
    held = [asyncio.ensure_future(embed(running.port, {"input": "w1"})) for _ in range(2)]
    while len(running.stub.submitted) < 2:
        await asyncio.sleep(0.001)
    if source == "scheduler":
        running.stub.error = Overloaded("The queue is full.", retry_after_s=1)
        running.stub.gate.set()
        await asyncio.gather(*held)

    refused = await embed(running.port, {"input": given})

    assert told(refused) == (429, "overloaded", False)
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("1", "1000")
    assert (await ask(running.port, "GET", "/health")).status == 200
    running.stub.error = None
    running.stub.gate.set()
    await asyncio.gather(*held)
    assert (await embed(running.port, {"input": given})).status == 200


# --- what is said of them ---


async def test_info_lists_every_limit(serve: Serve) -> None:
    running = await serve(max_connections=7, write_timeout_s=9)
    limits = (await ask(running.port, "GET", "/info")).json["limits"]
    assert limits == {
        "max_body_bytes": 16_777_216,
        "max_body_chunks": 65_536,
        "max_held_bytes": 1_073_741_824,
        "max_target_bytes": 4096,
        "max_headers": 100,
        "max_embed_all_tokens": 65_536,
        "max_header_line_bytes": 16_384,
        "max_header_bytes": 65_536,
        "max_connections": 7,
        "max_concurrent_requests": 4096,
        "max_inputs": 2048,
        "max_request_tokens": 1_000_000,
        "max_rerank_documents": 1000,
        "max_contextual_documents": 512,
        "max_contextual_chunks": 16_000,
        "max_contextual_tokens": 120_000,
        "max_input_tokens": MAX_TOKENS,
        "max_input_chars": 32 * MAX_TOKENS,
        "header_timeout_ms": 10_000,
        "body_timeout_ms": 30_000,
        "min_body_bytes_per_s": 8192,
        "write_timeout_ms": 9000,
        "keepalive_timeout_ms": 75_000,
        "default_timeout_ms": 60_000,
        "max_timeout_ms": 600_000,
        "auto_truncate": False,
    }


def test_the_page_on_operating_names_every_limit_that_info_does() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "operating.md").read_text()
    table = page.partition("\n## Limits\n")[2].partition("\n## ")[0]
    first_column = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(first_column)))
    assert named == set(LimitsInfo.__struct_fields__) - {"auto_truncate"}
