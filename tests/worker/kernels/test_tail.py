"""Pooling, normalising and encoding, against the plain functions of the same names."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from common.wire.rows import BINARY, FLOAT32, INT8
from tests.worker.kernels import DEVICE
from worker.batch.lazy import FLAG_BYTES
from worker.batch.ragged import Spans
from worker.checkpoint.modules import Pooling
from worker.kernels.tail import finish, pool, pool_and_finish
from worker.models import pooling as plain

poolings = pytest.mark.parametrize("pooling", get_args(Pooling))
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def spans(*bounds: int) -> Spans:
    """Of sequences side by side, from one bound to the next."""
    return ints(*bounds[:-1]), ints(*bounds[1:])


def spans_of(*lengths: int) -> Spans:
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    return offsets[:-1].clone(), offsets[1:].clone()


def split(finished: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of rows, and what stands before them."""
    return finished[:, FLAG_BYTES:], finished[:, :FLAG_BYTES]


def flags_of(*finite: int) -> list[list[int]]:
    return [[flag, 0, 0, 0] for flag in finite]


def decode(encoded: torch.Tensor) -> torch.Tensor:
    return encoded.view(torch.float32)


# --- pool ---


@poolings
@pytest.mark.parametrize("lengths", [(1,), (64, 65, 2), (3, 0, 130, 0, 0), (0, 5)])
def test_pool_is_that_of_plain_torch(lengths: tuple[int, ...], pooling: Pooling) -> None:
    hidden, sides = random(sum(lengths), 80, dtype=torch.float16), spans_of(*lengths)

    rows = pool(hidden, sides, pooling)

    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, plain.pool(hidden, sides, pooling), rtol=1e-5, atol=1e-6)


@poolings
def test_a_sequence_without_tokens_is_a_row_of_zeros(pooling: Pooling) -> None:
    hidden = torch.full((2, 8), torch.nan, device=DEVICE)

    assert pool(hidden, spans(0, 0, 2, 2), pooling)[[0, 2]].tolist() == [[0.0] * 8] * 2


@poolings
def test_a_pooled_row_does_not_depend_on_the_sequences_beside_it(pooling: Pooling) -> None:
    hidden = random(140, 72, dtype=torch.float16)
    alone = pool(hidden[5:135].clone(), spans(0, 130), pooling)
    hidden[:5] = torch.nan
    hidden[135:] = torch.inf

    assert torch.equal(pool(hidden, spans(0, 5, 135, 140), pooling)[1:2], alone)


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("token", [0, 70])
def test_a_nan_in_a_sequence_is_in_its_row(pooling: Pooling, token: int) -> None:
    hidden = random(90, 8, dtype=torch.float16)
    hidden[token, 3] = torch.nan

    assert pool(hidden, spans(0, 90), pooling).isnan().nonzero().tolist() == [[0, 3]]


@poolings
@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (384, 1024, 2560)])
@pytest.mark.parametrize(
    "lengths", [(32768,), (20,) * 200, (1, 0, 500, 3, 8192) + (0,) * 500], ids=["long", "short", "mixed"]
)
def test_pool_of_many_bf16_tokens(lengths: tuple[int, ...], columns: int, pooling: Pooling) -> None:
    hidden, sides = random(sum(lengths), columns, dtype=torch.bfloat16), spans_of(*lengths)

    rows = pool(hidden, sides, pooling)

    torch.testing.assert_close(rows, plain.pool(hidden, sides, pooling), rtol=1e-4, atol=1e-5)


# --- finish ---

numpy_warns = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # interpreted


def every_case(columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, dimensions and normalize flags: whole and cut, with and without, large, tiny, zero and not finite."""
    rows = random(9, columns)
    rows[2] *= 30
    rows[3, 5] = torch.nan
    rows[4, 12] = -torch.inf
    rows[5, 13] = torch.inf  # in a column that does not count
    rows[6] *= 1e-20
    rows[7] = 0
    rows[8] *= 1e20  # its norm is infinite
    whole = columns
    dimensions = ints(whole, whole - 3, whole, whole, 13, 13, whole, whole, whole)
    return rows, dimensions, ints(1, 0, 1, 0, 1, 1, 1, 1, 0)


@numpy_warns
@pytest.mark.parametrize("columns", [32, 100, 384])
def test_float_rows_are_those_of_plain_torch(columns: int) -> None:
    rows, dimensions, normalize = every_case(columns)
    encodings = torch.full_like(dimensions, FLOAT32)

    encoded, flags = split(finish(rows, dimensions, normalize, encodings))

    expected, expected_flags = split(plain.finish(rows, dimensions, normalize, encodings))
    assert flags.tolist() == expected_flags.tolist() == flags_of(1, 1, 1, 0, 0, 1, 1, 1, 0)
    torch.testing.assert_close(decode(encoded), decode(expected), rtol=1e-6, atol=1e-7, equal_nan=True)


@numpy_warns
@pytest.mark.parametrize("encoding", [INT8, BINARY])
@pytest.mark.parametrize("columns", [32, 100, 384])
def test_quantised_rows_are_those_of_plain_torch(columns: int, encoding: int) -> None:
    rows, dimensions, normalize = every_case(columns)
    encodings = torch.full_like(dimensions, encoding)

    finished = finish(rows, dimensions, normalize, encodings)

    assert torch.equal(finished, plain.finish(rows, dimensions, normalize, encodings))


def test_rows_of_one_batch_may_be_encoded_differently() -> None:
    rows = torch.tensor([[3.0, 4.0, -1.0], [0.5, -0.5, 9.0], [1.0, -1.0, 0.0]], device=DEVICE)

    encoded, flags = split(finish(rows, ints(2, 3, 3), ints(1, 1, 0), ints(FLOAT32, INT8, BINARY)))

    assert flags.tolist() == flags_of(1, 1, 1)
    torch.testing.assert_close(decode(encoded[0]).cpu(), torch.tensor([0.6, 0.8, 0.0]))
    assert encoded[1].view(torch.int8).tolist() == [59, -59, 127] + [0] * 9
    assert encoded[2].tolist() == [0b101] + [0] * 11


@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (384, 1024, 2560, 4096)])
def test_finish_of_many_rows(columns: int) -> None:
    rows = random(600, columns)
    numbers = torch.arange(600, dtype=torch.int32, device=DEVICE)
    arguments = rows, 1 + numbers * 7 % columns, numbers // 3 % 2, numbers % 3

    encoded, flags = split(finish(*arguments))

    expected, expected_flags = split(plain.finish(*arguments))
    assert torch.equal(flags, expected_flags)
    torch.testing.assert_close(decode(encoded[0::3]), decode(expected[0::3]), rtol=1e-6, atol=1e-7)
    # A half may go either way where two tangents differ in the last bit.
    difference = encoded[1::3].view(torch.int8).int() - expected[1::3].view(torch.int8).int()
    assert difference.abs().max() <= 1
    assert difference.ne(0).float().mean() < 1e-4
    assert torch.equal(encoded[2::3], expected[2::3])


# --- pool_and_finish ---


def assert_same(finished: torch.Tensor, expected: torch.Tensor, encodings: torch.Tensor) -> None:
    """But for a norm, whose sum may be spread over threads in another way."""
    (rows, flags), (expected_rows, expected_flags) = split(finished), split(expected)
    floats = encodings == FLOAT32
    assert torch.equal(flags, expected_flags)
    assert torch.equal(rows[~floats], expected_rows[~floats])
    torch.testing.assert_close(
        decode(rows[floats]), decode(expected_rows[floats]), rtol=1e-6, atol=1e-7, equal_nan=True
    )


@numpy_warns
@poolings
@pytest.mark.parametrize("columns", [32, 100])
def test_pool_and_finish_is_one_after_the_other(columns: int, pooling: Pooling) -> None:
    hidden = random(90, columns, dtype=torch.float16)
    sides = spans_of(1, 2, 4, 0, 70, 1, 6, 6, 0)
    hidden[[1, 6], 5] = torch.nan  # the second sequence's first token, the third's last
    hidden[77, 20] = torch.inf  # the sixth's only one, in a column that does not count
    dimensions = ints(columns, columns, columns - 3, columns, 13, 13, columns, 9, columns)
    normalize, encodings = ints(1, 0, 1, 1, 0, 1, 0, 1, 0), ints(0, 1, 0, 1, 2, 0, 1, 2, 2)

    finished = pool_and_finish(hidden, sides, pooling, dimensions, normalize, encodings)

    expected = finish(pool(hidden, sides, pooling), dimensions, normalize, encodings)
    assert_same(finished, expected, encodings)


@pytest.mark.parametrize(("pooling", "expected"), [("cls", [1, 0, 0b001]), ("last", [1, 0, 0b100])])
def test_only_the_token_that_is_taken_is_encoded(pooling: Pooling, expected: list[int]) -> None:
    hidden = torch.full((4, 3), torch.nan, device=DEVICE)
    hidden[0] = torch.tensor([1.0, -1.0, -1.0])
    hidden[3] = torch.tensor([-1.0, -1.0, 1.0])

    finished = pool_and_finish(hidden, spans(0, 4), pooling, ints(3), ints(1), ints(BINARY))

    assert finished[0, [0, 1, FLAG_BYTES]].tolist() == expected


@poolings
@pytest.mark.parametrize("columns", [pytest.param(n, marks=gpu) for n in (384, 1024, 2560)])
def test_pool_and_finish_of_many_bf16_tokens(columns: int, pooling: Pooling) -> None:
    numbers = torch.arange(600, dtype=torch.int32, device=DEVICE)
    sides = spans_of(*(number % 9 for number in range(600)))
    hidden = random(int(sides[1][-1]), columns, dtype=torch.bfloat16)
    arguments = 1 + numbers * 7 % columns, numbers // 3 % 2, numbers % 3

    finished = pool_and_finish(hidden, sides, pooling, *arguments)

    assert_same(finished, finish(pool(hidden, sides, pooling), *arguments), arguments[2])
