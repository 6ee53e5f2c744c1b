"""BatchQueue: order, budget, splitting, return of lost work."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.lanes import LANES
from common.wire.messages import Request
from scheduler.batching import BatchQueue, Part, Pending, Shares


def make_pending(
    arrival: int,
    lengths: list[int],
    *,
    deadline_ns: int = 10**12,
    lane: str = "online",
    tenant: int = 0,
    encoding: str = "float32",
    span_counts: list[int] | None = None,
) -> Pending:
    """A request; with `span_counts`, each sequence names its first token so many times."""
    request = Request(
        request_id=arrival,
        fingerprint="",
        deadline_ns=deadline_ns,
        lane=lane,
        tenant=tenant,
        opens=True,
        dimensions=4,
        normalize=True,
        encoding=encoding,
        token_ids=np.arange(sum(lengths), dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        span_counts=np.array(span_counts or [], dtype=np.int32),
        spans=np.tile(np.array([0, 1], dtype=np.int32), (sum(span_counts or []), 1)),
    )
    return Pending(b"g", request, arrival, arrived_ns=0, unanswered=len(lengths))


def whole(pending: Pending, losses: int = 0) -> Part:
    return Part(pending, 0, len(pending.request.lengths), losses)


def shape(batch: list[Part]) -> list[tuple[int, int, int]]:
    return [(part.pending.arrival, part.start, part.stop) for part in batch]


def test_next_batch_takes_requests_in_order_of_arrival() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(2, [5])))
    queue.push(whole(make_pending(1, [5])))
    assert shape(queue.next_batch(100, 1000)) == [(1, 0, 1), (2, 0, 1)]


def test_next_batch_of_an_empty_queue_is_empty() -> None:
    assert BatchQueue().next_batch(100, 1000) == []


def test_a_request_longer_than_the_budget_is_split_between_batches() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [4, 4, 4, 4, 4])))
    assert shape(queue.next_batch(9, 1000)) == [(1, 0, 2)]
    assert shape(queue.next_batch(9, 1000)) == [(1, 2, 4)]
    assert shape(queue.next_batch(9, 1000)) == [(1, 4, 5)]
    assert (queue.num_tokens, queue.num_sequences, len(queue)) == (0, 0, 0)


def test_a_sequence_longer_than_the_budget_runs_alone() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [50, 1])))
    assert shape(queue.next_batch(10, 1000)) == [(1, 0, 1)]
    assert shape(queue.next_batch(10, 1000)) == [(1, 1, 2)]


def test_nothing_overtakes_a_sequence_that_does_not_fit() -> None:
    queue = BatchQueue()
    for arrival, length in ((1, 4), (2, 8), (3, 1)):
        queue.push(whole(make_pending(arrival, [length])))
    assert shape(queue.next_batch(10, 1000)) == [(1, 0, 1)]
    assert shape(queue.next_batch(10, 1000)) == [(2, 0, 1), (3, 0, 1)]


def test_a_batch_has_no_more_rows_than_a_result_holds() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [2])))
    queue.push(whole(make_pending(2, [2, 2, 2], span_counts=[2, 2, 3])))
    queue.push(whole(make_pending(3, [2, 2, 2])))
    assert shape(queue.next_batch(100, 5)) == [(1, 0, 1), (2, 0, 2)]
    assert shape(queue.next_batch(100, 5)) == [(2, 2, 3), (3, 0, 2)]
    assert shape(queue.next_batch(100, 5)) == [(3, 2, 3)]


def test_a_sequence_of_more_rows_than_a_result_holds_runs_alone() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [2, 2], span_counts=[9, 1])))
    assert shape(queue.next_batch(100, 5)) == [(1, 0, 1)]
    assert shape(queue.next_batch(100, 5)) == [(1, 1, 2)]


def test_sparse_sequences_run_among_themselves() -> None:
    queue = BatchQueue()
    for arrival, encoding in enumerate(["float32", "sparse", "sparse", "binary", "float32"]):
        queue.push(whole(make_pending(arrival, [2], encoding=encoding)))
    batches = [[part.pending.arrival for part in queue.next_batch(100, 100)] for _ in range(3)]
    assert batches == [[0], [1, 2], [3, 4]]


def test_a_part_knows_its_rows_and_whose_they_are() -> None:
    pending = make_pending(1, [2, 2, 2], span_counts=[2, 1, 3])
    assert [Part(pending, *ends).num_rows for ends in ((0, 1), (1, 3), (0, 3))] == [2, 4, 6]
    assert [pending.first_row(sequence) for sequence in range(4)] == [0, 2, 3, 6]
    assert [pending.sequence_of(row) for row in range(6)] == [0, 0, 1, 2, 2, 2]


def test_without_spans_a_row_is_a_sequence() -> None:
    pending = make_pending(1, [2, 2, 2])
    assert Part(pending, 1, 3).num_rows == 2
    assert (pending.first_row(2), pending.sequence_of(2)) == (2, 2)


def test_returned_work_takes_its_old_place() -> None:
    queue = BatchQueue()
    first = make_pending(1, [3, 3])
    queue.push(whole(first))
    taken = queue.next_batch(3, 1000)
    queue.push(whole(make_pending(2, [3])))
    queue.push(taken[0])
    assert shape(queue.next_batch(9, 1000)) == [(1, 0, 1), (1, 1, 2), (2, 0, 1)]


def test_backfill_comes_after_whatever_else_waits() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [5], lane="backfill")))
    queue.push(whole(make_pending(2, [5])))
    assert shape(queue.next_batch(5, 1000)) == [(2, 0, 1)]
    assert shape(queue.next_batch(5, 1000)) == [(1, 0, 1)]


def test_what_is_left_of_a_budget_goes_to_the_lanes_below() -> None:
    queue = BatchQueue()
    for arrival, lane in enumerate(["backfill", "score", "online"]):
        queue.push(whole(make_pending(arrival, [5, 5], lane=lane)))
    assert shape(queue.next_batch(25, 1000)) == [(2, 0, 2), (1, 0, 2), (0, 0, 1)]
    assert queue.waiting_lanes() == ["backfill"]


def test_a_lane_below_may_have_less_of_a_batch() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [4] * 10, lane="backfill")))
    queue.push(whole(make_pending(2, [4])))
    limits = {"online": 40, "score": 40, "backfill": 12}
    assert shape(queue.next_batch(limits, 1000)) == [(2, 0, 1), (1, 0, 2)]
    assert shape(queue.next_batch(limits, 1000)) == [(1, 2, 5)]


def test_a_lane_that_is_due_goes_first_and_the_others_fill_the_rest() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [4] * 10, lane="backfill")))
    queue.push(whole(make_pending(2, [4] * 10)))
    limits = {"online": 20, "score": 20, "backfill": 8}
    assert shape(queue.next_batch(limits, 1000, first="backfill")) == [(1, 0, 2), (2, 0, 3)]


def test_tokens_before_a_lane_are_those_of_it_and_of_the_lanes_above() -> None:
    queue = BatchQueue()
    for arrival, (lane, length) in enumerate([("online", 1), ("score", 10), ("backfill", 100)]):
        queue.push(whole(make_pending(arrival, [length], lane=lane)))
    assert [queue.tokens_before(lane, 0, 1) for lane in ("online", "score", "backfill")] == [1, 11, 111]
    assert (queue.num_tokens, queue.num_sequences) == (111, 3)


def test_tenants_of_a_lane_have_a_batch_in_equal_parts() -> None:
    queue = BatchQueue()
    for arrival in range(10):
        queue.push(whole(make_pending(arrival, [2, 2], tenant=1)))
    queue.push(whole(make_pending(10, [2, 2, 2, 2], tenant=2)))
    assert shape(queue.next_batch(12, 1000)) == [(0, 0, 2), (10, 0, 3), (1, 0, 1)]
    assert shape(queue.next_batch(12, 1000)) == [(1, 1, 2), (10, 3, 4), (2, 0, 2), (3, 0, 2)]


def test_a_tenant_that_took_more_than_its_turn_waits_the_longer() -> None:
    queue = BatchQueue()
    for arrival in range(4):
        queue.push(whole(make_pending(arrival, [9], tenant=1)))
    for arrival in range(4, 12):
        queue.push(whole(make_pending(arrival, [3], tenant=2)))
    assert [[part.pending.arrival for part in queue.next_batch(9, 1000)] for _ in range(4)] == [
        [0],
        [4, 5, 6],
        [1],
        [7, 8, 9],
    ]


def test_who_comes_back_has_saved_nothing_up() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(0, [4], tenant=2)))
    for arrival in range(1, 40):
        queue.push(whole(make_pending(arrival, [4], tenant=1)))
    for _ in range(8):
        queue.next_batch(8, 1000)  # tenant 2 has nothing waiting any more, and all the turns are tenant 1's
    for arrival in range(40, 48):
        queue.push(whole(make_pending(arrival, [4], tenant=2)))
    assert [[part.pending.request.tenant for part in queue.next_batch(8, 1000)] for _ in range(3)] == [[2, 1]] * 3


def test_returned_work_takes_its_old_place_among_its_own_tenants() -> None:
    queue = BatchQueue()
    for arrival in range(4):
        queue.push(whole(make_pending(arrival, [4], tenant=arrival % 2)))
    first = queue.next_batch(8, 1000)
    assert shape(first) == [(0, 0, 1), (1, 0, 1)]
    for part in first:
        queue.push(part)
    assert [[part.pending.arrival for part in queue.next_batch(8, 1000)] for _ in range(2)] == [[0, 1], [2, 3]]


def test_before_a_tenants_work_comes_of_each_other_one_at_most_as_much() -> None:
    queue = BatchQueue()
    for arrival, (tenant, length) in enumerate([(1, 1000), (2, 30), (3, 5)]):
        queue.push(whole(make_pending(arrival, [length], tenant=tenant)))
    assert queue.tokens_before("online", 1, 10) == 1000 + 30 + 5
    assert queue.tokens_before("online", 2, 10) == 30 + 40 + 5
    assert queue.tokens_before("online", 4, 10) == 10 + 10 + 5
    assert queue.tokens_in("online") == 1035


def test_a_tenant_whose_work_is_all_settled_takes_no_turn() -> None:
    queue = BatchQueue()
    gone = make_pending(0, [4], tenant=1)
    queue.push(whole(gone))
    queue.push(whole(make_pending(1, [4], tenant=2)))
    gone.settled = True
    queue.prune()
    assert shape(queue.next_batch(4, 1000)) == [(1, 0, 1)]
    assert (queue.num_tokens, len(queue), queue.waiting_lanes()) == (0, 0, [])


def test_a_share_that_nobody_wanted_is_not_saved_up() -> None:
    shares = Shares()
    online = [whole(make_pending(1, [10]))]
    costs_ms = {"score": 5.0, "backfill": 5.0}
    for _ in range(100):
        shares.note(online, 1.0, ["online"], costs_ms)
    assert shares.first(costs_ms) == "online"
    for _ in range(49):
        shares.note(online, 1.0, ["online", "backfill"], costs_ms)
    assert shares.first(costs_ms) == "online"
    for _ in range(2):
        shares.note(online, 1.0, ["online", "backfill"], costs_ms)
    assert shares.first(costs_ms) == "backfill"
    shares.note([whole(make_pending(2, [10], lane="backfill"))], 5.0, ["online", "backfill"], costs_ms)
    assert shares.first(costs_ms) == "online"


def test_a_lane_is_owed_no_more_than_two_of_its_steps() -> None:
    shares = Shares()
    costs_ms = {"score": 5.0, "backfill": 5.0}
    shares.note([whole(make_pending(1, [10]))], 10_000.0, ["online", "backfill"], costs_ms)
    backfill = [whole(make_pending(2, [10], lane="backfill"))]
    for _ in range(2):
        assert shares.first(costs_ms) == "backfill"
        shares.note(backfill, 5.0, ["online", "backfill"], costs_ms)
    assert shares.first(costs_ms) == "online"


def test_settled_requests_are_not_run_and_not_counted_after_pruning() -> None:
    queue = BatchQueue()
    gone, stays = make_pending(1, [3]), make_pending(2, [5])
    queue.push(whole(gone))
    queue.push(whole(stays))
    gone.settled = True
    queue.prune()
    assert (queue.num_tokens, queue.num_sequences) == (5, 1)
    assert shape(queue.next_batch(100, 1000)) == [(2, 0, 1)]


def test_suspects_of_one_loss_run_eight_at_once_and_among_themselves() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [1] * 10), losses=1))
    queue.push(whole(make_pending(2, [1])))
    assert shape(queue.next_batch(100, 1000)) == [(1, 0, 8)]
    assert shape(queue.next_batch(100, 1000)) == [(1, 8, 10)]
    assert shape(queue.next_batch(100, 1000)) == [(2, 0, 1)]


def test_suspects_of_two_losses_run_alone() -> None:
    queue = BatchQueue()
    queue.push(whole(make_pending(1, [1, 1]), losses=2))
    assert shape(queue.next_batch(100, 1000)) == [(1, 0, 1)]
    assert shape(queue.next_batch(100, 1000)) == [(1, 1, 2)]


def test_expired_names_each_waiting_request_whose_deadline_has_passed() -> None:
    queue = BatchQueue()
    late, timely = make_pending(1, [1, 1], deadline_ns=100), make_pending(2, [1], deadline_ns=200)
    queue.push(whole(late))
    queue.push(whole(timely))
    assert queue.take_expired(99) == []
    assert queue.take_expired(100) == [late]
    late.settled = True
    assert queue.take_expired(150) == []
    assert queue.take_expired(200) == [timely]


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12), min_size=1, max_size=12
    ),
    with_spans=st.lists(st.booleans(), min_size=12, max_size=12),
    losses=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    max_tokens=st.integers(1, 60),
    max_rows=st.integers(1, 20),
)
def test_every_sequence_leaves_exactly_once_in_order_and_within_the_budget(
    requests: list[list[tuple[int, int]]], with_spans: list[bool], losses: list[int], max_tokens: int, max_rows: int
) -> None:
    queue = BatchQueue()
    for arrival, sequences in enumerate(requests):
        lengths, span_counts = map(list, zip(*sequences, strict=True))
        pending = make_pending(arrival, lengths, span_counts=span_counts if with_spans[arrival] else None)
        queue.push(whole(pending, losses[arrival]))
    left: list[tuple[int, int]] = []
    while len(queue):
        batch = queue.next_batch(max_tokens, max_rows)
        assert batch, "an eligible worker gets work while something waits"
        alone = len(batch) == 1 and batch[0].num_sequences == 1
        assert alone or sum(part.num_tokens for part in batch) <= max_tokens
        assert alone or sum(part.num_rows for part in batch) <= max_rows
        assert len({part.losses for part in batch}) == 1
        left += [(part.pending.arrival, index) for part in batch for index in range(part.start, part.stop)]
    assert left == [(arrival, index) for arrival, lengths in enumerate(requests) for index in range(len(lengths))]
    assert (queue.num_tokens, queue.num_sequences) == (0, 0)


_QUEUED = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),  # lengths
    st.sampled_from(LANES),
    st.integers(0, 2),  # tenant
    st.integers(0, 2),  # losses
    st.booleans(),  # sparse
    st.booleans(),  # settled
)


@pytest.mark.thorough
@settings(max_examples=50_000 if os.environ.get("FAULTS") == "soak" else 2_000, deadline=None)
@given(
    queued=st.lists(_QUEUED, max_size=10),
    budgets=st.fixed_dictionaries({lane: st.integers(1, 60) for lane in LANES}),
    first=st.sampled_from(LANES),
    max_rows=st.integers(1, 20),
)
def test_whatever_waits_the_next_batch_has_some_of_it_and_of_each_tenant_its_oldest(
    queued: list[tuple[list[int], str, int, int, bool, bool]], budgets: dict[str, int], first: str, max_rows: int
) -> None:
    queue = BatchQueue()
    waiting: dict[tuple[str, int], list[tuple[int, int]]] = {}  # by lane and tenant: arrivals and sequences, in order
    for arrival, (lengths, lane, tenant, losses, sparse, settled) in enumerate(queued):
        pending = make_pending(arrival, lengths, lane=lane, tenant=tenant, encoding="sparse" if sparse else "float32")
        pending.settled = settled
        queue.push(whole(pending, losses))
        if not settled:
            line = waiting.setdefault((lane, tenant), [])
            line += [(arrival, index) for index in range(len(lengths))]
    while any(waiting.values()):
        batch = queue.next_batch(budgets, max_rows, first)
        assert batch
        for part in batch:
            line = waiting[part.pending.request.lane, part.pending.request.tenant]
            for index in range(part.start, part.stop):
                assert line.pop(0) == (part.pending.arrival, index)
    assert queue.next_batch(budgets, max_rows, first) == []
    assert (queue.num_tokens, queue.num_sequences, len(queue)) == (0, 0, 0)


def test_the_mean_length_is_of_what_waits_in_the_lanes_that_are_asked_for() -> None:
    queue = BatchQueue()
    assert queue.mean_length(["score", "backfill"]) == 0
    gone = make_pending(4, [50, 50], lane="backfill", tenant=2)
    for pending in (
        make_pending(1, [100]),
        make_pending(2, [4, 6], lane="score"),
        make_pending(3, [20, 30], lane="backfill"),
        gone,
    ):
        queue.push(whole(pending))
    gone.settled = True
    queue.prune()
    assert queue.mean_length(["backfill"]) == 25
    assert queue.mean_length(["score", "backfill"]) == 15
    queue.next_batch({"online": 100, "score": 104, "backfill": 104}, 1000)
    assert queue.mean_length(["score", "backfill"]) == 56 / 3
