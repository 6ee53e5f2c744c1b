"""Text to token ids: with a word tokenizer made here, and with the real all-MiniLM-L6-v2's."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from common.errors import InternalError, InvalidRequest
from common.model_location import find_model
from common.text.tokenization import MAX_CHARS_PER_TOKEN, Token, Tokenizer, TruncationRule, load_tokenizer
from common.wire.messages import ModelFacts
from tests.fakes import FACTS

REFUSE = TruncationRule(allowed=False)
RIGHT = TruncationRule(allowed=True, direction="right")
LEFT = TruncationRule(allowed=True, direction="left")


def facts_of(folder: Path, **changes: object) -> ModelFacts:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return dataclasses.replace(FACTS, folder=str(folder), tokenizer_sha256=digest, **changes)


def word_tokenizer() -> RustTokenizer:
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{index}": index + 3 for index in range(40)}
    tokenizer = RustTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight tokens a text, two of them special."""
    folder = tmp_path_factory.mktemp("words")
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(facts_of(folder, max_tokens=8, vocab_size=43))


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    return Tokenizer(facts_of(find_model("all-MiniLM-L6-v2").path, max_tokens=256, vocab_size=30_522))


@pytest.fixture(scope="module")
def minilm_reference() -> RustTokenizer:
    return load_tokenizer((find_model("all-MiniLM-L6-v2").path / "tokenizer.json").read_bytes())


def encode(tokenizer: Tokenizer, text: str, truncation: TruncationRule = REFUSE) -> list[int]:
    [ids] = tokenizer.encode([text], truncation)
    assert ids.dtype == np.int32
    return ids.tolist()


def test_special_tokens_frame_a_text(tokenizer: Tokenizer) -> None:
    assert encode(tokenizer, "w0 w1 nothing") == [1, 3, 4, 0, 2]


def test_a_text_of_exactly_the_limit_is_whole(tokenizer: Tokenizer) -> None:
    for truncation in (REFUSE, RIGHT, LEFT):
        assert encode(tokenizer, words(*range(6)), truncation) == [1, 3, 4, 5, 6, 7, 8, 2]


def test_truncation_cuts_the_end_and_keeps_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert encode(tokenizer, words(*range(40)), RIGHT) == [1, 3, 4, 5, 6, 7, 8, 2]


def test_truncation_on_the_left_cuts_the_beginning(tokenizer: Tokenizer) -> None:
    assert encode(tokenizer, words(*range(40)), LEFT) == [1, 37, 38, 39, 40, 41, 42, 2]


@pytest.mark.parametrize("truncation", [RIGHT, LEFT], ids=["right", "left"])
def test_a_text_over_the_character_limit_is_cut_like_any_other(
    tokenizer: Tokenizer, truncation: TruncationRule
) -> None:
    text = words(*(index % 40 for index in range(4000)))
    assert len(text) > 8 * MAX_CHARS_PER_TOKEN
    expected = {"right": [1, 3, 4, 5, 6, 7, 8, 2], "left": [1, 37, 38, 39, 40, 41, 42, 2]}[truncation.direction]
    assert encode(tokenizer, text, truncation) == expected


def test_white_space_at_the_cut_asks_for_more_of_the_text(tokenizer: Tokenizer) -> None:
    text = " " * 5000 + words(*range(10)) + " " * 5000
    assert encode(tokenizer, text, RIGHT) == [1, 3, 4, 5, 6, 7, 8, 2]
    assert encode(tokenizer, text, LEFT) == [1, 7, 8, 9, 10, 11, 12, 2]


def test_one_long_word_is_one_token(tokenizer: Tokenizer) -> None:
    assert encode(tokenizer, "x" * 100_000, RIGHT) == [1, 0, 2]


@pytest.mark.parametrize(
    ("name_of", "name"), [(lambda _: "input", "input"), (lambda index: f"texts[{index + 64}]", "texts[65]")]
)
def test_errors_name_a_text_as_they_are_told_to(tokenizer: Tokenizer, name_of: Callable[[int], str], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode(["w1", words(*range(7))], REFUSE, name_of)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", name)
    assert (
        caught.value.message == f"{name} has 9 tokens; this model takes at most 8. Shorten it, or send truncate: true."
    )


def test_a_text_over_the_character_limit_is_refused_unread(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode(["w1", "x" * (8 * MAX_CHARS_PER_TOKEN + 1)], REFUSE)
    assert (caught.value.code, caught.value.param) == ("input_too_long", "input[1]")


def test_a_text_without_any_token_is_empty(tmp_path: Path) -> None:
    bare = word_tokenizer()
    bare.post_processor = None
    bare.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(facts_of(tmp_path, max_tokens=8))
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode(["w1", " \n "], REFUSE)
    assert (caught.value.code, caught.value.param) == ("empty_input", "input[1]")


def test_the_files_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    spoiled = word_tokenizer()
    spoiled.enable_truncation(3)
    spoiled.enable_padding(length=100)
    spoiled.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(facts_of(tmp_path, max_tokens=8))
    assert encode(tokenizer, "w0 w1 w2") == [1, 3, 4, 5, 2]


def test_lower_casing_is_done_where_the_model_asks_for_it(folder: Path) -> None:
    tokenizer = Tokenizer(facts_of(folder, max_tokens=8, lower_case=True))
    assert encode(tokenizer, "W0 W1") == [1, 3, 4, 2]


def test_another_file_than_the_workers_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="not the file that the worker read"):
        Tokenizer(dataclasses.replace(facts_of(folder), tokenizer_sha256="0" * 64))


def test_a_limit_that_special_tokens_fill_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="special tokens alone"):
        Tokenizer(facts_of(folder, max_tokens=2))


def test_a_panic_is_an_error_of_this_request_alone(tmp_path: Path) -> None:
    broken = RustTokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))  # an unknown token that is not there
    broken.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(facts_of(tmp_path, max_tokens=8))
    with pytest.raises(InternalError):
        tokenizer.encode(["b"], REFUSE)
    with pytest.raises(InternalError):
        tokenizer.reader.tokens("b")
    assert encode(tokenizer, "a") == [0]


# --- prompts that are left out of a pooling ---


def test_a_prompts_length_counts_the_special_token_before_it_and_not_the_one_after(tokenizer: Tokenizer) -> None:
    assert tokenizer.prompt_length("w0 w1") == 3
    assert tokenizer.prompt_length("w0 w1: ") == 3
    assert tokenizer.prompt_length("") == 0


def test_a_prompts_length_is_at_most_what_the_model_takes(tokenizer: Tokenizer) -> None:
    assert tokenizer.prompt_length(words(*range(40))) == 7


def test_a_prompts_length_where_a_tokenizer_adds_no_token(byte_level: tuple[Tokenizer, RustTokenizer]) -> None:
    tokenizer, rust = byte_level
    assert tokenizer.prompt_length("the fox: ") == len(rust.encode("the fox: ").ids)


# --- token ids ---


def test_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.check_ids([42, 0, 7], REFUSE, "input").tolist() == [42, 0, 7]


def test_ids_are_cut_to_the_limit(tokenizer: Tokenizer) -> None:
    ids = list(range(20))
    assert tokenizer.check_ids(ids, RIGHT, "input[0]").tolist() == list(range(8))
    assert tokenizer.check_ids(ids, LEFT, "input[0]").tolist() == list(range(12, 20))


@pytest.mark.parametrize(
    ("ids", "code", "param"),
    [
        ([], "empty_input", "input[4]"),
        ([1, -1], "invalid_token_id", "input[4][1]"),
        ([1, 43], "invalid_token_id", "input[4][1]"),
        ([1, 2**70], "invalid_token_id", "input[4][1]"),
        ([1.0], "invalid_token_id", "input[4][0]"),
        ([True], "invalid_token_id", "input[4][0]"),
        ([1, "2"], "invalid_type", "input[4][1]"),
        ([1, None], "invalid_type", "input[4][1]"),
        ([[1]], "invalid_type", "input[4][0]"),
        ([1] * 9, "context_length_exceeded", "input[4]"),
    ],
)
def test_what_is_no_token_id_is_named(tokenizer: Tokenizer, ids: list[object], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.check_ids(ids, REFUSE, "input[4]")
    assert (caught.value.code, caught.value.param) == (code, param)


def test_any_number_of_ids_can_be_checked(tokenizer: Tokenizer) -> None:
    assert tokenizer.check_tokens([42] * 20, "ids").tolist() == [42] * 20
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.check_tokens([42, 43], "ids")
    assert (caught.value.code, caught.value.param) == ("invalid_token_id", "ids[1]")


# --- tokens for people ---


def test_tokens_count_characters_of_the_text_as_it_was_sent(folder: Path) -> None:
    reader = Tokenizer(facts_of(folder, max_tokens=8, lower_case=True)).reader
    assert reader.tokens("İ😀 W1  w50") == [
        Token(1, "[CLS]", True, None, None),
        Token(0, "İ😀", False, 0, 2),  # the first letter becomes two when it is lowered
        Token(4, "W1", False, 3, 5),
        Token(0, "w50", False, 7, 10),
        Token(2, "[SEP]", True, None, None),
    ]


def test_tokens_of_a_prompt_have_no_place_and_those_that_reach_into_the_text_begin_with_it(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.reader.tokens("5 w6", prompt="w1 w", special_tokens=False) == [
        Token(4, "w1", False, None, None),
        Token(8, "w5", False, 0, 1),
        Token(9, "w6", False, 2, 4),
    ]


@pytest.fixture(scope="module")
def single_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE that knows every byte, and no two of them together."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("single")
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(facts_of(folder, max_tokens=16))


def test_tokens_that_are_bytes_of_one_character_share_its_place(single_bytes: Tokenizer) -> None:
    found = single_bytes.reader.tokens("a😀é")
    assert [(token.text, token.start, token.stop) for token in found] == [
        ("a", 0, 1),
        *[("😀", 1, 2)] * 4,
        *[("é", 2, 3)] * 2,
    ]


def test_ids_are_decoded_by_the_files_own_decoder(
    single_bytes: Tokenizer, minilm: Tokenizer, tokenizer: Tokenizer
) -> None:
    text = "the quick 😀  fox "
    ids = single_bytes.reader.ids(text)
    assert single_bytes.reader.decode(ids, skip_special_tokens=True) == text
    assert single_bytes.reader.decode(ids[10:12], skip_special_tokens=True) == "\ufffd"  # half of the face
    ids = np.array(encode(minilm, "Embeddings!"), dtype=np.int32)
    assert minilm.reader.decode(ids, skip_special_tokens=True) == "embeddings!"
    assert minilm.reader.decode(ids, skip_special_tokens=False) == "[CLS] embeddings! [SEP]"
    assert tokenizer.reader.decode(np.array([1, 4, 2], dtype=np.int32), skip_special_tokens=True) == "w1"


# --- the real one ---


def test_minilm_gives_the_ids_that_its_model_was_trained_with(minilm: Tokenizer) -> None:
    assert encode(minilm, "This is a test.") == [101, 2023, 2003, 1037, 3231, 1012, 102]


def test_minilm_takes_256_tokens_and_not_the_128_of_its_file(minilm: Tokenizer) -> None:
    assert encode(minilm, "word " * 254) == [101, *[2773] * 254, 102]
    with pytest.raises(InvalidRequest):
        minilm.encode(["word " * 255], REFUSE)


TEXTS = st.lists(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    | st.sampled_from(
        ["...", "don't", "naïve", "\u200b", "word", "antidisestablishmentarianism", "日本語", "👨‍👩‍👧", "[SEP]"]
    ),
    min_size=1,
    max_size=60,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=TEXTS, separator=st.sampled_from([" ", "\n", "  ", "\t\n "]), repeat=st.integers(1, 60))
def test_a_cut_text_has_the_first_or_last_tokens_of_the_whole(
    minilm: Tokenizer, minilm_reference: RustTokenizer, parts: list[str], separator: str, repeat: int
) -> None:
    text = separator.join(parts * repeat)
    whole = minilm_reference.encode(text, add_special_tokens=False).ids
    assert encode(minilm, text, RIGHT) == [101, *whole[:254], 102]
    assert encode(minilm, text, LEFT) == [101, *whole[-254:], 102]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, RustTokenizer]:
    """A byte-level BPE without special tokens, as Qwen's and GPT's are: a word's first token holds its space."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20] * 5)
    folder = tmp_path_factory.mktemp("bytes")
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(facts_of(folder, max_tokens=16)), rust


@pytest.mark.parametrize("separator", [" ", "\n", "  "])
def test_a_byte_level_text_is_cut_where_the_whole_would_be(
    byte_level: tuple[Tokenizer, RustTokenizer], separator: str
) -> None:
    tokenizer, rust = byte_level
    text = separator.join(["the quick brown fox", "jumps", "over...", "lazy", "dog"] * 200)
    whole = rust.encode(text).ids
    assert encode(tokenizer, text, RIGHT) == whole[:16]
    assert encode(tokenizer, text, LEFT) == whole[-16:]


@pytest.mark.thorough
@pytest.mark.slow
def test_threads_share_a_tokenizer(minilm: Tokenizer) -> None:
    texts = [" ".join(["word"] * length) for length in range(1, 400, 7)]
    expected = [ids.tolist() for ids in minilm.encode(texts, RIGHT)]
    failures: list[object] = []

    def run() -> None:
        for _ in range(20):
            rows = [ids.tolist() for ids in minilm.encode(texts, RIGHT)]
            if rows != expected:
                failures.append(rows)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_model_that_asks_for_lower_case_gets_it(folder: Path, minilm: Tokenizer) -> None:
    lower = Tokenizer(facts_of(folder, max_tokens=8, vocab_size=43, lower_case=True))
    assert encode(lower, "W0 w1") == [1, 3, 4, 2]
    model = find_model("all-MiniLM-L6-v2").path
    both = Tokenizer(facts_of(model, max_tokens=256, vocab_size=30_522, lower_case=True))
    assert encode(both, "Straße [SEP] Ωmega") == encode(minilm, "Straße [SEP] Ωmega")


@pytest.mark.parametrize("truncation", [RIGHT, LEFT], ids=["right", "left"])
def test_of_a_long_run_without_white_space_only_a_part_is_read(minilm: Tokenizer, truncation: TruncationRule) -> None:
    began = time.monotonic()
    ids = encode(minilm, "字" * 5_000_000, truncation)
    assert time.monotonic() - began < 1.0  # the whole takes several seconds
    assert ids == encode(minilm, "字" * 300, truncation)


@pytest.mark.parametrize("truncation", [RIGHT, LEFT], ids=["right", "left"])
def test_a_cut_inside_a_very_long_word_changes_no_token_that_is_kept(
    minilm: Tokenizer, minilm_reference: RustTokenizer, truncation: TruncationRule
) -> None:
    rng = random.Random(7)
    for _ in range(40):
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 3))) for _ in range(rng.randint(120, 240))]
        runs = ["".join(rng.choices("abcdefgh0123", k=rng.randint(110, 200))) for _ in range(60)]
        text = " ".join(words) + " " + "-".join(runs) + " " + " ".join(words)
        whole = minilm_reference.encode(text, add_special_tokens=False)
        whole.truncate(254, direction=truncation.direction)
        assert encode(minilm, text, truncation)[1:-1] == whole.ids


# --- tokens that the model has no vector for ---


@pytest.mark.parametrize("truncation", [REFUSE, RIGHT])
def test_a_text_with_a_token_beyond_the_vocabulary_is_named(folder: Path, truncation: TruncationRule) -> None:
    tokenizer = Tokenizer(facts_of(folder, max_tokens=8, vocab_size=42))
    assert tokenizer.encode(["w38"], REFUSE)[0].tolist() == [1, 41, 2]
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode(["w38", "w1 w39"], truncation, lambda index: f"input[{5 + index}]")
    assert (caught.value.code, caught.value.param) == ("invalid_token_id", "input[6]")
    assert caught.value.message == "input[6] holds the token w39, which this model has no vector for."


def test_what_is_cut_off_a_text_may_be_beyond_the_vocabulary(folder: Path) -> None:
    tokenizer = Tokenizer(facts_of(folder, max_tokens=8, vocab_size=42))
    assert tokenizer.encode([words(0, 1, 2, 3, 4, 5, 39)], RIGHT)[0].tolist() == [1, 3, 4, 5, 6, 7, 8, 2]
    with pytest.raises(InvalidRequest, match="w39"):
        tokenizer.encode([words(0, 1, 2, 3, 4, 5, 39)], LEFT)


def test_a_special_token_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="the token 2 around texts, and the model's vocabulary has 2"):
        Tokenizer(facts_of(folder, max_tokens=8, vocab_size=2))
