"""The BERT family against the plain reference: activations, names of checkpoints, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import bert_config, bert_tensors, embed, make_batch, random_sequences, write_bert
from tests.reference import BertReference
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.loader import load_weights
from worker.models.pooling import pool

SEQUENCES = random_sequences([1, 7, 48, 7, 2])


def rows_of(folder: Path, sequences: list[list[int]] = SEQUENCES) -> np.ndarray:
    return embed(make_engine(folder), sequences)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_hidden_activations_equal_the_reference(tmp_path: Path, activation: str) -> None:
    folder = write_bert(tmp_path, config=bert_config(hidden_act=activation))

    rows = rows_of(folder)

    reference = BertReference(folder)
    expected = np.stack([reference.embed(sequence) for sequence in SEQUENCES])
    np.testing.assert_allclose(rows, expected, atol=1e-5)


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

    rows = rows_of(folder)

    reference = BertReference(folder)
    expected = np.stack([reference.embed(sequence, pooling) for sequence in SEQUENCES])
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in bert_tensors(bert_config()).items()}
    folder = write_bert(tmp_path, tensors=tensors)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model.to(torch.bfloat16))
    ragged, restore = load_sorted(make_batch(SEQUENCES), SdpaAttention())

    hidden = model(dataclasses.replace(ragged, reference=True))

    assert hidden.dtype == torch.float32
    rows = pool(hidden, ragged.spans, "mean")[restore].numpy()
    reference = BertReference(folder)
    np.testing.assert_allclose(rows, np.stack([reference.embed(s) for s in SEQUENCES]), rtol=0, atol=1e-5)


def test_a_large_epsilon_is_heeded(tmp_path: Path) -> None:
    folder = write_bert(tmp_path, config=bert_config(layer_norm_eps=0.5))

    np.testing.assert_allclose(rows_of(folder, [[3, 4]])[0], BertReference(folder).embed([3, 4]), atol=1e-5)


def test_names_with_the_prefix_and_parts_that_are_not_needed_give_the_same_rows(
    tmp_path: Path, tiny_folder: Path
) -> None:
    config = bert_config(architectures=["BertForMaskedLM"])
    tensors = {f"bert.{name}": tensor for name, tensor in bert_tensors(config).items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(48).unsqueeze(0)
    tensors["bert.pooler.dense.weight"] = torch.zeros(32, 32)
    tensors["cls.predictions.bias"] = torch.zeros(64)
    folder = write_bert(tmp_path, config=config, tensors=tensors)

    np.testing.assert_array_equal(rows_of(folder), rows_of(tiny_folder))


def test_names_of_old_checkpoints_give_the_same_rows(tmp_path: Path, tiny_folder: Path) -> None:
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in bert_tensors(bert_config()).items()
    }
    folder = write_bert(tmp_path, tensors=tensors)

    np.testing.assert_array_equal(rows_of(folder), rows_of(tiny_folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "config.json: hidden_act: 'mish' is not supported"),
        ({"hidden_act": None}, "config.json: hidden_act: None is not supported"),
        ({"position_embedding_type": "relative_key"}, "config.json: position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "config.json: is_decoder: only encoders"),
        ({"pruned_heads": {"0": [1]}}, "config.json: pruned_heads"),
        ({"num_attention_heads": 5}, "config.json: num_attention_heads: 5 does not divide"),
        ({"num_hidden_layers": "2"}, "config.json: num_hidden_layers: a positive integer is needed"),
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers: missing"),
        ({"layer_norm_eps": "tiny"}, "config.json: layer_norm_eps"),
        ({"architectures": ["BertForTokenClassification"]}, "architectures: BertForTokenClassification is not"),
        ({"architectures": None}, "config.json: architectures: a list of one name"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "config.json: auto_map: .* never run"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_bert(tmp_path, config=bert_config(), tensors=bert_tensors(bert_config()))
    write_bert(folder, config=bert_config(**changes), tensors=bert_tensors(bert_config()))

    with pytest.raises(ModelError, match=message):
        make_engine(folder)
