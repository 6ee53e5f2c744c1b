"""A document in chunks to one sequence and its spans."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from common.errors import InvalidRequest
from common.text.chunks import ChunkTokenizer
from common.text.tokenization import MAX_CHARS_PER_TOKEN, Tokenizer
from common.wire.messages import ModelFacts
from tests.fakes import FACTS

WORDS = {"[UNK]": 0} | {f"w{index}": index + 1 for index in range(9)}
CLS, SEP = 10, 11


def facts_of(folder: Path, **changes: object) -> ModelFacts:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    facts = dataclasses.replace(FACTS, folder=str(folder), tokenizer_sha256=digest, max_tokens=12, separator_id=SEP)
    return dataclasses.replace(facts, **changes)


def chunks_of(rust: RustTokenizer, folder: Path, **changes: object) -> ChunkTokenizer:
    rust.save(str(folder / "tokenizer.json"))
    facts = facts_of(folder, **changes)
    return ChunkTokenizer(facts, Tokenizer(facts))


def word_tokenizer(single: str = "$A") -> RustTokenizer:
    tokenizer = RustTokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20] * 5, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def refusal(chunks: ChunkTokenizer, texts: list[str]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chunks.encode(texts, "input[2]")
    return caught.value


def test_a_separator_stands_between_chunks_and_in_no_span(tmp_path: Path) -> None:
    document = chunks_of(word_tokenizer(), tmp_path).encode(["w0 w1", "w2", "w3 w4 w5"], "input[0]")
    assert document.ids.tolist() == [1, 2, SEP, 3, SEP, 4, 5, 6]
    assert document.spans.tolist() == [[0, 2], [3, 4], [5, 8]]
    assert document.ids.dtype == document.spans.dtype == np.int32


def test_special_tokens_around_a_text_stand_around_the_document_and_in_no_span(tmp_path: Path) -> None:
    chunks = chunks_of(word_tokenizer("[CLS] $A [SEP]"), tmp_path)
    document = chunks.encode(["w0 w1", "w2"], "input[0]")
    assert document.ids.tolist() == [CLS, 1, 2, SEP, 3, SEP]
    assert document.spans.tolist() == [[1, 3], [4, 5]]
    assert chunks.encode(["w0"], "input[0]").spans.tolist() == [[1, 2]]


def test_text_that_spells_the_separator_is_text(tmp_path: Path) -> None:
    document = chunks_of(word_tokenizer(), tmp_path).encode(["w0 [SEP] w1", "[SEP]"], "input[0]")
    assert document.ids.tolist() == [1, 0, 2, SEP, 0]
    assert document.spans.tolist() == [[0, 3], [4, 5]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChunkTokenizer, RustTokenizer]:
    rust = byte_level()
    separator = rust.token_to_id("<|endoftext|>")
    return chunks_of(rust, tmp_path_factory.mktemp("real"), max_tokens=4096, separator_id=separator), rust


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), min_size=1, max_size=6))
def test_chunks_have_the_ids_of_the_joined_text(real: tuple[ChunkTokenizer, RustTokenizer], texts: list[str]) -> None:
    chunks, rust = real
    document = chunks.encode(texts, "input[0]")
    assert document.ids.tolist() == rust.encode("<|endoftext|>".join(texts)).ids
    for text, (start, stop) in zip(texts, document.spans.tolist(), strict=True):
        assert document.ids[start:stop].tolist() == rust.encode(text).ids


def test_a_chunk_without_any_token_is_named(tmp_path: Path) -> None:
    error = refusal(chunks_of(word_tokenizer(), tmp_path), ["w0", " ", "w1"])
    assert (error.code, error.param) == ("empty_input", "input[2][1]")


def test_a_document_over_the_limit_is_refused_whole(tmp_path: Path) -> None:
    chunks = chunks_of(word_tokenizer(), tmp_path)
    assert len(chunks.encode(["w0 w1 w2"] * 3, "input[2]").ids) == 11
    error = refusal(chunks, ["w0 w1 w2"] * 4)
    assert (error.code, error.param) == ("context_length_exceeded", "input[2]")
    assert error.message == ("input[2] has 15 tokens, separators included; this model takes at most 12. Shorten it.")


def test_a_document_of_too_many_characters_is_refused_unread(tmp_path: Path) -> None:
    error = refusal(chunks_of(word_tokenizer(), tmp_path), ["w0", "x" * 12 * MAX_CHARS_PER_TOKEN])
    assert (error.code, error.param) == ("input_too_long", "input[2]")


def test_a_model_without_a_separator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no separator"):
        chunks_of(word_tokenizer(), tmp_path, separator_id=None)


def test_a_separator_that_is_a_mere_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the separator 3 is none of its added tokens"):
        chunks_of(word_tokenizer(), tmp_path, separator_id=3)


def test_a_separator_that_text_can_be_is_refused(tmp_path: Path) -> None:
    rust = word_tokenizer()
    rust.add_special_tokens(["w8"])
    with pytest.raises(ValueError, match="cannot be told from that token"):
        chunks_of(rust, tmp_path, separator_id=9)


def test_a_separator_that_takes_white_space_beside_it_is_refused(tmp_path: Path) -> None:
    rust = byte_level()
    rust.add_special_tokens([AddedToken("<sep>", lstrip=True)])
    with pytest.raises(ValueError, match="does not read texts as it reads them alone"):
        chunks_of(rust, tmp_path, separator_id=rust.token_to_id("<sep>"))


def test_a_tokenizer_that_reads_a_texts_beginning_in_another_way_is_refused(tmp_path: Path) -> None:
    vocabulary = [(piece, 0.0) for piece in ("<unk>", "▁", "a", "b", "A", ".", "\n", "▁a")]
    rust = RustTokenizer(models.Unigram(vocabulary, unk_id=0))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    rust.add_special_tokens(["<sep>"])
    with pytest.raises(ValueError, match="does not read texts as it reads them alone"):
        chunks_of(rust, tmp_path, separator_id=rust.token_to_id("<sep>"))


def test_a_chunk_with_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<image>"])
    chunks = chunks_of(tokenizer, tmp_path, vocab_size=SEP + 1)
    error = refusal(chunks, ["w0", "an <image>"])
    assert (error.code, error.param) == ("invalid_token_id", "input[2][1]")


def test_a_separator_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the token {SEP} around texts"):
        chunks_of(word_tokenizer(), tmp_path, vocab_size=SEP)
