"""Weights that are not exactly those of the model stop the start, and the text says which and where."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import Tensors, bert_config, bert_tensors, embed, write_bert, write_json
from tests.worker.conftest import make_engine
from worker.checkpoint import Checkpoint, ModelError
from worker.loader import load_weights
from worker.models import Model, build

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
        (of_integers, rf"tensor {QUERY}: dtype torch.int8"),
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

    with pytest.raises(ModelError, match=rf"{path.name}: tensor {QUERY}: holds a NaN or an infinity in torch.float32"):
        make_engine(folder)


def test_a_number_that_overflows_when_it_is_converted_is_refused(tmp_path: Path) -> None:
    tensors = bert_tensors(bert_config())
    tensors[QUERY][0, 0] = 7e4  # more than float16 holds
    folder = write_bert(tmp_path, tensors=tensors)
    load_weights(folder, empty_model(folder))

    with pytest.raises(ModelError, match=rf"tensor {QUERY}: holds a NaN or an infinity in torch.float16"):
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

    with pytest.raises(ModelError, match=r"index\.json: weight_map: '\.\./a-1\.safetensors' is not a file name"):
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
