"""Indexes for tests: by hand, of any sort by hypothesis, and of stock's `Metadata`, by the plainest way."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

import dcp
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, ObjectColumns
from dcp.storage.formats.plain import encode_plain
from dcp.storage.geometry.strides import Int64, starts
from dcp.storage.stores import MemoryStore

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"

Numbers = tuple[int, ...]
Place = tuple[str, int, int]
"""File, offset, length."""


class Tensor(NamedTuple):
    """``boxes`` are the offsets and sizes of its chunks."""

    shape: Numbers
    boxes: Sequence[tuple[Numbers, Numbers]]
    dtype: str
    requires_grad: bool = False


def int64(values: Any) -> Int64:
    """A column."""
    return np.array(list(values), dtype=np.int64)


def build(
    tensors: Mapping[str, Tensor], places: Sequence[Place], objects: Mapping[str, Place], planner_data: Any
) -> CheckpointIndex:
    """An index that says no more than stock's does; ``places`` are those of all chunks."""
    chunks = [(tensor, box) for tensor in tensors.values() for box in tensor.boxes]
    files = sorted({file for file, *_ in (*places, *objects.values())})
    rows = tensors.values()
    return CheckpointIndex(
        format="torch_dcp",
        fqns=list(tensors),
        dtype_codes=np.array([dtypes.BY_NAME[tensor.dtype].code for tensor in rows], dtype=np.uint8),
        shape_start=starts([len(tensor.shape) for tensor in rows]),
        shape_values=int64(size for tensor in rows for size in tensor.shape),
        requires_grad=np.array([tensor.requires_grad for tensor in rows], dtype=np.uint8),
        chunk_start=starts([len(tensor.boxes) for tensor in rows]),
        chunk_offsets=int64(value for _, box in chunks for value in box[0]),
        chunk_sizes=int64(value for _, box in chunks for value in box[1]),
        chunk_files=int64(files.index(file) for file, *_ in places),
        record_offsets=int64(offset for _, offset, _ in places),
        record_lengths=int64(length for *_, length in places),
        payload_offsets=int64(UNKNOWN for _ in chunks),
        payload_lengths=int64(_bytes(tensor.dtype, box[1]) for tensor, box in chunks),
        crc_start=int64([0] * (len(chunks) + 1)),
        files=files,
        file_sizes=int64(UNKNOWN for _ in files),
        objects=ObjectColumns(
            fqns=list(objects),
            files=int64(files.index(file) for file, *_ in objects.values()),
            offsets=int64(offset for _, offset, _ in objects.values()),
            lengths=int64(length for *_, length in objects.values()),
            crcs=int64(UNKNOWN for _ in objects),
            plain=int64(-1 for _ in objects),
        ),
        planner_data=planner_data,
    )


def _bytes(dtype: str, sizes: Numbers) -> int:
    return math.prod(sizes) * dtypes.BY_NAME[dtype].itemsize


def small_index(**changes: Any) -> CheckpointIndex:
    """Two tensors (one in two chunks, one a scalar), two objects that share a value, nested planner data."""
    fields: dict[str, Any] = {
        "format": "dcp",
        "fqns": ["model.weight", "step"],
        "dtype_codes": np.array([4, 9], dtype=np.uint8),
        "shape_start": int64([0, 2, 2]),
        "shape_values": int64([4, 6]),
        "requires_grad": np.array([1, 0], dtype=np.uint8),
        "chunk_start": int64([0, 2, 3]),
        "chunk_offsets": int64([0, 0, 2, 0]),
        "chunk_sizes": int64([2, 6, 2, 6]),
        "chunk_files": int64([0, 1, 0]),
        "record_offsets": int64([0, 0, 500]),
        "record_lengths": int64([480, 480, 450]),
        "payload_offsets": int64([220, 220, 716]),
        "payload_lengths": int64([24, 24, 8]),
        "crc_start": int64([0, 1, 2, 3]),
        "crcs": np.array([1, 0xFFFFFFFF, 77], dtype=np.uint32),
        "files": ["__0_0.3f9c2a1b.distcp", "__1_0.3f9c2a1b.distcp"],
        "file_sizes": int64([1500, 480]),
        "objects": ObjectColumns(
            fqns=["optim.lr", "optim.eps"],
            files=int64([0, -1]),
            offsets=int64([1000, 0]),
            lengths=int64([300, 0]),
            crcs=int64([5, UNKNOWN]),
            plain=int64([0, 0]),
            values=[encode_plain(0.001) or b""],
        ),
        "stride_orders": {0: (1, 0)},
        "planner_data": {"model.weight": ("model", "weight"), "step": ("step",), "optim.lr": ("optim", 0)},
        "provenance": {"save_id": "3f9c2a1b", "world_size": 2},
        "user": {"tags": ("a", "b"), "loss": 0.5},
        "torch_metadata_crc": 123456789,
    }
    return CheckpointIndex(**(fields | changes))


# -- stock's -------------------------------------------------------------------------------------------------


def stock_save(folder: Path, state_dict: dict[str, Any], **writer_options: Any) -> Metadata:
    """Save with stock torch in this process alone; the `Metadata` it wrote."""
    save(state_dict, storage_writer=FileSystemWriter(folder, **writer_options), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def decode_torch_metadata(data: bytes) -> CheckpointIndex:
    """The index of a checkpoint that has this `.metadata` alone, as anybody opens it."""
    store = MemoryStore("tests/formats-metadata")
    store.publish(".metadata", data, durable=False)
    return dcp.open_index(store.url)


def decode(metadata: Any) -> CheckpointIndex:
    """The index of objects pickled as stock pickles them."""
    return decode_torch_metadata(pickle.dumps(metadata, protocol=4))


def rich_state_dict() -> dict[str, Any]:
    """Every kind of entry a single process saves: dtypes, dimensions, empty, scalar, nested, objects."""
    return {
        "weights": torch.arange(12.0).reshape(3, 4),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "five": torch.zeros(1, 2, 3, 1, 2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "float8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "nested": {"list": [torch.ones(2), {"deep": torch.ones(1)}], "rate": 0.001, "name": "é\U0001f600"},
        "betas": (0.9, 0.999),
        "step": 7,
    }


def index_of(metadata: Metadata) -> CheckpointIndex:
    """The index of stock's objects: the reference for the fast encoder and decoder."""
    tensors, places, objects = dict[str, Tensor](), list[Place](), dict[str, Place]()

    def place(key: MetadataIndex) -> Place:
        info = metadata.storage_data[key]
        return info.relative_path, info.offset, info.length

    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects[fqn] = place(MetadataIndex(fqn))
            continue
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[fqn] = Tensor(tuple(entry.size), boxes, dtype, entry.properties.requires_grad)
        places += [place(MetadataIndex(fqn, chunk.offsets)) for chunk in entry.chunks]
    return build(tensors, places, objects, metadata.planner_data)


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


def assert_same(index: CheckpointIndex, expected: CheckpointIndex) -> None:
    """All that a `.metadata` can hold is equal in both, in whatever order they have their files."""
    index.check()
    for one, other in ((index, expected), (index.objects, expected.objects)):
        for name in (field.name for field in dataclasses.fields(one)):
            if isinstance(getattr(one, name), np.ndarray) and "file" not in name:
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert (index.fqns, index.objects.fqns) == (expected.fqns, expected.objects.fqns)
    ours, others = (
        [one.files[file] for file in (*one.chunk_files, *one.objects.files)] for one in (index, expected)
    )
    assert ours == others
    assert repr(index.planner_data) == repr(expected.planner_data)


# -- any -----------------------------------------------------------------------------------------------------

_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
_names = st.text(min_size=1, max_size=12)
_dtypes = st.sampled_from(sorted(dtypes.BY_NAME))


def _planner_data(fqns: Sequence[str]) -> st.SearchStrategy[Any]:
    parts = st.lists(_names | st.integers(0, 1 << 40), max_size=4).map(tuple)
    return st.fixed_dictionaries(dict.fromkeys(fqns, parts)) | _plain


@st.composite
def _tiled(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    zeros = (0,) * len(shape)
    boxes = [(zeros, shape)]
    if shape and shape[0] > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, shape[0] - 1))
        boxes = [(zeros, (cut, *shape[1:])), ((cut, *zeros[1:]), (shape[0] - cut, *shape[1:]))]
    return Tensor(shape, boxes, draw(_dtypes), draw(st.booleans()))


@st.composite
def indexes_of_torch(draw: st.DrawFn) -> CheckpointIndex:
    """Generate indexes that a `.metadata` can represent: consecutive records, in three files in turn."""
    fqns = draw(st.lists(_names, max_size=8, unique=True))
    split, gap = draw(st.integers(0, len(fqns))), draw(st.sampled_from([0, 100, 1 << 40]))
    return make_index(
        {fqn: draw(_tiled()) for fqn in fqns[:split]}, fqns[split:], draw(_planner_data(fqns)), gap
    )


def make_index(
    tensors: Mapping[str, Tensor], objects: Sequence[str] = (), planner_data: Any = None, gap: int = 100
) -> CheckpointIndex:
    """A consistent one, whose records are ``gap`` bytes longer than their payloads."""
    chunks = [(tensor.dtype, sizes) for tensor in tensors.values() for _, sizes in tensor.boxes]
    lengths = [_bytes(*chunk) + gap for chunk in chunks] + [gap] * len(objects)
    ends = starts(lengths).tolist()
    places = [(f"__{at % 3}_0.distcp", ends[at], length) for at, length in enumerate(lengths)]
    return build(
        tensors, places[: len(chunks)], dict(zip(objects, places[len(chunks) :], strict=True)), planner_data
    )
