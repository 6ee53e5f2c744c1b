"""The command's own words."""

from __future__ import annotations

import pytest

from tests.suite import run_hedgerow


@pytest.mark.slow
def test_help_names_the_commands_and_an_unknown_one_is_status_2() -> None:
    assert "serve [MODEL]" in run_hedgerow("--help").stdout
    unknown = run_hedgerow("sreve")
    assert (unknown.returncode, "serve [MODEL]" in unknown.stderr) == (2, True)
