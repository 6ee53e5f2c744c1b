"""Embeddings, against plain torch."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.worker.kernels import DEVICE
from worker.kernels.embedding import embed, embed_layer_norm, embed_layer_norm_reference, embed_reference

EPSILON = 1e-12  # BERT's, far below the variance of a row
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def ids(num_tokens: int, bound: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(bound, (num_tokens,), generator=generator, dtype=torch.int32).to(DEVICE)


class LayerNormInputs(NamedTuple):
    token_ids: torch.Tensor
    positions: torch.Tensor
    words: torch.Tensor
    position_table: torch.Tensor | None
    type_table: torch.Tensor | None
    token_types: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None


def layer_norm_inputs(num_tokens: int, columns: int, dtype: torch.dtype = torch.float16) -> LayerNormInputs:
    return LayerNormInputs(
        ids(num_tokens, 50, seed=0),
        ids(num_tokens, 20, seed=1),
        random(50, columns, seed=2, dtype=dtype),
        random(20, columns, seed=3, dtype=dtype),
        random(2, columns, seed=4, dtype=dtype),
        ids(num_tokens, 2, seed=7),
        random(columns, seed=5, dtype=dtype),
        random(columns, seed=6, dtype=dtype),
    )


# What a model may lack.
WITHOUT: dict[str, dict[str, None]] = {
    "nothing": {},
    "types of tokens": {"token_types": None},
    "types": {"type_table": None, "token_types": None},
    "positions": {"position_table": None},
    "all but words": {"position_table": None, "type_table": None, "token_types": None, "bias": None},
}
without = pytest.mark.parametrize("missing", WITHOUT.values(), ids=WITHOUT)


@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 1024), (7, 384), (3, 32)])
def test_embed_gathers_rows(num_tokens: int, columns: int) -> None:
    token_ids, table = ids(num_tokens, 50, seed=0), random(50, columns, seed=1)

    assert torch.equal(embed(token_ids, table), embed_reference(token_ids, table))


def test_ids_that_are_views_of_a_buffer_are_read_where_they_lie() -> None:
    buffer, table = ids(9, 50, seed=0), random(50, 32, seed=1)

    assert torch.equal(embed(buffer[3:], table), embed_reference(buffer[3:], table))


@without
@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 1024), (5, 384), (3, 768)])
def test_embed_layer_norm_is_that_of_plain_torch(num_tokens: int, columns: int, missing: dict[str, None]) -> None:
    inputs = layer_norm_inputs(num_tokens, columns)._replace(**missing)

    rows = embed_layer_norm(*inputs, EPSILON)

    assert rows.dtype == torch.float16
    torch.testing.assert_close(rows.float(), embed_layer_norm_reference(*inputs, EPSILON), rtol=1e-3, atol=1e-5)


def test_each_token_gets_the_row_of_its_type() -> None:
    inputs = layer_norm_inputs(3, 32)._replace(token_ids=torch.zeros(3, dtype=torch.int32, device=DEVICE))
    inputs = inputs._replace(position_table=None, token_types=torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE))

    first, second, third = embed_layer_norm(*inputs, EPSILON)

    assert torch.equal(first, third)
    assert not torch.allclose(first, second)
    assert torch.equal(second, embed_layer_norm(*inputs._replace(token_types=None), EPSILON)[0])


@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (384, 768, 1024, 2560)])
@pytest.mark.parametrize("num_tokens", [1, 33, 4099, 32768])
def test_many_bf16_tokens(num_tokens: int, columns: int) -> None:
    inputs = layer_norm_inputs(num_tokens, columns, torch.bfloat16)

    assert torch.equal(embed(inputs.token_ids, inputs.words), embed_reference(inputs.token_ids, inputs.words))
    for missing in WITHOUT.values():
        given = inputs._replace(**missing)
        rows = embed_layer_norm(*given, EPSILON)
        torch.testing.assert_close(rows.float(), embed_layer_norm_reference(*given, EPSILON), rtol=8e-3, atol=1e-5)
