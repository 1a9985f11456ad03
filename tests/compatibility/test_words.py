"""Messages and metadata that programs compare with torch's: equal phrases, and the save id of the writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException

import dcp

PACKAGES: dict[str, Any] = {"dcp": dcp, "stock": stock}


def _state() -> dict[str, Any]:
    return {"w": torch.ones(3), "nested": {"lr": 0.5}}


def _load(package: Any, root: Path, **changes: Any) -> None:
    package.load(_state() | changes, checkpoint_id=root, no_dist=True)


def _save_again(package: Any, root: Path) -> None:
    writer = package.FileSystemWriter(root, overwrite=False)
    package.save(_state(), storage_writer=writer, no_dist=True)


FAILURES: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    "missing": (
        "Missing key in checkpoint state_dict: ",
        lambda package, root: _load(package, root, absent=torch.ones(1)),
    ),
    "missing value": (
        "Missing key in checkpoint state_dict: ",
        lambda package, root: _load(package, root, nested={"lr": 0.5, "absent": 1}),
    ),
    "shape": ("Size mismatch between saved ", lambda package, root: _load(package, root, w=torch.ones(4))),
    "exists": ("Checkpoint already exists", _save_again),
    "no place": (
        "`checkpoint_id` must be specified if storage_reader/storage_writer is None",
        lambda package, root: package.load(_state(), no_dist=True),
    ),
    "no kind of place": (
        "Cannot detect which StorageReader or StorageWriter to use",
        lambda package, root: package.load(_state(), checkpoint_id="no-such://x/y", no_dist=True),
    ),
    "one name": (
        "duplicated flatten key",
        lambda package, root: package.save(
            {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, checkpoint_id=root / "other", no_dist=True
        ),
    ),
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("failure", FAILURES)
def test_messages_have_torchs_phrases(package: str, failure: str, tmp_path: Path) -> None:
    """An error has torch's phrase, by which programs decide on a retry."""
    stock.save(_state(), checkpoint_id=tmp_path, no_dist=True)
    words, fail = FAILURES[failure]
    with pytest.raises((Exception, CheckpointException)) as caught:
        fail(PACKAGES[package], tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("writers", PACKAGES)
@pytest.mark.parametrize("readers", PACKAGES)
def test_metadata_has_the_save_id_of_the_writer(writers: str, readers: str, tmp_path: Path) -> None:
    """The save id is in the metadata of a save and of each package's reader."""
    writer = PACKAGES[writers].FileSystemWriter(tmp_path)
    metadata = PACKAGES[writers].save(_state(), storage_writer=writer, no_dist=True)
    reader = PACKAGES[readers].FileSystemReader(tmp_path)
    found = reader.read_metadata().storage_meta
    assert found.save_id == writer.save_id
    if metadata.storage_meta is None:  # stock before 2.12 writes it to the file only
        assert writers == "stock" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    else:
        assert metadata.storage_meta.save_id == writer.save_id
    assert found.load_id == reader.load_id
