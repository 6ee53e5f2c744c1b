"""The warp-specialised SwiGLU product, against plain torch in float32. It runs on Hopper alone, compiles anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels import swiglu_hopper as module
from worker.kernels.linear import swiglu_linear, swiglu_reference
from worker.kernels.norm import rms_norm
from worker.kernels.swiglu_hopper import is_available, swiglu_linear_hopper

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no device of compute capability 9.0",
)

# What a launch compiles, for all tilings and dtypes; by `python -c`, as this process may be set to interpret kernels.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from worker.kernels import swiglu_hopper as module

layout = module._shared_layout()
sizes = {"num_tokens": "i32", "num_columns": "i32", "num_features": "i32"}
divisible = {(4,): [["tt.divisibility", 16]], (5,): [["tt.divisibility", 16]]}
for tiling, product in ((module._NARROW, "m64n128k16"), (module._WIDE, "m64n256k16")):
    for dtype in ("bf16", "fp16"):
        tokens, rows, columns = ((64, 64), (tiling.block_n // 2, 64), (64, tiling.block_n // 2))
        blocks = {"x": tokens, "weight": rows, "out": columns}
        descriptors = {name: f"tensordesc<{dtype}[{n}, {m}],{layout!r}>" for name, (n, m) in blocks.items()}
        constants = {"STAGES": tiling.num_stages, "GROUP_M": module._GROUP_M}
        signature = descriptors | sizes | dict.fromkeys(constants, "constexpr")
        source = GluonASTSource(module._product, signature, constants, divisible)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(module._OPTIONS))
        assert product in kernel.asm["ptx"]
        assert ("tanh.approx" in kernel.asm["ptx"]) == (dtype == "bf16")
        assert kernel.metadata.shared <= 227 * 1024
"""

WITHOUT_GLUON = """
import sys

sys.modules["triton.experimental.gluon"] = None  # an import of it fails
from worker.kernels import linear, swiglu_hopper

assert not swiglu_hopper._has_gluon()
"""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def random_weight(num_features: int, num_columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Gates of a variance near 1, whatever the number of features."""
    return random(2 * num_columns, num_features, seed=1, dtype=dtype) * num_features**-0.5


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def run_python(source: str, cache: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_it_is_not_available_on_a_cpu() -> None:
    assert not is_available(torch.empty(2048, 64, dtype=torch.bfloat16), torch.empty(256, 64, dtype=torch.bfloat16))


def test_few_tokens_run_in_narrow_tiles() -> None:
    assert module._tiling_for(1024).block_n == 128
    assert module._tiling_for(1025).block_n == 256


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(not module._has_gluon(), reason="the installed Triton has no Gluon that the kernel is written for")
def test_it_compiles_for_hopper_where_there_is_no_gpu(tmp_path: Path) -> None:
    run_python(COMPILE, tmp_path)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_triton_without_gluon_is_noticed_and_nothing_fails(tmp_path: Path) -> None:
    run_python(WITHOUT_GLUON, tmp_path)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_tokens", [1, 64, 1000, 1088, 4160])
# One block of features; fewer of them than stages; the shapes of Qwen3-0.6B and Qwen3-4B.
@pytest.mark.parametrize(("num_features", "num_columns"), [(64, 128), (128, 128), (1024, 3072), (2560, 9728)])
def test_it_computes_the_gated_product(num_tokens: int, num_features: int, num_columns: int) -> None:
    x, weight = random(num_tokens, num_features, seed=0), random_weight(num_features, num_columns)
    expected = swiglu_reference(x, weight)

    first = swiglu_linear_hopper(x, weight)
    again = swiglu_linear_hopper(x, weight)

    assert relative_error(first, expected) < 3e-3
    # In a norm one wrong row among thousands would not show.
    torch.testing.assert_close(first.float(), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(first, again)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_tokens", [64, 1088])
def test_float16_is_as_exact_as_its_rounding(num_tokens: int) -> None:
    x, weight = random(num_tokens, 1024, seed=0, dtype=torch.float16), random_weight(1024, 3072, torch.float16)

    y = swiglu_linear_hopper(x, weight)

    assert y.dtype == torch.float16
    assert relative_error(y, swiglu_reference(x, weight)) < 4e-4


@pytest.mark.gpu
@on_hopper
def test_no_tokens_give_no_rows_on_hopper() -> None:
    assert swiglu_linear_hopper(random(0, 128, seed=0), random_weight(128, 128)).shape == (0, 128)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_tokens", [513, 1024, 1025])
def test_many_tokens_of_any_model_run_here(num_tokens: int) -> None:
    x, weight = random(num_tokens, 1024, seed=0), random_weight(1024, 3072)

    assert is_available(x, weight)
    assert torch.equal(swiglu_linear(x, weight), swiglu_linear_hopper(x, weight))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("num_features", "num_columns", "dtype"),
    [(96, 128, torch.bfloat16), (128, 192, torch.bfloat16), (128, 128, torch.float32)],
)
def test_other_shapes_and_dtypes_are_not_for_it(num_features: int, num_columns: int, dtype: torch.dtype) -> None:
    x, weight = random(1088, num_features, seed=0, dtype=dtype), random_weight(num_features, num_columns, dtype)

    assert not is_available(x, weight)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_tokens", [64, 1088, 4160])
def test_products_that_follow_each_other_in_a_graph_wait_for_one_another(num_tokens: int) -> None:
    x, weight = random(num_tokens, 1024, seed=0), random_weight(1024, 1024)
    ones = torch.ones(1024, dtype=torch.bfloat16, device=DEVICE)

    norm = partial(rms_norm, weight=ones, epsilon=1e-6)
    product = partial(swiglu_linear_hopper, weight=weight)

    def chain(*, wait: bool) -> torch.Tensor:
        y = x
        for _ in range(20):
            for step in (norm, product, product):
                if wait:
                    torch.cuda.synchronize()
                y = step(y)
        return y

    chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain(wait=False)
    x.copy_(random(num_tokens, 1024, seed=2))
    graph.replay()
    replayed = output.clone()

    assert replayed.isfinite().all()
    assert replayed.any()
    assert torch.equal(replayed, chain(wait=True))
