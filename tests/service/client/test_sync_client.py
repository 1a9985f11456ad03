from __future__ import annotations

import pytest

from tests.support.sync_client import ASYNCHRONOUS, MODULES, SYNCHRONOUS, synchronous


@pytest.mark.parametrize("module", MODULES)
def test_the_waiting_client_is_made_of_the_awaiting_one(module: str) -> None:
    """Nobody edits two files: ``make sync-client`` writes the one that is compared here."""
    assert (SYNCHRONOUS / module).read_text() == synchronous(module), "make sync-client"


def test_no_module_is_left_out() -> None:
    """Each module of the one folder has its like in the other."""
    for folder in (ASYNCHRONOUS, SYNCHRONOUS):
        assert {path.name for path in folder.glob("*.py")} == {*MODULES, "__init__.py"}
