"""Choice between manifest and `.metadata`, in each state that saves, overwrites and crashes leave."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ReplicaMismatchError,
)
from dcp.storage.stores import PosixStore
from tests.support.faulty_store import Fault, FaultInjectingStore, StoreCall
from tests.support.ranks import run_ranks

MANIFEST, METADATA = "manifest.msgpack", ".metadata"


def save(folder: Path, value: int, **more: Any) -> bytes:
    """Save with dcp, and return the `.metadata`."""
    dcp.save({"w": torch.full((3,), value), **more}, checkpoint_id=folder, no_dist=True)
    return (folder / METADATA).read_bytes()


def seen(folder: Path) -> tuple[str, int]:
    """Return the format that a reader detects, and the loaded value."""
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder, unexpected="ignore", no_dist=True)
    return dcp.open_index(folder).format, int(state["w"][0])


def test_a_crash_before_metadata_leaves_the_new_checkpoint(tmp_path: Path) -> None:
    """The manifest names the `.metadata` that the save replaces, so a reader ignores the old `.metadata`."""
    stock.save({"w": torch.full((3,), 1)}, checkpoint_id=tmp_path, no_dist=True)
    old = (tmp_path / METADATA).read_bytes()
    save(tmp_path, 2)
    (tmp_path / METADATA).write_bytes(old)
    assert seen(tmp_path) == ("dcp", 2)


def test_damaged_metadata_does_not_hide_the_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A `.metadata` with a flipped bit is reported as damaged, and not taken for a save of stock torch."""
    data = save(tmp_path, 1)
    for position in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[position] ^= 4
        (tmp_path / METADATA).write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert dcp.open_index(tmp_path).format == "dcp"
        assert "it is damaged" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("name", [MANIFEST, METADATA])
def test_a_damaged_file_is_an_error_with_its_path(tmp_path: Path, name: str) -> None:
    """A reader does not use the other file or older data in place of a damaged file."""
    save(tmp_path, 1)
    if name == METADATA:
        (tmp_path / MANIFEST).unlink()
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        (CorruptCheckpointError, CheckpointFormatError), match=name.replace(".", r"\.")
    ) as caught:
        dcp.open_index(tmp_path)
    assert str(caught.value.path) == str(path)


def test_the_error_without_a_commit_says_so(tmp_path: Path) -> None:
    """With data files but no commit, the error says that a save failed and which files are missing."""
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint.*manifest\.msgpack.*Check the path"):
        dcp.open_index(tmp_path)
    (tmp_path / "__0_0.3f9c2a1b.distcp").write_bytes(b"data")
    with pytest.raises(CheckpointNotFoundError, match=r"1 data files.*__0_0\..*failed") as caught:
        dcp.open_index(tmp_path)
    assert caught.value.data_files == 1


# -- ranks that save on their own ----------------------------------------------------------------------------


def save_alone(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Save a part of a matrix, a replica, and a tensor that only this rank has, without collectives."""
    part: Any = torch.arange(24.0).view(4, 6)[2 * rank : 2 * rank + 2].clone()
    part.global_shape, part.global_offsets = (4, 6), ((2 * rank, 0),)
    part.local_offsets, part.local_sizes = ((0, 0),), ((2, 6),)
    same = torch.full((2,), 7.0 + (rank if kind == "differ" else 0))
    state = {"m": {"w": part}, "same": same, f"own.{rank}": torch.full((3,), rank), "lr": 0.1}
    if kind == "shapes":
        state["same"] = torch.ones(2 + rank)
    if kind == "stock":
        stock.save({f"own.{rank}": state[f"own.{rank}"]}, checkpoint_id=folder, use_collectives=False)
    else:
        dcp.save(state, checkpoint_id=folder, use_collectives=False)
    dist.barrier()


def test_saves_without_collectives_are_merged(tmp_path: Path) -> None:
    """The merged index has each rank's box of the matrix, equal replicas once, and single ranks' entries."""
    run_ranks(2, save_alone, str(tmp_path), "")
    index = dcp.open_index(tmp_path)
    assert set(index.fqns) == {"m.w", "same", "own.0", "own.1"} and list(index.objects.fqns) == ["lr"]
    assert [index.box(chunk) for chunk in index.chunks(index.position["m.w"])] == [
        ((0, 0), (2, 6)),
        ((2, 0), (2, 6)),
    ]
    assert len(index.chunks(index.position["same"])) == 1
    found = dcp.read(tmp_path)
    assert torch.equal(found["m"]["w"], torch.arange(24.0).view(4, 6))
    assert found["own.1"].tolist() == [1] * 3
    assert set(dcp.open_index(tmp_path, rank=1).fqns) == {"m.w", "same", "own.1"}
    assert len(dcp.open_index(tmp_path, rank=5).fqns) == 4
    save(tmp_path, 5)
    assert seen(tmp_path) == ("dcp", 5)  # a later save of all ranks replaces the saves of single ranks


def test_stocks_saves_without_collectives_are_merged(tmp_path: Path) -> None:
    """Several ``__{rank}.metadata`` are merged without manifests; unfinished files are ignored."""
    run_ranks(2, save_alone, str(tmp_path), "stock")
    (tmp_path / "__0.metadata.tmp").write_bytes(b"not yet")
    assert set(dcp.open_index(tmp_path).fqns) == {"own.0", "own.1"}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("differ", ReplicaMismatchError, "ranks 0 and 1 saved 'same' independently"),
        ("shapes", CheckpointFormatError, r"'same' is .* in the part of rank 0, but .* rank 1,"),
    ],
)
def test_contradictory_saves_are_not_merged(tmp_path: Path, kind: str, error: Any, message: str) -> None:
    """Different data of two ranks under one name is an error; no rank's data is dropped silently."""
    run_ranks(2, save_alone, str(tmp_path), kind)
    with pytest.raises(error, match=message):
        dcp.open_index(tmp_path)


# -- saves while it is opened --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MANIFEST, METADATA])
def test_a_save_during_opening_is_not_taken_for_stock(tmp_path: Path, name: str) -> None:
    """An old manifest with a new `.metadata` is a running save of dcp: a load gets the new checkpoint."""
    folder = tmp_path / "x"
    save(folder, 1)

    def overtake(operation: StoreCall) -> None:
        save(folder, 2)

    asked = {MANIFEST: "read", METADATA: "open_read"}[name]
    store = FaultInjectingStore(PosixStore(folder), Fault(asked, name=name, hook=overtake))
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    reader = dcp.FileSystemReader("x", open_store=lambda _: store)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["w"].tolist() == [2] * 3
