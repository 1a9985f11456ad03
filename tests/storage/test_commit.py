from pathlib import Path

import pytest

from dcp.storage.commit import Names, previous_state
from dcp.storage.errors import CheckpointConflictError, CheckpointNotFoundError
from dcp.storage.formats.manifest import METADATA_NAME
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from tests.support.versions import save_version


def test_a_look_that_another_commit_overtakes_is_repeated(tmp_path: Path) -> None:
    """`.metadata` may vanish between being listed and being read: another writer has replaced the save."""
    save_version(tmp_path / "x", 1)
    inner = PosixStore(tmp_path / "x")
    gone = Fault("read", name=METADATA_NAME, hook=lambda operation: inner.delete(METADATA_NAME))
    state = previous_state(FaultInjectingStore(inner, gone), Names())
    assert state.manifest is not None
    assert state.metadata is None


def test_a_look_that_never_ends_is_a_conflict(tmp_path: Path) -> None:
    """Writers that replace each other without pause do not hold a save up for ever."""
    save_version(tmp_path / "x", 1)
    gone = Fault("read", name=METADATA_NAME, onwards=True, error=CheckpointNotFoundError("gone again"))
    with pytest.raises(CheckpointConflictError, match="another writer"):
        previous_state(FaultInjectingStore(PosixStore(tmp_path / "x"), gone), Names())
