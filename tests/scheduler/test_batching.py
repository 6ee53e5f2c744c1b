"""BatchQueue: order, budget, splitting, return of lost work."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol import Request
from scheduler.batching import BatchQueue, Part, Pending, Shares


def make_pending(
    arrival: int,
    lengths: list[int],
    *,
    deadline_ns: int = 10**12,
    lane: str = "online",
    encoding: str = "float32",
    span_counts: list[int] | None = None,
) -> Pending:
    """A request; with `span_counts`, each sequence names its first token so many times."""
    request = Request(
        request_id=arrival,
        fingerprint="",
        deadline_ns=deadline_ns,
        lane=lane,
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
    assert [queue.tokens_before(lane) for lane in ("online", "score", "backfill")] == [1, 11, 111]
    assert (queue.num_tokens, queue.num_sequences) == (111, 3)


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
    assert queue.expired(99) == []
    assert queue.expired(100) == [late]
    late.settled = True
    assert queue.expired(150) == []
    assert queue.expired(200) == [timely]


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
