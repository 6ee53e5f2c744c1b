"""GTE of 2024 against transformers' own class: the own code's fields and names, stretched rotations, what is refused.

No class of transformers stretches as the own code does. What that is compared with is GteModel turning by frequencies
that are computed here, column by column, from the rule itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GteConfig, GteForMaskedLM, GteModel, PreTrainedModel

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
from worker.models.families.gte import NtkRope
from worker.models.loader import load_weights

LIMIT = 160
THETA = 500.0
CODE = "Alibaba-NLP/new-impl--"

# As in gte-base-en-v1.5's file, but for the sizes.
OWN: dict[str, object] = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{CODE}configuration.NewConfig",
        "AutoModel": f"{CODE}modeling.NewModel",
        "AutoModelForMaskedLM": f"{CODE}modeling.NewForMaskedLM",
        "AutoModelForMultipleChoice": f"{CODE}modeling.NewForMultipleChoice",
        "AutoModelForQuestionAnswering": f"{CODE}modeling.NewForQuestionAnswering",
        "AutoModelForSequenceClassification": f"{CODE}modeling.NewForSequenceClassification",
        "AutoModelForTokenClassification": f"{CODE}modeling.NewForTokenClassification",
    },
    "classifier_dropout": None,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "model_type": "new",
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": THETA,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}

# As in snowflake-arctic-embed-m-v2.0's.
SNOWFLAKE: dict[str, object] = OWN | {
    "architectures": ["GteModel"],
    "auto_map": {
        "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
        "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
    },
    "matryoshka_dimensions": [256],
    "model_type": "gte",
    "unpad_inputs": "true",
    "use_memory_efficient_attention": "true",
}


def config(**changes: object) -> GteConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LIMIT,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    return GteConfig(**shape | changes)


def gte(**changes: object) -> PreTrainedModel:
    return GteModel(config(**changes))


def stretched(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """The model, turning by what the own code calls "ntk": the base times the factor, and then all frequencies divided
    by the factor's (dim / 2)th root. So column i is slower by the factor to the power of (i + 1) / (dim / 2), and the
    last by the factor itself."""
    half = len(model.rotary_emb.inv_freq)
    frequencies = [THETA ** (-i / half) * factor ** (-(i + 1) / half) for i in range(half)]
    model.rotary_emb.inv_freq = torch.tensor(frequencies)
    return model


def sequences(lengths: list[int]) -> list[list[int]]:
    return random_sequences(lengths, seed=4, vocab_size=VOCAB_SIZE)


def edit_tensors(folder: Path, prefix: str = "", **changes: torch.Tensor) -> Path:
    """A prefix before all names, then other tensors; in the latters' names, "__" stands for a dot."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}, id="theta"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}}, id="linear"),
        pytest.param({"hidden_act": "gelu_new"}, id="gelu_new"),
        pytest.param({"hidden_act": "relu"}, id="relu"),
        pytest.param({"hidden_act": "silu"}, id="silu"),
        pytest.param({"layer_norm_eps": 0.3}, id="epsilon"),
        pytest.param({"num_attention_heads": 2}, id="two-heads"),
        pytest.param({"type_vocab_size": 0}, id="no-types"),
        pytest.param({"type_vocab_size": 2}, id="two-types"),
    ],
)
def test_the_vectors_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    engine = parity.check(gte(**changes), tmp_path, LIMIT)

    assert engine.hello().architecture == "GteModel"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(OWN, id="own"),
        pytest.param(OWN | {"model_type": None, "auto_map": None, "layer_norm_type": None}, id="less"),
        pytest.param(OWN | {"unpad_inputs": True, "use_memory_efficient_attention": True}, id="packed"),
        pytest.param(SNOWFLAKE, id="snowflake"),
    ],
)
def test_the_own_codes_file_means_what_transformers_does(changes: dict[str, object], tmp_path: Path) -> None:
    parity.check(gte(), tmp_path, LIMIT, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0, 8.0])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"rope_scaling": {"type": "ntk", "factor": 0}}, id="published"),
        pytest.param(
            {"rope_scaling": {"rope_type": "ntk", "type": "ntk", "factor": 0, "mixed_b": None}}, id="both-types"
        ),
        pytest.param(
            {"rope_theta": None, "rope_parameters": {"rope_type": "ntk", "factor": 0, "rope_theta": THETA}}, id="later"
        ),
    ],
)
def test_stretched_rotations_follow_their_rule(fields: dict[str, object], factor: float, tmp_path: Path) -> None:
    changes = {
        name: {**value, "factor": factor} if isinstance(value, dict) else value for name, value in fields.items()
    }
    model = stretched(parity.seeded(gte()), factor)
    ids = parity.sequences(LIMIT)

    engine = make_engine(parity.save(model, tmp_path, **OWN | changes))

    assert engine.hello().max_tokens == LIMIT
    parity.check_rows(engine, ids, parity.reference_rows(model, ids))
    assert np.abs(embed(engine, ids) - parity.reference_rows(gte_with(model), ids)).max() > 1e-3


def gte_with(model: PreTrainedModel) -> PreTrainedModel:
    """The same parameters, not stretched."""
    plain = gte().eval()
    plain.load_state_dict(model.state_dict())
    return plain


def test_the_published_models_frequencies_follow_the_rule_in_full_precision() -> None:
    rope = NtkRope(64, 500_000.0, 8192, factor=2.0)

    frequencies = rope.inverse_frequencies().double().numpy()

    columns = np.arange(32)
    expected = 500_000.0 ** (-columns / 32) * 2.0 ** (-(columns + 1) / 32)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert frequencies[0] == pytest.approx(2 ** (-1 / 32), rel=1e-6)
    assert frequencies[31] * 2 == pytest.approx(500_000.0 ** (-31 / 32), rel=1e-6)


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [
        ("NewForMaskedLM", "new."),
        ("NewForTokenClassification", "new."),
        ("NewModel", "new."),
        ("GteForMaskedLM", "gte."),
    ],
)
def test_a_checkpoint_with_a_prefix_and_a_head_gives_the_vectors_of_its_encoder(
    architecture: str, prefix: str, tmp_path: Path
) -> None:
    model = parity.seeded(gte())
    auto_map = None if architecture == "GteForMaskedLM" else OWN["auto_map"]
    folder = parity.save(model, tmp_path, **OWN | {"architectures": [architecture], "auto_map": auto_map})
    edit_tensors(
        folder,
        prefix,
        lm_head__dense__weight=torch.zeros(3),
        lm_head__decoder__bias=torch.zeros(3),
        classifier__weight=torch.zeros(3),
    )
    ids = sequences([1, 30, 9])

    engine = make_engine(folder)

    assert engine.hello().architecture == architecture
    parity.check_rows(engine, ids, parity.reference_rows(model, ids))


def test_a_language_model_of_transformers_gives_the_vectors_of_its_encoder(tmp_path: Path) -> None:
    model = GteForMaskedLM(config())
    encoder = parity.seeded(model).gte
    ids = sequences([1, 30, 9])

    engine = make_engine(parity.save(model, tmp_path))

    parity.check_rows(engine, ids, parity.reference_rows(encoder, ids))


def test_a_second_text_has_the_second_type_where_there_is_one(tmp_path: Path) -> None:
    model = parity.seeded(gte(type_vocab_size=2))
    ids = sequences([20])

    rows = make_engine(parity.save(model, tmp_path)).step(make_batch(ids, type_starts=[8])).numpy().rows

    types = torch.tensor([[0] * 8 + [1] * 12])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids), token_type_ids=types).last_hidden_state.mean(dim=1)
    np.testing.assert_allclose(rows.view(np.float32), expected.numpy(), rtol=0, atol=1e-5)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    model = parity.seeded(gte())
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
        ({"model_type": "bert"}, "model_type: 'bert' is not this architecture's: new or gte"),
        (
            {"architectures": ["NewForQuestionAnswering"], "auto_map": None},
            "architectures: NewForQuestionAnswering is not supported",
        ),
        ({"position_embedding_type": "absolute"}, "position_embedding_type: only 'rope' is supported, not 'absolute'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type: only 'layer_norm' is supported, not 'rms_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale: scores that depend on the length"),
        ({"pack_qkv": False}, "pack_qkv: separate queries, keys and values"),
        ({"is_decoder": True}, "is_decoder: only encoders"),
        ({"add_cross_attention": True}, "add_cross_attention: only encoders"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"type_vocab_size": None}, "type_vocab_size: a whole number from 0 on is needed, not None"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 32"),
        ({"num_attention_heads": 32}, "num_attention_heads: heads of 1 columns"),
        ({"layer_norm_eps": None}, "layer_norm_eps: a number between 0 and 1"),
        ({"max_position_embeddings": None}, "max_position_embeddings: missing"),
        ({"rope_theta": None}, "rope_theta: missing"),
        ({"rope_scaling": {"type": "ntk"}}, r"rope_scaling\.factor: a positive number"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 1.0}},
            r"rope_scaling\.factor: a number above 1 is needed, not 1\.0",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "rope_scaling: of 'ntk' only factor"),
        ({"rope_scaling": {"type": "ntk", "rope_type": "yarn", "factor": 2.0}}, "rope_scaling: two types at once"),
        ({"rope_scaling": {"type": "of another kind", "factor": 2.0}}, "rope_scaling"),
        (
            {
                "rope_scaling": {"type": "ntk", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_scaling, rope_parameters: they disagree",
        ),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_parameters": {"rope_type": "ntk", "factor": 4.0}},
            "rope_scaling, rope_parameters: they disagree",
        ),
        ({"auto_map": {"AutoModel": "modeling.NewModelWithMore"}}, "auto_map: 'modeling.NewModelWithMore' is code"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(gte(), tmp_path, **OWN | changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


def test_a_bias_that_is_missing_is_not_left_random(tmp_path: Path) -> None:
    folder = parity.save(gte(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.mlp.down_proj.bias"]
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(ModelError, match=r"Missing tensors: encoder\.layer\.1\.mlp\.down_proj\.bias\. Unexpected"):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_types", [0, 1, 2])
def test_a_cuda_device_gives_nearly_the_vectors_of_the_cpu(tmp_path: Path, dtype: str, num_types: int) -> None:
    model = gte(hidden_size=256, intermediate_size=768, max_position_embeddings=1024, type_vocab_size=num_types)
    changes = OWN | {"rope_scaling": {"type": "ntk", "factor": 2.0}}
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
