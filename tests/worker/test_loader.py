"""Weights that are not exactly those of the model stop the start, and the text says which and where."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from tests.models import (
    Tensors,
    bert_config,
    bert_tensors,
    edit_json,
    embed,
    qwen3_config,
    qwen3_tensors,
    write_bert,
    write_json,
    write_qwen3,
)
from tests.worker.conftest import make_engine
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.interface import Model
from worker.models.loader import check_weights, load_weights

QUERY = "encoder.layer.0.attention.self.query.weight"


def without(tensors: Tensors) -> None:
    del tensors[QUERY]


def renamed(tensors: Tensors) -> None:
    tensors["encoder.layer.0.attention.self.q.weight"] = tensors.pop(QUERY)


def of_another_shape(tensors: Tensors) -> None:
    tensors[QUERY] = torch.zeros(32, 31)


def with_one_more(tensors: Tensors) -> None:
    tensors["encoder.layer.9.adapter.weight"] = torch.zeros(3)


def with_nan(tensors: Tensors) -> None:
    tensors[QUERY][3, 4] = torch.nan


def with_infinity(tensors: Tensors) -> None:
    tensors["embeddings.word_embeddings.weight"][0, 0] = torch.inf


def of_integers(tensors: Tensors) -> None:
    tensors[QUERY] = torch.ones(32, 32, dtype=torch.int8)


def twice(tensors: Tensors) -> None:
    tensors[f"bert.{QUERY}"] = tensors[QUERY].clone()


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    return cast("Model", model.to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, rf"model.safetensors: .* Missing tensors: {QUERY}\. Unexpected tensors: none\."),
        (renamed, rf"Missing tensors: {QUERY}\. Unexpected tensors: encoder.layer.0.attention.self.q.weight\."),
        (of_another_shape, rf"tensor {QUERY}: shape \[32, 31\], but the model needs \[32, 32\]"),
        (with_one_more, r"Missing tensors: none\. Unexpected tensors: encoder.layer.9.adapter.weight\."),
        (with_nan, rf"model.safetensors: tensor {QUERY}: holds a NaN"),
        (with_infinity, r"tensor embeddings.word_embeddings.weight: holds a NaN or an infinity"),
        (of_integers, rf"tensor {QUERY}: dtype I8 is not supported; supported are F32, F16, BF16"),
        (twice, rf"tensor {QUERY}: .* is there twice"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Tensors], None], message: str) -> None:
    tensors = bert_tensors(bert_config())
    change(tensors)
    folder = write_bert(tmp_path, tensors=tensors)

    with pytest.raises(ModelError, match=message):
        make_engine(folder)


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    folder = write_bert(tmp_path, tensors={"something": torch.zeros(1)})

    with pytest.raises(ModelError, match=r"and 29 more\. Unexpected tensors: something\."):
        make_engine(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_bert(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        make_engine(tmp_path)


def test_a_pickle_in_disguise_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, write_bert(tmp_path) / "model.safetensors")

    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        make_engine(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = write_bert(tmp_path) / "model.safetensors"
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(ModelError, match="is not a regular file"):
        make_engine(tmp_path)


def test_weights_of_another_format_alone_are_refused(tmp_path: Path) -> None:
    (write_bert(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"model\.safetensors is missing: only safetensors .*found pytorch_model\.bin"):
        make_engine(tmp_path)


def test_links_out_of_the_folder_are_followed(tmp_path: Path, tiny_folder: Path) -> None:
    folder = write_bert(tmp_path / "snapshot")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")

    assert make_engine(folder).hello().fingerprint == make_engine(tiny_folder).hello().fingerprint


def write_shards(folder: Path) -> dict[str, str]:
    """Splits the one file of a folder into two; returns the index's map."""
    (folder / "model.safetensors").unlink()
    tensors = bert_tensors(bert_config())
    names = sorted(tensors)
    shards = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return weight_map


def test_a_model_in_several_files_gives_the_same_rows(tmp_path: Path, tiny_folder: Path) -> None:
    folder = write_bert(tmp_path)
    write_shards(folder)
    sequences = [[1, 2, 3], [4]]

    rows = embed(make_engine(folder), sequences)

    np.testing.assert_array_equal(rows, embed(make_engine(tiny_folder), sequences))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_shards(folder)
    (folder / "a-2.safetensors").unlink()

    with pytest.raises(ModelError, match=r"a-2\.safetensors is missing"):
        make_engine(folder)


def test_the_hash_is_over_the_files_in_order(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_shards(folder)
    hashes = [hashlib.sha256((folder / name).read_bytes()).digest() for name in ("a-1.safetensors", "a-2.safetensors")]

    assert load_weights(folder, empty_model(folder)) == hashlib.sha256(b"".join(hashes)).hexdigest()


def test_a_number_that_is_not_finite_is_found_in_whichever_file_it_is(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    weight_map = write_shards(folder)
    path = folder / weight_map[QUERY]
    tensors = load_file(path)
    tensors[QUERY][31, 31] = -torch.inf
    save_file(tensors, path)

    with pytest.raises(ModelError, match=rf"{path.name}: tensor {QUERY}: holds a NaN or an infinity"):
        make_engine(folder)


def test_a_number_that_overflows_when_it_is_converted_is_refused(tmp_path: Path) -> None:
    tensors = bert_tensors(bert_config())
    tensors[QUERY][0, 0] = 7e4  # more than float16 holds
    folder = write_bert(tmp_path, tensors=tensors)
    load_weights(folder, empty_model(folder))

    with pytest.raises(ModelError, match=rf"tensor {QUERY}: holds a number too large for float16"):
        load_weights(folder, empty_model(folder, torch.float16))


def test_large_numbers_that_are_finite_are_accepted(tmp_path: Path) -> None:
    tensors = bert_tensors(bert_config())
    tensors[QUERY][:] = 3e38  # their sum is more than float32 holds
    folder = write_bert(tmp_path, tensors=tensors)

    load_weights(folder, empty_model(folder))


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    weight_map = write_shards(folder)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map | {QUERY: "../a-1.safetensors"}})

    with pytest.raises(ModelError, match=r"index\.json: weight_map: '\.\./a-1\.safetensors' is not the name of"):
        make_engine(folder)


def test_the_fingerprint_changes_with_one_weight(tmp_path: Path, tiny_folder: Path) -> None:
    tensors = bert_tensors(bert_config())
    tensors[QUERY][0, 0] += 1e-3

    changed = make_engine(write_bert(tmp_path, tensors=tensors)).hello().fingerprint

    assert changed != make_engine(tiny_folder).hello().fingerprint


def test_a_file_that_is_cut_short_after_the_start_changes_nothing(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    engine = make_engine(folder)
    before = embed(engine, [[1, 2, 3]]).copy()

    os.truncate(folder / "model.safetensors", 0)

    np.testing.assert_array_equal(embed(engine, [[1, 2, 3]]), before)


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in bert_tensors(bert_config()).items()}
    wide = {name: tensor.float() for name, tensor in tensors.items()}

    rows = embed(make_engine(write_bert(tmp_path / "half", tensors=tensors)), [[1, 2, 3]])

    expected = embed(make_engine(write_bert(tmp_path / "wide", tensors=wide)), [[1, 2, 3]])
    np.testing.assert_array_equal(rows, expected)


def test_json_that_is_broken_is_named(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    (folder / "config.json").write_text(json.dumps(bert_config())[:-5])

    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        make_engine(folder)


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod.", "module.", "auto_model.", "0.auto_model.", "_orig_mod.bert.", "x.y.z."]
)
def test_what_a_wrapper_has_put_before_all_names_is_taken_off(
    tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture, wrapper: str
) -> None:
    tensors = {f"{wrapper}{name}": tensor for name, tensor in bert_tensors(bert_config()).items()}
    tensors[f"{wrapper}pooler.dense.weight"] = torch.zeros(2)  # known and not needed
    folder = write_bert(tmp_path, tensors=tensors)

    with caplog.at_level("INFO"):
        rows = embed(make_engine(folder), [[1, 2, 3]])

    np.testing.assert_array_equal(rows, embed(make_engine(tiny_folder), [[1, 2, 3]]))
    assert "taken off the front of all names" in caplog.text


def test_a_tensor_beside_the_wrapper_that_is_known_and_not_needed_is_no_obstacle(tmp_path: Path) -> None:
    tensors = {f"auto_model.{name}": tensor for name, tensor in bert_tensors(bert_config()).items()}
    folder = write_bert(tmp_path, tensors={**tensors, "cls.predictions.bias": torch.zeros(2)})

    load_weights(folder, empty_model(folder))


def test_a_wrapper_around_some_of_the_tensors_is_refused(tmp_path: Path) -> None:
    tensors = {
        name if name == QUERY else f"auto_model.{name}": tensor for name, tensor in bert_tensors(bert_config()).items()
    }

    with pytest.raises(ModelError, match=r"Unexpected tensors: auto_model\.embeddings\.LayerNorm\.bias, "):
        make_engine(write_bert(tmp_path, tensors=tensors))


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = bert_tensors(bert_config())
    both = {f"{side}.{name}": tensor.clone() for side in ("query", "passage") for name, tensor in tensors.items()}

    with pytest.raises(ModelError, match=r"Unexpected tensors: passage\.embeddings\.LayerNorm\.bias, "):
        make_engine(write_bert(tmp_path, tensors=both))


def write_tied(folder: Path, *names: str, metadata: dict[str, str] | None = None) -> Path:
    """A tiny Qwen3 of a language model's names, whose embedding table is stored under `names`."""
    tensors = {f"model.{name}": tensor for name, tensor in qwen3_tensors(qwen3_config()).items()}
    table = tensors.pop("model.embed_tokens.weight")
    write_qwen3(folder, config=qwen3_config(architectures=["Qwen3ForCausalLM"]))
    stored = {**tensors, **{name: table.clone() for name in names}}
    save_file(stored, folder / "model.safetensors", metadata)
    return folder


@pytest.mark.parametrize(
    ("names", "metadata"),
    [
        (["model.embed_tokens.weight"], None),
        (["model.embed_tokens.weight", "lm_head.weight"], None),
        (["lm_head.weight"], {"format": "pt", "model.embed_tokens.weight": "lm_head.weight"}),
    ],
)
def test_a_table_that_the_language_models_head_shares_is_found(
    tmp_path: Path, names: list[str], metadata: dict[str, str] | None
) -> None:
    folder = write_tied(tmp_path / "tied", *names, metadata=metadata)

    rows = embed(make_engine(folder), [[1, 2, 3]])

    np.testing.assert_array_equal(rows, embed(make_engine(write_qwen3(tmp_path / "bare")), [[1, 2, 3]]))


def test_a_head_is_not_taken_for_the_table_unless_the_file_says_that_it_is(tmp_path: Path) -> None:
    folder = write_tied(tmp_path, "lm_head.weight")  # sentence-transformers would leave the table random

    with pytest.raises(ModelError, match=r"Missing tensors: embed_tokens\.weight\. Unexpected tensors: none\."):
        make_engine(folder)


@pytest.mark.slow
def test_a_language_model_as_the_librarys_save_model_stores_it_is_read(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    sizes = {name: qwen3_config()[name] for name in (*names, "num_key_value_heads")}
    written = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    folder = write_qwen3(tmp_path, config=qwen3_config(architectures=["Qwen3ForCausalLM"]))
    save_model(written, str(folder / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(folder / "model.safetensors")

    model = empty_model(folder)
    load_weights(folder, model)

    torch.testing.assert_close(
        model.checkpoint_tensors()["embed_tokens.weight"], written.model.embed_tokens.weight, rtol=0, atol=0
    )


def write_large(folder: Path) -> Tensors:
    """A model whose embedding table is read in several pieces; returns its tensors."""
    config = bert_config(vocab_size=100_000, num_hidden_layers=1)
    tensors = bert_tensors(config)
    write_bert(folder, config=config, tensors=tensors)
    return tensors


@pytest.mark.slow
def test_a_tensor_that_is_read_in_pieces_is_whole(tmp_path: Path) -> None:
    tensors = write_large(tmp_path)
    model = empty_model(tmp_path, torch.bfloat16)

    digest = load_weights(tmp_path, model)

    for name, destination in model.checkpoint_tensors().items():
        torch.testing.assert_close(destination, tensors[name].bfloat16(), rtol=0, atol=0)
    content = hashlib.sha256((tmp_path / "model.safetensors").read_bytes())
    assert digest == hashlib.sha256(content.digest()).hexdigest()


@pytest.mark.slow
def test_a_number_that_is_not_finite_is_found_in_the_last_piece(tmp_path: Path) -> None:
    tensors = write_large(tmp_path)
    tensors["embeddings.word_embeddings.weight"][-1, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"tensor embeddings\.word_embeddings\.weight: holds a NaN"):
        load_weights(tmp_path, empty_model(tmp_path))


@pytest.mark.slow
def test_loading_takes_little_memory_beside_the_parameters(tmp_path: Path) -> None:
    config = bert_config(vocab_size=1_000_000)  # 128 MB
    write_bert(tmp_path, config=config)
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from worker.checkpoint.files import JsonFile\n"
        "from worker.models.loader import load_weights\n"
        "from worker.models.build import build\n"
        "folder = Path(sys.argv[1])\n"
        "model = build('BertModel', JsonFile.read(folder / 'config.json'))\n"
        "for parameter in model.parameters():\n"
        "    parameter.zero_()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load_weights(folder, model)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )

    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)

    assert int(ended.stdout) < 40 * 1024  # KiB


@pytest.mark.parametrize(
    ("field", "size", "tensor"),
    [
        ("vocab_size", 2**31 - 1, "embeddings.word_embeddings.weight"),
        ("max_position_embeddings", 2**22, "embeddings.position_embeddings.weight"),
        ("intermediate_size", 2**18, "encoder.layer.0.intermediate.dense.bias"),
    ],
)
def test_a_size_that_no_memory_holds_is_refused_by_the_headers(
    tmp_path: Path, field: str, size: int, tensor: str
) -> None:
    write_bert(tmp_path)
    edit_json(tmp_path / "config.json", **{field: size})
    with torch.device("meta"):
        model = empty_model(tmp_path)

    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {tensor}: shape .* needs \[{size}"):
        check_weights(tmp_path, model)
