"""A query and its documents to the sequences that a reranker reads.

Two kinds of model. A cross-encoder was trained on pairs as its own tokenizer writes them (`pair`): the special tokens
and token types are the post-processor's, text that spells a special token is that token, and what is too long is cut
from the longer of the two texts, all as transformers does it. A generative reranker was trained on a prompt that
tokenizer.json says nothing of: its template is built in here, token for token as its authors' own code writes it. In a
template all that a client sends is text, so that no document can end its own turn and answer for the model; query,
instruction and template are never cut, documents are from their end.

Rejected for templates: the chat template of a checkpoint (a program, and not what the authors' code runs); joining
texts first and tokenizing after (the client's text would be read as the template's). Rejected for `pair`: the library's
own truncation, which is state of the shared object, and needs the whole of an over-long text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from common.errors import InvalidRequest
from common.text.tokenization import (
    MAX_CHARS_PER_TOKEN,
    Content,
    TextReader,
    TokenIds,
    Tokenizer,
    TruncationRule,
    context_length_exceeded,
    input_too_long,
)
from common.wire.messages import OWN_PAIRS, ModelFacts


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A query and one document as one sequence."""

    ids: TokenIds  # [tokens], special tokens and template included
    type_start: int  # tokens from here on are of type 1; the length where there are none


@dataclass(frozen=True, slots=True)
class PairNames:
    """How errors name the texts: the fields that the client sent them in."""

    query: str = "query"
    documents: str = "documents"
    first_index: int | None = 0  # where the documents begin in the client's list; None for a lone one

    def document(self, offset: int) -> str:
        return self.documents if self.first_index is None else f"{self.documents}[{self.first_index + offset}]"


_RERANK = PairNames()


EncodeDocuments = Callable[[list[str], PairNames], list[Pair]]


class PairTokenizer(Protocol):
    """Encodes pairs for one model. Thread-safe: nothing in it changes after construction."""

    @property
    def rereads_query(self) -> bool:
        """Whether query and instruction are tokenized again with every document, and not once for all of them."""
        ...

    def for_query(
        self,
        query: str,
        truncation: TruncationRule,
        *,
        instruction: str | None = None,
        max_document_tokens: int | None = None,
        names: PairNames = _RERANK,
    ) -> EncodeDocuments:
        """`encode` for documents that come in several lists: the query is read here, once. Raises as it does."""
        ...

    def encode(
        self,
        query: str,
        documents: list[str],
        truncation: TruncationRule,
        *,
        instruction: str | None = None,
        max_document_tokens: int | None = None,
        names: PairNames = _RERANK,
    ) -> list[Pair]:
        """The sequence of the query with each document, at most the model's maximum long.

        `instruction` None is the model's default one; an empty one is an empty one. From each document at most
        `max_document_tokens` are taken, from its beginning, whatever `truncation` says.

        Raises:
            InvalidRequest: context_length_exceeded or input_too_long, naming the query where no document would fit
                beside it, else the document; invalid_token_id, naming the text; unsupported_parameter for what this
                model's pairs do not have.
            InternalError: the tokenizer itself failed.
        """
        encode_documents = self.for_query(
            query, truncation, instruction=instruction, max_document_tokens=max_document_tokens, names=names
        )
        return encode_documents(documents, names)


def pair_tokenizer(facts: ModelFacts, tokenizer: Tokenizer) -> PairTokenizer:
    """What encodes pairs for the model of `facts`, whose texts `tokenizer` encodes.

    Raises:
        OSError, ValueError: there is no such template, or tokenizer.json does not fit it.
    """
    if facts.pair_template not in _TEMPLATES:
        raise ValueError(f"no template for pairs is called {facts.pair_template!r}: use {', '.join(_TEMPLATES)}")
    return _TEMPLATES[facts.pair_template](facts, tokenizer)


class _OwnPairs(PairTokenizer):
    """Pairs as the tokenizer's own post-processor writes them: [CLS] query [SEP] document [SEP] and the like."""

    rereads_query = False

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer) -> None:
        self._reader = tokenizer.reader
        self._max_tokens = facts.max_tokens
        frame = self._reader.frame(2)
        self._parts = frame.parts
        self._num_special = frame.num_tokens
        self._room = facts.max_tokens - frame.num_tokens
        if self._room < 2:
            raise ValueError(f"the model takes {facts.max_tokens} tokens; a pair's special tokens alone fill that")
        # How many tokens of type 0 follow the query's last one; None where no token is of type 1.
        self._type_gap = _type_gap(frame.type_ids) if facts.has_token_types else None

    def for_query(
        self,
        query: str,
        truncation: TruncationRule,
        *,
        instruction: str | None = None,
        max_document_tokens: int | None = None,
        names: PairNames = _RERANK,
    ) -> EncodeDocuments:
        if instruction is not None:
            raise InvalidRequest(
                "This model's pairs have no instruction.", param="instruction", code="unsupported_parameter"
            )
        limit_chars = self._reader.limit_chars(truncation)
        if len(query) > limit_chars and not truncation.allowed:
            raise input_too_long(names.query, len(query), limit_chars)
        [of_query] = self._reader.read([query], truncation, self._room)
        return partial(self._encode_documents, query, of_query, truncation, max_document_tokens)

    def _encode_documents(
        self,
        query: str,
        of_query: Content,
        truncation: TruncationRule,
        max_document_tokens: int | None,
        documents: list[str],
        names: PairNames,
    ) -> list[Pair]:
        _check_characters(documents, self._reader.limit_chars(truncation), truncation, names)
        contents = self._read(documents, truncation, max_document_tokens)
        pairs = []
        for offset, content in enumerate(contents):
            num_query, num_document = len(of_query.ids), len(content.ids)
            if num_query + num_document > self._room:
                if not truncation.allowed:
                    raise self._too_long(num_query, num_document, names, offset)
                query_longer = _is_longer(query, of_query, documents[offset], content)
                num_query, num_document = longest_first(num_query, num_document, self._room, query_longer)
            query_ids = _cut(of_query.ids, num_query, truncation)
            document_ids = _cut(content.ids, num_document, truncation)
            self._reader.check_vocabulary(query_ids, names.query)
            self._reader.check_vocabulary(document_ids, names.document(offset))
            pairs.append(self._pair(query_ids, document_ids))
        return pairs

    def _read(self, documents: list[str], truncation: TruncationRule, at_most: int | None) -> list[Content]:
        if at_most is None:
            return self._reader.read(documents, truncation, self._room)
        # Whatever is cut, these are a document's first tokens; the last ones of them are not those of any shorter part.
        num_tokens = at_most if truncation.direction == "left" else min(at_most, self._room)
        contents = self._reader.read(documents, TruncationRule(truncation.allowed), num_tokens)
        return [Content(content.ids[:at_most], content.whole or len(content.ids) >= at_most) for content in contents]

    def _pair(self, query: TokenIds, document: TokenIds) -> Pair:
        before, between, after = self._parts
        ids = np.concatenate([before, query, between, document, after])
        assert len(ids) <= self._max_tokens, "truncation left too many tokens: this is a bug"
        gap = self._type_gap
        return Pair(ids, len(ids) if gap is None else len(before) + len(query) + gap)

    def _too_long(self, num_query: int, num_document: int, names: PairNames, offset: int) -> InvalidRequest:
        if num_query >= self._room:
            return context_length_exceeded(names.query, num_query + self._num_special, self._max_tokens)
        return _pair_too_long(names, offset, num_query + num_document + self._num_special, self._max_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """What stands around a document in a template; the query and the instruction are in it."""

    beginning: TokenIds
    head: str  # begins the text that is tokenized as one with the document; a space follows it
    end: TokenIds


class _TemplatePairs(PairTokenizer):
    """Pairs in a template that `write` makes of a query and an instruction."""

    rereads_query = True  # not in every template: to count more makes a request's parts smaller, not wrong

    def __init__(
        self,
        facts: ModelFacts,
        reader: TextReader,
        write: Callable[[str, str], _Prompt],
        *,
        instruction: str,
    ) -> None:
        self._reader = reader
        self._max_tokens = facts.max_tokens
        self._instruction = instruction if facts.instruction is None else facts.instruction
        self._write = write
        empty = write("", "")
        reader.check_own_tokens(empty.beginning)
        reader.check_own_tokens(empty.end)

    def for_query(
        self,
        query: str,
        truncation: TruncationRule,
        *,
        instruction: str | None = None,
        max_document_tokens: int | None = None,
        names: PairNames = _RERANK,
    ) -> EncodeDocuments:
        if truncation.allowed and truncation.direction != "right":
            raise InvalidRequest(
                "In this model's template a document is cut at its end only: use right.",
                param="truncation_direction",
                code="unsupported_parameter",
            )
        if instruction is None:
            instruction = self._instruction
        for name, text in ((names.query, query), ("instruction", instruction)):
            if len(text) > MAX_CHARS_PER_TOKEN * self._max_tokens:
                raise input_too_long(name, len(text), MAX_CHARS_PER_TOKEN * self._max_tokens, can_cut=False)
        prompt = self._write(query, instruction)
        num_fixed = len(prompt.beginning) + len(prompt.end)
        room = self._max_tokens - num_fixed
        # Without the space, which in a byte-level vocabulary is a part of the document's first token.
        head_ids = self._reader.ids(prompt.head)
        num_head = len(head_ids)
        if num_head >= room:
            raise context_length_exceeded(
                names.query, num_fixed + num_head, self._max_tokens, included="the template", can_cut=False
            )
        self._check_prompt(np.concatenate([prompt.beginning, head_ids, prompt.end]), instruction, names)
        kept = room if max_document_tokens is None else min(room, num_head + max_document_tokens)
        return partial(self._encode_documents, prompt, kept, truncation)

    def _encode_documents(
        self, prompt: _Prompt, kept: int, truncation: TruncationRule, documents: list[str], names: PairNames
    ) -> list[Pair]:
        num_fixed = len(prompt.beginning) + len(prompt.end)
        room = self._max_tokens - num_fixed
        limit_chars = max(self._reader.limit_chars(truncation) - len(prompt.head) - 1, 0)
        _check_characters(documents, limit_chars, truncation, names)
        bodies = self._reader.read([f"{prompt.head} {document}" for document in documents], truncation, kept)
        pairs = []
        for offset, body in enumerate(bodies):
            if len(body.ids) > room and kept == room and not truncation.allowed:
                raise _pair_too_long(names, offset, num_fixed + len(body.ids), self._max_tokens)
            body_ids = body.ids[:kept]
            self._reader.check_vocabulary(body_ids, names.document(offset))
            ids = np.concatenate([prompt.beginning, body_ids, prompt.end])
            assert len(ids) <= self._max_tokens, "truncation left too many tokens: this is a bug"
            pairs.append(Pair(ids, len(ids)))
        return pairs

    def _check_prompt(self, ids: TokenIds, instruction: str, names: PairNames) -> None:
        try:
            self._reader.check_vocabulary(ids, names.query)
        except InvalidRequest:
            self._reader.check_vocabulary(self._reader.ids(instruction), "instruction")
            raise


def _qwen3_reranker(facts: ModelFacts, tokenizer: Tokenizer) -> PairTokenizer:
    """The prompt of Qwen3-Reranker, which scores by "yes" against "no" as the next token.

    Its body, a single text with instruction, query and document, stands between the ids of a fixed beginning and end.

    Source: the model card of Qwen/Qwen3-Reranker-0.6B, its use with transformers.
    """
    opening = (
        "<|im_start|>system\n"
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    closing = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    reader = TextReader(facts, reserved=opening + closing)
    _check_reserved(("<|im_start|>", "<|im_end|>", "<think>", "</think>"), tokenizer.reader, reader)
    # Should the tokenizer put special tokens around a text, they stand around the body: so it is in the source.
    before, after = reader.frame(1).parts
    beginning = np.concatenate([tokenizer.reader.ids(opening), before])
    end = np.concatenate([after, tokenizer.reader.ids(closing)])

    def write(query: str, instruction: str) -> _Prompt:
        return _Prompt(beginning, f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:", end)

    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    return _TemplatePairs(facts, reader, write, instruction=instruction)


def _bge_reranker_v2_gemma(facts: ModelFacts, tokenizer: Tokenizer) -> PairTokenizer:
    """The prompt of bge-reranker-v2-gemma, which scores by "Yes" as the next token.

    Query, passage and instruction are tokenized each on its own, line breaks between them. The source cuts a query at
    three quarters of a passage's length, and lets its limit out by the instruction; here a query is never cut, and the
    model's maximum holds for the whole. Where nothing is cut the tokens are the same.

    Source: FlagOpen/FlagEmbedding, FlagEmbedding/inference/reranker/decoder_only/base.py, BaseLLMReranker.
    """
    reader = TextReader(facts, reserved="")
    start = tokenizer.reader.frame(1).parts[0]  # <bos>, where the tokenizer has one
    line_break = reader.ids("\n")

    def write(query: str, instruction: str) -> _Prompt:
        beginning = np.concatenate([start, reader.ids(f"A: {query}"), line_break])
        return _Prompt(beginning, "B:", np.concatenate([line_break, reader.ids(instruction)]))

    instruction = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing "
        "a prediction of either 'Yes' or 'No'."
    )
    return _TemplatePairs(facts, reader, write, instruction=instruction)


_TEMPLATES: dict[str, Callable[[ModelFacts, Tokenizer], PairTokenizer]] = {
    OWN_PAIRS: _OwnPairs,
    "qwen3-reranker": _qwen3_reranker,
    "bge-reranker-v2-gemma": _bge_reranker_v2_gemma,
}


def longest_first(num_first: int, num_second: int, room: int, first_longer: bool) -> tuple[int, int]:
    """How many tokens of each of two texts stay when the longer one is cut first, and then both alike.

    `first_longer` decides which text keeps the odd token where both are cut.

    Source: huggingface/tokenizers, src/utils/truncation.rs, TruncationStrategy::LongestFirst.
    """
    if num_first + num_second <= room:
        return num_first, num_second
    shorter = min(num_first, num_second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room // 2 + room % 2
    return (longer, shorter) if first_longer else (shorter, longer)


def _is_longer(first: str, of_first: Content, second: str, of_second: Content) -> bool:
    """Whether the first text has more tokens; where both are read in part, whether it has more characters."""
    if of_first.whole and (of_second.whole or len(of_second.ids) >= len(of_first.ids)):
        return len(of_first.ids) > len(of_second.ids)
    if of_second.whole and len(of_first.ids) > len(of_second.ids):
        return True
    return len(first) > len(second)


def _cut(ids: TokenIds, num_tokens: int, truncation: TruncationRule) -> TokenIds:
    return ids[:num_tokens] if truncation.direction == "right" else ids[len(ids) - num_tokens :]


def _type_gap(type_ids: tuple[TokenIds, ...]) -> int | None:
    """How many tokens between two texts are still of type 0; None where all of a pair's are.

    Raises:
        ValueError: the types do not go from 0 to 1 once, after the first text and not after the second.
    """
    before, first, between, second, after = type_ids
    start = np.concatenate([before, first])
    rest = np.concatenate([between, second, after])
    if not start.any() and not rest.any():
        return None
    gap = int(np.argmax(rest == 1))
    if start.any() or rest[:gap].any() or (rest[gap:] != 1).any() or gap > len(between):
        types = np.concatenate(type_ids).tolist()
        raise ValueError(f"tokenizer.json: it gives a pair the token types {types}; 0 and then 1 is all that is known")
    return gap


def _check_reserved(spellings: tuple[str, ...], own: TextReader, plain: TextReader) -> None:
    """Raise ValueError where a template's token is no token of the vocabulary, or where plain text can be it."""
    for spelling in spellings:
        token = own.added_tokens.get(spelling)
        if token is None:
            raise ValueError(f"tokenizer.json: the template's {spelling} is none of its added tokens")
        if token in plain.ids(spelling):
            raise ValueError(f"tokenizer.json: text that spells {spelling} cannot be told from that token")


def _check_characters(documents: list[str], limit_chars: int, truncation: TruncationRule, names: PairNames) -> None:
    if truncation.allowed:
        return
    for offset, document in enumerate(documents):
        if len(document) > limit_chars:
            raise input_too_long(names.document(offset), len(document), limit_chars)


def _pair_too_long(names: PairNames, offset: int, num_tokens: int, limit: int) -> InvalidRequest:
    return context_length_exceeded(names.document(offset), num_tokens, limit, included=f"those of {names.query}")
