"""How a batch is laid out on the device, and what of it is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.models import make_batch
from worker.ragged import BadBatch, LengthGroup, Limits, RaggedBatch

LIMITS = Limits(vocab_size=100, max_tokens=8, dimensions=32)
CPU = torch.device("cpu")


def test_sequences_are_put_in_order_of_length_and_equal_lengths_keep_their_order() -> None:
    batch = make_batch([[10, 11, 12], [20], [30, 31, 32], [40]], dimensions=[1, 2, 3, 4], normalize=[1, 0, 0, 1])

    ragged = RaggedBatch.load(batch, LIMITS, CPU)

    assert ragged.token_ids.tolist() == [20, 40, 10, 11, 12, 30, 31, 32]
    assert ragged.positions.tolist() == [0, 0, 0, 1, 2, 0, 1, 2]
    assert ragged.cu_seqlens.tolist() == [0, 1, 2, 5, 8]
    assert ragged.dimensions.tolist() == [2, 4, 1, 3]
    assert ragged.normalize.tolist() == [0, 1, 1, 0]
    assert ragged.groups == (LengthGroup(0, 2, 1), LengthGroup(2, 2, 3))
    assert ragged.max_seqlen == 3
    assert ragged.num_sequences == 4


def test_restore_puts_rows_back_into_the_order_of_the_batch() -> None:
    batch = make_batch([[5] * 4, [6], [7, 7], [8]])

    ragged = RaggedBatch.load(batch, LIMITS, CPU)

    first_tokens = ragged.token_ids[ragged.cu_seqlens[:-1]]
    assert first_tokens[ragged.restore].tolist() == [5, 6, 7, 8]


def test_groups_cover_all_tokens_without_overlap() -> None:
    batch = make_batch([[1] * length for length in (8, 1, 3, 3, 8, 2, 1, 8)])

    groups = RaggedBatch.load(batch, LIMITS, CPU).groups

    assert [group.start for group in groups] == [0, *(group.stop for group in groups[:-1])]
    assert groups[-1].stop == len(batch.token_ids)


def test_one_sequence_of_one_token_is_a_batch() -> None:
    ragged = RaggedBatch.load(make_batch([[99]]), LIMITS, CPU)

    assert ragged.token_ids.tolist() == [99]
    assert ragged.groups == (LengthGroup(0, 1, 1),)


def test_arrays_that_cannot_be_written_are_taken() -> None:
    batch = make_batch([[1, 2], [3]])
    frozen = dataclasses.replace(batch, token_ids=np.frombuffer(batch.token_ids.tobytes(), dtype=np.int32))

    assert RaggedBatch.load(frozen, LIMITS, CPU).token_ids.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("sequences", "dimensions", "normalize", "message"),
    [
        ([[1], [100]], [32, 32], [0, 0], "token id 100, but the model has 100 tokens"),
        ([[1] * 9], [32], [0], "a sequence of 9 tokens, but the model takes 8"),
        ([[1], [1]], [32, 33], [0, 0], "1 to 32"),
        ([[1], [1]], [0, 32], [0, 0], "1 to 32"),
        ([[1], [1]], [32, 32], [0, 2], "neither 0 nor 1"),
    ],
)
def test_what_the_model_does_not_have_is_refused(
    sequences: list[list[int]], dimensions: list[int], normalize: list[int], message: str
) -> None:
    batch = make_batch(sequences, dimensions=dimensions, normalize=normalize)

    with pytest.raises(BadBatch, match=message):
        RaggedBatch.load(batch, LIMITS, CPU)
