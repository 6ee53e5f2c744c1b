"""Tokenization off the event loop: a few threads, and the tokenizer of whichever model is served now.

The tokenizers release the interpreter's lock while they work, so threads suffice. But at thousands of short texts a
second the lock's way to the thread and back costs more than the work: on two otherwise idle cores 405 µs of CPU a
request against 190 when all ran on one core (2026-11-29). So short requests that wait at the same moment are tokenized
together, in one call: while one batch of them runs the next one gathers, without a timer. Rejected: an executor with a
job a request; the event loop itself, which a single text of 8,192 characters would stop for milliseconds.

A long list is tokenized chunk by chunk, each chunk queued behind whatever came in the meantime, so that a request of
2,048 texts delays a short one by a chunk and not by all of them. What waits is bounded by the requests that the
gateway holds at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from common.errors import InvalidRequest, Unavailable
from common.protocol import ModelFacts
from common.tokenization import TokenIds, Tokenizer, TruncationRule
from common.transport import now_ns

logger = logging.getLogger(__name__)

_CHUNK_INPUTS = 64
_CHUNK_SIZE = 65_536  # characters, or token ids

# A request up to this size is tokenized together with others.
_SHORT_INPUTS = 4
_SHORT_CHARS = 4096

# How long a request waits for the first model: longer than a gateway or a small model's worker takes to start, so that
# a restart fails nobody; not much longer, since a client is better told that nothing is there.
_PATIENCE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """A model's facts and the tokenizer made for them: a request takes both together."""

    facts: ModelFacts
    tokenizer: Tokenizer


@dataclass(slots=True, eq=False)
class _Work:
    function: Callable[[], object]
    future: asyncio.Future[object]
    result: object = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _ShortRequest:
    """Texts that wait to be tokenized together with others'."""

    model: Model
    truncation: TruncationRule
    texts: list[str]
    num_chars: int
    first_index: int | None
    future: asyncio.Future[list[TokenIds]]


class Threads:
    """Runs functions on `num_threads` threads, first come first served. Belongs to one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._finished: deque[_Work] = deque()
        self._delivery_due = False
        self._threads = [
            threading.Thread(target=self._work, name=f"encoding-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """What `function` returns or raises. A future that is cancelled takes along work that has not begun."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Work(function, future))  # type: ignore[arg-type]  # what the function returns is the future's
        return future

    def close(self) -> None:
        """End the threads once they have done what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if work.future.cancelled():
                continue
            try:
                work.result = work.function()
            except BaseException as error:  # noqa: BLE001  # handed to whoever waits; the thread lives on
                work.error = error
            self._finished.append(work)
            if not self._delivery_due:
                self._delivery_due = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more

    def _deliver(self) -> None:
        # Before the queue is emptied: work that is appended after that sees False, and its thread calls again.
        self._delivery_due = False
        while self._finished:
            work = self._finished.popleft()
            if work.future.done():
                continue
            if work.error is None:
                work.future.set_result(work.result)
            else:
                work.future.set_exception(work.error)


class Encoder:
    """Text and token ids to checked sequences, for the model that is served now."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._short: deque[_ShortRequest] = deque()
        self._short_runs = False  # a batch of them is being tokenized
        self._model: Model | None = None
        self._status = "starting"
        self._reason = "No worker has loaded the model yet."
        self._loading: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # there is a model, or there will be none

    @property
    def model(self) -> Model:
        """The model that is served now.

        Raises:
            Unavailable: none yet, or its tokenizer cannot be loaded.
        """
        if self._model is None:
            raise Unavailable(self._reason + " Try again.", retry_after_s=1)
        return self._model

    async def wait_for_model(self, deadline_ns: int) -> Model:
        """The model that is served; while a process starts or a model is replaced, a request waits for it here.

        Raises:
            Unavailable: none came in good time, or its tokenizer cannot be loaded.
        """
        if self._model is None and not self._settled.is_set():
            patience_s = min(_PATIENCE_S, (deadline_ns - now_ns()) / 1e9)
            try:
                async with asyncio.timeout(patience_s):
                    await self._settled.wait()
            except TimeoutError:
                pass  # `model` says what is missing
        return self.model

    @property
    def status(self) -> str:
        """ready, starting or unavailable."""
        return "ready" if self._model is not None else self._status

    @property
    def reason(self) -> str:
        """Why there is no model, in one sentence; empty when there is one."""
        return "" if self._model is not None else self._reason

    def on_facts(self, facts: ModelFacts) -> None:
        """Serve the model of `facts`; where it has another tokenizer, from when that is loaded."""
        if self._model is not None and _same_tokenizer(self._model.facts, facts):
            self._model = Model(facts, self._model.tokenizer)
            return
        # What workers run now is the new model: the old one's tokens would give wrong vectors.
        self._model = None
        self._settled.clear()
        self._status, self._reason = "starting", "The model's tokenizer is being loaded."
        if self._loading is not None:
            self._loading.cancel()
        self._loading = asyncio.ensure_future(self._load(facts))

    async def wait_loaded(self) -> None:
        """Return when nothing is being loaded."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    async def encode(
        self,
        model: Model,
        texts: list[str],
        *,
        prompt: str,
        truncation: TruncationRule,
        lone: bool,
        max_tokens: int,
    ) -> list[TokenIds]:
        """The token ids of each text with `prompt` before it.

        Raises:
            InvalidRequest: a text is too long or holds no token, or all together have too many tokens.
            InternalError: the tokenizer failed.
        """
        num_chars = sum(map(len, texts)) + len(prompt) * len(texts)
        if len(texts) <= _SHORT_INPUTS and num_chars <= _SHORT_CHARS:
            if prompt:
                texts = [prompt + text for text in texts]
            request = _ShortRequest(
                model, truncation, texts, num_chars, None if lone else 0, asyncio.get_running_loop().create_future()
            )
            self._short.append(request)
            self._run_short()
            sequences = await request.future
            _check_num_tokens(len(sequences), sum(map(len, sequences)), max_tokens)
            return sequences

        def encode_chunk(start: int, stop: int) -> list[TokenIds]:
            chunk = texts[start:stop]
            if prompt:
                chunk = [prompt + text for text in chunk]
            return model.tokenizer.encode(chunk, truncation, first_index=None if lone else start)

        return await self._in_chunks(encode_chunk, texts, len(prompt), max_tokens)

    async def check(
        self,
        model: Model,
        token_ids: list[list[object]],
        *,
        truncation: TruncationRule,
        lone: bool,
        max_tokens: int,
    ) -> list[TokenIds]:
        """The client's own lists of token ids, checked against the vocabulary.

        Raises:
            InvalidRequest: a list is empty, too long or holds what is no token id, or all together are too many.
        """

        if not truncation.allowed:
            # Before anything looks at each of them: a body may hold millions.
            _check_num_tokens(len(token_ids), sum(map(len, token_ids)), max_tokens)

        def check_chunk(start: int, stop: int) -> list[TokenIds]:
            return [
                model.tokenizer.check_ids(token_ids[index], truncation, None if lone else index)
                for index in range(start, stop)
            ]

        return await self._in_chunks(check_chunk, token_ids, 0, max_tokens)

    async def _in_chunks(
        self,
        encode_chunk: Callable[[int, int], list[TokenIds]],
        inputs: Sequence[str] | Sequence[list[object]],
        extra_size: int,
        max_tokens: int,
    ) -> list[TokenIds]:
        sequences: list[TokenIds] = []
        num_tokens = 0
        for start, stop in _chunks(inputs, extra_size):
            chunk = await self._threads.run(partial(encode_chunk, start, stop))
            sequences += chunk
            num_tokens += sum(map(len, chunk))
            _check_num_tokens(len(sequences), num_tokens, max_tokens)
        return sequences

    def _run_short(self) -> None:
        """Tokenize what short requests wait, as one batch at a time: those that come meanwhile are the next one."""
        while self._short and not self._short_runs:
            batch = self._take_short()
            if batch:
                self._short_runs = True
                self._threads.run(partial(_encode_together, batch)).add_done_callback(partial(self._on_short, batch))

    def _take_short(self) -> list[_ShortRequest]:
        """The requests at the front that one call can serve; those whose clients have left are dropped."""
        batch: list[_ShortRequest] = []
        num_inputs = num_chars = 0
        while self._short:
            request = self._short[0]
            if batch and (
                request.model is not batch[0].model
                or request.truncation != batch[0].truncation
                or num_inputs + len(request.texts) > _CHUNK_INPUTS
                or num_chars + request.num_chars > _CHUNK_SIZE
            ):
                break
            self._short.popleft()
            if not request.future.done():
                batch.append(request)
                num_inputs += len(request.texts)
                num_chars += request.num_chars
        return batch

    def _on_short(
        self, batch: list[_ShortRequest], outcomes: asyncio.Future[list[list[TokenIds] | BaseException]]
    ) -> None:
        for request, outcome in zip(batch, outcomes.result(), strict=True):
            if request.future.done():
                continue
            if isinstance(outcome, BaseException):
                request.future.set_exception(outcome)
            else:
                request.future.set_result(outcome)
        self._short_runs = False
        self._run_short()

    async def _load(self, facts: ModelFacts) -> None:
        try:
            tokenizer = await self._threads.run(partial(Tokenizer, facts))
        except (OSError, ValueError) as error:
            self._status = "unavailable"
            self._reason = "The model's tokenizer cannot be loaded; the gateway's log says why."
            self._settled.set()
            logger.error("the tokenizer of %s cannot be loaded: %s", facts.name, error)  # noqa: TRY400  # the text says it all
            return
        self._model = Model(facts, tokenizer)
        self._settled.set()
        logger.info("serving %s: %d dimensions, %d tokens", facts.name, facts.dimensions, facts.max_tokens)


def _encode_together(batch: list[_ShortRequest]) -> list[list[TokenIds] | BaseException]:
    """What becomes of each request of a batch. It never raises: one request's error is its own."""
    if len(batch) > 1:
        tokenizer, truncation = batch[0].model.tokenizer, batch[0].truncation
        try:
            rows = iter(tokenizer.encode([text for request in batch for text in request.texts], truncation))
            return [[next(rows) for _ in request.texts] for request in batch]
        except BaseException:  # noqa: BLE001  # one of them is at fault: each runs alone, and is told its own place
            pass
    return [_encode_alone(request) for request in batch]


def _encode_alone(request: _ShortRequest) -> list[TokenIds] | BaseException:
    try:
        return request.model.tokenizer.encode(request.texts, request.truncation, first_index=request.first_index)
    except BaseException as error:  # noqa: BLE001  # handed to the one that waits
        return error


def _check_num_tokens(num_inputs: int, num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise InvalidRequest(
            f"input has more than {max_tokens} tokens in all, {num_tokens} of them in its first {num_inputs} inputs. "
            "Send several requests.",
            param="input",
            code="too_many_tokens",
        )


def _same_tokenizer(before: ModelFacts, after: ModelFacts) -> bool:
    return (before.tokenizer_sha256, before.max_tokens, before.vocab_size, before.lower_case) == (
        after.tokenizer_sha256,
        after.max_tokens,
        after.vocab_size,
        after.lower_case,
    )


def _chunks(inputs: Sequence[str] | Sequence[list[object]], extra_size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of `inputs`, each of at least one input and at most a chunk's worth."""
    if len(inputs) == 1:
        yield 0, 1
        return
    start, size = 0, 0
    for index, item in enumerate(inputs):
        item_size = len(item) + extra_size
        if index > start and (index - start >= _CHUNK_INPUTS or size + item_size > _CHUNK_SIZE):
            yield start, index
            start, size = index, 0
        size += item_size
    yield start, len(inputs)
