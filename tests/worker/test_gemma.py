"""Gemma, the first, against transformers' own class: what each field changes, names, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, GemmaConfig, GemmaForCausalLM, GemmaModel, PreTrainedModel

from tests import parity
from tests.models import edit_json, embed, make_batch
from tests.parity import VOCAB_SIZE
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.architectures import check_dtype
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.loader import load_weights

LIMIT = 160
OFFICIAL = {"hidden_act": "gelu", "hidden_activation": None}
EVERY_TOKEN = {"is_causal": False, "use_bidirectional_attention": True}


def config(**changes: object) -> GemmaConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 40,  # its root is no number of bfloat16
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": LIMIT,
    }
    return GemmaConfig(**shape | changes)


def gemma(**changes: object) -> PreTrainedModel:
    return GemmaModel(config(**changes))


def one_sequence() -> list[list[int]]:
    return [sequence for sequence in parity.sequences(LIMIT) if len(sequence) == 33]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"head_dim": 256, "num_hidden_layers": 1},
        {"is_causal": False},
        EVERY_TOKEN,
    ],
    ids=str,
)
def test_the_vectors_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    engine = parity.check(gemma(**changes), tmp_path, LIMIT)

    assert engine.hello().architecture == "GemmaModel"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "silu", "hidden_activation": "silu"},
        {"rms_norm_eps": 0.3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        EVERY_TOKEN,
    ],
    ids=str,
)
def test_a_field_of_config_json_alone_changes_the_vectors_as_it_does_in_transformers(
    change: dict[str, object], tmp_path: Path
) -> None:
    folder = parity.save(parity.seeded(gemma()), tmp_path)
    before = parity.rows_of(folder, one_sequence())

    edit_json(folder / "config.json", **change)

    after = parity.rows_of(folder, one_sequence())
    library = parity.reference_rows(AutoModel.from_pretrained(folder).eval(), one_sequence())
    np.testing.assert_allclose(after, library, rtol=0, atol=1e-5)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        OFFICIAL,
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
        {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": None, "hidden_activation": None},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None},
        {"model_type": None, "is_causal": True, "use_bidirectional_attention": False},
        {"use_cache": False, "tie_word_embeddings": False, "attention_dropout": 0.5},
    ],
    ids=str,
)
def test_what_older_releases_write_and_what_does_not_matter_is_taken(
    changes: dict[str, object], tmp_path: Path
) -> None:
    model = parity.seeded(gemma())

    rows = parity.rows_of(parity.save(model, tmp_path, **changes), one_sequence())

    np.testing.assert_allclose(rows, parity.reference_rows(model, one_sequence()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_gives_the_vectors_of_its_stack_and_its_head_is_not_read(tied: bool, tmp_path: Path) -> None:
    model = parity.seeded(GemmaForCausalLM(config(tie_word_embeddings=tied)))
    language_model = parity.save(model, tmp_path / "language-model")
    stack = parity.save(model.model, tmp_path / "stack")

    engine = make_engine(language_model)
    rows = embed(engine, one_sequence(), width=40)

    assert engine.hello().architecture == "GemmaForCausalLM"
    assert make_engine(stack).hello().architecture == "GemmaModel"
    np.testing.assert_array_equal(rows, parity.rows_of(stack, one_sequence()))
    np.testing.assert_allclose(rows, parity.reference_rows(model.model, one_sequence()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("missing", ["norm.weight", "layers.1.input_layernorm.weight", "layers.2.mlp.up_proj.weight"])
def test_a_tensor_that_is_missing_is_not_left_random(missing: str, tmp_path: Path) -> None:
    folder = parity.save(gemma(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, folder / "model.safetensors")

    with pytest.raises(ModelError, match=rf"Missing tensors: {missing}\. Unexpected tensors: none"):
        make_engine(folder)


@pytest.mark.parametrize(("reference", "limit"), [(True, 1e-5), (False, 0.1)])
def test_bfloat16_weights_are_computed_with_in_their_dtype_or_in_float32(
    reference: bool, limit: float, tmp_path: Path
) -> None:
    model = parity.seeded(gemma())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    checkpoint = Checkpoint.read(parity.save(model, tmp_path))
    ours = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(ours, torch.nn.Module)
    load_weights(tmp_path, ours.to(torch.bfloat16))
    ragged, _ = load_sorted(make_batch(one_sequence()), SdpaAttention())

    hidden: torch.Tensor = ours(dataclasses.replace(ragged, reference=reference))

    assert hidden.dtype == (torch.float32 if reference else torch.bfloat16)
    with torch.no_grad():
        library = (model if reference else model.bfloat16())(torch.tensor(one_sequence())).last_hidden_state[0]
    expected = library.float().mean(dim=0, keepdim=True).numpy()
    rows = hidden.float().mean(dim=0, keepdim=True).numpy()
    np.testing.assert_allclose(rows, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("architecture", ["GemmaModel", "GemmaForCausalLM"])
def test_float16_is_refused_with_what_to_use(architecture: str) -> None:
    with pytest.raises(ModelError, match=rf"a {architecture} overflows in it; use bfloat16 or float32"):
        check_dtype(architecture, "float16")

    check_dtype(architecture, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type: 'gemma2' is not this architecture's"),
        ({"architectures": ["Gemma2Model"]}, "architectures: Gemma2Model is not supported"),
        ({"hidden_act": "silu"}, "hidden_activation, hidden_act: .* 4 .* gelu_pytorch_tanh, release 5 silu"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu"}, "hidden_activation, hidden_act: release 4"),
        ({"hidden_act": None, "hidden_activation": "silu"}, "hidden_activation, hidden_act: release 4"),
        ({"hidden_act": "mish", "hidden_activation": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: true, but is_causal is not false"),
        ({"is_causal": True, "use_bidirectional_attention": True}, "use_bidirectional_attention: true, but"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: true or false"),
        ({"attention_bias": "yes"}, "attention_bias: true or false"),
        ({"head_dim": None}, "head_dim: missing"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"rms_norm_eps": None}, "rms_norm_eps: a number between 0 and 1"),
        ({"rope_parameters": None}, "rope_theta: "),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = parity.save(gemma(), tmp_path, **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)
