"""The ledger of a conversion: who holds it, also at the instant at which another one removes it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp.conversion.publishing.ledger import LEDGER_NAME, LocalLedger
from dcp.storage.errors import CheckpointConflictError, StorageError


def begun(folder: Path, save_id: str) -> LocalLedger:
    """One that somebody holds, with a file of its output."""
    ledger = LocalLedger(folder)
    assert not ledger.open("f")
    ledger.begin("f", save_id)
    (ledger.output / "data").write_bytes(b"x")
    return ledger


@pytest.mark.parametrize("at", ["open", "flock"])
def test_one_that_is_removed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Between the making of the folder, the opening of the file and its lock."""
    first = begun(tmp_path / "work", "0000000a")
    module: Any = os if at == "open" else fcntl
    real: Callable[..., Any] = getattr(module, at)

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        first.remove()
        return real(*args)

    monkeypatch.setattr(module, at, late)
    second = LocalLedger(tmp_path / "work")
    assert not second.open("f") and second.done == []
    second.begin("f", "0000000b")
    third = LocalLedger(tmp_path / "work")
    with pytest.raises(CheckpointConflictError):
        third.open("f")
    assert second.output.is_dir()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_close_that_fails_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor is closed all the same, and its number may be another file's by then."""
    ledger, close = begun(tmp_path / "work", "0000000a"), os.close

    def failing(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", failing)
    ledger.close()
    monkeypatch.undo()
    with (tmp_path / "mine").open("wb") as mine:
        ledger.close()
        mine.write(b"x")
    assert LocalLedger(tmp_path / "work").open("f")


def test_a_file_system_that_keeps_a_removed_file_while_it_is_open_keeps_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, and FUSE: under another name, in the folder, until it is closed."""
    ledger, hidden = begun(tmp_path / "work", "0000000a"), tmp_path / "work" / ".nfs0001"
    unlink, close = Path.unlink, os.close

    def renaming(path: Path, **options: Any) -> None:
        if path.name == LEDGER_NAME:
            path.rename(hidden)
        else:
            unlink(path, **options)

    def closing(descriptor: int) -> None:
        close(descriptor)
        unlink(hidden, missing_ok=True)

    monkeypatch.setattr(Path, "unlink", renaming)
    monkeypatch.setattr(os, "close", closing)
    ledger.remove()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_nobody_begins_before_all_of_the_last_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is built anew would be removed with what was there."""
    first, refused = begun(tmp_path / "work", "0000000a"), []
    unlink = Path.unlink

    def looked_at(path: Path, **options: Any) -> None:
        if path.name == LEDGER_NAME:
            assert [entry.name for entry in path.parent.iterdir()] == [LEDGER_NAME]
            with pytest.raises(CheckpointConflictError):
                LocalLedger(path.parent).open("f")
            refused.append(path)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", looked_at)
    first.remove()
    assert len(refused) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "link", "link/below"])
def test_a_place_that_is_no_folder_is_an_error(tmp_path: Path, name: str) -> None:
    """And nothing that is waited for."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError):
        LocalLedger(tmp_path / name).open("f")
