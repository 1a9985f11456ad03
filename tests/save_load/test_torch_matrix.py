"""The matrix of writers and readers, with the installed torch only."""

import sys
from pathlib import Path

import pytest

from tests.support.torch_matrix import matrix, table


@pytest.mark.exhaustive
def test_stock_and_dcp_read_each_other(tmp_path: Path) -> None:
    """dcp and stock torch load each other's checkpoints of two ranks, on one rank and on two resharded."""
    found = matrix([sys.executable], tmp_path)
    assert [len(answers) for answers in found.values()] == [2, 2]
    assert not [wrong for answers in found.values() for wrong in answers.values() if wrong], found
    assert table(found).splitlines()[-1].endswith("| yes | yes |")
