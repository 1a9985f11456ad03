"""Stock torch's `.metadata`: every kind of real save, older layouts, and all that is refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedTensorProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
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
    [
        rich_state_dict,
        lambda: {"a": {"b": 1}, "c": "x"},
        lambda: {"t": torch.ones(3)},
        dict,
    ],
    ids=["rich", "objects", "tensor", "nothing"],
)
def test_real_saves(tmp_path: Path, state_dict: Callable[[], dict[str, Any]]) -> None:
    """The index of a stock save is the one its Metadata objects say."""
    metadata = stock_save(tmp_path, state_dict())
    index = decode_torch_metadata((tmp_path / ".metadata").read_bytes())
    assert_same(index, index_of(metadata))
    assert index.format == "torch_dcp"
    assert index.provenance["save_id"] == metadata.storage_meta.save_id  # type: ignore[union-attr]
    assert index.provenance["checkpoint_id"] == str(tmp_path)
    assert index.provenance["torch_metadata_version"] == "1.0.0"
    for name in index.files:
        assert (tmp_path / name).is_file()


def test_several_files(tmp_path: Path) -> None:
    """One file an entry, and several threads: each chunk names the file that holds it."""
    metadata = stock_save(tmp_path, rich_state_dict(), single_file_per_rank=False, thread_count=2)
    index = decode_torch_metadata((tmp_path / ".metadata").read_bytes())
    assert_same(index, index_of(metadata))
    assert len(index.files) == index.chunk_count + len(index.objects)


def test_golden_files() -> None:
    """Committed files of two ranks, with DTensor and ShardedTensor, still give the same index."""
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
    """Without version, storage_meta (torch 2.3) or its modules (torch 2.6) nothing else changes."""
    metadata = small_metadata()
    expected = index_of(metadata)
    del metadata.storage_meta.modules  # type: ignore[union-attr]
    assert_same(decode(metadata), expected)
    del metadata.version, metadata.storage_meta
    index = decode(metadata)
    assert_same(index, expected)
    assert index.provenance == {}


def test_plans_that_megatron_keeps() -> None:
    """Megatron-Core adds the plans of all ranks, which say nothing more of what is stored."""
    metadata = small_metadata()
    expected = index_of(metadata)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([2]))
    items = [
        WriteItem(MetadataIndex("t", torch.Size([0])), WriteItemType.SHARD, tensor_data=data),
        WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(3)),
    ]
    metadata.all_local_plans = [SavePlan(items, storage_data=_StoragePrefix("__0_"))]  # type: ignore[attr-defined]
    assert_same(decode(metadata), expected)


def test_sharded_tensor_properties() -> None:
    """Up to torch 2.3 the properties were those of ShardedTensor, from another module."""
    metadata = small_metadata()
    tensor = metadata.state_dict_metadata["t"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.properties = ShardedTensorProperties(torch.float32, requires_grad=True)  # type: ignore[assignment]
    data = pickle.dumps(metadata)
    assert b"torch.distributed._shard.sharded_tensor.metadata" in data
    index = decode_torch_metadata(data)
    assert index.requires_grad.tolist() == [1]
    assert index.dtype(0).name == "float32"


def test_repeated_and_empty_chunks() -> None:
    """Replicas that were not deduplicated count once; an empty shard hides no chunk at its offset."""
    properties = TensorProperties(torch.float32)

    def chunk(offset: int, size: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))

    entries = {
        "twice": TensorStorageMetadata(properties, torch.Size([4]), [chunk(0, 4), chunk(0, 4)]),
        "empty": TensorStorageMetadata(properties, torch.Size([4]), [chunk(0, 0), chunk(0, 4)]),
    }
    places = {MetadataIndex(fqn, [0]): _StorageInfo("f", 0, 900) for fqn in entries}
    index = decode(Metadata(entries, storage_data=places))  # type: ignore[arg-type]
    assert [index.box(row) for row in range(index.chunk_count)] == [((0,), (4,)), ((0,), (4,))]
    clash = TensorStorageMetadata(properties, torch.Size([4]), [chunk(0, 4), chunk(0, 3)])
    with pytest.raises(CheckpointFormatError, match="begin at"):
        decode(Metadata({"twice": clash}, storage_data=places))


def test_memory_format_by_name() -> None:
    """Enums that were pickled as getattr of a name are understood, and getattr gives nothing else."""
    data = pickle.dumps(small_metadata(), protocol=2)
    enum = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    begin = data.index(enum)
    end = data.index(b"R", begin + len(enum))
    named = (
        data[:begin] + b"cbuiltins\ngetattr\n(" + enum + b"X\x17\0\0\0TORCH_CONTIGUOUS_FORMATt" + data[end:]
    )
    assert_same(decode_torch_metadata(named), index_of(small_metadata()))
    hostile = named.replace(b"X\x17\0\0\0TORCH_CONTIGUOUS_FORMAT", b"X\x0b\0\0\0__globals__")
    with pytest.raises(CheckpointFormatError, match="attribute"):
        decode_torch_metadata(hostile)


def test_transformed_entries_are_named() -> None:
    """An entry that went through a stream transform is refused by name; an empty list is no transform."""
    metadata = small_metadata()
    info = metadata.storage_data[MetadataIndex("t", [1, 0])]
    info.transform_descriptors = []
    assert_same(decode(metadata), index_of(small_metadata()))
    info.transform_descriptors = ["stream.zstd"]
    with pytest.raises(UnsupportedFormatError, match=r"'t'.*transform") as caught:
        decode(metadata)
    assert caught.value.fqn == "t"


def test_missing_place_is_corruption() -> None:
    """A chunk or object that no file holds, as after a failed writer thread, is an error with its name."""
    for key in (MetadataIndex("t", [1, 0]), MetadataIndex("o")):
        metadata = small_metadata()
        del metadata.storage_data[key]
        with pytest.raises(CorruptCheckpointError, match="did not complete") as caught:
            decode(metadata)
        assert caught.value.fqn == key.fqn


class Custom:
    """A class that is on nobody's list."""


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "storage_meta", "state_dict_metadata"])
def test_unknown_classes_are_named(place: str) -> None:
    """Wherever a foreign class stands, the error names it."""
    metadata = small_metadata(**{place: {"x": Custom()}})
    with pytest.raises(UnsafeObjectError, match="Custom") as caught:
        decode(metadata)
    assert caught.value.global_name.endswith("test_torch_metadata_read.Custom")


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"storage_data": None}, UnsupportedFormatError, "another storage writer"),
        ({"storage_data": {"t": 1}}, CheckpointFormatError, "MetadataIndex"),
        ({"storage_data": {MetadataIndex("t", [0, 0]): (1, 2)}}, UnsupportedFormatError, "'t'"),
        ({"storage_data": {MetadataIndex("t" * 20_000): (1, 2)}}, CheckpointFormatError, "length"),
        ({"state_dict_metadata": None}, CheckpointFormatError, "state_dict_metadata"),
        ({"state_dict_metadata": {"t": 1}}, CheckpointFormatError, "int"),
        ({"state_dict_metadata": {1: BytesStorageMetadata()}}, CheckpointFormatError, "name"),
        ({"storage_meta": "text"}, CheckpointFormatError, "StorageMeta"),
    ],
)
def test_wrong_kinds(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    """A value of a kind that stock does not put there is an error that says where."""
    with pytest.raises(error, match=match):
        decode(small_metadata(**changes))


def change_tensor(**changes: Any) -> Metadata:
    """The small metadata with its tensor entry changed."""
    metadata = small_metadata()
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    metadata.state_dict_metadata["t"] = dataclasses.replace(entry, **changes)
    return metadata


def change_chunk(offsets: Any, sizes: Any) -> Metadata:
    """The small metadata with its tensor's only chunk changed."""
    return change_tensor(chunks=[ChunkStorageMetadata(offsets, sizes)])


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (change_tensor(size=(2, 1.5)), "integers"),
        (change_tensor(size=(2, True)), "integers"),
        (change_tensor(size="ab"), "integers"),
        (change_tensor(size=(2,)), "dimensions"),
        (change_tensor(size=(-2, 3)), "negative|outside"),
        (change_tensor(size=(1, 3)), "outside"),
        (change_tensor(size=(1,) * 65), "integers"),
        (change_tensor(chunks=None), "list"),
        (change_tensor(chunks=[1]), "ChunkStorageMetadata"),
        (change_tensor(properties=None), "properties"),
        (change_tensor(properties=TensorProperties(torch.qint8)), "qint8"),
        (change_tensor(properties=TensorProperties(torch.float32, layout=torch.sparse_coo)), "sparse"),
        (change_tensor(properties=TensorProperties(torch.float32, requires_grad=1)), "requires_grad"),  # type: ignore[arg-type]
        (change_chunk((0, 0), (1 << 40, 1 << 40)), "int64"),
        (change_chunk((0, 0), (-1, 3)), "negative"),
        (change_chunk((0, 0), None), "integers"),
        (change_chunk((1 << 70, 0), (1, 1)), "did not complete"),
    ],
)
def test_wrong_tensors(metadata: Metadata, match: str) -> None:
    """Sizes that are no sizes, boxes outside the tensor and properties that dcp cannot hold are refused."""
    with pytest.raises((CheckpointFormatError, CorruptCheckpointError), match=match):
        decode(metadata)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "a\0b", "C:\\x"])
def test_file_names_that_leave_the_folder(name: str) -> None:
    """A relative path that is not a plain file name is refused."""
    metadata = small_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    with pytest.raises(CheckpointFormatError, match="plain name"):
        decode(metadata)


@pytest.mark.parametrize(
    ("offset", "length", "match"),
    [(-1, 5, "negative"), (5, -1, "negative"), (1 << 63, 0, "int64"), ("0", 5, "int64")],
)
def test_wrong_ranges(offset: Any, length: Any, match: str) -> None:
    """A range that cannot be one is refused."""
    metadata = small_metadata()
    metadata.storage_data[MetadataIndex("t", [0, 0])] = _StorageInfo("f", offset, length)
    with pytest.raises(CheckpointFormatError, match=match):
        decode(metadata)


def test_shared_chunk_lists_are_refused() -> None:
    """A list of chunks that thousands of tensors share would make a small file a huge index."""
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
    with pytest.raises(CheckpointFormatError, match="list of its own"):
        decode(metadata)


def test_endless_planner_data() -> None:
    """Self-referring data is dropped, data that repeats itself exponentially is refused, both at once."""
    endless: list[Any] = []
    endless.append(endless)
    assert "deeper" in decode(small_metadata(planner_data=endless)).provenance["planner_data_dropped"]
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs] * 10
    with pytest.raises(CheckpointFormatError, match="repeats"):
        decode(small_metadata(planner_data=laughs))
