"""Texts far longer than a model takes: the time that they cost does not grow with them, whatever the tokenizer is."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.errors import InvalidRequest
from common.model_location import find_model
from common.text.tokenization import Direction, Tokenizer, TruncationRule, load_tokenizer
from tests.fakes import FACTS

pytestmark = pytest.mark.slow

LIMIT = 512
LONGEST_S = 1.0  # the whole of these texts takes several seconds
CUT = TruncationRule(allowed=True)
REFUSE = TruncationRule(allowed=False)

TEXTS = {
    "words": "the quick brown fox jumps over the lazy dog " * 120_000,  # 5 MB
    "one-letter": "a" * 1_000_000,
    "blank-lines": "\n" * 999_000 + "fox",
}


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def unigram() -> RustTokenizer:
    tokenizer = RustTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def corpus() -> list[str]:
    return ["the quick brown fox jumps over the lazy dog " * 5 + "a" * 64 + " \n\n\n\n"] * 20


@pytest.fixture(scope="module", params=["wordpiece", "byte-level", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "wordpiece":
        return find_model("all-MiniLM-L6-v2").path
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = byte_level() if request.param == "byte-level" else unigram()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    facts = dataclasses.replace(FACTS, folder=str(folder), tokenizer_sha256=digest, vocab_size=30_522)
    return Tokenizer(dataclasses.replace(facts, max_tokens=LIMIT))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_first_tokens_of_a_very_long_text_are_found_in_a_moment(
    text: str, folder: Path, tokenizer: Tokenizer
) -> None:
    began_s = time.process_time()
    [ids] = tokenizer.encode([text], CUT)
    taken_s = time.process_time() - began_s

    # Of plain words a beginning decides, and the whole would take seconds.
    whole = load_tokenizer((folder / "tokenizer.json").read_bytes()).encode(text[:1_000_000])
    assert ids.tolist()[: LIMIT - 1] == whole.ids[: LIMIT - 1]  # the last may be the one at a text's end
    assert len(ids) == min(LIMIT, len(whole.ids))
    assert taken_s < LONGEST_S


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_where_nothing_may_be_cut_a_very_long_text_is_refused_unread(text: str, tokenizer: Tokenizer) -> None:
    began_s = time.process_time()

    with pytest.raises(InvalidRequest) as refusal:
        tokenizer.encode(["a", text], REFUSE)

    assert (refusal.value.code, refusal.value.param) == ("input_too_long", "input[1]")
    assert time.process_time() - began_s < LONGEST_S / 10


def blanks(size: int) -> str:
    """White space that does not repeat itself."""
    return "".join(np.random.default_rng(5).choice([" ", "\n"], size))


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    folder = find_model("all-MiniLM-L6-v2").path
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    facts = dataclasses.replace(FACTS, folder=str(folder), tokenizer_sha256=digest, vocab_size=30_522, max_tokens=256)
    return Tokenizer(facts)


@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize(
    ("text", "ids"),
    [("x" * 4_000_000, [101, 100, 102]), ("\u200d" * 4_000_000, [101, 102]), (blanks(4_000_000), [101, 102])],
    ids=["one word", "zero-width", "blanks"],
)
def test_a_text_of_hardly_any_tokens_is_not_read_to_its_end(
    minilm: Tokenizer, text: str, ids: list[int], direction: Direction
) -> None:
    began_s = time.process_time()
    [found] = minilm.encode([text], TruncationRule(allowed=True, direction=direction))
    assert time.process_time() - began_s < 0.3  # a hundredth of a second; all of it would take whole seconds
    assert found.tolist() == ids


@pytest.mark.parametrize("direction", ["right", "left"])
def test_of_a_text_of_hardly_any_tokens_those_of_its_beginning_or_end_are_taken(
    minilm: Tokenizer, direction: Direction
) -> None:
    # 32 characters for each of 256 tokens, and on to white space: two words, of a hundred that would fit.
    text = ("\u200d" * 4000 + " word " if direction == "right" else " word " + "\u200d" * 4000) * 100
    [found] = minilm.encode([text], TruncationRule(allowed=True, direction=direction))
    assert found.tolist() == [101, 2773, 2773, 102]


@pytest.mark.parametrize(
    ("text", "direction"),
    [(" " * 999_000 + "fox word", "right"), ("fox word" + " \n" * 499_000, "left")],
    ids=["before", "behind"],
)
def test_blank_space_that_repeats_itself_does_not_count(minilm: Tokenizer, text: str, direction: Direction) -> None:
    began_s = time.process_time()
    [found] = minilm.encode([text], TruncationRule(allowed=True, direction=direction))
    assert time.process_time() - began_s < 0.3
    assert found.tolist() == [101, 4419, 2773, 102]
