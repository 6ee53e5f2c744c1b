"""Short requests that wait at the same time are tokenized together, in one call on a thread.

While one batch runs, the next one gathers, without a timer. Rejected: one job on a thread for each request, whose two
hand-overs of the interpreter's lock cost more than the work.
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
    """A request whose texts wait for the next batch."""

    tokenizer: Tokenizer
    truncation: TruncationRule
    texts: list[str]
    num_chars: int
    name_of: NameOf
    future: asyncio.Future[list[TokenIds]]

    def tokenize(self) -> list[TokenIds] | BaseException:
        """Its sequences when it runs alone, or its error. Never raises."""
        try:
            return self.tokenizer.encode(self.texts, self.truncation, self.name_of)
        except BaseException as error:  # noqa: BLE001  # the request's future raises it
            return error

    def deliver(self, found: list[TokenIds] | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(found, BaseException):
            self.future.set_exception(found)
        else:
            self.future.set_result(found)


class ShortTexts:
    """Tokenizes short requests, one batch at a time."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiting: deque[_ShortRequest] = deque()
        self._is_running = False

    def tokenize(
        self, tokenizer: Tokenizer, truncation: TruncationRule, texts: list[str], name_of: NameOf
    ) -> asyncio.Future[list[TokenIds]]:
        """A sequence for each text. Raises what `Tokenizer.encode` raises."""
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
        """The first requests that one call can serve. A request whose client has left is dropped."""
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
    """The sequences or the error of each request of a batch. Never raises: a request's error is its own."""
    if len(batch) > 1:
        tokenizer, truncation = batch[0].tokenizer, batch[0].truncation
        try:
            rows = iter(tokenizer.encode([text for request in batch for text in request.texts], truncation))
            return [[next(rows) for _ in request.texts] for request in batch]
        except BaseException:  # noqa: BLE001  # each runs alone, so that the error names its own place
            pass
    return [request.tokenize() for request in batch]
