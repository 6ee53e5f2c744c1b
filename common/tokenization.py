"""Text to token ids, exactly as the checkpoint's own tokenizer.json and prompts say.

Used by the gateway and by anything that embeds without one. Three rules that the `tokenizers` library does not keep
by itself:

- The file's own truncation and padding are switched off. (all-MiniLM-L6-v2's file pads every text to 128 tokens and
  cuts at 128, where its model takes 256.) Truncation happens here, a call at a time: the library keeps it as state of
  the shared object, and silently ignores a limit below the number of special tokens.
- Only as much of an over-long text is tokenized as can matter (see `_relevant_part`).
- Its panics are BaseExceptions: they are caught here and raised as our own bug, for one request alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as _RustTokenizer
from tokenizers.normalizers import Lowercase, Sequence

from common.errors import InternalError, InvalidRequest
from common.protocol import ModelFacts

Direction = Literal["left", "right"]
TokenIds = npt.NDArray[np.int32]

# No tokenizer in use makes one token of more than about 20 characters of real text. Beyond this many characters a token
# of the limit, a text is over-long whatever it says, and is refused unread.
MAX_CHARS_PER_TOKEN = 32

# How much of an over-long text is looked at first, and by how much more when that was too little.
_FIRST_CHARS_PER_TOKEN = 8
_GROWTH = 4

# A part must hold so many tokens more than are kept: those beside its cut may differ from the whole text's.
_MARGIN_TOKENS = 128  # a word of more than 100 characters is one [UNK] in WordPiece; cut in two, up to 100 tokens


@dataclass(frozen=True, slots=True)
class TruncationRule:
    """What happens to a text that is longer than the model takes."""

    allowed: bool
    direction: Direction = "right"  # which end is cut off


class Tokenizer:
    """Encodes text for one model. Thread-safe: nothing in it changes after construction.

    Raises:
        OSError, ValueError: `path` cannot be read, or is not what `facts` were told of.
    """

    def __init__(self, facts: ModelFacts) -> None:
        path = Path(facts.folder) / "tokenizer.json"
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != facts.tokenizer_sha256:
            raise ValueError("tokenizer.json is not the file that the worker read: restart the workers")
        self._tokenizer = load_tokenizer(content)
        if facts.lower_case:
            # Before the file's own normalizer, as sentence-transformers does; a special token in a text stays one.
            own = self._tokenizer.normalizer
            self._tokenizer.normalizer = Sequence([Lowercase(), own]) if own is not None else Lowercase()
        self._num_special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._max_tokens = facts.max_tokens
        self._vocab_size = facts.vocab_size
        if self._num_special >= self._max_tokens:
            raise ValueError(f"the model takes {self._max_tokens} tokens; special tokens alone fill that")

    def encode(self, texts: list[str], truncation: TruncationRule, *, first_index: int | None = 0) -> list[TokenIds]:
        """Token ids of each text, special tokens included, each at least one and at most the model's maximum.

        `first_index` is where `texts` begin in the client's list, for the error's text; None for a lone text.

        Raises:
            InvalidRequest: empty_input, context_length_exceeded or input_too_long, naming the text.
            InternalError: the tokenizer itself failed.
        """
        limit_chars = (_FIRST_CHARS_PER_TOKEN if truncation.allowed else MAX_CHARS_PER_TOKEN) * self._max_tokens
        whole = [text if len(text) <= limit_chars else None for text in texts]
        if not truncation.allowed and None in whole:
            offset = whole.index(None)
            raise _input_too_long(_input_name(first_index, offset), len(texts[offset]), limit_chars)
        encodings = iter(self._encode_batch([text for text in whole if text is not None]))
        rows: list[TokenIds] = []
        for offset, text in enumerate(texts):
            if whole[offset] is None:
                ids = self._encode_over_long(text, truncation.direction)
            else:
                ids = next(encodings).ids
                if len(ids) > self._max_tokens:
                    if not truncation.allowed:
                        raise _context_length_exceeded(_input_name(first_index, offset), len(ids), self._max_tokens)
                    ids = self._encode_over_long(text, truncation.direction)
            if not ids:
                name = _input_name(first_index, offset)
                raise InvalidRequest(
                    f"{name} holds nothing that this model's tokenizer makes a token of.",
                    param=name,
                    code="empty_input",
                )
            assert len(ids) <= self._max_tokens, "truncation left too many tokens: this is a bug"
            rows.append(np.array(ids, dtype=np.int32))
        return rows

    def check_ids(self, ids: list[object], truncation: TruncationRule, index: int | None) -> TokenIds:
        """Token ids that a client sent, as they are: nothing is added, nothing decoded.

        `index` is the sequence's place in the client's list, None for a lone one.

        Raises:
            InvalidRequest: empty_input, invalid_type, invalid_token_id or context_length_exceeded, naming the place.
        """
        name = _input_name(index, 0)
        if not ids:
            raise InvalidRequest(f"{name} is an empty list of token ids.", param=name, code="empty_input")
        if len(ids) > self._max_tokens:
            if not truncation.allowed:
                raise _context_length_exceeded(name, len(ids), self._max_tokens)
            kept = self._max_tokens
            ids = ids[:kept] if truncation.direction == "right" else ids[-kept:]
        if not self._all_in_vocabulary(ids):
            raise self._first_bad_id(ids, name)
        return np.array(ids, dtype=np.int32)

    def _all_in_vocabulary(self, ids: list[object]) -> bool:
        # Without a Python loop: a request may bring a million ids. The exact type, since True is an int elsewhere.
        if set(map(type, ids)) != {int}:
            return False
        numbers: list[int] = ids  # type: ignore[assignment]  # checked above, in a way that mypy cannot follow
        return min(numbers) >= 0 and max(numbers) < self._vocab_size

    def _first_bad_id(self, ids: list[object], name: str) -> InvalidRequest:
        for position, token in enumerate(ids):
            place = f"{name}[{position}]"
            if not isinstance(token, int | float):
                return InvalidRequest(
                    f"{place} is not a number: a list of token ids holds nothing else.",
                    param=place,
                    code="invalid_type",
                )
            if type(token) is not int or not 0 <= token < self._vocab_size:
                return InvalidRequest(
                    f"{place} is not a token id of this model: use whole numbers from 0 to {self._vocab_size - 1}.",
                    param=place,
                    code="invalid_token_id",
                )
        raise AssertionError("called for a list that is all right: this is a bug")

    def _encode_over_long(self, text: str, direction: Direction) -> list[int]:
        """The ids of a text that may not fit: its content cut, the special tokens kept."""
        room = self._max_tokens - self._num_special
        encoding = self._encode_relevant_part(text, direction, room)
        encoding.truncate(room, direction=direction)
        ids: list[int] = self._tokenizer.post_process(encoding).ids
        return ids

    def _encode_relevant_part(self, text: str, direction: Direction, room: int) -> Encoding:
        """An encoding whose first (or last) `room` tokens are those of the whole text.

        The part is cut at white space, where every pre-tokenizer in use splits, so that its words are the text's
        words; more of the text is taken while the part holds too few tokens. A long run without white space is cut
        anywhere: what that changes lies beside the cut, in the margin.
        """
        num_chars = _FIRST_CHARS_PER_TOKEN * self._max_tokens
        while True:
            part = _relevant_part(text, direction, num_chars)
            encoding = self._encode_batch([part], special_tokens=False)[0]
            if len(encoding.ids) >= room + _MARGIN_TOKENS or len(part) == len(text):
                return encoding
            num_chars *= _GROWTH

    def _encode_batch(self, texts: list[str], *, special_tokens: bool = True) -> list[Encoding]:
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            # A Rust panic is no Exception; uncaught it would end the connection without an answer.
            raise InternalError("The tokenizer failed on this input.") from error


def load_tokenizer(content: bytes) -> _RustTokenizer:
    """A tokenizer.json's tokenizer, its own truncation and padding off."""
    tokenizer = _RustTokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _relevant_part(text: str, direction: Direction, num_chars: int) -> str:
    if num_chars >= len(text):
        return text
    if direction == "right":
        cut, farthest = num_chars, min(2 * num_chars, len(text))
        while cut < farthest and not text[cut].isspace():
            cut += 1
        return text[:cut]
    # With the white space before its first word: byte-level tokenizers spell " word" and "word" differently.
    cut, farthest = len(text) - num_chars, max(len(text) - 2 * num_chars, 0)
    while cut > farthest and not text[cut].isspace():
        cut -= 1
    return text[cut:]


def _input_name(first_index: int | None, offset: int) -> str:
    """How errors name an input: its place in the client's list; a lone one has none."""
    return "input" if first_index is None else f"input[{first_index + offset}]"


def _context_length_exceeded(name: str, num_tokens: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {num_tokens} tokens; this model takes at most {limit}. Shorten it, or send truncate: true.",
        param=name,
        code="context_length_exceeded",
    )


def _input_too_long(name: str, num_chars: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {num_chars} characters; at most {limit} are read. Shorten it, or send truncate: true.",
        param=name,
        code="input_too_long",
    )
