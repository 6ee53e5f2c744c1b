"""NomicBERT against transformers' own class: both dialects of config.json, names of checkpoints, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import NomicBertConfig, NomicBertForMaskedLM, NomicBertModel, PreTrainedModel

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

LIMIT = 160
CODE = "nomic-ai/nomic-bert-2048--"

# transformers' names of what the own code calls otherwise: the files of the first releases have none of them.
WITHOUT_CURRENT: dict[str, object] = {
    "head_dim": None,
    "hidden_act": None,
    "hidden_size": None,
    "intermediate_size": None,
    "layer_norm_eps": None,
    "max_position_embeddings": None,
    "num_attention_heads": None,
    "num_hidden_layers": None,
    "rope_parameters": None,
}

# As in nomic-embed-text-v1.5's file, but for the sizes.
OWN: dict[str, object] = {
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": f"{CODE}configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": f"{CODE}modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": f"{CODE}modeling_hf_nomic_bert.NomicBertForPreTraining",
        "AutoModelForMultipleChoice": f"{CODE}modeling_hf_nomic_bert.NomicBertForMultipleChoice",
        "AutoModelForQuestionAnswering": f"{CODE}modeling_hf_nomic_bert.NomicBertForQuestionAnswering",
        "AutoModelForSequenceClassification": f"{CODE}modeling_hf_nomic_bert.NomicBertForSequenceClassification",
        "AutoModelForTokenClassification": f"{CODE}modeling_hf_nomic_bert.NomicBertForTokenClassification",
    },
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 64,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 80,
    "n_layer": 2,
    "n_positions": LIMIT,
    "pad_vocab_size_multiple": 16,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
}


def config(**changes: object) -> NomicBertConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LIMIT,
    }
    return NomicBertConfig(**shape | changes)


def nomic_bert(**changes: object) -> PreTrainedModel:
    return NomicBertModel(config(**changes))


def with_biases(model: PreTrainedModel, *names: str) -> PreTrainedModel:
    """The model with biases in these linear layers, which transformers' class never has and the own code may have."""
    for layer in model.layers:
        for name in names:
            parent = layer.get_submodule(name.partition(".")[0])
            plain = layer.get_submodule(name)
            setattr(parent, name.partition(".")[2], nn.Linear(plain.in_features, plain.out_features))
    return model


def sequences(lengths: list[int]) -> list[list[int]]:
    return random_sequences(lengths, seed=4, vocab_size=VOCAB_SIZE)


def rename_tensors(folder: Path, old: str, new: str) -> Path:
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, id="theta"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}}, id="linear"),
        pytest.param({"hidden_act": "gelu"}, id="gelu"),
        pytest.param({"hidden_act": "relu"}, id="relu"),
        pytest.param({"layer_norm_eps": 0.3}, id="epsilon"),
        pytest.param({"num_attention_heads": 2}, id="two-heads"),
        pytest.param({"head_dim": 16}, id="wide-heads"),
        pytest.param({"type_vocab_size": 1}, id="one-type"),
    ],
)
def test_the_vectors_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    engine = parity.check(nomic_bert(**changes), tmp_path, LIMIT)

    assert engine.hello().architecture == "NomicBertModel"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(OWN | WITHOUT_CURRENT, id="own-names"),
        pytest.param(OWN | {"max_position_embeddings": 64}, id="both"),
        pytest.param(OWN | WITHOUT_CURRENT | {"model_type": None, "auto_map": None}, id="no-type"),
    ],
)
def test_the_own_codes_fields_mean_what_transformers_fields_do(changes: dict[str, object], tmp_path: Path) -> None:
    parity.check(nomic_bert(), tmp_path, LIMIT, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "current"),
    [
        pytest.param({"activation_function": "geglu"}, {"hidden_act": "gelu"}, id="geglu"),
        pytest.param(
            {"rotary_emb_base": 50}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, id="base"
        ),
        pytest.param({"layer_norm_epsilon": 0.3}, {"layer_norm_eps": 0.3}, id="epsilon"),
        pytest.param({"n_head": 2}, {"num_attention_heads": 2}, id="two-heads"),
    ],
)
def test_each_field_changes_the_vectors_as_in_transformers(
    own: dict[str, object], current: dict[str, object], tmp_path: Path
) -> None:
    ids = sequences([60])
    plain = parity.rows_of(parity.save(parity.seeded(nomic_bert()), tmp_path / "plain"), ids)

    engine = parity.check(nomic_bert(**current), tmp_path / "changed", LIMIT, **OWN | WITHOUT_CURRENT | own)

    assert np.abs(embed(engine, ids) - plain).max() > 1e-3


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
    parity.check(with_biases(nomic_bert(), *names), tmp_path, LIMIT, **OWN | {flag: True})


def test_biases_are_there_where_the_own_codes_file_does_not_say(tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(nomic_bert()), tmp_path, **OWN | {"qkv_proj_bias": None})

    with pytest.raises(ModelError, match=r"Missing tensors: encoder\.layers\.0\.attn\.Wqkv\.bias"):
        make_engine(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "limit"), [(64, 64), (None, LIMIT), (2 * LIMIT, LIMIT)])
def test_a_base_that_would_grow_with_the_text_limits_it_to_the_length_of_training(
    trained: int | None, limit: int, tmp_path: Path
) -> None:
    changes = OWN | {"rotary_scaling_factor": 2, "max_trained_positions": trained}

    parity.check(nomic_bert(), tmp_path, limit, **changes)


def test_a_base_that_does_not_grow_leaves_the_declared_length(tmp_path: Path) -> None:
    changes = {"n_positions": 8192, "max_position_embeddings": 2048, "max_trained_positions": 2048}

    assert make_engine(parity.save(nomic_bert(), tmp_path, **OWN | changes)).hello().max_tokens == 8192


def test_a_missing_base_is_transformers_own(tmp_path: Path) -> None:
    model = parity.seeded(nomic_bert())
    ids = sequences([30])

    rows = parity.rows_of(parity.save(model, tmp_path, rope_parameters=None), ids)

    np.testing.assert_allclose(rows, parity.reference_rows(model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", ["nomic_bert.", "bert."])
def test_a_language_model_gives_the_vectors_of_its_encoder(prefix: str, tmp_path: Path) -> None:
    model = NomicBertForMaskedLM(config())
    encoder = parity.seeded(model).nomic_bert
    architecture = {"nomic_bert.": "NomicBertForMaskedLM", "bert.": "NomicBertForPreTraining"}[prefix]
    folder = parity.save(model, tmp_path, architectures=[architecture])
    ids = sequences([1, 30, 9])

    engine = make_engine(rename_tensors(folder, "nomic_bert.", prefix))

    parity.check_rows(engine, ids, parity.reference_rows(encoder, ids))


def test_a_second_text_has_the_second_type(tmp_path: Path) -> None:
    model = parity.seeded(nomic_bert())
    ids = sequences([20])
    batch = make_batch(ids, type_starts=[8])

    rows = make_engine(parity.save(model, tmp_path)).step(batch).numpy().rows.view(np.float32)

    types = torch.tensor([[0] * 8 + [1] * 12])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids), token_type_ids=types).last_hidden_state.mean(dim=1)
    np.testing.assert_allclose(rows, expected.numpy(), rtol=0, atol=1e-5)
    assert np.abs(rows - parity.reference_rows(model, ids)).max() > 1e-3


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    model = parity.seeded(nomic_bert())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = parity.save(model, tmp_path)
    ids = sequences([60])
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
        ({"model_type": "bert"}, "model_type: 'bert' is not this architecture's: nomic_bert"),
        ({"architectures": ["NomicBertForTokenClassification"]}, "architectures: NomicBertForTokenClass"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"hidden_size": None}, "n_embd: missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing, and no n_layer either"),
        ({"layer_norm_eps": None}, "layer_norm_eps: missing, and no layer_norm_epsilon either"),
        ({"max_position_embeddings": None}, "max_position_embeddings: missing"),
        ({"type_vocab_size": None}, "type_vocab_size: a whole number from 0 on is needed, not None"),
        ({"type_vocab_size": -1}, "type_vocab_size: a whole number"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads, n_head: 5 does not divide"),
        ({"head_dim": 7}, "head_dim: 7 is odd"),
        ({"is_decoder": True}, "is_decoder: only encoders"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_parameters.rope_type: 'ntk' is not"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction: only 1 is supported"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers: mixtures of experts, such as nomic-embed-text-v2-moe"),
        ({"num_experts": 8}, "num_experts: mixtures of experts"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(nomic_bert(), tmp_path, **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 64}, "n_embd: 64, but hidden_size is 32"),
        ({"n_layer": 3}, "n_layer: 3, but num_hidden_layers is 2"),
        ({"n_head": 2}, "n_head: 2, but num_attention_heads is 4"),
        ({"n_inner": None, "intermediate_size": None}, "intermediate_size: missing, and no n_inner either"),
        ({"n_positions": None}, "n_positions: missing"),
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon: 1e-05, but layer_norm_eps is 1e-12"),
        ({"activation_function": "gelu"}, "activation_function: 'gelu' is not supported; supported are swiglu, geglu"),
        ({"activation_function": "geglu"}, "activation_function: 'geglu', but hidden_act is 'silu'"),
        ({"activation_function": None, "hidden_act": None}, "hidden_act: None is not supported"),
        ({"rotary_emb_fraction": None}, "rotary_emb_fraction: only 1 is supported"),
        ({"rotary_emb_fraction": 0.0}, "rotary_emb_fraction: only 1 is supported"),
        ({"rotary_emb_base": None}, "rotary_emb_base: a positive number"),
        ({"rotary_emb_base": 10000}, "rope_theta, rope_parameters.rope_theta: they disagree"),
        ({"rope_theta": 10000.0}, "rotary_emb_base: 1000.0, but rope_theta is 10000.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling, rope_parameters: scaled, which the model's own code does not know of",
        ),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved: only False is supported, not True"),
        ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base: only None is supported, not 512"),
        ({"rotary_head_dim": True}, "rotary_head_dim: only False"),
        ({"prenorm": True}, "prenorm: only False is supported, not True"),
        ({"parallel_block": True}, "parallel_block: only False"),
        ({"causal": True}, "causal: only False"),
        ({"use_rms_norm": True}, "use_rms_norm: only False"),
        ({"norm_mlp": True}, "norm_mlp: only False"),
        ({"scale_attn_weights": False}, "scale_attn_weights: only True"),
        ({"num_heads_kv": 2}, "num_heads_kv: 2: key-value heads that are shared"),
        ({"pad_vocab_size_multiple": 64}, "vocab_size: 96 is no multiple of pad_vocab_size_multiple 64"),
        ({"qkv_proj_bias": "no"}, "qkv_proj_bias: true or false"),
        ({"auto_map": {"AutoModel": "modeling.NomicBertWithMore"}}, "auto_map: 'modeling.NomicBertWithMore' is code"),
    ],
)
def test_own_fields_that_are_not_implemented_or_disagree_stop_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(nomic_bert(), tmp_path, **OWN | changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


def test_tensors_under_the_names_within_transformers_are_refused(tmp_path: Path) -> None:
    folder = rename_tensors(parity.save(nomic_bert(), tmp_path), "mlp.fc2", "mlp.down_proj")

    with pytest.raises(ModelError, match=r"Missing tensors: encoder\.layers\.0\.mlp\.fc2\.weight"):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_cuda_device_gives_nearly_the_vectors_of_the_cpu(tmp_path: Path, dtype: str, biased: bool) -> None:
    model = nomic_bert(hidden_size=256, intermediate_size=768, max_position_embeddings=1024)
    changes: dict[str, object] = {}
    if biased:
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        with_biases(model, *(f"self_attn.{name}" for name in names), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        changes = OWN | {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
        changes |= {"n_embd": 256, "n_inner": 768, "n_positions": 1024}
    folder = parity.save(parity.seeded(model), tmp_path / "model", **changes)
    ids = sequences([1, 3, 64, 65, 66, 129, 400, 1024, 20, 20])
    expected = parity.rows_of(folder, ids)

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))
    rows = embed(engine, ids, width=256)

    assert lowest_cosine(rows, expected) >= (0.99999 if dtype == "float32" else 0.999)
    alone = np.concatenate([embed(engine, [row], width=256) for row in ids])
    assert lowest_cosine(rows, alone) >= 0.999


def lowest_cosine(rows: Rows, expected: Rows) -> float:
    return float((unit(rows) * unit(expected)).sum(axis=1).min())
