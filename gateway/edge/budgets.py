"""How many tokens a minute a key may have run: a token bucket each, shared by all gateways of a suite.

A bucket holds one minute's worth and fills continuously. What is kept of it is one number, the time at which it will be
full again: a charge moves that time on by what the tokens take to flow back, and a time in the past means a full
bucket. (The same rule as counting tokens, with a single number that needs no refilling.) Times are CLOCK_MONOTONIC,
which all processes of a host share; since it begins anew with the host, the number is kept with the boot that it
belongs to.

A request of more than a minute's worth finds room when the bucket is full, and leaves it owing: else it would be
refused for ever. A request is charged when its tokens are known, whatever becomes of it then.

The number lies in the run folder, a file a key, opened for each charge and locked: no descriptor, slot or mapping to
look after, whichever gateway restarts, and 7 µs a request. A look at it before, at 6 µs, spares the work of tokenizing
for a key that has nothing left. A gateway that was stopped in that moment must not stop the
others: they try for `lock_timeout_s`, doing nothing else, then go on without the lock; at worst a charge is lost.
Where the file cannot be used at all (a full disk, a folder that is no longer ours) requests run uncharged, and the log
says so: budgets are there to share a server, and a server that refuses everybody shares nothing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import RateLimited
from common.run_dir import RunDir
from gateway.edge.auth import Key

logger = logging.getLogger(__name__)

_MINUTE_NS = 60_000_000_000
_RECORD = struct.Struct("<36sq")  # the boot's id; when the bucket is full again


class Budgets:
    """The buckets of one run folder."""

    def __init__(self, run_dir: str, *, lock_timeout_s: float = 0.01) -> None:
        self._lock_timeout_s = lock_timeout_s
        self._folder = RunDir(run_dir).budgets
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()[:36]
        self._unkept: set[bytes] = set()  # digests of keys whose files cannot be used, as the log has said

    def check(self, key: Key, now_ns: int) -> None:
        """Pass where at least one token is left, before anything is done to learn how many are needed.

        Nothing is taken, and without the lock: who reads amid a charge is at worst told too late, by `charge`.

        Raises:
            RateLimited: there is none. It tells when there will be.
        """
        if key.tokens_per_minute is None:
            return
        with self._forgiving(key):
            try:
                file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return  # nothing was ever charged
            try:
                owed_ns = max(0, self._full_ns(file) - now_ns)
            finally:
                os.close(file)
            wait_ns = _wait_ns(owed_ns, _MINUTE_NS // key.tokens_per_minute)
            if wait_ns > 0:
                raise RateLimited(
                    f"This key may have {key.tokens_per_minute} tokens run a minute, and none of them are left. Try "
                    "again later.",
                    retry_after_s=wait_ns / 1e9,
                )

    def charge(self, key: Key, num_tokens: int, now_ns: int) -> None:
        """Take a request's tokens from its key's budget; a key without one costs nothing.

        Raises:
            RateLimited: there are too few; nothing is taken. It tells when there will be enough.
        """
        if key.tokens_per_minute is None:
            return
        cost_ns = num_tokens * _MINUTE_NS // key.tokens_per_minute
        with self._forgiving(key):
            file = self._open(key)
            try:
                _lock(file, self._lock_timeout_s)  # until the file is closed
                owed_ns = max(0, self._full_ns(file) - now_ns)
                wait_ns = _wait_ns(owed_ns, cost_ns)
                if wait_ns > 0:
                    raise RateLimited(
                        f"This key may have {key.tokens_per_minute} tokens run a minute, and too few of them are left "
                        f"for the {num_tokens} of this request. Try again later, or send less.",
                        retry_after_s=wait_ns / 1e9,
                    )
                os.pwrite(file, _RECORD.pack(self._boot_id, now_ns + owed_ns + cost_ns), 0)
            finally:
                os.close(file)
            self._unkept.discard(key.digest)

    @contextmanager
    def _forgiving(self, key: Key) -> Iterator[None]:
        """Let a request through where its key's file cannot be used; the log says so once, until it can be again."""
        try:
            yield
        except OSError as error:
            if key.digest not in self._unkept:
                self._unkept.add(key.digest)
                logger.error(  # noqa: TRY400  # the text says it all; a path would show the key's digest
                    "the budget of the key named %s cannot be kept, and its requests run uncharged: %s in %s",
                    key.name,
                    error.strerror,
                    self._folder,
                )

    def _path(self, key: Key) -> Path:
        return self._folder / key.digest.hex()

    def _open(self, key: Key) -> int:
        path = self._path(key)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _full_ns(self, file: int) -> int:
        record = os.pread(file, _RECORD.size, 0)
        if len(record) != _RECORD.size:
            return 0  # a new one
        boot_id, full_ns = _RECORD.unpack(record)
        return int(full_ns) if boot_id == self._boot_id else 0


def _wait_ns(owed_ns: int, cost_ns: int) -> int:
    """How long until there is room; at most 0 where there is.

    Up to a minute may be owed; a single charge of more than that needs a full bucket.
    """
    return owed_ns + min(cost_ns, _MINUTE_NS) - _MINUTE_NS


def _lock(file: int, timeout_s: float) -> None:
    """Lock it, unless another one holds the lock for all that time: it holds it for microseconds, or was stopped."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return None
            os.sched_yield()
