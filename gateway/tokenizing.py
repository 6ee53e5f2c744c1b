"""Tokenization, mostly off the event loop: a few threads, and the tokenizer of whichever model is served now.

The tokenizers release the interpreter's lock while they work, so threads suffice. But at thousands of short texts a
second the lock's way to the thread and back costs more than the work: on two otherwise idle cores 405 µs of CPU a
request against 190 when all ran on one core (2026-11-29). So a query, which takes some 50 µs, is tokenized where it
is, on the event loop. Short requests beyond that which wait at the same moment are tokenized together, in one call:
while one batch of them runs the next one gathers, without a timer. Rejected: an executor with a job a request; the
event loop for all of them, which a single text of 8,192 characters would stop for milliseconds.

A long list is tokenized part by part, each part queued behind whatever came in the meantime, so that a request of
2,048 texts, or a query with 1,000 documents, delays a short one by a part and not by all of them. What waits is
bounded by the requests that the gateway holds at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np

from common.errors import InternalError, InvalidRequest, ServiceError, Unavailable
from common.text.chunks import Chunks, ChunkTokenizer
from common.text.pairs import EncodeDocuments, Pair, PairNames, PairTokenizer, pair_tokenizer
from common.text.tokenization import NameOf, TokenIds, Tokenizer, TruncationRule
from common.wire.messages import ModelFacts, Spans
from common.wire.transport import now_ns
from gateway.model_requests import EmbeddingRequest, Inputs, LabelsRequest, LocalRequest, PairsRequest
from gateway.status import Status

logger = logging.getLogger(__name__)

_PART_INPUTS = 64
_PART_SIZE = 65_536  # characters, or token ids

# A request up to this size is tokenized together with others, and one text up to that at once.
_SHORT_INPUTS = 4
_SHORT_CHARS = 4096
_QUERY_CHARS = 512

# How long a request waits for the first model: longer than a gateway or a small model's worker takes to start, so that
# a restart fails nobody; not much longer, since a client is better told that nothing is there.
_PATIENCE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """A model's facts and what tokenizes for it: a request takes all of it together."""

    facts: ModelFacts
    tokenizer: Tokenizer
    pairs: PairTokenizer | None = None  # of a model that takes pairs
    chunks: ChunkTokenizer | None = None  # of a model that takes documents in chunks

    @classmethod
    def load(cls, facts: ModelFacts) -> Model:
        """The model of `facts`. It reads files.

        Raises:
            OSError, ValueError, InternalError: tokenizer.json cannot be read, or does not fit what the facts say.
        """
        tokenizer = Tokenizer(facts)
        return cls(
            facts,
            tokenizer,
            pair_tokenizer(facts, tokenizer) if facts.pair_template else None,
            ChunkTokenizer(facts, tokenizer) if facts.separator_id is not None else None,
        )


@dataclass(slots=True)
class EncodedInputs:
    """Inputs as sequences; of a partial request those that can be, and what is wrong with the others."""

    sequences: list[TokenIds]
    places: Sequence[int]  # of each sequence, in the client's list
    failures: dict[int, ServiceError]  # by place
    spans: list[Spans] | None = None  # of each sequence those that a row is made of; None: one of the whole

    @classmethod
    def of(cls, encoded: list[TokenIds | InvalidRequest], inputs: Inputs) -> EncodedInputs:
        """Raises InvalidRequest where there is nothing but errors."""
        errors = {index: error for index, error in enumerate(encoded) if isinstance(error, InvalidRequest)}
        of_all = cls(encoded, inputs.places, dict(inputs.failures))  # type: ignore[arg-type]  # errors are dropped next
        of_all.drop(errors)
        return of_all

    def drop(self, errors: Mapping[int, ServiceError]) -> None:
        """Leave out these sequences, for these reasons. Raises the first one where none would be left."""
        if not errors:
            return
        if len(errors) == len(self.sequences):
            raise next(iter(errors.values()))
        self.failures |= {self.places[index]: error for index, error in errors.items()}
        kept = [index for index in range(len(self.sequences)) if index not in errors]
        self.sequences = [self.sequences[index] for index in kept]
        self.places = [self.places[index] for index in kept]
        if self.spans is not None:
            self.spans = [self.spans[index] for index in kept]

    def leave_out(self, start: int, request: EmbeddingRequest) -> None:
        """Make rows of what follows the first `start` tokens.

        Raises:
            InvalidRequest: nothing follows them; of a partial request only where that is true of every input.
        """
        errors: dict[int, ServiceError] = {}
        for index, sequence in enumerate(self.sequences):
            if start >= len(sequence):
                name = request.inputs.name_of(self.places[index])
                errors[index] = InvalidRequest(
                    f"{name} has no token behind its prompt, and this model's vectors are of what follows the prompt.",
                    param=name,
                    code="empty_input",
                )
                if not request.partial:
                    raise errors[index]
        self.drop(errors)
        self.spans = [np.array([[start, len(sequence)]], dtype=np.int32) for sequence in self.sequences]


@dataclass(slots=True)
class EncodedPairs:
    """Pairs as sequences, each different one once: what is the same gets the same score, whatever runs beside it."""

    sequences: list[TokenIds] = field(default_factory=list)
    type_starts: list[int] = field(default_factory=list)  # where the tokens of type 1 begin within each sequence
    first_pairs: list[int] = field(default_factory=list)  # of each sequence, the first pair that it is
    places: list[int] = field(default_factory=list)  # of each pair, the place of its sequence
    _known: dict[tuple[bytes, int], int] = field(default_factory=dict)  # places by token ids and type start

    def add(self, pair: Pair) -> None:
        place = self._known.setdefault((pair.ids.tobytes(), pair.type_start), len(self.sequences))
        if place == len(self.sequences):
            self.sequences.append(pair.ids)
            self.type_starts.append(pair.type_start)
            self.first_pairs.append(len(self.places))
        self.places.append(place)


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
    name_of: NameOf
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
        self._status: Status = "starting"
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
    def status(self) -> Status:
        """ready, starting or unavailable."""
        return "ready" if self._model is not None else self._status

    @property
    def reason(self) -> str:
        """Why there is no model, in one sentence; empty when there is one."""
        return "" if self._model is not None else self._reason

    def on_facts(self, facts: ModelFacts) -> None:
        """Serve the model of `facts`; where it has another tokenizer, from when that is loaded."""
        if self._model is not None and _same_tokenizer(self._model.facts, facts):
            self._model = replace(self._model, facts=facts)
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

    def encode_query(self, model: Model, request: EmbeddingRequest, *, max_tokens: int) -> EncodedInputs | None:
        """What `encode_inputs` would make of a query, on the event loop; None of what takes longer.

        Raises:
            InvalidRequest: as there.
            InternalError: the tokenizer failed.
        """
        texts, prompt = request.inputs.texts, request.prompt
        if len(texts) != 1 or len(prompt) + len(texts[0]) > _QUERY_CHARS or request.partial:
            return None
        if prompt and not (model.facts.include_prompt or request.by_token):
            return None
        sequences = model.tokenizer.encode([prompt + texts[0]], request.truncation, request.inputs.name)
        _check_num_tokens(1, len(sequences[0]), max_tokens, request.inputs.list_name)
        spans = [_each_token(len(sequences[0]))] if request.by_token else None
        return EncodedInputs(sequences, request.inputs.places, {}, spans)

    async def encode_inputs(self, model: Model, request: EmbeddingRequest, *, max_tokens: int) -> EncodedInputs:
        """A sequence of each input: of a text with the prompt before it, of token ids as they are.

        Raises:
            InvalidRequest: an input is too long, holds no token or what is no token id, or all together have too many
                tokens. Of a partial request only where that is true of every input.
            InternalError: the tokenizer failed.
        """
        inputs = request.inputs
        if inputs.token_ids and not request.truncation.allowed:
            # Before anything looks at each of them: a body may hold millions.
            _check_num_tokens(len(inputs), sum(map(len, inputs.token_ids)), max_tokens, inputs.list_name)
        if inputs.texts and self._is_short(request):
            sequences: list[TokenIds | InvalidRequest] = [*await self._encode_short(model, request)]
            _check_num_tokens(len(sequences), sum(map(_num_tokens, sequences)), max_tokens, inputs.list_name)
        else:
            sizes = [len(request.prompt) + len(text) for text in inputs.texts] or list(map(len, inputs.token_ids))
            encode_part = partial(_encode_part, model, request)
            sequences = await self._in_parts(encode_part, sizes, _num_tokens, max_tokens, name=inputs.list_name)
        encoded = EncodedInputs.of(sequences, inputs)
        if request.by_token:
            encoded.spans = [_each_token(len(sequence)) for sequence in encoded.sequences]
        elif request.prompt and not model.facts.include_prompt:
            start = await self._threads.run(partial(model.tokenizer.prompt_length, request.prompt))
            encoded.leave_out(start, request)
        return encoded

    def _is_short(self, request: EmbeddingRequest) -> bool:
        texts = request.inputs.texts
        return (
            len(texts) <= _SHORT_INPUTS
            and not request.partial
            and sum(map(len, texts)) + len(request.prompt) * len(texts) <= _SHORT_CHARS
        )

    def _encode_short(self, model: Model, request: EmbeddingRequest) -> asyncio.Future[list[TokenIds]]:
        texts = request.inputs.texts
        if request.prompt:
            texts = [request.prompt + text for text in texts]
        short = _ShortRequest(
            model,
            request.truncation,
            texts,
            sum(map(len, texts)),
            request.inputs.name,
            asyncio.get_running_loop().create_future(),
        )
        self._short.append(short)
        self._run_short()
        return short.future

    async def encode_pairs(self, tokenizer: PairTokenizer, request: PairsRequest, *, max_tokens: int) -> EncodedPairs:
        """The pair of each document with its own query, or with the only one.

        Raises:
            InvalidRequest: a pair is too long, or all together have too many tokens; see PairTokenizer.
            InternalError: the tokenizer failed.
        """
        queries, documents, names = request.queries, request.documents, request.names
        for_query = partial(
            tokenizer.for_query,
            truncation=request.truncation,
            instruction=request.instruction,
            max_document_tokens=request.max_document_tokens,
        )
        encoded = EncodedPairs()

        @cache  # on a thread, with the first part
        def read_query() -> EncodeDocuments:
            return for_query(queries[0], names=names)

        def encode_part(start: int, stop: int) -> list[Pair]:
            if len(queries) == 1:
                of_part = replace(names, first_index=None if names.first_index is None else names.first_index + start)
                pairs = read_query()(documents[start:stop], of_part)
            else:
                pairs = []
                for index in range(start, stop):
                    of_pair = PairNames(f"{names.query}[{index}]", names.documents, index)
                    pairs += for_query(queries[index], names=of_pair)([documents[index]], of_pair)
            for pair in pairs:  # here, on a thread: a million token ids take milliseconds
                encoded.add(pair)
            return pairs

        sizes = list(map(len, documents))
        if len(queries) > 1:
            sizes = [size + len(query) for size, query in zip(sizes, queries, strict=True)]
        elif tokenizer.rereads_query:
            sizes = [size + len(queries[0]) for size in sizes]
        if tokenizer.rereads_query and request.instruction is not None:
            sizes = [size + len(request.instruction) for size in sizes]
        await self._in_parts(
            encode_part, sizes, lambda pair: len(pair.ids), max_tokens, name=names.documents, noun="pairs"
        )
        return encoded

    async def encode_labelled(
        self, tokenizer: Tokenizer, pair_tokenizer: PairTokenizer, request: LabelsRequest, *, max_tokens: int
    ) -> EncodedPairs:
        """Each text, or pair of texts, as one sequence: a text as the tokenizer writes one, a pair as it writes pairs.

        Raises:
            InvalidRequest: one is too long or holds no token, or all together have too many tokens.
            InternalError: the tokenizer failed.
        """
        encoded = EncodedPairs()

        def encode_part(start: int, stop: int) -> list[Pair]:
            pairs: list[Pair] = []
            for index in range(start, stop):
                name, texts = request.name_of(index), request.inputs[index]
                if len(texts) == 1:
                    [ids] = tokenizer.encode([*texts], request.truncation, _always(name))
                    pairs.append(Pair(ids, len(ids)))
                else:
                    names = PairNames(f"{name}[0]", f"{name}[1]", first_index=None)
                    pairs += pair_tokenizer.encode(texts[0], [texts[1]], request.truncation, names=names)
            for pair in pairs:
                encoded.add(pair)
            return pairs

        sizes = [sum(map(len, texts)) for texts in request.inputs]
        await self._in_parts(encode_part, sizes, lambda pair: len(pair.ids), max_tokens, name="inputs")
        return encoded

    async def answer_locally(self, model: Model, request: LocalRequest, *, max_size: int) -> list[bytes]:
        """What the tokenizer says of each input, as JSON.

        Raises:
            InvalidRequest: an input is refused, or all together are larger than `max_size`.
            InternalError: the tokenizer failed.
        """
        size = sum(request.sizes)
        if size > max_size:
            raise InvalidRequest(
                f"{request.name} has {size} {request.unit} in all; at most {max_size} fit into one request. "
                "Send several requests.",
                param=request.name,
                code="too_many_tokens",
            )

        def answer_part(start: int, stop: int) -> list[bytes]:
            return [request.answer(model.tokenizer, index) for index in range(start, stop)]

        return await self._in_parts(answer_part, request.sizes, lambda _: 0, max_size)

    async def encode_documents(
        self, tokenizer: ChunkTokenizer, documents: list[list[str]], *, max_tokens: int
    ) -> list[Chunks]:
        """Each document, which is a list of chunks, as one sequence.

        Raises:
            InvalidRequest: a document is too long, a chunk holds no token, or all together have too many tokens.
            InternalError: the tokenizer failed.
        """

        def encode_part(start: int, stop: int) -> list[Chunks]:
            return [tokenizer.encode(documents[index], f"input[{index}]") for index in range(start, stop)]

        sizes = [sum(map(len, chunks)) for chunks in documents]
        return await self._in_parts(
            encode_part, sizes, lambda document: len(document.ids), max_tokens, noun="documents"
        )

    async def _in_parts(
        self,
        encode_part: Callable[[int, int], list[T]],
        sizes: list[int],
        num_tokens_of: Callable[[T], int],
        max_tokens: int,
        *,
        name: str = "input",
        noun: str = "inputs",
    ) -> list[T]:
        """What `encode_part` makes of half-open ranges of inputs of these sizes, one range after the other.

        `name` and `noun` are how an error calls the list, and what is in it.
        """
        encoded: list[T] = []
        num_tokens = 0
        for start, stop in _parts(sizes):
            part = await self._threads.run(partial(encode_part, start, stop))
            encoded += part
            num_tokens += sum(map(num_tokens_of, part))
            _check_num_tokens(len(encoded), num_tokens, max_tokens, name, noun)
        return encoded

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
                or num_inputs + len(request.texts) > _PART_INPUTS
                or num_chars + request.num_chars > _PART_SIZE
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
            _deliver(request, outcome)
        self._short_runs = False
        self._run_short()

    async def _load(self, facts: ModelFacts) -> None:
        try:
            model = await self._threads.run(partial(Model.load, facts))
        except (OSError, ValueError, InternalError) as error:
            self._status = "unavailable"
            self._reason = "The model's tokenizer cannot be loaded; the gateway's log says why."
            self._settled.set()
            logger.error("the tokenizer of %s cannot be loaded: %s", facts.name, error)  # noqa: TRY400  # the text says it all
            return
        self._model = model
        self._settled.set()
        logger.info("serving %s: %d dimensions, %d tokens", facts.name, facts.dimensions, facts.max_tokens)


def _encode_part(model: Model, request: EmbeddingRequest, start: int, stop: int) -> list[TokenIds | InvalidRequest]:
    """The sequences of a range of inputs; of a partial request what is wrong with one stands in its place."""
    inputs, truncation, tokenizer = request.inputs, request.truncation, model.tokenizer

    def encode(first: int, last: int) -> list[TokenIds]:
        if inputs.texts:
            texts = inputs.texts[first:last]
            if request.prompt:
                texts = [request.prompt + text for text in texts]
            return tokenizer.encode(texts, truncation, lambda offset: inputs.name(first + offset))
        return [
            tokenizer.check_ids(inputs.token_ids[index], truncation, inputs.name(index)) for index in range(first, last)
        ]

    try:
        return [*encode(start, stop)]
    except InvalidRequest:
        if not request.partial:
            raise
    encoded: list[TokenIds | InvalidRequest] = []
    for index in range(start, stop):
        try:
            encoded += encode(index, index + 1)
        except InvalidRequest as error:
            encoded.append(error.with_traceback(None))  # whose frames hold this list, and so all that is asked
    return encoded


def _always(name: str) -> NameOf:
    return lambda _: name


def _num_tokens(encoded: TokenIds | InvalidRequest) -> int:
    return 0 if isinstance(encoded, InvalidRequest) else len(encoded)


def _each_token(num_tokens: int) -> Spans:
    """A span of each token: int32 [tokens, 2]."""
    starts = np.arange(num_tokens, dtype=np.int32)
    return np.stack((starts, starts + 1), axis=1)


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


def _deliver(request: _ShortRequest, outcome: list[TokenIds] | BaseException) -> None:
    if request.future.done():
        return
    if isinstance(outcome, BaseException):
        request.future.set_exception(outcome)
    else:
        request.future.set_result(outcome)


def _encode_alone(request: _ShortRequest) -> list[TokenIds] | BaseException:
    try:
        return request.model.tokenizer.encode(request.texts, request.truncation, request.name_of)
    except BaseException as error:  # noqa: BLE001  # handed to the one that waits
        return error


def _check_num_tokens(
    num_inputs: int, num_tokens: int, max_tokens: int, name: str = "input", noun: str = "inputs"
) -> None:
    if num_tokens > max_tokens:
        raise InvalidRequest(
            f"{name} has more than {max_tokens} tokens in all, {num_tokens} of them in its first {num_inputs} "
            f"{noun}. Send several requests.",
            param=name,
            code="too_many_tokens",
        )


def _same_tokenizer(before: ModelFacts, after: ModelFacts) -> bool:
    return _tokenized_by(before) == _tokenized_by(after)


def _tokenized_by(facts: ModelFacts) -> tuple[object, ...]:
    """All of a model's facts that its tokens depend on."""
    return (
        facts.tokenizer_sha256,
        facts.max_tokens,
        facts.vocab_size,
        facts.lower_case,
        facts.pair_template,
        facts.instruction,
        facts.separator_id,
        facts.has_token_types,
    )


def _parts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of inputs of these sizes, each of at least one input and at most a part's worth."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (index - start >= _PART_INPUTS or total + size > _PART_SIZE):
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)
