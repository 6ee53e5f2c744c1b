"""The DistilBERT family against transformers: its own fields and names, no token types, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.text.tokenization import Tokenizer, TruncationRule
from tests.models import (
    DISTILBERT_VARIANTS,
    ENCODER_TEXTS,
    Tensors,
    distilbert_config,
    distilbert_tensors,
    edit_json,
    embed,
    make_batch,
    random_sequences,
    write_distilbert,
    write_json,
)
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.loader import load_weights
from worker.models.pooling import pool

REFERENCE = Path(__file__).parent.parent / "data" / "encoder_reference.npz"
SEQUENCES = random_sequences([1, 7, 48, 7, 2])
QUERY = "transformer.layer.1.attention.q_lin.weight"


@pytest.mark.parametrize("name", DISTILBERT_VARIANTS)
def test_a_checkpoint_gives_the_vectors_that_transformers_gives(name: str, tmp_path: Path) -> None:
    engine = make_engine(DISTILBERT_VARIANTS[name](tmp_path))
    facts = engine.hello()
    ids = [row.tolist() for row in Tokenizer(facts).encode(ENCODER_TEXTS, TruncationRule(allowed=True))]

    rows = embed(engine, ids, normalize=[int(facts.normalize)] * len(ids))

    assert [len(row) for row in ids] == [3, 7, 48, 7]
    with np.load(REFERENCE, allow_pickle=False) as reference:
        np.testing.assert_allclose(rows, reference[name], rtol=0, atol=1e-5)


def test_the_variants_differ_so_that_each_of_them_is_tested() -> None:
    with np.load(REFERENCE, allow_pickle=False) as reference:
        rows = {name: reference[name] for name in DISTILBERT_VARIANTS}
    assert all(np.abs(rows[a] - rows[b]).max() > 0.1 for a in rows for b in rows if a < b)
    # Of the same words in another order.
    assert all(np.abs(values[1] - values[3]).max() > 0.01 for values in rows.values())


def test_a_sequence_alone_and_in_company_has_the_same_row(tmp_path: Path) -> None:
    engine = make_engine(write_distilbert(tmp_path))
    generator = np.random.default_rng(0)
    sequences = random_sequences(generator.integers(1, 49, 12).tolist())
    order = generator.permutation(len(sequences))

    together = embed(engine, sequences)
    shuffled = embed(engine, [sequences[i] for i in order])

    alone = np.concatenate([embed(engine, [sequence]) for sequence in sequences])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(shuffled, alone[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("declared", "expected"), [(None, 48), (512, 48), (24, 24)])
def test_the_longest_sequence_has_as_many_tokens_as_positions_or_what_is_declared(
    tmp_path: Path, declared: int | None, expected: int
) -> None:
    folder = write_distilbert(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": declared})

    assert make_engine(folder).hello().max_tokens == expected


def test_names_with_the_prefix_and_parts_that_are_not_needed_give_the_same_rows(tmp_path: Path) -> None:
    config = distilbert_config(architectures=["DistilBertForMaskedLM"])
    tensors = {f"distilbert.{name}": tensor for name, tensor in distilbert_tensors(config).items()}
    tensors["vocab_transform.weight"] = torch.zeros(32, 32)
    tensors["vocab_layer_norm.weight"] = torch.zeros(32)
    tensors["vocab_projector.bias"] = torch.zeros(64)
    bare = write_distilbert(tmp_path / "bare")
    prefixed = write_distilbert(tmp_path / "lm", config=config, tensors=tensors)

    rows, expected = (embed(make_engine(folder), SEQUENCES) for folder in (prefixed, bare))

    np.testing.assert_array_equal(rows, expected)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in distilbert_tensors(distilbert_config()).items()}
    folder = write_distilbert(tmp_path, tensors=tensors)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model.to(torch.bfloat16))
    ragged, restore = load_sorted(make_batch(SEQUENCES), SdpaAttention())

    hidden = model(dataclasses.replace(ragged, reference=True))

    assert hidden.dtype == torch.float32
    rows = pool(hidden, ragged.spans, "mean")[restore].numpy()
    np.testing.assert_allclose(rows, embed(make_engine(folder, dtype="float32"), SEQUENCES), rtol=0, atol=1e-5)


def test_the_hidden_size_under_its_usual_name_is_heeded_too(tmp_path: Path) -> None:
    folder = write_distilbert(tmp_path)
    edit_json(folder / "config.json", hidden_size=32, num_attention_heads=4, num_hidden_layers=2)

    assert make_engine(folder).hello().dimensions == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "config.json: model_type: 'bert' is not this architecture's: distilbert"),
        ({"architectures": ["DistilBertForTokenClassification"]}, "architectures: DistilBertForTokenClass.* is not"),
        ({"dim": None}, "config.json: dim: missing"),
        ({"n_layers": None}, "config.json: n_layers: missing"),
        ({"hidden_size": 64}, "config.json: hidden_size: 64, but dim is 32"),
        ({"num_attention_heads": 8}, "config.json: num_attention_heads: 8, but n_heads is 4"),
        ({"num_hidden_layers": 3}, "config.json: num_hidden_layers: 3, but n_layers is 2"),
        ({"n_heads": 5}, "config.json: n_heads: 5 does not divide dim 32"),
        ({"hidden_dim": "80"}, "config.json: hidden_dim: a positive integer is needed"),
        ({"activation": "mish"}, "config.json: activation: 'mish' is not supported"),
        ({"activation": None}, "config.json: activation: None is not supported"),
        ({"position_embedding_type": "relative_key"}, "config.json: position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "config.json: is_decoder: only encoders"),
        ({"pruned_heads": {"0": [1]}}, "config.json: pruned_heads"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_distilbert(tmp_path)
    edit_json(folder / "config.json", **changes)

    with pytest.raises(ModelError, match=message):
        make_engine(folder)


def test_a_pooling_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = write_distilbert(tmp_path)
    edit_json(folder / "1_Pooling" / "config.json", word_embedding_dimension=64)

    with pytest.raises(ModelError, match="word_embedding_dimension: 64, but the model is 32 wide"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(QUERY), rf"Missing tensors: {QUERY}\. Unexpected tensors: none"),
        (
            lambda tensors: tensors.update({"embeddings.token_type_embeddings.weight": torch.zeros(2, 32)}),
            "Unexpected tensors: embeddings.token_type_embeddings.weight",
        ),
        (
            lambda tensors: tensors.update({"encoder.layer.0.output.dense.bias": torch.zeros(32)}),
            "Unexpected tensors: encoder.layer.0.output.dense.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Tensors], None], message: str) -> None:
    tensors = distilbert_tensors(distilbert_config())
    change(tensors)
    folder = write_distilbert(tmp_path, tensors=tensors)

    with pytest.raises(ModelError, match=message):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_fused_embeddings_add_nothing_for_a_type(tmp_path: Path) -> None:
    folder = write_distilbert(tmp_path)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model)
    ragged, _ = load_sorted(make_batch(SEQUENCES), SdpaAttention())
    expected = model.embeddings(ragged)

    fused = model.to("cuda", torch.bfloat16).embeddings(
        dataclasses.replace(ragged, token_ids=ragged.token_ids.cuda(), positions=ragged.positions.cuda())
    )

    torch.testing.assert_close(fused.float().cpu(), expected, rtol=0.02, atol=0.02)
