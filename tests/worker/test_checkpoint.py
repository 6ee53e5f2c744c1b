"""What a folder declares is either understood or refused, with the file and the field named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.models import HIDDEN_SIZE, edit_json, write_bert, write_json, write_pplx, write_qwen3
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.checkpoint.modules import CutStage, DenseStage, NormStage, UnitStage

POOLING = "1_Pooling/config.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def modules(*names: str) -> list[dict[str, object]]:
    return [{"idx": i, "name": str(i), "path": f"{i}_X" if i else "", "type": name} for i, name in enumerate(names)]


def library(*classes: str) -> list[str]:
    return [f"sentence_transformers.models.{name}" for name in classes]


def test_a_whole_folder_is_understood(folder: Path) -> None:
    write_json(folder / TRANSFORMER, {"max_seq_length": 24, "do_lower_case": True})
    write_json(folder / SETTINGS, {"__version__": {}, "prompts": {"query": "q: "}, "default_prompt_name": "query"})

    checkpoint = Checkpoint.read(folder)

    assert checkpoint.architecture == "BertModel"
    assert checkpoint.poolings == ("mean",)
    assert checkpoint.include_prompt
    assert (checkpoint.stages, checkpoint.dimensions, checkpoint.normalize) == ((), HIDDEN_SIZE, True)
    assert checkpoint.encodings == ["float32"]
    assert checkpoint.lower_case
    assert checkpoint.length_limit == 24
    assert checkpoint.prompts == {"query": "q: "}
    assert checkpoint.default_prompt_name == "query"


def test_a_folder_without_modules_is_pooled_by_the_mean_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "modules.json").unlink()
    # Neither of these is read, as by sentence-transformers.
    write_json(folder / TRANSFORMER, {"max_seq_length": 7, "do_lower_case": True})
    write_json(folder / SETTINGS, {"prompts": {"query": "q: "}, "default_prompt_name": "query"})

    with caplog.at_level(logging.INFO):
        checkpoint = Checkpoint.read(folder)

    assert checkpoint.poolings == ("mean",)
    assert not checkpoint.normalize
    assert not checkpoint.lower_case
    assert checkpoint.length_limit != 7
    assert (checkpoint.prompts, checkpoint.default_prompt_name) == ({}, None)
    assert "no modules.json: mean pooling, no normalisation, no prompts" in caplog.text


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
    assert (checkpoint.poolings, checkpoint.include_prompt) == (("mean",), True)
    assert checkpoint.length_limit == 131_072  # of its tokenizer; its position table sets a lower one


def test_a_last_token_checkpoint_is_understood(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path)
    write_json(folder / SETTINGS, {"prompts": {"query": "Instruct: x\nQuery:", "document": ""}, "__version__": {}})

    checkpoint = Checkpoint.read(folder)

    assert (checkpoint.poolings, checkpoint.normalize, checkpoint.encodings) == (("last",), True, ["float32"])
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
    ("pooling", "expected"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["lasttoken", "cls"]}, ("last", "cls")),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "cls", "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_weightedmean_tokens": True}, ("weighted_mean", "last")),
        ({}, ("mean",)),
    ],
)
def test_all_ways_of_naming_poolings_are_understood(
    folder: Path, pooling: dict[str, object], expected: tuple[str, ...]
) -> None:
    write_json(folder / POOLING, pooling)

    checkpoint = Checkpoint.read(folder)

    assert checkpoint.poolings == expected
    assert checkpoint.dimensions == len(expected) * HIDDEN_SIZE


def test_what_follows_the_pooling_is_read_in_its_order(folder: Path) -> None:
    dense = {"in_features": HIDDEN_SIZE, "out_features": 8}
    for name, config in (("2_X", dense), ("4_X", {"dimension": 8})):
        write_json(folder / name / "config.json", config)
        (folder / name / "model.safetensors").touch()
    write_json(folder / POOLING, {"pooling_mode": "mean", "include_prompt": False})
    (folder / "1_Pooling").rename(folder / "1_X")
    write_json(folder / "modules.json", modules(*library("Transformer", "Pooling", "Dense", "Normalize", "LayerNorm")))

    checkpoint = Checkpoint.read(folder)

    assert not checkpoint.include_prompt
    assert checkpoint.stages == (
        DenseStage("2_X", HIDDEN_SIZE, 8, has_bias=True, activation="Tanh", has_residual=False),
        UnitStage(),
        NormStage("4_X", 8),
    )
    assert (checkpoint.dimensions, checkpoint.normalize) == (8, False)


@pytest.mark.parametrize(
    ("truncate_dim", "stages", "dimensions", "normalize"),
    [(12, (UnitStage(), CutStage(12)), 12, False), (HIDDEN_SIZE, (), HIDDEN_SIZE, True), (None, (), HIDDEN_SIZE, True)],
)
def test_truncate_dim_cuts_rows_that_are_wider(
    folder: Path, truncate_dim: int | None, stages: tuple[object, ...], dimensions: int, normalize: bool
) -> None:
    write_json(folder / SETTINGS, {"truncate_dim": truncate_dim})

    checkpoint = Checkpoint.read(folder)

    assert (checkpoint.stages, checkpoint.dimensions, checkpoint.normalize) == (stages, dimensions, normalize)


@pytest.mark.parametrize(
    ("settings", "prompts", "default"),
    [
        ({"prompts": {"query": None, "document": "d: "}}, {"query": "", "document": "d: "}, None),
        ({"prompts": None}, {}, None),
        ({"prompts": {}, "default_prompt_name": "query"}, {}, None),
        ({"prompts": {"a": "b"}, "default_prompt_name": "a", "requirements": {"x": ">1"}}, {"a": "b"}, "a"),
        ({"similarity_fn_name": "dot", "model_type": "SentenceTransformer"}, {}, None),
    ],
)
def test_prompts_are_read_as_sentence_transformers_reads_them(
    folder: Path, settings: dict[str, object], prompts: dict[str, str], default: str | None
) -> None:
    write_json(folder / SETTINGS, settings)

    checkpoint = Checkpoint.read(folder)

    assert (checkpoint.prompts, checkpoint.default_prompt_name) == (prompts, default)


def test_the_former_file_names_of_the_transformers_settings_are_read(folder: Path) -> None:
    write_json(folder / TRANSFORMER, {})
    write_json(folder / "sentence_xlnet_config.json", {"max_seq_length": 3})
    write_json(folder / "sentence_camembert_config.json", {"max_seq_length": 5})

    assert Checkpoint.read(folder).length_limit == 5


@pytest.mark.parametrize(
    "values",
    [
        {"model_args": {"trust_remote_code": True, "torch_dtype": "bfloat16"}, "config_args": {}},
        {"processor_kwargs": {"padding_side": "left"}, "config_kwargs": {"use_cache": False}},
        {"unpad_inputs": True, "cache_dir": None, "processing_kwargs": {}, "query_length": None},
        {"modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}},
    ],
)
def test_settings_that_change_no_numbers_are_passed_over(folder: Path, values: dict[str, object]) -> None:
    before = Checkpoint.read(folder)
    write_json(folder / TRANSFORMER, values)

    assert Checkpoint.read(folder) == before


def test_a_former_name_of_the_tokenizers_limit_is_understood(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"max_len": 11})

    assert Checkpoint.read(folder).length_limit == 11


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
        (library("Transformer", "CNN"), r"module 'sentence_transformers.models.CNN' is not supported"),
        (library("Transformer", "LSTM"), r"module 'sentence_transformers.models.LSTM' is not supported"),
        (library("Transformer", "WeightedLayerPooling"), r"models.WeightedLayerPooling' is not supported"),
        (library("Asym"), r"module 'sentence_transformers.models.Asym' is not supported"),
        (library("Router"), r"module 'sentence_transformers.models.Router' is not supported"),
        (library("StaticEmbedding"), r"module 'sentence_transformers.models.StaticEmbedding' is not supported"),
        (library("CLIPModel"), r"module 'sentence_transformers.models.CLIPModel' is not supported"),
        (library("Transformer", "WordWeights"), r"models.WordWeights' is not supported"),
        (library("Transformer", "Pooling", "SparseAutoEncoder"), r"models.SparseAutoEncoder' is not supported"),
        (library("MLMTransformer"), r"what may follow are supported, not \['MLMTransformer'\]"),
        (library("Transformer", "SpladePooling", "Normalize"), r"supported, not .*'SpladePooling', 'Normalize'"),
        (library("Transformer", "Pooling", "MultiVectorMask"), r"supported, not .*'Pooling', 'MultiVectorMask'"),
        ([*library("Transformer"), "custom.Pooling"], r"module 'custom.Pooling' is code of others"),
        (["custom_st.Transformer"], r"module 'custom_st.Transformer' is code of others"),
        (["pylate.models.Dense.Dense"], r"module 'pylate.models.Dense.Dense' is code of others"),
        (["other.FlexibleQuantizer"], r"module 'other.FlexibleQuantizer' is code of others"),
        (["st_quantize.Quantizer"], r"module 'st_quantize.Quantizer' is code of others"),
        ([""], r"module '' is code of others"),
        (library("Transformer"), r"what may follow are supported, not \['Transformer'\]"),
        (library("Pooling", "Transformer"), r"what may follow are supported, not \['Pooling', 'Transformer'\]"),
        (library("Transformer", "Dense", "Pooling"), r"what may follow are supported, not .*'Dense', 'Pooling'"),
        (library("Transformer", "Pooling", "Pooling"), r"what may follow are supported, not .*'Pooling', 'Pooling'"),
    ],
)
def test_modules_that_are_not_supported_are_refused(folder: Path, types: list[str], message: str) -> None:
    write_json(folder / "modules.json", modules(*types))

    with pytest.raises(ModelError, match=rf"modules\.json: type: .*{message}"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    "types",
    [
        [*library("Transformer", "Pooling", "Normalize"), "st_quantize.FlexibleQuantizer"],
        [*library("Transformer", "Pooling"), "st_quantize.FlexibleQuantizer", *library("Normalize")],
    ],
)
def test_a_quantiser_that_is_not_alone_behind_the_pooling_is_refused(tmp_path: Path, types: list[str]) -> None:
    folder = write_pplx(tmp_path)
    (folder / "1_Pooling").rename(folder / "1_X")
    write_json(folder / "modules.json", modules(*types))

    with pytest.raises(ModelError, match=r"type: FlexibleQuantizer is supported directly after the Pooling, not"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kwargs": "task"}, "kwargs: a list of names is needed, not 'task'"),
        ({"kwargs": {"task": "retrieval"}}, "kwargs: a list of names is needed, not {'task': 'retrieval'}"),
        ({"kwargs": ["task", None]}, r"kwargs: a list of names is needed, not \['task', None\]"),
        ({"name": "1"}, r"name: \['1', '1'\]: each module needs a name of its own"),
        ({"revision": "main"}, "revision: a field that is not understood"),
    ],
)
def test_an_entry_that_is_not_understood_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    entries = modules(*library("Transformer", "Pooling"))
    write_json(folder / "modules.json", [entries[0] | changes, entries[1]])

    with pytest.raises(ModelError, match=rf"modules\.json: {message}"):
        Checkpoint.read(folder)


def test_arguments_that_a_module_may_be_given_change_nothing(folder: Path) -> None:
    path = folder / "modules.json"
    plain = Checkpoint.read(folder)
    write_json(path, [entry | {"kwargs": ["task", "quantization"]} for entry in json.loads(path.read_text())])

    assert Checkpoint.read(folder) == plain


def test_an_adapter_is_refused(folder: Path) -> None:
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})

    with pytest.raises(ModelError, match=r"adapter_config\.json: adapters are not supported"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens: one of them has to be true"),
        ({"pooling_mode": "cls"}, "pooling_mode: 'cls' contradicts the flags beside it"),
        ({"pooling_mode": "sum"}, "pooling_mode: one or a list of cls, .* is needed, not 'sum'"),
        ({"pooling_mode": "cls+mean"}, "pooling_mode: one or a list of cls, .* is needed, not 'cls"),
        ({"pooling_mode": ["cls", "sum"]}, "pooling_mode: one or a list of cls"),
        ({"pooling_mode": []}, "pooling_mode: one or a list of cls"),
        ({"pooling_mode": 3}, "pooling_mode: one or a list of cls"),
        ({"pooling_mode": [["cls"]]}, "pooling_mode: one or a list of cls"),
        ({"pooling_mode_mean_tokens": "yes"}, "pooling_mode_mean_tokens: true or false"),
        ({"include_prompt": 0}, "include_prompt: true or false"),
        (
            {"pooling_mode_weightedmean_tokens": True, "include_prompt": False},
            "include_prompt: false is not supported for a weighted mean",
        ),
        ({"word_embedding_dimension": 99}, "word_embedding_dimension: 99, but the model is 32 wide"),
        ({"embedding_dimension": 99}, "embedding_dimension: 99, but the model is 32 wide"),
        ({"attention_heads": 3}, "attention_heads: a field that is not understood"),
    ],
)
def test_a_pooling_that_is_not_supported_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_json(folder / POOLING, **changes)

    with pytest.raises(ModelError, match=f"{POOLING}: {message}"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (SETTINGS, {"prompts": {"query": 3}}, "prompts: a map of names to texts"),
        (SETTINGS, {"prompts": {}, "default_prompt_name": "passage"}, "default_prompt_name: 'passage' is none"),
        (SETTINGS, {"model_type": "SparseEncoder"}, "model_type: 'SparseEncoder'"),
        (SETTINGS, {"truncate_dim": 0}, "truncate_dim: a positive integer"),
        (SETTINGS, {"query_prefix": "[Q] "}, "query_prefix: a field that is not understood"),
        (TRANSFORMER, {"max_seq_length": "long"}, "max_seq_length: a positive integer"),
        (TRANSFORMER, {"transformer_task": "fill-mask"}, "transformer_task: only 'feature-extraction'"),
        (TRANSFORMER, {"module_output_name": "sentence_embedding"}, "module_output_name: only 'token_embeddings'"),
        (TRANSFORMER, {"modality_config": {"message": {}}}, "modality_config: only {'text'"),
        (TRANSFORMER, {"tokenizer_args": {"truncation_side": "left"}}, "tokenizer_args: truncation_side might"),
        (TRANSFORMER, {"processor_kwargs": {"model_max_length": 8}}, "processor_kwargs: model_max_length might"),
        (TRANSFORMER, {"model_kwargs": {"add_pooling_layer": False}}, "model_kwargs: add_pooling_layer might"),
        (TRANSFORMER, {"config_args": {"is_causal": False}}, "config_args: is_causal might"),
        (TRANSFORMER, {"config_kwargs": ["use_cache"]}, "config_kwargs: a map of options"),
        (TRANSFORMER, {"processing_kwargs": {"text": {}}}, "processing_kwargs: only {} is supported"),
        (TRANSFORMER, {"tokenizer_name_or_path": "elsewhere"}, "tokenizer_name_or_path: only None is supported"),
        (TRANSFORMER, {"query_expansion": {"length": 32}}, "query_expansion: only None is supported"),
        (TRANSFORMER, {"layers": 3}, "layers: a field that is not understood"),
    ],
)
def test_settings_that_are_not_understood_are_refused(
    folder: Path, file: str, values: dict[str, object], message: str
) -> None:
    write_json(folder / file, values)

    with pytest.raises(ModelError, match=f"{file}: {message}"):
        Checkpoint.read(folder)
