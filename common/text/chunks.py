"""A document in chunks to one sequence with a span for each chunk: late chunking.

The chunks stand behind each other, the model's separator token between them, so that each is read in the light of all;
a chunk's vector is pooled over its own tokens alone. So does pplx-embed-context-v1, which joins the chunks' text with
the separator's and tokenizes the whole: a span lies between separators and holds none. Here each chunk is tokenized on
its own, so that text which spells the separator is text, and no client can move the spans; where that would give other
tokens than the joined text does, the model is refused at start.

A document is never cut: a chunk beyond the limit would have no vector, and one that is cut in two has the vector of
another text. Special tokens that a tokenizer puts around a text stand around the document and are in no span.
(pplx-embed-context-v1's puts none there, so that its own code does not say.) Differing from it, a chunk without any
token is refused: its own code gives a vector of zeros.

Source: the `encode` of perplexity-ai/pplx-embed-context-v1-0.6b, checked with the token ids that it gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import InvalidRequest
from common.text.tokenization import (
    MAX_CHARS_PER_TOKEN,
    TextReader,
    TokenIds,
    Tokenizer,
    context_length_exceeded,
    input_too_long,
)
from common.wire.messages import ModelFacts, Spans

# Where a text's beginning or its end is treated in a way of its own, one of these joined with itself shows it.
_PROBES = ("a b", " a ", "\na\n", "A.")


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A document as one sequence."""

    ids: TokenIds  # [tokens], separators and special tokens included
    spans: Spans  # [chunks, 2] where each chunk's tokens start and stop


class ChunkTokenizer:
    """Encodes documents in chunks for one model. Thread-safe: nothing in it changes after construction.

    Raises:
        OSError, ValueError: the separator is no token that stands between texts, or tokenizer.json cannot be read.
    """

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer) -> None:
        if facts.separator_id is None:
            raise ValueError("the model has no separator: it does not embed documents in chunks")
        separator = next(
            (text for text, token in tokenizer.reader.added_tokens.items() if token == facts.separator_id), None
        )
        if separator is None:
            raise ValueError(f"tokenizer.json: the separator {facts.separator_id} is none of its added tokens")
        self._reader = TextReader(facts, reserved=separator)
        self._max_tokens = facts.max_tokens
        self._before, self._after = self._reader.frame(1).parts
        self._separator = np.array([facts.separator_id], dtype=np.int32)
        self._reader.check_own_tokens(self._separator)
        if facts.separator_id in self._reader.ids(separator):
            raise ValueError(f"tokenizer.json: text that spells {separator} cannot be told from that token")
        for probe in _PROBES:
            chunk = self._reader.ids(probe)
            joined = tokenizer.reader.ids(f"{probe}{separator}{probe}")
            if joined.tolist() != [*chunk, facts.separator_id, *chunk]:
                raise ValueError(f"tokenizer.json: around {separator} it does not read texts as it reads them alone")

    def encode(self, chunks: list[str], name: str) -> Chunks:
        """A document's sequence; `name` is how errors name the document, and its chunks by their place in it.

        Raises:
            InvalidRequest: empty_input or invalid_token_id, naming the chunk; context_length_exceeded or
                input_too_long, naming the document.
            InternalError: the tokenizer itself failed.
        """
        num_chars, limit_chars = sum(map(len, chunks)), MAX_CHARS_PER_TOKEN * self._max_tokens
        if num_chars > limit_chars:
            raise input_too_long(name, num_chars, limit_chars, can_cut=False)
        parts, spans, stop = [], np.zeros((len(chunks), 2), dtype=np.int32), 0
        for index, encoding in enumerate(self._reader.encode(chunks, special_tokens=False)):
            place = f"{name}[{index}]"
            if not encoding.ids:
                raise InvalidRequest(
                    f"{place} holds nothing that this model's tokenizer makes a token of.",
                    param=place,
                    code="empty_input",
                )
            self._reader.check_vocabulary(encoding.ids, place)
            before = self._before if index == 0 else self._separator
            parts += [before, np.array(encoding.ids, dtype=np.int32)]
            start = stop + len(before)
            stop = start + len(encoding.ids)
            spans[index] = start, stop
        ids = np.concatenate([*parts, self._after])
        if len(ids) > self._max_tokens:
            raise context_length_exceeded(name, len(ids), self._max_tokens, included="separators", can_cut=False)
        return Chunks(ids, spans)
