"""How plans made of objects travel between the ranks of one job.

Items of torch's own classes are packed as columns: `WriteItem` and `ReadItem` as names, kinds and integer
arrays. What a custom planner or storage adds (``storage_data``, ``planner_data``, items of its own classes,
write results of a foreign storage) is that class's business and travels as torch sends it, pickled, between
processes that run the same program. Nothing of it is ever stored.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.tensors import dtype_code, torch_dtype
from dcp.storage.torch_compat import strides_of, tensor_properties

__all__ = ["pack", "unpack"]

_NO_OFFSET = -1


def pack(value: Any) -> bytes:
    """Bytes of a SavePlan, LoadPlan or anything else that ranks of one job tell each other."""
    if type(value) is SavePlan and all(_is_plain_write_item(item) for item in value.items):
        return _packed(
            "save", _write_items(value.items), (value.storage_data, value.planner_data, value.usable)
        )
    if type(value) is LoadPlan and all(type(item) is ReadItem for item in value.items):
        return _packed("load", _read_items(value.items), (value.storage_data, value.planner_data))
    return _packed("other", {}, value)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    message = msgpack.unpackb(data, strict_map_key=False)
    extra = None if message["extra"] is None else pickle.loads(message["extra"])
    if message["kind"] == "save":
        storage_data, planner_data, usable = extra or (None, None, True)
        return SavePlan(_to_write_items(message["items"]), storage_data, planner_data, usable)
    if message["kind"] == "load":
        storage_data, planner_data = extra or (None, None)
        return LoadPlan(_to_read_items(message["items"]), storage_data, planner_data)
    if message["kind"] == "other":
        return extra
    raise CheckpointFormatError(f"unknown message {message['kind']!r} from another rank")


def _packed(kind: str, items: dict[str, Any], extra: Any) -> bytes:
    usual = {"save": (None, None, True), "load": (None, None)}.get(kind)
    # By identity: foreign data may have no truth value for ==.
    plain = usual is not None and all(map(operator.is_, extra, usual))
    pickled = None if plain else pickle.dumps(extra)
    return bytes(msgpack.packb({"kind": kind, "items": items, "extra": pickled}))


def _is_plain_write_item(item: WriteItem) -> bool:
    if type(item) is not WriteItem or item.bytes_io_data is not None:
        return False
    data = item.tensor_data
    if data is None:
        return item.index.offset is None
    properties = data.properties
    return (
        properties.layout == torch.strided
        and properties.memory_format == torch.contiguous_format
        and not properties.pin_memory
    )


class _Ints:
    """Ragged rows of integers while they are packed or unpacked."""

    def __init__(self, lengths: bytes = b"", values: bytes = b"") -> None:
        self.lengths: list[int] = np.frombuffer(lengths, "<i4").tolist()
        self.values: list[int] = np.frombuffer(values, "<i8").tolist()
        self._row = self._at = 0

    def add(self, row: Sequence[int] | None) -> None:
        if row is None:
            self.lengths.append(_NO_OFFSET)
        else:
            self.lengths.append(len(row))
            self.values.extend(row)

    def next(self) -> torch.Size | None:
        length = self.lengths[self._row]
        self._row += 1
        if length == _NO_OFFSET:
            return None
        begin, self._at = self._at, self._at + length
        return torch.Size(self.values[begin : self._at])

    def packed(self) -> tuple[bytes, bytes]:
        return np.array(self.lengths, "<i4").tobytes(), np.array(self.values, "<i8").tobytes()


def _write_items(items: Sequence[WriteItem]) -> dict[str, Any]:
    ints, kinds, hints = _Ints(), [], []
    codes: list[tuple[int, bool] | None] = []
    for item in items:
        ints.add(item.index.offset)
        kinds.append(item.type.value)
        hints.append(item.index.index)
        data = item.tensor_data
        if data is None:
            codes.append(None)
            continue
        codes.append((dtype_code(data.properties.dtype, fqn=item.index.fqn), data.properties.requires_grad))
        ints.add(data.chunk.offsets)
        ints.add(data.chunk.sizes)
        ints.add(data.size)
        ints.add(strides_of(data.properties))
    fqns = [item.index.fqn for item in items]
    return {"fqns": fqns, "kinds": kinds, "hints": hints, "codes": codes, "ints": ints.packed()}


def _to_write_items(packed: dict[str, Any]) -> list[WriteItem]:
    ints = _Ints(*packed["ints"])
    items = []
    for fqn, kind, hint, code in zip(
        packed["fqns"], packed["kinds"], packed["hints"], packed["codes"], strict=True
    ):
        index = MetadataIndex(fqn, ints.next(), hint)
        data = None
        if code is not None:
            chunk, size = ChunkStorageMetadata(_size(ints), _size(ints)), _size(ints)
            data = TensorWriteData(chunk, tensor_properties(torch_dtype(code[0]), code[1], ints.next()), size)
        items.append(WriteItem(index, WriteItemType(kind), tensor_data=data))
    return items


def _read_items(items: Sequence[ReadItem]) -> dict[str, Any]:
    ints, kinds, hints = _Ints(), [], []
    fqns = []
    for item in items:
        kinds.append(item.type.value)
        fqns.append((item.dest_index.fqn, item.storage_index.fqn))
        hints.append((item.dest_index.index, item.storage_index.index))
        for row in (
            item.dest_index.offset,
            item.storage_index.offset,
            item.dest_offsets,
            item.storage_offsets,
            item.lengths,
        ):
            ints.add(row)
    return {"fqns": fqns, "kinds": kinds, "hints": hints, "ints": ints.packed()}


def _to_read_items(packed: dict[str, Any]) -> list[ReadItem]:
    ints = _Ints(*packed["ints"])
    items = []
    for (dest, stored), kind, (dest_hint, stored_hint) in zip(
        packed["fqns"], packed["kinds"], packed["hints"], strict=True
    ):
        dest_index = MetadataIndex(dest, ints.next(), dest_hint)
        stored_index = MetadataIndex(stored, ints.next(), stored_hint)
        dest_offsets, storage_offsets, lengths = _size(ints), _size(ints), _size(ints)
        items.append(
            ReadItem(LoadItemType(kind), dest_index, dest_offsets, stored_index, storage_offsets, lengths)
        )
    return items


def _size(ints: _Ints) -> torch.Size:
    row = ints.next()
    if row is None:
        raise CheckpointFormatError("a plan from another rank lacks a size")
    return row
