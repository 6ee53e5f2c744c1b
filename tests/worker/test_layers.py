"""Linear layers, packed and plain."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional

from worker.layers import ACTIVATIONS, Linear, pack_linears


def make_linear(activation: str | None = None, dtype: torch.dtype = torch.float32) -> Linear:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(24, 40, None if activation is None else ACTIVATIONS[activation])
    linear.weight.copy_(torch.randn(40, 24, generator=generator) / 5)
    linear.bias.copy_(torch.randn(40, generator=generator))
    return linear.to(dtype)


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
