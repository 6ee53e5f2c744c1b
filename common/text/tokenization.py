"""Text to token ids, exactly as the checkpoint's own tokenizer.json and prompts say.

Used by the gateway and by anything that embeds without one. `TextReader` is one tokenizer.json; `Tokenizer` makes of it
what the embedding routes need, `pairs.py` a query with its documents, `chunks.py` a document in chunks.
Four rules that the `tokenizers` library does not keep by itself:

- The file's own truncation and padding are switched off. (all-MiniLM-L6-v2's file pads every text to 128 tokens and
  cuts at 128, where its model takes 256.) Truncation happens here, a call at a time: the library keeps it as state of
  the shared object, and silently ignores a limit below the number of special tokens.
- Only as much of an over-long text is tokenized as can matter, and never more than a fixed number of characters (see
  `_encode_relevant_part`): 16 MiB without white space would take the library 10 s and 2 GiB in one call.
- Its panics are BaseExceptions: they are caught here and raised as our own bug, for one request alone.
- Whether text that spells a special token is that token is settled when a reader is made: the library has a switch
  for it, which is state of the shared object, too.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as _RustTokenizer
from tokenizers.normalizers import Lowercase, Sequence

from common import environment
from common.errors import InternalError, InvalidRequest
from common.wire.messages import ModelFacts

Direction = Literal["left", "right"]
TokenIds = npt.NDArray[np.int32]
NameOf = Callable[[int], str]  # from a text's place in a list to how errors call it

# No tokenizer in use makes one token of more than about 20 characters of real text. Beyond this many characters a token
# of the limit, a text is over-long whatever it says, and is refused unread; of one that may be cut no more is read.
MAX_CHARS_PER_TOKEN = 32

# How much of an over-long text is looked at first, and by how much more when that was too little.
_FIRST_CHARS_PER_TOKEN = 8
_GROWTH = 4

# The first tokens of a text can be asked for beyond the model's limit, to keep the last of them: as far as this many.
_MAX_FIRST_TOKENS = 16_384

# A part must hold so many tokens more than are kept: those beside its cut may differ from the whole text's.
_MARGIN_TOKENS = 128  # a word of more than 100 characters is one [UNK] in WordPiece; cut in two, up to 100 tokens

# Texts that any tokenizer in use makes a token of: with them it shows where it puts special tokens.
_PROBES = ("a", "0", ".")


def bound_tokenizer_threads(num_threads: int) -> None:
    """Have the tokenizers library use so many threads for the texts of a list; before its first call.

    By itself it takes one a core, in each gateway: of eight on 16 cores each list had all cores, and queries waited for
    one (2026-11-30).
    """
    environment.update({"RAYON_NUM_THREADS": str(num_threads)})
    if num_threads == 1:  # else each call would wait until that one is awake
        environment.update({"TOKENIZERS_PARALLELISM": "false"})


def input_name(index: int) -> str:
    """How errors name an input unless a dialect calls its list otherwise."""
    return f"input[{index}]"


@dataclass(frozen=True, slots=True)
class TruncationRule:
    """What happens to a text that is longer than the model takes, or than its client lets it be."""

    allowed: bool
    direction: Direction = "right"  # which end is cut off
    max_tokens: int | None = None  # what the client lets a text have, special tokens and prompt included


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A text's own tokens, without special ones around it."""

    ids: TokenIds  # [tokens]
    whole: bool  # false: they are a part's, since the text is over-long: as far as was asked for, or as is read


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text, for people to look at."""

    id: int
    text: str  # the part of the text that it stands for; of a special token around the text its name
    special: bool  # put around the text
    start: int | None  # of that part in the text, in characters; None of what is no part of it
    stop: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The special tokens that the tokenizer's own post-processor puts around one text, or around a pair of texts."""

    parts: tuple[TokenIds, ...]  # before the first text, after it, ... after the last one
    type_ids: tuple[TokenIds, ...]  # of a part, a text's (one entry), a part, ...: always an odd number

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))


class TextReader:
    """One tokenizer.json, ready to read texts. Thread-safe: nothing in it changes after construction.

    With `reserved` None, text that spells a special token is that token: what the checkpoint's tokenizer makes of it.
    Else it is text, and so is text that spells any added token which occurs in `reserved`: a template's own words.
    Added tokens beside these (Gemma has one for every run of line breaks) are how the model reads plain text.

    Raises:
        OSError, ValueError: the file cannot be read, or is not what `facts` were told of.
    """

    def __init__(self, facts: ModelFacts, *, reserved: str | None = None) -> None:
        content = (Path(facts.folder) / "tokenizer.json").read_bytes()
        if hashlib.sha256(content).hexdigest() != facts.tokenizer_sha256:
            raise ValueError("tokenizer.json is not the file that the worker read: restart the workers")
        self._tokenizer = load_tokenizer(content, reserved=reserved)
        if facts.lower_case:
            # Before the file's own normalizer, as sentence-transformers does; a special token in a text stays one.
            own = self._tokenizer.normalizer
            self._tokenizer.normalizer = Sequence([Lowercase(), own]) if own is not None else Lowercase()
        self._max_tokens = facts.max_tokens
        self._vocab_size = facts.vocab_size
        added = self._tokenizer.get_added_tokens_decoder()
        # EmbeddingGemma's file has a token for images, which its table has no row for. Where a file has no such token,
        # texts are not searched for any. By the number of tokens: to list them all holds the interpreter's lock for
        # 0.2 s; that a file's own ids beside the added ones have no gaps beyond the table, a worker has checked.
        self._exceeds_vocabulary = max(self._tokenizer.get_vocab_size() - 1, *added, -1) >= facts.vocab_size
        self.added_tokens = {token.content: number for number, token in added.items()}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens stand around a single text."""
        number: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        return number

    def encode(self, texts: list[str], *, special_tokens: bool = True) -> list[Encoding]:
        """The library's encoding of each whole text.

        Raises:
            InternalError: the tokenizer itself failed.
        """
        with _failures_as_errors:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)

    def tokens(self, text: str, *, prompt: str = "", special_tokens: bool = True) -> list[Token]:
        """The tokens of `prompt` + `text`, each with its place in `text`; a prompt's own tokens have none.

        Raises:
            InternalError: the tokenizer itself failed.
        """
        whole, skipped = prompt + text, len(prompt)
        with _failures_as_errors:
            # Not `encode_batch_fast`, which knows no places; a batch of one, since `encode` holds the interpreter's
            # lock.
            [encoding] = self._tokenizer.encode_batch([whole], add_special_tokens=special_tokens)
        found = []
        for number, name, (start, stop), special in zip(
            encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            if special:
                found.append(Token(number, name, True, None, None))
            elif stop <= skipped and prompt:
                found.append(Token(number, whole[start:stop], False, None, None))
            else:
                found.append(Token(number, whole[start:stop], False, max(start - skipped, 0), stop - skipped))
        return found

    def decode(self, ids: TokenIds, *, skip_special_tokens: bool) -> str:
        """The text that the tokenizer's own decoder makes of tokens.

        Raises:
            InternalError: the tokenizer itself failed.
        """
        with _failures_as_errors:
            # A batch of one, for the same reason as in `tokens`.
            [text] = self._tokenizer.decode_batch([ids.tolist()], skip_special_tokens=skip_special_tokens)
        return text

    def encode_cut(self, text: str, direction: Direction, num_tokens: int) -> list[int]:
        """The ids of a text cut to its first (or last) `num_tokens` tokens, special tokens around them."""
        encoding, _ = self._encode_relevant_part(text, direction, num_tokens)
        encoding.truncate(num_tokens, direction=direction)
        ids: list[int] = self._tokenizer.post_process(encoding).ids
        return ids

    def read(self, texts: list[str], truncation: TruncationRule, num_tokens: int) -> list[Content]:
        """Each text's own tokens; of an over-long one that may be cut, its first (or last) `num_tokens` and some more.

        Raises:
            InternalError: the tokenizer itself failed.
        """
        limit_chars = self.limit_chars(truncation)
        encodings = iter(self.encode([text for text in texts if len(text) <= limit_chars], special_tokens=False))
        contents: list[Content] = []
        for text in texts:
            if len(text) <= limit_chars:
                encoding, whole = next(encodings), True
            else:
                encoding, whole = self._encode_relevant_part(text, truncation.direction, num_tokens)
            contents.append(Content(np.array(encoding.ids, dtype=np.int32), whole))
        return contents

    def limit_chars(self, truncation: TruncationRule) -> int:
        """From how many characters on a text is over-long: refused unread, or read in part where it may be cut."""
        return (_FIRST_CHARS_PER_TOKEN if truncation.allowed else MAX_CHARS_PER_TOKEN) * self._max_tokens

    def check_vocabulary(self, ids: TokenIds | list[int], name: str) -> None:
        """Pass where the model has a vector for each of these tokens of the text that errors call `name`.

        Raises:
            InvalidRequest: invalid_token_id.
        """
        token = self._beyond_vocabulary(ids)
        if token is not None:
            raise InvalidRequest(
                f"{name} holds the token {self._tokenizer.id_to_token(token)}, which this model has no vector for.",
                param=name,
                code="invalid_token_id",
            )

    def check_own_tokens(self, ids: TokenIds | list[int]) -> None:
        """Raise ValueError where the model has no vector for one of these tokens, which stand around every text."""
        token = self._beyond_vocabulary(ids)
        if token is not None:
            raise ValueError(
                f"tokenizer.json: it puts the token {token} around texts, and the model's vocabulary has "
                f"{self._vocab_size}"
            )

    def _beyond_vocabulary(self, ids: TokenIds | list[int]) -> int | None:
        if not self._exceeds_vocabulary or len(ids) == 0:
            return None
        largest = int(np.max(ids))
        return largest if largest >= self._vocab_size else None

    def ids(self, text: str) -> TokenIds:
        """A whole text's own tokens."""
        return np.array(self.encode([text], special_tokens=False)[0].ids, dtype=np.int32)

    def frame(self, num_texts: Literal[1, 2]) -> Frame:
        """Where special tokens stand around a text or a pair, as a probe shows; they never depend on the text.

        Raises:
            ValueError: the texts do not follow each other, each once, or the tokenizer makes no token of any probe, or
                the model has no vector for a special token.
        """
        encoding = self._probe(num_texts)
        ids, type_ids, origins = encoding.ids, encoding.type_ids, encoding.sequence_ids
        parts, types, stop = [], [], 0
        for text in range(num_texts):
            num_tokens = origins.count(text)
            start = origins.index(text) if num_tokens else 0
            if not num_tokens or start < stop or origins[start : start + num_tokens] != [text] * num_tokens:
                raise ValueError("tokenizer.json: its post-processor does not keep texts whole and in their order")
            parts.append(ids[stop:start])
            types += [type_ids[stop:start], type_ids[start : start + 1]]
            stop = start + num_tokens
        parts.append(ids[stop:])
        self.check_own_tokens([token for part in parts for token in part])
        types.append(type_ids[stop:])
        return Frame(
            tuple(np.array(part, dtype=np.int32) for part in parts),
            tuple(np.array(row, dtype=np.int32) for row in types),
        )

    def _probe(self, num_texts: int) -> Encoding:
        for probe in _PROBES:
            try:
                with _failures_as_errors:
                    # Not `encode_batch_fast`: without a template for pairs in the file it calls both texts type 0.
                    encoding = self._tokenizer.encode(probe, probe if num_texts == 2 else None)
            except InternalError:
                continue  # a vocabulary without this word and without a token for unknown ones
            if 0 in encoding.sequence_ids:
                return encoding
        raise ValueError("tokenizer.json: no token comes of plain letters, digits and dots")

    def _encode_relevant_part(self, text: str, direction: Direction, room: int) -> tuple[Encoding, bool]:
        """An encoding whose first (or last) `room` tokens are those of the whole text, and whether it is all of it.

        The part is cut at white space, where every pre-tokenizer in use splits, so that its words are the text's
        words; more of the text is taken where the part holds too few tokens. A long run without white space is cut
        anywhere: what that changes lies beside the cut, in the margin, but for a run that repeats itself, whose tokens
        may then begin elsewhere.

        No more than `MAX_CHARS_PER_TOKEN` characters a token of the model's limit (or of a larger `room`) are read, or
        up to twice as many on the way to white space. Where these hold fewer tokens than `room` and the margin (a word
        of megabytes, pages of zero-width characters), it is their tokens that are returned: fewer than the whole text
        has, and the last ones possibly others. Blank space at the end that is kept is not counted if it repeats itself.
        """
        num_chars = _FIRST_CHARS_PER_TOKEN * self._max_tokens
        most = MAX_CHARS_PER_TOKEN * max(self._max_tokens, min(room, _MAX_FIRST_TOKENS))
        while True:
            part = _relevant_part(text, direction, num_chars)
            encoding = self.encode([part], special_tokens=False)[0]
            whole = len(part) == len(text)
            if whole or num_chars == most or len(encoding.ids) >= room + _MARGIN_TOKENS:
                return encoding, whole
            if not encoding.ids:
                text = _without_repetitions(text, direction, part)
            num_chars = min(num_chars * _GROWTH, most)


class Tokenizer:
    """Encodes text for one model. Thread-safe: nothing in it changes after construction.

    Raises:
        OSError, ValueError: tokenizer.json cannot be read, or is not what `facts` were told of.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self.reader = TextReader(facts)
        self._max_tokens = facts.max_tokens
        self._vocab_size = facts.vocab_size
        self._num_special = self.reader.num_special_tokens
        if self._num_special >= self._max_tokens:
            raise ValueError(f"the model takes {self._max_tokens} tokens; special tokens alone fill that")
        self.reader.check_own_tokens(self.reader.encode([""])[0].ids)

    def encode(self, texts: list[str], truncation: TruncationRule, name_of: NameOf = input_name) -> list[TokenIds]:
        """Token ids of each text, special tokens included, each at least one and at most the model's maximum.

        `name_of` is how errors call the text at a place in the list.

        Raises:
            InvalidRequest: empty_input, context_length_exceeded, input_too_long or invalid_token_id, naming the text;
                out_of_range where the client's `max_tokens` leaves no room for any.
            InternalError: the tokenizer itself failed.
        """
        max_tokens = self._max_tokens
        if truncation.max_tokens is not None and truncation.max_tokens < max_tokens:
            max_tokens = truncation.max_tokens
        room = max_tokens - self._num_special
        if room < 1:
            raise InvalidRequest(
                f"max_tokens must be more than {self._num_special}: so many are special tokens around a text.",
                param="max_tokens",
                code="out_of_range",
            )
        limit_chars = self.reader.limit_chars(truncation)
        whole = [text if len(text) <= limit_chars else None for text in texts]
        if not truncation.allowed and None in whole:
            offset = whole.index(None)
            raise input_too_long(name_of(offset), len(texts[offset]), limit_chars)
        encodings = iter(self.reader.encode([text for text in whole if text is not None]))
        rows: list[TokenIds] = []
        for offset, text in enumerate(texts):
            if whole[offset] is None:
                ids = self.reader.encode_cut(text, truncation.direction, room)
            else:
                ids = next(encodings).ids
                if len(ids) > max_tokens:
                    if not truncation.allowed:
                        who = "this model takes" if max_tokens == self._max_tokens else "max_tokens allows"
                        raise context_length_exceeded(name_of(offset), len(ids), max_tokens, who=who)
                    ids = self.reader.encode_cut(text, truncation.direction, room)
            if not ids:
                name = name_of(offset)
                raise InvalidRequest(
                    f"{name} holds nothing that this model's tokenizer makes a token of.",
                    param=name,
                    code="empty_input",
                )
            assert len(ids) <= max_tokens, "truncation left too many tokens: this is a bug"
            self.reader.check_vocabulary(ids, name_of(offset))
            rows.append(np.array(ids, dtype=np.int32))
        return rows

    def prompt_length(self, prompt: str) -> int:
        """How many of the first tokens of `prompt` + text are left out where a pooling leaves out the prompt.

        They are counted as sentence-transformers does: the prompt is tokenized alone, and a special token at its end is
        not its own. (A token in which the prompt's end and the text's beginning merge is therefore the prompt's.)

        Source: sentence-transformers, base/modules/transformer.py, Transformer._get_prompt_length.
        """
        if not prompt:
            return 0
        ids = self.reader.encode_cut(prompt, "right", self._max_tokens - self._num_special)
        return len(ids) - (len(ids) > 0 and ids[-1] in self.reader.special_ids)

    def check_ids(self, ids: list[object], truncation: TruncationRule, name: str) -> TokenIds:
        """Token ids that a client sent, as they are: nothing is added, nothing decoded. Errors call them `name`.

        Raises:
            InvalidRequest: empty_input, invalid_type, invalid_token_id or context_length_exceeded, naming the place.
        """
        if len(ids) > self._max_tokens:
            if not truncation.allowed:
                raise context_length_exceeded(name, len(ids), self._max_tokens)
            kept = self._max_tokens
            ids = ids[:kept] if truncation.direction == "right" else ids[-kept:]
        return self.check_tokens(ids, name)

    def check_tokens(self, ids: list[object], name: str) -> TokenIds:
        """Any number of token ids that a client sent, at least one. Errors call them `name`.

        Raises:
            InvalidRequest: empty_input, invalid_type or invalid_token_id, naming the place.
        """
        if not ids:
            raise InvalidRequest(f"{name} is an empty list of token ids.", param=name, code="empty_input")
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


def load_tokenizer(content: bytes, *, reserved: str | None = None) -> _RustTokenizer:
    """A tokenizer.json's tokenizer, its own truncation and padding off; for `reserved` see `TextReader`."""
    tokenizer = _RustTokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if reserved is not None:
        tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content in reserved]
        for token in tokens:
            token.special = True
        tokenizer.add_special_tokens(tokens)  # they keep their ids
        # It switches off their matching in texts alone: the post-processor puts them around as before.
        tokenizer.encode_special_tokens = True
    return tokenizer


class _FailuresAsErrors:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A Rust panic is no Exception; uncaught it would end the connection without an answer.
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError):
            raise InternalError("The tokenizer failed on this input.") from error


_failures_as_errors = _FailuresAsErrors()


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


def _without_repetitions(text: str, direction: Direction, part: str) -> str:
    """The text with `part` once at its beginning (or end), where it stands several times in a row."""
    size = len(part)
    if direction == "right":
        start = 0
        while text.startswith(part, start + size):
            start += size
        return text[start:]
    stop = len(text)
    while text.endswith(part, 0, stop - size):
        stop -= size
    return text[:stop]


def context_length_exceeded(
    name: str,
    num_tokens: int,
    limit: int,
    *,
    included: str = "",
    can_cut: bool = True,
    who: str = "this model takes",
) -> InvalidRequest:
    """The error of a text that has too many tokens.

    `included` says what of them is not the text's own, `who` whose limit it is.
    """
    return InvalidRequest(
        f"{name} has {num_tokens} tokens{included and f', {included} included'}; {who} at most {limit}. "
        f"Shorten it{', or send truncate: true' if can_cut else ''}.",
        param=name,
        code="context_length_exceeded",
    )


def input_too_long(name: str, num_chars: int, limit: int, *, can_cut: bool = True) -> InvalidRequest:
    """The error of a text that is over-long whatever it says."""
    return InvalidRequest(
        f"{name} has {num_chars} characters; at most {limit} are read. "
        f"Shorten it{', or send truncate: true' if can_cut else ''}.",
        param=name,
        code="input_too_long",
    )
