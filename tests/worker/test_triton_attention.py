"""Our own attention, however the work is cut, against the formula in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

import tests.worker.kernels  # noqa: F401  # chooses the interpreter before Triton is imported
from tests.worker.kernels import DEVICE
from worker.attention.triton import Config, TritonAttention, _attend, _candidates, _choose

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


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], causal: bool
) -> torch.Tensor:
    """Sequence after sequence, in float32 or double."""
    group = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
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


@configs
@causal_or_not
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 13], [7] * 5, [20, 3, 17, 1], [47]], ids=str)
def test_each_sequence_attends_to_itself_alone(lengths: list[int], causal: bool, config: Config) -> None:
    query, key, value = split(merged(sum(lengths), 4, 32, torch.float16), 2, 1)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, causal, config)

    assert_close(output, formula(query, key, value, lengths, causal))


@configs
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 1, 16), (3, 1, 24), (2, 1, 128), (6, 2, 8)]
)
def test_any_group_of_heads_and_any_head_dim(heads: int, kv_heads: int, head_dim: int, config: Config) -> None:
    lengths = [9, 2, 14]
    query, key, value = split(merged(25, heads + 2 * kv_heads, head_dim, torch.float16), heads, kv_heads)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, False, config)

    assert_close(output, formula(query, key, value, lengths, False))


@causal_or_not
def test_the_backend_reads_a_batch(causal: bool) -> None:
    lengths = [20, 1, 12]
    query, key, value = split(merged(33, 8, 32, torch.float16), 4, 2)

    output = TritonAttention()(query, key, value, bounds(lengths), causal=causal)  # type: ignore[arg-type]

    assert_close(output, formula(query, key, value, lengths, causal))


def test_scores_that_would_overflow_do_not() -> None:
    query, key, value = split(merged(6, 3, 32, torch.float16), 1, 1)

    output = TritonAttention()(query * 100, key * 100, value, bounds([2, 4]), causal=False)  # type: ignore[arg-type]

    assert_close(output, formula(query * 100, key * 100, value, [2, 4], False))


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

    output = _attend(*qkv, batch.token_starts, batch.token_stops, False, config)

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
        output = TritonAttention()(query, key, value, bounds(lengths), causal=causal)  # type: ignore[arg-type]

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

    output = TritonAttention()(query, key, value, bounds(lengths), causal=causal)  # type: ignore[arg-type]

    assert_close(output, formula(query, key, value, lengths, causal))


@causal_or_not
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [pytest.param(*shape, marks=gpu) for shape in SHAPES])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_models_shapes_in_float32(lengths: list[int], heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
    query, key, value = split(merged(sum(lengths), heads + 2 * kv_heads, head_dim, torch.float32), heads, kv_heads)

    output = TritonAttention()(query, key, value, bounds(lengths), causal=causal)  # type: ignore[arg-type]

    assert_close(output, formula(query.double(), key.double(), value.double(), lengths, causal))


@pytest.mark.parametrize("head_dim", [pytest.param(d, marks=gpu) for d in (8, 80, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    lengths = LENGTHS["up to 128"]
    query, key, value = split(merged(sum(lengths), 5, head_dim, dtype), 3, 1)

    output = TritonAttention()(query, key, value, bounds(lengths), causal=True)  # type: ignore[arg-type]

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
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, False, config)

    assert_close(output, formula(query, key, value, lengths, False))


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(c, marks=gpu, id=str(i)) for i, c in enumerate(_candidates(2))])
def test_every_candidate_is_right(config: Config) -> None:
    lengths = LENGTHS["mixed"]
    query, key, value = split(merged(sum(lengths), 8, 128, torch.bfloat16), 4, 2)
    batch = bounds(lengths)

    with poisoned_memory():
        output = _attend(query, key, value, batch.token_starts, batch.token_stops, False, config)

    assert_close(output, formula(query, key, value, lengths, False))
