"""No body is a server error, whatever is in it; errors have their form, and never a client's words.

Bodies are made by Hypothesis, always the same ones, from good bodies of every route: fields lost, renamed, swapped,
doubled, their values replaced by others from deep inside or from a list of what has broken servers; then bytes. Beside
them arbitrary JSON and arbitrary bytes. They go to a real gateway, many at once over one connection.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from typing import Any, BinaryIO

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.wire.messages import ModelFacts
from gateway.routes import OPERATIONS, operations_by_path, tei, tei_scores
from tests.gateway.conftest import Running, Serve
from tests.gateway.wire import Wire, ask, request_bytes

CANARY = "canary-7f3a"  # stands in every text that is made here, and may stand in no error

GOOD_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/embeddings", {"input": "w1 w2", "model": "tiny", "encoding_format": "base64", "dimensions": 4, "user": "u"}),
    ("/v1/embeddings", {"input": ["w1", "w2 w3"], "truncate": True, "truncation_direction": "left", "prompt": "w1 "}),
    ("/v1/embeddings", {"input": ["w1", "", "w3"], "partial": True, "prompt_name": "query"}),
    ("/v1/embeddings", {"input": [[1, 5, 6, 2], [1, 2]], "normalize": False, "lane": "backfill"}),
    ("/v1/embeddings", {"input": [1, 5, 6, 2], "stream": False, "metadata": {"a": [1]}, "partial": True}),
    ("/v1/contextualizedembeddings", {"input": [["w1", "w2"], ["w3"]], "dimensions": 8, "normalize": True}),
    ("/v1/contextualizedembeddings", {"input": [["w1"]], "encoding_format": "base64", "truncate": False}),
    ("/v1/rerank", {"query": "w1", "documents": ["w5", {"text": "w6"}], "top_n": 1, "return_documents": True}),
    ("/v2/rerank", {"query": "w1", "documents": ["w5", "w6"], "max_tokens_per_doc": 3, "truncate": "START"}),
    ("/rerank", {"query": "w1", "documents": ["w5"], "top_k": 2, "truncation": True, "raw_scores": True}),
    ("/score", {"text_1": "w1", "text_2": ["w5", "w6"], "truncate": "END"}),
    ("/v1/score", {"text_1": ["w1", "w2"], "text_2": ["w5", "w6"], "raw_scores": False}),
    ("/v1/embeddings", {"input": "w1", "input_type": "document", "output_dtype": "float", "output_dimension": 3}),
    ("/v2/embed", {"texts": ["w1", "w2"], "input_type": "search_query", "embedding_types": ["base64", "float"]}),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "w1"}]}], "max_tokens": 9, "truncate": "START"}),
    ("/v1/embed", {"texts": ["w1"], "output_dimension": 5, "images": None, "truncate": "NONE"}),
    ("/embed", {"inputs": ["w1", "w2 w3"], "normalize": False, "dimensions": 4, "encoding_format": "float"}),
    ("/embed", {"inputs": [[1, 5, 2]], "truncate": True, "truncation_direction": "Left"}),
    ("/embed_all", {"inputs": ["w1", "w2 w3"], "prompt_name": "query"}),
    ("/embed_sparse", {"inputs": "w1 w2", "truncate": False, "truncation_direction": "right"}),
    ("/similarity", {"inputs": {"source_sentence": "w1", "sentences": ["w2", "w3"]}, "parameters": {"truncate": True}}),
    ("/similarity", {"inputs": {"source_sentence": "w1", "sentences": ["w2"]}, "parameters": {"prompt_name": "query"}}),
    ("/rerank", {"query": "w1", "texts": ["w5", "w6"], "raw_scores": True, "return_text": True}),
    ("/predict", {"inputs": [["w1"], ["w2", "w3"]], "raw_scores": False, "truncate": True}),
    ("/predict", {"inputs": ["w1", "w2"], "parameters": {"function_to_apply": "softmax", "top_k": 1}}),
    ("/tokenize", {"inputs": ["w1", "w2 w3"], "add_special_tokens": False, "prompt_name": "query"}),
    ("/decode", {"ids": [[1, 5, 2], [6]], "skip_special_tokens": False}),
    ("/", {"inputs": ["w1", "w2"], "parameters": {"top_k": 2}}),
    ("/", {"query": "w1", "texts": ["w5"]}),
    ("/", {"inputs": "w1"}),
)

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 63, 64, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1,
    0.5, 1.0, -0.0, 1e-320, 1e30, 1e308, -1e308,
    "", " ", "\x00", "\u200b", "\ufeff", "w1", "1", "true", "null", "float", "END", "[SEP]", "[CLS]" * 9, "w1 " * 40,
    CANARY, CANARY * 200, f"{CANARY}` - at `$.lane`", f"' {CANARY} - at `$.model`\n", f"%s{{0}}{CANARY}\r\nX: 1",
    f"<script>{CANARY}</script>", f"../../{CANARY}", "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 20, "e\u0301" * 500,
    [], {}, [[]], [{}], [[[]]], [None], [0], [[0]], ["w1"], ["w1", 1], [1, "w1"], [["w1"]], [["w1"], "w1"], ["w1"] * 30,
    ["w1"] * 21, [""] * 30, [[1]] * 30, ["w1", ["w1"]] * 15, [CANARY] * 21,
    {"text": "w1"}, {"text": CANARY}, {CANARY: CANARY}, {"": ""}, {"text": {"text": "w1"}}, [{"text": None}],
    {"image_url": f"http://{CANARY}/"}, [[1, [2, [3, [4]]]]], [-1], [64], [[1e30]], [2**63], [True], [[1, True]],
)  # fmt: skip

# What may stand in place of some bytes.
ODD_BYTES = (
    b"", b"null", b"-", b"1e400", b"NaN", b"[]", b"{}", b'""', rb"\ud800", rb"\u0000", b"\r\n", b"\x00", b"\xff",
    b"\xed\xa0\x80", b"9" * 30, b"9" * 400, b"true", b",", b":", b'"', b"[" * 40, b"[" * 2000, b'{"a":' * 40,
    b"\xef\xbb\xbf", CANARY.encode(),
)  # fmt: skip

NAMES = tuple(dict.fromkeys(name for operation in OPERATIONS for name in operation.body.__struct_encode_fields__))
# The fields of what these hold, Cohere's `inputs` among them.
INNER_NAMES = (
    *tei.SimilarityInputs.__struct_encode_fields__,
    *tei.SimilarityParameters.__struct_encode_fields__,
    *tei_scores.ClassifyParameters.__struct_encode_fields__,
    *("content", "type", "text"),
)
PARAM = re.compile(rf"(?:{'|'.join(NAMES)})(?:\[\d+\]|\.(?:{'|'.join(INNER_NAMES)}))*|X-Request-Timeout-Ms")
ODD_NAMES = (CANARY, "", "input_ids", "dimension", "x" * 70, "Input", "\n", "$.lane", f"a` - at `$.lane`{CANARY}")
ALL_NAMES = tuple(dict.fromkeys(NAMES + INNER_NAMES + ODD_NAMES))

Numbers = st.integers(0, 2**16)


def changed(body: dict[str, Any], changes: list[tuple[int, int, Any]]) -> dict[str, Any]:
    """The body after some changes, each told by two numbers and a value."""
    body = _copied(body)
    for where, what, odd in changes:
        holder, key = _place(body, where)
        value = _copied(odd)
        kind, rest = what % 10, what // 10
        if kind <= 2:
            holder[key] = value
        elif kind <= 4:
            other, other_key = _place(body, rest)
            holder[key] = _copied(other[other_key])
        elif kind == 5:
            del holder[key]
        elif kind == 6:
            holder[key] = [holder[key]]
        elif kind == 7 and isinstance(holder, list):
            holder.insert(key, value)
        elif kind == 8:
            named = holder if isinstance(holder, dict) else body
            named[ALL_NAMES[rest % len(ALL_NAMES)]] = value
        else:
            body.update(_copied(GOOD_BODIES[rest % len(GOOD_BODIES)][1]))
        if not body:
            body["input"] = value
    return body


def _copied(value: Any) -> Any:  # noqa: ANN401  # JSON
    return json.loads(json.dumps(value))


def _place(body: dict[str, Any], number: int) -> tuple[Any, Any]:
    """Somewhere in it: what holds it, and under which name or index."""
    places: list[tuple[Any, Any]] = []

    def collect(holder: Any, depth: int) -> None:  # noqa: ANN401  # JSON
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], dict | list) and depth < 4:
                collect(holder[key], depth + 1)

    collect(body, 0)
    return places[number % len(places)]


def bitten(data: bytes, bites: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes with others in place of some of them."""
    for start, length, other in bites:
        start %= len(data) + 1
        data = data[:start] + other + data[start + length % 9 :]
    return data


JSON_VALUES = st.recursive(
    st.sampled_from(ODD_VALUES)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ALL_NAMES), inner, max_size=4),
    max_leaves=8,
)
CHANGES = st.lists(st.tuples(Numbers, Numbers, st.sampled_from(ODD_VALUES)), min_size=1, max_size=2)
BITES = st.lists(st.tuples(Numbers, Numbers, st.sampled_from(ODD_BYTES)), min_size=1, max_size=3)
GOOD = st.sampled_from(GOOD_BODIES)
PATHS = st.sampled_from(tuple(operations_by_path()))


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


STRUCTURED = st.builds(lambda good, changes: (good[0], _dumped(changed(good[1], changes))), GOOD, CHANGES)
BYTEWISE = st.builds(lambda good, bites: (good[0], bitten(_dumped(good[1]), bites)), GOOD, BITES)
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=5)
ARBITRARY = st.tuples(PATHS, FIELDS.map(_dumped) | JSON_VALUES.map(_dumped) | st.binary(max_size=60))


class Line:
    """A blocking connection, since Hypothesis does not wait for futures: many requests at once, then their answers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._file: BinaryIO = self._socket.makefile("rb")

    def ask(self, requests: list[tuple[str, bytes]]) -> list[tuple[int, bytes, bytes]]:
        """Status, header and body of each answer."""
        self._socket.sendall(b"".join(request_bytes("POST", path, body) for path, body in requests))
        return [self._answer() for _ in requests]

    def _answer(self) -> tuple[int, bytes, bytes]:
        lines = []
        while (line := self._file.readline()) not in (b"\r\n", b""):
            lines.append(line)
        header = b"".join(lines)
        length = re.search(rb"(?i)^content-length: (\d+)", header, re.MULTILINE)
        assert length is not None, header
        return int(header[9:12]), header, self._file.read(int(length[1]))

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def check_error(request: tuple[str, bytes], status: int, header: bytes, body: bytes) -> str:
    """The code of an answer that is an error as it should be."""
    assert status in (400, 404), (request, status, body)
    answer = json.loads(body)
    assert answer.keys() == {"error", "detail"}, request
    error = answer["error"]
    assert answer["detail"] == error["message"], request
    assert error.keys() == {"message", "type", "param", "code"}, request
    assert error["type"] == ("invalid_request_error" if status == 400 else "not_found_error"), request
    code, param = error["code"], error["param"]
    # A field that there is not is named, where it can be printed.
    assert param is None or code == "unknown_field" or PARAM.fullmatch(param), (request, param)
    if code != "unknown_field":
        assert CANARY.encode() not in body, request
    assert CANARY.encode() not in header, request
    assert error["message"].isprintable(), request
    return code


@pytest.fixture
async def server(serve: Serve, everything: ModelFacts) -> Running:
    return await serve(served=everything, max_inputs=20, max_request_tokens=200)


def test_there_is_a_good_body_of_every_route() -> None:
    assert {path for path, _ in GOOD_BODIES} == operations_by_path().keys()


async def test_the_good_bodies_are_good(server: Running) -> None:
    line = await Wire.connect(server.port)
    for path, body in GOOD_BODIES:
        assert (await line.ask(request_bytes("POST", path, _dumped(body)))).status == 200, (path, body)
    await line.close()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bodies", "examples", "codes"),
    [
        (
            STRUCTURED,
            700,
            {"invalid_type", "empty_input", "out_of_range", "invalid_token_id", "too_many_inputs", "200"},
        ),
        (BYTEWISE, 300, {"invalid_json", "invalid_unicode", "json_too_deep", "200"}),
        (ARBITRARY, 100, {"invalid_json", "invalid_type", "unknown_field"}),
    ],
    ids=["fields changed", "bytes changed", "arbitrary"],
)
async def test_no_body_is_a_server_error(
    server: Running, bodies: st.SearchStrategy[tuple[str, bytes]], examples: int, codes: set[str]
) -> None:
    found: Counter[str] = Counter()

    def run() -> None:
        line = Line(server.port)

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(bodies, min_size=20, max_size=20))
        def check(requests: list[tuple[str, bytes]]) -> None:
            for request, (status, header, body) in zip(requests, line.ask(requests), strict=True):
                found[check_error(request, status, header, body) if status != 200 else "200"] += 1

        try:
            check()
        finally:
            line.close()

    await asyncio.to_thread(run)
    assert found.total() >= 19 * examples
    assert codes <= found.keys()
    assert (await ask(server.port, "POST", "/v1/embeddings", b'{"input":"w1"}')).status == 200


def _mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes dropped, doubled, swapped or replaced."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(result) or 1)
        stop = min(len(result), start + rng.randint(1, 8))
        result[start:stop] = rng.choice(
            (b"", result[start:stop] * 2, rng.randbytes(stop - start), rng.choice(ODD_BYTES), result[start:stop][::-1])
        )
    return bytes(result)


@pytest.mark.slow
async def test_no_mutated_request_is_a_server_error(serve: Serve) -> None:
    running = await serve(header_timeout_s=1, body_timeout_s=1)
    rng = random.Random(2)
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    good = (
        request_bytes("POST", "/v1/embeddings", b'{"input":"w1 w2","model":"tiny","dimensions":4}'),
        head + b"Transfer-Encoding: chunked\r\n\r\n8\r\n" + b'{"input"' + b"\r\n6\r\n" + b':"w1"}' + b"\r\n0\r\n\r\n",
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
