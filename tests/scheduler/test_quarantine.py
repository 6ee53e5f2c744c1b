"""Which inputs are remembered as deadly, and for how long."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.wire.messages import Request
from scheduler.batching import Part, Pending
from scheduler.quarantine import Quarantine
from tests.scheduler.rig import SECOND, make_request

HOUR = 3600 * SECOND


def part(*sequences: list[int], request: Request | None = None) -> Part:
    request = request or make_request(1, *sequences)
    return Part(Pending(b"g0", request, 1, 0, len(request.lengths)), 0, len(request.lengths))


def after(deaths: int, *sequences: list[int], request: Request | None = None) -> Part:
    """Sequences of which so many workers have died by now."""
    return dataclasses.replace(part(*sequences, request=request), losses=deaths)


def losses(parts: list[Part]) -> list[tuple[int, int, int]]:
    return [(known.start, known.stop, known.losses) for known in parts]


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine(b"a key")


def test_sequences_are_parted_by_how_many_workers_have_died_of_them(quarantine: Quarantine) -> None:
    quarantine.blame(after(3, [6, 6, 6]), 0)
    quarantine.blame(after(1, [7], [8], [9]), 0)
    found = quarantine.split_by_suspicion(part([1], [2], [7], [8], [6, 6, 6], [3], [9]), 1)
    assert losses(found) == [(0, 2, 0), (2, 4, 1), (4, 5, 3), (5, 6, 0), (6, 7, 1)]


def test_what_is_not_known_stays_in_one_part(quarantine: Quarantine) -> None:
    quarantine.blame(after(3, [6, 6]), 0)
    asked = part([6, 7], [6], [1])
    assert quarantine.split_by_suspicion(asked, 1) == [asked]


def test_sequences_outside_the_part_are_not_asked_about_and_its_own_losses_count(quarantine: Quarantine) -> None:
    quarantine.blame(after(2, [6]), 0)
    asked = dataclasses.replace(part([6], [1], [6], [6]), start=1, stop=3, losses=1)
    assert losses(quarantine.split_by_suspicion(asked, 1)) == [(1, 2, 1), (2, 3, 2)]


def test_a_suspect_that_has_run_is_none_any_more(quarantine: Quarantine) -> None:
    quarantine.blame(after(1, [6], [7]), 0)
    quarantine.acquit(part([7]))
    assert losses(quarantine.split_by_suspicion(part([6], [7]), 1)) == [(0, 1, 1), (1, 2, 0)]
    quarantine.acquit(part([6]))
    assert len(quarantine) == 0


def test_a_copy_that_has_less_to_answer_for_takes_nothing_back(quarantine: Quarantine) -> None:
    quarantine.blame(after(2, [6]), 0)
    quarantine.blame(after(1, [6]), 0)
    assert losses(quarantine.split_by_suspicion(part([6]), 1)) == [(0, 1, 2)]
    quarantine.blame(after(3, [6]), 0)
    quarantine.blame(after(1, [6]), 0)
    quarantine.acquit(part([6]))
    assert losses(quarantine.split_by_suspicion(part([6]), 1)) == [(0, 1, 3)]


def test_another_model_may_run_it(quarantine: Quarantine) -> None:
    quarantine.blame(after(3, [6]), 0)
    other = dataclasses.replace(make_request(1, [6]), fingerprint="fedcba9876543210")
    assert losses(quarantine.split_by_suspicion(part(request=other), 1)) == [(0, 1, 0)]


def test_tokens_of_another_type_are_another_input_and_none_of_type_1_is_as_none_told(quarantine: Quarantine) -> None:
    quarantine.blame(after(3, [6, 7]), 0)
    for type_start, num_losses in ((1, 0), (2, 3)):
        asked = part(request=make_request(1, [6, 7], type_starts=[type_start]))
        assert losses(quarantine.split_by_suspicion(asked, 1)) == [(0, 1, num_losses)]


@pytest.mark.parametrize("asked", [{"encoding": "int8"}, {"spans": [[(0, 1), (1, 2)]]}, {"lane": "backfill"}])
def test_the_same_text_is_known_however_its_rows_are_asked_for(quarantine: Quarantine, asked: dict[str, Any]) -> None:
    quarantine.blame(after(3, [6, 7]), 0)
    assert losses(quarantine.split_by_suspicion(part(request=make_request(1, [6, 7], **asked)), 1)) == [(0, 1, 3)]


def test_a_deadly_input_gets_another_chance_an_hour_after_its_last_death(quarantine: Quarantine) -> None:
    quarantine.blame(after(3, [6]), 0)
    quarantine.blame(after(3, [7]), 0)
    quarantine.blame(after(3, [6]), HOUR // 2)
    assert losses(quarantine.split_by_suspicion(part([6], [7]), HOUR - 1)) == [(0, 2, 3)]
    assert losses(quarantine.split_by_suspicion(part([6], [7]), HOUR)) == [(0, 1, 3), (1, 2, 0)]
    assert losses(quarantine.split_by_suspicion(part([6], [7]), HOUR + HOUR // 2)) == [(0, 2, 0)]
    assert len(quarantine) == 0


def test_a_suspect_is_none_any_more_after_ten_minutes(quarantine: Quarantine) -> None:
    quarantine.blame(after(2, [6]), 0)
    assert losses(quarantine.split_by_suspicion(part([6]), 600 * SECOND - 1)) == [(0, 1, 2)]
    assert losses(quarantine.split_by_suspicion(part([6]), 600 * SECOND)) == [(0, 1, 0)]


def test_the_oldest_makes_room_and_suspects_take_none_from_the_deadly(quarantine: Quarantine) -> None:
    for token in range(1001):
        quarantine.blame(after(3, [token]), token)
    quarantine.blame(after(1, *([token] for token in range(5000, 10_000))), 2000)
    assert len(quarantine) == 1000 + 4096
    assert losses(quarantine.split_by_suspicion(part([0], [1], [1000], [5000], [9999]), 2000)) == [
        (0, 1, 0),
        (1, 3, 3),
        (3, 4, 0),
        (4, 5, 1),
    ]
