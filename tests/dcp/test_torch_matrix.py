"""The matrix of writers and readers, with the one torch that is installed here."""

import sys
from pathlib import Path

import pytest

from dcp.storage.torch_compat import TESTED
from tests.support.torch_matrix import OURS, matrix, table


@pytest.mark.exhaustive
def test_stock_and_ours_read_each_other(tmp_path: Path) -> None:
    """Written by two ranks, read by one and, sharded otherwise, by two."""
    found = matrix([sys.executable], tmp_path)
    assert [len(answers) for answers in found.values()] == [2, 2]
    assert not [wrong for answers in found.values() for wrong in answers.values() if wrong], found
    assert table(found).splitlines()[-1].endswith("| yes | yes |")


def test_it_knows_the_versions_that_ours_is_for() -> None:
    """By itself, since it runs where ours cannot be imported."""
    assert OURS == TESTED
