"""Pooling and what follows it, against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from worker.pooling import finish, pool

HIDDEN = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 0.0], [-1.0, -8.0]])
CU_SEQLENS = torch.tensor([0, 1, 4], dtype=torch.int32)
NAN = math.nan


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_mean_pooling_averages_each_sequence() -> None:
    assert pool(HIDDEN, CU_SEQLENS, "mean").tolist() == [[1.0, -2.0], [pytest.approx(7 / 3), pytest.approx(-4 / 3)]]


def test_cls_pooling_takes_first_tokens() -> None:
    assert pool(HIDDEN, CU_SEQLENS, "cls").tolist() == [[1.0, -2.0], [3.0, 4.0]]


def test_last_pooling_takes_last_tokens() -> None:
    assert pool(HIDDEN, CU_SEQLENS, "last").tolist() == [[1.0, -2.0], [-1.0, -8.0]]


def test_max_pooling_takes_the_largest_of_each_column() -> None:
    assert pool(HIDDEN, CU_SEQLENS, "max").tolist() == [[1.0, -2.0], [5.0, 4.0]]


def test_half_precision_is_pooled_in_float32() -> None:
    hidden = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)

    rows = pool(hidden, ints(0, 3), "mean")

    assert rows.dtype == torch.float32
    assert rows.tolist() == [[pytest.approx(86.0)]]


def test_a_row_does_not_depend_on_the_sequences_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator)

    together = pool(hidden, ints(0, 7, 40, 50), "mean")

    assert torch.equal(together[1:2], pool(hidden[7:40], ints(0, 33), "mean"))


def test_finish_cuts_columns_before_it_normalises() -> None:
    rows = torch.tensor([[3.0, 4.0, 12.0], [3.0, 4.0, 12.0], [3.0, 4.0, 12.0]])

    finished = finish(rows, ints(2, 3, 2), ints(1, 1, 0))

    expected = torch.tensor([[0.6, 0.8, 0.0], [3 / 13, 4 / 13, 12 / 13], [3.0, 4.0, 0.0]])
    torch.testing.assert_close(finished, expected)


def test_a_row_of_zeros_stays_zero() -> None:
    assert finish(torch.zeros(1, 3), ints(3), ints(1)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("normalize", [0, 1])
def test_a_row_with_a_number_that_is_not_finite_is_nan_throughout_and_its_neighbours_are_not(
    bad: float, normalize: int
) -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, bad], [0.0, 1.0]])

    finished = finish(rows, ints(2, 2, 2), ints(1, normalize, 1))

    assert finished[0].tolist() == [1.0, 0.0]
    assert finished[1].isnan().all()
    assert finished[2].tolist() == [0.0, 1.0]


def test_columns_that_do_not_count_may_be_anything() -> None:
    assert finish(torch.tensor([[2.0, NAN]]), ints(1), ints(1)).tolist() == [[1.0, 0.0]]
