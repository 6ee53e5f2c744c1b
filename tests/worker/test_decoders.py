"""Qwen3, Qwen2, Mistral and Llama against transformers' own classes: every variant that a config.json declares, what
each field changes, names of checkpoints, refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from common.text.tokenization import Tokenizer, TruncationRule
from tests import parity
from tests.models import edit_json, embed, make_batch, write_qwen3
from tests.parity import VOCAB_SIZE
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.loader import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 160
TRAINED = 40  # tokens, of the models whose positions are scaled to LIMIT

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
}

OWN_CODE = {
    "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
    "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
}
BIDIRECTIONAL_LLAMA = {
    "architectures": ["LlamaBidirectionalModel"],
    "auto_map": OWN_CODE,
    "is_causal": None,
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 0.02,
}
GTE_CODE = {
    "AutoModel": "modeling_qwen.Qwen2Model",
    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
}


def qwen3(**changes: object) -> PreTrainedModel:
    return Qwen3Model(Qwen3Config(**SHAPE | {"head_dim": 16} | changes))


def qwen2(**changes: object) -> PreTrainedModel:
    return Qwen2Model(Qwen2Config(**SHAPE | changes))


def mistral(**changes: object) -> PreTrainedModel:
    return MistralModel(MistralConfig(**SHAPE | {"sliding_window": None} | changes))


def llama(**changes: object) -> PreTrainedModel:
    return LlamaModel(LlamaConfig(**SHAPE | changes))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3": qwen3,
    "qwen2": qwen2,
    "mistral": mistral,
    "llama": llama,
}

WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED, "beta_fast": 4.0},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def scaled(family: str, kind: str) -> PreTrainedModel:
    """A model of LIMIT positions, of which it was trained on TRAINED."""
    return FAMILIES[family](
        max_position_embeddings=TRAINED if kind == "dynamic" else LIMIT,
        rope_parameters={"rope_type": kind, "rope_theta": 1000.0, **SCALINGS[kind]},
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_vectors_are_those_of_transformers(family: str, is_causal: bool, tmp_path: Path) -> None:
    parity.check(FAMILIES[family](is_causal=is_causal), tmp_path, LIMIT)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(qwen3(attention_bias=True), id="qwen3-bias"),
        pytest.param(qwen3(num_key_value_heads=1), id="qwen3-one-kv-head"),
        pytest.param(qwen3(num_key_value_heads=4), id="qwen3-own-kv-heads"),
        pytest.param(qwen3(rms_norm_eps=0.25), id="qwen3-epsilon"),
        pytest.param(qwen3(hidden_act="gelu"), id="qwen3-gelu"),
        pytest.param(qwen3(**WINDOWS), id="qwen3-windows"),
        pytest.param(qwen3(**WINDOWS, is_causal=False), id="qwen3-windows-both-sides"),
        pytest.param(qwen3(**WINDOWS, layer_types=LAYER_TYPES), id="qwen3-layer-types"),
        pytest.param(qwen2(head_dim=16), id="qwen2-head-dim"),
        pytest.param(qwen2(num_key_value_heads=1), id="qwen2-one-kv-head"),
        pytest.param(qwen2(rms_norm_eps=0.25), id="qwen2-epsilon"),
        pytest.param(qwen2(hidden_act="gelu_new"), id="qwen2-gelu_new"),
        pytest.param(qwen2(**WINDOWS), id="qwen2-windows"),
        pytest.param(qwen2(**WINDOWS, is_causal=False), id="qwen2-windows-both-sides"),
        pytest.param(qwen2(**WINDOWS, layer_types=LAYER_TYPES), id="qwen2-layer-types"),
        pytest.param(mistral(head_dim=16), id="mistral-head-dim"),
        pytest.param(mistral(num_key_value_heads=1), id="mistral-one-kv-head"),
        pytest.param(mistral(sliding_window=1), id="mistral-window-1"),
        pytest.param(mistral(sliding_window=8), id="mistral-window-8"),
        pytest.param(mistral(sliding_window=LIMIT - 1), id="mistral-window-of-all-but-one"),
        pytest.param(mistral(sliding_window=4096), id="mistral-window-of-all"),
        pytest.param(mistral(sliding_window=8, is_causal=False), id="mistral-window-both-sides"),
        pytest.param(mistral(hidden_act="relu"), id="mistral-relu"),
        pytest.param(llama(head_dim=16), id="llama-head-dim"),
        pytest.param(llama(num_key_value_heads=None), id="llama-own-kv-heads"),
        pytest.param(llama(attention_bias=True), id="llama-attention-bias"),
        pytest.param(llama(mlp_bias=True), id="llama-mlp-bias"),
        pytest.param(llama(attention_bias=True, mlp_bias=True, is_causal=False), id="llama-biases"),
    ],
)
def test_a_variants_vectors_are_those_of_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    parity.check(model, tmp_path, LIMIT)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_positions_give_transformers_vectors_below_and_above_the_trained_length(
    family: str, kind: str, tmp_path: Path
) -> None:
    parity.check(scaled(family, kind), tmp_path, LIMIT)


@pytest.mark.parametrize("extra", [{}, {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}])
def test_a_llama_that_brings_bidirectional_code_sees_every_token(tmp_path: Path, extra: dict[str, object]) -> None:
    model = llama(is_causal=False, max_position_embeddings=TRAINED, **extra)

    engine = parity.check(model, tmp_path, LIMIT if extra else TRAINED, **BIDIRECTIONAL_LLAMA)

    assert engine.hello().architecture == "LlamaBidirectionalModel"


@pytest.mark.parametrize("architecture", ["Qwen2Model", "Qwen2ForCausalLM"])
def test_a_qwen2_that_brings_the_code_of_gte_is_computed_as_it_says(tmp_path: Path, architecture: str) -> None:
    parity.check(qwen2(is_causal=False), tmp_path, LIMIT, architectures=[architecture], auto_map=GTE_CODE)


def test_dynamic_scaling_changes_no_text_of_up_to_the_trained_length(tmp_path: Path) -> None:
    plain = parity.save(parity.seeded(llama(max_position_embeddings=TRAINED)), tmp_path / "plain")
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    dynamic = parity.save(
        parity.seeded(llama(max_position_embeddings=TRAINED)), tmp_path / "dynamic", rope_parameters=parameters
    )
    ids = parity.sequences(TRAINED)
    longer = parity.sequences(LIMIT)[-1]

    rows = embed(make_engine(dynamic), [longer, *ids], width=32)

    np.testing.assert_array_equal(rows[1:], parity.rows_of(plain, ids))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "fields", "change"),
    [
        ("qwen3", {}, {"is_causal": False}),
        ("qwen3", {}, {"rms_norm_eps": 0.01}),
        ("qwen3", {}, {"hidden_act": "gelu"}),
        ("qwen3", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
        ("qwen3", WINDOWS, {"use_sliding_window": False, "layer_types": None}),
        ("qwen3", WINDOWS, {"sliding_window": 9}),
        ("qwen3", WINDOWS, {"max_window_layers": 2, "layer_types": None}),
        ("qwen3", WINDOWS, {"layer_types": LAYER_TYPES}),
        ("qwen2", {}, {"is_causal": False}),
        ("qwen2", {}, {"hidden_act": "gelu"}),
        ("qwen2", WINDOWS, {"sliding_window": 7}),
        ("qwen2", WINDOWS, {"is_causal": False}),
        ("mistral", {}, {"is_causal": False}),
        ("mistral", {}, {"sliding_window": 32}),
        ("mistral", {"sliding_window": 8}, {"sliding_window": None}),
        ("mistral", {"sliding_window": 8}, {"is_causal": False}),
        ("llama", {}, {"is_causal": False}),
        ("llama", {}, BIDIRECTIONAL_LLAMA),
        ("llama", {}, {"hidden_act": "gelu_new"}),
        *(
            ("llama", {}, {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}})
            for kind, fields in SCALINGS.items()
            if kind != "dynamic"
        ),
    ],
)
def test_each_field_changes_the_vectors(
    family: str, fields: dict[str, object], change: dict[str, object], tmp_path: Path
) -> None:
    folder = parity.save(parity.seeded(FAMILIES[family](**fields)), tmp_path)
    ids = parity.sequences(LIMIT)[-1:]
    before = parity.rows_of(folder, ids)

    edit_json(folder / "config.json", **change)

    assert np.abs(parity.rows_of(folder, ids) - before).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("language_model", "config"),
    [
        pytest.param(Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16), id="qwen3"),
        pytest.param(Qwen2ForCausalLM, Qwen2Config(**SHAPE), id="qwen2"),
        pytest.param(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=8), id="mistral"),
        pytest.param(LlamaForCausalLM, LlamaConfig(**SHAPE, mlp_bias=True), id="llama"),
    ],
)
def test_a_checkpoint_of_the_language_model_gives_the_vectors_of_the_bare_one(
    language_model: type[PreTrainedModel], config: Qwen3Config, tied: bool, tmp_path: Path
) -> None:
    config.tie_word_embeddings = tied
    model = parity.seeded(language_model(config))
    whole, bare = parity.save(model, tmp_path / "whole"), parity.save(model.model, tmp_path / "bare")
    ids = parity.sequences(33)

    rows = parity.rows_of(whole, ids)

    assert json.loads((whole / "config.json").read_text())["architectures"] == [language_model.__name__]
    np.testing.assert_array_equal(rows, parity.rows_of(bare, ids))
    np.testing.assert_allclose(rows, parity.reference_rows(model.model, ids), rtol=0, atol=1e-5)


def test_frequencies_in_an_older_checkpoint_are_not_needed(tmp_path: Path) -> None:
    model = parity.seeded(llama())
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(4) for index in range(3)}
    bare = parity.save(model, tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    folder = write_qwen3(tmp_path / "older", config=config, tensors=tensors, pooling="pooling_mode_mean_tokens")

    ids = parity.sequences(33)

    np.testing.assert_array_equal(parity.rows_of(folder, ids), parity.rows_of(bare, ids))


def test_a_llamas_config_may_leave_out_what_the_first_ones_did(tmp_path: Path) -> None:
    model = llama(num_key_value_heads=4)

    parity.check(model, tmp_path, LIMIT, num_key_value_heads=None, rope_parameters=None, head_dim=None)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_the_last_tokens_vector_is_that_of_the_end_token(family: str, tmp_path: Path) -> None:
    model = parity.seeded(FAMILIES[family]())
    config = json.loads((parity.save(model, tmp_path / "bare") / "config.json").read_text())
    folder = write_qwen3(tmp_path / "model", config=config, tensors=model.state_dict())
    engine = make_engine(folder)
    ids = [row.tolist() for row in Tokenizer(engine.hello()).encode(["w3 w5 w3", "w9"], TruncationRule(allowed=True))]

    rows = embed(engine, ids, width=32, normalize=[1, 1])

    model.set_attn_implementation("eager")
    with torch.no_grad():
        last = torch.cat([model(input_ids=torch.tensor([row])).last_hidden_state[:, -1] for row in ids])
    assert [row[-1] for row in ids] == [2, 2]
    np.testing.assert_allclose(rows, torch.nn.functional.normalize(last).numpy(), rtol=0, atol=1e-5)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
    model = parity.seeded(qwen2(**WINDOWS, max_position_embeddings=TRAINED, rope_parameters=parameters)).bfloat16()
    folder = parity.save(model, tmp_path)
    ids = sorted(parity.sequences(LIMIT), key=len)
    checkpoint = Checkpoint.read(folder)
    ours = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(ours, torch.nn.Module)
    load_weights(folder, ours.to(torch.bfloat16))
    ragged, _ = load_sorted(make_batch(ids, width=32), SdpaAttention())

    hidden = ours(dataclasses.replace(ragged, reference=True))

    assert hidden.dtype == torch.float32
    rows = torch.stack([part.mean(dim=0) for part in hidden.split([len(row) for row in ids])]).numpy()
    # As it is loaded, not converted: bfloat16 would round transformers' own frequencies, too.
    reference = Qwen2Model.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(rows, parity.reference_rows(reference, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"model_type": "qwen3"}, "model_type: 'qwen3' is not this architecture's"),
        ("qwen2", {"hidden_act": "quick_gelu"}, "hidden_act: 'quick_gelu' is not supported"),
        ("qwen2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: not a field of this"),
        ("qwen2", {"is_causal": 0}, "is_causal: true or false"),
        ("qwen2", {"num_key_value_heads": None}, "num_key_value_heads: missing"),
        ("qwen2", {"num_attention_heads": 6}, "num_attention_heads: 6 does not divide hidden_size 32"),
        ("qwen2", {"auto_map": GTE_CODE}, "is_causal: false is needed of a model that brings the code"),
        ("qwen2", {"auto_map": GTE_CODE | {"AutoModel": "modeling.Other"}}, "auto_map: 'modeling.Other' is code"),
        (
            "qwen2",
            {"auto_map": GTE_CODE, "is_causal": False, "layer_types": None, **WINDOWS},
            "auto_map: the code of gte-Qwen2 has neither",
        ),
        (
            "qwen2",
            {"auto_map": GTE_CODE, "is_causal": False, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_theta: missing",
        ),
        (
            "qwen2",
            {
                "auto_map": GTE_CODE,
                "is_causal": False,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
            "auto_map: the code of gte-Qwen2 has neither",
        ),
        ("mistral", {"model_type": "ministral"}, "model_type: 'ministral' is not"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types: not a field of Mistral's"),
        ("mistral", {"sliding_window": 0}, "sliding_window: a positive integer"),
        ("mistral", {"sliding_window": "8"}, "sliding_window: a positive integer"),
        ("mistral", {"auto_map": {"AutoModel": "modeling.MistralModel"}}, "auto_map: .* never run"),
        ("mistral", {"rope_parameters": None}, "rope_theta: missing"),
        ("llama", {"model_type": "llama_bidirec"}, "model_type: 'llama_bidirec' is not"),
        ("llama", {"attention_bias": "qkv"}, "attention_bias: true or false"),
        ("llama", {"mlp_bias": 1}, "mlp_bias: true or false"),
        ("llama", {"head_dim": 7}, "head_dim: 7 is odd"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps: a number between 0 and 1"),
        ("llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention: not a field"),
        ("llama", {"auto_map": OWN_CODE}, "auto_map: .* never run"),
        ("llama", BIDIRECTIONAL_LLAMA | {"model_type": "llama"}, "model_type: 'llama' is not"),
        ("llama", BIDIRECTIONAL_LLAMA | {"is_causal": True}, "is_causal: true, but a LlamaBidirectionalModel"),
        ("llama", BIDIRECTIONAL_LLAMA | {"use_bidirectional_attention": False}, "use_bidirectional_attention: false"),
        ("llama", BIDIRECTIONAL_LLAMA | {"auto_map": {"AutoModel": "modeling.Other"}}, "auto_map: 'modeling.Other'"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "architectures: LlamaForTok.* is not"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = parity.save(FAMILIES[family](), tmp_path, **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


def test_a_mistral_has_to_say_whether_it_has_a_window(tmp_path: Path) -> None:
    folder = parity.save(mistral(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=r"config\.json: sliding_window: missing"):
        make_engine(folder)


@pytest.mark.parametrize("window", [None, LIMIT, 4096])
def test_a_window_of_all_positions_is_none(tmp_path: Path, window: int | None) -> None:
    checkpoint = Checkpoint.read(parity.save(mistral(sliding_window=window), tmp_path))

    assert not build(checkpoint.architecture, checkpoint.config).windowed
