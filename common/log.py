"""Logging: one line for each event, and a process never waits for its log.

A process that writes to a full pipe (its reader is stalled, its supervisor stopped) would freeze. So records go through
a bounded queue to a writer thread. When the queue is full, records are dropped and counted. The count is logged when
there is room again.
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
    """Puts records into the queue. If it is full, counts them instead of waiting."""

    def __init__(self, records: queue.Queue[logging.LogRecord], target: logging.Handler) -> None:
        super().__init__(records)
        self.target = target  # used by the writer thread
        self._dropped = 0
        self._lock = threading.Lock()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # The base class would format the whole record on the thread that logs, and merge message and traceback.
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            with self._lock:
                if self._dropped:
                    self.queue.put_nowait(
                        _told(f"{self._dropped} log records were dropped because no process read the log")
                    )
                    self._dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            with self._lock:
                self._dropped += 1


def _told(text: str) -> logging.LogRecord:
    """A record of the log about itself."""
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


class _File(logging.handlers.RotatingFileHandler):
    """Counts the records that it cannot write, for example to a full disk, and logs the count when it can again.

    The base class would write a traceback for each to standard error.
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
            super().emit(_told(f"{count} log records could not be written: {self._reason}"))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._unwritten += 1
            self._reason = error.strerror
        else:
            super().handleError(record)


class _EscapingFormatter(logging.Formatter):
    """One line for each event: a name or an error text with a line break cannot forge another line.

    Tracebacks keep their lines, each indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)

    def formatException(self, exc_info: object) -> str:
        text = super().formatException(exc_info)  # type: ignore[arg-type]  # typeshed's own alias is private
        return "\n".join("    " + line for line in text.splitlines())


class RateLimitedLog:
    """Log lines of a kind that a peer can cause at will: at most one a second, with the number of omitted lines.

    The next line, whenever it comes, tells how many were omitted since the last. A metric counts all of them.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_ns = 0
        self._left_out = 0

    def log(self, level: int, now_ns: int, text: str, *arguments: object) -> None:
        """Log a line, or count it as omitted. `now_ns` is on a monotonic clock."""
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
    """Log to `log_dir/process.log` (rotated), or to standard error without a folder. The caller stops the listener."""
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
    """Open the log's file again under its name, after it was moved or deleted. May wait for the writer.

    Raises:
        OSError: the file cannot be opened; the old one is still in use.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _DroppingHandler) and isinstance(handler.target, logging.FileHandler):
            target = handler.target
            opened = Path(target.baseFilename).open("a", encoding=target.encoding)  # noqa: SIM115 the handler owns it
            previous = target.setStream(opened)
            if previous is not None:
                previous.close()


def stop(listener: logging.handlers.QueueListener, timeout_s: float = 2.0) -> bool:
    """Write what is queued, and end the writer. Returns False if it is stuck because no process reads the log."""
    stopper = threading.Thread(target=listener.stop, daemon=True)
    stopper.start()
    stopper.join(timeout_s)
    return not stopper.is_alive()
