"""Who may ask: with a key set, everything needs it but what tells that the server lives.

Keys are compared as SHA-256 digests: of one length whatever was sent, and bytes, since `compare_digest` refuses
text that is not ASCII.
"""

from __future__ import annotations

import hashlib
import hmac
from ipaddress import ip_address

from aiohttp import web

from common.errors import AuthenticationFailed

_OPEN_PATHS = frozenset({"/health", "/ready"})
_LOOPBACK_PATHS = frozenset({"/metrics", "/"})  # open to this host alone


class KeyCheck:
    """Lets through what brings the key; without a key set, everything."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key)

    def check(self, request: web.BaseRequest, path: str) -> None:
        """Raises AuthenticationFailed: missing_api_key or invalid_api_key."""
        # A browser's preflight cannot bring a key, and is told nothing.
        if self._digest is None or path in _OPEN_PATHS or request.method == "OPTIONS":
            return
        key = _key_of(request)
        if key is not None:
            if hmac.compare_digest(_digest(key), self._digest):
                return
            raise AuthenticationFailed("This key is not one of this server's.")
        if path in _LOOPBACK_PATHS and _is_from_this_host(request):
            return
        raise AuthenticationFailed(
            "A key is needed: send Authorization: Bearer KEY, or x-api-key: KEY.", code="missing_api_key"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(request: web.BaseRequest) -> str | None:
    """The key that a request brings, None for none; what is no key at all is a wrong one."""
    given = request.headers.getall("Authorization", [])
    if not given:
        return request.headers.get("x-api-key")
    scheme, _, key = given[0].partition(" ")
    return key.strip(" ") if len(given) == 1 and scheme.lower() == "bearer" else ""


def _is_from_this_host(request: web.BaseRequest) -> bool:
    # A proxy on this host speaks for others.
    if "X-Forwarded-For" in request.headers or "Forwarded" in request.headers or request.remote is None:
        return False
    return ip_address(request.remote).is_loopback
