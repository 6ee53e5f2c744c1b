"""A query and its documents to sequences: with tokenizers made here, against the library's own pairs and truncation."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from common.errors import InvalidRequest
from common.model_location import find_model
from common.text.pairs import Pair, PairNames, PairTokenizer, longest_first, pair_tokenizer
from common.text.tokenization import MAX_CHARS_PER_TOKEN, Tokenizer, TruncationRule, load_tokenizer
from common.wire.messages import ModelFacts
from tests.fakes import FACTS

REFUSE = TruncationRule(allowed=False)
RIGHT = TruncationRule(allowed=True, direction="right")
LEFT = TruncationRule(allowed=True, direction="left")

CLS, SEP = ("[CLS]", 1), ("[SEP]", 2)
BERT = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[CLS, SEP]
)
ROBERTA = processors.RobertaProcessing(SEP, CLS)


def facts_of(folder: Path, **changes: object) -> ModelFacts:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    facts = dataclasses.replace(FACTS, folder=str(folder), tokenizer_sha256=digest, pair_template="pair")
    return dataclasses.replace(facts, **{"instruction": None, "has_token_types": True} | changes)


def pairs_of(folder: Path, **changes: object) -> PairTokenizer:
    facts = facts_of(folder, **changes)
    return pair_tokenizer(facts, Tokenizer(facts))


def word_tokenizer(processor: object) -> RustTokenizer:
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{index}": index + 3 for index in range(40)}
    tokenizer = RustTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def many(count: int) -> str:
    return words(*(index % 40 for index in range(count)))


def save(tokenizer: RustTokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(word_tokenizer(BERT), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(word_tokenizer(ROBERTA), tmp_path_factory.mktemp("roberta"))


def rows(pairs: list[Pair]) -> list[tuple[list[int], int]]:
    assert all(pair.ids.dtype == np.int32 for pair in pairs)
    return [(pair.ids.tolist(), pair.type_start) for pair in pairs]


def refusal(
    pairs: PairTokenizer, query: str, documents: list[str], truncation: TruncationRule = REFUSE, **options: object
) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        pairs.encode(query, documents, truncation, **options)  # type: ignore[arg-type]
    return caught.value


# --- pairs as the tokenizer writes them ---


def test_a_bert_pair_has_its_second_text_and_the_last_separator_in_type_1(bert: Path) -> None:
    pairs = pairs_of(bert, max_tokens=10).encode("w0 w1", ["w2", "w3 w4 nothing", ""], REFUSE)
    assert rows(pairs) == [
        ([1, 3, 4, 2, 5, 2], 4),
        ([1, 3, 4, 2, 6, 7, 0, 2], 4),
        ([1, 3, 4, 2, 2], 4),
    ]


def test_a_roberta_pair_has_two_separators_and_one_type(roberta: Path) -> None:
    assert rows(pairs_of(roberta, max_tokens=10).encode("w0", ["w2"], REFUSE)) == [([1, 3, 2, 2, 5, 2], 6)]


def test_a_model_without_token_types_gets_none(bert: Path) -> None:
    pairs = pairs_of(bert, max_tokens=10, has_token_types=False).encode("w0", ["w2"], REFUSE)
    assert rows(pairs) == [([1, 3, 2, 5, 2], 5)]


def test_a_tokenizer_without_a_template_puts_texts_one_behind_the_other(tmp_path: Path) -> None:
    pairs = pairs_of(save(word_tokenizer(None), tmp_path), max_tokens=10)
    assert rows(pairs.encode("w0 w1", ["w2"], REFUSE)) == [([3, 4, 5], 2)]


@pytest.mark.parametrize("pair", ["$A [SEP] $B:1 [SEP]:1 [CLS]:2", "$A:1 [SEP] $B [SEP]", "$A [SEP]:1 $B [SEP]"])
def test_types_that_do_not_go_from_0_to_1_once_are_refused(tmp_path: Path, pair: str) -> None:
    processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=[CLS, SEP])
    save(word_tokenizer(processor), tmp_path)
    with pytest.raises(ValueError, match="token types"):
        pairs_of(tmp_path, max_tokens=10)
    pairs_of(tmp_path, max_tokens=10, has_token_types=False)  # whose model does not look at them


@pytest.mark.parametrize("pair", ["$B [SEP] $A:1", "$A [SEP] $B:1 $A:1"])
def test_texts_out_of_their_order_are_refused(tmp_path: Path, pair: str) -> None:
    processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=[CLS, SEP])
    with pytest.raises(ValueError, match="in their order"):
        pairs_of(save(word_tokenizer(processor), tmp_path), max_tokens=10)


def test_text_that_spells_a_special_token_is_that_token(bert: Path) -> None:
    assert rows(pairs_of(bert, max_tokens=10).encode("w0[SEP]w1", ["[CLS]"], REFUSE)) == [([1, 3, 2, 4, 2, 1, 2], 5)]


def test_a_limit_that_special_tokens_fill_is_refused(bert: Path) -> None:
    with pytest.raises(ValueError, match="special tokens alone"):
        pairs_of(bert, max_tokens=4)


def test_pairs_have_no_instruction(bert: Path) -> None:
    error = refusal(pairs_of(bert, max_tokens=10), "w0", ["w1"], instruction="w2")
    assert (error.code, error.param) == ("unsupported_parameter", "instruction")


# --- truncation of pairs ---


@pytest.mark.parametrize("folder", ["bert", "roberta"])
@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize(
    ("query", "document"),
    [(5, 5000), (600, 5), (600, 600), (511, 511), (600, 601), (601, 600), (254, 300), (255, 254), (508, 1), (0, 600)],
)
def test_what_is_cut_is_what_the_library_cuts(
    folder: str, direction: str, query: int, document: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(folder)
    reference = load_tokenizer((path / "tokenizer.json").read_bytes())
    reference.enable_truncation(512, strategy="longest_first", direction=direction)
    expected = reference.encode(many(query), many(document))
    [pair] = pairs_of(path, max_tokens=512).encode(
        many(query), [many(document)], RIGHT if direction == "right" else LEFT
    )
    assert pair.ids.tolist() == expected.ids
    assert expected.type_ids == [0] * pair.type_start + [1] * (len(expected.ids) - pair.type_start)


@settings(deadline=None, max_examples=60)
@given(first=st.integers(0, 40), second=st.integers(0, 40), room=st.integers(2, 50))
def test_the_longer_text_is_cut_first_as_in_the_library(first: int, second: int, room: int) -> None:
    reference = word_tokenizer(None)
    reference.enable_truncation(room, strategy="longest_first")
    kept = reference.encode(many(first), many(second)).sequence_ids
    assert longest_first(first, second, room, first > second) == (kept.count(0), kept.count(1))


def test_of_two_over_long_texts_the_one_of_more_characters_keeps_the_odd_token(bert: Path) -> None:
    pairs = pairs_of(bert, max_tokens=12)
    longer, long = many(4001), many(4000)
    [query_longer] = pairs.encode(longer, [long], RIGHT)
    [document_longer] = pairs.encode(long, [longer], RIGHT)
    assert (query_longer.type_start, document_longer.type_start) == (7, 6)
    assert len(query_longer.ids) == len(document_longer.ids) == 12


@pytest.mark.parametrize(
    ("query", "documents", "param", "message"),
    [
        (
            4,
            [2, 3, 4],
            "documents[2]",
            "documents[2] has 11 tokens, those of query included; this model takes at most 10. "
            "Shorten it, or send truncate: true.",
        ),
        (
            7,
            [1],
            "query",
            "query has 10 tokens; this model takes at most 10. Shorten it, or send truncate: true.",
        ),
    ],
)
def test_without_truncation_the_text_at_fault_is_named(
    bert: Path, query: int, documents: list[int], param: str, message: str
) -> None:
    error = refusal(pairs_of(bert, max_tokens=10), many(query), [many(count) for count in documents])
    assert (error.code, error.param, error.message) == ("context_length_exceeded", param, message)


def test_errors_name_the_clients_own_fields(bert: Path) -> None:
    pairs = pairs_of(bert, max_tokens=10)
    names = PairNames(query="text_1[3]", documents="text_2", first_index=3)
    assert refusal(pairs, many(8), [many(1)], names=names).param == "text_1[3]"
    assert refusal(pairs, many(1), [many(8)], names=names).param == "text_2[3]"
    assert refusal(pairs, many(1), [many(8)], names=PairNames(documents="text_2", first_index=None)).param == "text_2"


def test_without_truncation_an_over_long_text_is_refused_unread(bert: Path) -> None:
    pairs, over_long = pairs_of(bert, max_tokens=10), "x" * (10 * MAX_CHARS_PER_TOKEN + 1)
    for query, document, param in ((over_long, "w0", "query"), ("w0", over_long, "documents[0]")):
        error = refusal(pairs, query, [document])
        assert (error.code, error.param) == ("input_too_long", param)


def test_a_document_is_cut_to_the_tokens_that_the_client_asks_for(bert: Path) -> None:
    pairs = pairs_of(bert, max_tokens=10)
    for truncation in (REFUSE, RIGHT, LEFT):
        assert rows(pairs.encode("w0", [words(1, 2, 3, 4)], truncation, max_document_tokens=2)) == [
            ([1, 3, 2, 4, 5, 2], 3)
        ]
    assert rows(pairs.encode("w0", [many(60)], RIGHT, max_document_tokens=50)) == [([1, 3, 2, 3, 4, 5, 6, 7, 8, 2], 3)]
    assert refusal(pairs, "w0", [many(60)], max_document_tokens=50).param == "documents[0]"


@pytest.mark.parametrize("at_most", [5, 400, 3000, 4715, 4716, 10_000])
def test_of_the_tokens_that_the_client_asks_for_the_last_ones_stay_where_the_beginning_is_cut(
    bert: Path, at_most: int
) -> None:
    document = [index % 37 for index in range(4716)]
    [pair] = pairs_of(bert, max_tokens=30).encode("w0", [words(*document)], LEFT, max_document_tokens=at_most)
    expected = [number + 3 for number in document[:at_most][-26:]]
    assert pair.ids.tolist() == [1, 3, 2, *expected, 2]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return find_model("all-MiniLM-L6-v2").path


def test_of_an_over_long_document_only_a_part_is_read(minilm: Path) -> None:
    pairs = pairs_of(minilm, max_tokens=256, vocab_size=30_522)
    began = time.process_time()
    [pair] = pairs.encode("which one?", ["字" * 5_000_000], RIGHT)
    assert time.process_time() - began < 1.0  # the whole takes several seconds
    [expected] = pairs.encode("which one?", ["字" * 300], RIGHT)
    assert rows([pair]) == rows([expected])


def test_minilm_pairs_are_the_librarys(minilm: Path) -> None:
    reference = load_tokenizer((minilm / "tokenizer.json").read_bytes())
    reference.enable_truncation(64, strategy="longest_first")
    rng = random.Random(5)
    spellings = ["the", "naïve", "日本語", "don't", "antidisestablishmentarianism", "...", "[SEP]", "👨‍👩‍👧", "12345"]
    queries = [" ".join(rng.choices(spellings, k=count)) for count in (1, 7, 40)]
    documents = [" ".join(rng.choices(spellings, k=count)) for count in (0, 1, 5, 30, 31, 90)]
    pairs = pairs_of(minilm, max_tokens=64, vocab_size=30_522)
    for query in queries:
        for document, pair in zip(documents, pairs.encode(query, documents, RIGHT), strict=True):
            expected = reference.encode(query, document)
            assert pair.ids.tolist() == expected.ids
            assert pair.type_start == expected.type_ids.index(1)


# --- templates ---

QWEN = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
QWEN_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
GEMMA_INSTRUCTION = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"]
SPELLINGS = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|endoftext|>"


def byte_level(post_processor: str | None = None) -> RustTokenizer:
    """A byte-level BPE with Qwen's special tokens, and with its two others that are not called special."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [QWEN + QWEN_INSTRUCTION, "the quick brown fox jumps over the lazy dog " * 9]
    tokenizer.train_from_iterator(texts * 5, trainer)
    base = tokenizer.get_vocab_size()
    if post_processor == "end":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", base)]
        )
    if post_processor == "bos":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", base + SPECIAL.index("<bos>"))]
        )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def qwen_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RustTokenizer]:
    tokenizer = byte_level()
    return save(tokenizer, tmp_path_factory.mktemp("qwen")), tokenizer


def qwen_pairs(folder: Path, **changes: object) -> PairTokenizer:
    return pairs_of(folder, **{"pair_template": "qwen3-reranker", "has_token_types": False} | changes)


def test_an_unknown_template_is_refused(bert: Path) -> None:
    with pytest.raises(ValueError, match="no template for pairs is called 'mystery'"):
        pairs_of(bert, pair_template="mystery")


def test_qwen_pairs_are_the_official_prompt(qwen_file: tuple[Path, RustTokenizer]) -> None:
    folder, rust = qwen_file
    beginning, rest = QWEN.split("<Instruct>")
    body, end = rest.split("<|im_end|>", 1)
    parts = (beginning, "<Instruct>" + body, "<|im_end|>" + end)
    documents = ["a lazy dog", "", " the fox", "\njumps", "'s", "naïve 日本語"]
    texts = [
        [part.format(instruction=QWEN_INSTRUCTION, query="what is quick?", document=document) for part in parts]
        for document in documents
    ]
    expected = [[token for text in row for token in rust.encode(text).ids] for row in texts]
    pairs = qwen_pairs(folder, max_tokens=2048).encode("what is quick?", documents, REFUSE)
    assert rows(pairs) == [(ids, len(ids)) for ids in expected]
    assert rust.decode(expected[0], skip_special_tokens=False) == "".join(texts[0])


@pytest.mark.parametrize(
    ("of_model", "of_request", "expected"),
    [(None, None, QWEN_INSTRUCTION), ("find twins", None, "find twins"), ("find twins", "", ""), (None, "new", "new")],
)
def test_the_instruction_is_the_requests_or_the_models_or_the_templates(
    qwen_file: tuple[Path, RustTokenizer], of_model: str | None, of_request: str | None, expected: str
) -> None:
    folder, rust = qwen_file
    pairs = qwen_pairs(folder, max_tokens=2048, instruction=of_model)
    [pair] = pairs.encode("fox", ["dog"], REFUSE, instruction=of_request)
    assert rust.decode(pair.ids.tolist(), skip_special_tokens=False) == QWEN.format(
        instruction=expected, query="fox", document="dog"
    )


def test_in_a_template_spelled_special_tokens_stay_text(qwen_file: tuple[Path, RustTokenizer]) -> None:
    folder, rust = qwen_file
    pairs = qwen_pairs(folder, max_tokens=2048)
    [plain] = pairs.encode("fox", ["dog"], REFUSE, instruction="find")
    [pair] = pairs.encode(SPELLINGS, [SPELLINGS], REFUSE, instruction=SPELLINGS)
    added = set(rust.get_added_tokens_decoder())
    assert [token for token in pair.ids.tolist() if token in added] == [
        token for token in plain.ids.tolist() if token in added
    ]
    assert rust.decode(pair.ids.tolist(), skip_special_tokens=False) == QWEN.format(
        instruction=SPELLINGS, query=SPELLINGS, document=SPELLINGS
    )


def test_a_templates_end_stays_and_the_documents_end_is_cut(qwen_file: tuple[Path, RustTokenizer]) -> None:
    folder, rust = qwen_file
    document = "the quick brown fox jumps over the lazy dog " * 100
    [whole] = qwen_pairs(folder, max_tokens=4096).encode("fox", [document], REFUSE)
    end = rust.encode("<|im_end|>" + QWEN.rsplit("<|im_end|>", 1)[1]).ids
    [cut] = qwen_pairs(folder, max_tokens=400).encode("fox", [document], RIGHT)
    assert cut.ids.tolist() == [*whole.ids[: 400 - len(end)].tolist(), *end]
    [over_long] = qwen_pairs(folder, max_tokens=400).encode("fox", [document * 100], RIGHT)
    assert over_long.ids.tolist() == cut.ids.tolist()


def test_a_query_that_fills_a_template_is_refused_even_with_truncation(
    qwen_file: tuple[Path, RustTokenizer],
) -> None:
    folder, _ = qwen_file
    pairs = qwen_pairs(folder, max_tokens=300)
    for truncation in (REFUSE, RIGHT):
        error = refusal(pairs, "the fox " * 150, ["dog"], truncation)
        assert (error.code, error.param) == ("context_length_exceeded", "query")
        assert error.message.endswith("the template included; this model takes at most 300. Shorten it.")
        for name, texts in (("query", ("x" * 9601, "x")), ("instruction", ("x", "x" * 9601))):
            error = refusal(pairs, texts[0], ["dog"], truncation, instruction=texts[1])
            assert (error.code, error.param) == ("input_too_long", name)


def test_a_query_must_leave_a_template_room_for_a_token_of_the_document(
    qwen_file: tuple[Path, RustTokenizer],
) -> None:
    folder, _ = qwen_file
    [most] = qwen_pairs(folder, max_tokens=2048).encode("fox", ["the"], REFUSE)
    limit = len(most.ids)  # " the" is one token
    [pair] = qwen_pairs(folder, max_tokens=limit).encode("fox", ["the"], REFUSE)
    assert pair.ids.tolist() == most.ids.tolist()
    for truncation in (REFUSE, RIGHT):
        error = refusal(qwen_pairs(folder, max_tokens=limit - 1), "fox", ["the"], truncation)
        assert (error.code, error.param) == ("context_length_exceeded", "query")


def test_without_truncation_the_document_that_does_not_fit_a_template_is_named(
    qwen_file: tuple[Path, RustTokenizer],
) -> None:
    folder, _ = qwen_file
    pairs = qwen_pairs(folder, max_tokens=400)
    [whole] = qwen_pairs(folder, max_tokens=4096).encode("fox", ["dog " * 900], REFUSE)
    error = refusal(pairs, "fox", ["dog", "dog " * 900])
    assert (error.code, error.param) == ("context_length_exceeded", "documents[1]")
    assert f"has {len(whole.ids)} tokens, those of query included" in error.message
    error = refusal(pairs, "fox", ["dog", "x" * (400 * MAX_CHARS_PER_TOKEN)])
    assert (error.code, error.param) == ("input_too_long", "documents[1]")


def test_in_a_template_a_document_is_cut_to_the_tokens_that_the_client_asks_for(
    qwen_file: tuple[Path, RustTokenizer],
) -> None:
    folder, _ = qwen_file
    pairs = qwen_pairs(folder, max_tokens=2048)
    [expected] = pairs.encode("fox", ["the quick"], REFUSE)
    [pair] = pairs.encode("fox", ["the quick brown fox"], REFUSE, max_document_tokens=2)
    assert pair.ids.tolist() == expected.ids.tolist()


def test_a_template_is_not_cut_on_the_left(qwen_file: tuple[Path, RustTokenizer]) -> None:
    error = refusal(qwen_pairs(qwen_file[0], max_tokens=2048), "fox", ["dog"], LEFT)
    assert (error.code, error.param) == ("unsupported_parameter", "truncation_direction")


def test_a_tokenizers_own_end_token_closes_the_body_of_a_qwen_pair(
    tmp_path: Path, qwen_file: tuple[Path, RustTokenizer]
) -> None:
    rust = byte_level("end")
    [plain] = qwen_pairs(qwen_file[0], max_tokens=2048).encode("fox", ["dog"], REFUSE)
    [pair] = qwen_pairs(save(rust, tmp_path), max_tokens=2048).encode("fox", ["dog"], REFUSE)
    end = rust.token_to_id("<|endoftext|>")
    assert [token for token in pair.ids.tolist() if token != end] == plain.ids.tolist()
    close = pair.ids.tolist().index(end)
    assert pair.ids[close + 1] == rust.token_to_id("<|im_end|>")


def test_a_tokenizer_without_the_templates_tokens_is_refused(bert: Path) -> None:
    with pytest.raises(ValueError, match=r"<\|im_start\|> is none of its added tokens"):
        qwen_pairs(bert, max_tokens=2048)


def test_a_vocabulary_in_which_text_can_be_a_templates_token_is_refused(tmp_path: Path) -> None:
    tokens = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    rust = RustTokenizer(models.WordLevel({"[UNK]": 0} | {token: i + 1 for i, token in enumerate(tokens)}, "[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(tokens)
    with pytest.raises(ValueError, match="cannot be told from that token"):
        qwen_pairs(save(rust, tmp_path), max_tokens=2048)


def gemma_pairs(folder: Path, **changes: object) -> PairTokenizer:
    return pairs_of(folder, **{"pair_template": "bge-reranker-v2-gemma", "has_token_types": False} | changes)


@pytest.mark.parametrize("post_processor", ["bos", None])
def test_gemma_pairs_are_their_parts_one_behind_the_other(tmp_path: Path, post_processor: str | None) -> None:
    rust = byte_level(post_processor)
    pairs = gemma_pairs(save(rust, tmp_path), max_tokens=512)
    parts = ["A: what is a fox?", "\n", "B: a quick dog", "\n", GEMMA_INSTRUCTION]
    expected = [rust.token_to_id("<bos>")] if post_processor else []
    for part in parts:
        expected += rust.encode(part, add_special_tokens=False).ids
    assert rows(pairs.encode("what is a fox?", ["a quick dog"], REFUSE)) == [(expected, len(expected))]


def test_a_gemma_pair_is_cut_at_its_passages_end(tmp_path: Path) -> None:
    rust = byte_level("bos")
    pairs = gemma_pairs(save(rust, tmp_path), max_tokens=200, instruction="is it?")
    start = [rust.token_to_id("<bos>"), *rust.encode("A: fox", add_special_tokens=False).ids]
    break_, prompt, passage = (
        rust.encode(text, add_special_tokens=False).ids for text in ("\n", "is it?", "B: " + "dog " * 300)
    )
    room = 200 - len(start) - 2 * len(break_) - len(prompt)
    [pair] = pairs.encode("fox", ["dog " * 300], RIGHT)
    assert pair.ids.tolist() == [*start, *break_, *passage[:room], *break_, *prompt]
    assert refusal(pairs, "fox", ["dog " * 300]).param == "documents[0]"
    assert refusal(pairs, "fox " * 200, ["dog"], RIGHT).param == "query"


def test_text_that_spells_a_special_token_is_text_in_a_gemma_pair(tmp_path: Path) -> None:
    rust = byte_level("bos")
    [pair] = gemma_pairs(save(rust, tmp_path), max_tokens=512).encode("<bos>", [SPELLINGS], REFUSE, instruction="<bos>")
    special = {rust.token_to_id(token) for token in SPECIAL}
    assert [index for index, token in enumerate(pair.ids.tolist()) if token in special] == [0]


# --- tokens that the model has no vector for ---


@pytest.mark.parametrize(
    ("query", "document", "param"),
    [("w0 w39", "w1", "query"), ("w0", "w1 w39", "documents[1]"), ("w0[SEP]", "w1 [SEP]", None)],
)
def test_a_text_with_a_token_beyond_the_vocabulary_is_named(
    bert: Path, query: str, document: str, param: str | None
) -> None:
    pairs = pairs_of(bert, max_tokens=10, vocab_size=42)
    if param is None:
        pairs.encode(query, ["w2", document], REFUSE)
        return
    error = refusal(pairs, query, ["w2", document])
    assert (error.code, error.param) == ("invalid_token_id", param)
    assert error.message == f"{param} holds the token w39, which this model has no vector for."


def test_what_is_cut_off_a_pair_may_be_beyond_the_vocabulary(bert: Path) -> None:
    pairs = pairs_of(bert, max_tokens=10, vocab_size=42)
    assert rows(pairs.encode("w0", [words(1, 2, 3, 4, 5, 6, 39)], RIGHT)) == [([1, 3, 2, 4, 5, 6, 7, 8, 9, 2], 3)]


@pytest.fixture(scope="module")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The file of a template's model with one token more, which text can be, and the vocabulary without it."""
    tokenizer = byte_level()
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<image>"])
    return save(tokenizer, tmp_path_factory.mktemp("image")), vocab_size


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        (("an <image>", "find", "dog"), "query"),
        (("fox", "an <image>", "dog"), "instruction"),
        (("fox", "find", "an <image>"), "documents[0]"),
    ],
)
@pytest.mark.parametrize("template", ["qwen3-reranker", "bge-reranker-v2-gemma"])
def test_in_a_template_the_text_with_a_token_beyond_the_vocabulary_is_named(
    image_file: tuple[Path, int], texts: tuple[str, str, str], param: str, template: str
) -> None:
    folder, vocab_size = image_file
    pairs = pairs_of(folder, max_tokens=2048, vocab_size=vocab_size, pair_template=template, has_token_types=False)
    query, instruction, document = texts
    error = refusal(pairs, query, [document], instruction=instruction)
    assert (error.code, error.param) == ("invalid_token_id", param)
    pairs.encode("fox", ["dog"], REFUSE, instruction="find")


def test_a_template_whose_tokens_are_beyond_the_vocabulary_is_refused(image_file: tuple[Path, int]) -> None:
    with pytest.raises(ValueError, match="the model's vocabulary has"):
        qwen_pairs(image_file[0], max_tokens=2048, vocab_size=image_file[1] - 1)


# --- threads ---


@pytest.mark.thorough
@pytest.mark.slow
def test_threads_share_a_tokenizer_of_texts_and_pairs(minilm: Path, qwen_file: tuple[Path, RustTokenizer]) -> None:
    facts = facts_of(minilm, max_tokens=256, vocab_size=30_522)
    tokenizer = Tokenizer(facts)
    own, template = pair_tokenizer(facts, tokenizer), qwen_pairs(qwen_file[0], max_tokens=1024)
    rng = random.Random(11)
    texts = [" ".join(["word"] * rng.choice([1, 2, 5, 20, 60, 300, 2000])) for _ in range(60)]

    def call(index: int) -> list[list[int]]:
        text, other = texts[index % 60], texts[(index * 7 + 1) % 60]
        if index % 3 == 0:
            return [ids.tolist() for ids in tokenizer.encode([text, other], RIGHT)]
        pairs = own if index % 3 == 1 else template
        return [pair.ids.tolist() for pair in pairs.encode("which word?", [text, other], RIGHT)]

    expected = [call(index) for index in range(180)]
    failures: list[object] = []

    def run(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(500):
            index = order.randrange(180)
            try:
                if call(index) != expected[index]:
                    failures.append(index)
            except BaseException as error:  # noqa: BLE001  # a panic is none of Exception's
                failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
