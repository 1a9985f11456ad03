"""Every seeded fault still can be seeded, and names tests that are there."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.mutants import MUTANTS, ROOT, Mutant, mutants
from tests.support.suite import has_test

ALL = mutants()


def test_there_are_as_many_as_promised() -> None:
    """Sixty, over everything that the README promises."""
    assert len(ALL) >= 60 and len({mutant.path.parent for mutant in ALL}) >= 5


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_fault_applies_and_names_its_promise_and_tests(mutant: Mutant) -> None:
    """A patch of the product alone, in the present tree; `make mutants` runs it."""
    check = subprocess.run(["git", "apply", "--check", mutant.path], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    changed = set(re.findall(r"^\+\+\+ b/(\S+)", mutant.path.read_text(), re.MULTILINE))
    assert changed and all(name.split("/")[0] in ("dcp", "planners", "server", "storage") for name in changed)
    assert mutant.promise.endswith(".") or len(mutant.promise.split()) > 3
    missing = [test for test in mutant.found_by if not has_test(test) and not (ROOT / test).is_dir()]
    assert not missing, missing


def test_each_patch_is_read() -> None:
    """None lies where `make mutants` does not look."""
    assert {mutant.path for mutant in ALL} == set(MUTANTS.rglob("*.patch"))
