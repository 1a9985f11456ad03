"""Each promise of the README has tests, and faults that break it (docs/concepts/promises.md)."""

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
"""Promises of the README outside of its table."""

FAULTS = mutants()

MEASURED = {"time"}
"""Promises measured by `make bench`: no small fault shows in a test of seconds."""


@dataclass(frozen=True)
class Row:
    """One row of the page."""

    promise: str
    tests: tuple[str, ...]
    faults: tuple[str, ...]


def cells(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading."""
    text = (ROOT / page).read_text().partition(heading)[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None, page
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def rows() -> list[Row]:
    """Return the rows of the page; names of tests and faults are in backticks."""
    return [
        Row(promise, *(tuple(re.findall(r"`([^`]+)`", cell)) for cell in (tests, faults)))
        for promise, tests, faults in cells("docs/concepts/promises.md", "# Promises and their tests")
    ]


def test_the_page_has_the_promises_of_the_readme() -> None:
    """The page has a row for each row of the README's table, by its first words, and for further promises."""
    promised = {first for first, *_ in cells("README.md", "## What changes")}
    assert len(promised) >= 12
    assert {row.promise for row in rows()} == promised | BENEATH


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.promise)
def test_a_promise_has_tests_and_faults(row: Row) -> None:
    """The tests exist and are not exhaustive; the faults are patches in tests/mutants."""
    assert row.tests and not [test for test in row.tests if not has_test(test)]
    if row.promise not in MEASURED:
        assert row.faults and not {*row.faults} - {mutant.name for mutant in FAULTS}


def test_at_least_sixty_faults_cover_all_promises() -> None:
    """At least sixty faults cover all promises, and `make mutants` finds each patch."""
    assert len(FAULTS) >= 60 and len({mutant.path.parent for mutant in FAULTS}) >= 5
    assert {mutant.path for mutant in FAULTS} == set(MUTANTS.rglob("*.patch"))


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name)
def test_faults_apply_and_name_promises_and_tests(mutant: Mutant) -> None:
    """A fault changes the product only, applies to the present tree, and names existing tests."""
    for change in mutant.path.read_text().split("\ndiff --git")[1:]:
        (name,) = re.findall(r"^\+\+\+ b/(\S+)", change, re.MULTILINE)
        assert name.split("/")[0] in ("dcp", "planners", "server", "storage")
        for hunk in re.split(r"^@@ .*\n", change, flags=re.MULTILINE)[1:]:
            before = [line[1:] for line in hunk.splitlines() if not line.startswith(("+", "\\"))]
            assert "\n".join(before) in (ROOT / name).read_text()
    assert mutant.promise.endswith(".") or len(mutant.promise.split()) > 3
    missing = [test for test in mutant.found_by if not has_test(test) and not (ROOT / test).is_dir()]
    assert not missing, missing
