"""Stock torch's `.metadata` as an index: every kind of real save, older layouts, what is refused, back."""

from __future__ import annotations

import dataclasses
import pickle
import random
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributed import checkpoint as stock
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedTensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp.storage.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.metadata_reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from tests.storage.formats.torch_metadata_cases import (
    index_of,
    indexes,
    read_metadata,
    rich_state_dict,
    stock_save,
)
from tests.support.ranks import run_ranks

GOLDEN = Path(__file__).parent / "golden"
COLUMNS = (
    "dtype_codes",
    "shape_start",
    "shape_values",
    "requires_grad",
    "chunk_start",
    "chunk_offsets",
    "chunk_sizes",
    "record_offsets",
    "record_lengths",
    "payload_offsets",
    "payload_lengths",
    "crc_start",
    "crcs",
)


def assert_same(index: CheckpointIndex, expected: CheckpointIndex) -> None:
    """All that a `.metadata` can hold is equal in both."""
    index.check()
    assert (index.fqns, index.objects.fqns) == (expected.fqns, expected.objects.fqns)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(index, name), getattr(expected, name), err_msg=name)
    for name in ("offsets", "lengths", "crcs", "plain"):
        np.testing.assert_array_equal(
            getattr(index.objects, name), getattr(expected.objects, name), err_msg=name
        )
    assert [index.files[f] for f in index.chunk_files] == [expected.files[f] for f in expected.chunk_files]
    ours = [index.files[f] for f in index.objects.files]
    assert ours == [expected.files[f] for f in expected.objects.files]
    assert repr(index.planner_data) == repr(expected.planner_data)


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


# -- hand-built layouts ------------------------------------------------------------------------------------


def small_metadata(**changes: Any) -> Metadata:
    """A tensor of two chunks and an object, of stock's classes."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(2)]
    places: dict[MetadataIndex, Any] = {
        MetadataIndex("t", [row, 0], row): _StorageInfo("__0_0.distcp", 500 * row, 500) for row in range(2)
    }
    places[MetadataIndex("o")] = _StorageInfo("__0_0.distcp", 1000, 200)
    metadata = Metadata(
        {
            "t": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 3]), chunks),
            "o": BytesStorageMetadata(),
        },
        planner_data={"t": ("t",), "o": ("o",)},
        storage_data=places,
        storage_meta=StorageMeta("there", "id"),
        version="1.0.0",
    )
    return dataclasses.replace(metadata, **changes)


def decode(metadata: Any, protocol: int = 4) -> CheckpointIndex:
    """The index of objects pickled as stock pickles them."""
    return decode_torch_metadata(pickle.dumps(metadata, protocol=protocol))


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


# -- what is refused ---------------------------------------------------------------------------------------


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


def test_files_of_safetensors_folders() -> None:
    """Hugging Face places are read where they have ranges, and their folder is explained elsewhere."""
    metadata = small_metadata()
    places = {key: _HFStorageInfo("f", torch.Size([1]), torch.float32) for key in metadata.storage_data}
    with pytest.raises(UnsupportedFormatError, match="safetensors"):
        decode(dataclasses.replace(metadata, storage_data=places))
    for info in places.values():
        info.offset, info.length = 0, 12  # type: ignore[attr-defined]
    index = decode(dataclasses.replace(metadata, storage_data=places))
    assert index.record_lengths.tolist() == [12, 12]


class Custom:
    """A class that is on nobody's list."""


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "storage_meta", "state_dict_metadata"])
def test_unknown_classes_are_named(place: str) -> None:
    """Wherever a foreign class stands, the error names it."""
    metadata = small_metadata(**{place: {"x": Custom()}})
    with pytest.raises(UnsafeObjectError, match="Custom") as caught:
        decode(metadata)
    assert caught.value.global_name.endswith("test_torch_metadata_reader.Custom")


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


@pytest.mark.parametrize("value", [{}, "text", None, [1], StorageMeta()])
def test_files_that_are_no_metadata(value: Any) -> None:
    """A pickle of anything else is refused."""
    with pytest.raises(CheckpointFormatError, match="Metadata"):
        decode(value)


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


# -- planner data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"t": ("a", 0, "b")},
        {"t": ["list", {"deep": (1.5, None, b"x", True)}]},
        [1, 2],
        "text",
        1 << 70,
    ],
)
def test_plain_planner_data_is_kept(data: Any) -> None:
    """Mappings and whatever other plain data a custom planner leaves arrive with their types."""
    index = decode(small_metadata(planner_data=data))
    assert repr(index.planner_data) == repr(data)
    assert "planner_data_dropped" not in index.provenance


@pytest.mark.parametrize(
    ("data", "reason"),
    [({"t": torch.float32}, "Dtype"), ({"a": [{1, 2}]}, "set"), ([StorageMeta()], "StorageMeta")],
)
def test_other_planner_data_is_dropped_with_a_note(data: Any, reason: str) -> None:
    """Allowed classes that are not plain data do not stop the load: planner_data is None, and it is noted."""
    index = decode(small_metadata(planner_data=data))
    assert index.planner_data is None
    assert reason in index.provenance["planner_data_dropped"]


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


def test_ordered_dict_is_not_on_the_list() -> None:
    """Classes that stock never puts there stay refused even if they are harmless."""
    with pytest.raises(UnsafeObjectError, match="OrderedDict"):
        decode(small_metadata(planner_data=OrderedDict(a=1)))


# -- with our own encoder ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(indexes())
def test_round_trip(index: CheckpointIndex) -> None:
    """decode(encode(index)) is the index again, in all that the format can hold."""
    data = encode_torch_metadata(index, checkpoint_id="c", save_id="s")
    again = decode_torch_metadata(data)
    assert_same(again, dataclasses.replace(index, files=list(index.files)))
    assert again.provenance == {"save_id": "s", "checkpoint_id": "c", "torch_metadata_version": "1.0.0"}
    assert (again.file_sizes == UNKNOWN).all()


def test_every_truncation_is_an_error() -> None:
    """However much of the end is missing, reading fails with a typed error."""
    data = pickle.dumps(small_metadata())
    for length in range(len(data)):
        with pytest.raises(CheckpointFormatError):
            decode_torch_metadata(data[:length])


def fuzz(rounds: int, seed: int) -> int:
    """Read damaged metadata; how many were still read. Anything but a typed error propagates."""
    rng = random.Random(seed)
    corpus = [path.read_bytes() for path in sorted(GOLDEN.glob("torch-*.metadata"))]
    corpus.append(encode_torch_metadata(decode_torch_metadata(corpus[0]), checkpoint_id="c", save_id="s"))
    found = 0
    for _ in range(rounds):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        begin = time.thread_time()
        try:
            decode_torch_metadata(bytes(data)).check()
            found += 1
        except (CheckpointFormatError, CorruptCheckpointError):
            pass
        assert time.thread_time() - begin < 10.0
    return found


def test_fuzz() -> None:
    """Damaged files are an index that agrees with itself, or a typed error, quickly."""
    assert 0 < fuzz(1_500, seed=1) < 1_500


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_fuzz_longer(seed: int) -> None:
    """The same for many more."""
    assert 0 < fuzz(30_000, seed=100 + seed) < 30_000


def test_reader_is_free_of_torch() -> None:
    """Reading and writing metadata imports no torch."""
    code = (
        "import sys\n"
        "import dcp.storage.formats.torch.metadata_reader, dcp.storage.formats.torch.metadata_writer\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
