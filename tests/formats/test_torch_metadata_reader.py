"""Stock torch's `.metadata` as an index: every kind of real save, older layouts, and back."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.distributed import checkpoint as stock
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedTensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp.storage.errors import (
    CheckpointFormatError,
)
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.metadata.reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata.writer import encode_torch_metadata
from tests.support.formats_metadata import (
    GOLDEN,
    assert_same,
    decode,
    index_of,
    indexes,
    read_metadata,
    rich_state_dict,
    small_metadata,
    stock_save,
)
from tests.support.ranks import run_ranks


def optimizer_state_dict() -> dict[str, Any]:
    """A model and its AdamW after a step, as a trainer saves them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


@pytest.mark.parametrize(
    "state_dict",
    [
        rich_state_dict,
        optimizer_state_dict,
        lambda: {"a": {"b": 1}, "c": "x"},
        lambda: {"t": torch.ones(3)},
        dict,
    ],
    ids=["rich", "optimizer", "objects", "tensor", "nothing"],
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


def test_safetensors_serialization(tmp_path: Path) -> None:
    """Stock's safetensors serialization records offset and data length, which the index keeps as they are."""
    state_dict = {"a": torch.ones(4, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}
    metadata = stock_save(tmp_path, state_dict, serialization_format=SerializationFormat.SAFETENSORS)
    index = decode_torch_metadata((tmp_path / ".metadata").read_bytes())
    assert_same(index, index_of(metadata))
    assert index.record_lengths.tolist() == [64, 6]


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


def two_ranks_of_torch(rank: int, world_size: int, folder: Path) -> None:
    """Saves of stock torch, by both ranks together and by each alone."""
    mesh = DeviceMesh("cpu", [0, 1])
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    state_dict = {
        "rows": distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(12).reshape(4, 3), mesh, [Shard(1)]),
        "sharded": sharded_tensor.ones(spec, 4, 3),
        "few": distribute_tensor(torch.ones(1, dtype=torch.bfloat16), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.ones(2), mesh, [Replicate()]),
        "plain": torch.ones(3),
        "step": 7,
    }
    stock.save(state_dict, checkpoint_id=folder / "together")
    stock.save({"mine": torch.full((rank + 1,), 1.0)}, checkpoint_id=folder / "alone", use_collectives=False)


def test_two_ranks(tmp_path: Path) -> None:
    """What two ranks of this torch write, together and each alone, reads as its objects say."""
    run_ranks(2, two_ranks_of_torch, tmp_path)
    index = decode_torch_metadata((tmp_path / "together" / ".metadata").read_bytes())
    assert_same(index, index_of(read_metadata(tmp_path / "together")))
    assert index.block_crcs(0).size == 0
    for rank in range(2):
        name = f"__{rank}.metadata"
        local = decode_torch_metadata((tmp_path / "alone" / name).read_bytes())
        assert_same(local, index_of(read_metadata(tmp_path / "alone", name)))
        assert local.files == [f"__{rank}_0.distcp"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_binary_protocol(protocol: int) -> None:
    """The protocol is the pickler's default, which depends on Python's version; all give one index."""
    assert_same(decode(small_metadata(), protocol), index_of(small_metadata()))


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


@pytest.mark.parametrize("kind", [tuple, list])
def test_positions_that_are_not_sizes(kind: Callable[[Any], Any]) -> None:
    """Offsets and sizes as plain tuples or lists are read like torch.Size."""
    metadata = small_metadata()
    expected = index_of(metadata)
    tensor = metadata.state_dict_metadata["t"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.size = kind(tensor.size)
    for chunk in tensor.chunks:
        chunk.offsets, chunk.sizes = kind(chunk.offsets), kind(chunk.sizes)
    for key in metadata.storage_data:
        if key.offset is not None:
            object.__setattr__(key, "offset", tuple(key.offset))
    assert_same(decode(metadata), expected)


def test_whole_tensor_without_offset() -> None:
    """A tensor of one chunk is found by its name alone, with or without an index hint."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 3]), [chunk])
    places = {MetadataIndex("t", index=0): _StorageInfo("f", 10, 20)}
    index = decode(Metadata({"t": tensor}, storage_data=places))
    assert (index.record_offsets.tolist(), index.record_lengths.tolist()) == ([10], [20])


def test_scalar_and_many_dimensions() -> None:
    """0-d tensors and tensors of torch's 64 dimensions have their boxes."""
    entries, places = {}, {}
    for fqn, shape in (("scalar", ()), ("deep", (1,) * 64)):
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        entries[fqn] = TensorStorageMetadata(TensorProperties(torch.float64), torch.Size(shape), [chunk])
        places[MetadataIndex(fqn, chunk.offsets)] = _StorageInfo("f", 0, 900)
    index = decode(Metadata(entries, storage_data=places))  # type: ignore[arg-type]
    assert index.payload_lengths.tolist() == [8, 8]
    assert index.box(0) == ((), ())
    assert index.box(1) == ((0,) * 64, (1,) * 64)


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


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (PurePosixPath("/a/b"), "/a/b"),
        (Path("a/b"), "a/b"),
        (Path(), "."),
        ("s3://x/y", "s3://x/y"),
        (None, None),
    ],
)
def test_checkpoint_ids(path: Any, text: str | None) -> None:
    """The id under which a checkpoint was saved is provenance, be it text or a path."""
    index = decode(small_metadata(storage_meta=StorageMeta(path)))
    assert index.provenance.get("checkpoint_id") == text


def test_path_of_newer_python() -> None:
    """Python 3.13 pickles paths from pathlib._local."""
    data = pickle.dumps(small_metadata(storage_meta=StorageMeta(Path("/a/b"))), protocol=2)
    newer = data.replace(b"cpathlib\n", b"cpathlib._local\n")
    assert newer != data
    assert decode_torch_metadata(newer).provenance["checkpoint_id"] == "/a/b"


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


@settings(max_examples=60, deadline=None)
@given(indexes())
def test_round_trip(index: CheckpointIndex) -> None:
    """decode(encode(index)) is the index again, in all that the format can hold."""
    data = encode_torch_metadata(index, checkpoint_id="c", save_id="s")
    again = decode_torch_metadata(data)
    assert_same(again, dataclasses.replace(index, files=list(index.files)))
    assert again.provenance == {"save_id": "s", "checkpoint_id": "c", "torch_metadata_version": "1.0.0"}
    assert (again.file_sizes == UNKNOWN).all()


def test_reader_is_free_of_torch() -> None:
    """Reading and writing metadata imports no torch."""
    code = (
        "import sys\n"
        "import dcp.storage.formats.torch.metadata.reader, dcp.storage.formats.torch.metadata.writer\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
