"""Conversions between `CheckpointIndex` and torch's `Metadata`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns
from dcp.storage.formats.registry import DCP, TORCH_DCP
from dcp.storage.geometry.strides import starts
from dcp.storage.tensors import dtype_code, torch_dtype
from dcp.storage.torch_compat import StorageInfo

VERSION = "1.0.0"
"""Version that stock torch 2.13 writes into `.metadata`."""


def metadata_from_index(index: CheckpointIndex, storage_meta: StorageMeta | None = None) -> Metadata:
    """Return torch's metadata objects for ``index``, as stock's planners and readers expect."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage_data: dict[MetadataIndex, StorageInfo] = {}
    for tensor, fqn in enumerate(index.fqns):
        chunks = []
        for position, row in enumerate(index.chunks(tensor)):
            offsets, sizes = index.box(row)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            storage_data[MetadataIndex(fqn, offsets, position)] = StorageInfo(
                index.files[int(index.chunk_files[row])],
                int(index.record_offsets[row]),
                int(index.record_lengths[row]),
            )
        properties = TensorProperties(
            dtype=torch_dtype(int(index.dtype_codes[tensor])), requires_grad=bool(index.requires_grad[tensor])
        )
        entries[fqn] = TensorStorageMetadata(properties, torch.Size(index.shape(tensor)), chunks)
    objects = index.objects
    for row, fqn in enumerate(objects.fqns):
        entries[fqn] = BytesStorageMetadata()
        if objects.files[row] >= 0:
            storage_data[MetadataIndex(fqn)] = StorageInfo(
                index.files[int(objects.files[row])], int(objects.offsets[row]), int(objects.lengths[row])
            )
    return Metadata(entries, index.planner_data, storage_data, storage_meta or StorageMeta(), VERSION)


class _Built:
    """Field of `LazyMetadata`, built from the index on first access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: LazyMetadata | None, owner: type) -> Any:
        if instance is None:
            return self
        values = instance.__dict__
        if self._name not in values:
            for name, value in vars(metadata_from_index(instance.index, values.get("_storage_meta"))).items():
                values.setdefault(name, value)
        return values[self._name]

    def __set__(self, instance: LazyMetadata, value: Any) -> None:
        instance.__dict__[self._name] = value


class LazyMetadata(Metadata):
    """torch's `Metadata`, built on first access.

    Building metadata objects of 20,000 tensors takes longer than a save, and most callers drop them.
    """

    state_dict_metadata = _Built()
    planner_data = _Built()
    storage_data = _Built()
    storage_meta = _Built()
    version = _Built()

    @classmethod
    def of(
        cls, source: Callable[[], CheckpointIndex], storage_meta: StorageMeta | None = None
    ) -> LazyMetadata:
        """Return the metadata of the index returned by ``source``, which is called once."""
        lazy = cls.__new__(cls)
        lazy.__dict__["_source"] = source
        lazy.__dict__["_storage_meta"] = storage_meta
        return lazy

    def __repr__(self) -> str:
        # short, because interactive prompts show the result of a save
        index = self.index
        return f"<metadata of {index.tensor_count:,} tensors and {len(index.objects):,} objects>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, tuple(getattr(self, field.name) for field in fields(Metadata))

    @property
    def index(self) -> CheckpointIndex:
        """Index behind the metadata."""
        index: CheckpointIndex | None = self.__dict__.get("_index")
        if index is None:
            index = self.__dict__["_index"] = self.__dict__["_source"]()
        return index

    @property
    def has_index(self) -> bool:
        """False for metadata made of plain fields by `dataclasses.replace`."""
        return "_source" in self.__dict__


def known_provenance(metadata: Metadata) -> Mapping[str, Any]:
    """Return the provenance if read by our reader."""
    return metadata.index.provenance if isinstance(metadata, LazyMetadata) and metadata.has_index else {}


def index_from_metadata(metadata: Metadata) -> CheckpointIndex:
    """Convert torch's metadata to columns of names, shapes and boxes, without file positions."""
    entries = metadata.state_dict_metadata.items()
    tensors = {fqn: entry for fqn, entry in entries if isinstance(entry, TensorStorageMetadata)}
    chunks = [chunk for entry in tensors.values() for chunk in entry.chunks]
    facts = [entry.properties for entry in tensors.values()]
    codes = [dtype_code(of.dtype, fqn=fqn) for fqn, of in zip(tensors, facts, strict=True)]
    return CheckpointIndex(
        format=TORCH_DCP.name,
        fqns=list(tensors),
        dtype_codes=np.array(codes, np.uint8),
        requires_grad=np.array([bool(of.requires_grad) for of in facts], np.uint8),
        shape_start=starts([len(entry.size) for entry in tensors.values()]),
        shape_values=_flat(entry.size for entry in tensors.values()),
        chunk_start=starts([len(entry.chunks) for entry in tensors.values()]),
        chunk_offsets=_flat(chunk.offsets for chunk in chunks),
        chunk_sizes=_flat(chunk.sizes for chunk in chunks),
        chunk_files=np.zeros(len(chunks), np.int64),
        objects=ObjectColumns(fqns=[fqn for fqn, _ in entries if fqn not in tensors]),
        planner_data=metadata.planner_data,
        provenance=known_provenance(metadata),
    )


def index_from_results(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CheckpointIndex:
    """Return the index of a save through torch's interface, from the planner's ``metadata`` and the write
    results.

    Raises:
        PlanError: If a chunk or object was not written, or with another dtype.
    """
    index = index_from_metadata(metadata)
    places = {result.index: result.storage_data for part in results for result in part}
    file_ends: dict[str, int] = {}
    for place in places.values():
        end = place.record_offset + place.record_length
        file_ends[place.file] = max(file_ends.get(place.file, 0), end)
    files = {name: number for number, name in enumerate(file_ends)}
    chunks = [
        _place(places, fqn, index.box(row).offsets)
        for tensor, fqn in enumerate(index.fqns)
        for row in index.chunks(tensor)
    ]
    objects = [_place(places, fqn, None) for fqn in index.objects.fqns]
    for place, tensor in zip(chunks, index.chunk_tensors.tolist(), strict=True):
        if place.dtype_code != index.dtype_codes[tensor]:
            fqn = index.fqns[tensor]
            raise PlanError(
                f"chunks of {fqn!r} were written with a dtype other than in the plan's metadata", fqn=fqn
            )
    return replace(
        index,
        format=DCP.name,
        chunk_files=_column(files[place.file] for place in chunks),
        record_offsets=_column(place.record_offset for place in chunks),
        record_lengths=_column(place.record_length for place in chunks),
        payload_offsets=_column(place.payload_offset for place in chunks),
        payload_lengths=_column(place.payload_length for place in chunks),
        crc_start=starts([len(place.crcs) for place in chunks]),
        crcs=np.array([crc for place in chunks for crc in place.crcs], dtype=np.uint32),
        files=list(files),
        file_sizes=_column(file_ends.values()),
        objects=ObjectColumns(
            fqns=index.objects.fqns,
            files=_column(files[place.file] for place in objects),
            offsets=_column(place.record_offset for place in objects),
            lengths=_column(place.record_length for place in objects),
            crcs=_column(place.crcs[0] for place in objects),
            plain=np.full(len(objects), -1, dtype=np.int64),
        ),
    )


def _place(places: dict[MetadataIndex, Any], fqn: str, offsets: Sequence[int] | None) -> Any:
    place = places.get(MetadataIndex(fqn, offsets))
    if place is None:
        where = "" if offsets is None else f" at {tuple(offsets)}"
        raise PlanError(
            f"the plan's metadata has {fqn!r}{where}, but no rank wrote it: check the save planner", fqn=fqn
        )
    return place


def _column(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(values, dtype=np.int64)


def _flat(rows: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([value for row in rows for value in row], dtype=np.int64)
