"""A step's first kernel and its last: what the host has written and what the device makes of it, and where rows go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tests.worker.kernels  # noqa: F401  # chooses the interpreter before Triton is imported
from tests.models import make_batch
from tests.worker.kernels import DEVICE
from worker.batch.capacity import (
    HEAD_WORDS,
    NEXT_SLOT,
    OUTPUT_ADDRESS,
    OUTPUT_WORDS,
    Capacity,
    HostArrays,
    worked_out,
)
from worker.kernels.step import fetch, publish

SLOTS = 3


def host_memory(*shape: int) -> torch.Tensor:
    """int32 that a kernel can read, full of what a step before has left."""
    return torch.full(shape, 77, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("slot", range(SLOTS))
@pytest.mark.parametrize(
    ("capacity", "lengths"),
    [
        (Capacity(64, 8), [20]),
        (Capacity(64, 8), [1] * 7),
        (Capacity(64, 8), [64]),
        (Capacity(320, 32, types=True), [9, 300, 2]),
        (Capacity(320, 32, spans=True), [1] * 29),
        (Capacity(129, 33), [1, 2, 3]),  # neither is a multiple of four
        (Capacity(256, 300, types=True, spans=True), [1] * 120 + [3]),  # more sequences than a program takes at a time
    ],
)
def test_the_block_holds_what_the_host_wrote_and_what_follows_from_it(
    slot: int, capacity: Capacity, lengths: list[int]
) -> None:
    batch = make_batch(
        [list(range(5, 5 + length)) for length in lengths],
        width=500,
        type_starts=[length // 2 for length in lengths] if capacity.types else None,
        spans=[[(0, length)] for length in lengths] if capacity.spans else None,
    )
    ring = host_memory(SLOTS, capacity.host_words + 3)
    words = ring[slot].numpy()
    HostArrays(capacity, words).fill(batch)
    block = torch.full((capacity.num_words + 9,), -1, dtype=torch.int32, device=DEVICE)

    fetch(ring, number(slot), block, capacity)

    expected = worked_out(words, capacity)
    views, wanted = (
        capacity.views(x, None, 64)  # type: ignore[arg-type]  # no attention here
        for x in (block.cpu(), torch.from_numpy(expected))
    )
    for name in ("token_ids", "positions", "token_starts", "token_stops", "cu_seqlens", "row_starts", "row_stops"):
        assert torch.equal(getattr(views, name), getattr(wanted, name)), name
    for name in ("dimensions", "normalize", "encodings"):
        assert torch.equal(getattr(views, name)[: len(lengths)], getattr(wanted, name)[: len(lengths)]), name
    assert not capacity.types or torch.equal(views.token_types, wanted.token_types)
    assert block[capacity.num_words :].tolist() == [-1] * 9


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
def test_each_replay_reads_what_the_host_has_written_last_and_soon() -> None:
    """Loads that cross the bus one by one would be right as well, and take 2.8 ms."""
    capacity = Capacity(16_384, 64)
    ring = host_memory(SLOTS, capacity.host_words)
    places = [HostArrays(capacity, ring[slot].numpy()) for slot in range(SLOTS)]
    block = torch.zeros(capacity.num_words, dtype=torch.int32, device=DEVICE)
    counter = number(0)
    fetch(ring, counter, block, capacity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch(ring, counter, block, capacity)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times_ms = []
    for turn in range(200):
        counter.fill_(turn % SLOTS)
        places[turn % SLOTS].fill(make_batch([[turn + 1] * 512] * 32, width=500))
        begin.record()
        graph.replay()
        end.record()
        token_ids = capacity.views(block, None, 64).token_ids  # type: ignore[arg-type]  # no attention here
        assert (token_ids == turn + 1).all(), turn
        times_ms.append(begin.elapsed_time(end))

    assert np.median(times_ms) < 0.5


def test_what_follows_from_the_offsets_is_each_tokens_place_and_sequence() -> None:
    capacity = Capacity(12, 5, types=True)
    words = np.full(capacity.host_words, 77, dtype=np.int32)
    HostArrays(capacity, words).fill(make_batch([[10, 11, 12], [20, 21]], type_starts=[1, 2]))

    batch = capacity.views(torch.from_numpy(worked_out(words, capacity)), None, 64)  # type: ignore[arg-type]  # no attention

    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21] + [0] * 7
    assert batch.positions.tolist() == [0, 1, 2, 0, 1] + [0] * 7
    assert batch.token_starts.tolist() == [0] * 3 + [3] * 2 + [5] * 7
    assert batch.token_stops.tolist() == [3] * 3 + [5] * 2 + [12] * 7
    assert batch.token_types is not None
    assert batch.token_types.tolist() == [0, 1, 1] + [0] * 9


@pytest.mark.parametrize(("num_rows", "width"), [(0, 8), (1, 8), (3, 4100), (5, 8)])
def test_the_rows_of_a_batch_are_copied_and_the_next_slot_is_due(num_rows: int, width: int) -> None:
    output = torch.randint(256, (5, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    kept = torch.zeros((5, width), dtype=torch.uint8, device=DEVICE)
    head = np.zeros(HEAD_WORDS, dtype=np.int32)
    head[NEXT_SLOT], head[OUTPUT_WORDS] = 2, num_rows * width // 4
    head[OUTPUT_ADDRESS : OUTPUT_ADDRESS + 2].view(np.int64)[0] = kept.data_ptr()
    counter = number(1)

    publish(output, torch.from_numpy(head).to(DEVICE), counter)

    assert torch.equal(kept[:num_rows], output[:num_rows])
    assert not kept[num_rows:].any()
    assert counter.item() == 2
