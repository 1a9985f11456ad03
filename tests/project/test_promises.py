"""Each promise of the README has tests and faults that break it (docs/concepts/promises.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.support.mutants import MUTANTS, Mutant, mutants
from tests.support.suite import ROOT, has_test

BENEATH = {
    "compatible with DCP in both directions",
    "`dcp.save`, `dcp.load` and `dcp.async_save` have the signatures of torch",
}
"""Promises that the README makes outside of its table."""

FAULTS = mutants()

MEASURED = {"time"}
"""By `make bench`; no fault of a line or two shows in a test of seconds."""


@dataclass(frozen=True)
class Row:
    """A line of the page."""

    promise: str
    tests: tuple[str, ...]
    faults: tuple[str, ...]


def cells(page: str, heading: str) -> list[list[str]]:
    """The lines of the first table behind a heading."""
    text = (ROOT / page).read_text().partition(heading)[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None, page
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def rows() -> list[Row]:
    """Names of tests and of faults are in backticks."""
    return [
        Row(promise, *(tuple(re.findall(r"`([^`]+)`", cell)) for cell in (tests, faults)))
        for promise, tests, faults in cells("docs/concepts/promises.md", "# Promises and their tests")
    ]


def test_the_page_has_the_promises_of_the_readme() -> None:
    """A line for each line of its table, by its first words, and for the sentences beneath."""
    promised = {first for first, *_ in cells("README.md", "## What changes")}
    assert len(promised) >= 12
    assert {row.promise for row in rows()} == promised | BENEATH


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.promise)
def test_a_promise_has_tests_and_faults(row: Row) -> None:
    """The tests are there and not among the exhaustive ones; the faults are patches of tests/mutants."""
    assert row.tests and not [test for test in row.tests if not has_test(test)]
    if row.promise not in MEASURED:
        assert row.faults and not {*row.faults} - {mutant.name for mutant in FAULTS}


def test_there_are_as_many_faults_as_promised() -> None:
    """Sixty, over everything that the README promises, and none lies where `make mutants` does not look."""
    assert len(FAULTS) >= 60 and len({mutant.path.parent for mutant in FAULTS}) >= 5
    assert {mutant.path for mutant in FAULTS} == set(MUTANTS.rglob("*.patch"))


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name)
def test_a_fault_applies_and_names_its_promise_and_tests(mutant: Mutant) -> None:
    """A patch of the product alone, whose lines are in the present tree; `make mutants` runs it."""
    for change in mutant.path.read_text().split("\ndiff --git")[1:]:
        (name,) = re.findall(r"^\+\+\+ b/(\S+)", change, re.MULTILINE)
        assert name.split("/")[0] in ("dcp", "planners", "server", "storage")
        for hunk in re.split(r"^@@ .*\n", change, flags=re.MULTILINE)[1:]:
            before = [line[1:] for line in hunk.splitlines() if not line.startswith(("+", "\\"))]
            assert "\n".join(before) in (ROOT / name).read_text()
    assert mutant.promise.endswith(".") or len(mutant.promise.split()) > 3
    missing = [test for test in mutant.found_by if not has_test(test) and not (ROOT / test).is_dir()]
    assert not missing, missing
