"""Which capacity a batch runs at."""

from __future__ import annotations

import pytest

from worker.batch.capacity import SEQUENCE_COUNTS, TOKEN_COUNTS, Capacity, choose_capacity, largest_capacity


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "capacity", "use_graph"),
    [
        (1, 1, Capacity(64, 8), True),
        (64, 8, Capacity(64, 8), True),
        (63, 8, Capacity(64, 32), True),  # a dummy is the ninth
        (65, 1, Capacity(128, 8), True),
        (512, 25, Capacity(512, 32), True),
        (513, 25, Capacity(640, 32), True),
        (1025, 1, Capacity(1280, 8), True),  # 255 tokens over: two dummies
        (4096, 512, Capacity(4096, 512), True),
        (4097, 1, Capacity(4608, 8), True),
        (9000, 100, Capacity(9216, 128), True),
        (16384, 32, Capacity(16384, 32), True),
        (16385, 1, Capacity(16448, 2), False),
        (4000, 3000, Capacity(4096, 3001), False),  # more sequences than any graph
    ],
)
def test_a_batch_runs_at_the_smallest_capacity_that_takes_it_and_its_dummies(
    num_tokens: int, num_sequences: int, capacity: Capacity, use_graph: bool
) -> None:
    assert choose_capacity(num_tokens, num_sequences) == (capacity, use_graph)


def test_the_ladder_is_that_of_the_design() -> None:
    assert TOKEN_COUNTS[:9] == (64, 128, 192, 256, 320, 384, 448, 512, 640)
    assert TOKEN_COUNTS[-1] == 16384
    assert len(TOKEN_COUNTS) == 40


@pytest.mark.parametrize("max_tokens", [40, 4096, 4097, 16384, 32768])
def test_the_largest_capacity_has_room_for_every_other(max_tokens: int) -> None:
    room = largest_capacity(max_tokens)

    for num_tokens in (1, 63, 65, 511, 1025, max_tokens):
        for num_sequences in (1, min(num_tokens, 500), num_tokens):
            sequences = min(num_sequences, max_tokens)
            capacity, _ = choose_capacity(min(num_tokens, max_tokens), sequences, sequences, types=True)
            assert capacity.num_words <= room.num_words
            assert capacity.host_words <= room.host_words


def test_sequence_counts_grow_in_steps_of_four() -> None:
    assert SEQUENCE_COUNTS == (8, 32, 128, 512, 2048)
