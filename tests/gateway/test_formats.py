"""How lists are put together."""

from __future__ import annotations

import tracemalloc

import pytest

from gateway.formats import json_list


@pytest.mark.parametrize(
    ("elements", "written"), [([], b"[]"), ([b"1"], b"[1]"), ([b"1", b"[2,3]", b'"4"'], b'[1,[2,3],"4"]')]
)
def test_elements_become_a_list(elements: list[bytes], written: bytes) -> None:
    assert json_list(iter(elements)) == written


def test_a_long_list_is_copied_once() -> None:
    # A second copy would be one by formatting, for whose time no other thread runs.
    elements = [bytes(65_536)] * 64
    tracemalloc.start()
    written = json_list(elements)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(written) == 64 * 65_537 + 1
    assert peak_bytes < 1.1 * len(written)
