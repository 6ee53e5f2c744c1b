"""What is peculiar to BERT, RoBERTa, DistilBERT, MPNet and ModernBERT: names, rows for padding, biases, windows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from tests import parity
from tests.families import GLOBAL, LIMIT, LOCAL, OLD_MODERNBERT, ropes, save, tiny
from tests.models import (
    Tensors,
    bert_config,
    bert_tensors,
    edit_json,
    embed,
    make_batch,
    random_sequences,
    write_bert,
    write_distilbert,
    write_json,
    write_roberta,
)
from tests.reference import BertReference
from tests.worker.conftest import make_engine
from tests.worker.test_conformance import loaded
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.families.mpnet import bucket

SEQUENCES = random_sequences([1, 7, 48, 7, 2])
BIASES, POSITIONS = "encoder.relative_attention_bias.weight", "embeddings.position_embeddings.weight"


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- BERT, against a reference that is not transformers ---


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_hidden_activations_equal_the_reference(tmp_path: Path, activation: str) -> None:
    folder = write_bert(tmp_path, config=bert_config(hidden_act=activation))

    rows = embed(make_engine(folder), SEQUENCES)

    reference = BertReference(folder)
    np.testing.assert_allclose(rows, np.stack([reference.embed(row) for row in SEQUENCES]), atol=1e-5)


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_each_pooling_equals_the_reference(tmp_path: Path, flag: str, pooling: str) -> None:
    folder = write_bert(tmp_path, pooling=flag)

    rows = embed(make_engine(folder), SEQUENCES)

    reference = BertReference(folder)
    np.testing.assert_allclose(rows, np.stack([reference.embed(row, pooling) for row in SEQUENCES]), atol=1e-5)


def test_names_of_old_checkpoints_give_the_same_rows(tmp_path: Path, tiny_folder: Path) -> None:
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in bert_tensors(bert_config()).items()
    }
    folder = write_bert(tmp_path, tensors=tensors)

    rows, expected = (embed(make_engine(path), SEQUENCES) for path in (folder, tiny_folder))

    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("BertModel", {"embeddings.position_ids": (1, 160), "cls.predictions.bias": (3,)}),
        ("RobertaModel", {"embeddings.position_ids": (1, 162), "lm_head.dense.weight": (3,)}),
        ("DistilBertModel", {"vocab_transform.weight": (3,), "vocab_projector.bias": (3,)}),
        ("MPNetModel", {"embeddings.position_ids": (1, 162), "pooler.dense.weight": (3,), "lm_head.bias": (3,)}),
        ("ModernBertModel", {"head.dense.weight": (3,), "head.norm.bias": (3,), "decoder.weight": (3,)}),
    ],
)
def test_a_buffer_and_heads_are_not_read_whatever_their_shapes(
    name: str, extra: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    folder = save(name, tmp_path)
    ids = parity.sequences(33)
    expected = parity.rows_of(folder, ids)

    edit_tensors(folder, lambda tensors: tensors.update({key: torch.zeros(shape) for key, shape in extra.items()}))

    np.testing.assert_array_equal(parity.rows_of(folder, ids), expected)


def test_tensors_that_are_known_and_not_needed_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        make_engine(save("BertModel", tmp_path))

    assert "2 tensors of the checkpoint are not needed: pooler.dense.bias, pooler.dense.weight" in caplog.text


# --- positions ---


@pytest.mark.parametrize("name", ["RobertaModel", "MPNetModel"])
def test_the_position_rows_for_padding_are_never_used(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    ids = parity.sequences(LIMIT)
    before = parity.rows_of(folder, ids)

    edit_tensors(folder, lambda tensors: tensors[POSITIONS][:2].fill_(1e6))

    np.testing.assert_array_equal(parity.rows_of(folder, ids), before)


@pytest.mark.parametrize(
    ("write", "declared", "tokenizer_limit", "expected"),
    [
        (write_roberta, None, None, 48),
        (write_roberta, None, 48, 48),
        (write_roberta, None, 50, 48),
        (write_roberta, 50, 48, 48),
        (write_roberta, 24, 48, 24),
        (write_roberta, None, 24, 24),
        (write_distilbert, 512, None, 48),
    ],
)
def test_the_longest_sequence_leaves_out_the_rows_for_padding_whatever_is_declared(
    tmp_path: Path,
    write: Callable[[Path], Path],
    declared: int | None,
    tokenizer_limit: int | None,
    expected: int,
) -> None:
    folder = write(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": declared})
    write_json(folder / "tokenizer_config.json", {"model_max_length": tokenizer_limit})

    assert make_engine(folder).hello().max_tokens == expected


# --- DistilBERT ---


def test_the_hidden_size_under_its_usual_name_is_heeded_too(tmp_path: Path) -> None:
    folder = write_distilbert(tmp_path)
    edit_json(folder / "config.json", hidden_size=32, num_attention_heads=4, num_hidden_layers=2)

    assert make_engine(folder).hello().dimensions == 32


def test_a_pooling_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = write_distilbert(tmp_path)
    edit_json(folder / "1_Pooling" / "config.json", word_embedding_dimension=64)

    with pytest.raises(ModelError, match="word_embedding_dimension: 64, but the model is 32 wide"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("DistilBertModel", "embeddings.token_type_embeddings.weight"),
        ("DistilBertModel", "encoder.layer.0.output.dense.bias"),
        ("RobertaModel", "adapter.weight"),
    ],
)
def test_tensors_of_another_family_are_refused(name: str, extra: str, tmp_path: Path) -> None:
    edit_tensors(save(name, tmp_path), lambda tensors: tensors.update({extra: torch.zeros(2, 32)}))

    with pytest.raises(ModelError, match=f"Unexpected tensors: {extra}"):
        make_engine(tmp_path)


# --- MPNet's biases by distance ---


def test_the_buckets_of_distances_are_those_of_transformers() -> None:
    distances = torch.arange(-700, 701)

    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)

    assert [bucket(distance) for distance in distances.tolist()] == expected.tolist()


@pytest.mark.parametrize("row", [0, 1, 15, 17, 31])
def test_each_row_of_the_table_changes_the_vectors(row: int, tmp_path: Path) -> None:
    folder = save("MPNetModel", tmp_path)
    ids = parity.sequences(LIMIT)[-1:]
    before = parity.rows_of(folder, ids)

    edit_tensors(folder, lambda tensors: tensors[BIASES][row].add_(2.0))

    assert np.abs(parity.rows_of(folder, ids) - before).max() > 1e-3


def test_a_table_of_biases_of_another_size_is_refused(tmp_path: Path) -> None:
    edit_tensors(save("MPNetModel", tmp_path), lambda tensors: tensors.update({BIASES: torch.zeros(16, 4)}))

    with pytest.raises(ModelError, match=r"shape \[16, 4\], but the model needs \[32, 4\]"):
        make_engine(tmp_path)


# --- windows and two rotary tables: ModernBERT, and Gemma 3 where it is the same ---


@pytest.mark.parametrize(
    ("name", "changes", "changed"),
    [
        ("ModernBertModel", {"local_attention": 8}, range(8, 17)),
        ("ModernBertModel", {"local_attention": 9}, range(8, 17)),
        ("Gemma3TextModel", {"use_bidirectional_attention": True, "sliding_window": 8}, range(8, 17)),
        ("Gemma3TextModel", {"use_bidirectional_attention": True, "sliding_window": 9}, range(8, 17)),
        ("Gemma3TextModel", {"use_bidirectional_attention": False, "sliding_window": 8}, range(12, 20)),
        ("Gemma3TextModel", {"use_bidirectional_attention": False, "sliding_window": 9}, range(12, 21)),
        ("Gemma3TextModel", {"use_bidirectional_attention": False, "sliding_window": 1}, range(12, 13)),
    ],
)
def test_a_token_is_seen_by_those_that_have_it_in_their_window(
    name: str, changes: dict[str, object], changed: range, tmp_path: Path
) -> None:
    model = parity.seeded(tiny(name, num_hidden_layers=1, layer_types=[LOCAL], **changes))
    # What transformers writes for a window of both directions is always even.
    ours = loaded(parity.save(model, tmp_path, **changes), torch.float32)
    ids = random_sequences([24], seed=4)[0]
    other = [*ids[:12], 5 if ids[12] != 5 else 6, *ids[13:]]

    before, after = (ours(load_sorted(make_batch([row]), SdpaAttention())[0]) for row in (ids, other))

    assert ((before - after).abs().amax(dim=1) > 1e-6).nonzero().flatten().tolist() == list(changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "limit"),
    [
        (("linear", "linear"), LIMIT),
        (("linear", "default"), LIMIT),
        (("yarn", "default"), LIMIT),  # of which one reaches further
        (("yarn", "yarn"), 4 * LIMIT),
        (("dynamic", "dynamic"), 4 * LIMIT),
    ],
)
def test_scaled_positions_are_those_of_transformers(kinds: tuple[str, str], limit: int, tmp_path: Path) -> None:
    scaled = ropes()
    for layer_type, kind in zip((GLOBAL, LOCAL), kinds, strict=True):
        if kind != "default":
            scaled[layer_type] |= {"rope_type": kind, "factor": 4.0}

    parity.check(tiny("ModernBertModel", rope_parameters=scaled), tmp_path, limit)


@pytest.mark.slow
def test_rope_scaling_of_an_older_release_is_of_both_types_of_layers(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    scaled = {layer_type: rope | scaling for layer_type, rope in ropes().items()}
    model = tiny("ModernBertModel", rope_parameters=scaled)

    parity.check(model, tmp_path, LIMIT, **OLD_MODERNBERT | {"rope_scaling": scaling})


def test_global_layers_alone_need_no_base_of_local_ones(tmp_path: Path) -> None:
    changes = OLD_MODERNBERT | {"global_attn_every_n_layers": 1, "local_rope_theta": None}

    parity.check(tiny("ModernBertModel", layer_types=[GLOBAL] * 6), tmp_path, LIMIT, **changes)


# --- GPUs ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["RobertaModel", "DistilBertModel"])
def test_the_fused_embeddings_begin_after_the_rows_for_padding_and_may_have_no_types(name: str, tmp_path: Path) -> None:
    model = loaded(save(name, tmp_path), torch.float32)
    assert isinstance(model, torch.nn.Module)
    ragged, _ = load_sorted(make_batch(SEQUENCES), SdpaAttention())
    expected = model.embeddings(ragged)

    fused = model.to("cuda", torch.bfloat16).embeddings(
        dataclasses.replace(ragged, token_ids=ragged.token_ids.cuda(), positions=ragged.positions.cuda())
    )

    torch.testing.assert_close(fused.float().cpu(), expected, rtol=0.02, atol=0.02)
