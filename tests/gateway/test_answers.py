"""What tells a client whether to try again and when, and that the clients which people have do as they are told."""

from __future__ import annotations

import time
from types import SimpleNamespace

import openai
import pytest

from common.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InputQuarantined,
    InputTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NonfiniteOutput,
    NotFound,
    Overloaded,
    RequestTimeout,
    ServiceError,
    ShuttingDown,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from gateway.error_responses import error_headers
from tests.gateway.conftest import Running
from tests.timing import assert_in_time

NEVER = {"x-should-retry": "false"}
LATER = {"Retry-After": "3", "retry-after-ms": "2500"}
IN_A_SECOND = {"Retry-After": "1", "retry-after-ms": "1000"}

# Without any of these headers a client follows its own rule, which tries 408 and 5xx again.
TABLE: list[tuple[ServiceError, int, dict[str, str]]] = [
    (InvalidRequest("no"), 400, NEVER),
    (AuthenticationFailed("no"), 401, NEVER | {"WWW-Authenticate": "Bearer"}),
    (NotFound("no"), 404, NEVER),
    (MethodNotAllowed("no"), 405, NEVER),
    (RequestTimeout("slow"), 408, {}),
    (TooLarge("no"), 413, NEVER),
    (UnsupportedMedia("no"), 415, NEVER),
    (Overloaded("full", retry_after_s=2.5), 429, LATER),
    (Overloaded("full"), 429, IN_A_SECOND),
    (Overloaded("full", retry_after_s=0.0001), 429, {"Retry-After": "1", "retry-after-ms": "1"}),
    (InternalError("bug"), 500, NEVER),
    (NonfiniteOutput("NaN"), 500, NEVER),
    (InputQuarantined("died"), 500, NEVER),
    (InputTooLarge("long"), 413, NEVER),
    (Unavailable("gone", retry_after_s=2.5), 503, LATER),
    (ShuttingDown("stopping", retry_after_s=1), 503, IN_A_SECOND),
    (DeadlineExceeded("late"), 504, {}),
]


def _name(value: object) -> str:
    return type(value).__name__ if isinstance(value, ServiceError) else ""


@pytest.mark.parametrize(("error", "status", "expected"), TABLE, ids=_name)
def test_headers_say_whether_and_when_to_try_again(error: ServiceError, status: int, expected: dict[str, str]) -> None:
    headers = error_headers(error)
    assert error.status == status
    assert headers == {"Content-Type": "application/json"} | expected


TRIED_AGAIN = {408, 429, 503, 504}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (InvalidRequest("no"), 1),
        (RequestTimeout("slow"), 2),
        (Overloaded("full", retry_after_s=0.01), 2),
        (InternalError("bug"), 1),
        (NonfiniteOutput("NaN"), 1),
        (InputQuarantined("died"), 1),
        (InputTooLarge("long"), 1),
        (Unavailable("gone", retry_after_s=0.01), 2),
        (DeadlineExceeded("late"), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ServiceError) else "",
)
async def test_openais_client_tries_again_what_can_succeed(server: Running, error: ServiceError, tries: int) -> None:
    server.stub.error = error
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=1
    ) as client:
        with pytest.raises(openai.APIStatusError):
            await client.embeddings.create(model="tiny", input="w1", encoding_format="float")
    assert len(server.stub.submitted) == tries


@pytest.mark.slow
async def test_openais_client_waits_as_long_as_it_is_told(server: Running) -> None:
    server.stub.error = Overloaded("full", retry_after_s=0.2)  # without a time it would wait half a second
    begin_s = time.perf_counter()
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=2
    ) as client:
        with pytest.raises(openai.RateLimitError):
            await client.embeddings.create(model="tiny", input="w1", encoding_format="float")
        taken_s = time.perf_counter() - begin_s
    assert len(server.stub.submitted) == 3
    assert taken_s > 0.4
    assert_in_time(taken_s, 0.75)


@pytest.mark.parametrize(("error", "status", "expected"), TABLE, ids=_name)
def test_coheres_client_reads_the_same(error: ServiceError, status: int, expected: dict[str, str]) -> None:
    # It does not know x-should-retry, and tries every 5xx again: that is its own rule.
    cohere = pytest.importorskip("cohere.core.http_client")
    response = SimpleNamespace(status_code=status, headers={k.lower(): v for k, v in error_headers(error).items()})
    assert cohere._should_retry(response) is (status in TRIED_AGAIN | {500})
    wait_s = cohere._parse_retry_after(response.headers)
    assert wait_s == (int(expected["retry-after-ms"]) / 1000 if "retry-after-ms" in expected else None)
