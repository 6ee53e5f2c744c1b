"""What runs on the event loop and what on a thread, and the few threads there are.

Tokenizers release the interpreter's lock while they work, so threads suffice. The event loop stops while anything runs
on it, so only small work does. The bounds are here.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

PARSE_ON_LOOP = 262_144  # bytes of a body; a larger one is parsed on a thread
RENDER_ON_LOOP = 65_536  # values, or characters of documents, of an answer; a larger one is rendered on a thread
JOIN_ON_LOOP = 4_194_304  # bytes of an answer that is only put together; a larger one is, on a thread


QUERY_ON_LOOP = 512  # characters of a request's only text, some 50 µs; longer ones are tokenized on a thread

# A thread tokenizes at most this much at once, then what was queued in the meantime.
PART_INPUTS = 64
PART_SIZE = 65_536  # characters, or token ids

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Work:
    function: Callable[[], object]
    future: asyncio.Future[object]
    result: object = None
    error: BaseException | None = None


class Threads:
    """Runs functions on `num_threads` threads in the order of arrival. Belongs to one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._finished: deque[_Work] = deque()
        self._delivery_due = False
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenizing-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """What `function` returns or raises. If the future is cancelled before the function begins, it never runs."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Work(function, future))  # type: ignore[arg-type]  # what the function returns is the future's
        return future

    def close(self) -> None:
        """End the threads after the work that is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if work.future.cancelled():
                continue
            try:
                work.result = work.function()
            except BaseException as error:  # noqa: BLE001  # the future raises it; the thread lives on
                work.error = error
            self._finished.append(work)
            if not self._delivery_due:
                self._delivery_due = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # the loop is closed: no future is awaited any more

    def _deliver(self) -> None:
        # Set before `_finished` is emptied: a thread that appends later sees False and calls again.
        self._delivery_due = False
        while self._finished:
            work = self._finished.popleft()
            if work.future.done():
                continue
            if work.error is None:
                work.future.set_result(work.result)
            else:
                work.future.set_exception(work.error)
