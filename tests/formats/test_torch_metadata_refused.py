"""A `.metadata` that is refused, and planner data that is kept or dropped."""

from __future__ import annotations

import dataclasses
import pickle
import random
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp.storage.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp.storage.formats.torch.metadata.reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata.writer import encode_torch_metadata
from tests.support.formats_metadata import (
    GOLDEN,
    assert_same,
    decode,
    index_of,
    small_metadata,
)


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
    assert caught.value.global_name.endswith("test_torch_metadata_refused.Custom")


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
