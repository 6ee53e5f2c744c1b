"""Small steps cost the lanes below no more than they may, and take who comes online no longer than they must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.batching import Part, Pending
from scheduler.stepsize import Sizes, StepSizes
from scheduler.steptime import StepTime
from tests.scheduler.rig import make_request

MOST = 512


def learned(fixed_ms: float, token_ms: float) -> StepTime:
    step_time = StepTime()
    for num_tokens in range(16, MOST + 1, 16):
        for _ in range(5):
            step_time.observe(num_tokens, 100, int((fixed_ms + token_ms * num_tokens) * 1000))
    return step_time


def part_in(lane: str) -> Part:
    return Part(Pending(b"g", make_request(1, [1, 2], lane=lane), 1, 0, 1), 0, 1)


def seen(*, shared: float) -> StepSizes:
    """After many steps, such a part of which somebody who came online was in."""
    sizes = StepSizes()
    for number in range(400):
        is_shared = int((number + 1) * shared) > int(number * shared)
        sizes.note([part_in("online"), part_in("backfill")] if is_shared else [part_in("backfill")])
    return sizes


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "mean_length", "small"),
    [
        pytest.param(0, 0.17, 4, 85, id="a sixth, where a token costs the same in any step"),
        pytest.param(10, 0.17, 100, 341, id="where one sequence would do 0.7 and two 0.86 of the work, three of them"),
        pytest.param(10, 0.17, 4, 256, id="half, where a third would do 0.84"),
        pytest.param(200, 0.17, 100, 512, id="all, where most of a step is its start"),
        pytest.param(0, 0.005, 4, 341, id="no shorter than a batch takes to a worker and back"),
        pytest.param(0, 0.17, 1000, 85, id="a sixth, where any sequence is a step"),
    ],
)
def test_a_step_without_who_comes_online_is_as_small_as_is_worth_its_start(
    fixed_ms: float, token_ms: float, mean_length: float, small: int
) -> None:
    assert StepSizes().small(learned(fixed_ms, token_ms), MOST, mean_length, 0) == Sizes(small, small)


@pytest.mark.parametrize(
    ("shared", "small"),
    [
        pytest.param(0.05, 20, id="alone, where he comes now and then"),
        pytest.param(0.45, 171, id="beside one sequence, where he comes more often"),
        pytest.param(1.0, 341, id="beside two, where he always comes"),
    ],
)
def test_the_more_steps_somebody_who_came_online_is_in_the_more_runs_beside_him(shared: float, small: int) -> None:
    assert seen(shared=shared).small(learned(10, 0.1), MOST, 150, 20) == Sizes(341, small)


def test_lanes_below_keep_four_fifths_of_their_rate_however_often_he_comes() -> None:
    step_time = learned(10, 0.17)
    full_rate = 500 / (10 + 0.17 * 500)
    for shared in (0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        sizes = seen(shared=shared).small(step_time, MOST, 100, 20)
        tokens = (1 - shared) * (sizes.alone // 100 * 100) + shared * ((sizes.beside - 20) // 100 * 100)
        took_ms = 10 + 0.17 * (tokens + shared * 20)
        assert tokens / took_ms >= 0.79 * full_rate


def test_beside_him_there_is_room_for_one_sequence_where_each_is_longer_than_a_small_step() -> None:
    step_time = learned(30, 0.05)
    assert seen(shared=0.1).small(step_time, MOST, 300, 20) == Sizes(85, 20)
    assert seen(shared=0.6).small(step_time, MOST, 300, 20) == Sizes(85, 320)


def test_a_step_has_a_token_at_least_however_little_memory_there_is() -> None:
    for most in (1, 2, 3):
        assert StepSizes().small(learned(0, 10), most, 4, 1).alone >= 1


def test_nothing_is_a_small_step_while_nothing_is_known() -> None:
    assert StepSizes().small(StepTime(), MOST, 100, 0) == Sizes(MOST, MOST)
    assert StepSizes().small(StepTime(), MOST, 100, 20) == Sizes(MOST, MOST)


def after(num_steps: int, step_ms: Callable[[int], float], step_time: StepTime) -> int:
    """Small steps of documents, after so many that took what they take."""
    sizes = StepSizes()
    for _ in range(num_steps):
        size = sizes.small(step_time, 4096, 310, 0).alone
        step_time.observe(size // 310 * 310, 400, round(step_ms(size // 310 * 310) * 1000))
    return sizes.small(step_time, 4096, 310, 0).alone


def an_h200s_ms(num_tokens: int) -> float:
    """Between queries and full steps no line, but stairs: 2,048 tokens are the last that take so little."""
    return 1.95 if num_tokens <= 640 else 3.7 if num_tokens <= 2048 else 5.1 if num_tokens <= 2816 else 7.3


def test_a_small_step_is_found_by_trying_whatever_a_line_between_others_says() -> None:
    step_time = StepTime()
    for _ in range(5):
        step_time.observe(20, 20, 960)
        step_time.observe(620, 400, 1950)
        step_time.observe(3720, 400, 7300)
    assert 1860 / (step_time.predict_ms(1860, 400) or 0) < 0.9 * 3720 / 7.3  # the line from 620 to 3,720
    assert after(20, an_h200s_ms, step_time) == 2048


def test_documents_have_small_steps_of_their_own_where_queries_alone_have_run_in_small_ones() -> None:
    step_time = StepTime()
    for _ in range(5):
        step_time.observe(20, 20, 960)
        step_time.observe(3584, 20, 21_000)  # 179 queries, and something was amiss
        step_time.observe(3720, 400, 7300)
    assert after(20, an_h200s_ms, step_time) == 2048


def test_what_is_tried_is_no_shorter_than_a_batch_takes_to_a_worker_and_back() -> None:
    step_time = StepTime()
    for _ in range(5):
        step_time.observe(3720, 400, 7300)
        step_time.observe(310, 400, 400)
    assert StepSizes().small(step_time, 4096, 310, 0).alone == 1024  # 1.6 ms, where 683 are 1.0


def test_without_a_full_step_no_small_one_is_taken_to_do_as_much() -> None:
    """Queries come from the first moment on, so that full steps would never run of themselves."""
    step_time = StepTime()
    for _ in range(5):
        step_time.observe(20, 20, 960)
    assert StepSizes().small(step_time, 4096, 310, 20).alone == 4096
    for _ in range(5):
        step_time.observe(640, 400, 1950)
    assert StepSizes().small(step_time, 4096, 310, 20).alone == 4096
    assert after(30, an_h200s_ms, step_time) == 2048


def test_a_size_is_not_tried_where_somebody_waits_with_whom_another_will_run() -> None:
    step_time = StepTime()
    for _ in range(5):
        step_time.observe(620, 400, 1950)
        step_time.observe(3720, 400, 7300)
    asked = [StepSizes().small(step_time, 4096, 310, 20).alone for _ in range(100)]
    assert set(asked) == {2731}  # as the line says
    assert StepSizes().small(step_time, 4096, 310, 0).alone == 1024
