"""Scaled rotary positions against those of transformers, to the bit; what config.json may say; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.models import make_batch, random_sequences
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.files import JsonFile, ModelError
from worker.models.layers import RotaryTable
from worker.models.rope import DynamicScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch

DIM, THETA, TRAINED = 64, 10000.0, 32

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-integer": {"rope_type": "linear", "factor": 3},
    "llama3": LLAMA3 | {"original_max_position_embeddings": TRAINED},
    "llama3-uneven": LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 2.5, "high_freq_factor": 7.5},
    "llama3-no-original": LLAMA3,
    "yarn": YARN,
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-no-growth": YARN | {"factor": 1.0},
    "yarn-attention": YARN | {"attention_factor": 0.75},
    "yarn-mscale": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5},
    "yarn-one-mscale": YARN | {"mscale": 1.5},
    "yarn-mscale-0": YARN | {"mscale": 1.5, "mscale_all_dim": 0},
    "yarn-beta": YARN | {"beta_fast": 2.0, "beta_slow": 0.5},
    "yarn-not-truncated": YARN | {"truncate": False, "beta_fast": 4},
    "yarn-truncate-null": YARN | {"truncate": None, "beta_fast": 4},
    "yarn-no-ramp": YARN | {"beta_fast": 1.0, "truncate": False},
}


def parse(num_positions: int = TRAINED, dim: int = DIM, **values: object) -> Rope:
    """What a config.json of these fields says; a base is added where it has none at its top."""
    return Rope.parse(JsonFile(Path("config.json"), {"rope_theta": THETA} | values), dim, num_positions)


def theirs(parameters: dict[str, object], num_positions: int = TRAINED, theta: float = THETA) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=num_positions,
        rope_parameters={"rope_theta": theta} | parameters,
    )


def batch_of(lengths: list[int]) -> RaggedBatch:
    return load_sorted(make_batch(random_sequences(lengths)), SdpaAttention())[0]


@pytest.mark.filterwarnings("ignore")  # transformers' about fields that are allowed
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("theta", [10000.0, 1000000])
def test_frequencies_and_tables_are_transformers_to_the_bit(name: str, field: str, theta: float) -> None:
    rotary = LlamaRotaryEmbedding(theirs(dict(SCALINGS[name]), theta=theta))

    rope = parse(rope_theta=theta, **{field: SCALINGS[name]})
    table = RotaryTable(rope)

    positions = torch.arange(rope.num_positions)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    torch.testing.assert_close(rope.inverse_frequencies(), rotary.inv_freq, rtol=0, atol=0)
    assert rope.attention_factor == rotary.attention_scaling
    torch.testing.assert_close(table.cos, cos[0, :, : DIM // 2], rtol=0, atol=0)
    torch.testing.assert_close(table.sin, sin[0, :, : DIM // 2], rtol=0, atol=0)


def test_the_scalings_differ_so_that_each_field_is_tested() -> None:
    equal_by_intent = {
        "llama3-no-original",
        "yarn-no-original",
        "yarn-no-growth",
        "yarn-one-mscale",
        "yarn-mscale-0",
        "yarn-truncate-null",
    }
    ropes = [parse(rope_scaling=values) for name, values in SCALINGS.items() if name not in equal_by_intent]
    rows = [torch.cat((rope.inverse_frequencies(), torch.tensor([rope.attention_factor]))) for rope in ropes]
    assert all((a - b).abs().max() > 1e-6 for index, a in enumerate(rows) for b in rows[:index])


@pytest.mark.parametrize("factor", [2.0, 4, 1.5])
@pytest.mark.parametrize("length", [33, 47, 63, 64, 100, 128])
def test_a_text_longer_than_the_trained_length_turns_as_transformers_turns_it_alone(factor: float, length: int) -> None:
    length = min(length, int(TRAINED * factor))
    config = theirs({"rope_type": "dynamic", "factor": factor})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=torch.tensor(length))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    table = RotaryTable(rope := parse(rope_scaling={"type": "dynamic", "factor": factor}))

    rotation = table.at(batch_of([length]))

    by_length = rope.frequencies_by_length()
    assert by_length is not None
    torch.testing.assert_close(by_length[length - TRAINED], expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(rotation.cos, cos[0, :, : DIM // 2], rtol=0, atol=2e-5)
    torch.testing.assert_close(rotation.sin, sin[0, :, : DIM // 2], rtol=0, atol=2e-5)


def test_a_text_of_up_to_the_trained_length_turns_without_scaling_whatever_is_beside_it() -> None:
    plain, dynamic = RotaryTable(parse()), RotaryTable(parse(rope_scaling={"type": "dynamic", "factor": 4.0}))
    batch = batch_of([1, 7, 31, 32, 33, 128])

    rotation = dynamic.at(batch)

    num_short = 1 + 7 + 31 + 32
    rows = batch.positions[:num_short]
    assert rotation.positions.dtype == torch.int32
    torch.testing.assert_close(rotation.cos[rotation.positions][:num_short], plain.cos[rows], rtol=0, atol=0)
    torch.testing.assert_close(rotation.sin[rotation.positions][:num_short], plain.sin[rows], rtol=0, atol=0)
    assert (rotation.cos[num_short : num_short + 32] - plain.cos).abs().max() > 0.01  # of the text that is one longer


def test_each_text_of_a_batch_has_the_angles_that_it_has_alone() -> None:
    table = RotaryTable(parse(rope_scaling={"type": "dynamic", "factor": 4.0}))

    together = table.at(batch_of([5, 40, 41, 127, 128]))

    alone = torch.cat([table.at(batch_of([length])).cos for length in (5, 40, 41, 127, 128)])
    torch.testing.assert_close(together.cos, alone, rtol=0, atol=0)


def test_a_dummy_that_is_longer_than_any_text_has_finite_angles() -> None:
    table = RotaryTable(parse(rope_scaling={"type": "dynamic", "factor": 2.0}))

    rotation = table.at(batch_of([100]))

    assert bool(rotation.cos.isfinite().all())


def test_frequencies_by_length_stay_float32_when_a_model_is_converted() -> None:
    table = RotaryTable(parse(rope_scaling={"type": "dynamic", "factor": 2.0})).to(torch.bfloat16)

    assert table.frequencies is not None
    assert table.frequencies.dtype == table.cos.dtype == table.at(batch_of([40])).cos.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_that_is_replayed_has_the_angles_of_other_lengths() -> None:
    import dataclasses

    table = RotaryTable(parse(rope_scaling={"type": "dynamic", "factor": 4.0}))
    batches = [batch_of(lengths) for lengths in ([20, 108], [128], [63, 65])]
    fields = ("positions", "token_starts", "token_stops")
    buffers = {field: getattr(batches[0], field).cuda() for field in fields}
    expected = [table.at(batch).cos for batch in batches]
    on_device = dataclasses.replace(batches[0], **buffers)
    table.cuda()
    table.at(on_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = table.at(on_device)

    for batch, cos in zip(batches, expected, strict=True):
        for field in fields:
            buffers[field].copy_(getattr(batch, field))
        graph.replay()

        torch.testing.assert_close(captured.cos.cpu(), cos, rtol=0, atol=1e-6)
        assert captured.positions.tolist() == list(range(128))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"rope_scaling": None, "rope_parameters": None}, None),
        ({"rope_scaling": {}}, None),
        ({"rope_scaling": {"type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": THETA, "rope_type": "default", "partial_rotary_factor": 1.0}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, LinearScaling(2.0)),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "beta_fast": None}}, DynamicScaling(2.0, TRAINED)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 2}},
            LinearScaling(2.0),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.0}},
            YarnScaling(2.0, TRAINED, 1.0, 32.0, 1.0, True),
        ),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}, Llama3Scaling(8.0, 16, 1.0, 4.0)),
    ],
)
def test_old_and_new_fields_say_the_same(values: dict[str, object], expected: object) -> None:
    assert parse(**values).scaling == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 4.0}, 100),
        (LLAMA3 | {"original_max_position_embeddings": 50}, 100),
        ({"rope_type": "dynamic", "factor": 2.5}, 250),
        ({"rope_type": "yarn", "factor": 4.0}, 400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25}, 100),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 30}, 120),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 25}, 100),
    ],
)
def test_a_text_may_be_as_long_as_the_scaling_says(scaling: dict[str, object], expected: int) -> None:
    rope = parse(num_positions=100, rope_scaling=scaling)

    assert rope.num_positions == expected
    table = RotaryTable(rope)
    assert table.at(batch_of([expected])).positions.max() == expected - 1
    assert len(table.at(batch_of([expected])).cos) == expected


def test_the_base_is_found_inside_or_has_a_default_where_the_family_has_one() -> None:
    file = JsonFile(Path("config.json"), {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}})

    assert Rope.parse(file, DIM, TRAINED).theta == 500.0
    assert Rope.parse(file, DIM, TRAINED, default_theta=THETA).theta == 500.0
    assert Rope.parse(JsonFile(Path("config.json"), {}), DIM, TRAINED, default_theta=THETA).theta == THETA


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": None}, "rope_theta: missing, and not in rope_parameters"),
        ({"rope_theta": 0}, "rope_theta: a positive number"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta, rope_parameters.rope_theta: they disagree"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: heads that are rotated in part"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "rope_scaling.partial_rot"),
        ({"rope_scaling": "linear"}, "rope_scaling: a map is needed"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type: 'longrope' is not supported; supported are"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling.rope_type: 'su' is not supported"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type: a text is needed"),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
            "rope_type, rope_scaling.type: they",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor: not understood with the type 'default'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor: a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor: a number from 1 to 1024"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e9}}, "rope_scaling.factor: a number from 1 to 1024"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
            "rope_scaling.original_max_position_embeddings: not understood",
        ),
        ({"rope_scaling": YARN | {"finetuned": True}}, "rope_scaling.finetuned: not understood with the type 'yarn'"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "rope_scaling.attention_factor: a positive number"),
        ({"rope_scaling": YARN | {"mscale": -1.0}}, "rope_scaling.mscale: a positive number"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "rope_scaling.truncate: true or false"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_scaling.rope_type: 'yarn' needs a rope_theta above 1"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 16},
            "original_max_position_embeddings, rope_scaling.original_max_position_embeddings: they disagree: 16, 32",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor: missing"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor: 1.0 is not above"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling, rope_parameters: they disagree",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention: not"),
    ],
)
def test_what_is_not_understood_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*{message}"):
        parse(**values)


def test_dynamic_scaling_of_heads_of_two_columns_is_refused() -> None:
    with pytest.raises(ModelError, match="'dynamic' needs more than the 2 columns"):
        parse(dim=2, rope_scaling={"type": "dynamic", "factor": 2.0})
