"""A manifest that is published, of which nobody can tell any more: no older `.metadata` stays beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.errors import StorageError


def test_a_manifest_that_can_be_neither_synced_nor_read_leaves_no_older_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's fsync after its rename fails, and so does the look at it: stock torch would load what was
    there before."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    before = (tmp_path / MANIFEST_NAME).stat().st_ino
    real_fsync, real_open, left = os.fsync, os.open, {"fsync", "open"}

    def fails_once(name: str, is_it: bool) -> None:
        if is_it and name in left and (tmp_path / MANIFEST_NAME).stat().st_ino != before:
            left.discard(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync(descriptor: int) -> None:
        fails_once("fsync", "open" in left)
        real_fsync(descriptor)

    def opened(path: Any, *args: Any, **options: Any) -> int:
        fails_once("open", "fsync" not in left and os.fspath(path).endswith(MANIFEST_NAME))
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(StorageError, match="the one before was removed") as caught:
        dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert (left, caught.value.committed) == (set(), True)
    assert not (tmp_path / ".metadata").exists()
    state = {"w": torch.ones(3)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert not state["w"].any()
