"""StepTime: what is learned of steps, and what it says of others."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from scheduler.steptime import StepTime


def learned(*steps: tuple[int, int, float]) -> StepTime:
    """Of steps of (tokens, longest sequence, milliseconds)."""
    model = StepTime()
    for num_tokens, longest, ms in steps:
        model.observe(num_tokens, longest, round(ms * 1000))
    return model


def test_nothing_is_said_before_anything_was_observed() -> None:
    assert StepTime().predict_ms(100, 100) is None
    assert StepTime().queue_ms(100, 512, 100) is None


def test_what_was_asked_before_a_step_does_not_hide_what_it_teaches() -> None:
    step_time = StepTime()
    assert step_time.predict_ms(100, 100) is None

    step_time.observe(100, 100, 5_000)
    assert step_time.predict_ms(100, 100) == 5.0

    step_time.observe(400, 100, 9_000)
    assert step_time.predict_ms(400, 100) == 9.0
    assert StepTime().budget(10, 100, 512) == 512


def test_a_step_is_predicted_to_take_what_its_like_took() -> None:
    assert learned((512, 20, 60)).predict_ms(512, 30) == pytest.approx(60)


def test_between_two_sizes_a_line_leads_from_one_to_the_other() -> None:
    model = learned((100, 20, 10), (500, 20, 50))
    assert model.predict_ms(300, 20) == pytest.approx(30)
    assert model.predict_ms(101, 20) == pytest.approx(10.1)


def test_below_the_smallest_size_a_step_takes_no_less() -> None:
    assert learned((64, 20, 7), (512, 20, 60)).predict_ms(3, 20) == pytest.approx(7)


def test_above_the_largest_size_time_grows_with_tokens() -> None:
    assert learned((64, 20, 7), (512, 20, 60)).predict_ms(1024, 20) == pytest.approx(120)


def test_long_sequences_are_a_class_of_their_own() -> None:
    model = learned((8192, 20, 14), (8192, 8192, 40))
    assert model.predict_ms(8192, 100) == pytest.approx(14)
    assert model.predict_ms(8192, 5000) == pytest.approx(40)


def test_a_class_of_lengths_that_never_came_is_taken_for_its_nearest() -> None:
    assert learned((512, 20, 60)).predict_ms(512, 9000) == pytest.approx(60)


def test_a_change_is_followed_within_some_ten_steps() -> None:
    model = learned((512, 20, 50))
    for _ in range(40):
        model.observe(512, 20, 100_000)
    assert model.predict_ms(512, 20) == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize("odd_ms", [30_000, 0.04])
def test_one_step_that_was_stopped_or_noticed_late_sways_nothing(odd_ms: float) -> None:
    model = learned(*[(512, 20, 50.0)] * 20)
    for _ in range(2):
        model.observe(512, 20, round(odd_ms * 1000))
    assert model.predict_ms(512, 20) == pytest.approx(50)


def test_what_changes_all_at_once_is_believed_after_three_steps() -> None:
    model = learned(*[(512, 20, 50.0)] * 20)
    for _ in range(3):
        model.observe(512, 20, 500_000)
    assert model.predict_ms(512, 20) == pytest.approx(500)


def test_a_first_step_that_compiled_something_is_forgotten_after_three_others() -> None:
    model = learned((512, 20, 5000), *[(512, 20, 10.0)] * 3)
    assert model.predict_ms(512, 20) == pytest.approx(10)


def test_a_first_step_of_its_size_that_the_curve_contradicts_is_not_believed() -> None:
    model = learned(*[(64, 20, 7.0)] * 5, *[(512, 20, 60.0)] * 5, (256, 20, 5000))
    assert model.predict_ms(256, 20) == pytest.approx(30, rel=0.05)


def test_one_slow_small_step_holds_up_no_larger_one() -> None:
    model = learned((6, 6, 3000), *[(500, 20, 10.0)] * 300)
    assert model.predict_ms(500, 20) == pytest.approx(10)
    assert model.predict_ms(6, 6) == pytest.approx(10)


def test_a_step_of_no_time_at_all_does_not_stop_the_learning() -> None:
    model = learned((512, 20, 0.0), *[(512, 20, 10.0)] * 3)
    assert model.predict_ms(512, 20) == pytest.approx(10)


def test_above_what_a_class_of_lengths_has_seen_its_neighbour_says_how_time_grows() -> None:
    documents = [(310, 310, 1.5), (4096, 310, 8.0), (16_384, 310, 28.0)]
    model = learned(*documents * 3, (6, 6, 1.3))
    predicted = model.predict_ms(16_384, 20)
    assert predicted is not None
    assert 20 <= predicted <= 30
    assert model.budget(10, 20, 16_384) > 3000


def test_a_larger_step_is_never_predicted_to_be_quicker() -> None:
    model = learned((100, 20, 12), (200, 20, 8), (400, 20, 20))
    predictions = [model.predict_ms(num_tokens, 20) for num_tokens in range(50, 500, 10)]
    assert predictions == sorted(predictions)


def test_a_budget_is_the_most_tokens_that_take_no_longer() -> None:
    model = learned((100, 20, 10), (500, 20, 50))
    assert model.budget(30, 20, 512) == 300
    assert model.budget(60, 20, 512) == 512


def test_a_budget_is_never_smaller_than_what_hardly_costs_more_than_one_token() -> None:
    model = learned((64, 20, 4.5), (512, 20, 10))
    assert 64 <= model.budget(1, 20, 512) <= 200
    assert learned((64, 20, 9), (512, 20, 10)).budget(3, 20, 512) == 512


def test_what_waits_is_counted_in_full_steps_and_a_rest() -> None:
    model = learned((100, 20, 10), (500, 20, 50))
    assert model.queue_ms(1300, 500, 20) == pytest.approx(130)
    assert model.queue_ms(0, 500, 20) == 0


def test_a_first_step_that_was_slow_and_small_does_not_make_a_queue_of_minutes() -> None:
    first = (10, 10, 1000.0)
    assert learned(first).queue_ms(2560, 512, 20) == pytest.approx(5 * 1000)
    assert learned(first, first, first).queue_ms(2560, 512, 20) == pytest.approx(5 * 51_200)


def test_short_steps_do_not_make_a_queue_look_longer_than_it_is() -> None:
    model = learned((512, 20, 58.5), *[(5, 5, 6.8)] * 100)
    assert model.queue_ms(5120, 512, 20) == pytest.approx(585)


def test_predictions_of_noisy_steps_are_within_a_tenth_at_the_median() -> None:
    rng = random.Random(5)
    model = StepTime()
    errors = []
    for index in range(2000):
        num_tokens = round(2 ** rng.uniform(3, 12))
        ms = (3 + num_tokens / 20) * rng.uniform(0.9, 1.1)
        predicted = model.predict_ms(num_tokens, 100)
        if predicted is not None and index >= 200:
            errors.append(abs(ms / predicted - 1))
        model.observe(num_tokens, 100, round(ms * 1000))
    assert sorted(errors)[len(errors) // 2] < 0.1


def test_for_more_that_waits_it_never_takes_less_time() -> None:
    rng = random.Random(0)
    for num_steps in (1, 2, 3, 10, 100):
        model = learned(*((rng.randint(1, 600), 20, rng.uniform(1, 100)) for _ in range(num_steps)))
        times_ms = [model.queue_ms(num_tokens, 512, 256) or 0 for num_tokens in range(0, 2000, 7)]
        assert all(later >= sooner for sooner, later in pairwise(times_ms))


def test_short_steps_of_one_class_and_full_ones_of_another_say_nothing_of_each_other() -> None:
    """Queries of 20 tokens, and documents of 310 in steps that are always full."""
    model = learned(*[(20, 20, 1.0)] * 5, *[(4096, 400, 6.6)] * 5)
    assert model.predict_ms(4096, 20) == pytest.approx(6.6)
    assert model.predict_ms(2058, 20) == pytest.approx(3.8)  # half-way
    assert model.predict_ms(20, 20) == pytest.approx(1.0)
    assert model.budget(3.8, 20, 4096) == 2058
    assert model.queue_ms(8192, 4096, 20) == pytest.approx(13.2)


def test_between_two_classes_a_larger_step_is_never_predicted_to_be_quicker() -> None:
    model = learned(*[(20, 20, 1.0)] * 5, (300, 20, 3.0), *[(1000, 400, 2.5), (4096, 400, 6.6)] * 5)
    predictions = [model.predict_ms(num_tokens, 20) for num_tokens in range(10, 4096, 50)]
    assert predictions == sorted(predictions)


def test_a_first_step_of_its_size_that_another_class_contradicts_is_not_believed() -> None:
    model = learned(*[(20, 20, 1.0)] * 5, *[(100, 400, 1.2), (4096, 400, 6.6)] * 5, (300, 20, 300))
    assert model.predict_ms(4096, 20) == pytest.approx(6.6)
    assert model.predict_ms(300, 20) == pytest.approx(1.47, abs=0.01)


def test_a_class_is_believed_of_smaller_steps_than_it_has_seen() -> None:
    model = learned(*[(20, 20, 1.0), (1000, 20, 2.0)] * 5, *[(4096, 400, 6.6)] * 5, (310, 310, 1.3))
    assert model.predict_ms(310, 310) == pytest.approx(1.3)


def test_of_smaller_steps_than_a_class_has_seen_the_others_tell() -> None:
    model = learned(*[(20, 20, 1.0), (1000, 20, 2.0)] * 5, *[(4096, 400, 8.0)] * 5)
    assert model.predict_ms(1000, 400) == pytest.approx(2.0)
    assert model.predict_ms(2548, 400) == pytest.approx(5.0)  # half-way from there
    assert model.predict_ms(5, 400) == pytest.approx(1.0)
    model = learned(*[(20, 20, 3.0)] * 5, *[(4096, 400, 2.0)] * 5)
    assert model.predict_ms(20, 400) == pytest.approx(2.0)  # no more than a larger one


def test_steps_that_are_not_typical_are_all_that_is_known_until_the_first_that_is() -> None:
    model = StepTime()
    model.observe(100, 20, 25_000, is_typical=False)
    model.observe(900, 20, 27_000, is_typical=False)
    assert model.predict_ms(100, 20) == pytest.approx(25)
    assert model.predict_ms(500, 20) == pytest.approx(26)
    assert model.queue_ms(900, 512, 20) == pytest.approx(26.03 + 25.72, abs=0.1)
    assert model.budget(26, 20, 900) == 900  # 1.25 times what one token takes
    assert model.reach == 0
    model.observe(100, 20, 2_000)
    assert model.predict_ms(100, 20) == pytest.approx(2)


def test_beyond_what_was_typical_a_step_takes_no_longer_than_one_that_was_not() -> None:
    """Queries have their graph at once; of documents each first step is launched kernel by kernel."""
    model = learned(*[(20, 20, 1.0)] * 5)
    assert model.predict_ms(4000, 400) == pytest.approx(200)
    for _ in range(3):
        model.observe(4000, 400, 25_000, is_typical=False)
    assert model.predict_ms(4000, 400) == pytest.approx(25)
    assert model.predict_ms(40, 400) == pytest.approx(2)
    assert model.queue_ms(40_000, 4000, 400) == pytest.approx(250)
    assert model.budget(30, 400, 4000) == 4000
    for _ in range(3):
        model.observe(4000, 400, 7_000)
    assert model.predict_ms(4000, 400) == pytest.approx(7)
    for _ in range(9):
        model.observe(4000, 400, 25_000, is_typical=False)
    assert model.predict_ms(4000, 400) == pytest.approx(7)


def test_a_larger_step_takes_no_less_than_a_smaller_one_whatever_one_took_that_was_not_typical() -> None:
    model = learned(*[(20, 20, 1.0), (1000, 20, 30.0)] * 5)
    model.observe(1200, 20, 25_000, is_typical=False)
    assert model.predict_ms(1100, 20) == pytest.approx(30)
    assert model.predict_ms(4000, 20) == pytest.approx(25 * 4000 / 1200)


def test_a_size_take_try_until_some_steps_of_about_it_have_run_lately() -> None:
    model = learned(*[(600, 400, 2.0), (4000, 400, 7.0)] * 5)
    assert not model.take_try(600, 400)
    assert not model.take_try(4000, 400)
    assert model.take_try(600, 20)  # those were of other lengths
    for _ in range(3):
        assert model.take_try(2000, 400)
        model.observe(2000, 400, 3_700)
    assert not model.take_try(2000, 400)
    assert model.take_try(2400, 400)  # a fifth more is another size
    for _ in range(5000):
        model.observe(600, 400, 2_000)
    assert model.take_try(2000, 400)


def test_a_size_that_no_step_comes_to_is_not_tried_for_ever() -> None:
    model = learned(*[(600, 400, 2.0), (4000, 400, 7.0)] * 5)
    assert sum(model.take_try(2000, 400) for _ in range(1000)) == 50
    for _ in range(5000):
        model.observe(600, 400, 2_000)
    assert sum(model.take_try(2000, 400) for _ in range(1000)) == 50  # lengths may be others by now
