"""The error tree: what travels comes back as what it was."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from common import errors
from gateway import app  # and with it every module that refuses requests


@pytest.mark.parametrize("code", sorted(errors._WIRE_CLASSES))
def test_an_error_survives_the_wire(code: str) -> None:
    error = errors.from_wire(code, "text", sequence=1, retry_after_s=2)
    assert (error.code, error.message, error.sequence, error.retry_after_s) == (code, "text", 1, 2)
    assert type(error) is errors._WIRE_CLASSES[code]


def test_an_unknown_code_is_our_own_bug() -> None:
    assert errors.from_wire("nonsense", "text").status == 500


def test_every_class_has_its_own_status_and_type() -> None:
    assert errors.Overloaded("x").status == 429
    assert errors.Unavailable("x").status == 503
    assert errors.DeadlineExceeded("x").type == "timeout_error"
    assert errors.InvalidRequest("x", code="empty_input").code == "empty_input"


def classes_below(cls: type[errors.ServiceError]) -> Iterator[type[errors.ServiceError]]:
    for found in cls.__subclasses__():
        yield found
        yield from classes_below(found)


def test_the_tree_at_the_top_has_every_class_with_its_status() -> None:
    drawn = re.findall(r"── (\w+) +(\d{3})  ", str(errors.__doc__))
    found = [cls for cls in classes_below(errors.ServiceError) if cls.__module__.split(".")[0] != "tests"]
    assert sorted((cls.__name__, str(cls.status)) for cls in found) == sorted(drawn)
    assert {cls.__module__ for cls in found} == {errors.__name__}, f"{app.__name__} loads all of them"
