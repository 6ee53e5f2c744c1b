"""What a folder declares is either understood or refused, with the file and the field named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.models import edit_json, tokenizer, write_bert, write_json, write_pplx, write_qwen3
from worker.checkpoint import Checkpoint, ModelError

POOLING = "1_Pooling/config.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def modules(*names: str) -> list[dict[str, object]]:
    return [{"idx": i, "name": str(i), "path": f"{i}_X" if i else "", "type": name} for i, name in enumerate(names)]


def test_a_whole_folder_is_understood(folder: Path) -> None:
    write_json(folder / TRANSFORMER, {"max_seq_length": 24, "do_lower_case": True})
    write_json(folder / SETTINGS, {"__version__": {}, "prompts": {"query": "q: "}, "default_prompt_name": "query"})

    checkpoint = Checkpoint.read(folder)

    assert checkpoint.architecture == "BertModel"
    assert checkpoint.pooling == "mean"
    assert checkpoint.normalize
    assert checkpoint.encodings == ["float32"]
    assert checkpoint.lower_case
    assert checkpoint.length_limit == 24
    assert checkpoint.prompts == {"query": "q: "}
    assert checkpoint.default_prompt_name == "query"


def test_a_folder_without_modules_is_pooled_by_the_mean_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "modules.json").unlink()
    write_json(
        folder / TRANSFORMER, {"max_seq_length": 7, "do_lower_case": True}
    )  # not read, as by sentence-transformers

    with caplog.at_level(logging.INFO):
        checkpoint = Checkpoint.read(folder)

    assert checkpoint.pooling == "mean"
    assert not checkpoint.normalize
    assert not checkpoint.lower_case
    assert checkpoint.length_limit != 7
    assert "no modules.json: mean pooling, no normalisation" in caplog.text


def test_later_names_of_the_module_classes_are_understood(folder: Path) -> None:
    entries = modules(
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    )
    entries[1]["path"] = "1_Pooling"
    write_json(folder / "modules.json", entries)

    assert not Checkpoint.read(folder).normalize


def test_a_quantising_checkpoint_offers_its_encodings(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(write_pplx(tmp_path))

    assert checkpoint.architecture == "PPLXQwen3Model"
    assert checkpoint.encodings == ["float32", "int8", "binary"]
    assert not checkpoint.normalize


def test_a_last_token_checkpoint_is_understood(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path)
    write_json(folder / SETTINGS, {"prompts": {"query": "Instruct: x\nQuery:", "document": ""}, "__version__": {}})

    checkpoint = Checkpoint.read(folder)

    assert (checkpoint.pooling, checkpoint.normalize, checkpoint.encodings) == ("last", True, ["float32"])
    assert checkpoint.prompts == {"query": "Instruct: x\nQuery:", "document": ""}


def test_a_transformer_in_a_folder_of_its_own_is_found(folder: Path) -> None:
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).rename(inner / name)
    entries = modules("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
    entries[0]["path"], entries[1]["path"] = "0_Transformer", "1_Pooling"
    write_json(folder / "modules.json", entries)

    assert Checkpoint.read(folder).folder == inner


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode": "cls"}, {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}]
)
def test_both_ways_of_naming_a_pooling_are_understood(folder: Path, pooling: dict[str, object]) -> None:
    write_json(folder / POOLING, pooling)

    assert Checkpoint.read(folder).pooling == "cls"


@pytest.mark.parametrize(
    ("declared", "tokenizer_limit", "expected"),
    [(24, 512, 24), (512, 24, 512), (None, 24, 24), (None, int(1e30), None), (None, None, None)],
)
def test_the_declared_length_overrides_the_tokenizers(
    folder: Path, declared: int | None, tokenizer_limit: int | None, expected: int | None
) -> None:
    write_json(folder / TRANSFORMER, {"max_seq_length": declared})
    write_json(folder / "tokenizer_config.json", {"model_max_length": tokenizer_limit})

    assert Checkpoint.read(folder).length_limit == expected


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["sentence_transformers.models.Transformer", "sentence_transformers.models.Dense"], "models.Dense'"),
        (["sentence_transformers.models.Transformer", "custom.Pooling"], "'custom.Pooling' is not supported"),
        (["sentence_transformers.models.Transformer"], "Pooling and perhaps Normalize"),
        (["sentence_transformers.models.Pooling", "sentence_transformers.models.Transformer"], "are supported, not"),
        (
            [
                "sentence_transformers.models.Transformer",
                "sentence_transformers.models.Pooling",
                "sentence_transformers.models.Normalize",
                "st_quantize.FlexibleQuantizer",
            ],
            "are supported, not",
        ),
        (["sentence_transformers.models.Transformer", "other.FlexibleQuantizer"], "'other.FlexibleQuantizer' is not"),
        (["sentence_transformers.models.Transformer", "st_quantize.Quantizer"], "'st_quantize.Quantizer' is not"),
    ],
)
def test_modules_that_are_not_supported_are_refused(folder: Path, types: list[str], message: str) -> None:
    write_json(folder / "modules.json", modules(*types))

    with pytest.raises(ModelError, match=rf"modules\.json: type: .*{message}"):
        Checkpoint.read(folder)


def test_a_module_outside_the_folder_is_refused(folder: Path) -> None:
    entries = modules("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
    entries[1]["path"] = "../elsewhere"
    write_json(folder / "modules.json", entries)

    with pytest.raises(ModelError, match=r"modules\.json: path: '\.\./elsewhere' leads out"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling_mode_cls_token": True}, "pooling_mode_cls_token, pooling_mode_mean_tokens: several"),
        ({"pooling_mode_mean_tokens": False}, "pooling_mode: one of cls, mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode": "sum"}, "pooling_mode: one of cls, mean"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens: this pooling is not"),
        ({"pooling_mode_mean_tokens": "yes"}, "pooling_mode_mean_tokens: true or false"),
        ({"word_embedding_dimension": 99}, "word_embedding_dimension: 99, but the model is 32 wide"),
        ({"attention_heads": 3}, "attention_heads: a field that is not understood"),
    ],
)
def test_a_pooling_that_is_not_supported_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_json(folder / POOLING, **changes)

    with pytest.raises(ModelError, match=f"{POOLING}: {message}"):
        Checkpoint.read(folder)


def test_prompts_that_are_not_pooled_are_refused(folder: Path) -> None:
    edit_json(folder / POOLING, include_prompt=False)
    assert Checkpoint.read(folder).prompts == {}
    write_json(folder / SETTINGS, {"prompts": {"query": "q: "}})

    with pytest.raises(ModelError, match=f"{POOLING}: include_prompt: false is not supported"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (SETTINGS, {"prompts": {"query": 3}}, "prompts: a map of names to texts"),
        (SETTINGS, {"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name: 'query' is none"),
        (SETTINGS, {"model_type": "SparseEncoder"}, "model_type: 'SparseEncoder'"),
        (SETTINGS, {"truncate_dim": 16}, "truncate_dim: a field that is not understood"),
        (TRANSFORMER, {"max_seq_length": "long"}, "max_seq_length: a positive integer"),
        (TRANSFORMER, {"tokenizer_args": {}}, "tokenizer_args: a field that is not understood"),
        (TRANSFORMER, {"transformer_task": "fill-mask"}, "transformer_task: only 'feature-extraction'"),
    ],
)
def test_settings_that_are_not_understood_are_refused(
    folder: Path, file: str, values: dict[str, object], message: str
) -> None:
    write_json(folder / file, values)

    with pytest.raises(ModelError, match=f"{file}: {message}"):
        Checkpoint.read(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", POOLING])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ModelError, match=f"{name} is missing"):
        Checkpoint.read(folder)


def test_a_tokenizer_with_more_words_than_the_embedding_table_has_rows_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer(num_words=100).to_str())

    with pytest.raises(
        ModelError, match=r"tokenizer\.json: its ids go up to 102, but .*config\.json: vocab_size is 64"
    ):
        Checkpoint.read(folder)


def test_a_file_that_is_no_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Checkpoint.read(folder)
