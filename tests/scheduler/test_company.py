"""A sequence's answer does not depend on what runs next to it: batches are formed and taken apart without a bit moved.

The model is a hash of the sequence alone, so whatever a batch mixes up, swaps or cuts wrongly shows in its rows. That a
real model's rows do not depend on the company is tested beside it (tests/worker).
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from common.lanes import LANES
from common.metrics import Metrics
from common.wire.messages import Batch, Failure, Reply, Request
from common.wire.rows import ENCODINGS
from tests.fakes import DIMENSIONS, oracle_row
from tests.scheduler.rig import Rig, make_request

NUM_BATCHES = 5000


def draw_request(rng: random.Random, request_id: int) -> tuple[Request, list[bytes]]:
    """A request of any kind, and the bytes of each of its rows."""
    sequences = [[rng.randrange(29_000) for _ in range(rng.choice((1, 2, 5, 30)))] for _ in range(rng.randint(1, 8))]
    encoding = rng.choice(list(ENCODINGS))
    type_starts = [rng.randint(0, len(ids)) for ids in sequences] if rng.random() < 0.2 else None
    spans = None
    if rng.random() < 0.3:
        starts = [[rng.randrange(len(ids)) for _ in range(rng.randint(1, 3))] for ids in sequences]
        spans = [
            [(start, rng.randint(start + 1, len(ids))) for start in of_one]
            for ids, of_one in zip(sequences, starts, strict=True)
        ]
    rows = [
        oracle_row(
            ids, encoding, DIMENSIONS, type_start=None if type_starts is None else type_starts[index], span=span
        ).tobytes()
        for index, ids in enumerate(sequences)
        for span in ([None] if spans is None else spans[index])
    ]
    lane = rng.choice(LANES)
    request = make_request(request_id, *sequences, lane=lane, encoding=encoding, type_starts=type_starts, spans=spans)
    return request, rows


@pytest.mark.thorough
@pytest.mark.slow
def test_every_row_of_5000_random_batches_is_what_it_would_be_alone(metrics: Metrics) -> None:
    rng = random.Random(1)
    rig = Rig(metrics)
    rig.join()
    rig.hello()
    request_ids = itertools.count()
    expected: dict[int, list[bytes]] = {}  # of requests that are not answered; a row that is there is empty
    num_batches = num_rows = 0
    held: list[Batch] = []
    while num_batches < NUM_BATCHES or held:
        while num_batches < NUM_BATCHES and len(expected) < 12:
            request_id = next(request_ids)
            request, rows = draw_request(rng, request_id)
            expected[request_id] = rows
            rig.gateway(request)
        held += rig.take(Batch)
        if held:
            rig.finish(held.pop(0))
            num_batches += 1
        else:
            rig.now_ns += 1_000_000  # the second slot is filled as late as it can be
            rig._perform(rig.core.on_tick(rig.now_ns))
        for reply in rig.take(Reply):
            rows = expected[reply.request_id]
            for offset, row in enumerate(reply.rows):
                own = rows[reply.first_row + offset]
                assert own != b"", "answered twice"
                assert row.tobytes()[: len(own)] == own
                rows[reply.first_row + offset] = b""
                num_rows += 1
            if not any(rows):
                del expected[reply.request_id]
    assert rig.take(Failure) == []
    assert num_rows > 3 * NUM_BATCHES  # in company, that is


@pytest.mark.parametrize("position", range(32))
def test_of_a_batch_of_32_requests_only_the_one_that_is_not_finite_fails(metrics: Metrics, position: int) -> None:
    rig = Rig(metrics)
    rig.join()
    rig.hello()
    rig.request(100, [50])
    rig.request(101, [50])
    held = rig.take(Batch)
    for request_id in range(32):
        rig.request(request_id, [7, request_id])
    for batch in held:
        rig.finish(batch)
    rig.take(Reply)
    (batch,) = rig.take(Batch)
    assert len(batch.lengths) == 32
    rig.finish(batch, nonfinite=(position,))
    failures = [(failure.request_id, failure.code, failure.sequence) for failure in rig.take(Failure)]
    assert failures == [(position, "nonfinite_output", 0)]
    replies = {reply.request_id: reply.rows for reply in rig.take(Reply)}
    assert set(replies) == set(range(32)) - {position}
    for request_id, rows in replies.items():
        np.testing.assert_array_equal(rows.view(np.float32), [oracle_row([7, request_id], "float32")])
