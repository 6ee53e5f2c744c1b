"""What is peculiar to the decoders: code of their own that takes the mask away, older files, last tokens, windows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.text.tokenization import Tokenizer, TruncationRule
from tests import parity
from tests.families import (
    BIDIRECTIONAL_LLAMA,
    GLOBAL,
    LIMIT,
    OLD_GEMMA3,
    QWEN2_CODE,
    TRAINED,
    linear,
    ropes,
    save,
    tiny,
)
from tests.models import edit_json, embed, qwen3_config, random_sequences, write_qwen3
from tests.reference import Qwen3Reference
from tests.worker.conftest import make_engine
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_equal_the_reference(tmp_path: Path, num_kv_heads: int) -> None:
    folder = write_qwen3(tmp_path, config=qwen3_config(num_key_value_heads=num_kv_heads))
    sequences = random_sequences([1, 7, 48, 7, 2])

    rows = embed(make_engine(folder), sequences)

    reference = Qwen3Reference(folder, causal=True)
    np.testing.assert_allclose(rows, np.stack([reference.embed(row) for row in sequences]), rtol=0, atol=1e-5)


def test_a_causal_model_does_not_look_ahead(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "causal", pooling="pooling_mode_cls_token")
    twin = write_qwen3(tmp_path / "not", config=qwen3_config(is_causal=False), pooling="pooling_mode_cls_token")

    rows, twins = (embed(make_engine(path), [[5, 6, 7], [5, 8, 9]]) for path in (folder, twin))

    np.testing.assert_allclose(rows[0], rows[1], atol=1e-6)
    assert np.abs(twins[0] - twins[1]).max() > 0.01


@pytest.mark.parametrize("name", ["Qwen3Model", "MistralModel", "Qwen2Model"])
def test_the_last_tokens_vector_is_that_of_the_end_token(name: str, tmp_path: Path) -> None:
    model = parity.seeded(tiny(name))
    config = json.loads((parity.save(model, tmp_path / "bare") / "config.json").read_text())
    engine = make_engine(write_qwen3(tmp_path / "model", config=config, tensors=model.state_dict()))
    # More words than there are positions: the end token stays.
    texts = ["w3 w5 w3", "w9", " ".join(f"w{7 * i % 61}" for i in range(LIMIT + 20))]
    ids = [row.tolist() for row in Tokenizer(engine.hello()).encode(texts, TruncationRule(allowed=True))]

    rows = embed(engine, ids, width=32, normalize=[1] * 3)

    model.set_attn_implementation("eager")
    with torch.no_grad():
        last = torch.cat([model(input_ids=torch.tensor([row])).last_hidden_state[:, -1] for row in ids])
    assert [(len(row), row[-1]) for row in ids] == [(4, 2), (2, 2), (LIMIT, 2)]
    np.testing.assert_allclose(rows, torch.nn.functional.normalize(last).numpy(), rtol=0, atol=1e-5)


# --- code of their own ---


@pytest.mark.parametrize("scaling", [None, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}])
def test_a_llama_that_brings_bidirectional_code_may_scale_its_positions(
    tmp_path: Path, scaling: dict[str, object] | None
) -> None:
    changes = {} if scaling is None else {"rope_parameters": scaling}
    model = tiny("LlamaModel", is_causal=False, max_position_embeddings=TRAINED, **changes)

    engine = parity.check(model, tmp_path, TRAINED if scaling is None else LIMIT, **BIDIRECTIONAL_LLAMA)

    assert engine.hello().architecture == "LlamaBidirectionalModel"


@pytest.mark.parametrize("architecture", ["Qwen2Model", "Qwen2ForCausalLM"])
def test_a_qwen2_that_brings_the_code_of_gte_is_computed_as_it_says(tmp_path: Path, architecture: str) -> None:
    model = tiny("Qwen2Model", is_causal=False)

    parity.check(model, tmp_path, LIMIT, architectures=[architecture], auto_map=QWEN2_CODE)


@pytest.mark.parametrize("name", ["PPLXQwen3Model", "LlamaBidirectionalModel"])
def test_every_token_is_seen_by_a_model_whose_code_takes_the_mask_away(name: str, tmp_path: Path) -> None:
    ids = parity.sequences(LIMIT)[-1:]
    twin = {"PPLXQwen3Model": "Qwen3Model", "LlamaBidirectionalModel": "LlamaModel"}[name]

    both_ways, one_way = (parity.rows_of(save(each, tmp_path / each), ids) for each in (name, twin))

    assert np.abs(both_ways - one_way).max() > 0.1


# --- older files ---


def test_dynamic_scaling_changes_no_text_of_up_to_the_trained_length(tmp_path: Path) -> None:
    model = parity.seeded(tiny("LlamaModel", max_position_embeddings=TRAINED))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    usual = parity.save(model, tmp_path / "plain")
    scaled = parity.save(model, tmp_path / "dynamic", rope_parameters=dynamic)
    ids, longer = parity.sequences(TRAINED), parity.sequences(LIMIT)[-1]

    rows = embed(make_engine(scaled), [longer, *ids], width=32)

    np.testing.assert_array_equal(rows[1:], parity.rows_of(usual, ids))


def test_frequencies_in_an_older_checkpoint_are_not_needed(tmp_path: Path) -> None:
    model = parity.seeded(tiny("LlamaModel"))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(4) for index in range(3)}
    bare = parity.save(model, tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    folder = write_qwen3(tmp_path / "older", config=config, tensors=tensors, pooling="pooling_mode_mean_tokens")
    ids = parity.sequences(33)

    np.testing.assert_array_equal(parity.rows_of(folder, ids), parity.rows_of(bare, ids))


def test_a_llamas_config_may_leave_out_what_the_first_ones_did(tmp_path: Path) -> None:
    model = tiny("LlamaModel", num_key_value_heads=4)

    parity.check(model, tmp_path, LIMIT, num_key_value_heads=None, rope_parameters=None, head_dim=None)


# --- windows, and Gemma 3's two rotary tables ---


def test_a_mistral_has_to_say_whether_it_has_a_window(tmp_path: Path) -> None:
    folder = save("MistralModel", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=r"config\.json: sliding_window: missing"):
        make_engine(folder)


@pytest.mark.parametrize("window", [None, LIMIT, 4096])
def test_a_window_of_all_positions_is_none(tmp_path: Path, window: int | None) -> None:
    checkpoint = Checkpoint.read(save("MistralModel", tmp_path, sliding_window=window))

    assert not build(checkpoint.architecture, checkpoint.config).shape.windowed


@pytest.mark.parametrize("scaled", [{"rope_parameters": ropes() | {GLOBAL: linear(5000.0, 8.0)}}, {**OLD_GEMMA3}])
def test_scaled_positions_are_those_of_global_layers_alone(scaled: dict[str, object], tmp_path: Path) -> None:
    model = tiny("Gemma3TextModel", rope_parameters=ropes() | {GLOBAL: linear(5000.0, 8.0)})
    older = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}} if scaled["rope_parameters"] is None else {}

    parity.check(model, tmp_path, LIMIT, **scaled | older)


def test_global_layers_alone_need_no_window_and_no_base_of_local_ones(tmp_path: Path) -> None:
    changes = OLD_GEMMA3 | {"sliding_window_pattern": 1, "rope_local_base_freq": None, "sliding_window": None}

    parity.check(tiny("Gemma3TextModel", layer_types=[GLOBAL] * 6), tmp_path, LIMIT, **changes)


def test_a_gemma3_that_does_not_say_which_tokens_are_seen_is_causal(tmp_path: Path) -> None:
    ids = parity.sequences(LIMIT)[-1:]
    folder = save("Gemma3TextModel", tmp_path, use_bidirectional_attention=False)
    causal = parity.rows_of(folder, ids)

    edit_json(folder / "config.json", use_bidirectional_attention=None)

    np.testing.assert_array_equal(parity.rows_of(folder, ids), causal)
