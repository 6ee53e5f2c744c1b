"""Which inputs are remembered as deadly, and for how long."""

from __future__ import annotations

import dataclasses

import pytest

from common.protocol import Request
from scheduler.batching import Part, Pending
from scheduler.quarantine import Quarantine
from tests.scheduler.test_core import SECOND, make_request

HOUR = 3600 * SECOND


def part(*sequences: list[int], request: Request | None = None) -> Part:
    request = request or make_request(1, *sequences)
    return Part(Pending(b"g0", request, 1, 0, len(request.lengths)), 0, len(request.lengths))


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine(b"a key")


def test_of_many_sequences_the_first_that_is_remembered_is_named(quarantine: Quarantine) -> None:
    quarantine.add(part([6, 6, 6]), 0)
    quarantine.add(part([8]), 0)
    assert quarantine.find(part([1], [6, 6, 7], [6, 6, 6], [8]), 1) == 2
    assert quarantine.find(part([1], [6, 6, 7], [6, 6]), 1) is None


def test_sequences_outside_the_part_are_not_asked_about(quarantine: Quarantine) -> None:
    quarantine.add(part([6]), 0)
    whole = part([6], [1], [6])
    assert quarantine.find(dataclasses.replace(whole, start=1, stop=2), 1) is None
    assert quarantine.find(dataclasses.replace(whole, start=1), 1) == 2


def test_another_model_may_run_it(quarantine: Quarantine) -> None:
    quarantine.add(part([6]), 0)
    other = dataclasses.replace(make_request(1, [6]), fingerprint="fedcba9876543210")
    assert quarantine.find(part(request=other), 1) is None


def test_tokens_of_another_type_are_another_input_and_none_of_type_1_is_as_none_told(quarantine: Quarantine) -> None:
    quarantine.add(part([6, 7]), 0)
    assert quarantine.find(part(request=make_request(1, [6, 7], type_starts=[1])), 1) is None
    assert quarantine.find(part(request=make_request(1, [6, 7], type_starts=[2])), 1) == 0


def test_the_same_text_is_refused_however_its_rows_are_asked_for(quarantine: Quarantine) -> None:
    quarantine.add(part([6, 7]), 0)
    assert quarantine.find(part(request=make_request(1, [6, 7], encoding="int8")), 1) == 0
    assert quarantine.find(part(request=make_request(1, [6, 7], spans=[[(0, 1), (1, 2)]])), 1) == 0


def test_an_input_gets_another_chance_an_hour_after_its_last_death(quarantine: Quarantine) -> None:
    quarantine.add(part([6]), 0)
    quarantine.add(part([7]), 0)
    quarantine.add(part([6]), HOUR // 2)
    assert quarantine.find(part([7]), HOUR - 1) == 0
    assert quarantine.find(part([7]), HOUR) is None
    assert quarantine.find(part([6]), HOUR) == 0
    assert quarantine.find(part([6]), HOUR + HOUR // 2) is None
    assert len(quarantine) == 0


def test_the_oldest_makes_room(quarantine: Quarantine) -> None:
    for token in range(1001):
        quarantine.add(part([token]), token)
    assert len(quarantine) == 1000
    assert quarantine.find(part([0]), 2000) is None
    assert quarantine.find(part([1]), 2000) == 0
    assert quarantine.find(part([1000]), 2000) == 0
