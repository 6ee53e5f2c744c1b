"""Logging, set up one way: one line an event, never blocking the process that logs.

A process that writes to a full pipe (a stalled log reader, a supervisor that was stopped) freezes with it, so records
go through a bounded queue to a writer thread; when the queue is full they are counted and dropped, and the count is
logged when there is room again.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import threading
from pathlib import Path

_QUEUED_RECORDS = 10_000
_FILE_BYTES = 16 * 1024 * 1024
_FILES = 4
_LINE_INTERVAL_NS = 1_000_000_000


class _DroppingHandler(logging.handlers.QueueHandler):
    """Puts records into the queue; when it is full, counts them instead of waiting."""

    def __init__(self, records: queue.Queue[logging.LogRecord], target: logging.Handler) -> None:
        super().__init__(records)
        self.target = target  # of the writer thread
        self._dropped = 0
        self._lock = threading.Lock()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # The base class would format here, on the thread that logs, and lose what is a message and what a traceback.
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            with self._lock:
                if self._dropped:
                    self.queue.put_nowait(_told(f"{self._dropped} log records were dropped: nobody read them"))
                    self._dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            with self._lock:
                self._dropped += 1


def _told(text: str) -> logging.LogRecord:
    """What the log has to say of itself."""
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


class _File(logging.handlers.RotatingFileHandler):
    """Counts what it cannot write, since the disk is full, say, and tells when it can again.

    The base class would tell standard error of each, with a traceback.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=_FILES)
        self._unwritten = 0
        self._reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        before = self._unwritten
        super().emit(record)
        if before and self._unwritten == before:
            count, self._unwritten = self._unwritten, 0
            super().emit(_told(f"{count} log records could not be written when they came: {self._reason}"))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._unwritten += 1
            self._reason = error.strerror
        else:
            super().handleError(record)


class _EscapingFormatter(logging.Formatter):
    """One line an event: a name or an error text with a line break in it cannot forge a second one.

    Tracebacks keep their lines, each indented, so that they read as what they are.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)

    def formatException(self, exc_info: object) -> str:
        text = super().formatException(exc_info)  # type: ignore[arg-type]  # typeshed's own alias is private
        return "\n".join("    " + line for line in text.splitlines())


class RateLimitedLog:
    """Lines of a kind that a peer can cause as often as it likes: one a second, with how many were left out before it.

    Those after the last one are told of by the next, whenever it comes. What counts them all is a metric.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_ns = 0
        self._left_out = 0

    def log(self, level: int, now_ns: int, text: str, *arguments: object) -> None:
        """`now_ns`: on a clock that never goes back."""
        if now_ns < self._next_ns:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        self._next_ns = now_ns + _LINE_INTERVAL_NS
        if left_out:
            self._logger.log(level, "%s (and %d more before it)", text % arguments, left_out)
        else:
            self._logger.log(level, text, *arguments)


def set_up(process: str, level: str, log_dir: str = "") -> logging.handlers.QueueListener:
    """Log to `log_dir/process.log` (rotated), or to standard error. The caller stops the listener at exit."""
    target: logging.Handler
    if log_dir:
        Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(log_dir) / f"{process}.log"
        target = _File(path)
    else:
        target = logging.StreamHandler(sys.stderr)
    target.setFormatter(_EscapingFormatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    records: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUED_RECORDS)
    logging.basicConfig(level=level.upper(), handlers=[_DroppingHandler(records, target)], force=True)
    listener = logging.handlers.QueueListener(records, target)
    listener.start()
    return listener


def reopen() -> None:
    """Write on into a new file of the log's name, where its file was moved away or deleted.

    It may wait for the writer. Raises OSError: there can be none; the old one is written on.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _DroppingHandler) and isinstance(handler.target, logging.FileHandler):
            target = handler.target
            opened = Path(target.baseFilename).open("a", encoding=target.encoding)  # noqa: SIM115 the handler's now
            previous = target.setStream(opened)
            if previous is not None:
                previous.close()


def stop(listener: logging.handlers.QueueListener, timeout_s: float = 2.0) -> bool:
    """Write what is queued and end the writer; False when it is stuck, since nobody reads what it writes."""
    stopper = threading.Thread(target=listener.stop, daemon=True)
    stopper.start()
    stopper.join(timeout_s)
    return not stopper.is_alive()
