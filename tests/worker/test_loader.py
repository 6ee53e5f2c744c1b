"""Weights that are not exactly those of the model stop the start, and the text says which and where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models import Tensors, bert_config, bert_tensors, make_batch, write_bert, write_json
from tests.worker.conftest import make_engine
from worker.checkpoint import ModelError

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
    batch = make_batch([[1, 2, 3], [4]])

    rows = make_engine(folder).step(batch).numpy()

    np.testing.assert_array_equal(rows, make_engine(tiny_folder).step(batch).numpy())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_shards(folder)
    (folder / "a-2.safetensors").unlink()

    with pytest.raises(ModelError, match=r"a-2\.safetensors is missing"):
        make_engine(folder)


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
    before = engine.step(make_batch([[1, 2, 3]])).numpy().copy()

    os.truncate(folder / "model.safetensors", 0)

    np.testing.assert_array_equal(engine.step(make_batch([[1, 2, 3]])).numpy(), before)


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in bert_tensors(bert_config()).items()}
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    batch = make_batch([[1, 2, 3]])

    rows = make_engine(write_bert(tmp_path / "half", tensors=tensors)).step(batch).numpy()

    np.testing.assert_array_equal(rows, make_engine(write_bert(tmp_path / "wide", tensors=wide)).step(batch).numpy())


def test_json_that_is_broken_is_named(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    (folder / "config.json").write_text(json.dumps(bert_config())[:-5])

    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        make_engine(folder)
