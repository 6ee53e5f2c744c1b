"""How a batch is laid out, and what of it is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.models import make_batch
from worker.attention.sdpa import SdpaAttention
from worker.batch.capacity import SEQUENCE_COUNTS, TOKEN_COUNTS, Capacity, HostArrays, worked_out
from worker.batch.ragged import BadBatch, LengthGroup, Limits, RaggedBatch, check, load_sorted

LIMITS = Limits(vocab_size=100, max_tokens=8, dimensions=32, encodings=frozenset({0, 1}))
SDPA = SdpaAttention()


def on_device(words: npt.NDArray[np.int32], capacity: Capacity) -> RaggedBatch:
    return capacity.views(torch.from_numpy(worked_out(words, capacity)), SDPA, 128)


def test_sequences_are_put_in_order_of_length_and_equal_lengths_keep_their_order() -> None:
    batch = make_batch(
        [[10, 11, 12], [20], [30, 31, 32], [40]],
        dimensions=[1, 2, 3, 4],
        normalize=[1, 0, 0, 1],
        encodings=[0, 1, 0, 0],
    )

    ragged, _ = load_sorted(batch, SDPA)

    assert ragged.token_ids.tolist() == [20, 40, 10, 11, 12, 30, 31, 32]
    assert ragged.positions.tolist() == [0, 0, 0, 1, 2, 0, 1, 2]
    assert ragged.token_starts.tolist() == [0, 1, 2, 2, 2, 5, 5, 5]
    assert ragged.token_stops.tolist() == [1, 2, 5, 5, 5, 8, 8, 8]
    assert ragged.cu_seqlens.tolist() == [0, 1, 2, 5, 8]
    assert ragged.dimensions.tolist() == [2, 4, 1, 3]
    assert ragged.normalize.tolist() == [0, 1, 1, 0]
    assert ragged.encodings.tolist() == [1, 0, 0, 0]
    assert ragged.groups == (LengthGroup(0, 2, 1), LengthGroup(2, 2, 3))
    assert ragged.max_seqlen == 3


def test_restore_puts_rows_back_into_the_order_of_the_batch() -> None:
    batch = make_batch([[5] * 4, [6], [7, 7], [8]])

    ragged, restore = load_sorted(batch, SDPA)

    first_tokens = ragged.token_ids[ragged.cu_seqlens[:-1]]
    assert first_tokens[restore].tolist() == [5, 6, 7, 8]


def test_groups_cover_all_tokens_without_overlap() -> None:
    batch = make_batch([[1] * length for length in (8, 1, 3, 3, 8, 2, 1, 8)])

    ragged, _ = load_sorted(batch, SDPA)

    assert [group.start for group in ragged.groups] == [0, *(group.stop for group in ragged.groups[:-1])]
    assert ragged.groups[-1].stop == len(batch.token_ids)


def test_one_sequence_of_one_token_is_a_batch() -> None:
    ragged, restore = load_sorted(make_batch([[99]]), SDPA)

    assert ragged.token_ids.tolist() == [99]
    assert ragged.groups == (LengthGroup(0, 1, 1),)
    assert restore.tolist() == [0]


def test_rows_of_spans_follow_their_sequences_and_come_back_in_order() -> None:
    spans = [[(0, 1), (1, 3)], [(0, 1)], [(1, 2), (2, 3), (3, 4)]]
    batch = make_batch([[1, 2, 3], [4], [5, 6, 7, 8]], dimensions=[3, 1, 4], spans=spans)

    ragged, restore = load_sorted(batch, SDPA)

    assert ragged.row_starts[restore].tolist() == [1, 2, 0, 5, 6, 7]
    assert ragged.row_stops[restore].tolist() == [2, 4, 1, 6, 7, 8]
    assert ragged.dimensions[restore].tolist() == [3, 3, 1, 4, 4, 4]
    assert ragged.row_starts.tolist() == sorted(ragged.row_starts.tolist())


@pytest.mark.parametrize("spans", [[[(1, 2), (0, 1)], [(0, 1)]], [[(0, 2), (1, 3)], [(0, 1)]]])
def test_spans_that_are_out_of_order_or_overlap_are_refused(spans: list[list[tuple[int, int]]]) -> None:
    batch = make_batch([[1, 2, 3], [4]], spans=spans)

    with pytest.raises(BadBatch, match="spans"):
        check(batch, LIMITS)


def test_tokens_of_a_second_type_are_refused_of_a_model_that_has_one() -> None:
    with pytest.raises(BadBatch, match="second type"):
        check(make_batch([[1, 2, 3]], type_starts=[2]), LIMITS)


def test_tokens_from_the_start_of_the_second_type_on_are_of_it() -> None:
    batch = make_batch([[1, 2, 3], [4, 5]], type_starts=[1, 2])

    ragged, _ = load_sorted(batch, SDPA, types=True)

    assert ragged.token_types is not None
    assert ragged.token_types.tolist() == [0, 0, 0, 1, 1]  # the shorter sequence first


def test_a_capacity_holds_the_spans_and_types_of_a_batch_and_nothing_of_the_one_before() -> None:
    capacity = Capacity(tokens=12, sequences=6, types=True, spans=True)
    buffer = np.full(capacity.host_words, 77, dtype=np.int32)
    arrays = HostArrays(capacity, buffer)
    spans = [[(0, 1), (1, 3)], [(0, 2), (2, 3), (3, 4)]]
    arrays.fill(make_batch([[1, 2, 3], [5, 6, 7, 8]], dimensions=[3, 4], type_starts=[2, 4], spans=spans))
    first = on_device(buffer, capacity)

    arrays.fill(make_batch([[1, 2], [5]], dimensions=[7, 8], spans=[[(0, 2)], [(0, 1)]]))

    second = on_device(buffer, capacity)
    assert first.token_types is not None
    assert second.token_types is not None
    assert first.row_starts.tolist() == [0, 1, 3, 5, 6, 12]
    assert first.row_stops.tolist() == [1, 3, 5, 6, 7, 12]
    assert first.dimensions[:5].tolist() == [3, 3, 4, 4, 4]
    assert first.token_types.tolist() == [0, 0, 1] + [0] * 9
    assert second.row_starts.tolist() == [0, 2, 12, 12, 12, 12]
    assert second.row_stops.tolist() == [2, 3, 12, 12, 12, 12]
    assert second.dimensions[:2].tolist() == [7, 8]
    assert not second.token_types.any()


def test_arrays_that_cannot_be_written_are_taken() -> None:
    batch = make_batch([[1, 2], [3]])
    frozen = dataclasses.replace(batch, token_ids=np.frombuffer(batch.token_ids.tobytes(), dtype=np.int32))

    ragged, _ = load_sorted(frozen, SDPA)

    assert ragged.token_ids.tolist() == [3, 1, 2]


def test_a_capacity_is_filled_with_the_batch_in_its_order_and_dummy_sequences_behind_it() -> None:
    capacity = Capacity(tokens=8, sequences=5)
    buffer = np.full(capacity.host_words, 77, dtype=np.int32)
    batch = make_batch([[10, 11, 12], [20]], dimensions=[3, 4], normalize=[0, 1], encodings=[1, 0])

    offsets = HostArrays(capacity, buffer).fill(batch)
    ragged = on_device(buffer, capacity)

    assert offsets.tolist() == [0, 3, 4, 8, 8, 8]
    assert ragged.cu_seqlens.tolist() == [0, 3, 4, 8, 8, 8]
    assert ragged.token_ids.tolist() == [10, 11, 12, 20, 0, 0, 0, 0]
    assert ragged.positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert ragged.token_starts.tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    assert ragged.token_stops.tolist() == [3, 3, 3, 4, 8, 8, 8, 8]
    assert ragged.dimensions[:2].tolist() == [3, 4]
    assert ragged.normalize[:2].tolist() == [0, 1]
    assert ragged.encodings[:2].tolist() == [1, 0]


def test_what_a_batch_leaves_behind_is_gone_in_the_next_one() -> None:
    capacity = Capacity(tokens=8, sequences=5)
    fresh, used = (np.full(capacity.host_words, 77, dtype=np.int32) for _ in range(2))
    arrays = HostArrays(capacity, used)
    arrays.fill(make_batch([[9] * 2] * 4, dimensions=[5] * 4, normalize=[1] * 4, encodings=[2] * 4))

    arrays.fill(make_batch([[10, 11, 12]]))
    HostArrays(capacity, fresh).fill(make_batch([[10, 11, 12]]))

    ragged = on_device(used, capacity)
    expected = on_device(fresh, capacity)
    for name in ("token_ids", "positions", "token_starts", "token_stops", "cu_seqlens"):
        assert getattr(ragged, name).tolist() == getattr(expected, name).tolist()
    wanted = (ragged.dimensions[0], ragged.normalize[0], ragged.encodings[0])
    assert [int(number) for number in wanted] == [32, 0, 0]


def test_capacities_may_take_turns_in_one_buffer() -> None:
    large, small = Capacity(tokens=16, sequences=5), Capacity(tokens=8, sequences=3)
    buffer = np.zeros(large.host_words, dtype=np.int32)
    arrays = {capacity: HostArrays(capacity, buffer) for capacity in (large, small)}
    batch = make_batch([[10, 11, 12], [20]])

    for capacity in (small, large, small, large):
        arrays[capacity].fill(batch)

        ragged = on_device(buffer, capacity)
        assert ragged.cu_seqlens[:3].tolist() == [0, 3, 4]
        assert ragged.token_ids[:5].tolist() == [10, 11, 12, 20, 0]


def test_a_capacity_without_a_batch_is_filled_with_dummies_alone() -> None:
    capacity = Capacity(tokens=200, sequences=4)
    buffer = np.full(capacity.host_words, 77, dtype=np.int32)

    offsets = HostArrays(capacity, buffer).fill(None)

    assert offsets.tolist() == [0, 128, 200, 200, 200]
    assert not on_device(buffer, capacity).token_ids.any()


@pytest.mark.parametrize("tokens", TOKEN_COUNTS)
def test_every_capacity_can_be_filled_with_dummies_alone(tokens: int) -> None:
    for sequences in SEQUENCE_COUNTS:
        capacity = Capacity(tokens, sequences)

        offsets = HostArrays(capacity, np.zeros(capacity.host_words, dtype=np.int32)).fill(None)

        assert offsets[-1] == tokens
        assert np.diff(offsets).max() <= max(128, -(-tokens // sequences))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(256, [0]), (193, [63]), (128, [128]), (127, [128, 1]), (1, [128, 127])]
)
def test_dummy_sequences_are_short(num_tokens: int, expected: list[int]) -> None:
    capacity = Capacity(tokens=256, sequences=4)

    offsets = HostArrays(capacity, np.zeros(capacity.host_words, dtype=np.int32)).fill(make_batch([[1] * num_tokens]))

    assert np.diff(offsets).tolist() == [num_tokens, *expected] + [0] * (3 - len(expected))


@pytest.mark.parametrize(
    ("sequences", "dimensions", "normalize", "encodings", "message"),
    [
        ([[1], [100]], [32, 32], [0, 0], [0, 0], "token id 100, but the model has 100 tokens"),
        ([[1] * 9], [32], [0], [0], "a sequence of 9 tokens, but the model takes 8"),
        ([[1], [1]], [32, 33], [0, 0], [0, 0], "1 to 32"),
        ([[1], [1]], [0, 32], [0, 0], [0, 0], "1 to 32"),
        ([[1], [1]], [32, 32], [0, 2], [0, 0], "neither 0 nor 1"),
        ([[1], [1]], [32, 32], [0, 0], [0, 2], r"encodings \[0, 2\]; the model has \[0, 1\]"),
    ],
)
def test_what_the_model_does_not_have_is_refused(
    sequences: list[list[int]], dimensions: list[int], normalize: list[int], encodings: list[int], message: str
) -> None:
    batch = make_batch(sequences, dimensions=dimensions, normalize=normalize, encodings=encodings)

    with pytest.raises(BadBatch, match=message):
        check(batch, LIMITS)
