"""API keys: which requests need one, and in which lane a key's requests may run. Deny by default.

With keys on, only the paths listed here are open: the health of the server to everyone, and what its operator looks at
to this host alone. Every other path needs a key, even one that does not exist, so that only clients with a key learn
which paths exist.

Keys come from a file, one a line, and from HEDGEROW_API_KEY. They are kept as SHA-256 digests, which all have one
length and are bytes (`compare_digest` rejects text that is not ASCII). A request's digest is compared with every key's,
without stopping at a match, so that timing reveals nothing. A dictionary by digest would be faster, and no attack on
its timing is known; but comparing 100 keys takes only 8 µs and needs no such argument. It is why the number of keys is
limited.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from common.errors import EX_CONFIG, AuthenticationFailed, Forbidden
from common.lanes import BACKFILL, ONLINE

if TYPE_CHECKING:
    from aiohttp import (
        web,
    )  # `hedgerow serve` checks a file of keys with this module, and must not wait half a second for imports

_OPEN_PATHS = frozenset({"/health", "/ready"})
_LOOPBACK_PATHS = frozenset({"/metrics", "/docs", "/openapi.json", "/"})  # open to this host alone
_READING = frozenset({"GET", "HEAD"})  # open paths may only be read: a POST to / needs a key

_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})
_THIS_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)

_MAX_KEYS = 1000
_MAX_FILE_BYTES = 1024 * 1024
_MAX_TOKENS_PER_MINUTE = 10**12
_OPTIONS = ("name", "lane", "tokens_per_minute")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class KeysRefused(Exception):
    """A file of keys cannot be used. The text says what to change, and contains no key."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of this server, and what its requests may do."""

    digest: bytes  # SHA-256 of the key
    name: str | None = None  # its name in the metric that counts tokens
    lane: str = "online"  # the best lane that its requests may run in
    tokens_per_minute: int | None = None

    @property
    def tenant(self) -> int:
        """A number that stands for this key where keys only have to be told apart; never 0."""
        return int.from_bytes(self.digest[:8]) >> 1 or 1

    @classmethod
    def of(cls, key: str, *, name: str | None = None, lane: str = ONLINE, tokens_per_minute: int | None = None) -> Key:
        return cls(_digest(key), name, lane, tokens_per_minute)


class KeyCheck:
    """Lets a request in if it brings a known key, or if there are no keys."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self._keys = tuple(keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """Use these keys from the next request on. Requests that run already are not affected."""
        self._keys = tuple(keys)

    def check(self, request: web.BaseRequest, path: str) -> Key | None:
        """The key of a request; None if it needs none.

        Raises:
            AuthenticationFailed: missing_api_key or invalid_api_key.
        """
        if not self._keys or path in _OPEN_PATHS:
            return None
        text = _key_of(request)
        if text is not None:
            key = self._find(_digest(text))
            if key is None:
                raise AuthenticationFailed("This server does not know this key.")
            return key
        if path in _LOOPBACK_PATHS and request.method in _READING and _is_from_this_host(request):
            return None
        raise AuthenticationFailed(
            "A key is needed: send Authorization: Bearer KEY, or x-api-key: KEY.", code="missing_api_key"
        )

    def _find(self, digest: bytes) -> Key | None:
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key  # no early end: timing must not show its place in the list
        return found


def settle_lane(key: Key | None, asked: str | None, usual: str) -> str:
    """The lane that a request runs in: the one that it asks for, or else the usual one of its kind.

    Raises:
        Forbidden: its key does not allow that lane.
    """
    if key is None or key.lane == ONLINE:
        return asked or usual
    if asked is not None and asked != key.lane:
        raise Forbidden(
            f"Requests with this key run in the lane {key.lane}: leave lane out, or use another key.", param="lane"
        )
    return key.lane


def known_keys(path: str, lone_key: str | None) -> tuple[Key, ...]:
    """The keys of a file ("" for no file), and `lone_key`, if any.

    Raises:
        KeysRefused: the file cannot be read, is open to other users, or has a malformed line.
    """
    keys = _parse_keys(path, _read(path)) if path else []
    if lone_key is not None and _digest(lone_key) not in {key.digest for key in keys}:
        keys.append(Key.of(lone_key))
    return tuple(keys)


def _read(path: str) -> bytes:
    try:
        # O_NONBLOCK: opening a pipe must not wait. fstat checks the same file that is read.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise KeysRefused(f"--api-keys-file {path} is not a regular file")
            if found.st_mode & 0o077:
                raise KeysRefused(
                    f"--api-keys-file {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}): "
                    f"run chmod 600 on it, and replace its keys if others may have read them"
                )
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysRefused(f"--api-keys-file {path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise KeysRefused(f"--api-keys-file {path} has more than {_MAX_FILE_BYTES} bytes")
    return data


def _parse_keys(path: str, data: bytes) -> list[Key]:
    keys: list[Key] = []
    lines_of_digests: dict[bytes, int] = {}
    lines_of_names: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            key = _parse_line(line)
            if key is None:
                continue
            _check_new(key.digest, lines_of_digests, number, "key")
            if key.name is not None:
                _check_new(key.name, lines_of_names, number, "name")
        except ValueError as error:
            raise KeysRefused(f"--api-keys-file {path}, line {number}: {error}") from None
        keys.append(key)
    if not keys:
        raise KeysRefused(f"--api-keys-file {path} holds no key: write one a line, or leave the flag out")
    if len(keys) > _MAX_KEYS:
        raise KeysRefused(f"--api-keys-file {path} holds {len(keys)} keys; at most {_MAX_KEYS} can be served")
    return keys


def _parse_line(line: bytes) -> Key | None:
    """The key of a line; None for an empty line or a comment. Raises ValueError, which never quotes the line."""
    words = line.split()
    comment = next((index for index, word in enumerate(words) if word.startswith(b"#")), len(words))
    if comment == 0:
        return None
    key, *options = (word.decode("latin-1") for word in words[:comment])
    if not (key.isascii() and key.isprintable()):
        raise ValueError("a key must consist of printable ASCII characters without spaces")
    if key.startswith(tuple(f"{name}=" for name in _OPTIONS)):
        raise ValueError(f"the key itself comes first, then {', '.join(_OPTIONS)}")
    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in _OPTIONS or not equals:
            raise ValueError(f"after the key only these are known: {', '.join(f'{name}=' for name in _OPTIONS)}")
        if name in values:
            raise ValueError(f"{name}= comes twice")
        values[name] = value
    return Key.of(
        key,
        name=_parse_name(values.get("name")),
        lane=_parse_lane(values.get("lane", ONLINE)),
        tokens_per_minute=_parse_tokens(values.get("tokens_per_minute")),
    )


def _parse_name(text: str | None) -> str | None:
    if text is not None and not _NAME.fullmatch(text):
        raise ValueError("name= needs 1 to 64 letters, digits, points, hyphens or underscores")
    return text


def _parse_lane(text: str) -> str:
    if text not in {ONLINE, BACKFILL}:
        raise ValueError("lane= needs online or backfill")
    return text


def _parse_tokens(text: str | None) -> int | None:
    if text is None:
        return None
    # The length is checked first, because int() refuses thousands of digits.
    if not text.isdecimal() or len(text) > 13 or not 1 <= int(text) <= _MAX_TOKENS_PER_MINUTE:
        raise ValueError(f"tokens_per_minute= needs a whole number from 1 to {_MAX_TOKENS_PER_MINUTE}")
    return int(text)


def _check_new(value: bytes | str, lines: dict[bytes, int] | dict[str, int], number: int, what: str) -> None:
    first = lines.setdefault(value, number)  # type: ignore[arg-type]  # a dict and its value have the same type
    if first != number:
        raise ValueError(f"this {what} is also on line {first}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(request: web.BaseRequest) -> str | None:
    """The key that a request brings; None for none, and "" for a malformed header, which no key matches."""
    given = request.headers.getall("Authorization", [])
    if not given:
        given = request.headers.getall("x-api-key", [])
        return None if not given else given[0] if len(given) == 1 else ""
    scheme, _, key = given[0].partition(" ")
    return key.strip(" ") if len(given) == 1 and scheme.lower() == "bearer" else ""


def _is_from_this_host(request: web.BaseRequest) -> bool:
    """Whether a request comes from this host, and neither through a proxy nor from a page of another server."""
    if request.remote is None or not ip_address(request.remote).is_loopback:
        return False
    # A proxy on this host forwards requests of other hosts.
    if any(name.lower() in _PROXY_HEADERS or name.lower().startswith("x-forwarded-") for name in request.headers):
        return False
    # A page whose own name was made to point to this host (DNS rebinding) sends that name: its browser takes this
    # server for the page's own.
    hosts = request.headers.getall("Host", [])
    if not hosts:  # only an HTTP/1.0 request: the parser refuses others without Host
        return "Origin" not in request.headers
    if len(hosts) != 1 or not _THIS_HOST.fullmatch(hosts[0]):
        return False
    return all(origin == f"http://{hosts[0]}" for origin in request.headers.getall("Origin", []))


def main() -> int:
    """`python -m gateway.edge.auth FILE`: check whether a file of keys can be used."""
    try:
        known_keys(sys.argv[1], None)
    except KeysRefused as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
