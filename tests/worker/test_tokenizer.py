"""A tokenizer.json is all there is to a tokenizer, or the start is refused with the file and the field named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.models import edit_json, tokenizer, write_bert, write_json
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import JsonFile, ModelError
from worker.checkpoint.tokenizer import TokenizerFile

VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}


def made(*, cased: bool = False, **normalization: object) -> Tokenizer:
    """A BERT's tokenizer of five words."""
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**{"lowercase": not cased} | normalization)  # type: ignore[arg-type]  # options by name
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def of_bytes(*, prefix: bool, in_sequence: bool = False) -> Tokenizer:
    """A RoBERTa's tokenizer: bytes, with or without a space before a text."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), level]) if in_sequence else level
    return tokenizer


def of_pieces(scheme: str) -> Tokenizer:
    """An XLM-RoBERTa's tokenizer: pieces, with or without a space before a text."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    )
    return tokenizer


def read(
    folder: Path, tokenizer: Tokenizer, settings: dict[str, object] | None = None, **config: object
) -> TokenizerFile:
    """What is read of a folder with these files; without `settings` it has no tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        write_json(folder / "tokenizer_config.json", settings)
    return TokenizerFile.read(folder, JsonFile(folder / "config.json", {"vocab_size": 256} | config))


# --- the file itself, and the ids that it makes ---


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Checkpoint.read(folder)


def test_words_without_a_row_in_the_embedding_table_are_refused(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    (folder / "tokenizer.json").write_text(tokenizer(num_words=100).to_str())

    with pytest.raises(
        ModelError, match=r"tokenizer\.json: its ids go up to 102, but .*config\.json: vocab_size is 64"
    ):
        Checkpoint.read(folder)


def test_added_tokens_beyond_the_embedding_table_are_named_and_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """EmbeddingGemma's way: one token for images, which its table of embeddings has no row for."""
    tokenizer = made()
    tokenizer.add_special_tokens(["<image_soft_token>"])

    with caplog.at_level(logging.INFO):
        file = read(tmp_path, tokenizer, {"tokenizer_class": "BertTokenizer"}, vocab_size=len(VOCABULARY))

    assert "5 rows, which no text may spell: <image_soft_token>" in caplog.text
    assert file.vocabulary() == VOCABULARY


def test_a_vocabulary_that_fits_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        read(tmp_path, made(), vocab_size=len(VOCABULARY))

    assert not caplog.text


@pytest.mark.parametrize("pair", ["[CLS] $A [END]", "[CLS] $A [END] $B"])
def test_added_tokens_that_stand_around_texts_need_a_row(tmp_path: Path, pair: str) -> None:
    """Around a single text or around a pair: both are refused."""
    tokenizer = made()
    tokenizer.add_special_tokens(["[END]"])
    single = "[CLS] $A" if "$B" in pair else pair
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair if "$B" in pair else "$A $B",
        special_tokens=[("[CLS]", 1), ("[END]", len(VOCABULARY))],
    )

    with pytest.raises(ModelError, match=r"tokenizer\.json: its ids go up to 5, but .*vocab_size is 5"):
        read(tmp_path, tokenizer, vocab_size=len(VOCABULARY))


def test_a_separator_without_a_row_is_refused(tmp_path: Path) -> None:
    tokenizer = made()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert read(tmp_path, tokenizer).separator_id() == len(VOCABULARY)

    file = read(tmp_path, tokenizer, vocab_size=len(VOCABULARY))

    with pytest.raises(ModelError, match=r"sep_token: '<\|endoftext\|>' is no token of tokenizer\.json"):
        file.separator_id()


def test_special_tokens_that_fill_the_limit_are_refused(tmp_path: Path) -> None:
    file = read(tmp_path, made())
    file.check_room(None)
    file.check_room(3)

    with pytest.raises(ModelError, match=r"tokenizer\.json: its 2 special tokens alone fill the 2 that"):
        file.check_room(2)


# --- settings beside it ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}, "auto_map: this tokenizer brings its own code"),
        ({"split_special_tokens": True}, "split_special_tokens: true is not supported"),
        ({"add_eos_token": True, "eos_token": "w1"}, r"add_eos_token: true, but tokenizer\.json does not add 'w1'"),
        ({"add_bos_token": True, "bos_token": {"content": "w1"}}, "add_bos_token: true, but"),
        ({"added_tokens_decoder": ["a"]}, "added_tokens_decoder: a map of ids to tokens"),
        ({"added_tokens_decoder": {"3": {"content": 7}}}, "added_tokens_decoder: {'content': 7} is no token"),
        (
            {"added_tokens_decoder": {"60": {"content": "[NEW]", "special": True}}},
            r"added_tokens_decoder: '\[NEW\]' is no added token of tokenizer\.json",
        ),
        (
            {"added_tokens_decoder": {"4": {"content": "w1", "special": False}}},
            "added_tokens_decoder: 'w1' is no added token",
        ),
    ],
)
def test_what_tokenizer_json_does_not_do_stops_the_start(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "tokenizer_config.json", settings)

    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {message}"):
        Checkpoint.read(folder)


def test_tokens_that_tokenizer_json_adds_may_be_asked_for_besides(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    settings = {"add_bos_token": True, "bos_token": "[CLS]", "add_eos_token": True, "eos_token": {"content": "[SEP]"}}
    write_json(folder / "tokenizer_config.json", settings)

    assert Checkpoint.read(folder).architecture == "BertModel"


def test_added_tokens_that_both_files_have_are_accepted(tmp_path: Path) -> None:
    tokenizer = made()
    tokenizer.add_tokens([AddedToken("new", special=False)])
    listed = {"1": {"content": "[CLS]", "special": True}, "5": {"content": "new", "special": False}}

    read(tmp_path, tokenizer, {"added_tokens_decoder": listed})


def test_the_side_that_settings_cut_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        read(tmp_path, made(), {"truncation_side": "left"})

    assert "truncation_side: here a request says which end of a text is cut" in caplog.text


# --- normalisation that transformers makes anew ---

CASED, SMALL = {"do_lower_case": False}, {"do_lower_case": True}


@pytest.mark.parametrize(
    ("tokenizer", "settings", "config"),
    [
        pytest.param(made(), {**SMALL, "strip_accents": None, "tokenizer_class": "BertTokenizer"}, {}, id="MiniLM"),
        pytest.param(made(), None, {"model_type": "bert"}, id="uncased_by_default"),
        pytest.param(made(), {}, {"model_type": "distilbert"}, id="nothing_said"),
        pytest.param(made(cased=True), CASED, {"model_type": "bert"}, id="LaBSE"),
        pytest.param(made(cased=True), {**CASED, "tokenizer_class": "DistilBertTokenizer"}, {}, id="distiluse"),
        pytest.param(made(strip_accents=True), {"tokenizer_class": "MPNetTokenizerFast"}, {}, id="strips_as_it_would"),
        pytest.param(
            made(cased=True, strip_accents=False), {**CASED, "strip_accents": None}, {"model_type": "bert"}, id="keeps"
        ),
        pytest.param(made(strip_accents=False), {"strip_accents": False}, {"model_type": "bert"}, id="keeps_by_word"),
        pytest.param(made(cased=True), {"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "bert"}, id="e5"),
        pytest.param(made(cased=True), {"tokenizer_class": "BertTokenizer"}, {"model_type": "modernbert"}, id="modern"),
        pytest.param(made(cased=True), SMALL, {"model_type": "new"}, id="a_type_without_a_class"),
        pytest.param(made(cased=True), SMALL, {}, id="no_type"),
        pytest.param(tokenizer(), {**SMALL, "tokenizer_class": "BertTokenizer"}, {}, id="another_normalizer"),
    ],
)
def test_settings_that_say_what_the_normalizer_does_are_accepted(
    tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, object] | None, config: dict[str, object]
) -> None:
    read(tmp_path, tokenizer, settings, **config)


BERT = {"model_type": "bert"}


@pytest.mark.parametrize(
    ("tokenizer", "settings", "config", "message"),
    [
        (made(cased=True), SMALL, BERT, r"do_lower_case: True, but the normalizer of tokenizer\.json has lowercase F"),
        (made(), CASED, BERT, "do_lower_case: False, but the normalizer"),
        (made(cased=True), None, BERT, "do_lower_case: missing, which for a BertTokenizer is True, but the norm"),
        (made(cased=True), {}, {"model_type": "nomic_bert"}, "do_lower_case: missing, which for a BertTok"),
        (made(cased=True), {}, {"model_type": "mpnet"}, "do_lower_case: missing, which for a MPNetTok"),
        (made(cased=True), {}, {"tokenizer_class": "BertTokenizerFast"}, "do_lower_case: missing, which for a BertTo"),
        (made(cased=True), {"tokenizer_class": "ElectraTokenizerFast"}, {}, "do_lower_case: missing, which for a El"),
        (made(), {**CASED, "tokenizer_class": "DistilBertTokenizer"}, {}, "do_lower_case: False, but the normalizer"),
        (made(), {**CASED, "tokenizer_class": "MPNetTokenizer"}, {}, "do_lower_case: False, but the normalizer"),
        (made(), {"strip_accents": False}, BERT, "strip_accents: False, but the normalizer"),
        (made(strip_accents=False), {}, BERT, "strip_accents: missing, which for a BertTokenizer is True, but"),
        (made(cased=True), {**CASED, "strip_accents": True}, BERT, "strip_accents: True, but the normalizer"),
        (made(), {"tokenize_chinese_chars": False}, BERT, "tokenize_chinese_chars: False, but the normalizer"),
        (made(handle_chinese_chars=False), {}, BERT, "tokenize_chinese_chars: missing, which for a BertTokenizer"),
        (made(), {"do_lower_case": 1}, BERT, "do_lower_case: true or false is needed"),
    ],
)
def test_settings_that_contradict_the_normalizer_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, object] | None, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {message}"):
        read(tmp_path, tokenizer, settings, **config)


def test_a_normalizer_among_others_is_compared(tmp_path: Path) -> None:
    tokenizer = made(cased=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), tokenizer.normalizer])
    read(tmp_path, tokenizer, CASED, model_type="bert")

    with pytest.raises(ModelError, match=r"tokenizer_config\.json: do_lower_case: True, but"):
        read(tmp_path, tokenizer, SMALL, model_type="bert")


def test_a_normalizer_that_cleans_nothing_is_refused_where_a_class_would_clean(tmp_path: Path) -> None:
    read(tmp_path, made(clean_text=False), {"tokenizer_class": "PreTrainedTokenizerFast"})

    with pytest.raises(ModelError, match=r"tokenizer\.json: normalizer: clean_text is not true"):
        read(tmp_path, made(clean_text=False), {"tokenizer_class": "BertTokenizer"})


# --- a space before each text ---


@pytest.mark.parametrize(
    ("tokenizer", "settings", "config"),
    [
        pytest.param(of_bytes(prefix=False), {"add_prefix_space": False}, {"model_type": "roberta"}, id="roberta"),
        pytest.param(of_bytes(prefix=False), None, {"model_type": "roberta"}, id="nothing_said"),
        pytest.param(
            of_bytes(prefix=True), {"add_prefix_space": True, "tokenizer_class": "RobertaTokenizer"}, {}, id="by_word"
        ),
        pytest.param(
            of_bytes(prefix=False, in_sequence=True),
            {"add_prefix_space": False, "tokenizer_class": "Qwen2Tokenizer"},
            {"model_type": "qwen3"},
            id="Qwen3-Embedding",
        ),
        pytest.param(of_bytes(prefix=True), {}, {"model_type": "modernbert"}, id="ModernBERT"),
        pytest.param(of_bytes(prefix=True), {"tokenizer_class": "TokenizersBackend"}, {}, id="as_the_file"),
        pytest.param(of_pieces("always"), {"tokenizer_class": "XLMRobertaTokenizer"}, {}, id="e5"),
        pytest.param(of_pieces("first"), None, {"model_type": "camembert"}, id="camembert"),
        pytest.param(tokenizer(), {"add_prefix_space": True}, {"model_type": "roberta"}, id="another_pre_tokenizer"),
    ],
)
def test_settings_that_say_what_the_pre_tokenizer_does_are_accepted(
    tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, object] | None, config: dict[str, object]
) -> None:
    read(tmp_path, tokenizer, settings, **config)


@pytest.mark.parametrize(
    ("tokenizer", "settings", "config", "message"),
    [
        (
            of_bytes(prefix=False),
            {"add_prefix_space": True},
            {"model_type": "roberta"},
            "True, but the pre-.* no space",
        ),
        (of_bytes(prefix=True), {"add_prefix_space": False}, {"model_type": "roberta"}, "False, but .* puts a space"),
        (of_bytes(prefix=True), None, {"model_type": "roberta"}, "missing, which for a RobertaTokenizer is False"),
        (
            of_bytes(prefix=True),
            {"tokenizer_class": "RobertaTokenizerFast"},
            {},
            "missing, which for a RobertaTokenize",
        ),
        (of_bytes(prefix=True, in_sequence=True), {}, {"model_type": "qwen3"}, "missing, which for a Qwen2Tokenizer"),
        (of_pieces("never"), {}, {"model_type": "xlm-roberta"}, "missing, which for a XLMRobertaTokenizer is True"),
        (of_pieces("always"), {"add_prefix_space": False}, {"model_type": "camembert"}, "False, but .* puts a space"),
    ],
)
def test_settings_that_contradict_the_pre_tokenizer_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, object] | None, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: add_prefix_space: {message}"):
        read(tmp_path, tokenizer, settings, **config)


def test_a_contradiction_stops_the_start_of_a_whole_folder(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    normalizer = json.loads(made(cased=True).to_str())["normalizer"]
    edit_json(folder / "tokenizer.json", normalizer=normalizer)
    write_json(folder / "tokenizer_config.json", {**CASED, "tokenizer_class": "BertTokenizer"})
    Checkpoint.read(folder)

    edit_json(folder / "tokenizer_config.json", do_lower_case=True)

    with pytest.raises(ModelError, match=r"tokenizer_config\.json: do_lower_case: True, but the normalizer"):
        Checkpoint.read(folder)
