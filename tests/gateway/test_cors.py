"""CORS: what a browser is told, with origins allowed and without (row 78, case HTTP-01)."""

from __future__ import annotations

import re

import pytest

from gateway.edge import cors
from tests.gateway.conftest import Serve
from tests.gateway.wire import Wire, answer_to, ask, embed

PAGE = "https://app.example.org"
OTHER = "https://other.example.org"
ROUTES = ["/v1/embeddings", "/v1/embeddings/", "/rerank", "/score", "/v1/contextualizedembeddings", "/v1/models/x"]


def preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }


def allowances(headers: dict[str, str]) -> list[str]:
    return [name for name in headers if name.startswith("access-control-")]


@pytest.mark.parametrize("route", ROUTES)
async def test_row_78_without_origins_options_is_405_and_allows_nothing(serve: Serve, route: str) -> None:
    running = await serve(api_key="sesame")
    answer = await ask(running.port, "OPTIONS", route, headers=preflight(PAGE))
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert allowances(answer.headers) == []
    assert answer.headers["allow"] in {"POST", "GET, HEAD"}
    assert allowances((await embed(running.port, {"input": "w1"}, {"Origin": PAGE})).headers) == []


@pytest.mark.parametrize("route", ROUTES)
async def test_an_allowed_pages_preflight_needs_no_key(serve: Serve, route: str) -> None:
    running = await serve(api_key="sesame", cors_origins=f"{PAGE}, http://localhost:3000")
    answer = await ask(running.port, "OPTIONS", route, headers=preflight(PAGE))
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] in {"POST", "GET, HEAD"}
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.headers["access-control-max-age"] == "7200"
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        OTHER,
        PAGE + ":8443",
        PAGE + "/",
        "http://app.example.org",
        "https://APP.example.org",
        PAGE + ".evil.test",
        "https://xapp.example.org",
        "null",
        "",
        "*",
    ],
)
async def test_row_78_any_other_page_is_allowed_nothing(serve: Serve, origin: str) -> None:
    running = await serve(cors_origins=PAGE)
    asked = await ask(running.port, "OPTIONS", "/v1/embeddings", headers=preflight(origin))
    assert (asked.status, allowances(asked.headers), asked.headers["vary"]) == (405, [], "Origin")
    answered = await embed(running.port, {"input": "w1"}, {"Origin": origin})
    assert (answered.status, allowances(answered.headers), answered.headers["vary"]) == (200, [], "Origin")


async def test_case_http_01_every_answer_says_that_the_page_may_read_it(serve: Serve) -> None:
    running = await serve(api_key="sesame", cors_origins=PAGE)
    key = {"Authorization": "Bearer sesame"}
    answers = [
        await embed(running.port, {"input": "w1"}, {"Origin": PAGE}),
        await embed(running.port, {"input": "w1"}, {"Origin": PAGE} | key),
        await embed(running.port, {"input": ""}, {"Origin": PAGE} | key),
        await ask(running.port, "GET", "/made-up", headers={"Origin": PAGE} | key),
        await ask(running.port, "GET", "/v1/embeddings", headers={"Origin": PAGE} | key),
        await ask(running.port, "GET", "/health", headers={"Origin": PAGE}),
    ]
    assert [answer.status for answer in answers] == [401, 200, 400, 404, 405, 200]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {PAGE}
    assert {answer.headers["vary"] for answer in answers} == {"Origin"}
    exposed = answers[0].headers["access-control-expose-headers"].split(", ")
    assert exposed == [
        "X-Request-Id",
        "Server-Timing",
        "X-Trace",
        "X-Model-Fingerprint",
        "X-Embedding-Shape",
        "X-Embedding-Dtype",
        "Retry-After",
        "retry-after-ms",
    ]


async def test_with_every_page_allowed_no_page_is_named(serve: Serve) -> None:
    running = await serve(cors_origins="*")
    asked = await ask(running.port, "OPTIONS", "/v1/embeddings", headers=preflight("null"))
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (204, "*")
    answered = await embed(running.port, {"input": "w1"}, {"Origin": OTHER})
    assert (answered.status, answered.headers["access-control-allow-origin"]) == (200, "*")
    assert "vary" not in answered.headers


async def test_a_preflight_opens_nothing_but_itself(serve: Serve) -> None:
    running = await serve(api_key="sesame", cors_origins=PAGE)
    unknown = await ask(running.port, "OPTIONS", "/made-up", headers=preflight(PAGE))
    assert unknown.status == 401
    no_preflight = await ask(running.port, "OPTIONS", "/v1/embeddings", headers={"Origin": PAGE})
    assert no_preflight.status == 405
    dressed_up = await ask(running.port, "GET", "/info", headers=preflight(PAGE))
    assert dressed_up.status == 401


async def test_the_connection_of_a_preflight_serves_on(serve: Serve) -> None:
    running = await serve(cors_origins=PAGE)
    answer = await ask(running.port, "OPTIONS", "/v1/embeddings", headers=preflight(PAGE))
    assert "connection" not in answer.headers
    assert {"x-request-id", "server-timing"} <= answer.headers.keys()


def test_a_list_of_origins_may_have_spaces_and_ends() -> None:
    assert cors.parse_origins("") == frozenset()
    assert cors.parse_origins(f" {PAGE} ,{OTHER},") == {PAGE, OTHER}


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("authorization,content-type,x-stainless-arch,x-stainless-os", True),
        ("x-a, x-b", True),
        ("x-a\tx-b", False),
        ("*", False),
        ("x" * 65, False),
    ],
)
async def test_a_page_may_send_the_headers_that_it_asks_for_by_name(serve: Serve, asked: str, allowed: bool) -> None:
    running = await serve(cors_origins=PAGE)
    headers = preflight(PAGE) | {"Access-Control-Request-Headers": asked}
    answer = await ask(running.port, "OPTIONS", "/v1/embeddings", headers=headers)
    assert (answer.headers["access-control-allow-headers"] == asked) == allowed


# --- what is refused before it is a request ---


def refused_by_us(line: str, *lines: str) -> bytes:
    """A request that the parser takes and we do not."""
    return "\r\n".join((line, "Host: x", *lines, "", "")).encode()


LONG = [f"X-{index}: " + "a" * 16_000 for index in range(5)]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (("GET /health HTTP/2.0",), 505),
        (("POST /v1/embeddings HTTP/1.1", "Transfer-Encoding: gzip, chunked"), 400),
        (("GET /health HTTP/1.1", *LONG), 431),
    ],
    ids=["version", "coding", "header"],
)
async def test_a_page_may_read_why_its_header_was_refused(serve: Serve, sent: tuple[str, ...], status: int) -> None:
    running = await serve(cors_origins=PAGE)
    answer = await answer_to(running.port, refused_by_us(*sent, f"Origin: {PAGE}", "X-Request-Id: of-the-page"))
    assert (answer.status, answer.headers["x-request-id"]) == (status, "of-the-page")
    assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (PAGE, "Origin")


async def test_another_page_may_not_and_its_request_id_must_be_fit_for_a_header(serve: Serve) -> None:
    running = await serve(cors_origins=PAGE)
    sent = refused_by_us("GET /health HTTP/2.0", f"Origin: {OTHER}", "X-Request-Id: a\tb")
    answer = await answer_to(running.port, sent)
    assert (answer.status, allowances(answer.headers), answer.headers["vary"]) == (505, [], "Origin")
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_with_every_page_allowed_any_page_may_read_what_is_no_answer_to_a_request(serve: Serve) -> None:
    running = await serve(cors_origins="*", max_connections=1)
    answer = await answer_to(running.port, b"no HTTP\r\n\r\n")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (400, "*")
    first = await Wire.connect(running.port)
    await first.ask(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    full = await answer_to(running.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (full.status, full.headers["access-control-allow-origin"]) == (503, "*")
    assert "Retry-After" in full.headers["access-control-expose-headers"]
    await first.close()
