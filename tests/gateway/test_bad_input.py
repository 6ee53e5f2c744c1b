"""What bad input is answered with: one row a case, its id the row of the reliability table it comes from.

Each goes over a real socket to a real gateway; afterwards the same gateway must still serve.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from common.protocol import ModelFacts
from gateway.body import _MAX_CHUNKS
from tests.gateway.conftest import DIMENSIONS, MAX_TOKENS, VOCAB_SIZE, Running, Serve
from tests.gateway.wire import Wire, ask, embed, request_bytes

PATH = "/v1/embeddings"
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CANARY = "canary-7f3a"  # stands in many of the requests, and may stand in no answer

MAX_INPUTS = 20
MAX_BODY_BYTES = 1_000_000
MAX_REQUEST_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class Case:
    row: str
    sent: bytes
    status: int
    code: str
    param: str | None = None
    type: str = "invalid_request_error"
    closes: bool = False
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.row


def body(row: str, data: bytes, status: int, code: str, param: str | None = None, **rest: object) -> Case:
    """A body as it is, declared as JSON."""
    return Case(row, request_bytes("POST", PATH, data), status, code, param, **rest)


def fields(row: str, value: dict[str, object], code: str, param: str | None, status: int = 400, **rest: object) -> Case:
    """A JSON object; `input` is right unless it is given."""
    return body(row, json.dumps({"input": "w1"} | value).encode(), status, code, param, **rest)


def header(row: str, headers: dict[str, str | None], status: int, code: str, param: str | None = None) -> Case:
    """A good body under other headers."""
    return Case(row, request_bytes("POST", PATH, b'{"input":"w1"}', headers), status, code, param)


def wire(row: str, data: bytes, status: int, code: str = "bad_request", **rest: object) -> Case:
    """Bytes as they are; the connection closes."""
    return Case(row, data, status, code, closes=True, **rest)


BODIES = [
    body("1 empty", b"", 400, "invalid_json"),
    body("2 no JSON", b"canary-7f3a", 400, "invalid_json"),
    body("2 cut", b'{"input":"canary-7f3a', 400, "invalid_json"),
    body("2 single quotes", b"{'input':'canary-7f3a'}", 400, "invalid_json"),
    body("2 comment", b'{"input":"w1"/* canary-7f3a */}', 400, "invalid_json"),
    body("2 trailing comma", b'{"input":"w1",}', 400, "invalid_json"),
    body("2 trailing text", b'{"input":"w1"} canary-7f3a', 400, "invalid_json"),
    body("3 byte order mark", b'\xef\xbb\xbf{"input":"w1"}', 400, "invalid_json"),
    body("3 UTF-16", '{"input":"w1"}'.encode("utf-16"), 400, "invalid_json"),
    body("3 UTF-32", '{"input":"w1"}'.encode("utf-32"), 400, "invalid_json"),
    body("3 Latin-1", '{"input":"é"}'.encode("latin-1"), 400, "invalid_json"),
    body("3 encoded surrogate", b'{"input":"\xed\xa0\x80"}', 400, "invalid_json"),
    body("4 array", b"[]", 400, "invalid_type"),
    body("4 string", b'"canary-7f3a"', 400, "invalid_type"),
    body("4 number", b"1", 400, "invalid_type"),
    body("4 null", b"null", 400, "invalid_type"),
    body("5 depth 33", b'{"input":' + b"[" * 33 + b"]" * 33 + b"}", 400, "invalid_type", "input[0][0]"),
    body("5 depth 2000", b'{"input":' + b"[" * 2000 + b"]" * 2000 + b"}", 400, "json_too_deep"),
    body("5 depth 100000", b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "json_too_deep"),
    body("5 depth 33 unknown", b'{"x":' + b"[" * 33 + b"]" * 33 + b',"input":"w1"}', 400, "unknown_field", "x"),
    body("5 depth 2000 unknown", b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}", 400, "json_too_deep"),
    body("6 NaN", b'{"input":[NaN]}', 400, "invalid_json"),
    body("6 Infinity", b'{"input":"w1","dimensions":Infinity}', 400, "invalid_json"),
    body("6 1e999", b'{"input":"w1","priority":1e999}', 400, "invalid_json"),
    body("7 25 digits", b'{"input":"w1","dimensions":' + b"1" * 25 + b"}", 400, "out_of_range", "dimensions"),
    body("7 5000 digits", b'{"input":"w1","dimensions":' + b"1" * 5000 + b"}", 400, "out_of_range"),
    body("8 lone high", rb'{"input":"\ud800"}', 400, "invalid_unicode"),
    body("8 lone low", rb'{"input":"ok \udc00"}', 400, "invalid_unicode"),
    body("8 pair broken", rb'{"input":["w1","\ud83d\u0041"]}', 400, "invalid_unicode"),
    fields("10 misspelt", {"modle": "tiny"}, "unknown_field", "modle"),
    fields("10 singular", {"dimension": 4}, "unknown_field", "dimension"),
    fields("10 hostile name", {"\x00\n": 1}, "unknown_field", None),
    fields("10 long name", {"x" * 10_000: 1}, "unknown_field", None),
    fields("16 model null", {"model": None}, "invalid_type", "model"),
    fields("16 model a number", {"model": 5}, "invalid_type", "model"),
    fields("16 model empty", {"model": ""}, "missing_field", "model"),
    *(
        fields(f"17 model {name}", {"model": model}, "model_not_found", "model", 404, type="not_found_error")
        for name, model in {
            "other": "canary-7f3a",
            "wrong case": "Tiny",
            "path": "../tiny",
            "NUL": "tiny\x00",
            "10 KB": "x" * 10_000,
        }.items()
    ),
    body("19 missing", b"{}", 400, "invalid_type", "input"),
    *(
        fields(f"19 {value!r}", {"input": value}, "invalid_type", "input")
        for value in (None, 5, {"text": "canary-7f3a"}, True, 1.5)
    ),
    fields("20 empty list", {"input": []}, "empty_input", "input"),
    fields("21 empty string", {"input": ""}, "empty_input", "input"),
    fields("21 empty string in a list", {"input": ["w1", "w2", "w3", ""]}, "empty_input", "input[3]"),
    fields("22 too many", {"input": ["w1"] * (MAX_INPUTS + 1)}, "too_many_inputs", "input"),
    fields("22 too many lists", {"input": [[5]] * (MAX_INPUTS + 1)}, "too_many_inputs", "input"),
    fields("23 string and number", {"input": ["canary-7f3a", 1]}, "invalid_type", "input[1]"),
    fields("23 number and string", {"input": [1, "canary-7f3a"]}, "invalid_type", "input[1]"),
    fields("23 string and list", {"input": ["canary-7f3a", [1]]}, "invalid_type", "input[1]"),
    fields("23 list and string", {"input": [[1], "canary-7f3a"]}, "invalid_type", "input[1]"),
    fields("23 number and list", {"input": [1, [2]]}, "invalid_type", "input[1]"),
    fields("23 null first", {"input": [None]}, "invalid_type", "input[0]"),
    fields("23 null second", {"input": ["w1", None]}, "invalid_type", "input[1]"),
    fields("23 string in ids", {"input": [[1], [1, "canary-7f3a"]]}, "invalid_type", "input[1][1]"),
    fields("27 lone", {"input": "w1 " * MAX_TOKENS}, "context_length_exceeded", "input"),
    fields("27 in a list", {"input": ["w1", "w1 " * MAX_TOKENS]}, "context_length_exceeded", "input[1]"),
    fields("27 ids", {"input": [5] * (MAX_TOKENS + 1)}, "context_length_exceeded", "input"),
    fields("27 ids in a list", {"input": [[5], [5] * (MAX_TOKENS + 1)]}, "context_length_exceeded", "input[1]"),
    fields("28 lone", {"input": "a" * (32 * MAX_TOKENS + 1)}, "input_too_long", "input"),
    fields("28 in a list", {"input": ["w1", "a" * 200_000]}, "input_too_long", "input[1]"),
    fields("29 tokens", {"input": ["w1 " * 14] * 13}, "too_many_tokens", "input"),
    fields("29 ids", {"input": [[5] * 16] * 13}, "too_many_tokens", "input"),
    fields("31 lone list of nothing", {"input": [[]]}, "empty_input", "input[0]"),
    fields("31 second list of nothing", {"input": [[5], []]}, "empty_input", "input[1]"),
    *(
        fields(f"32 {token}", {"input": [[1, 2, 3, 4, 5, token]]}, "invalid_token_id", "input[0][5]")
        for token in (-1, VOCAB_SIZE, 2**63, 2**70, 1.0, 1e30, True)
    ),
    *(fields(f"32 flat {token}", {"input": [token]}, "invalid_token_id", "input[0]") for token in (-1, 1.5, True)),
    fields("33 three deep", {"input": [[[1]]]}, "invalid_type", "input[0][0]"),
    *(
        fields(f"34 {value}", {"truncate_prompt_tokens": value}, "unknown_field", "truncate_prompt_tokens")
        for value in (0, -1, True, 1.5, 100_000, 1)
    ),
    fields("35 stride", {"stride": 5}, "unknown_field", "stride"),
    *(
        fields(f"36 {value!r}", {"dimensions": value}, code, "dimensions")
        for value, code in {
            0: "out_of_range",
            -1: "out_of_range",
            DIMENSIONS + 1: "out_of_range",
            1.5: "invalid_type",
            "64": "invalid_type",
        }.items()
    ),
    fields("36 True", {"dimensions": True}, "invalid_type", "dimensions"),
    *(
        fields(f"38 {value!r}", {"encoding_format": value}, code, "encoding_format")
        for value, code in {
            "hex": "invalid_value",
            "Float": "invalid_value",
            "": "invalid_value",
            "int8": "invalid_value",
            5: "invalid_type",
            "base64_int8": "unsupported_parameter",
            "base64_binary": "unsupported_parameter",
            "base64_ubinary": "unsupported_parameter",
        }.items()
    ),
    fields("39 user a number", {"user": 5}, "invalid_type", "user"),
    fields("39 user of 257", {"user": "u" * 257}, "invalid_type", "user"),
    fields("40 prompt", {"prompt_name": "canary-7f3a"}, "invalid_value", "prompt_name"),
    fields("40 prompt a number", {"prompt_name": 5}, "invalid_type", "prompt_name"),
    fields("40 two prompts", {"prompt_name": "query", "prompt": "q"}, "invalid_value", "prompt"),
    fields("40 prompt for ids", {"input": [5], "prompt_name": "query"}, "invalid_value", "prompt_name"),
    fields("40 input_type", {"input_type": "qeury"}, "invalid_value", "input_type"),
    fields("60 image", {"input": {"image_url": "file:///canary-7f3a"}}, "invalid_type", "input"),
    fields("60 image in a list", {"input": [{"image_url": "http://canary-7f3a/"}]}, "invalid_type", "input[0]"),
    fields("79 stream", {"stream": True}, "unsupported_parameter", "stream"),
    fields("79 stream yes", {"stream": "yes"}, "invalid_type", "stream"),
    fields("80 one is bad", {"input": ["w1"] * 17 + [""] + ["w1"]}, "empty_input", "input[17]"),
    fields("80 one is too long", {"input": ["w1"] * 5 + ["w1 " * 15] + ["w1"]}, "context_length_exceeded", "input[5]"),
    fields("truncate", {"truncate": "yes"}, "invalid_type", "truncate"),
    fields("truncation_direction", {"truncation_direction": "middle"}, "invalid_value", "truncation_direction"),
    fields("normalize", {"normalize": 1}, "invalid_type", "normalize"),
    fields("lane", {"lane": "fast"}, "invalid_value", "lane"),
]

HEADERS = [
    header("11 missing", {"Content-Type": None}, 415, "unsupported_media_type"),
    header("11 text", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    header("11 multipart", {"Content-Type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
    header("11 charset", {"Content-Type": "application/json; charset=latin-1"}, 415, "unsupported_media_type"),
    *(
        header(f"12 {coding}", {"Content-Encoding": coding}, 415, "unsupported_encoding")
        for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "identity", "canary-7f3a")
    ),
    header("58 expectation", {"Expect": "canary-7f3a"}, 417, "expectation_failed"),
    *(
        header(f"61 {value}", {"X-Request-Timeout-Ms": value}, 400, "invalid_header", "X-Request-Timeout-Ms")
        for value in ("0", "-5", "abc", "1.5", "000", "", "\xb2")
    ),
    *(
        Case(f"53 {target[:20]}", request_bytes("POST", target, b"{}"), 404, "unknown_route", type="not_found_error")
        for target in ("/canary-7f3a", "//v1/embeddings", "/%2e%2e/x", "/v1/%65mbeddings", "/v1/embeddings//", "/a%00b")
    ),
    *(
        Case(
            f"54 {method}",
            request_bytes(method, PATH, headers={"Connection": "close"}),
            405,
            "method_not_allowed",
            headers={"allow": "POST"},
        )
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")
    ),
    Case(
        "54 health", request_bytes("POST", "/health", b"{}"), 405, "method_not_allowed", headers={"allow": "GET, HEAD"}
    ),
]

WIRE = [
    wire("13 declared", HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), 413, "body_too_large"),
    wire(
        "14 chunked",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f4241\r\n" + b" " * 1_000_001 + b"\r\n0\r\n\r\n",
        413,
        "body_too_large",
    ),
    wire(
        "15 chunks",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * (_MAX_CHUNKS + 1),
        413,
        "too_many_chunks",
    ),
    wire("55 header line", GET + b"X: " + b"a" * 17_000 + b"\r\n\r\n", 431, "header_too_large"),
    wire("55 header lines", GET + b"X: canary-7f3a\r\n" * 101 + b"\r\n", 431, "header_too_large"),
    wire("55 target", b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "header_too_large"),
    wire("55 100 KB key", GET + b"Authorization: Bearer " + b"k" * 100_000 + b"\r\n\r\n", 431, "header_too_large"),
    wire("56 CL and TE", HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    wire("56 two CL", HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    wire("56 two equal CL", HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    wire("56 negative CL", HEAD + b"Content-Length: -3\r\n\r\nabc", 400),
    wire("56 CL of letters", HEAD + b"Content-Length: canary-7f3a\r\n\r\nabc", 400),
    wire("56 TE twice", HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    wire("56 TE unknown", HEAD + b"Transfer-Encoding: canary-7f3a\r\n\r\n", 400),
    wire("56 chunk size", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n", 400),
    wire("56 chunk longer than said", HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\ncanary-7f3a\r\n0\r\n\r\n", 400),
    wire("56 folded header", GET + b"X: a\r\n canary-7f3a\r\n\r\n", 400),
    wire("56 bare LF", b"GET /health HTTP/1.1\nHost: canary-7f3a\n\n", 400),
    wire("56 bare LF in a value", GET + b"X: a\nY: canary-7f3a\r\n\r\n", 400),
    wire("56 NUL in a value", GET + b"X: canary-7f3a\x00b\r\n\r\n", 400),
    wire("56 space before the colon", GET + b"X : canary-7f3a\r\n\r\n", 400),
    wire("56 no host", b"GET /health HTTP/1.1\r\nX: canary-7f3a\r\n\r\n", 400),
    wire("53 NUL in the target", b"GET /canary-7f3a\x00b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    wire("54 no such method", b"CANARY-7F3A /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    wire("57 HTTP/0.9 line", b"GET /health\r\n\r\n", 400),
    wire("57 HTTP/0.9", b"GET /health HTTP/0.9\r\nHost: x\r\n\r\n", 400),
    wire("57 HTTP/2.0", b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    wire("57 HTTP/1.2", b"GET /health HTTP/1.2\r\nHost: x\r\n\r\n", 505),
    wire("57 HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 400),
    wire("57 TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03canary-7f3a", 400),
]


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Running]:
    running = await serve(
        max_inputs=MAX_INPUTS, max_body_bytes=MAX_BODY_BYTES, max_request_tokens=MAX_REQUEST_TOKENS, body_timeout_s=5
    )
    yield running
    after = await Wire.connect(running.port)
    await after.send(request_bytes("POST", PATH, b'{"input":"w1"}'))
    assert (await after.answer()).status == 200, "the gateway must go on serving"
    await after.close()


@pytest.mark.parametrize("case", [*BODIES, *HEADERS, *WIRE], ids=str)
async def test_bad_input(server: Running, case: Case) -> None:
    connection = await Wire.connect(server.port)
    await connection.send(case.sent)
    answer = await connection.answer()
    assert (answer.version, answer.status) == ("HTTP/1.1", case.status), answer.body
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert (answer.error["type"], answer.error["code"], answer.error["param"]) == (case.type, case.code, case.param)
    assert answer.headers["content-type"] == "application/json"
    assert {"x-request-id", "server-timing"} <= answer.headers.keys()
    assert answer.headers.get("x-should-retry") == (None if case.status in (408, 505) else "false")
    assert case.headers.items() <= answer.headers.items()
    assert CANARY not in answer.body.decode() + str(answer.headers)
    assert not server.stub.submitted
    if case.closes:
        assert answer.headers["connection"] == "close"
        assert await connection.rest() == b""
    await connection.close()


@pytest.mark.parametrize(
    "media",
    ["application/json; charset=utf-8", "application/json;charset=UTF-8", 'Application/JSON; charset="utf-8"'],
)
async def test_row_11_json_in_any_spelling_is_read(server: Running, media: str) -> None:
    connection = await Wire.connect(server.port)
    await connection.send(request_bytes("POST", PATH, b'{"input":"w1"}', {"Content-Type": media}))
    assert (await connection.answer()).status == 200
    await connection.close()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a" * 128, True),
        ("odd but printable: {}%s", True),
        ("a" * 129, False),
        ("", False),
        ("t\u00e4b", False),
        ("a\tb", False),
    ],
    ids=["128", "printable", "129", "empty", "not ASCII", "tab"],
)
async def test_row_59_only_a_harmless_request_id_is_repeated(server: Running, given: str, kept: bool) -> None:
    connection = await Wire.connect(server.port)
    await connection.send(request_bytes("GET", "/health", headers={"X-Request-Id": given}))
    request_id = (await connection.answer()).headers["x-request-id"]
    assert (request_id == given) is kept
    assert len(request_id) == (len(given) if kept else 32)
    await connection.close()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (b"", "missing_api_key"),
        (b"Authorization: Basic c2VzYW1l\r\n", "invalid_api_key"),
        (b"Authorization: sesame\r\n", "invalid_api_key"),
        (b"Authorization: Bearer\r\n", "invalid_api_key"),
        (b"Authorization: Bearer \r\n", "invalid_api_key"),
        (b"Authorization: Bearer sesame2\r\n", "invalid_api_key"),
        (b"Authorization: Bearer s\xe9same\r\n", "invalid_api_key"),
        (b"Authorization: Bearer s\xc3\xa9same\r\n", "invalid_api_key"),
        (b"Authorization: Bearer " + b"k" * 8192 + b"\r\n", "invalid_api_key"),
        (b"Authorization: Bearer sesame\r\nAuthorization: Bearer sesame\r\n", "invalid_api_key"),
        (b"x-api-key: canary-7f3a\r\n", "invalid_api_key"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:40]),
)
async def test_rows_50_and_51_keys(serve: Serve, headers: bytes, code: str) -> None:
    running = await serve(api_key="sesame")
    connection = await Wire.connect(running.port)
    await connection.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
    answer = await connection.answer()
    assert (answer.status, answer.error["type"], answer.error["code"]) == (401, "authentication_error", code)
    assert answer.headers["www-authenticate"] == "Bearer"
    await connection.close()


def _mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes dropped, doubled, swapped or replaced."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(result) or 1)
        stop = min(len(result), start + rng.randint(1, 8))
        result[start:stop] = rng.choice(
            (b"", result[start:stop] * 2, rng.randbytes(stop - start), rng.choice(_TOKENS), result[start:stop][::-1])
        )
    return bytes(result)


_TOKENS = (
    b"null",
    b"-1",
    b"1e400",
    b"[]",
    b"{}",
    b'""',
    rb"\ud800",
    b"\r\n",
    b"\x00",
    b"\xff",
    b"9" * 30,
    b"true",
    b",",
)
_GOOD_BODIES = (
    b'{"input":"w1 w2","model":"tiny","encoding_format":"base64","dimensions":4,"user":"u"}',
    b'{"input":["w1","w2 w3"],"truncate":true,"truncation_direction":"left","prompt_name":"query"}',
    b'{"input":[[1,5,6,2],[1,2]],"normalize":false,"lane":"backfill"}',
    b'{"input":[1,5,6,2],"stream":false}',
)


@pytest.mark.slow
async def test_no_mutated_body_is_a_server_error(server: Running) -> None:
    rng = random.Random(1)
    statuses: Counter[int] = Counter()
    connection = await Wire.connect(server.port)
    for _ in range(3000):
        await connection.send(request_bytes("POST", PATH, _mutated(rng, rng.choice(_GOOD_BODIES))))
        answer = await connection.answer()
        statuses[answer.status] += 1
        assert answer.status == 200 or answer.error.keys() == {"message", "type", "param", "code"}
    assert statuses.keys() == {200, 400, 404}
    await connection.close()


@pytest.mark.parametrize(
    ("inputs", "param"), [("w1 w59", "input"), (["w1", "w59"], "input[1]"), (["w1"] * 100 + ["w59"], "input[100]")]
)
async def test_a_token_that_the_model_has_no_vector_for_is_the_error_of_its_own_request(
    serve: Serve, facts: ModelFacts, inputs: str | list[str], param: str
) -> None:
    running = await serve(served=dataclasses.replace(facts, vocab_size=VOCAB_SIZE - 1))
    good = [embed(running.port, {"input": f"w{index}"}) for index in range(8)]
    bad, *others = await asyncio.gather(embed(running.port, {"input": inputs}), *good)
    assert (bad.status, bad.error["code"], bad.error["param"]) == (400, "invalid_token_id", param)
    assert bad.error["message"] == f"{param} holds the token w59, which this model has no vector for."
    assert [answer.status for answer in others] == [200] * 8


@pytest.mark.slow
async def test_no_mutated_request_is_a_server_error(serve: Serve) -> None:
    running = await serve(header_timeout_s=1, body_timeout_s=1)
    rng = random.Random(2)
    good = (
        request_bytes("POST", PATH, _GOOD_BODIES[0]),
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n8\r\n" + b'{"input"' + b"\r\n6\r\n" + b':"w1"}' + b"\r\n0\r\n\r\n",
        request_bytes("GET", "/v1/models/tiny", headers={"Expect": "100-continue", "Connection": "close"}),
    )

    at_once = asyncio.Semaphore(100)  # fewer than the listening socket's queue

    async def answers(data: bytes) -> bytes:
        async with at_once:
            connection = await Wire.connect(running.port)
            # What is left incomplete ends in the server's own time limits; the rest in the last request's end.
            await connection.send(data + request_bytes("GET", "/health", headers={"Connection": "close"}))
            received = await connection.rest()
            await connection.close()
            return received

    statuses: Counter[str] = Counter()
    for received in await asyncio.gather(*(answers(_mutated(rng, rng.choice(good))) for _ in range(1000))):
        statuses.update(line[9:12].decode() for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1 "))
    assert {status for status in statuses if status >= "500"} <= {"505"}
    assert statuses["400"] > 200
    assert statuses["200"] > 0
    assert (await ask(running.port, "GET", "/health")).status == 200
