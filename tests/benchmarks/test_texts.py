"""Texts of a load do not repeat, and survive JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.texts import LONGEST_TEXT, Corpus, Lines, invent_text

WORDS = [f'w{index}"é' for index in range(LONGEST_TEXT + 500)]


def test_each_text_begins_with_another_word_until_all_words_were_used() -> None:
    corpus = Corpus(" ".join(WORDS))

    firsts = {corpus.text(index, 3).split()[0] for index in range(7, 507)}

    assert corpus.num_texts == 500
    assert len(firsts) == 500


def test_a_text_is_a_run_of_the_words_escaped_for_json() -> None:
    corpus = Corpus("\n".join(WORDS))

    text = json.loads(b'"%b"' % corpus.text(0, 3))

    assert text == 'w0"é w1"é w2"é'


def test_text_is_read_from_the_cells_of_a_file_that_have_more_than_one_word(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"_id": "17", "title": "two words", "text": "x " * (LONGEST_TEXT + 3)}))

    corpus = Corpus.read(path)

    assert corpus.num_texts == 5
    assert corpus.text(0, 3) == b"two words x"


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="2 words of text; more than 8192 are needed"):
        Corpus("too little")


def test_invented_text_is_the_same_for_the_same_seed() -> None:
    assert invent_text(100, seed=3) == invent_text(100, seed=3)
    assert len(invent_text(100, seed=3).split()) == 100


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("queries.txt", 'how do "I"?\n\n  two\twords \n'),
        ("queries.jsonl", '{"_id": "1", "text": "how do \\"I\\"?", "n": 7}\n["", "two words"]\n'),
        ("queries.csv", 'id,"how do ""I""?"\n2,two words\n'),
    ],
)
def test_lines_are_a_files_own_texts_in_its_order_and_again(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)

    lines = Lines.read(path)

    assert lines.num_texts == 2
    assert [json.loads(b'"%b"' % lines.text(index, 1)) for index in (0, 1, 2)] == [
        'how do "I"?',
        "two words",
        'how do "I"?',
    ]


def test_a_file_without_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="no texts"):
        Lines([" ", ""])
