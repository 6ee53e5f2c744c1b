"""What is peculiar to NomicBERT and GTE: fields and names of their own code, a base that grows, stretched rotations.

No class of transformers stretches as GTE's own code does. What that is compared with is GteModel turning by frequencies
that are computed here, column by column, from the rule itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests import parity
from tests.families import LIMIT, NEW, NOMIC, THETA, WITHOUT_CURRENT, Fields, declared, plain, save, tiny
from tests.models import embed
from tests.worker.conftest import make_engine
from worker.checkpoint.files import ModelError
from worker.models.families.gte import NtkRope


def rename_tensors(folder: Path, old: str, new: str, **added: torch.Tensor) -> Path:
    """In the names of `added`, "__" stands for a dot."""
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in added.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- NomicBERT ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "current"),
    [
        ({"activation_function": "geglu"}, {"hidden_act": "gelu"}),
        ({"rotary_emb_base": 50}, {"rope_parameters": plain(50.0)}),
        ({"layer_norm_epsilon": 0.3}, {"layer_norm_eps": 0.3}),
        ({"n_head": 2}, {"num_attention_heads": 2}),
    ],
    ids=str,
)
def test_each_field_of_the_own_code_counts_as_transformers_does(own: Fields, current: Fields, tmp_path: Path) -> None:
    ids = parity.sequences(LIMIT)[-1:]
    before = parity.rows_of(save("NomicBertModel", tmp_path / "plain"), ids)

    engine = parity.check(
        tiny("NomicBertModel", **current), tmp_path / "changed", LIMIT, **NOMIC | WITHOUT_CURRENT | own
    )

    assert np.abs(embed(engine, ids) - before).max() > 1e-3


def with_biases(model: PreTrainedModel, *names: str) -> PreTrainedModel:
    """The model with biases in these linear layers, which transformers' class never has and the own code may have."""
    for layer in model.layers:
        for name in names:
            parent = layer.get_submodule(name.partition(".")[0])
            linear = layer.get_submodule(name)
            setattr(parent, name.partition(".")[2], nn.Linear(linear.in_features, linear.out_features))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("qkv_proj_bias", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]),
        ("mlp_fc1_bias", ["mlp.gate_proj", "mlp.up_proj"]),
        ("mlp_fc2_bias", ["mlp.down_proj"]),
    ],
)
def test_biases_are_added_where_the_own_code_has_them(flag: str, names: list[str], tmp_path: Path) -> None:
    parity.check(with_biases(tiny("NomicBertModel"), *names), tmp_path, LIMIT, **NOMIC | {flag: True})


def test_biases_are_there_where_the_own_codes_file_does_not_say(tmp_path: Path) -> None:
    folder = save("NomicBertModel", tmp_path, **NOMIC | {"qkv_proj_bias": None})

    with pytest.raises(ModelError, match=r"Missing tensors: encoder\.layers\.0\.attn\.Wqkv\.bias"):
        make_engine(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "limit"), [(64, 64), (None, LIMIT), (2 * LIMIT, LIMIT)])
def test_a_base_that_would_grow_with_the_text_limits_it_to_the_length_of_training(
    trained: int | None, limit: int, tmp_path: Path
) -> None:
    changes = NOMIC | {"rotary_scaling_factor": 2, "max_trained_positions": trained}

    parity.check(tiny("NomicBertModel"), tmp_path, limit, **changes)


def test_a_base_that_does_not_grow_leaves_the_declared_length(tmp_path: Path) -> None:
    changes = {"n_positions": 8192, "max_position_embeddings": 2048, "max_trained_positions": 2048}

    assert make_engine(save("NomicBertModel", tmp_path, **NOMIC | changes)).hello().max_tokens == 8192


def test_tensors_under_the_names_within_transformers_are_refused(tmp_path: Path) -> None:
    folder = rename_tensors(save("NomicBertModel", tmp_path), "mlp.fc2", "mlp.down_proj")

    with pytest.raises(ModelError, match=r"Missing tensors: encoder\.layers\.0\.mlp\.fc2\.weight"):
        make_engine(folder)


# --- both ---


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("NomicBertForPreTraining", "nomic_bert.", "bert."),
        ("NewForMaskedLM", "gte.", "new."),
        ("NewForTokenClassification", "gte.", "new."),
    ],
)
def test_names_of_the_own_code_give_the_vectors_of_the_encoder(name: str, old: str, new: str, tmp_path: Path) -> None:
    model = parity.seeded(tiny(name))
    folder = parity.save(model, tmp_path, **declared(name))
    rename_tensors(folder, old, new, **({} if old == "nomic_bert." else {"classifier__weight": torch.zeros(3)}))
    ids = parity.sequences(33)

    parity.check_rows(make_engine(folder), ids, parity.reference_rows(model.base_model, ids))


# --- GTE's rotations ---


def stretched(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """The model, turning by what the own code calls "ntk": the base times the factor, and then all frequencies divided
    by the factor's (dim / 2)th root. So column i is slower by the factor to the power of (i + 1) / (dim / 2), and the
    last by the factor itself."""
    half = len(model.rotary_emb.inv_freq)
    frequencies = [THETA ** (-i / half) * factor ** (-(i + 1) / half) for i in range(half)]
    model.rotary_emb.inv_freq = torch.tensor(frequencies)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0, 8.0])
@pytest.mark.parametrize(
    ("field", "scaling", "changes"),
    [
        pytest.param("rope_scaling", {"type": "ntk"}, {}, id="published"),
        pytest.param("rope_scaling", {"rope_type": "ntk", "type": "ntk", "mixed_b": None}, {}, id="both-types"),
        pytest.param("rope_parameters", {"rope_type": "ntk", "rope_theta": THETA}, {"rope_theta": None}, id="later"),
    ],
)
def test_stretched_rotations_follow_their_rule(
    field: str, scaling: Fields, changes: Fields, factor: float, tmp_path: Path
) -> None:
    model, ids = parity.seeded(tiny("GteModel")), parity.sequences(LIMIT)
    unchanged = parity.reference_rows(model, ids)
    expected = parity.reference_rows(stretched(model, factor), ids)

    engine = make_engine(parity.save(model, tmp_path, **NEW | changes | {field: scaling | {"factor": factor}}))

    assert engine.hello().max_tokens == LIMIT
    parity.check_rows(engine, ids, expected)
    assert np.abs(expected - unchanged).max() > 1e-3


def test_the_published_models_frequencies_follow_the_rule_in_full_precision() -> None:
    rope = NtkRope(64, 500_000.0, 8192, factor=2.0)

    frequencies = rope.inverse_frequencies().double().numpy()

    columns = np.arange(32)
    expected = 500_000.0 ** (-columns / 32) * 2.0 ** (-(columns + 1) / 32)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert frequencies[0] == pytest.approx(2 ** (-1 / 32), rel=1e-6)
    assert frequencies[31] * 2 == pytest.approx(500_000.0 ** (-31 / 32), rel=1e-6)
