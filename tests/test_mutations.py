"""The list of mutations stays true of the code, and the script tells what notices a mutation from what survives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import ROOT, Mutation, Stale, read_list

LIST = read_list()

# One that a test of the quick tier notices within a second, and one that changes nothing.
NOTICED = """
[[mutation]]
name = "noticed"
promise = "A deadline that has passed is 504."
file = "common/errors.py"
old = "status = 504"
new = "status = 503"
tests = ["tests/common/test_errors.py"]
"""
HARMLESS = """
[[mutation]]
name = "harmless"
promise = "None."
file = "common/errors.py"
old = "status = 504"
new = "status = 500 + 4"
tests = ["tests/common/test_errors.py"]
"""
UNREADABLE = """
[[mutation]]
name = "unreadable"
promise = "None: no test can be collected."
file = "common/errors.py"
old = "status = 504"
new = "status = "
tests = ["tests/common/test_errors.py"]
"""


@pytest.mark.parametrize("mutation", LIST, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_of_a_product_file_that_still_compiles(mutation: Mutation) -> None:
    assert mutation.file.partition("/")[0] in {"common", "gateway", "scheduler", "worker"}
    text = (ROOT / mutation.file).read_text()

    mutated = mutation.apply(text)

    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))


@pytest.mark.thorough
@pytest.mark.parametrize("mutation", LIST, ids=lambda mutation: mutation.name)
def test_the_tests_that_should_notice_a_mutation_are_there(mutation: Mutation) -> None:
    assert mutation.tests
    for selected in mutation.tests:
        path, _, test = selected.partition("::")
        assert re.search(rf"^(async )?def {test or 'test_'}", (ROOT / path).read_text(), re.MULTILINE), selected


def test_mutations_of_every_package_have_names_of_their_own() -> None:
    assert len({mutation.name for mutation in LIST}) == len(LIST) >= 45
    for package in ("common", "gateway", "scheduler", "worker"):
        assert len([mutation for mutation in LIST if mutation.file.startswith(f"{package}/")]) >= 10, package


@pytest.mark.parametrize("text", ["no such line\n", "status = 504\nstatus = 504\n"])
def test_a_mutation_whose_text_is_not_there_exactly_once_is_stale(text: str) -> None:
    mutation = Mutation("name", "promise", "common/errors.py", "status = 504", "status = 503", ("tests",))

    with pytest.raises(Stale, match=r"^name: common/errors\.py has \d times, and not once"):
        mutation.apply(text)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (NOTICED, 0, "1 noticed by make test, 0 by make test-all alone; 0 survive"),
        (HARMLESS, 1, "0 noticed by make test, 0 by make test-all alone; 1 survive: harmless"),
        (UNREADABLE, 1, "unreadable: pytest ended with"),
    ],
    ids=["noticed", "harmless", "unreadable"],
)
def test_the_script_tells_what_survives_and_leaves_the_checkout_alone(
    content: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (ROOT / "common/errors.py").read_bytes()
    path = tmp_path / "mutations.toml"
    path.write_text(content)

    assert mutations.main(["--list", str(path)]) == status

    assert said in "".join(capsys.readouterr())
    assert (ROOT / "common/errors.py").read_bytes() == before
