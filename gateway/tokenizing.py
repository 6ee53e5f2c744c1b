"""Tokenization: from a request's texts and token ids to checked sequences. All but queries are tokenized on threads.

At thousands of short texts a second, handing the interpreter's lock to a thread and back costs more than the work: 405
µs of CPU for each request on two idle cores, against 190 µs on one core (2026-11-29). So a query, which takes about 50
µs, is tokenized on the event loop. Longer requests that are still short are tokenized together (`short_texts.py`).
Rejected: the event loop for everything, which one text of 8,192 characters would stop for milliseconds.

A long list is tokenized in parts. Each part is queued behind the work that came in the meantime. So a request of 2,048
texts, or a query with 1,000 documents, delays a short request by one part only. The number of requests that the
gateway holds bounds the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np

from common.errors import InvalidRequest, ServiceError
from common.text.chunks import Chunks, ChunkTokenizer
from common.text.pairs import EncodeDocuments, Pair, PairNames, PairTokenizer, pair_tokenizer
from common.text.tokenization import NameOf, TokenIds, Tokenizer
from common.wire.messages import ModelFacts, Spans, max_rows
from gateway.model_requests import (
    ContextualRequest,
    EmbeddingRequest,
    Inputs,
    LabelsRequest,
    LocalRequest,
    PairsRequest,
)
from gateway.short_texts import ShortTexts
from gateway.threads import PART_INPUTS, PART_SIZE, QUERY_ON_LOOP, Threads

# A request up to this size is tokenized together with other requests.
_SHORT_INPUTS = 4
_SHORT_CHARS = 4096

T = TypeVar("T")

# Makes the sequences of a half-open range of inputs.
_TokenizeRange = Callable[[int, int], list[TokenIds]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's facts and its tokenizers, which belong together: a request keeps the one that it began with."""

    facts: ModelFacts
    tokenizer: Tokenizer
    pairs: PairTokenizer | None = None  # None: the model takes no pairs
    chunks: ChunkTokenizer | None = None  # None: the model takes no documents in chunks

    @classmethod
    def load(cls, facts: ModelFacts) -> Model:
        """The model of `facts`. Reads files.

        Raises:
            OSError, ValueError, InternalError: tokenizer.json cannot be read, or does not fit the facts.
        """
        tokenizer = Tokenizer(facts)
        return cls(
            facts,
            tokenizer,
            pair_tokenizer(facts, tokenizer) if facts.pair_template else None,
            ChunkTokenizer(facts, tokenizer) if facts.separator_id is not None else None,
        )

    def with_facts(self, facts: ModelFacts) -> Model | None:
        """The same model with new facts; None if they need another tokenizer."""
        return replace(self, facts=facts) if _tokenized_by(self.facts) == _tokenized_by(facts) else None


@dataclass(slots=True)
class TokenizedInputs:
    """The inputs of a request as sequences, and the errors of the inputs that a partial request leaves out."""

    sequences: list[TokenIds]
    places: Sequence[int]  # of each sequence, in the client's list
    failures: dict[int, ServiceError]  # by place
    spans: list[Spans] | None = None  # for each sequence, those that are pooled; None: all of its tokens

    @classmethod
    def of(cls, found: list[TokenIds | InvalidRequest], inputs: Inputs) -> TokenizedInputs:
        """What was found for each input. Raises InvalidRequest if all of it are errors."""
        errors = {index: error for index, error in enumerate(found) if isinstance(error, InvalidRequest)}
        of_all = cls(found, inputs.places, dict(inputs.failures))  # type: ignore[arg-type]  # errors are dropped next
        of_all.drop(errors)
        return of_all

    def drop(self, errors: Mapping[int, ServiceError]) -> None:
        """Leave out the sequences at these indices. Raises the first error if no sequence would be left."""
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
        """Leave the first `start` tokens of each sequence out of its row.

        Raises:
            InvalidRequest: an input has no other token; for a partial request, no input has one.
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
class TokenizedPairs:
    """Pairs as sequences without repetition, so that equal pairs get equal scores, whatever runs beside them."""

    sequences: list[TokenIds] = field(default_factory=list)
    type_starts: list[int] = field(default_factory=list)  # for each sequence, where its tokens of type 1 begin
    first_pairs: list[int] = field(default_factory=list)  # for each sequence, the index of the first pair that it is
    places: list[int] = field(default_factory=list)  # for each pair, the index of its sequence
    _known: dict[tuple[bytes, int], int] = field(default_factory=dict)  # that index, by token ids and type start

    def add(self, pair: Pair) -> None:
        place = self._known.setdefault((pair.ids.tobytes(), pair.type_start), len(self.sequences))
        if place == len(self.sequences):
            self.sequences.append(pair.ids)
            self.type_starts.append(pair.type_start)
            self.first_pairs.append(len(self.places))
        self.places.append(place)


class RequestTokenizer:
    """Makes checked sequences of requests: one method for each kind. No request may have more than `max_tokens`."""

    def __init__(self, threads: Threads, *, max_tokens: int) -> None:
        self._threads = threads
        self._max_tokens = max_tokens
        self._short = ShortTexts(threads)

    def tokenize_query(self, model: Model, request: EmbeddingRequest) -> TokenizedInputs | None:
        """What `tokenize_inputs` returns, made on the event loop; None if the request is not a short query.

        Raises:
            InvalidRequest: as in `tokenize_inputs`.
            InternalError: the tokenizer failed.
        """
        texts, prompt = request.inputs.texts, request.prompt
        if len(texts) != 1 or len(prompt) + len(texts[0]) > QUERY_ON_LOOP or request.partial:
            return None
        if prompt and not (model.facts.include_prompt or request.by_token):
            return None
        sequences = model.tokenizer.encode([prompt + texts[0]], request.truncation, request.inputs.name)
        _check_num_tokens(1, len(sequences[0]), self._max_tokens_of(model, request), request.inputs.list_name)
        spans = [_each_token(len(sequences[0]))] if request.by_token else None
        return TokenizedInputs(sequences, request.inputs.places, {}, spans)

    async def tokenize_inputs(self, model: Model, request: EmbeddingRequest) -> TokenizedInputs:
        """A sequence for each input. The prompt goes before a text; token ids are used as they are.

        Raises:
            InvalidRequest: an input is too long, has no token or a wrong token id, or all together have too many
                tokens. A partial request fails for an input only if every input fails.
            InternalError: the tokenizer failed.
        """
        read = self._tokenize_texts if request.inputs.texts else self._check_token_ids
        tokenized = TokenizedInputs.of(await read(model, request), request.inputs)
        if request.by_token:
            tokenized.spans = [_each_token(len(sequence)) for sequence in tokenized.sequences]
        elif request.prompt and not model.facts.include_prompt:
            start = await self._threads.run(partial(model.tokenizer.prompt_length, request.prompt))
            tokenized.leave_out(start, request)
        return tokenized

    async def tokenize_documents(self, model: Model, request: ContextualRequest) -> list[Chunks]:
        """A sequence for each document, which is a list of chunks.

        Raises:
            InvalidRequest: a document is too long, a chunk has no token, or all together have too many tokens.
            InternalError: the tokenizer failed.
        """
        tokenizer, documents = model.chunks, request.documents
        assert tokenizer is not None, "no other model passes the dialect's parser"

        def tokenize_range(start: int, stop: int) -> list[Chunks]:
            return [tokenizer.encode(documents[index], f"input[{index}]") for index in range(start, stop)]

        sizes = [sum(map(len, chunks)) for chunks in documents]
        max_tokens = min(self._max_tokens, request.max_tokens)
        return await self._in_parts(
            tokenize_range, sizes, lambda document: len(document.ids), max_tokens, noun="documents"
        )

    async def tokenize_pairs(self, model: Model, request: PairsRequest) -> TokenizedPairs:
        """A pair for each document: with its own query, or with the only query.

        Raises:
            InvalidRequest: a pair is too long, or all together have too many tokens; see PairTokenizer.
            InternalError: the tokenizer failed.
        """
        tokenizer = model.pairs
        assert tokenizer is not None, "a model that scores takes pairs"
        queries, documents, names = request.queries, request.documents, request.names
        for_query = partial(
            tokenizer.for_query,
            truncation=request.truncation,
            instruction=request.instruction,
            max_document_tokens=request.max_document_tokens,
        )

        @cache  # called on a thread, with the first part
        def read_query() -> EncodeDocuments:
            return for_query(queries[0], names=names)

        def tokenize_range(start: int, stop: int) -> list[Pair]:
            if len(queries) == 1:
                of_part = replace(names, first_index=None if names.first_index is None else names.first_index + start)
                return read_query()(documents[start:stop], of_part)
            pairs: list[Pair] = []
            for index in range(start, stop):
                of_pair = PairNames(f"{names.query}[{index}]", names.documents, index)
                pairs += for_query(queries[index], names=of_pair)([documents[index]], of_pair)
            return pairs

        sizes = list(map(len, documents))
        if len(queries) > 1:
            sizes = [size + len(query) for size, query in zip(sizes, queries, strict=True)]
        elif tokenizer.rereads_query:
            sizes = [size + len(queries[0]) for size in sizes]
        if tokenizer.rereads_query and request.instruction is not None:
            sizes = [size + len(request.instruction) for size in sizes]
        return await self._pairs_in_parts(tokenize_range, sizes, name=names.documents, noun="pairs")

    async def tokenize_labelled(self, model: Model, request: LabelsRequest) -> TokenizedPairs:
        """A sequence for each text, and for each pair of texts.

        Raises:
            InvalidRequest: an input is too long or has no token, or all together have too many tokens.
            InternalError: the tokenizer failed.
        """
        tokenizer, of_pairs = model.tokenizer, model.pairs
        assert of_pairs is not None, "a model that scores takes pairs"

        def tokenize_range(start: int, stop: int) -> list[Pair]:
            pairs: list[Pair] = []
            for index in range(start, stop):
                name, texts = request.name_of(index), request.inputs[index]
                if len(texts) == 1:
                    [ids] = tokenizer.encode([*texts], request.truncation, _always(name))
                    pairs.append(Pair(ids, len(ids)))
                else:
                    names = PairNames(f"{name}[0]", f"{name}[1]", first_index=None)
                    pairs += of_pairs.encode(texts[0], [texts[1]], request.truncation, names=names)
            return pairs

        sizes = [sum(map(len, texts)) for texts in request.inputs]
        return await self._pairs_in_parts(tokenize_range, sizes, name="inputs")

    async def answer_locally(self, model: Model, request: LocalRequest) -> list[bytes]:
        """What the tokenizer answers for each input, as JSON.

        Raises:
            InvalidRequest: an input is refused, or all together are too large.
            InternalError: the tokenizer failed.
        """
        size, max_size = sum(request.sizes), self._max_tokens
        if size > max_size:
            raise InvalidRequest(
                f"{request.name} has {size} {request.unit} in all; at most {max_size} fit into one request. "
                "Send several requests.",
                param=request.name,
                code="too_many_tokens",
            )

        def answer_range(start: int, stop: int) -> list[bytes]:
            return [request.answer(model.tokenizer, index) for index in range(start, stop)]

        return await self._in_parts(answer_range, request.sizes, lambda _: 0, max_size)

    # --- its steps ---

    def _max_tokens_of(self, model: Model, request: EmbeddingRequest) -> int:
        # A row for each token: no more rows than one message holds, since the answer would have gigabytes.
        return min(self._max_tokens, max_rows(model.facts)) if request.by_token else self._max_tokens

    async def _tokenize_texts(self, model: Model, request: EmbeddingRequest) -> list[TokenIds | InvalidRequest]:
        inputs, prompt, truncation = request.inputs, request.prompt, request.truncation
        max_tokens = self._max_tokens_of(model, request)
        if _is_short(request):
            texts = [prompt + text for text in inputs.texts] if prompt else inputs.texts
            sequences = await self._short.tokenize(model.tokenizer, truncation, texts, inputs.name)
            _check_num_tokens(len(sequences), sum(map(len, sequences)), max_tokens, inputs.list_name)
            return [*sequences]

        def tokenize_range(start: int, stop: int) -> list[TokenIds]:
            texts = inputs.texts[start:stop]
            if prompt:
                texts = [prompt + text for text in texts]
            return model.tokenizer.encode(texts, truncation, lambda offset: inputs.name(start + offset))

        sizes = [len(prompt) + len(text) for text in inputs.texts]
        return await self._inputs_in_parts(tokenize_range, sizes, request, max_tokens)

    async def _check_token_ids(self, model: Model, request: EmbeddingRequest) -> list[TokenIds | InvalidRequest]:
        inputs, truncation = request.inputs, request.truncation
        max_tokens = self._max_tokens_of(model, request)
        sizes = list(map(len, inputs.token_ids))
        if not truncation.allowed:
            # Before the ids are looked at one by one: a body may hold millions.
            _check_num_tokens(len(inputs), sum(sizes), max_tokens, inputs.list_name)

        def check_range(start: int, stop: int) -> list[TokenIds]:
            return [
                model.tokenizer.check_ids(inputs.token_ids[index], truncation, inputs.name(index))
                for index in range(start, stop)
            ]

        return await self._inputs_in_parts(check_range, sizes, request, max_tokens)

    async def _inputs_in_parts(
        self, tokenize_range: _TokenizeRange, sizes: list[int], request: EmbeddingRequest, max_tokens: int
    ) -> list[TokenIds | InvalidRequest]:
        make_range: Callable[[int, int], Sequence[TokenIds | InvalidRequest]] = tokenize_range
        if request.partial:
            make_range = partial(_each_or_its_error, tokenize_range)
        return await self._in_parts(make_range, sizes, _num_tokens, max_tokens, name=request.inputs.list_name)

    async def _pairs_in_parts(
        self, tokenize_range: Callable[[int, int], list[Pair]], sizes: list[int], *, name: str, noun: str = "inputs"
    ) -> TokenizedPairs:
        tokenized = TokenizedPairs()

        def add_range(start: int, stop: int) -> list[Pair]:
            pairs = tokenize_range(start, stop)
            for pair in pairs:  # on a thread, since a million token ids take milliseconds
                tokenized.add(pair)
            return pairs

        await self._in_parts(add_range, sizes, lambda pair: len(pair.ids), self._max_tokens, name=name, noun=noun)
        return tokenized

    async def _in_parts(
        self,
        make_range: Callable[[int, int], Sequence[T]],
        sizes: list[int],
        num_tokens_of: Callable[[T], int],
        max_tokens: int,
        *,
        name: str = "input",
        noun: str = "inputs",
    ) -> list[T]:
        """What `make_range` makes of half-open ranges of inputs, one range after the other.

        `sizes` are those of the inputs. An error calls the list `name` and its elements `noun`.
        """
        made: list[T] = []
        num_tokens = 0
        for start, stop in _parts(sizes):
            part = await self._threads.run(partial(make_range, start, stop))
            made += part
            num_tokens += sum(map(num_tokens_of, part))
            _check_num_tokens(len(made), num_tokens, max_tokens, name, noun)
        return made


def _is_short(request: EmbeddingRequest) -> bool:
    texts = request.inputs.texts
    return (
        len(texts) <= _SHORT_INPUTS
        and not request.partial
        and sum(map(len, texts)) + len(request.prompt) * len(texts) <= _SHORT_CHARS
    )


def _each_or_its_error(tokenize_range: _TokenizeRange, start: int, stop: int) -> list[TokenIds | InvalidRequest]:
    """The sequences of a range of inputs, with its error in the place of an input that fails."""
    try:
        return [*tokenize_range(start, stop)]
    except InvalidRequest:
        pass  # one or more inputs failed: tokenize each by itself
    found: list[TokenIds | InvalidRequest] = []
    for index in range(start, stop):
        try:
            found += tokenize_range(index, index + 1)
        except InvalidRequest as error:
            found.append(error.with_traceback(None))  # its frames hold this list, and so the whole request
    return found


def _always(name: str) -> NameOf:
    return lambda _: name


def _num_tokens(found: TokenIds | InvalidRequest) -> int:
    return 0 if isinstance(found, InvalidRequest) else len(found)


def _each_token(num_tokens: int) -> Spans:
    """A span for each token: int32 [tokens, 2]."""
    starts = np.arange(num_tokens, dtype=np.int32)
    return np.stack((starts, starts + 1), axis=1)


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


def _tokenized_by(facts: ModelFacts) -> tuple[object, ...]:
    """The facts that a model's tokens depend on."""
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
    """Half-open ranges of inputs of these sizes: each at least one input and, beyond that, at most one part."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (index - start >= PART_INPUTS or total + size > PART_SIZE):
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)
