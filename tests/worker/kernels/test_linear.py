"""Matrix products with fused epilogues, against plain torch in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels import linear as module
from worker.kernels.activation import ACTIVATIONS
from worker.kernels.linear import (
    Tiling,
    linear,
    linear_reference,
    qk_norm_rope_linear,
    qk_norm_rope_reference,
    swiglu_linear,
    swiglu_reference,
)

# The interpreter has no bfloat16 product.
DTYPE = torch.float16

SMALL = Tiling(16, 32, 32, num_warps=4, num_stages=2)
SPLIT = dataclasses.replace(SMALL, split_k=3, warm=True)
WIDE = Tiling(64, 64, 32, num_warps=4, num_stages=3, group_m=2)
TMA = dataclasses.replace(WIDE, tma=True)
PERSISTENT = dataclasses.replace(TMA, persistent=True)
POINTERS_PERSISTENT = dataclasses.replace(WIDE, persistent=True)
TILINGS = {
    "small": SMALL,
    "split": SPLIT,
    "wide": WIDE,
    "tma": TMA,
    "persistent": PERSISTENT,
    "persistent without tma": POINTERS_PERSISTENT,
}
tilings = pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
odd_token_counts = pytest.mark.parametrize("num_tokens", [1, 17, 33, pytest.param(100, marks=pytest.mark.slow)])


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DTYPE).to(DEVICE)


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding to the output's dtype."""
    assert actual.dtype == DTYPE
    torch.testing.assert_close(actual.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.sampled(5)
@tilings
@odd_token_counts
def test_bias_activation_and_residual_follow_the_product(tiling: Tiling, num_tokens: int) -> None:
    x, weight = random(num_tokens, 64, seed=0), random(48, 64, seed=1, scale=0.1)
    bias, residual = random(48, seed=2), random(num_tokens, 48, seed=3)

    y = linear(x, weight, bias, "gelu", residual, tiling=tiling)

    assert_rounded(y, linear_reference(x, weight, bias, "gelu", residual))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_activation_is_that_of_torch(activation: str | None) -> None:
    x, weight = random(5, 32, seed=0), random(32, 32, seed=1, scale=0.5)

    y = linear(x, weight, activation=activation, tiling=SMALL)

    assert_rounded(y, linear_reference(x, weight, activation=activation))


def test_an_activation_of_another_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="swish"):
        linear(random(1, 32, seed=0), random(32, 32, seed=1), activation="swish")


@pytest.mark.sampled(5)
@tilings
@odd_token_counts
def test_gate_and_up_meet_in_one_tile(tiling: Tiling, num_tokens: int) -> None:
    # 40 columns: the last tile is not full, and would reach from the gate into the up projection. 64 features: two
    # blocks for three programs, where the sum is split.
    x, weight = random(num_tokens, 64, seed=0), random(80, 64, seed=1, scale=0.1)

    y = swiglu_linear(x, weight, tiling=tiling)

    assert y.shape == (num_tokens, 40)
    assert_rounded(y, swiglu_reference(x, weight))


@pytest.mark.sampled(5)
@tilings
@odd_token_counts
def test_queries_and_keys_are_normalised_and_rotated_and_values_are_not(tiling: Tiling, num_tokens: int) -> None:
    # Heads of 16: a tile of 32 columns holds the key and the value side by side, one of 64 the queries, too.
    x, weight = random(num_tokens, 64, seed=0), random((2 + 2 * 1) * 16, 64, seed=1)
    q_norm, k_norm = random(16, seed=2), random(16, seed=3)
    angles = torch.randn(50, 8, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) * 7 % 50
    arguments = (x, weight, q_norm, k_norm, angles.cos(), angles.sin(), positions, 2, 1, 1e-6)

    y = qk_norm_rope_linear(*arguments, tiling=tiling)

    expected = qk_norm_rope_reference(*arguments)
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("tiling", [SMALL, WIDE, TMA, SPLIT], ids=["small", "wide", "tma", "split"])
def test_features_need_not_fill_the_last_block(tiling: Tiling) -> None:
    x, weight = random(9, 72, seed=0), random(48, 72, seed=1, scale=0.1)

    assert_rounded(linear(x, weight, tiling=tiling), linear_reference(x, weight))


def test_a_split_sum_is_the_same_every_time_and_leaves_its_counters_at_zero() -> None:
    x, weight = random(20, 96, seed=0), random(64, 96, seed=1)

    first = linear(x, weight, tiling=SPLIT)
    again = linear(x, weight, tiling=SPLIT)

    assert torch.equal(first, again)
    assert not module._arrivals(x.device).any()


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(40, 64, seed=0), random(64, 64, seed=1)

    together = linear(x, weight, tiling=WIDE)
    alone = linear(x[7:8].contiguous(), weight, tiling=WIDE)

    assert torch.equal(together[7:8], alone)


def test_no_tokens_give_no_rows() -> None:
    assert linear(random(0, 32, seed=0), random(48, 32, seed=1)).shape == (0, 48)


@pytest.mark.parametrize("kind", list(module._RULES))
def test_every_number_of_tokens_has_a_rule(kind: str) -> None:
    mosts = [most for most, _ in module._RULES[kind]]

    assert mosts == sorted(mosts)
    assert mosts[-1] == module._ANY


def test_all_numbers_of_tokens_of_a_regime_share_a_tiling() -> None:
    tilings = {module._choose("swiglu", torch.empty(n, 8)) for n in range(513, 1025)}

    assert len(tilings) == 1


@pytest.mark.parametrize(
    ("shape", "bias", "activation", "residual", "kind"),
    [
        ((1024, 2048), False, None, True, "bare"),
        ((1024, 3072), False, None, True, "bare deep"),
        ((2304, 768), True, None, False, "biased"),
        ((1152, 384), True, None, False, "biased narrow"),
        ((768, 3072), True, None, True, "added"),
        ((384, 384), True, None, True, "added narrow"),
        ((3072, 768), True, "gelu", False, "activated"),
    ],
)
def test_a_product_falls_under_the_rule_of_what_follows_it(
    shape: tuple[int, int], bias: bool, activation: str | None, residual: bool, kind: str
) -> None:
    weight, vector = torch.empty(shape), torch.empty(shape[0])

    assert module._kind_of(weight, vector if bias else None, activation, vector if residual else None) == kind


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_library_computes_the_same(activation: str | None, with_bias: bool, with_residual: bool) -> None:
    x, weight = random(20, 64, seed=0), random(48, 64, seed=1)
    bias = random(48, seed=2) if with_bias else None
    residual = random(20, 48, seed=3) if with_residual else None
    expected = linear_reference(x, weight, bias, activation, residual)

    actual = module._library_linear(x, weight, bias, activation, residual)

    torch.testing.assert_close(actual.float(), expected, rtol=5e-3, atol=5e-3)


def test_a_tiling_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to split"):
        dataclasses.replace(PERSISTENT, split_k=2)
    with pytest.raises(ValueError, match="weight's address"):
        dataclasses.replace(TMA, warm=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 100, 200, 500, 1000, 2000, 3001])
def test_the_chosen_tilings_compute_the_products_of_a_large_model_in_bfloat16(num_tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    x, wide = randn(num_tokens, 1024), randn(num_tokens, 3072)
    qkv, gate_up, down = randn(4096, 1024, scale=0.03), randn(6144, 1024, scale=0.03), randn(1024, 3072, scale=0.03)
    norms, angles = randn(2, 128), torch.randn(4096, 64, generator=generator, device="cuda")
    positions = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    rope = (x, qkv, norms[0], norms[1], angles.cos(), angles.sin(), positions, 16, 8, 1e-6)

    pairs = (
        (qk_norm_rope_linear(*rope), qk_norm_rope_reference(*rope)),
        (swiglu_linear(x, gate_up), swiglu_reference(x, gate_up)),
        (linear(wide, down, residual=x.clone()), linear_reference(wide, down, residual=x)),
    )

    errors = [float((y.float() - expected).norm() / expected.norm()) for y, expected in pairs]
    assert max(errors) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_replays_a_split_sum() -> None:
    x, weight = random(20, 96, seed=0), random(64, 96, seed=1)
    expected = linear(x, weight, tiling=SPLIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, weight, tiling=SPLIT)

    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
