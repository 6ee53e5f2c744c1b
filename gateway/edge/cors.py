"""Which web pages a browser lets read our answers (CORS): none, unless the operator names their origins. No I/O.

An origin is compared as it is written; the one wildcard is `*`, which stands for every page. Keys travel in a header
that a page sets itself, never in a cookie: so credentials are not allowed for, and `*` gives nobody a key.
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
_MAX_AGE_S = 7200  # browsers keep a preflight's answer no longer


def parse_origins(text: str) -> frozenset[str]:
    """The origins of a list with commas; of an empty one none, and CORS is off."""
    return frozenset(origin.strip() for origin in text.split(",") if origin.strip())


def answer_headers(origins: Collection[str], origin: str | None) -> dict[str, str]:
    """What every answer says to the browser of a page from `origin`, the request's header of that name."""
    if not origins:
        return {}
    if _ANY in origins:
        return {"Access-Control-Allow-Origin": _ANY, "Access-Control-Expose-Headers": _EXPOSED_HEADERS}
    headers = {"Vary": "Origin"}  # also on what is not for this page: a cache must not give it to another one
    if origin is not None and origin in origins:
        headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED_HEADERS}
    return headers


def preflight_headers(
    origins: Collection[str], request_headers: Mapping[str, str], methods: Collection[str]
) -> dict[str, str] | None:
    """What an OPTIONS request is told beside `answer_headers`; None where it is no preflight of an allowed page."""
    origin = request_headers.get("Origin")
    if origin is None or "Access-Control-Request-Method" not in request_headers:
        return None
    if _ANY not in origins and origin not in origins:
        return None
    # OpenAI's client sends a dozen headers of its own (x-stainless-...); none that is not read here does anything.
    asked = request_headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Allow-Headers": asked if _HEADER_NAMES.fullmatch(asked) else _ALLOWED_HEADERS,
        "Access-Control-Max-Age": str(_MAX_AGE_S),
    }
