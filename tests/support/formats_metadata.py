"""Indexes and stock `Metadata` for the tests of `.metadata`: real saves, and a plain way between them."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, ObjectColumns, starts
from dcp.storage.stores import MemoryStore

# (shape, [(offsets, sizes), ...], dtype name, requires_grad) of one tensor
Tensor = tuple[tuple[int, ...], Sequence[tuple[tuple[int, ...], tuple[int, ...]]], str, bool]


def stock_save(folder: Path, state_dict: dict[str, Any], **writer_options: Any) -> Metadata:
    """Save with stock torch in this process alone; the `Metadata` it wrote."""
    writer = FileSystemWriter(folder, **writer_options)
    save(state_dict, storage_writer=writer, no_dist=True)
    return read_metadata(folder)


def decode_torch_metadata(data: bytes) -> CheckpointIndex:
    """The index of a checkpoint that has this `.metadata` alone, as anybody opens it."""
    store = MemoryStore("tests/formats-metadata")
    store.publish(".metadata", data, durable=False)
    return dcp.open_index(store.url)


def read_metadata(folder: Path, name: str = ".metadata") -> Metadata:
    """What stock reads from a folder."""
    metadata = pickle.loads((folder / name).read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


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
    """The index of stock's objects, built plainly: the reference for the fast encoder and decoder."""
    assert metadata.storage_data is not None
    ranges = metadata.storage_data
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    objects = [key for key in metadata.state_dict_metadata if key not in tensors]
    files = sorted({info.relative_path for info in ranges.values()})
    chunks = [(fqn, chunk) for fqn, tensor in tensors.items() for chunk in tensor.chunks]
    infos = [ranges[MetadataIndex(fqn, chunk.offsets)] for fqn, chunk in chunks]
    object_infos = [ranges[MetadataIndex(fqn)] for fqn in objects]
    names = [str(tensor.properties.dtype).removeprefix("torch.") for tensor in tensors.values()]
    itemsizes = [tensors[fqn].properties.dtype.itemsize for fqn, _ in chunks]
    return CheckpointIndex(
        format="torch_dcp",
        fqns=list(tensors),
        dtype_codes=np.array([dtypes.BY_NAME[name].code for name in names], dtype=np.uint8),
        shape_start=starts([len(tensor.size) for tensor in tensors.values()]),
        shape_values=_flat(tensor.size for tensor in tensors.values()),
        requires_grad=np.array([t.properties.requires_grad for t in tensors.values()], dtype=np.uint8),
        chunk_start=starts([len(tensor.chunks) for tensor in tensors.values()]),
        chunk_offsets=_flat(chunk.offsets for _, chunk in chunks),
        chunk_sizes=_flat(chunk.sizes for _, chunk in chunks),
        chunk_files=_flat([files.index(info.relative_path)] for info in infos),
        record_offsets=_flat([info.offset] for info in infos),
        record_lengths=_flat([info.length] for info in infos),
        payload_offsets=np.full(len(chunks), UNKNOWN, dtype=np.int64),
        payload_lengths=_flat(
            [chunk.sizes.numel() * itemsize] for (_, chunk), itemsize in zip(chunks, itemsizes, strict=True)
        ),
        crc_start=np.zeros(len(chunks) + 1, dtype=np.int64),
        files=files,
        file_sizes=np.full(len(files), UNKNOWN, dtype=np.int64),
        objects=ObjectColumns(
            fqns=objects,
            files=_flat([files.index(info.relative_path)] for info in object_infos),
            offsets=_flat([info.offset] for info in object_infos),
            lengths=_flat([info.length] for info in object_infos),
            crcs=np.full(len(objects), UNKNOWN, dtype=np.int64),
            plain=np.full(len(objects), -1, dtype=np.int64),
        ),
        planner_data=metadata.planner_data,
    )


def _flat(rows: Any) -> Any:
    return np.array([int(value) for row in rows for value in row], dtype=np.int64)


def make_index(
    tensors: dict[str, Tensor], objects: Sequence[str] = (), *, planner_data: Any = None, gap: int = 100
) -> CheckpointIndex:
    """A consistent index whose records, ``gap`` bytes longer than their payloads, follow one another."""
    chunks = [(fqn, box) for fqn, tensor in tensors.items() for box in tensor[1]]
    payloads = [int(np.prod(box[1])) * dtypes.BY_NAME[tensors[fqn][2]].itemsize for fqn, box in chunks]
    lengths = [payload + gap for payload in payloads]
    ends = starts(lengths + [gap] * len(objects))
    files = [f"__{rank}_0.distcp" for rank in range(3)]
    chunk_files = np.arange(len(chunks), dtype=np.int64) % len(files)
    return CheckpointIndex(
        format="torch_dcp",
        fqns=list(tensors),
        dtype_codes=np.array([dtypes.BY_NAME[t[2]].code for t in tensors.values()], dtype=np.uint8),
        shape_start=starts([len(tensor[0]) for tensor in tensors.values()]),
        shape_values=_flat(tensor[0] for tensor in tensors.values()),
        requires_grad=np.array([tensor[3] for tensor in tensors.values()], dtype=np.uint8),
        chunk_start=starts([len(tensor[1]) for tensor in tensors.values()]),
        chunk_offsets=_flat(box[0] for _, box in chunks),
        chunk_sizes=_flat(box[1] for _, box in chunks),
        chunk_files=chunk_files,
        record_offsets=ends[: len(chunks)],
        record_lengths=_flat([length] for length in lengths),
        payload_offsets=np.full(len(chunks), UNKNOWN, dtype=np.int64),
        payload_lengths=_flat([payload] for payload in payloads),
        crc_start=np.zeros(len(chunks) + 1, dtype=np.int64),
        files=files if chunks or objects else [],
        file_sizes=np.full(len(files) if chunks or objects else 0, UNKNOWN, dtype=np.int64),
        objects=ObjectColumns(
            fqns=list(objects),
            files=np.zeros(len(objects), dtype=np.int64),
            offsets=ends[len(chunks) : -1],
            lengths=np.full(len(objects), gap, dtype=np.int64),
            crcs=np.full(len(objects), UNKNOWN, dtype=np.int64),
            plain=np.full(len(objects), -1, dtype=np.int64),
        ),
        planner_data=planner_data,
    )


_texts = st.text(max_size=12)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_texts | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = draw(st.sampled_from(sorted(dtypes.BY_NAME)))
    boxes = [(tuple(0 for _ in shape), shape)]
    if shape and shape[0] > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, shape[0] - 1))
        rest = shape[1:]
        zeros = tuple(0 for _ in rest)
        boxes = [((0, *zeros), (cut, *rest)), ((cut, *zeros), (shape[0] - cut, *rest))]
    return shape, boxes, dtype, draw(st.booleans())


@st.composite
def indexes(draw: st.DrawFn) -> CheckpointIndex:
    """Consistent indexes of a few tensors and objects, with mappings or other plain planner data."""
    fqns = draw(st.lists(st.text(min_size=1, max_size=12), max_size=8, unique=True))
    split = draw(st.integers(0, len(fqns)))
    tensors = {fqn: draw(_tensors()) for fqn in fqns[:split]}
    parts = st.lists(_texts | st.integers(0, 1 << 40), max_size=4).map(tuple)
    mapping = st.fixed_dictionaries(dict.fromkeys(fqns, parts))
    return make_index(
        tensors,
        fqns[split:],
        planner_data=draw(mapping | _plain),
        gap=draw(st.sampled_from([0, 100, 1 << 40])),
    )


GOLDEN = Path(__file__).parents[1] / "formats" / "golden"


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
