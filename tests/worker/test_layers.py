"""Layers: linear ones packed and plain, and each piece against its formula, whatever the dtypes."""

from __future__ import annotations

import logging
import math
from typing import TypeVar

import pytest
import torch
from torch.nn import functional

from worker.models.layers import (
    ACTIVATIONS,
    Embedding,
    GatedMlp,
    LayerNorm,
    Linear,
    RMSNorm,
    RotaryQkv,
    RotaryTable,
    Rotation,
    pack_linears,
    tensors_of,
)
from worker.models.rope import DynamicScaling, Rope, Scaling

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def make_linear(activation: str | None = None, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> Linear:
    return filled(Linear(24, 40, None if activation is None else ACTIVATIONS[activation], bias=bias)).to(dtype)


def filled(module: ModuleT, seed: int = 0) -> ModuleT:
    """The module with random parameters, about as large as a model's."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_a_packed_layer_computes_what_a_plain_one_does(name: str) -> None:
    linear = make_linear(name)
    x = torch.randn(17, 24, generator=torch.Generator().manual_seed(1))
    plain = linear(x)

    assert pack_linears(linear)

    torch.testing.assert_close(linear(x), plain, rtol=1e-5, atol=1e-5)
    assert linear.weight.numel() == 0


def test_the_residual_is_added_to_the_output() -> None:
    linear = make_linear()
    x, residual = torch.randn(3, 24), torch.randn(3, 40)
    expected = functional.linear(x, linear.weight, linear.bias) + residual

    torch.testing.assert_close(linear(x, residual), expected)
    assert pack_linears(linear)
    torch.testing.assert_close(linear(x, residual), expected, rtol=1e-5, atol=1e-5)


def test_the_residual_itself_is_left_as_it_was() -> None:
    linear = make_linear()
    pack_linears(linear)
    residual = torch.ones(2, 40)

    linear(torch.randn(2, 24), residual)

    assert torch.equal(residual, torch.ones(2, 40))


def test_a_layer_that_packing_makes_wrong_is_left_plain_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    linear = make_linear()
    linear.weight[0, 0] = torch.nan  # no comparison with a NaN can succeed
    other = make_linear("gelu")
    model = torch.nn.Sequential(other, linear)

    with caplog.at_level(logging.WARNING):
        assert not pack_linears(model)

    assert len(caplog.records) == 1
    assert "plain ones run instead" in caplog.text
    assert other.weight.shape == (40, 24)
    assert other(torch.zeros(1, 24)).isfinite().all()


def test_bfloat16_layers_are_packed_too() -> None:
    linear = make_linear("gelu", torch.bfloat16)
    x = torch.randn(4, 24).bfloat16()
    plain = linear(x)

    assert pack_linears(linear)

    torch.testing.assert_close(linear(x), plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_without_a_bias_are_packed_too(dtype: torch.dtype) -> None:
    linear = make_linear(dtype=dtype, bias=False)
    x, residual = random(4, 24).to(dtype), random(4, 40).to(dtype)
    plain, added = linear(x), linear(x, residual)

    assert pack_linears(linear)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(linear(x), plain, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(linear(x, residual), added, rtol=tolerance, atol=tolerance)


def test_a_gated_mlp_computes_its_formula_packed_and_plain() -> None:
    mlp = filled(GatedMlp(24, 40))
    x, residual = random(5, 24), random(5, 24, seed=2)
    gate, up, down = mlp.gate_up.weight[:40].clone(), mlp.gate_up.weight[40:].clone(), mlp.down.weight.clone()
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T + residual

    torch.testing.assert_close(mlp(x, residual), expected, rtol=1e-5, atol=1e-5)
    assert pack_linears(mlp)
    torch.testing.assert_close(mlp(x, residual), expected, rtol=1e-5, atol=1e-5)


def test_an_rms_norm_divides_by_the_root_of_the_mean_square_and_epsilon() -> None:
    norm = filled(RMSNorm(4, epsilon=0.5))
    norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, -4.0]))

    normed = norm(torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))

    expected = torch.tensor([[1.0, -2.0, 3.0, -4.0], [0.0, 0.0, 0.0, 0.0]]) / math.sqrt(1.5)
    torch.testing.assert_close(normed, expected)


def test_a_layer_norm_takes_the_sum_with_a_residual() -> None:
    norm = filled(LayerNorm(24, 1e-5))
    x, residual = random(3, 24), random(3, 24, seed=2)

    torch.testing.assert_close(norm(x, residual), norm(x + residual))


def test_position_0_is_not_turned_and_others_keep_their_length() -> None:
    table = RotaryTable(Rope(num_positions=8, dim=6, theta=10000.0))
    x = random(8, 3, 6)

    turned = Rotation(table.cos, table.sin, torch.arange(8, dtype=torch.int32)).rotate(x)

    torch.testing.assert_close(turned[0], x[0])
    torch.testing.assert_close(turned.square().sum(dim=2), x.square().sum(dim=2))
    assert (turned[1:] - x[1:]).abs().amax(dim=(1, 2)).min() > 0.1


def test_turned_products_depend_on_the_distance_alone() -> None:
    table = RotaryTable(Rope(num_positions=100, dim=16, theta=500.0))
    query, key = random(1, 1, 16), random(1, 1, 16, seed=2)

    def product(query_position: int, key_position: int) -> torch.Tensor:
        places = (torch.tensor([position], dtype=torch.int32) for position in (query_position, key_position))
        turned_query, turned_key = (
            Rotation(table.cos, table.sin, place).rotate(x) for x, place in zip((query, key), places, strict=True)
        )
        return (turned_query * turned_key).sum()

    torch.testing.assert_close(product(7, 3), product(97, 93), rtol=1e-4, atol=1e-4)
    assert abs(product(7, 3) - product(3, 7)) > 0.01


def test_rotary_tables_stay_float32_when_a_model_is_converted() -> None:
    table = RotaryTable(Rope(num_positions=40, dim=8, theta=10000.0))
    cos = table.cos.clone()

    table.to(torch.bfloat16)

    assert table.cos.dtype == table.sin.dtype == torch.float32
    torch.testing.assert_close(table.cos, cos, rtol=0, atol=0)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_float32_whatever_the_default_is(default: torch.dtype) -> None:
    expected = RotaryTable(Rope(num_positions=2000, dim=8, theta=10000.0))
    former = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        table = RotaryTable(Rope(num_positions=2000, dim=8, theta=10000.0))
    finally:
        torch.set_default_dtype(former)

    torch.testing.assert_close(table.sin, expected.sin, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", [None, DynamicScaling(factor=2.5, trained_length=16)])
def test_rotary_tables_on_the_meta_device_are_those_of_a_device_without_their_numbers(scaling: Scaling | None) -> None:
    rope = Rope(num_positions=40, dim=8, theta=10000.0, scaling=scaling)
    table = RotaryTable(rope)

    with torch.device("meta"):
        shapes = RotaryTable(rope)

    for buffer, shape in zip(table.buffers(), shapes.buffers(), strict=True):
        assert (shape.is_meta, shape.shape, shape.dtype) == (True, buffer.shape, buffer.dtype)


def test_rotary_tables_on_the_meta_device_take_no_memory_whatever_their_size() -> None:
    with torch.device("meta"):
        table = RotaryTable(Rope(num_positions=2**40, dim=2**18, theta=10000.0))

    assert table.cos.shape == (2**40, 2**17)


def test_tensors_are_named_after_their_layer_with_a_bias_where_there_is_one() -> None:
    linear, norm = Linear(2, 3), LayerNorm(3, 1e-5, bias=False)

    tensors = tensors_of("a.dense", linear) | tensors_of("a.norm", norm)

    assert list(tensors) == ["a.dense.weight", "a.dense.bias", "a.norm.weight"]
    assert tensors["a.dense.bias"] is linear.bias


def test_queries_and_keys_are_normed_and_turned_and_values_are_not() -> None:
    table = RotaryTable(Rope(num_positions=8, dim=6, theta=100.0))
    qkv = filled(RotaryQkv(hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=6, bias=False, epsilon=1e-6))
    x, rotation = random(3, 12), Rotation(table.cos, table.sin, torch.tensor([0, 5, 2], dtype=torch.int32))
    parts = [(x @ weight.T).view(3, -1, 6) for weight in qkv.parts(qkv.projection.weight)]

    query, key, value = qkv(x, rotation)

    assert (query.shape, key.shape, value.shape) == ((3, 4, 6), (3, 2, 6), (3, 2, 6))
    torch.testing.assert_close(query, rotation.rotate(qkv.q_norm(parts[0])))
    torch.testing.assert_close(key, rotation.rotate(qkv.k_norm(parts[1])))
    torch.testing.assert_close(value, parts[2])
    assert len({tensor.untyped_storage().data_ptr() for tensor in (query, key, value)}) == 1


def test_float32_activations_widen_half_precision_weights() -> None:
    half = torch.nn.ModuleList(
        [filled(make_linear("gelu")), filled(GatedMlp(24, 40)), filled(RMSNorm(24, 1e-6)), filled(LayerNorm(24, 1e-6))]
    ).bfloat16()
    x = random(3, 24)
    narrow = [half[0](x), half[1](x, x), half[2](x), half[3](x)]

    wide = half.float()

    expected = [wide[0](x), wide[1](x, x), wide[2](x), wide[3](x)]
    for computed, exact in zip(narrow, expected, strict=True):
        assert computed.dtype == torch.float32
        torch.testing.assert_close(computed, exact, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_fused_layers_compute_what_the_float32_stream_does(dtype: torch.dtype, num_tokens: int) -> None:
    hidden, heads, kv_heads, head_dim = 256, 4, 2, 64
    with torch.device("cuda"):
        table = RotaryTable(Rope(num_positions=512, dim=head_dim, theta=10000.0))
        modules = torch.nn.ModuleDict(
            {
                "linear": Linear(hidden, hidden, ACTIVATIONS["gelu"]),
                "bare": Linear(hidden, hidden, bias=False),
                "mlp": GatedMlp(hidden, 512),
                "rms": RMSNorm(hidden, 1e-6),
                "norm": LayerNorm(hidden, 1e-6),
                "qkv": RotaryQkv(hidden, heads, kv_heads, head_dim, bias=False, epsilon=1e-6),
                "plain qkv": RotaryQkv(hidden, heads, kv_heads, head_dim, bias=True),
                "offset qkv": RotaryQkv(hidden, heads, kv_heads, head_dim, bias=False, epsilon=1e-6, norm_offset=1.0),
                "gelu mlp": GatedMlp(hidden, 512, ACTIVATIONS["gelu_new"], bias=True, down_bias=True),
                "bare norm": LayerNorm(hidden, 1e-6, bias=False),
                "offset rms": RMSNorm(hidden, 1e-6, offset=1.0),
                "embedding": Embedding(100, hidden),
            }
        )
    for parameter in modules.parameters():
        parameter.copy_(random(*parameter.shape) * parameter.shape[-1] ** -0.5)
    modules.to(dtype)
    x = random(num_tokens, hidden).to("cuda", dtype)
    residual = random(num_tokens, hidden, seed=3).to("cuda", dtype)
    positions = torch.arange(num_tokens, dtype=torch.int32, device="cuda")

    def outputs(x: torch.Tensor, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        rotation = Rotation(table.cos, table.sin, positions)
        query, key, value = modules["qkv"](x, rotation)
        return {
            "plain query": modules["plain qkv"](x, rotation)[0],
            "plain key": modules["plain qkv"](x, rotation)[1],
            "offset key": modules["offset qkv"](x, rotation)[1],
            "gelu mlp": modules["gelu mlp"](x),
            "bare norm": modules["bare norm"](x),
            "bare norm of a sum": modules["bare norm"](x, residual),
            "offset rms": modules["offset rms"](x),
            "linear": modules["linear"](x),
            "bare": modules["bare"](x, residual.clone()),  # which may hold the result afterwards
            "mlp": modules["mlp"](x, residual.clone()),
            "rms": modules["rms"](x),
            "norm": modules["norm"](x),
            "norm of a sum": modules["norm"](x, residual),
            "query": query,
            "key": key,
            "value": value,
            "embedding": modules["embedding"](positions % 100).to(x.dtype),
        }

    # How often a number is rounded on its way out, at most. The library may round a product, twice where it adds it up
    # in parts, before an activation, a residual or a rotation, which turns two of them into one; then comes the result.
    roundings = {
        "linear": 3,
        "bare": 3,
        "mlp": 6,  # gate, up, what they make, the product of it, and as above
        "rms": 1,
        "norm": 1,
        "norm of a sum": 2,
        "query": 4,
        "key": 4,
        "value": 2,
        "embedding": 0,
        "plain query": 4,
        "plain key": 4,
        "offset key": 4,
        "gelu mlp": 8,
        "bare norm": 1,
        "bare norm of a sum": 2,
        "offset rms": 1,
    }
    computed, expected = outputs(x, residual), outputs(x.float(), residual.float())
    assert computed.keys() == roundings.keys()
    for name, exact in expected.items():
        assert computed[name].dtype == dtype, name
        # Each is of half a unit in the last place, of the output or of what it is a sum of; these terms may cancel each
        # other, but are about as large as outputs are.
        tolerance = roundings[name] * torch.finfo(dtype).eps / 2
        size = float(exact.square().mean().sqrt())
        torch.testing.assert_close(
            computed[name].float(),
            exact,
            rtol=tolerance,
            atol=tolerance * size,
            msg=f"{name}: {{}}".format,
        )
