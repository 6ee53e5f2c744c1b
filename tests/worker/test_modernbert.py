"""ModernBERT against transformers' own class: windows, two rotary tables, names of checkpoints, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertModel, PreTrainedModel

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
from worker.models.loader import load_weights

LIMIT = 200
GLOBAL, LOCAL = "full_attention", "sliding_attention"

# Of a checkpoint written by transformers 4.
OLD_FIELDS: dict[str, object] = {
    "layer_types": None,
    "rope_parameters": None,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 5000.0,
    "local_rope_theta": 100.0,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "absolute",
}


def ropes(global_theta: float = 5000.0, local_theta: float = 100.0) -> dict[str, dict[str, object]]:
    return {
        GLOBAL: {"rope_type": "default", "rope_theta": global_theta},
        LOCAL: {"rope_type": "default", "rope_theta": local_theta},
    }


def config(**changes: object) -> ModernBertConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": LIMIT,
        "local_attention": 8,
        "layer_types": [GLOBAL, LOCAL, LOCAL] * 2,
        "rope_parameters": ropes(),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    }
    return ModernBertConfig(**shape | changes)


def modernbert(**changes: object) -> PreTrainedModel:
    return ModernBertModel(config(**changes))


def sequences(lengths: list[int]) -> list[list[int]]:
    return random_sequences(lengths, seed=4, vocab_size=VOCAB_SIZE)


def hidden_states(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32, *, reference: bool) -> torch.Tensor:
    """[tokens, hidden] of one sequence, the weights being of this dtype."""
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model.to(dtype))
    ragged, _ = load_sorted(make_batch([ids]), SdpaAttention())
    hidden: torch.Tensor = model(dataclasses.replace(ragged, reference=reference))
    return hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"norm_bias": True}, id="norm-bias"),
        pytest.param({"attention_bias": True}, id="attention-bias"),
        pytest.param({"mlp_bias": True}, id="mlp-bias"),
        pytest.param({"num_attention_heads": 2}, id="two-heads"),
        pytest.param({"layer_types": [LOCAL] * 6}, id="all-local"),
        pytest.param({"layer_types": [GLOBAL] * 6}, id="all-global"),
    ],
)
def test_the_vectors_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    engine = parity.check(modernbert(**changes), tmp_path, LIMIT)

    assert engine.hello().architecture == "ModernBertModel"


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"local_attention": 10}, id="wider"),
        pytest.param({"local_attention": 6}, id="narrower"),
        pytest.param({"layer_types": [LOCAL, LOCAL, GLOBAL] * 2}, id="other-layers"),
        pytest.param({"rope_parameters": ropes(global_theta=700.0)}, id="global-theta"),
        pytest.param({"rope_parameters": ropes(local_theta=700.0)}, id="local-theta"),
        pytest.param({"hidden_activation": "silu"}, id="silu"),
        pytest.param({"hidden_activation": "relu"}, id="relu"),
        pytest.param({"norm_eps": 0.3}, id="epsilon"),
    ],
)
def test_each_field_changes_the_vectors_as_in_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    ids = sequences([60])
    plain = parity.rows_of(parity.save(parity.seeded(modernbert()), tmp_path / "plain"), ids)

    engine = parity.check(modernbert(**changes), tmp_path / "changed", LIMIT)

    assert np.abs(embed(engine, ids) - plain).max() > 1e-3


@pytest.mark.slow
def test_short_and_long_texts_of_one_batch_have_the_vectors_they_have_alone(tmp_path: Path) -> None:
    model = parity.seeded(modernbert())
    engine = make_engine(parity.save(model, tmp_path))
    ids = sequences([3, 60, 200, 4, 9, 64])

    rows = embed(engine, ids)

    assert np.isfinite(rows).all()
    parity.check_rows(engine, ids, parity.reference_rows(model, ids))


@pytest.mark.parametrize("local_attention", [8, 9])
def test_a_local_layer_sees_half_its_window_to_either_side(local_attention: int, tmp_path: Path) -> None:
    model = modernbert(num_hidden_layers=1, layer_types=[LOCAL], local_attention=local_attention)
    folder = parity.save(parity.seeded(model), tmp_path)
    ids = sequences([24])[0]
    other = [*ids[:12], 5 if ids[12] != 5 else 6, *ids[13:]]

    before, after = (hidden_states(folder, row, reference=False) for row in (ids, other))

    changed = (before - after).abs().amax(dim=1) > 1e-6
    assert changed.nonzero().flatten().tolist() == list(range(8, 17))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        OLD_FIELDS,
        OLD_FIELDS | {"position_embedding_type": "sans_pos", "is_causal": False},
        OLD_FIELDS | {"layer_types": [GLOBAL, LOCAL, LOCAL] * 2},
        OLD_FIELDS | {"rope_parameters": ropes(), "global_rope_theta": None},
        OLD_FIELDS | {"model_type": None},
        {"sparse_prediction": True, "classifier_pooling": "mean", "deterministic_flash_attn": True},
        {"reference_compile": True, "decoder_bias": False, "attention_dropout": 0.5},
    ],
)
def test_what_older_releases_write_and_what_does_not_matter_is_taken(
    changes: dict[str, object], tmp_path: Path
) -> None:
    parity.check(modernbert(), tmp_path, LIMIT, **changes)


@pytest.mark.sampled(3)
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

    parity.check(modernbert(rope_parameters=scaled), tmp_path, limit)


@pytest.mark.slow
def test_rope_scaling_of_an_older_release_is_of_both_types_of_layers(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    scaled = {layer_type: rope | scaling for layer_type, rope in ropes().items()}

    parity.check(modernbert(rope_parameters=scaled), tmp_path, LIMIT, **OLD_FIELDS | {"rope_scaling": scaling})


def test_global_layers_alone_need_no_base_of_local_ones(tmp_path: Path) -> None:
    changes = OLD_FIELDS | {"global_attn_every_n_layers": 1, "local_rope_theta": None}
    model = parity.seeded(modernbert(layer_types=[GLOBAL] * 6))
    engine = make_engine(parity.save(model, tmp_path, **changes))

    parity.check_rows(engine, sequences([30]), parity.reference_rows(model, sequences([30])))


@pytest.mark.slow
def test_a_language_model_gives_the_vectors_of_its_encoder(tmp_path: Path) -> None:
    model = ModernBertForMaskedLM(config())
    encoder = parity.seeded(model).model
    engine = make_engine(parity.save(model, tmp_path))
    ids = sequences([1, 30, 9])

    assert engine.hello().architecture == "ModernBertForMaskedLM"
    parity.check_rows(engine, ids, parity.reference_rows(encoder, ids))


def test_a_language_models_head_is_not_read(tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(ModernBertForMaskedLM(config())), tmp_path)
    expected = parity.rows_of(folder, sequences([20]))
    tensors = load_file(folder / "model.safetensors")
    assert {"head.dense.weight", "head.norm.weight", "decoder.bias"} <= tensors.keys()
    tensors |= {name: torch.zeros(3) for name in ("head.dense.weight", "head.norm.bias", "decoder.weight")}
    save_file(tensors, folder / "model.safetensors")

    np.testing.assert_array_equal(parity.rows_of(folder, sequences([20])), expected)


@pytest.mark.parametrize("missing", ["layers.1.attn_norm.weight", "embeddings.norm.weight", "final_norm.weight"])
def test_a_norm_that_is_missing_is_not_left_random(missing: str, tmp_path: Path) -> None:
    folder = parity.save(modernbert(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, folder / "model.safetensors")

    with pytest.raises(ModelError, match=rf"Missing tensors: {missing}\. Unexpected tensors: none"):
        make_engine(folder)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    model = parity.seeded(modernbert(norm_bias=True, attention_bias=True, mlp_bias=True))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = parity.save(model, tmp_path)
    ids = sequences([60])

    hidden = hidden_states(folder, ids[0], torch.bfloat16, reference=True)

    assert hidden.dtype == torch.float32
    expected = parity.reference_rows(model, ids)
    np.testing.assert_allclose(hidden.mean(dim=0, keepdim=True).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type: 'bert' is not a ModernBertModel's"),
        ({"model_type": "modernbert-decoder"}, "model_type: 'modernbert-decoder' is not"),
        ({"architectures": ["ModernBertDecoderModel"]}, "architectures: ModernBertDecoderModel is not supported"),
        ({"is_causal": True}, "is_causal: only encoders"),
        ({"is_decoder": True}, "is_decoder: only encoders"),
        ({"add_cross_attention": True}, "add_cross_attention: only encoders"),
        ({"hidden_activation": "mish"}, "hidden_activation: 'mish' is not supported"),
        ({"hidden_activation": None}, "hidden_activation: None is not supported"),
        ({"norm_eps": None}, "norm_eps: a number between 0 and 1"),
        ({"norm_bias": "yes"}, "norm_bias: true or false"),
        ({"attention_bias": 1}, "attention_bias: true or false"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 32"),
        ({"num_attention_heads": 32}, "num_attention_heads: heads of 1 columns"),
        ({"local_attention": None}, "local_attention: missing"),
        ({"local_attention": -1}, "local_attention: a positive integer"),
        ({"local_attention": [4, 4]}, "local_attention: a positive integer"),
        ({"layer_types": None}, "global_attn_every_n_layers: missing, and there is no layer_types either"),
        ({"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers: a positive integer"),
        ({"layer_types": [GLOBAL] * 5}, "layer_types: 6 of 'full_attention' or 'sliding_attention' are needed"),
        ({"layer_types": [GLOBAL] * 5 + ["chunked_attention"]}, "layer_types: 6 of"),
        ({"layer_types": GLOBAL}, "layer_types: 6 of"),
        ({"rope_parameters": None}, "global_rope_theta: missing, and rope_parameters has no rope_theta of full"),
        ({"rope_parameters": ropes() | {LOCAL: None}}, "local_rope_theta: missing, and rope_parameters has no"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: a map of 'full_attention' and"),
        ({"rope_parameters": [1e4]}, "rope_parameters: a map of"),
        ({"rope_parameters": ropes() | {LOCAL: 1e4}}, "rope_parameters: sliding_attention: a map is needed"),
        ({"global_rope_theta": 1e4}, "global_rope_theta, rope_parameters: full_attention: they disagree"),
        ({"local_rope_theta": "low"}, "local_rope_theta: a positive number"),
        ({"rope_scaling": {"rope_type": "of another kind", "factor": 2.0}}, "rope_scaling.rope_type: 'of another"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: "),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(modernbert(), tmp_path, **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_cuda_device_gives_nearly_the_vectors_of_the_cpu(tmp_path: Path, dtype: str, biased: bool) -> None:
    model = modernbert(
        hidden_size=256,
        intermediate_size=384,
        max_position_embeddings=1024,
        local_attention=128,
        norm_bias=biased,
        attention_bias=biased,
        mlp_bias=biased,
    )
    folder = parity.save(parity.seeded(model), tmp_path / "model")
    ids = sequences([1, 3, 64, 65, 66, 129, 400, 1024, 20, 20])
    expected = parity.rows_of(folder, ids)

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))
    rows = embed(engine, ids, width=256)

    assert lowest_cosine(rows, expected) >= (0.99999 if dtype == "float32" else 0.999)
    alone = np.concatenate([embed(engine, [row], width=256) for row in ids])
    assert lowest_cosine(rows, alone) >= 0.999


def lowest_cosine(rows: Rows, expected: Rows) -> float:
    return float((unit(rows) * unit(expected)).sum(axis=1).min())
