"""What every attention backend does, each compared with the formula: on the CPU those for it, on a GPU all others."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.models import make_batch, random_sequences
from worker.attention import Attention, AttentionUnavailable, HeadShape
from worker.attention.measure import MAX_ERROR, MIN_COSINE, compare, qkv, ragged
from worker.attention.reference import ReferenceAttention, attend
from worker.attention.registry import BACKENDS
from worker.attention.sdpa import SdpaAttention
from worker.attention.select import Selection
from worker.batch.capacity import Capacity, choose_capacity
from worker.batch.ragged import Mask, RaggedBatch, load_sorted

if TYPE_CHECKING:
    import numpy.typing as npt

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, causal=False, dtype=torch.float32)


def load(lengths: list[int], attention: Attention) -> RaggedBatch:
    """In order of length, as a CPU has it."""
    return load_sorted(make_batch(random_sequences(lengths)), attention)[0]


def softmax_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """One sequence, all [tokens, heads, head_dim], in double precision."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) / query.shape[2] ** 0.5
    weights = scores.exp()
    if causal:
        weights = weights.tril()
    weights = weights / weights.sum(dim=2, keepdim=True)
    return torch.einsum("hqk,khd->qhd", weights, value.double()).float()


def weighted_mean(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence, all [tokens, heads, head_dim], token by token, head by head and key by key in double precision."""
    num_tokens, num_heads, head_dim = query.shape
    output = torch.zeros_like(query, dtype=torch.float64)
    for i in range(num_tokens):
        seen = [
            j for j in range(num_tokens) if (j <= i or not causal) and (window is None or i - window <= j <= i + window)
        ]
        for head in range(num_heads):
            weights = []
            for j in seen:
                score = float(query[i, head].double() @ key[j, head].double()) / math.sqrt(head_dim)
                if bias is not None:
                    reach = (bias.shape[1] - 1) // 2
                    score += float(bias[head, reach + max(-reach, min(reach, j - i))])
                weights.append(math.exp(score))
            for j, weight in zip(seen, weights, strict=True):
                output[i, head] += weight / sum(weights) * value[j, head].double()
    return output.float()


# --- on the CPU ---


@pytest.fixture(params=[ReferenceAttention, SdpaAttention], ids=["reference", "sdpa"])
def attention(request: pytest.FixtureRequest) -> Attention:
    backend: Attention = request.param()
    return backend


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[1], [5], [256], [1, 1, 1], [4, 4, 9], [1, 2, 3, 40, 41], [7] * 12 + [255]])
def test_each_sequence_attends_to_itself_alone(
    attention: Attention, lengths: list[int], num_kv_heads: int, causal: bool
) -> None:
    query, key, value = qkv(replace(SHAPE, num_kv_heads=num_kv_heads), sum(lengths), CPU)
    batch = load(lengths, attention)

    output = attention(query, key, value, batch, Mask(causal))

    full_key, full_value = (tensor.repeat_interleave(4 // num_kv_heads, dim=1) for tensor in (key, value))
    expected = torch.cat(
        [
            softmax_attention(q, k, v, causal=causal)
            for q, k, v in zip(query.split(lengths), full_key.split(lengths), full_value.split(lengths), strict=True)
        ]
    )
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("reach", [None, 0, 2, 11])
@pytest.mark.parametrize("window", [None, 0, 1, 3, 8])
def test_windows_and_biases_are_those_of_the_formula(
    attention: Attention, window: int | None, reach: int | None, num_kv_heads: int, causal: bool
) -> None:
    lengths = [1, 4, 4, 9]
    query, key, value = qkv(replace(SHAPE, num_kv_heads=num_kv_heads), sum(lengths), CPU)
    bias = None if reach is None else 2 * torch.randn(4, 2 * reach + 1, generator=torch.Generator().manual_seed(1))

    output = attention(query, key, value, load(lengths, attention), Mask(causal, window, bias))

    full_key, full_value = (tensor.repeat_interleave(4 // num_kv_heads, dim=1) for tensor in (key, value))
    expected = torch.cat(
        [
            weighted_mean(q, k, v, causal=causal, window=window, bias=bias)
            for q, k, v in zip(query.split(lengths), full_key.split(lengths), full_value.split(lengths), strict=True)
        ]
    )
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_a_token_that_sees_only_itself_has_its_own_value(attention: Attention) -> None:
    query, key, value = qkv(SHAPE, 9, CPU)

    output = attention(query, key, value, load([2, 7], attention), Mask(causal=False, window=0))

    torch.testing.assert_close(output, value.repeat_interleave(2, dim=1), rtol=0, atol=1e-6)


def test_other_sequences_with_nan_change_nothing_within_windows_and_with_a_bias(attention: Attention) -> None:
    query, key, value = qkv(SHAPE, 18, CPU)
    batch, bias = load([6, 6, 6], attention), torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    clean = attention(query, key, value, batch, Mask(causal=False, window=2, bias=bias))
    value[6:12] = torch.nan

    output = attention(query, key, value, batch, Mask(causal=False, window=2, bias=bias))

    assert torch.equal(output[:6], clean[:6])
    assert torch.equal(output[12:], clean[12:])
    assert output[6:12].isnan().all()


def test_large_scores_do_not_overflow(attention: Attention) -> None:
    query, key, value = qkv(SHAPE, 6, CPU)

    output = attention(query * 1e3, key * 1e3, value, load([2, 4], attention), Mask(causal=False))

    assert output.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_other_sequences_with_nan_change_nothing(attention: Attention, causal: bool) -> None:
    query, key, value = qkv(SHAPE, 9, CPU)
    batch = load([3, 3, 3], attention)
    clean = attention(query, key, value, batch, Mask(causal))
    value[3:6] = torch.nan

    output = attention(query, key, value, batch, Mask(causal))

    assert torch.equal(output[:3], clean[:3])
    assert torch.equal(output[6:], clean[6:])
    assert output[3:6].isnan().all()


def test_causal_attention_does_not_see_what_comes_later(attention: Attention) -> None:
    query, key, value = qkv(SHAPE, 8, CPU)
    batch = load([8], attention)
    clean = attention(query, key, value, batch, Mask(causal=True))
    key[5:], value[5:] = 7.0, 7.0

    output = attention(query, key, value, batch, Mask(causal=True))

    torch.testing.assert_close(output[:5], clean[:5], rtol=0, atol=1e-6)
    assert not torch.allclose(output[5:], clean[5:])


def test_reference_passes_over_rows_without_tokens() -> None:
    attention, mask = ReferenceAttention(), Mask(causal=False)
    # Padded with a dummy to 64 tokens, and with rows without tokens to 8.
    batch, offsets = ragged(np.array([5, 1, 20], dtype=np.int32), Capacity(64, 8), CPU, attention)
    query, key, value = qkv(SHAPE, 64, CPU)

    output = attention(query, key, value, batch, mask)

    assert offsets.tolist() == [0, 5, 6, 26, 64, 64, 64, 64, 64]
    expected = [attend(query[a:b], key[a:b], value[a:b], mask) for a, b in [(0, 5), (5, 6), (6, 26), (26, 64)]]
    assert torch.equal(output, torch.cat(expected))


def test_reference_computes_in_blocks_what_it_computes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = qkv(SHAPE, 50, CPU)
    bias = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    whole = attend(query, key, value, Mask(causal=True, window=20, bias=bias))
    monkeypatch.setattr("worker.attention.reference._MAX_SCORES", 4 * 50 * 7)

    output = attend(query, key, value, Mask(causal=True, window=20, bias=bias))

    torch.testing.assert_close(output, whole, rtol=0, atol=1e-6)


def test_heads_that_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads cannot share 2"):
        replace(SHAPE, num_heads=3)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn-4 is installed")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_a_backend_whose_package_is_missing_says_what_to_install() -> None:
    shape = replace(SHAPE, head_dim=64, dtype=torch.bfloat16)

    with pytest.raises(AttentionUnavailable, match=r"flash_attention_4: not installed: flash-attn-4==\d"):
        BACKENDS["flash_attention_4"].open(shape, CUDA)
    with pytest.raises(AttentionUnavailable, match=r"flashinfer_fa3: not installed: flashinfer-python==\d"):
        BACKENDS["flashinfer_fa3"].open(shape, CUDA)


def test_torch_refuses_what_its_kernels_do_not_compute() -> None:
    with pytest.raises(AttentionUnavailable, match="float32"):
        BACKENDS["torch"].open(SHAPE, CUDA)
    with pytest.raises(AttentionUnavailable, match="head_dim 264"):
        BACKENDS["torch"].open(replace(SHAPE, head_dim=264, dtype=torch.float16), CUDA)


# --- on a GPU ---

SHAPES = {
    "qwen3": HeadShape(num_heads=16, num_kv_heads=8, head_dim=128, causal=True, dtype=torch.bfloat16),
    "xlmr": HeadShape(num_heads=16, num_kv_heads=16, head_dim=64, causal=False, dtype=torch.bfloat16),
    "minilm": HeadShape(num_heads=12, num_kv_heads=12, head_dim=32, causal=False, dtype=torch.bfloat16),
}

# Each is padded: dummies fill the tokens up, and rows without tokens follow.
LENGTHS = {
    "one token": [1],
    "one query": [20],
    "queries": [20, 3, 31, 17, 1, 1, 12, 25] * 3 + [9],
    "512 sequences": [1 + i % 7 for i in range(512)],
    "around a tile": [63, 64, 65, 127, 128, 129, 1],
    "documents": [310, 42, 512, 256, 1, 300],
    "one long": [2500],
    "long among short": [5, 1900, 17, 1, 30],
    "above the graphs": [16000, 20, 700, 1],
}

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
may_warn = pytest.mark.filterwarnings("default")  # packages warn of what they do themselves, when they compile


@pytest.fixture(scope="module", params=[row.name for row in BACKENDS.values() if row.is_measured])
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(SHAPES))
def shape_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["bidirectional", "causal"])
def shape(request: pytest.FixtureRequest, shape_name: str) -> HeadShape:
    return replace(SHAPES[shape_name], causal=request.param)


@pytest.fixture(scope="module")
def on_gpu(backend_name: str, shape: HeadShape) -> Attention:
    device = torch.device("cuda")
    backend = BACKENDS[backend_name]
    if reason := backend.unavailable(shape, device) or backend.unready(shape):
        pytest.skip(f"{backend_name}: {reason}")
    return backend.open(shape, device)


def lengths_named(name: str) -> npt.NDArray[np.int32]:
    return np.array(LENGTHS[name], dtype=np.int32)


def assert_formula(output: torch.Tensor, batch: RaggedBatch, shape: HeadShape) -> None:
    """That `output` is the attention of `qkv` over the batch."""
    query, key, value = qkv(shape, len(batch.token_ids), output.device)
    expected = ReferenceAttention()(query.float(), key.float(), value.float(), batch, shape.mask)
    error, cosine = compare(output, expected)
    assert error <= MAX_ERROR
    assert cosine >= MIN_COSINE


class Replayed:
    """A graph of one capacity, whose inputs are changed in place as the engine does. On the current stream."""

    def __init__(self, attention: Attention, shape: HeadShape, capacity: Capacity, first: str) -> None:
        self._capacity = capacity
        self._instance = attention.at(capacity.tokens, capacity.sequences)
        self._batch, offsets = ragged(lengths_named(first), capacity, torch.device("cuda"), attention)
        self._batch = replace(self._batch, max_seqlen=capacity.tokens)
        # Kept: a graph reads where they were, whoever has the memory by then.
        query, key, value = self._inputs = qkv(shape, capacity.tokens, torch.device("cuda"))
        self._instance.prepare(offsets)
        self._instance(query, key, value, self._batch, shape.mask)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin()
        self._output = self._instance(query, key, value, self._batch, shape.mask)
        self._graph.capture_end()

    def run(self, batch: RaggedBatch, offsets: npt.NDArray[np.int32]) -> torch.Tensor:
        self._instance.prepare(offsets)
        for field in ("positions", "token_starts", "token_stops", "cu_seqlens"):
            getattr(self._batch, field).copy_(getattr(batch, field))
        self._output.fill_(torch.nan)
        self._graph.replay()
        return self._output.clone()


@gpu
@needs_cuda
@may_warn
@pytest.mark.parametrize("name", list(LENGTHS))
def test_on_a_gpu_eagerly_it_is_the_formula(on_gpu: Attention, shape: HeadShape, name: str) -> None:
    lengths = lengths_named(name)
    capacity, _ = choose_capacity(int(lengths.sum()), len(lengths))
    batch, offsets = ragged(lengths, capacity, torch.device("cuda"), on_gpu)
    query, key, value = qkv(shape, capacity.tokens, torch.device("cuda"))
    on_gpu.prepare(offsets)

    output = on_gpu(query, key, value, batch, shape.mask)

    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert output.is_contiguous()
    assert_formula(output, batch, shape)


@gpu
@needs_cuda
@may_warn
@pytest.mark.parametrize(
    ("capacity", "captured", "replayed"),
    [
        (Capacity(64, 8), "one query", "one token"),
        (Capacity(1024, 32), "around a tile", "queries"),
        (Capacity(2560, 32), "one long", "long among short"),
        (Capacity(2560, 600), "one long", "512 sequences"),
    ],
    ids=["short", "middle", "long", "long, then many"],
)
def test_on_a_gpu_a_graph_is_the_formula_for_other_lengths(
    on_gpu: Attention, shape: HeadShape, capacity: Capacity, captured: str, replayed: str
) -> None:
    device = torch.device("cuda")
    other, other_offsets = ragged(lengths_named(replayed), capacity, device, on_gpu)
    first, first_offsets = ragged(lengths_named(captured), capacity, device, on_gpu)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        graph = Replayed(on_gpu, shape, capacity, captured)
        outputs = [graph.run(other, other_offsets), graph.run(first, first_offsets)]
        torch.cuda.synchronize()

    assert_formula(outputs[0], other, shape)
    assert_formula(outputs[1], first, shape)


@gpu
@needs_cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list(SHAPES))
def test_on_a_gpu_float32_is_the_formula_in_a_graph_too(name: str, causal: bool) -> None:
    device = torch.device("cuda")
    float32 = replace(SHAPES[name], causal=causal, dtype=torch.float32)
    attention = Selection.default(float32, device).choose(1024, 32, 512)
    capacity = Capacity(1024, 32)
    batch, offsets = ragged(lengths_named("queries"), capacity, device, attention)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        output = Replayed(attention, float32, capacity, "around a tile").run(batch, offsets)
        torch.cuda.synchronize()

    query, key, value = qkv(float32, capacity.tokens, device)
    expected = ReferenceAttention()(query, key, value, batch, float32.mask)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@gpu
@needs_cuda
@may_warn
def test_on_a_gpu_batches_that_are_launched_ahead_do_not_mix(on_gpu: Attention, shape: HeadShape) -> None:
    """All are prepared and launched while the device is busy with something else."""
    capacity = Capacity(1792, 128)
    names = ["queries", "documents", "around a tile", "one query", "one token", "documents"] * 3
    batches = [ragged(lengths_named(name), capacity, torch.device("cuda"), on_gpu) for name in names]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        graph = Replayed(on_gpu, shape, capacity, "documents")
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        outputs = [graph.run(*batch) for batch in batches]
        torch.cuda.synchronize()

    for output, (batch, _) in zip(outputs, batches, strict=True):
        assert_formula(output, batch, shape)
