"""Which file is the truth of a folder, in every state that saves, overwrites and crashes leave."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from dcp.storage.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ReplicaMismatchError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.opening.folder import is_large_metadata_of, open_index
from dcp.storage.formats.opening.joined_indexes import join_indexes
from dcp.storage.formats.torch.metadata.writer import encode_torch_metadata
from dcp.storage.stores.faults import FaultInjectingStore
from dcp.storage.stores.posix.store import PosixStore
from tests.support.formats_indexes import assert_same_index, int64, small_index


def metadata_of(index: CheckpointIndex) -> bytes:
    """The `.metadata` that belongs to an index."""
    save_id = str(index.provenance.get("save_id") or "3f9c2a1b")
    return encode_torch_metadata(index, checkpoint_id="here", save_id=save_id)


def publish(
    folder: Path, index: CheckpointIndex, *, replaced: bytes | None = None, prefix: str = ""
) -> CheckpointIndex:
    """Both files of a save, as a commit leaves them."""
    metadata = metadata_of(index)
    index = dataclasses.replace(
        index,
        torch_metadata_crc=crc32(metadata),
        replaced_torch_metadata_crc=None if replaced is None else crc32(replaced),
    )
    (folder / f"{prefix}.metadata").write_bytes(metadata)
    name = f"{prefix}.manifest.msgpack" if prefix else "manifest.msgpack"
    (folder / name).write_bytes(encode_manifest(index))
    return index


def stock_save(folder: Path, state: dict[str, Any]) -> None:
    """What stock torch leaves in the folder."""
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def test_the_manifest_is_the_truth(tmp_path: Path) -> None:
    """A folder as a commit leaves it opens by its manifest, CRCs and all."""
    index = publish(tmp_path, small_index())
    assert_same_index(open_index(PosixStore(tmp_path)), index)


def test_a_manifest_alone_is_a_checkpoint(tmp_path: Path) -> None:
    """Saved without stock's metadata, or crashed before it was written: the manifest is enough."""
    index = publish(tmp_path, small_index())
    (tmp_path / ".metadata").unlink()
    assert_same_index(open_index(PosixStore(tmp_path)), index)


def test_a_crash_between_the_two_files_leaves_the_new_checkpoint(tmp_path: Path) -> None:
    """The manifest names the .metadata that it replaces, so that one is known to be the old one."""
    stock_save(tmp_path, {"old": torch.ones(3)})
    old = (tmp_path / ".metadata").read_bytes()
    index = publish(tmp_path, small_index(), replaced=old)
    (tmp_path / ".metadata").write_bytes(old)
    assert_same_index(open_index(PosixStore(tmp_path)), index)


def test_stock_torch_overwriting_the_folder_wins(tmp_path: Path) -> None:
    """A .metadata that the manifest does not know was written later: it is the truth."""
    publish(tmp_path, small_index())
    stock_save(tmp_path, {"new": torch.ones(3)})
    index = open_index(PosixStore(tmp_path))
    assert (index.format, list(index.fqns)) == ("torch_dcp", ["new"])


def test_damage_to_our_own_metadata_does_not_hide_the_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit anywhere in .metadata is not taken for an overwrite by stock; nothing of it is read."""
    index = publish(tmp_path, small_index())
    data = (tmp_path / ".metadata").read_bytes()
    for position in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[position] ^= 4
        (tmp_path / ".metadata").write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert_same_index(open_index(PosixStore(tmp_path)), index)
        assert "it is damaged" in caplog.text
        caplog.clear()


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    """It is not papered over with .metadata, which has no checksums; the error names the file."""
    publish(tmp_path, small_index())
    path = tmp_path / "manifest.msgpack"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.msgpack: .*truncated") as caught:
        open_index(PosixStore(tmp_path))
    assert str(caught.value.path).endswith("manifest.msgpack")


def test_stock_checkpoints_open(tmp_path: Path) -> None:
    """A folder that only stock has written opens by its .metadata."""
    stock_save(tmp_path, {"w": torch.ones(2, 3), "step": 7})
    index = open_index(PosixStore(tmp_path))
    assert list(index.fqns) == ["w"] and list(index.objects.fqns) == ["step"]
    assert index.shape(0) == (2, 3)


def test_damaged_stock_metadata_is_an_error_with_its_path(tmp_path: Path) -> None:
    """The decoder's error gets the file's name."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04garbage")
    with pytest.raises(CheckpointFormatError, match=r"\.metadata: ") as caught:
        open_index(PosixStore(tmp_path))
    assert str(caught.value.path).endswith(".metadata")


def rank_index(rank: int, **changes: Any) -> CheckpointIndex:
    """The small index as rank ``rank`` saves it on its own, into files of its own."""
    files = [f"__{rank}_0.3f9c2a1b.distcp", f"__{rank}_1.3f9c2a1b.distcp"]
    return small_index(**({"files": files, "stride_orders": {}} | changes))


def half_index(rank: int) -> CheckpointIndex:
    """Rank 0 has the first rows of the matrix, rank 1 the second, and a tensor of its own."""
    own = f"own.{rank}"
    return CheckpointIndex(
        format="dcp",
        fqns=["model.weight", own],
        dtype_codes=np.array([4, 5], dtype=np.uint8),
        shape_start=int64([0, 2, 3]),
        shape_values=int64([4, 6, 8]),
        requires_grad=np.array([1, 0], dtype=np.uint8),
        chunk_start=int64([0, 1, 2]),
        chunk_offsets=int64([2 * rank, 0, 0]),
        chunk_sizes=int64([2, 6, 8]),
        chunk_files=int64([0, 0]),
        record_offsets=int64([1000 * rank, 1000 * rank + 500]),
        record_lengths=int64([400, 400]),
        payload_offsets=int64([1000 * rank + 200, 1000 * rank + 700]),
        payload_lengths=int64([24, 8]),
        crc_start=int64([0, 1, 2]),
        crcs=np.array([10 + rank, 20 + rank], dtype=np.uint32),
        files=[f"__{rank}_0.3f9c2a1b.distcp"],
        file_sizes=int64([5000 + rank]),
        stride_orders={0: (1, 0)},
        planner_data={"model.weight": ("model", "weight"), own: ("own", rank)},
        provenance={"rank": rank},
    )


def test_rank_local_saves_are_merged(tmp_path: Path) -> None:
    """Without a global file the ranks' own make one index: one tensor's boxes, each with its file."""
    for rank in (0, 1):
        publish(tmp_path, half_index(rank), prefix=f"__{rank}")
    index = open_index(PosixStore(tmp_path))
    assert list(index.fqns) == ["model.weight", "own.0", "own.1"]
    assert [index.box(chunk) for chunk in index.chunks(0)] == [((0, 0), (2, 6)), ((2, 0), (2, 6))]
    assert index.chunk_start.tolist() == [0, 2, 3, 4]
    assert [index.files[file] for file in index.chunk_files] == [
        "__0_0.3f9c2a1b.distcp",
        "__1_0.3f9c2a1b.distcp",
        "__0_0.3f9c2a1b.distcp",
        "__1_0.3f9c2a1b.distcp",
    ]
    assert index.payload_offsets.tolist() == [200, 1200, 700, 1700]
    assert index.crcs.tolist() == [10, 11, 20, 21]
    assert index.file_sizes.tolist() == [5000, 5001]
    assert index.stride_orders == {0: (1, 0)}
    assert index.planner_data == {
        "model.weight": ("model", "weight"),
        "own.0": ("own", 0),
        "own.1": ("own", 1),
    }


def test_a_rank_gets_its_own(tmp_path: Path) -> None:
    """``rank=`` opens that rank's own save if it is there, and the joined one if it is not."""
    parts = [publish(tmp_path, half_index(rank), prefix=f"__{rank}") for rank in (0, 1)]
    assert_same_index(open_index(PosixStore(tmp_path), rank=1), parts[1])
    assert open_index(PosixStore(tmp_path), rank=5).tensor_count == 3


def test_a_global_checkpoint_comes_before_rank_local_ones(tmp_path: Path) -> None:
    """As in stock: leftovers of a rank-local save do not hide the checkpoint of all ranks."""
    publish(tmp_path, half_index(1), prefix="__1")
    index = publish(tmp_path, small_index())
    assert_same_index(open_index(PosixStore(tmp_path), rank=1), index)


def test_rank_local_saves_of_stock_are_merged(tmp_path: Path) -> None:
    """``__{rank}.metadata`` without manifests: stock's ``use_collectives=False``."""
    for rank in (0, 10):
        (tmp_path / f"__{rank}.metadata").write_bytes(metadata_of(half_index(min(rank, 1))))
    (tmp_path / "__0.metadata.tmp").write_bytes(b"not yet")
    index = open_index(PosixStore(tmp_path))
    assert sorted(index.fqns) == ["model.weight", "own.0", "own.1"]
    assert len(index.chunks(index.position["model.weight"])) == 2
    assert open_index(PosixStore(tmp_path), rank=10).position.keys() == {"model.weight", "own.1"}


def test_equal_replicas_are_kept_once(tmp_path: Path) -> None:
    """A box that two ranks saved with the same checksums is one chunk, the lower rank's; objects likewise."""
    joined = join_indexes({1: rank_index(1), 0: rank_index(0)})
    assert joined.chunk_count == 3
    assert {joined.files[file] for file in joined.chunk_files} == set(rank_index(0).files)
    assert list(joined.objects.fqns) == ["optim.lr", "optim.eps"]
    assert joined.objects.values == list(small_index().objects.values)


def test_replicas_that_differ_are_not_merged() -> None:
    """Two ranks with different data under one name: neither is silently dropped."""
    other = rank_index(1, crcs=np.array([1, 0xFFFFFFFF, 78], dtype=np.uint32))
    with pytest.raises(ReplicaMismatchError, match="ranks 0 and 1 each saved step") as caught:
        join_indexes({0: rank_index(0), 1: other})
    assert caught.value.fqn == "step"
    objects = dataclasses.replace(small_index().objects, values=[b"\x07"])
    with pytest.raises(ReplicaMismatchError, match=r"optim\.lr"):
        join_indexes({0: rank_index(0), 1: rank_index(1, objects=objects)})


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype_codes": np.array([3, 9], dtype=np.uint8)},
        {"shape_values": int64([5, 6])},
    ],
)
def test_tensors_that_differ_are_not_merged(changes: dict[str, Any]) -> None:
    """One name with two dtypes or shapes is no checkpoint; the error says which ranks."""
    with pytest.raises(CheckpointFormatError, match=r"model\.weight is .* rank 0 saved, and .* rank 1's"):
        join_indexes({0: rank_index(0), 1: rank_index(1, **changes)})


def test_nothing_committed_is_said_so(tmp_path: Path) -> None:
    """Data files without a commit: the error says that the save did not finish, and what was looked for."""
    store = PosixStore(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint.*manifest\.msgpack.*Check the path"):
        open_index(store)
    (tmp_path / "__0_0.3f9c2a1b.distcp").write_bytes(b"data")
    with pytest.raises(
        CheckpointNotFoundError, match=r"1 data files.*__0_0\.3f9c2a1b\.distcp.*failed"
    ) as caught:
        open_index(store)
    assert caught.value.data_files == 1
    with pytest.raises(CheckpointNotFoundError):
        open_index(PosixStore(tmp_path / "absent"))


class ReplacedWhileRead(PosixStore):
    """A store in which another save publishes between the reads of the manifest and of .metadata."""

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        super().__init__(folder)
        self._folder = folder
        self._index: CheckpointIndex | None = index

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """As the real one, and then the other save happens, once."""
        data = super().read(name, limit_bytes=limit_bytes)
        if self._index is not None and name == "manifest.msgpack":
            publish(self._folder, self._index, replaced=(self._folder / ".metadata").read_bytes())
            self._index = None
        return data


def test_a_save_during_opening_is_not_taken_for_stock(tmp_path: Path) -> None:
    """An old manifest with a new .metadata is a race with another save of ours: the new manifest is read."""
    publish(tmp_path, small_index())
    new = small_index(files=["__0_0.aaaaaaaa.distcp", "__1_0.aaaaaaaa.distcp"], user={"new": True})
    index = open_index(ReplacedWhileRead(tmp_path, new))
    assert (index.format, index.user) == ("dcp", {"new": True})


# -- large ones ----------------------------------------------------------------------------------------------


def large_index(**changes: Any) -> CheckpointIndex:
    """So many chunks that `.metadata` has megabytes."""
    chunks = 50_000
    zeros = np.zeros(chunks, dtype=np.int64)
    fields: dict[str, Any] = {
        "format": "dcp",
        "fqns": ["t"],
        "dtype_codes": np.array([1], np.uint8),
        "shape_start": int64([0, 1]),
        "shape_values": int64([chunks]),
        "requires_grad": np.zeros(1, np.uint8),
        "chunk_start": int64([0, chunks]),
        "chunk_offsets": np.arange(chunks),
        "chunk_sizes": zeros + 1,
        "chunk_files": zeros,
        "record_offsets": np.arange(chunks) * 400,
        "record_lengths": zeros + 400,
        "payload_offsets": np.arange(chunks) * 400 + 100,
        "payload_lengths": zeros + 4,
        "crc_start": np.zeros(chunks + 1, np.int64),
        "files": ["__0_0.3f9c2a1b.distcp"],
        "file_sizes": int64([-1]),
        "provenance": {"save_id": "3f9c2a1b"},
    }
    return CheckpointIndex(**(fields | changes))


def test_a_large_metadata_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """It is not read to find out that it belongs to the manifest, nor if it is damaged further on; one of
    another save, one that was cut, and none are told from it."""
    index = publish(tmp_path, large_index())
    whole = (tmp_path / ".metadata").read_bytes()
    store = FaultInjectingStore(PosixStore(tmp_path))
    assert_same_index(open_index(store), index)
    assert [(step.op, step.name) for step in store.log] == [
        ("read", "manifest.msgpack"),
        ("open_read", ".metadata"),
        ("preadv", ".metadata"),
    ]
    assert store.log[-1].size_bytes <= len(whole) // 16
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    (tmp_path / ".metadata").write_bytes(damaged)
    assert_same_index(open_index(PosixStore(tmp_path)), index)
    others = encode_torch_metadata(index, checkpoint_id="here", save_id="3f9c2a1c")
    for other in (others, whole[:-1], whole + b"x", whole[:5], b""):
        (tmp_path / ".metadata").write_bytes(other)
        assert not is_large_metadata_of(PosixStore(tmp_path), ".metadata", index)
    (tmp_path / ".metadata").unlink()
    assert not is_large_metadata_of(PosixStore(tmp_path), ".metadata", index)


def test_stock_over_a_large_checkpoint_is_believed(tmp_path: Path) -> None:
    """The first bytes are not ours, so all of it is read."""
    publish(tmp_path, large_index())
    stock_save(tmp_path, {"w": torch.ones(3)})
    index = open_index(PosixStore(tmp_path))
    assert (index.format, list(index.fqns)) == ("torch_dcp", ["w"])
