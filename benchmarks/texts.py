"""Texts for a load: as many as there are words to begin with, none twice, none the beginning of another.

So nothing that is sent can be answered from a cache, neither of whole texts nor of their beginnings. A text is a run of
words of a long text that begins where no other does; cutting it out costs about a microsecond, so texts are made while
the clock runs.

`Lines` are a file's own texts instead, one after the other and from the beginning again: they have the lengths that
they have, and show what a cache does.
"""

from __future__ import annotations

import csv
import json
import math
import random
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

LONGEST_TEXT = 8_192  # words
_INVENTED_WORDS = 1_000_000


class Corpus:
    """Words, escaped for JSON, one space between them. A text is a run of them."""

    def __init__(self, text: str) -> None:
        """Raises ValueError: so few words that texts would soon repeat."""
        self._bytes = json.dumps(" ".join(text.split()))[1:-1].encode()
        self._starts = array("Q", [0])  # of each word, and where one more would start
        for word in self._bytes.split(b" "):
            self._starts.append(self._starts[-1] + len(word) + 1)
        self.num_texts = len(self._starts) - 1 - LONGEST_TEXT  # a text may begin at each of so many words
        if self.num_texts < 1:
            raise ValueError(f"{len(self._starts) - 1} words of text; more than {LONGEST_TEXT} are needed")
        # Steps near the golden section of a circle spread; steps without a common divisor reach every word once.
        self._step = int(self.num_texts * 0.618) + 1
        while math.gcd(self._step, self.num_texts) > 1:
            self._step += 1
        # Random, so that what an earlier run sent is seldom sent again.
        self.next_index = random.SystemRandom().randrange(1 << 30)

    @classmethod
    def read(cls, path: Path | None) -> Corpus:
        """All running text of a .txt, .csv or .jsonl file; invented words where there is none."""
        if path is None:
            return cls(invent_text(_INVENTED_WORDS, seed=0))
        return cls(" ".join(cell for row in _rows(path) for cell in row if " " in cell))

    def text(self, index: int, num_words: int) -> bytes:
        """The first of `num_texts` indices in a row that begins where it does."""
        first = index * self._step % self.num_texts
        return self._bytes[self._starts[first] : self._starts[first + num_words] - 1]


class Lines:
    """A file's own texts, escaped for JSON, in its order: lines, or the longest text of each row of a table."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Raises ValueError: there are none."""
        self._texts = [json.dumps(" ".join(text.split()))[1:-1].encode() for text in texts if text.strip()]
        if not self._texts:
            raise ValueError("no texts")
        self.num_texts = len(self._texts)
        self.next_index = 0

    @classmethod
    def read(cls, path: Path) -> Lines:
        return cls(max(row, key=len, default="") for row in _rows(path))

    def text(self, index: int, num_words: int) -> bytes:  # theirs have the lengths that they have
        return self._texts[index % self.num_texts]


def _rows(path: Path) -> Iterator[list[str]]:
    """The texts of each line of a .csv, .jsonl, or else plain text file."""
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".csv":
            yield from csv.reader(file)
        elif path.suffix == ".jsonl":
            for line in file:
                value = json.loads(line)
                cells = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
                yield [cell for cell in cells if isinstance(cell, str)]
        else:
            yield from ([line] for line in file)


def invent_text(num_words: int, seed: int) -> str:
    """Words of English's sounds in sentences of 14, some words more often than others as in any language (Zipf)."""
    generator = random.Random(seed)
    sounds = (["b", "c", "d", "f", "gr", "h", "l", "m", "p", "r", "s", "th"], "aeiou", ["", "n", "r", "s", "t", "ck"])
    lengths = generator.choices((1, 2, 3), (3, 5, 2), k=8_000)
    words = ["".join(generator.choice(sound) for _ in range(length) for sound in sounds) for length in lengths]
    drawn = generator.choices(words, [1 / (rank + 2.7) for rank in range(len(words))], k=num_words)
    drawn[13::14] = [f"{word}." for word in drawn[13::14]]
    return " ".join(drawn)
