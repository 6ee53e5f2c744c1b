"""Admission: who is refused, with which error, and what is told about when to come back."""

from __future__ import annotations

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable
from scheduler.admission import RECOVERY_NS, Admission

SECOND = 1_000_000_000


def refusal(
    *,
    queued_tokens: int = 0,
    deadline_s: float = 60,
    us_per_token: int | None = 100,
    workers_ready: int = 1,
    without_workers_ns: int = 0,
) -> ServiceError | None:
    return Admission(max_queue_ms=10_000).refusal(
        queued_tokens=queued_tokens,
        wait_ms=None if us_per_token is None else queued_tokens * us_per_token / 1000,
        deadline_ns=int(deadline_s * SECOND),
        workers_ready=workers_ready,
        without_workers_ns=without_workers_ns,
        now_ns=0,
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
