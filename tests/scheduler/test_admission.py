"""Admission: who is refused, with which error, and what is told about when to come back."""

from __future__ import annotations

import random

import pytest

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable
from common.wire.messages import Request
from scheduler.admission import RECOVERY_NS, Admission
from tests.scheduler.rig import make_request

SECOND = 1_000_000_000


def refusal(
    *,
    queued_tokens: int = 0,
    deadline_s: float = 60,
    us_per_token: int | None = 100,
    workers_ready: int = 1,
    without_workers_ns: int = 0,
) -> ServiceError | None:
    return ask(
        Admission(max_queue_ms=10_000),
        make_request(1, [1], deadline_ns=int(deadline_s * SECOND)),
        queued_tokens,
        wait_ms=None if us_per_token is None else queued_tokens * us_per_token / 1000,
        workers_ready=workers_ready,
        without_workers_ns=without_workers_ns,
    )


def ask(
    admission: Admission,
    request: Request,
    queued_tokens: int = 0,
    *,
    wait_ms: float | None = 0,
    least_wait_ms: float | None = None,
    workers_ready: int = 1,
    without_workers_ns: int = 0,
    now_ns: int = 0,
) -> ServiceError | None:
    return admission.admit(
        request,
        queued_tokens=queued_tokens,
        tokens_before=queued_tokens,
        wait_ms=wait_ms,
        least_wait_ms=lambda: wait_ms if least_wait_ms is None else least_wait_ms,
        workers_ready=workers_ready,
        without_workers_ns=without_workers_ns,
        now_ns=now_ns,
    )


def test_an_empty_queue_lets_everything_in() -> None:
    assert refusal() is None


def test_a_predicted_wait_above_the_limit_is_429_and_says_when_to_come_back() -> None:
    error = refusal(queued_tokens=120_000)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 12


def test_a_deadline_shorter_than_the_wait_is_504_at_once() -> None:
    assert isinstance(refusal(queued_tokens=50_000, deadline_s=4), DeadlineExceeded)
    assert refusal(queued_tokens=50_000, deadline_s=6) is None


def test_a_passed_deadline_is_504() -> None:
    assert isinstance(refusal(deadline_s=0), DeadlineExceeded)


def test_requests_are_held_while_a_worker_restarts_and_refused_when_none_comes_back() -> None:
    assert refusal(workers_ready=0, without_workers_ns=RECOVERY_NS - 1) is None
    assert isinstance(refusal(workers_ready=0, without_workers_ns=RECOVERY_NS), Unavailable)


def test_before_the_first_result_only_a_bounded_number_of_tokens_is_let_in() -> None:
    assert refusal(us_per_token=None, queued_tokens=20_000) is None
    assert isinstance(refusal(us_per_token=None, queued_tokens=20_001), Overloaded)


def test_whatever_its_predicted_time_no_more_waits_than_memory_is_there_for() -> None:
    request = make_request(1, [1])
    assert ask(Admission(max_queue_ms=10_000), request, 2**26 - 1) is None
    assert isinstance(ask(Admission(max_queue_ms=10_000), request, 2**26), Overloaded)


def test_who_is_refused_is_told_until_there_is_room_for_a_fiftieth_of_the_limit() -> None:
    admission = Admission(max_queue_ms=1000)
    ask(admission, make_request(1, [1], lane="score", tenant=7), wait_ms=1100, now_ns=SECOND)
    assert admission.full(SECOND).tolist() == [[1, 7, SECOND + 120_000_000, SECOND + 1_100_000_000]]
    assert admission.full(SECOND + 119_999_999).tolist() == [[1, 7, SECOND + 120_000_000, SECOND + 1_100_000_000]]
    assert admission.full(SECOND + 120_000_000).tolist() == []


def test_what_is_told_of_a_full_queue_is_good_for_a_second() -> None:
    admission = Admission(max_queue_ms=1000)
    ask(admission, make_request(1, [1]), wait_ms=9000, now_ns=SECOND)
    assert admission.full(SECOND).tolist() == [[0, 0, 2 * SECOND, 10 * SECOND]]


def test_a_long_request_that_is_refused_shuts_out_no_short_one() -> None:
    """More may run before it than before a short one of the same tenant."""
    admission = Admission(max_queue_ms=1000)
    assert ask(admission, make_request(1, [1] * 9), wait_ms=1100, least_wait_ms=900) is not None
    assert admission.full(0).shape == (0, 4)


def test_who_is_let_in_is_not_told_of() -> None:
    admission = Admission(max_queue_ms=1000)
    assert ask(admission, make_request(1, [1]), wait_ms=1000) is None
    assert admission.full(0).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"wait_ms": None}, False),
        ({"wait_ms": 10_001}, False),
        ({"deadline_ns": 5 * SECOND}, False),
        ({"deadline_ns": 0, "wait_ms": 0}, False),
        ({"workers_ready": 0}, False),
        ({"queued_tokens": 64 * 1024 * 1024}, False),
    ],
)
def test_it_is_open_where_nobody_could_be_refused(change: dict[str, int | None], expected: bool) -> None:
    most = {"queued_tokens": 100, "wait_ms": 10_000, "deadline_ns": 11 * SECOND, "workers_ready": 1, "now_ns": 0}
    assert Admission(max_queue_ms=10_000).is_open(**most | change) is expected  # type: ignore[arg-type]  # its own


def test_while_it_is_open_it_refuses_none_behind_which_no_more_waits() -> None:
    rng = random.Random(0)
    admission, num_open = Admission(max_queue_ms=10_000), 0
    for _ in range(2000):
        queued_tokens, wait_ms = (
            rng.choice((100, 2**25, 2**26)),
            rng.choice((None, 0.0, 10_000.0, rng.uniform(0, 20_000))),
        )
        deadline_ns, workers_ready = rng.randrange(20 * SECOND), rng.randrange(2)
        is_open = admission.is_open(
            queued_tokens=queued_tokens,
            wait_ms=wait_ms,
            deadline_ns=deadline_ns,
            workers_ready=workers_ready,
            now_ns=0,
        )
        num_open += is_open
        refused = ask(
            admission,
            make_request(1, [1], deadline_ns=deadline_ns + rng.choice((0, SECOND))),
            rng.randint(0, queued_tokens),
            wait_ms=None if wait_ms is None else rng.choice((wait_ms, wait_ms / 2)),
            workers_ready=workers_ready,
            without_workers_ns=rng.choice((0, RECOVERY_NS)),
        )
        assert not (is_open and refused)
    assert 100 < num_open < 1900
