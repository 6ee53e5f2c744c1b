"""What the documents say is true: links, flags, metrics, routes, statuses exist; the quickstart's commands run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path

import pytest

from common import errors
from common.config import InspectConfig, ServeConfig
from gateway.routes import operations_by_path
from tests import docs
from tests.suite import ROOT, Suite
from worker.process import state

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

# A page of flags that are not the product's: those of the programs in benchmarks/ and of others.
_FOREIGN_FLAGS = {"performance.md"}

_OTHER_FLAGS = {"--help", "--version"} | {f"--{item.name.replace('_', '-')}" for item in fields(InspectConfig)}


@pytest.fixture(params=PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


# Turns of phrase that need a second reading. CONTRIBUTING.md has the rules.
HARD_TO_READ = re.compile(
    r"""(?:^[\s#"*|>-]*|[.:;]\ )Of\ [a-z]|\bWhere\ there\ |\b[Ss]omebody\b|\b[Nn]obody\b|\b[Ww]hoever\b"""
    r"""|\bas\ mostly\b|\b(?:within|for)\ so\ long\b|\b[Ww]ho\ (?:comes|waits|asked|reads|sends)\b""",
    re.VERBOSE,
)
WRITTEN = [
    path
    for folder in ("common", "gateway", "scheduler", "worker", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".md", ".js", ".html"}
]


@pytest.mark.parametrize(
    "path",
    [*WRITTEN, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_no_sentence_has_a_turn_that_is_hard_to_read(path: Path) -> None:
    lines = path.read_text().splitlines()

    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if HARD_TO_READ.search(line)] == []


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub and mkdocs make them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{page.name} links to {target}: no such heading"


def test_every_flag_that_a_page_names_exists(page: Path) -> None:
    if page.name in _FOREIGN_FLAGS:
        return
    known = {f"--{item.name.replace('_', '-')}" for item in fields(ServeConfig)} | _OTHER_FLAGS
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", page.read_text()))

    assert named <= known


def test_every_variable_that_a_page_names_exists(page: Path) -> None:
    known = {f"HEDGEROW_{item.name.upper()}" for item in fields(ServeConfig)} | {"HEDGEROW_API_KEY"}

    assert set(re.findall(r"HEDGEROW_[A-Z_]+", page.read_text())) <= known


def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    known = set(re.findall(r"`(hedgerow_\w+)`", docs.metrics_page()))

    assert set(re.findall(r"`(hedgerow_\w+)", page.read_text())) <= known


@pytest.mark.parametrize("path", docs.pages(), ids=lambda path: path.name)
def test_a_page_that_is_made_of_the_product_is_current(path: Path) -> None:
    assert path.read_text() == docs.pages()[path], "run `python -m tests.docs`"


def test_the_api_pages_name_every_route() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"`(?:POST |GET )?(/[\w./]*)`", text))

    assert set(operations_by_path()) <= named
    assert {"/health", "/ready", "/info", "/metrics", "/v1/models", "/openapi.json", "/docs"} <= named


def test_the_api_pages_name_no_route_that_there_is_not() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))

    assert set(re.findall(r"`POST (/[\w./]*)`", text)) <= set(operations_by_path())


def rows(path: Path, heading: str) -> Iterator[list[str]]:
    """The cells of the rows of the table under a heading."""
    section = path.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    for line in [line for line in section.splitlines() if line.startswith("|")][2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_of_errors_has_every_status_and_no_other() -> None:
    listed = {int(status) for row in rows(ROOT / "docs" / "errors.md", "Statuses") for status in row[0].split(",")}
    raised = {error.status for error in subclasses(errors.ServiceError)}

    assert listed == {HTTPStatus(status) for status in raised}


def test_the_page_of_errors_names_every_default_code() -> None:
    codes = "".join(row[2] for row in rows(ROOT / "docs" / "errors.md", "Statuses"))
    raised = {error.default_code for error in subclasses(errors.ServiceError)}

    assert raised <= set(re.findall(r"`(\w+)`", codes))


def subclasses(error: type[errors.ServiceError]) -> list[type[errors.ServiceError]]:
    found = [kind for child in error.__subclasses__() for kind in subclasses(child)]
    return [error, *found] if error is not errors.ServiceError else found


def test_the_page_of_errors_has_every_exit_status() -> None:
    listed = [int(row[0]) for row in rows(ROOT / "docs" / "errors.md", "Exit statuses of processes")]
    constants = [value for name, value in vars(errors).items() if name.startswith("EX_")]
    constants += [value for name, value in vars(state).items() if name.startswith("EXIT_")]

    assert listed == sorted({0, *constants})


def commands(path: Path) -> list[str]:
    """The shell blocks of a page that are meant to run as they are."""
    return re.findall(r"^```sh\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_quickstart_run(suite: Suite) -> None:
    first, *others = commands(ROOT / "docs" / "quickstart.md")
    assert first.strip() == "make up"  # what the suite of this test does, on another port

    assert others
    for command in others:
        ended = subprocess.run(
            [
                "bash",
                "-euo",
                "pipefail",
                "-c",
                command.replace("curl -s", "curl -sS --fail-with-body").replace(":8080", f":{suite.port}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"


@pytest.mark.slow
def test_the_first_request_of_the_readme_is_answered(suite: Suite) -> None:
    curl = next(block for block in commands(ROOT / "README.md") if block.startswith("curl"))

    ended = subprocess.run(
        ["bash", "-c", curl.replace(":8080", f":{suite.port}")], capture_output=True, text=True, check=True
    )

    assert '"embedding"' in ended.stdout


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(str(tmp_path_factory.mktemp("docs") / "run"))
    try:
        suite.wait_until_ready()
        yield suite
    finally:
        suite.stop()
