"""Stock torch's `.metadata`: each kind of real save, older layouts, and invalid files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from tests.support.formats_indexes import (
    GOLDEN,
    assert_same,
    decode,
    decode_torch_metadata,
    index_of,
    rich_state_dict,
    small_metadata,
    stock_save,
)


@pytest.mark.parametrize(
    "state_dict",
    [rich_state_dict, lambda: {"a": {"b": 1}, "c": "x"}, lambda: {"t": torch.ones(3)}, dict],
    ids=["rich", "objects", "tensor", "nothing"],
)
def test_the_index_of_real_saves(tmp_path: Path, state_dict: Callable[[], dict[str, Any]]) -> None:
    """The index of a stock save agrees with its Metadata objects."""
    metadata = stock_save(tmp_path, state_dict())
    index = decode_torch_metadata((tmp_path / ".metadata").read_bytes())
    assert_same(index, index_of(metadata))
    assert index.format == "torch_dcp"
    assert index.provenance["save_id"] == metadata.storage_meta.save_id  # type: ignore[union-attr]
    assert index.provenance["checkpoint_id"] == str(tmp_path)
    assert index.provenance["torch_metadata_version"] == "1.0.0"
    for name in index.files:
        assert (tmp_path / name).is_file()


def test_golden_files() -> None:
    """Committed files of two ranks, with DTensor and ShardedTensor, give the same index."""
    index = decode_torch_metadata((GOLDEN / "torch-2.13-two-ranks.metadata").read_bytes())
    boxes = {fqn: [index.box(chunk) for chunk in index.chunks(row)] for fqn, row in index.position.items()}
    assert boxes == {
        "rows": [((0, 0), (3, 4)), ((3, 0), (2, 4))],
        "columns": [((0, 0), (4, 2)), ((0, 2), (4, 1))],
        "sharded": [((0, 0), (2, 3)), ((2, 0), (2, 3))],
        "few": [((0,), (1,)), ((1,), (0,))],
        "replicated": [((0,), (2,))],
        "plain": [((0,), (3,))],
    }
    assert sorted(index.files) == ["__0_0.distcp", "__1_0.distcp"]
    assert index.objects.fqns == ["step"]
    local = decode_torch_metadata((GOLDEN / "torch-2.13-rank-1-alone.metadata").read_bytes())
    assert (local.fqns, local.files) == (["mine"], ["__1_0.distcp"])
    assert local.shape(0) == (2,)


def test_fields_that_older_versions_lack() -> None:
    """Metadata without version, storage_meta (torch 2.3) or its modules (torch 2.6) gives the same index."""
    metadata = small_metadata()
    expected = index_of(metadata)
    del metadata.storage_meta.modules  # type: ignore[union-attr]
    assert_same(decode(metadata), expected)
    del metadata.version, metadata.storage_meta
    index = decode(metadata)
    assert_same(index, expected)
    assert index.provenance == {}


def test_transformed_entries_are_named() -> None:
    """An entry with a stream transform, such as stock's zstd, is refused."""
    metadata = small_metadata()
    metadata.storage_data[MetadataIndex("t", [1, 0])].transform_descriptors = ["stream.zstd"]
    with pytest.raises(UnsupportedFormatError, match=r"'t'.*transform"):
        decode(metadata)


def test_chunks_without_a_file_are_corrupt() -> None:
    """A chunk or object without a file, as after a failed writer thread, is an error with its name."""
    for key in (MetadataIndex("t", [1, 0]), MetadataIndex("o")):
        metadata = small_metadata()
        del metadata.storage_data[key]
        with pytest.raises(CorruptCheckpointError, match="did not complete") as caught:
            decode(metadata)
        assert caught.value.fqn == key.fqn


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"storage_data": None}, UnsupportedFormatError, "custom storage writer"),
        ({"storage_data": {"t": 1}}, CheckpointFormatError, "MetadataIndex"),
        ({"storage_data": {MetadataIndex("t", [0, 0]): (1, 2)}}, UnsupportedFormatError, "'t'"),
        ({"storage_data": {MetadataIndex("t" * 20_000): (1, 2)}}, CheckpointFormatError, "16384 characters"),
        ({"state_dict_metadata": {"t": 1}}, CheckpointFormatError, "int"),
        ({"storage_meta": "text"}, CheckpointFormatError, "StorageMeta"),
    ],
)
def test_values_of_wrong_types_are_named(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    """A value of a type that stock torch does not write is an error that names the place."""
    with pytest.raises(error, match=match):
        decode(small_metadata(**changes))


def change_tensor(**changes: Any) -> Metadata:
    """Return the small metadata with a changed tensor entry."""
    metadata = small_metadata()
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    metadata.state_dict_metadata["t"] = dataclasses.replace(entry, **changes)
    return metadata


def change_chunk(offsets: Any, sizes: Any) -> Metadata:
    """Return the small metadata with the only chunk of the tensor changed."""
    return change_tensor(chunks=[ChunkStorageMetadata(offsets, sizes)])


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (change_tensor(size=(2, 1.5)), "integers"),
        (change_tensor(size="ab"), "integers"),
        (change_tensor(size=(-2, 3)), "negative|outside"),
        (change_tensor(size=(1,) * 65), "integers"),
        (change_tensor(chunks=[1]), "ChunkStorageMetadata"),
        (change_tensor(properties=TensorProperties(torch.qint8)), "qint8"),
        (change_tensor(properties=TensorProperties(torch.float32, layout=torch.sparse_coo)), "sparse"),
        (change_tensor(properties=TensorProperties(torch.float32, requires_grad=1)), "requires_grad"),  # type: ignore[arg-type]
        (change_chunk((0, 0), (1 << 40, 1 << 40)), "int64"),
        (change_chunk((0, 0), (-1, 3)), "negative"),
        (change_chunk((1 << 70, 0), (1, 1)), "did not complete"),
    ],
)
def test_invalid_tensor_entries_are_refused(metadata: Metadata, match: str) -> None:
    """Invalid sizes, boxes outside the tensor and properties that dcp cannot hold are refused."""
    with pytest.raises((CheckpointFormatError, CorruptCheckpointError), match=match):
        decode(metadata)


def test_shared_chunk_lists_are_refused() -> None:
    """A list of chunks shared by thousands of tensors is refused: a small file would become a huge index."""
    metadata = small_metadata()
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks = entry.chunks * 500
    metadata.state_dict_metadata = {f"t{number}": entry for number in range(500)}
    metadata.storage_data = {
        MetadataIndex(fqn, [row, 0]): _StorageInfo("f", 0, 1)
        for fqn in metadata.state_dict_metadata
        for row in range(2)
    }
    with pytest.raises(CheckpointFormatError, match="one list for many tensors"):
        decode(metadata)


def test_self_referring_planner_data() -> None:
    """Self-referring planner data is dropped, and exponentially repeated data is refused, both quickly."""
    endless: list[Any] = []
    endless.append(endless)
    assert "deeper" in decode(small_metadata(planner_data=endless)).provenance["planner_data_dropped"]
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs] * 10
    with pytest.raises(CheckpointFormatError, match="repeats"):
        decode(small_metadata(planner_data=laughs))
