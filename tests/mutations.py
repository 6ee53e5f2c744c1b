"""Break promises on purpose, and see the tests notice: whether the suite would, if somebody broke them by mistake.

    python -m tests.mutations                     all of them, two at a time; a quarter of an hour on two cores
    python -m tests.mutations --only NAME [NAME]  these alone
    python -m tests.mutations --tier test         what `make test` alone notices

`mutations.toml` holds the mutations: a text of one product file, what takes its place, and the tests that should
notice. Each is applied to a copy of the tree in a temporary folder; the checkout is never edited. A mutation is noticed
by a test that fails, not by one that cannot be collected. The tests of `make test` run first, the others only if those
notice nothing, so the table tells which promises `make test` alone does not guard. The exit status is 1 if a mutation
survives.

A mutation whose text is not found exactly once is an error: the list is kept true by whoever moves the code. Before
all else the tests run on an unchanged copy, since a test that always fails notices nothing.

Rejected: a tool that makes mutations by itself. It makes thousands, most of them of no promise, and runs for days.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_name("mutations.toml")

# What a tier is, as pytest's `-m` takes it: what `make test` runs, and what `make test-all` runs besides.
TIERS = {"test": "not thorough and not gpu", "all": "thorough and not gpu"}

_COPIED = ("benchmarks", "common", "docs", "gateway", "scheduler", "tests", "worker")
_TIMEOUT_S = 1800  # of one run of pytest
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
_HUNG = re.compile(r"^(\S+::.*?) \++ Timeout \+", re.MULTILINE)
_NONE_COLLECTED = 5  # pytest's exit status


class Stale(Exception):
    """A mutation does not fit the code any more."""


class Broken(Exception):
    """Tests that could not be run say nothing of a mutation."""


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    promise: str
    file: str  # below the root
    old: str
    new: str
    tests: tuple[str, ...]  # files, or tests of files, as pytest takes them

    def apply(self, text: str) -> str:
        """The file's text with the promise broken. Raises Stale: `old` does not occur exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise Stale(f"{self.name}: {self.file} has {count} times, and not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutation."""

    mutation: Mutation
    tier: str | None  # which of TIERS noticed it; None: it survived
    test: str  # the first that failed
    seconds: float


def read_list(path: Path = LIST) -> list[Mutation]:
    tables = tomllib.loads(path.read_text())["mutation"]
    return [Mutation(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def judge(mutation: Mutation, tiers: Sequence[str]) -> Verdict:
    """Apply a mutation to a copy of the tree and run its tests, tier by tier until one notices it.

    Raises:
        Stale: the code has changed under it.
        Broken: its tests could not be run.
    """
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = _copy(Path(folder))
        file = root / mutation.file
        file.write_text(mutation.apply(file.read_text()))
        for tier in tiers:
            failed = _first_failure(root, mutation.name, mutation.tests, TIERS[tier])
            if failed is not None:
                return Verdict(mutation, tier, failed, time.monotonic() - begun_s)
    return Verdict(mutation, None, "", time.monotonic() - begun_s)


def check_unchanged(mutations: Sequence[Mutation], tiers: Sequence[str]) -> None:
    """Raises Broken: a test that should notice a mutation fails on the unchanged tree."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    marks = " or ".join(f"({TIERS[tier]})" for tier in tiers)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        failed = _first_failure(_copy(Path(folder)), "the unchanged tree", tests, marks)
    if failed is not None:
        raise Broken(f"{failed} fails on the unchanged tree")


def _copy(folder: Path) -> Path:
    """The tree, its compiled files among it: they are valid, since times are copied, too."""
    root = folder / "tree"
    for name in _COPIED:
        shutil.copytree(ROOT / name, root / name, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, root / path.name)
    return root


def _first_failure(root: Path, what: str, tests: Sequence[str], marks: str) -> str | None:
    """Run tests in this tree until one fails, or hangs; its name, None where none does.

    Raises:
        Broken: they cannot be run.
    """
    # A test that hangs ends all of pytest: the other method, a signal, is not heard in uvloop's event loop.
    options = ["-x", "-v", "--tb=no", "-p", "no:cacheprovider", "--timeout=60", "--timeout-method=thread", "-m", marks]
    # The environment holds an editable install of the checkout, before which the copy is to be found.
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what tests have started can be ended with them
    ) as child:
        try:
            output, _ = child.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise Broken(f"{what}: the tests did not end within {_TIMEOUT_S} s") from None
    failed = _FAILED.search(output) or _HUNG.search(output)
    if child.returncode == 1 and failed is not None:
        return failed[1]
    if child.returncode not in (0, _NONE_COLLECTED):
        raise Broken(f"{what}: pytest ended with {child.returncode}:\n{output[-2000:]}")
    return None


def report(verdicts: Sequence[Verdict]) -> str:
    """A table of all, and what it comes to."""
    width = max(len(verdict.mutation.name) for verdict in verdicts)
    lines = [f"{'mutation':{width}}  noticed by      s  test"]
    for verdict in verdicts:
        who = "NOBODY" if verdict.tier is None else "make test" if verdict.tier == "test" else "test-all"
        lines.append(f"{verdict.mutation.name:{width}}  {who:10}  {verdict.seconds:5.1f}  {verdict.test}")
    of_tier = {tier: [one.mutation.name for one in verdicts if one.tier == tier] for tier in (*TIERS, None)}
    survivors, by_all = of_tier[None], of_tier["all"]
    lines += [
        "",
        f"{len(verdicts)} mutations: {len(of_tier['test'])} noticed by make test, {len(by_all)} by make test-all alone"
        f"{': ' if by_all else ''}{', '.join(by_all)}; {len(survivors)} survive{': ' if survivors else ''}"
        f"{', '.join(survivors)}",
    ]
    return "\n".join(lines)


def _judge_all(mutations: Sequence[Mutation], tiers: Sequence[str], processes: int) -> list[Verdict]:
    """So many at a time, in their order. Raises as `judge`: then no other is begun."""
    verdicts = []
    with ThreadPoolExecutor(processes) as pool:
        try:
            for verdict in pool.map(partial(judge, tiers=tiers), mutations):
                verdicts.append(verdict)
                sys.stderr.write(f"\r{len(verdicts)} of {len(mutations)}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations alone")
    parser.add_argument("--tier", choices=list(TIERS), default="all", help="test: run only what `make test` runs")
    parser.add_argument("--processes", type=int, default=2, help="mutations at a time")
    parser.add_argument("--list", type=Path, default=LIST, help="another list than tests/mutations.toml")
    options = parser.parse_args(arguments)
    mutations = read_list(options.list)
    if options.only is not None:
        if unknown := set(options.only) - {mutation.name for mutation in mutations}:
            parser.error(f"no mutation is called {' or '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation.name in options.only]
    tiers = list(TIERS)[: list(TIERS).index(options.tier) + 1]
    try:
        for mutation in mutations:
            mutation.apply((ROOT / mutation.file).read_text())  # before minutes are spent on the others
        check_unchanged(mutations, tiers)
        verdicts = _judge_all(mutations, tiers, options.processes)
    except (Stale, Broken) as error:
        sys.stderr.write(f"\n{error}\n")
        return 1
    sys.stdout.write(report(verdicts) + "\n")
    return int(any(verdict.tier is None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
