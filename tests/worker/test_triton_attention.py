"""Our own attention, however the work is cut, against the formula in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tests.worker.kernels  # noqa: F401  # chooses the interpreter before Triton is imported
from tests.worker.kernels import DEVICE
from worker.attention.reference import ReferenceAttention
from worker.attention.triton import Config, TritonAttention, _attend, _attention_kernel, _candidates, _choose
from worker.batch.ragged import Mask

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
CONFIGS = {
    "one block of keys": Config(16, 64, 2, 4, 2, skip_masks=False),
    "many blocks of keys": Config(16, 16, 2, 4, 2, skip_masks=False),
    "one head a tile": Config(16, 32, 1, 4, 2, skip_masks=False),
    "heads beyond the group": Config(8, 16, 4, 4, 2, skip_masks=False),
    "masks skipped": Config(32, 16, 1, 4, 2, skip_masks=True),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


# What launches compile for long sequences of a head_dim: plain, with a window, with a bias, and with both. By
# `python -c`, as this process may be set to interpret kernels.
COMPILE = """
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from worker.attention import triton as module

head_dim = int(sys.argv[1])
config = module._choose(4096, 8, 2, head_dim, torch.bfloat16)
kernel = module._attention_kernel
pointers = dict.fromkeys(("output", "query", "key", "value"), "*bf16") | {"token_starts": "*i32", "token_stops": "*i32"}
numbers = dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32")
constants = dict(
    NUM_HEADS=4, GROUP=2, HEAD_DIM=head_dim, BLOCK_D=head_dim, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
    HEADS=config.heads, CAUSAL=False, SKIP_MASKS=config.skip_masks, PRECISION="tf32", PDL=True,
)
window, bias = {"window": "i32"}, {"bias": "*fp32", "reach": "i32"}
for options in ({}, window, bias, window | bias):
    present = pointers | numbers | {"num_tokens": "i32", "scale": "fp32"} | options
    absent = {name: None for name in window | bias if name not in options}
    values = constants | absent
    types = present | dict.fromkeys(values, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    divisible = [name for name in present if present[name] == "*bf16" or name in numbers]
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in values.items()},
        {places[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True},
    )
    assert compiled.metadata.shared <= 227 * 1024
"""


class Bounds(NamedTuple):
    """What attention reads of a batch."""

    token_starts: torch.Tensor
    token_stops: torch.Tensor
    cu_seqlens: torch.Tensor


def bounds(lengths: list[int]) -> Bounds:
    counts = torch.tensor(lengths)
    stops = counts.cumsum(0)
    starts = (stops - counts).repeat_interleave(counts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), stops])
    return Bounds(*(x.int().to(DEVICE) for x in (starts, stops.repeat_interleave(counts), offsets)))


def merged(num_tokens: int, num_rows: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, num_rows * head_dim, generator=generator).to(dtype).to(DEVICE)


def split(qkv: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one merged tensor, as a model has them."""
    query, key, value = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], dim=1)
    return query, key, value


def table(heads: int, reach: int) -> torch.Tensor:
    """A bias for every distance up to `reach`, large enough to matter."""
    return (3 * torch.randn(heads, 2 * reach + 1, generator=torch.Generator().manual_seed(1))).to(DEVICE)


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    causal: bool,
    window: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sequence after sequence, in float32 or double."""
    group = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        positions = torch.arange(len(q), device=q.device)
        distances = positions - positions[:, None]  # [queries, keys]
        if bias is not None:
            reach = bias.shape[1] // 2
            scores = scores + bias[:, reach + distances.clamp(-reach, reach)]
        if causal:
            scores = scores.masked_fill(distances > 0, -torch.inf)
        if window is not None:
            scores = scores.masked_fill(distances.abs() > window, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), v))
    return torch.cat(outputs)


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Weights and the result are rounded to the dtype: 2⁻¹¹ or 2⁻⁸ of values of up to some 4; float32 is not."""
    assert output.is_contiguous()
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[output.dtype]
    torch.testing.assert_close(output.float(), expected.float(), rtol=tolerance, atol=tolerance)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is full of NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)  # fills it, by `torch.utils.deterministic.fill_uninitialized_memory`
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- attention ---


@pytest.mark.sampled(7)
@configs
@causal_or_not
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 13], [7] * 5, [20, 3, 17, 1], [47]], ids=str)
def test_each_sequence_attends_to_itself_alone(lengths: list[int], causal: bool, config: Config) -> None:
    query, key, value = split(merged(sum(lengths), 4, 32, torch.float16), 2, 1)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal), config)

    assert_close(output, formula(query, key, value, lengths, causal))


@pytest.mark.sampled(7)
@configs
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 1, 16), (3, 1, 24), (2, 1, 128), (6, 2, 8)]
)
def test_any_group_of_heads_and_any_head_dim(heads: int, kv_heads: int, head_dim: int, config: Config) -> None:
    lengths = [9, 2, 14]
    query, key, value = split(merged(25, heads + 2 * kv_heads, head_dim, torch.float16), heads, kv_heads)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal=False), config)

    assert_close(output, formula(query, key, value, lengths, False))


# --- windows and biases ---

# The window may end within a tile or a block of keys, or reach beyond all that there is.
windows = pytest.mark.parametrize("window", [0, 1, 7, 8, 64, 2**31 - 1])


@pytest.mark.sampled(7)
@configs
@causal_or_not
@windows
def test_a_token_sees_what_is_within_the_window(window: int, causal: bool, config: Config) -> None:
    lengths = [1, 8, 67, 1, 9]
    query, key, value = split(merged(86, 4, 16, torch.float16), 2, 1)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal, window), config)

    assert_close(output, formula(query, key, value, lengths, causal, window))


@pytest.mark.sampled(7)
@configs
@causal_or_not
@pytest.mark.parametrize("reach", [0, 3, 16, 17, 100])
def test_a_bias_is_added_by_head_and_distance(reach: int, causal: bool, config: Config) -> None:
    lengths = [1, 40, 8]
    query, key, value = split(merged(49, 5, 16, torch.float16), 3, 1)
    batch, bias = bounds(lengths), table(3, reach)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal, None, bias), config)

    assert_close(output, formula(query, key, value, lengths, causal, None, bias))


@pytest.mark.sampled(7)
@configs
@causal_or_not
@pytest.mark.parametrize(("window", "reach"), [(0, 2), (7, 3), (20, 20)])
def test_a_window_and_a_bias_go_together(window: int, reach: int, causal: bool, config: Config) -> None:
    lengths = [3, 40, 1, 4]
    query, key, value = split(merged(48, 8, 16, torch.float16), 4, 2)
    batch, bias = bounds(lengths), table(4, reach)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal, window, bias), config)

    assert_close(output, formula(query, key, value, lengths, causal, window, bias))


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@causal_or_not
@configs
def test_keys_outside_the_windows_of_all_rows_are_not_visited(config: Config, causal: bool) -> None:
    query, key, value = split(merged(90, 3, 16, torch.float16), 1, 1)
    batch = bounds([90])
    # What the tile of token 50 may visit, of any config: within the window of its tokens, and a block's padding.
    first = 50 // config.block_m * config.block_m
    stop = first + config.block_m + (0 if causal else 5)
    visited = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal, 5), config)
    value[: first - 5], value[stop:] = torch.nan, torch.nan

    output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal, 5), config)

    assert torch.equal(output[first : first + config.block_m], visited[first : first + config.block_m])


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@configs
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
def test_within_windows_and_with_a_bias_too_a_sequence_spoils_only_itself(
    part: int, bad: float, config: Config
) -> None:
    lengths = [3, 5, 40]
    qkv = split(merged(48, 4, 16, torch.float16), 2, 1)
    batch, bias = bounds(lengths), table(2, 4)
    clean = formula(*qkv, lengths, False, 6, bias)
    qkv[part][4, 0, 7] = bad

    output = _attend(*qkv, batch.token_starts, batch.token_stops, Mask(False, 6, bias), config)

    assert_close(output[:3], clean[:3])
    assert_close(output[8:], clean[8:])
    spoiled = ~formula(*qkv, lengths, False, 6, bias).isfinite()
    assert spoiled[3:8].any()
    assert not output[spoiled].isfinite().any()


@causal_or_not
def test_in_float32_windows_and_biases_are_exact(causal: bool) -> None:
    lengths = [5, 13, 1, 40]
    query, key, value = split(merged(59, 5, 24, torch.float32), 3, 1)
    bias = table(3, 6)

    with poisoned_memory():
        output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal, 9, bias))  # type: ignore[arg-type]

    assert_close(output, formula(query, key, value, lengths, causal, 9, bias))


def test_heads_of_256_fit() -> None:
    lengths = [9, 20]
    query, key, value = split(merged(29, 5, 256, torch.float16), 3, 1)

    with poisoned_memory():
        output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal=False, window=8))  # type: ignore[arg-type]

    assert_close(output, formula(query, key, value, lengths, False, 8))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_it_compiles_for_hopper_where_there_is_no_gpu(head_dim: int, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    root = Path(__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(head_dim)], cwd=root, env=env, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


@causal_or_not
def test_the_backend_reads_a_batch(causal: bool) -> None:
    lengths = [20, 1, 12]
    query, key, value = split(merged(33, 8, 32, torch.float16), 4, 2)

    output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal))  # type: ignore[arg-type]

    assert_close(output, formula(query, key, value, lengths, causal))


def test_scores_that_would_overflow_do_not() -> None:
    query, key, value = split(merged(6, 3, 32, torch.float16), 1, 1)

    output = TritonAttention()(query * 100, key * 100, value, bounds([2, 4]), Mask(causal=False))  # type: ignore[arg-type]

    assert_close(output, formula(query * 100, key * 100, value, [2, 4], False))


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@configs
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
def test_a_sequence_that_is_not_finite_spoils_only_itself(part: int, bad: float, config: Config) -> None:
    lengths = [3, 5, 40]
    qkv = split(merged(48, 4, 32, torch.float16), 2, 1)
    batch = bounds(lengths)
    clean = formula(*qkv, lengths, False)
    qkv[part][4, 0, 7] = bad

    output = _attend(*qkv, batch.token_starts, batch.token_stops, Mask(causal=False), config)

    assert_close(output[:3], clean[:3])
    assert_close(output[8:], clean[8:])
    # An infinite key may also have no weight at all, as in the formula.
    spoiled = ~formula(*qkv, lengths, False).isfinite()
    assert spoiled[3:8].any()
    assert not output[spoiled].isfinite().any()


@causal_or_not
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 32), (3, 1, 24)])
def test_in_float32_it_is_exact(heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
    lengths = [5, 13, 1, 20]
    query, key, value = split(merged(39, heads + 2 * kv_heads, head_dim, torch.float32), heads, kv_heads)

    with poisoned_memory():
        output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal))  # type: ignore[arg-type]

    assert output.dtype == torch.float32
    assert_close(output, formula(query, key, value, lengths, causal))


DTYPES = (torch.bfloat16, torch.float32)


def test_what_is_chosen_can_run_for_any_group_and_number_of_tokens() -> None:
    sizes = [(1, 1), (64, 8), (512, 8), (512, 32), (2048, 32), (4096, 8), (4096, 512), (40_000, 20)]
    chosen = [
        _choose(*size, group, head_dim, dtype)
        for size in sizes
        for group in (1, 2, 3, 8, 32)
        for head_dim in (8, 32, 48, 64, 80, 128, 256)
        for dtype in DTYPES
    ]

    assert min(config.block_m * config.heads for config in chosen) >= 16
    assert max(config.block_m * config.heads for config in chosen) <= 128
    assert min(config.block_m for config in chosen) >= 8


def test_few_tokens_to_a_row_are_cut_for_short_sequences() -> None:
    queries, documents = (_choose(512, rows, 2, 128, torch.bfloat16) for rows in (32, 8))

    assert queries == Config(32, 32, 2, 4, 3, skip_masks=False)
    assert documents == Config(32, 64, 2, 4, 2, skip_masks=True)


# --- on a GPU ---

SHAPES = [(16, 8, 128), (32, 8, 128), (16, 16, 64), (12, 12, 32)]
LENGTHS = {
    "one query": [20],
    "25 queries": [20] * 25,
    "up to 128": [(37 * i) % 128 + 1 for i in range(100)],
    "mixed": [1, 700, 3, 1, 2000, 64, 128, 33],
    "one long": [4096],
}


@causal_or_not
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [pytest.param(*shape, marks=gpu) for shape in SHAPES])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_models_shapes_in_bf16(lengths: list[int], heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
    query, key, value = split(merged(sum(lengths), heads + 2 * kv_heads, head_dim, torch.bfloat16), heads, kv_heads)

    output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal))  # type: ignore[arg-type]

    assert_close(output, formula(query, key, value, lengths, causal))


@causal_or_not
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [pytest.param(*shape, marks=gpu) for shape in SHAPES])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_models_shapes_in_float32(lengths: list[int], heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
    query, key, value = split(merged(sum(lengths), heads + 2 * kv_heads, head_dim, torch.float32), heads, kv_heads)

    output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal))  # type: ignore[arg-type]

    assert_close(output, formula(query.double(), key.double(), value.double(), lengths, causal))


@pytest.mark.parametrize("head_dim", [pytest.param(d, marks=gpu) for d in (8, 80, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    lengths = LENGTHS["up to 128"]
    query, key, value = split(merged(sum(lengths), 5, head_dim, dtype), 3, 1)

    output = TritonAttention()(query, key, value, bounds(lengths), Mask(causal=True))  # type: ignore[arg-type]

    assert_close(output, formula(query.double(), key.double(), value.double(), lengths, True))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(*s, marks=gpu, id=str(s[0]))
        for s in [((64, 8),), ((512, 32),), ((512, 8),), ((2048, 512),), ((2048, 8),), ((4096, 8),)]
    ],
)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (1, 64), (7, 64), (2, 128), (8, 128)])
def test_whatever_is_chosen_is_right(size: tuple[int, int], group: int, head_dim: int) -> None:
    lengths = LENGTHS["mixed"]
    query, key, value = split(merged(sum(lengths), group + 2, head_dim, torch.bfloat16), group, 1)
    batch = bounds(lengths)
    config = _choose(*size, group, head_dim, torch.bfloat16)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal=False), config)

    assert_close(output, formula(query, key, value, lengths, False))


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(c, marks=gpu, id=str(i)) for i, c in enumerate(_candidates(2))])
def test_every_candidate_is_right(config: Config) -> None:
    lengths = LENGTHS["mixed"]
    query, key, value = split(merged(sum(lengths), 8, 128, torch.bfloat16), 4, 2)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal=False), config)

    assert_close(output, formula(query, key, value, lengths, False))


# ModernBERT's window, Gemma 3's, and one that no sequence is longer than.
@causal_or_not
@pytest.mark.parametrize("window", [64, 512, 5000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [pytest.param(*shape, marks=gpu) for shape in [(12, 12, 64), (3, 1, 256), (16, 8, 128), (12, 12, 32)]],
)
@pytest.mark.parametrize("name", ["one query", "25 queries", "up to 128", "mixed"])
def test_windows_of_models(name: str, heads: int, kv_heads: int, head_dim: int, window: int, causal: bool) -> None:
    check_as_reference(LENGTHS[name], heads, kv_heads, head_dim, torch.bfloat16, causal, window, None)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("reach", [1, 127, 4096])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [pytest.param(*shape, marks=gpu) for shape in [(12, 12, 64), (8, 2, 128)]]
)
@pytest.mark.parametrize("name", ["one query", "25 queries", "up to 128", "mixed"])
def test_biases_of_models(name: str, heads: int, kv_heads: int, head_dim: int, reach: int, window: int | None) -> None:
    bias = table(heads, reach)
    check_as_reference(LENGTHS[name], heads, kv_heads, head_dim, torch.bfloat16, False, window, bias)


@causal_or_not
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize(("window", "reach"), [(64, None), (None, 127), (64, 127)])
def test_windows_and_biases_in_other_dtypes(
    window: int | None, reach: int | None, dtype: torch.dtype, causal: bool
) -> None:
    bias = None if reach is None else table(12, reach)
    check_as_reference(LENGTHS["mixed"], 12, 12, 64, dtype, causal, window, bias)


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(c, marks=gpu, id=str(i)) for i, c in enumerate(_candidates(2))])
def test_every_candidate_is_right_with_a_window_and_a_bias(config: Config) -> None:
    lengths = LENGTHS["mixed"]
    query, key, value = split(merged(sum(lengths), 8, 64, torch.bfloat16), 4, 2)
    batch, bias = bounds(lengths), table(4, 100)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(False, 90, bias), config)

    assert_close(output, formula(query, key, value, lengths, False, 90, bias))


@pytest.mark.parametrize("causal", [pytest.param(c, marks=gpu) for c in (False, True)])
def test_no_window_and_no_number_of_tokens_compiles_another_kernel(causal: bool) -> None:
    def run(num_tokens: int, window: int, reach: int) -> None:
        query, key, value = split(merged(num_tokens, 3, 64, torch.bfloat16), 1, 1)
        batch, bias = bounds([num_tokens]), table(1, reach)
        config = Config(64, 64, 1, 4, 2, skip_masks=True)
        _attend(query, key, value, batch.token_starts, batch.token_stops, Mask(causal, window, bias), config)

    run(64, 64, 64)
    kernels = compiled_kernels()
    run(65, 1, 1)
    run(1, 0, 0)
    run(160, 16, 2)

    assert compiled_kernels() == kernels


def compiled_kernels() -> int:
    return len(_attention_kernel.device_caches[torch.cuda.current_device()][0])


def check_as_reference(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    window: int | None,
    bias: torch.Tensor | None,
) -> None:
    query, key, value = split(merged(sum(lengths), heads + 2 * kv_heads, head_dim, dtype), heads, kv_heads)
    batch = bounds(lengths)

    with poisoned_memory():
        output = TritonAttention()(query, key, value, batch, Mask(causal, window, bias))  # type: ignore[arg-type]

    expected = ReferenceAttention()(
        query.float(),
        key.float(),
        value.float(),
        batch,  # type: ignore[arg-type]
        Mask(causal, window, bias),
    )
    assert_close(output, expected)
