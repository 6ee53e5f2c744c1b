"""Short requests that wait at the same moment are tokenized together, in one call on a thread.

While one batch of them runs the next one gathers, without a timer. Rejected: an executor with a job a request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial

from common.text.tokenization import NameOf, TokenIds, Tokenizer, TruncationRule
from gateway.threads import PART_INPUTS, PART_SIZE, Threads


@dataclass(slots=True, eq=False)
class _ShortRequest:
    """Texts that wait to be tokenized together with others'."""

    tokenizer: Tokenizer
    truncation: TruncationRule
    texts: list[str]
    num_chars: int
    name_of: NameOf
    future: asyncio.Future[list[TokenIds]]

    def tokenize(self) -> list[TokenIds] | BaseException:
        """What becomes of it alone. It never raises."""
        try:
            return self.tokenizer.encode(self.texts, self.truncation, self.name_of)
        except BaseException as error:  # noqa: BLE001  # handed to the one that waits
            return error

    def deliver(self, found: list[TokenIds] | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(found, BaseException):
            self.future.set_exception(found)
        else:
            self.future.set_result(found)


class ShortTexts:
    """Tokenizes what short requests wait, as one batch at a time: those that come meanwhile are the next one."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiting: deque[_ShortRequest] = deque()
        self._is_running = False

    def tokenize(
        self, tokenizer: Tokenizer, truncation: TruncationRule, texts: list[str], name_of: NameOf
    ) -> asyncio.Future[list[TokenIds]]:
        """A sequence of each text. Raises as `Tokenizer.encode`."""
        future: asyncio.Future[list[TokenIds]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_ShortRequest(tokenizer, truncation, texts, sum(map(len, texts)), name_of, future))
        self._run()
        return future

    def _run(self) -> None:
        while self._waiting and not self._is_running:
            batch = self._take_batch()
            if batch:
                self._is_running = True
                self._threads.run(partial(_tokenize_together, batch)).add_done_callback(partial(self._on_done, batch))

    def _take_batch(self) -> list[_ShortRequest]:
        """The requests at the front that one call can serve; those whose clients have left are dropped."""
        batch: list[_ShortRequest] = []
        num_inputs = num_chars = 0
        while self._waiting:
            request = self._waiting[0]
            if batch and (
                request.tokenizer is not batch[0].tokenizer
                or request.truncation != batch[0].truncation
                or num_inputs + len(request.texts) > PART_INPUTS
                or num_chars + request.num_chars > PART_SIZE
            ):
                break
            self._waiting.popleft()
            if not request.future.done():
                batch.append(request)
                num_inputs += len(request.texts)
                num_chars += request.num_chars
        return batch

    def _on_done(self, batch: list[_ShortRequest], found: asyncio.Future[list[list[TokenIds] | BaseException]]) -> None:
        for request, of_request in zip(batch, found.result(), strict=True):
            request.deliver(of_request)
        self._is_running = False
        self._run()


def _tokenize_together(batch: list[_ShortRequest]) -> list[list[TokenIds] | BaseException]:
    """What becomes of each request of a batch. It never raises: one request's error is its own."""
    if len(batch) > 1:
        tokenizer, truncation = batch[0].tokenizer, batch[0].truncation
        try:
            rows = iter(tokenizer.encode([text for request in batch for text in request.texts], truncation))
            return [[next(rows) for _ in request.texts] for request in batch]
        except BaseException:  # noqa: BLE001  # one of them is at fault: each runs alone, and is told its own place
            pass
    return [request.tokenize() for request in batch]
