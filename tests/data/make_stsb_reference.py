"""Write the reference vectors that the worker's numbers are compared with.

What it is for: an answer of known origin for 500 real sentences, made by another implementation
(sentence-transformers, float32, CPU) of the same checkpoint, so that a test of the worker needs
neither that package nor the whole data set.

What it promises: the same sentences from the same data set, and with the same versions on the same
CPU the same bytes. One text is encoded at a time on one thread, so no vector depends on padding, on
its neighbours in a batch or on the number of cores. The vectors are what the checkpoint's own
modules give (pooling and normalisation included); nothing is added here.

Why 500 and how they are chosen: enough for the lengths that occur and for a rank correlation, small
enough to be committed. The distinct sentences are put in order of length and cut into as many
strata of equal size as sentences are wanted; a seeded draw takes one of each. The shortest and the
longest, in tokens and in characters, and every sentence with a character outside ASCII are always
taken. Equal shares for every length were rejected: 284 of 500 sentences would come from MSRpar.

Needs numpy, torch and sentence-transformers; README.md beside this file has versions and licences.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import platform
import random
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

# The six parts of the English test split, in the order of its rows (half-open ranges).
# Source: the breakdown of STS benchmark by genre and file, https://ixa2.si.ehu.eus/stswiki
_SOURCES = (
    ("MSRvid", 0, 250),
    ("images", 250, 500),
    ("track5.en-en", 500, 625),
    ("answers-answers", 625, 879),
    ("MSRpar", 879, 1129),
    ("headlines", 1129, 1379),
)
_NUM_ROWS = 1379
_NUM_SENTENCES = 500
_SEED = 20170803


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence, the part of the data set that it was first seen in, and its length.

    `num_tokens` is what the checkpoint's tokenizer makes of it, special tokens included.
    """

    text: str
    source: str
    num_tokens: int


def read_sentences(stsb: Path, num_tokens: Callable[[str], int]) -> list[Sentence]:
    """The distinct sentences of a CSV without header (sentence1, sentence2, score), in its order.

    Raises:
        ValueError: the file has not the 1,379 rows of three fields that `_SOURCES` describes.
    """
    with stsb.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if len(rows) != _NUM_ROWS or any(len(row) != 3 for row in rows):
        raise ValueError(f"{stsb.name}: not {_NUM_ROWS} rows of three fields")
    sources: dict[str, str] = {}
    for source, start, stop in _SOURCES:
        for row in rows[start:stop]:
            for text in row[:2]:
                sources.setdefault(text, source)
    return [Sentence(text, source, num_tokens(text)) for text, source in sources.items()]


def choose_sentences(sentences: list[Sentence], count: int, seed: int) -> list[Sentence]:
    """`count` of the sentences with lengths spread over the whole range, ordered by length.

    Always holds the shortest and the longest, in tokens and in characters, and all with a character
    outside ASCII. The order is by tokens, then characters, then text, whatever that of the input.

    Raises:
        ValueError: there are fewer than `count` sentences.
    """
    if len(sentences) < count:
        raise ValueError(f"{count} sentences wanted, {len(sentences)} there")
    ordered = sorted(sentences, key=_by_length)
    by_characters = sorted(ordered, key=lambda s: len(s.text))
    forced = {ordered[0], ordered[-1], by_characters[0], by_characters[-1]}
    forced.update(s for s in ordered if not s.text.isascii())
    chosen = list(forced)
    rest = [s for s in ordered if s not in forced]
    num_strata = count - len(forced)
    generator = random.Random(seed)
    for i in range(num_strata):
        stratum = rest[i * len(rest) // num_strata : (i + 1) * len(rest) // num_strata]
        chosen.append(generator.choice(stratum))
    return sorted(chosen, key=_by_length)


def encode(model: SentenceTransformer, texts: list[str]) -> npt.NDArray[np.float32]:
    """The vectors of sentence-transformers, float32 [texts, dimensions], one text at a time."""
    rows = [model.encode([text], batch_size=1, show_progress_bar=False)[0] for text in texts]
    return np.stack(rows).astype("<f4", copy=False)


def main() -> None:
    """Read the data set, choose, encode, write both files and print what made them."""
    parser = argparse.ArgumentParser(description="Write stsb_reference.jsonl and .npy.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--stsb", type=Path, required=True, help="CSV of the English test split")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--exclude-source",
        action="append",
        default=[],
        choices=[name for name, _, _ in _SOURCES],
        help="take no sentence of this part (may be repeated; README.md says why one would)",
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = SentenceTransformer(
        str(args.model), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
    )
    sentences = read_sentences(args.stsb, lambda text: len(model.tokenizer(text).input_ids))
    permitted = [s for s in sentences if s.source not in args.exclude_source]
    chosen = choose_sentences(permitted, _NUM_SENTENCES, _SEED)
    vectors = encode(model, [s.text for s in chosen])

    args.out.mkdir(parents=True, exist_ok=True)
    text_path, vector_path = args.out / "stsb_reference.jsonl", args.out / "stsb_reference.npy"
    with text_path.open("w", encoding="utf-8", newline="\n") as file:
        for sentence in chosen:
            line = {"text": sentence.text, "source": sentence.source}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    np.save(vector_path, vectors, allow_pickle=False)

    print(f"python {platform.python_version()}")
    for package in ("sentence-transformers", "transformers", "tokenizers", "torch", "numpy"):
        print(f"{package} {version(package)}")
    for path in (args.model / "model.safetensors", args.stsb, text_path, vector_path):
        print(f"{path.name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    print(
        f"{len(chosen)} of {len(permitted)} sentences,"
        f" {chosen[0].num_tokens} to {chosen[-1].num_tokens} tokens,"
        f" {min(len(s.text) for s in chosen)} to {max(len(s.text) for s in chosen)} characters"
    )
    print(f"vectors {vectors.dtype} {list(vectors.shape)}")
    for source, count in sorted(Counter(s.source for s in chosen).items()):
        print(f"{count:4d} from {source}")


def _by_length(sentence: Sentence) -> tuple[int, int, str]:
    return sentence.num_tokens, len(sentence.text), sentence.text


if __name__ == "__main__":
    main()
