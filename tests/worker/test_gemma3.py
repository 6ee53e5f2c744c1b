"""Gemma 3 against transformers' own class: both directions of attention, windows, names, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma3TextModel, PreTrainedModel

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
    "rope_local_base_freq": 100.0,
    "rope_scaling": None,
    "rope_theta": 5000.0,
    "sliding_window_pattern": 3,
    "cache_implementation": "hybrid",
}


def ropes(global_theta: float = 5000.0, local_theta: float = 100.0) -> dict[str, dict[str, object]]:
    return {
        GLOBAL: {"rope_type": "default", "rope_theta": global_theta},
        LOCAL: {"rope_type": "default", "rope_theta": local_theta},
    }


def config(**changes: object) -> Gemma3TextConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": LIMIT,
        "sliding_window": 8,
        "layer_types": [LOCAL, LOCAL, GLOBAL] * 2,
        "rope_parameters": ropes(),
        "use_bidirectional_attention": True,
    }
    return Gemma3TextConfig(**shape | changes)


def gemma3(**changes: object) -> PreTrainedModel:
    return Gemma3TextModel(config(**changes))


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


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"attention_bias": True}, id="attention-bias"),
        pytest.param({"num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 32}, id="one-key-head"),
        pytest.param({"layer_types": [LOCAL] * 6}, id="all-local"),
        pytest.param({"layer_types": [GLOBAL] * 6}, id="all-global"),
        pytest.param({"sliding_window": 2}, id="smallest-window"),
        pytest.param({"sliding_window": 7}, id="odd-window"),
        pytest.param({"hidden_activation": "gelu"}, id="gelu"),  # 2.5e-5 from the other gelu
    ],
)
def test_the_vectors_are_those_of_transformers(bidirectional: bool, changes: dict[str, object], tmp_path: Path) -> None:
    engine = parity.check(gemma3(use_bidirectional_attention=bidirectional, **changes), tmp_path, LIMIT)

    assert engine.hello().architecture == "Gemma3TextModel"


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sliding_window": 10}, id="wider"),
        pytest.param({"sliding_window": 6}, id="narrower"),
        pytest.param({"layer_types": [GLOBAL, LOCAL, LOCAL] * 2}, id="other-layers"),
        pytest.param({"rope_parameters": ropes(global_theta=700.0)}, id="global-theta"),
        pytest.param({"rope_parameters": ropes(local_theta=700.0)}, id="local-theta"),
        pytest.param({"query_pre_attn_scalar": 40}, id="query-scale"),
        pytest.param({"hidden_activation": "silu"}, id="silu"),
        pytest.param({"rms_norm_eps": 0.3}, id="epsilon"),
    ],
)
def test_each_field_changes_the_vectors_as_in_transformers(
    bidirectional: bool, changes: dict[str, object], tmp_path: Path
) -> None:
    ids = sequences([60])
    model = gemma3(use_bidirectional_attention=bidirectional)
    plain = parity.rows_of(parity.save(parity.seeded(model), tmp_path / "plain"), ids)

    changed = gemma3(use_bidirectional_attention=bidirectional, **changes)
    engine = parity.check(changed, tmp_path / "changed", LIMIT)

    assert np.abs(embed(engine, ids) - plain).max() > 1e-3


@pytest.mark.slow
def test_the_direction_of_attention_changes_the_vectors(tmp_path: Path) -> None:
    ids = sequences([30])
    model = parity.seeded(gemma3())
    both = parity.rows_of(parity.save(model, tmp_path / "both"), ids)
    one_way = parity.rows_of(parity.save(model, tmp_path / "one", use_bidirectional_attention=False), ids)
    unsaid = parity.rows_of(parity.save(model, tmp_path / "unsaid", use_bidirectional_attention=None), ids)

    assert np.abs(both - one_way).max() > 0.1
    np.testing.assert_array_equal(unsaid, one_way)


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [True, False])
def test_short_and_long_texts_of_one_batch_have_the_vectors_they_have_alone(
    bidirectional: bool, tmp_path: Path
) -> None:
    model = parity.seeded(gemma3(use_bidirectional_attention=bidirectional))
    engine = make_engine(parity.save(model, tmp_path))
    ids = sequences([3, 60, 200, 4, 9, 64])

    rows = embed(engine, ids)

    assert np.isfinite(rows).all()
    parity.check_rows(engine, ids, parity.reference_rows(model, ids))


@pytest.mark.parametrize(
    ("bidirectional", "sliding_window", "changed"),
    [
        (True, 8, range(8, 17)),
        (True, 9, range(8, 17)),
        (False, 8, range(12, 20)),
        (False, 9, range(12, 21)),
        (False, 1, range(12, 13)),
    ],
)
def test_a_token_is_seen_by_those_that_have_it_in_their_window(
    bidirectional: bool, sliding_window: int, changed: range, tmp_path: Path
) -> None:
    model = gemma3(
        num_hidden_layers=1,
        layer_types=[LOCAL],
        sliding_window=sliding_window,
        use_bidirectional_attention=bidirectional,
    )
    # What transformers writes for a window of both directions is always even.
    folder = parity.save(parity.seeded(model), tmp_path, sliding_window=sliding_window)
    ids = sequences([24])[0]
    other = [*ids[:12], 5 if ids[12] != 5 else 6, *ids[13:]]

    before, after = (hidden_states(folder, row, reference=False) for row in (ids, other))

    differs = (before - after).abs().amax(dim=1) > 1e-6
    assert differs.nonzero().flatten().tolist() == list(changed)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        OLD_FIELDS,
        OLD_FIELDS | {"rope_scaling": {"rope_type": "default"}},
        OLD_FIELDS | {"layer_types": [LOCAL, LOCAL, GLOBAL] * 2, "sliding_window_pattern": None},
        OLD_FIELDS | {"rope_parameters": ropes(), "rope_theta": None},
        OLD_FIELDS | {"model_type": None, "is_causal": True},
        {"use_cache": False, "tie_word_embeddings": False, "attention_dropout": 0.5},
    ],
)
def test_what_older_releases_write_and_what_does_not_matter_is_taken(
    changes: dict[str, object], tmp_path: Path
) -> None:
    parity.check(gemma3(), tmp_path, LIMIT, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ropes() | {GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}}},
        OLD_FIELDS | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_scaled_positions_are_those_of_global_layers_alone(changes: dict[str, object], tmp_path: Path) -> None:
    scaled = {GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}}

    parity.check(gemma3(rope_parameters=ropes() | scaled), tmp_path, LIMIT, **changes)


def test_global_layers_alone_need_no_window_and_no_base_of_local_ones(tmp_path: Path) -> None:
    changes = OLD_FIELDS | {"sliding_window_pattern": 1, "rope_local_base_freq": None, "sliding_window": None}
    model = parity.seeded(gemma3(layer_types=[GLOBAL] * 6))
    engine = make_engine(parity.save(model, tmp_path, **changes))

    parity.check_rows(engine, sequences([30]), parity.reference_rows(model, sequences([30])))


@pytest.mark.slow
def test_a_language_model_gives_the_vectors_of_its_stack(tmp_path: Path) -> None:
    model = Gemma3ForCausalLM(config())
    stack = parity.seeded(model).model
    engine = make_engine(parity.save(model, tmp_path))
    ids = sequences([1, 30, 9])

    assert engine.hello().architecture == "Gemma3ForCausalLM"
    parity.check_rows(engine, ids, parity.reference_rows(stack, ids))


def test_a_language_models_head_is_not_read(tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(Gemma3ForCausalLM(config())), tmp_path)
    expected = parity.rows_of(folder, sequences([20]))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.full((3,), torch.nan)}, folder / "model.safetensors")

    np.testing.assert_array_equal(parity.rows_of(folder, sequences([20])), expected)


@pytest.mark.parametrize("missing", ["norm.weight", "layers.2.self_attn.k_norm.weight", "layers.5.mlp.up_proj.weight"])
def test_a_tensor_that_is_missing_is_not_left_random(missing: str, tmp_path: Path) -> None:
    folder = parity.save(gemma3(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, folder / "model.safetensors")

    with pytest.raises(ModelError, match=rf"Missing tensors: {missing}\. Unexpected tensors: none"):
        make_engine(folder)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(bidirectional: bool, tmp_path: Path) -> None:
    model = parity.seeded(gemma3(use_bidirectional_attention=bidirectional, query_pre_attn_scalar=40))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = parity.save(model, tmp_path)
    ids = sequences([60])

    hidden = hidden_states(folder, ids[0], torch.bfloat16, reference=True)

    assert hidden.dtype == torch.float32
    expected = parity.reference_rows(model, ids)
    np.testing.assert_allclose(hidden.mean(dim=0, keepdim=True).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_weights_run_near_their_float32_values(tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(gemma3()), tmp_path)
    ids = sequences([60, 3, 200])

    rows = embed(make_engine(folder, dtype="bfloat16"), ids)

    assert lowest_cosine(rows, parity.rows_of(folder, ids)) >= 0.999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type: 'gemma2' is not a Gemma3TextModel's"),
        ({"model_type": "gemma3"}, "model_type: 'gemma3' is not"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures: Gemma3ForConditionalGeneration is not"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: a cap on scores"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: a cap on scores"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: true or false is needed, not 'all'"),
        ({"use_bidirectional_attention": 1}, "use_bidirectional_attention: true or false"),
        ({"is_causal": False}, "is_causal: use_bidirectional_attention says"),
        ({"attention_bias": "yes"}, "attention_bias: true or false"),
        ({"hidden_activation": "mish"}, "hidden_activation: 'mish' is not supported"),
        ({"hidden_activation": None}, "hidden_activation: None is not supported"),
        ({"rms_norm_eps": None}, "rms_norm_eps: a number between 0 and 1"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar: a positive number"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: a positive number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"head_dim": None}, "head_dim: missing"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"sliding_window": None}, "sliding_window: missing"),
        ({"sliding_window": 0}, "sliding_window: a positive integer"),
        ({"layer_types": None}, "sliding_window_pattern: missing, and there is no layer_types either"),
        ({"layer_types": None, "sliding_window_pattern": "every 6"}, "sliding_window_pattern: a positive integer"),
        ({"layer_types": [GLOBAL] * 7}, "layer_types: 6 of 'full_attention' or 'sliding_attention' are needed"),
        ({"layer_types": [GLOBAL] * 5 + ["chunked_attention"]}, "layer_types: 6 of"),
        ({"rope_parameters": None}, "rope_theta: missing, and rope_parameters has no rope_theta of full_attention"),
        ({"rope_parameters": {GLOBAL: ropes()[GLOBAL]}}, "rope_local_base_freq: missing, and rope_parameters has no"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: a map of 'full_attention' and"),
        ({"rope_theta": 1e4}, "rope_theta, rope_parameters: full_attention: they disagree"),
        ({"rope_parameters": ropes() | {LOCAL: {"rope_type": "of another kind", "rope_theta": 1.0}}}, "rope_param"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(gemma3(), tmp_path, **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"use_bidirectional_attention": True}, id="embeddinggemma"),
        pytest.param({"use_bidirectional_attention": False}, id="causal"),
        pytest.param({"query_pre_attn_scalar": 168, "attention_bias": True, "head_dim": 128}, id="scale-and-bias"),
    ],
)
def test_a_cuda_device_gives_nearly_the_vectors_of_the_cpu(
    tmp_path: Path, dtype: str, changes: dict[str, object]
) -> None:
    shape: dict[str, object] = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 1024,
        "sliding_window": 128,
    }
    folder = parity.save(parity.seeded(gemma3(**shape | changes)), tmp_path / "model")
    ids = sequences([1, 3, 64, 65, 66, 128, 129, 400, 1024, 20, 20])
    expected = parity.rows_of(folder, ids)

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))
    rows = embed(engine, ids, width=256)

    assert lowest_cosine(rows, expected) >= (0.99999 if dtype == "float32" else 0.999)
    alone = np.concatenate([embed(engine, [row], width=256) for row in ids])
    assert lowest_cosine(rows, alone) >= 0.999


def lowest_cosine(rows: Rows, expected: Rows) -> float:
    return float((unit(rows) * unit(expected)).sum(axis=1).min())
