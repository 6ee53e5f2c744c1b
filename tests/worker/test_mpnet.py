"""MPNet against transformers' own class: biases by distance, positions after the padding's, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MPNetConfig, MPNetForMaskedLM, MPNetModel, PreTrainedModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from tests import parity
from tests.models import embed, make_batch, random_sequences
from tests.parity import VOCAB_SIZE, Rows
from tests.reference import unit
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.families.mpnet import bucket
from worker.models.loader import load_weights

# Distances that share the last bucket, and such as are beyond the table of biases.
LIMIT = 300

TABLE = "encoder.relative_attention_bias.weight"
POSITIONS = "embeddings.position_embeddings.weight"


def config(**changes: object) -> MPNetConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LIMIT + 2,
    }
    return MPNetConfig(**shape | changes)


def mpnet(**changes: object) -> PreTrainedModel:
    return MPNetModel(config(**changes))


def sequences(lengths: list[int]) -> list[list[int]]:
    """Without the padding token, whose positions are transformers' own."""
    return [[3 + token for token in row] for row in random_sequences(lengths, seed=4, vocab_size=VOCAB_SIZE - 3)]


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add or (None) remove tensors; in their names, "__" stands for a dot."""
    tensors: dict[str, torch.Tensor | None] = dict(load_file(folder / "model.safetensors"))
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"hidden_act": "gelu_new"}, id="gelu_new"),
        pytest.param({"hidden_act": "relu"}, id="relu"),
        pytest.param({"layer_norm_eps": 0.3}, id="epsilon"),
        pytest.param({"num_attention_heads": 2}, id="two-heads"),
        pytest.param({"num_hidden_layers": 3}, id="three-layers"),
    ],
)
def test_the_vectors_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    engine = parity.check(mpnet(**changes), tmp_path, LIMIT)

    assert engine.hello().architecture == "MPNetModel"


def test_the_buckets_of_distances_are_those_of_transformers() -> None:
    distances = torch.arange(-700, 701)

    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)

    assert [bucket(distance) for distance in distances.tolist()] == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1, 15, 17, 31])
def test_each_row_of_the_table_changes_the_vectors(row: int, tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(mpnet()), tmp_path)
    ids = sequences([LIMIT])
    before = parity.rows_of(folder, ids)
    table = load_file(folder / "model.safetensors")[TABLE]
    table[row] += 2.0

    after = parity.rows_of(edit_tensors(folder, encoder__relative_attention_bias__weight=table), ids)

    assert np.abs(after - before).max() > 1e-3


def test_the_position_rows_for_padding_are_never_used(tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(mpnet()), tmp_path)
    ids = sequences([1, 30, LIMIT])
    before = parity.rows_of(folder, ids)
    positions = load_file(folder / "model.safetensors")[POSITIONS]
    positions[:2] = 1e6

    after = parity.rows_of(edit_tensors(folder, embeddings__position_embeddings__weight=positions), ids)

    np.testing.assert_array_equal(after, before)


def test_a_language_model_gives_the_vectors_of_its_encoder(tmp_path: Path) -> None:
    model = MPNetForMaskedLM(config())
    encoder = parity.seeded(model).mpnet
    engine = make_engine(parity.save(model, tmp_path))
    ids = sequences([1, 30, 9])

    assert engine.hello().architecture == "MPNetForMaskedLM"
    parity.check_rows(engine, ids, parity.reference_rows(encoder, ids))


def test_a_buffer_and_heads_are_not_read(tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(mpnet()), tmp_path)
    ids = sequences([20])
    expected = parity.rows_of(folder, ids)

    edit_tensors(
        folder,
        embeddings__position_ids=torch.arange(LIMIT + 2).unsqueeze(0),
        pooler__dense__weight=torch.zeros(3),
        lm_head__bias=torch.zeros(3),
    )

    np.testing.assert_array_equal(parity.rows_of(folder, ids), expected)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    model = parity.seeded(mpnet())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = parity.save(model, tmp_path)
    ids = sequences([150])
    checkpoint = Checkpoint.read(folder)
    built = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(built, torch.nn.Module)
    load_weights(folder, built.to(torch.bfloat16))
    ragged, _ = load_sorted(make_batch(ids), SdpaAttention())

    hidden = built(dataclasses.replace(ragged, reference=True))

    assert hidden.dtype == torch.float32
    expected = parity.reference_rows(model, ids)
    np.testing.assert_allclose(hidden.mean(dim=0, keepdim=True).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type: 'bert' is not this architecture's: mpnet"),
        ({"architectures": ["MPNetForTokenClassification"]}, "architectures: MPNetForTokenClassification is not"),
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets: only 32 is supported"),
        ({"relative_attention_num_buckets": 32.0}, "relative_attention_num_buckets: only 32 is supported"),
        ({"pad_token_id": 0}, "pad_token_id: only 1 is supported"),
        ({"pad_token_id": True}, "pad_token_id: only 1 is supported"),
        ({"max_position_embeddings": 2}, "max_position_embeddings: 2, of which 2 are for padding"),
        ({"max_position_embeddings": None}, "max_position_embeddings: missing"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "is_decoder: only encoders"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 32"),
        ({"layer_norm_eps": None}, "layer_norm_eps: a number between 0 and 1"),
        ({"auto_map": {"AutoModel": "modeling.MPNetModel"}}, "auto_map: this model brings its own code"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(mpnet(), tmp_path, **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


def test_a_table_of_biases_that_is_missing_is_not_left_random(tmp_path: Path) -> None:
    folder = edit_tensors(parity.save(mpnet(), tmp_path), encoder__relative_attention_bias__weight=None)

    with pytest.raises(ModelError, match=rf"Missing tensors: {TABLE}\. Unexpected tensors: none"):
        make_engine(folder)


def test_a_table_of_biases_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = edit_tensors(parity.save(mpnet(), tmp_path), encoder__relative_attention_bias__weight=torch.zeros(16, 4))

    with pytest.raises(ModelError, match=r"shape \[16, 4\], but the model needs \[32, 4\]"):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cuda_device_gives_nearly_the_vectors_of_the_cpu(tmp_path: Path, dtype: str) -> None:
    model = mpnet(hidden_size=256, intermediate_size=1024, max_position_embeddings=514)
    folder = parity.save(parity.seeded(model), tmp_path / "model")
    ids = sequences([1, 3, 64, 65, 66, 129, 400, 512, 20, 20])
    expected = parity.rows_of(folder, ids)

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))
    rows = embed(engine, ids, width=256)

    assert lowest_cosine(rows, expected) >= (0.99999 if dtype == "float32" else 0.999)
    alone = np.concatenate([embed(engine, [row], width=256) for row in ids])
    assert lowest_cosine(rows, alone) >= 0.999


def lowest_cosine(rows: Rows, expected: Rows) -> float:
    return float((unit(rows) * unit(expected)).sum(axis=1).min())
