"""Pooling and what follows it, against sums written out by hand."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from common.wire.rows import BINARY, FLOAT32, INT8
from worker.batch.lazy import FLAG_BYTES
from worker.batch.ragged import Spans
from worker.checkpoint.modules import Pooling
from worker.models.pooling import finish, pool

HIDDEN = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 0.0], [-1.0, -8.0]])
NAN = math.nan


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def spans(*bounds: int) -> Spans:
    """Of sequences side by side, from one bound to the next."""
    return ints(*bounds[:-1]), ints(*bounds[1:])


SPANS = spans(0, 1, 4)


def encode(
    rows: torch.Tensor, dimensions: torch.Tensor, normalize: torch.Tensor, encodings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `finish` makes of rows, without their flags; and the flags."""
    finished = finish(rows, dimensions, normalize, encodings)
    return finished[:, FLAG_BYTES:], finished[:, 0]


def finish_floats(rows: torch.Tensor, dimensions: torch.Tensor, normalize: torch.Tensor) -> torch.Tensor:
    """What `finish` makes of rows that are all asked for as float32."""
    finished, _ = encode(rows, dimensions, normalize, torch.full_like(dimensions, FLOAT32))
    return finished.view(torch.float32)


def int8_of(rows: torch.Tensor, dimensions: torch.Tensor | None = None) -> list[list[int]]:
    """What `finish` makes of rows that are all asked for as int8, in whole rows."""
    whole = torch.full((len(rows),), rows.shape[1], dtype=torch.int32)
    finished, _ = encode(rows, whole if dimensions is None else dimensions, whole, torch.full_like(whole, INT8))
    return finished[:, : rows.shape[1]].view(torch.int8).tolist()


def test_mean_pooling_averages_each_sequence() -> None:
    assert pool(HIDDEN, SPANS, "mean").tolist() == [[1.0, -2.0], [pytest.approx(7 / 3), pytest.approx(-4 / 3)]]


def test_cls_pooling_takes_first_tokens() -> None:
    assert pool(HIDDEN, SPANS, "cls").tolist() == [[1.0, -2.0], [3.0, 4.0]]


def test_last_pooling_takes_last_tokens() -> None:
    assert pool(HIDDEN, SPANS, "last").tolist() == [[1.0, -2.0], [-1.0, -8.0]]


def test_max_pooling_takes_the_largest_of_each_column() -> None:
    assert pool(HIDDEN, SPANS, "max").tolist() == [[1.0, -2.0], [5.0, 4.0]]


def test_mean_sqrt_len_pooling_divides_the_sum_by_the_root_of_the_length() -> None:
    root = pytest.approx(7 / 3**0.5)
    assert pool(HIDDEN, SPANS, "mean_sqrt_len").tolist() == [[1.0, -2.0], [root, pytest.approx(-4 / 3**0.5)]]


def test_weighted_mean_pooling_weighs_later_tokens_more() -> None:
    expected = [pytest.approx((3 + 2 * 5 - 3) / 6), pytest.approx((4 + 0 - 3 * 8) / 6)]
    assert pool(HIDDEN, SPANS, "weighted_mean").tolist() == [[1.0, -2.0], expected]


@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_tokens_in_no_span_change_no_row(pooling: Pooling) -> None:
    rows = pool(HIDDEN, (ints(1, 3), ints(2, 4)), pooling)

    assert rows.tolist() == [[3.0, 4.0], [-1.0, -8.0]]


def test_half_precision_is_pooled_in_float32() -> None:
    hidden = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)

    rows = pool(hidden, spans(0, 3), "mean")

    assert rows.dtype == torch.float32
    assert rows.tolist() == [[pytest.approx(86.0)]]


def test_a_row_does_not_depend_on_the_sequences_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator)

    together = pool(hidden, spans(0, 7, 40, 50), "mean")

    assert torch.equal(together[1:2], pool(hidden[7:40], spans(0, 33), "mean"))


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("cu_seqlens", [(0, 0, 1, 1, 4, 4, 4), (0, 1, 4), (0, 0, 0, 4)])
def test_sequences_without_tokens_are_zeros_and_change_no_other_row(pooling: str, cu_seqlens: tuple[int, ...]) -> None:
    offsets = ints(*cu_seqlens)
    lengths = offsets.diff()
    full = torch.cat((ints(0), lengths[lengths > 0].cumsum(0).int()))

    rows = pool(HIDDEN, (offsets[:-1], offsets[1:]), pooling)

    assert torch.equal(rows[lengths > 0], pool(HIDDEN, (full[:-1], full[1:]), pooling))
    assert (rows[lengths == 0] == 0).all()


def test_a_sequence_without_tokens_stays_zero_beside_one_that_is_not_finite() -> None:
    hidden = torch.tensor([[NAN], [1.0]])
    for pooling in get_args(Pooling):
        assert pool(hidden, spans(0, 0, 1, 2, 2), pooling)[[0, 2, 3], 0].tolist() == [0.0, 1.0, 0.0]


def test_a_row_stands_behind_its_flag_and_three_zeros() -> None:
    rows = torch.tensor([[3.0, -4.0], [NAN, 1.0], [1.0, 0.0]])

    finished = finish(rows, ints(2, 2, 2), ints(0, 0, 0), ints(FLOAT32, INT8, BINARY))

    assert finished.dtype == torch.uint8
    assert finished.tolist() == [
        [1, 0, 0, 0, *np.array([3.0, -4.0], dtype="<f4").tobytes()],
        [0, 0, 0, 0] + [0] * 8,
        [1, 0, 0, 0] + [0b11] + [0] * 7,
    ]


def test_finish_cuts_columns_before_it_normalises() -> None:
    rows = torch.tensor([[3.0, 4.0, 12.0], [3.0, 4.0, 12.0], [3.0, 4.0, 12.0]])

    finished = finish_floats(rows, ints(2, 3, 2), ints(1, 1, 0))

    expected = torch.tensor([[0.6, 0.8, 0.0], [3 / 13, 4 / 13, 12 / 13], [3.0, 4.0, 0.0]])
    torch.testing.assert_close(finished, expected)


def test_a_row_of_zeros_stays_zero() -> None:
    assert finish_floats(torch.zeros(1, 3), ints(3), ints(1)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("normalize", [0, 1])
def test_a_row_with_a_number_that_is_not_finite_is_nan_throughout_and_its_neighbours_are_not(
    bad: float, normalize: int
) -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, bad], [0.0, 1.0]])

    encoded, finite = encode(rows, ints(2, 2, 2), ints(1, normalize, 1), ints(FLOAT32, FLOAT32, FLOAT32))

    finished = encoded.view(torch.float32)
    assert finite.tolist() == [1, 0, 1]
    assert finished[0].tolist() == [1.0, 0.0]
    assert finished[1].isnan().all()
    assert finished[2].tolist() == [0.0, 1.0]


def test_columns_that_do_not_count_may_be_anything() -> None:
    assert finish_floats(torch.tensor([[2.0, NAN]]), ints(1), ints(1)).tolist() == [[1.0, 0.0]]
    _, finite = encode(torch.tensor([[2.0, NAN]] * 3), ints(1, 1, 1), ints(1, 1, 1), ints(FLOAT32, INT8, BINARY))
    assert finite.tolist() == [1, 1, 1]


def test_int8_is_the_rounded_tangent_of_the_row_before_any_normalisation() -> None:
    rows = torch.tensor([[0.0, -0.0, 1.0, -1.0, 100.0, -100.0, 0.5, 1e-30]])

    assert int8_of(rows) == [[0, 0, 97, -97, 127, -127, 59, 0]]


def test_int8_rounds_a_half_to_the_even_side() -> None:
    # The float32 numbers for which tanh(x) * 127 is a half exactly, as torch computes it.
    half, three_halves = _argument_of(0.5), _argument_of(1.5)

    assert int8_of(torch.tensor([[half, -half, three_halves, -three_halves]])) == [[0, 0, 2, -2]]


def test_binary_is_one_bit_a_column_the_first_in_the_lowest() -> None:
    rows = torch.tensor([[1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1e-30, -1.0, 0.0, -0.0, 5.0]])

    finished, _ = encode(rows, ints(12), ints(1), ints(BINARY))

    assert finished[0].tolist() == [0b00000001, 0b00001110] + [0] * 46


def test_columns_that_do_not_count_are_zero_in_every_encoding() -> None:
    rows = torch.full((3, 9), 3.0)

    finished, _ = encode(rows, ints(3, 3, 3), ints(0, 0, 0), ints(FLOAT32, INT8, BINARY))

    assert finished[0].view(torch.float32).tolist() == [3.0] * 3 + [0.0] * 6
    assert finished[1].tolist() == [126] * 3 + [0] * 33
    assert finished[2].tolist() == [0b111] + [0] * 35


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_quantised_row_that_is_not_finite_is_zero_and_told_apart(bad: float) -> None:
    rows = torch.tensor([[1.0, bad], [1.0, bad], [1.0, 1.0], [1.0, 1.0]])

    finished, finite = encode(rows, ints(2, 2, 2, 2), ints(1, 1, 1, 1), ints(INT8, BINARY, INT8, BINARY))

    assert finite.tolist() == [0, 0, 1, 1]
    assert finished[:, :2].tolist() == [[0, 0], [0, 0], [97, 97], [3, 0]]


def test_encodings_of_a_batch_do_not_touch_each_other() -> None:
    rows = torch.randn(300, 33, generator=torch.Generator().manual_seed(0)) * 2
    dimensions = torch.arange(300, dtype=torch.int32) % 33 + 1
    normalize = torch.arange(300, dtype=torch.int32) % 2
    encodings = torch.arange(300, dtype=torch.int32) % 3

    finished, finite = encode(rows, dimensions, normalize, encodings)

    for encoding in (FLOAT32, INT8, BINARY):
        alone, _ = encode(rows, dimensions, normalize, torch.full_like(encodings, encoding))
        assert torch.equal(finished[encodings == encoding], alone[encodings == encoding])
    assert finite.all()


def test_float32_rows_are_the_bits_of_a_plain_division() -> None:
    rows = torch.randn(64, 384, generator=torch.Generator().manual_seed(1))
    dimensions, normalize = torch.full((64,), 384, dtype=torch.int32), torch.ones(64, dtype=torch.int32)

    finished = finish_floats(rows, dimensions, normalize)

    assert torch.equal(finished, rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True))
    assert torch.equal(finish_floats(rows, dimensions, 0 * normalize), rows)


def test_binary_rows_are_what_numpy_packs() -> None:
    rows = torch.randn(50, 384, generator=torch.Generator().manual_seed(2))
    whole = torch.full((50,), 384, dtype=torch.int32)

    finished, _ = encode(rows, whole, whole, torch.full_like(whole, BINARY))

    expected = np.packbits(rows.numpy() >= 0, axis=1, bitorder="little")
    np.testing.assert_array_equal(finished[:, :48].numpy(), expected)


def _argument_of(value: float) -> float:
    """A float32 x for which tanh(x) * 127 is `value`, as torch computes it."""
    near = torch.tensor(math.atanh(value / 127), dtype=torch.float32)
    steps = torch.arange(-50, 50, dtype=torch.int32)
    candidates = (near.view(torch.int32) + steps).view(torch.float32)
    matches = candidates[torch.tanh(candidates) * 127 == value]
    return float(matches[0])
