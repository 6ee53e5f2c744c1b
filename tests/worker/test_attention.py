"""What every attention backend does, each compared with the formula."""

from __future__ import annotations

import pytest
import torch

from tests.models import make_batch, random_sequences
from worker.attention import Attention
from worker.attention.reference import ReferenceAttention
from worker.attention.sdpa import SdpaAttention
from worker.ragged import Limits, RaggedBatch

LIMITS = Limits(vocab_size=64, max_tokens=300, dimensions=32)
NUM_HEADS, HEAD_DIM = 3, 8


@pytest.fixture(params=[ReferenceAttention, SdpaAttention], ids=lambda backend: backend.name)
def attention(request: pytest.FixtureRequest) -> Attention:
    backend: Attention = request.param()
    return backend


def load(lengths: list[int]) -> RaggedBatch:
    return RaggedBatch.load(make_batch(random_sequences(lengths)), LIMITS, torch.device("cpu"))


def qkv(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one merged tensor, as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(num_tokens, 3, NUM_HEADS, HEAD_DIM, generator=generator).unbind(1)
    return query, key, value


def softmax_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence, [tokens, heads, head_dim], in double precision."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) / HEAD_DIM**0.5
    weights = scores.exp() / scores.exp().sum(dim=2, keepdim=True)
    return torch.einsum("hqk,khd->qhd", weights, value.double()).float()


@pytest.mark.parametrize("lengths", [[1], [5], [256], [1, 1, 1], [4, 4, 9], [1, 2, 3, 40, 41], [7] * 12 + [255]])
def test_each_sequence_attends_to_itself_alone(attention: Attention, lengths: list[int]) -> None:
    query, key, value = qkv(sum(lengths))
    batch = load(lengths)

    output = attention(query, key, value, batch)

    expected = torch.cat(
        [
            softmax_attention(q, k, v)
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
    )
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_large_scores_do_not_overflow(attention: Attention) -> None:
    query, key, value = qkv(6)

    output = attention(query * 1e3, key * 1e3, value, load([2, 4]))

    assert output.isfinite().all()


def test_other_sequences_with_nan_change_nothing(attention: Attention) -> None:
    query, key, value = qkv(9)
    batch = load([3, 3, 3])
    clean = attention(query, key, value, batch)
    value[3:6] = torch.nan

    output = attention(query, key, value, batch)

    assert torch.equal(output[:3], clean[:3])
    assert torch.equal(output[6:], clean[6:])
    assert output[3:6].isnan().all()
