"""The life of one process of a suite, for every role: logging, its lock, its start and its end.

There is one process for each role and slot. It dies with its supervisor. After each failed start it waits longer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from common import config as configuration
from common import environment, log
from common.config import Config
from common.errors import EX_FAILURE, StartRefused
from common.run_dir import Lock, RunDir

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MAX_BACKOFF_S = 30
_UNCOUNTED_BACKOFF_S = 5.0


def run_process(role: str, config_class: type[Config], run: Callable[[Config, Callable[[], None]], int]) -> NoReturn:
    """Run one process of a suite from start to end. The `__main__` of each role calls it with its `main`.

    `run` takes the configuration and a function to call once the process can do its work. It returns the exit status.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a parent's blocked signals are inherited
    supervised = environment.under_supervisord()
    if supervised:
        _die_with_parent()
    _reopen_log_at_hangup()
    config = configuration.load(config_class, sys.argv[1:])
    name = role if role == "scheduler" else f"{role}-{config.slot}"
    run_dir = RunDir(config.run_dir)
    history = _StartHistory(run_dir, name)
    if supervised and not _wait(history.begin()):
        sys.exit(0)
    try:
        listener = log.set_up(environment.process_name() or name, config.log_level, config.log_dir)
    except OSError as error:
        sys.stderr.write(f"hedgerow {name}: --log-dir {config.log_dir} cannot be written to: {error.strerror}\n")
        sys.exit(EX_FAILURE)
    status = EX_FAILURE
    try:
        lock = _take_place(run_dir, name)
        logger.info("starting: %s", configuration.describe(config))
        status = _run(run, config, history.clear)
        logger.info("stopped with status %d", status)
        lock.close()
    except StartRefused as error:
        logger.error("cannot start: %s", error)  # noqa: TRY400 the text says it all
        status = error.exit_status
    finally:
        if not log.stop(listener):
            os._exit(status)  # no process reads the log, and the thread that waits to write it must not delay the end
    sys.exit(status)


def _reopen_log_at_hangup() -> None:
    """Make SIGHUP reopen the log's file; without a file it does nothing. By default it would end the process.

    This happens on its own thread: a disk that hangs must not stop the main loop. A gateway replaces the handler, since
    it also reads its keys again.
    """
    hangup_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def reopen_each_time() -> None:
        while os.eventfd_read(hangup_fd):
            try:
                log.reopen()
            except OSError as error:
                logger.error("cannot reopen the log's file, and go on with the old one: %s", error.strerror)  # noqa: TRY400 the text says it all

    threading.Thread(target=reopen_each_time, name="hangup", daemon=True).start()
    signal.signal(signal.SIGHUP, lambda *_: os.eventfd_write(hangup_fd, 1))


def _take_place(run_dir: RunDir, name: str) -> Lock:
    """Raises AddressInUse, or StartRefused if this run folder cannot be used."""
    try:
        run_dir.prepare()
        run_dir.address("gateways")  # refuses a name that is too long
        return run_dir.lock(name)
    except (OSError, ValueError) as error:
        raise StartRefused(str(error)) from None


def _run(run: Callable[[Config, Callable[[], None]], int], config: Config, on_ready: Callable[[], None]) -> int:
    try:
        return run(config, on_ready)
    except StartRefused:
        raise
    except BaseException:
        # A bug of ours, or the host is out of some resource: the process dies, and the log must say where.
        logger.critical("this process has failed", exc_info=True)
        raise


class _StartHistory:
    """The number of starts in a row after which a process did not become ready, kept in the run folder.

    supervisord restarts a dead process at once and for ever. Without a wait, a process whose model is broken would use
    up a core. A process that became ready is restarted without a wait.
    """

    def __init__(self, run_dir: RunDir, name: str) -> None:
        self._path = run_dir.starts(name)

    def begin(self) -> float:
        """Count this start, and return the seconds to wait before it: 0, 1, 2, 4 … 30, each within 20 %."""
        try:
            failed_starts = len(self._read())
            self._path.write_bytes(b"." * min(failed_starts + 1, 16))
        except FileNotFoundError:
            return 0.0  # no run folder yet
        except OSError:
            return _UNCOUNTED_BACKOFF_S  # for example a full disk: starts that cannot be counted must not spin either
        if failed_starts == 0:
            return 0.0
        return min(2.0 ** (failed_starts - 1), _MAX_BACKOFF_S) * random.uniform(0.8, 1.2)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def _wait(delay_s: float) -> bool:
    """Wait before a start. Returns False if a signal has asked for a stop meanwhile."""
    if delay_s == 0:
        return True
    logger.warning("the last start failed; waiting %.1f s before this one", delay_s)
    stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
    previous = {
        number: signal.signal(number, lambda *_: os.eventfd_write(stop_fd, 1))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    stopped, _, _ = select.select([stop_fd], [], [], delay_s)
    for number, handler in previous.items():
        signal.signal(number, handler)
    os.close(stop_fd)
    return not stopped


def _die_with_parent() -> None:
    """Make the kernel kill this process when supervisord dies: an orphan would keep its device and its lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # supervisord may have died before this call. Then the parent is the process that adopts orphans.
    try:
        parent = Path("/proc", str(os.getppid()), "cmdline").read_bytes()
    except OSError:
        parent = b""
    if b"supervisor" not in parent:
        sys.stderr.write(
            "hedgerow: SUPERVISOR_ENABLED is set, but the parent is no supervisord: it died, or unset the variable\n"
        )
        sys.stderr.flush()
        os._exit(EX_FAILURE)
