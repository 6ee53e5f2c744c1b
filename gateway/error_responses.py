"""What answers of all dialects share: the error body, the headers for a retry, usage, request ids and timings."""

from __future__ import annotations

import math
import random
from typing import Annotated

import msgspec
import orjson

from common.errors import ServiceError

JSON = "application/json"

_MAX_REQUEST_ID_CHARS = 128


class Error(msgspec.Struct):
    """What was wrong, where, and what to change."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """The one error body of every route."""

    error: Error
    detail: Annotated[str, msgspec.Meta(description="The message once more, where Voyage's client looks for it.")]


class Usage(msgspec.Struct):
    """How many tokens were run, with special tokens and prompts."""

    prompt_tokens: int
    total_tokens: int


def error_object(error: ServiceError) -> dict[str, str | None]:
    """An `Error`, to be rendered."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def render_error(error: ServiceError) -> bytes:
    """An `ErrorBody`.

    Without `detail`, Voyage's client takes the server for broken and does not send a request again after a 429.
    """
    return orjson.dumps({"error": error_object(error), "detail": error.message})


def error_headers(error: ServiceError) -> dict[str, str]:
    """The headers that tell a client whether to try again, and when."""
    headers = {"Content-Type": JSON}
    if error.status in (429, 503):
        wait_s = 1.0 if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    elif not error.retryable and (error.status < 500 or error.status == 500):
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def render_usage(num_tokens: int) -> bytes:
    """The member `usage` of an answer's object."""
    return b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (num_tokens, num_tokens)


def new_request_id() -> str:
    # Not uuid4(): it asks the kernel, which releases the interpreter's lock and costs 45 µs a request under load.
    return f"{random.getrandbits(128):032x}"


def request_id_of(given: str | None) -> str:
    """The client's own id, if it is fit for a header and a log; otherwise a new one."""
    if given is not None and 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return new_request_id()


def server_timing(parse_us: int, tokenize_us: int, queue_us: int, step_us: int, render_us: int, total_us: int) -> str:
    """The value of the header `Server-Timing`: stages in their order, in milliseconds with microsecond digits."""
    return (
        f"parse;dur={parse_us / 1000:.3f}, tokenize;dur={tokenize_us / 1000:.3f}, queue;dur={queue_us / 1000:.3f}, "
        f"step;dur={step_us / 1000:.3f}, render;dur={render_us / 1000:.3f}, total;dur={total_us / 1000:.3f}"
    )
