"""Which web pages may read the gateway's answers in a browser (CORS): none, unless the operator names origins. No I/O.

Origins are compared as text; the one wildcard is `*`, for every page. A page sends its key in a header that it sets
itself, never in a cookie. So credentials are not allowed, and `*` gives no page a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_ANY = "*"
_ALLOWED_HEADERS = (
    "authorization, content-type, x-api-key, x-model, x-request-id, x-request-timeout-ms, x-trace, accept"
)
_EXPOSED_HEADERS = (
    "X-Request-Id, Server-Timing, X-Trace, X-Model-Fingerprint, X-Embedding-Shape, X-Embedding-Dtype, "
    "Retry-After, retry-after-ms"
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(, ?[A-Za-z0-9-]{1,64}){0,63}")
_MAX_AGE_S = 7200  # the longest that browsers keep the answer to a preflight


def parse_origins(text: str) -> frozenset[str]:
    """The origins in a list separated by commas. An empty list turns CORS off."""
    return frozenset(origin.strip() for origin in text.split(",") if origin.strip())


def answer_headers(origins: Collection[str], origin: str | None) -> dict[str, str]:
    """The CORS headers of every answer; `origin` is the request's `Origin` header."""
    if not origins:
        return {}
    if _ANY in origins:
        return {"Access-Control-Allow-Origin": _ANY, "Access-Control-Expose-Headers": _EXPOSED_HEADERS}
    headers = {"Vary": "Origin"}  # also for other origins, so that a cache keeps their answers apart
    if origin is not None and origin in origins:
        headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED_HEADERS}
    return headers


def preflight_headers(
    origins: Collection[str], request_headers: Mapping[str, str], methods: Collection[str]
) -> dict[str, str] | None:
    """The headers, besides `answer_headers`, that answer a preflight; None if this is not one of an allowed page."""
    origin = request_headers.get("Origin")
    if origin is None or "Access-Control-Request-Method" not in request_headers:
        return None
    if _ANY not in origins and origin not in origins:
        return None
    # Any header is allowed: OpenAI's client sends a dozen (x-stainless-...), and unknown ones are ignored.
    asked = request_headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Allow-Headers": asked if _HEADER_NAMES.fullmatch(asked) else _ALLOWED_HEADERS,
        "Access-Control-Max-Age": str(_MAX_AGE_S),
    }
