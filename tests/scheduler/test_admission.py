"""Admission: who is refused, with which error, and what is told about when to come back."""

from __future__ import annotations

from common.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable
from scheduler.admission import RECOVERY_NS, Admission, ServiceRate

SECOND = 1_000_000_000


def refusal(
    *,
    queued_tokens: int = 0,
    deadline_s: float = 60,
    us_per_token: int | None = 100,
    workers_ready: int = 1,
    without_workers_ns: int = 0,
) -> ServiceError | None:
    rate = ServiceRate()
    if us_per_token is not None:
        rate.observe(1000, 1000 * us_per_token, 1000)
    return Admission(max_queue_ms=10_000).refusal(
        queued_tokens=queued_tokens,
        deadline_ns=int(deadline_s * SECOND),
        rate=rate,
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


def test_more_workers_allow_a_longer_queue() -> None:
    assert refusal(queued_tokens=120_000, workers_ready=2) is None


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


def test_the_rate_follows_the_results_of_full_batches() -> None:
    rate = ServiceRate()
    assert rate.predict_ms(1000) is None
    rate.observe(1000, 100_000, 1000)
    assert rate.predict_ms(1000) == 100
    for _ in range(60):
        rate.observe(1000, 200_000, 1000)
    predicted = rate.predict_ms(1000, num_workers=2)
    assert predicted is not None
    assert abs(predicted - 100) < 0.1


def test_short_batches_do_not_make_a_queue_look_longer_than_it_is() -> None:
    rate = ServiceRate()
    rate.observe(512, 58_500, 512)
    for _ in range(100):
        rate.observe(5, 6_800, 512)
    predicted = rate.predict_ms(5120)
    assert predicted is not None
    assert abs(predicted - 585) < 1
