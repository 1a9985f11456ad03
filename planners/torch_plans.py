"""Conversions between columns and torch's plan objects, for planners and storages with torch's interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp.planners.columns import HeldBoxes, SaveColumns, SaveObjects, box_columns
from dcp.planners.load.plan import LoadPlan
from dcp.storage.engine.write import WriteColumns
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import ContainerNote
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.tensors import dtype_code, torch_dtype
from dcp.storage.torch_compat import tensor_properties


@dataclass(frozen=True)
class ComparedItem(WriteItem):
    """`WriteItem` with a digest (0: unknown) for the replica check."""

    digest: int = dataclasses.field(default=0, compare=False)


@dataclass(frozen=True)
class NotedPlan(SavePlan):
    """`SavePlan` with notes on containers of the state dict."""

    notes: Sequence[ContainerNote] = dataclasses.field(default=(), compare=False)


def write_items(
    columns: SaveColumns, sources: Sequence[torch.Tensor], order: Sequence[str]
) -> list[WriteItem]:
    """Return an item per box and object, in the order of the names ``order``. ``sources`` are by source
    number.
    """
    boxes: dict[str, list[WriteItem]] = {}
    offsets, sizes = columns.item_offsets.tolist(), columns.item_sizes.tolist()
    start, shape_start = columns.box_start.tolist(), columns.shape_start.tolist()
    shapes, digests = columns.shape_values.tolist(), columns.item_digests.tolist()
    codes, grads = columns.dtype_codes.tolist(), columns.requires_grad.tolist()
    for item, tensor in enumerate(columns.item_tensors.tolist()):
        fqn, box = columns.fqns[tensor], slice(start[item], start[item + 1])
        offset = torch.Size(offsets[box])
        strides = sources[columns.item_sources[item]].stride()
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offset, torch.Size(sizes[box])),
            # one object per item, because planners modify items in place
            properties=tensor_properties(torch_dtype(codes[tensor]), bool(grads[tensor]), strides),
            size=torch.Size(shapes[shape_start[tensor] : shape_start[tensor + 1]]),
        )
        kind = WriteItemType.SHARD if columns.item_sharded[item] else WriteItemType.TENSOR
        item_object = ComparedItem(MetadataIndex(fqn, offset), kind, tensor_data=data, digest=digests[item])
        boxes.setdefault(fqn, []).append(item_object)
    for fqn, digest in zip(columns.objects.fqns, columns.objects.digests.tolist(), strict=True):
        boxes[fqn] = [ComparedItem(MetadataIndex(fqn), WriteItemType.BYTE_IO, digest=digest)]
    return [item for fqn in order for item in boxes.get(fqn, ())]


def columns_from_plan(plan: SavePlan) -> tuple[SaveColumns, list[WriteItem], list[WriteItem]]:
    """Return (columns, items by item row, items by object row) of a plan of objects.

    ``planner_data`` is kept only as a mapping from names to paths.
    """
    tensor_items, object_items = list[WriteItem](), list[WriteItem]()
    tensors, kinds, grads = dict[str, int](), list[tuple[int, tuple[int, ...]]](), list[bool]()
    rows, boxes = list[int](), list[ChunkStorageMetadata]()
    for item in plan.items:
        fqn, data = item.index.fqn, item.tensor_data
        if item.type == WriteItemType.BYTE_IO:
            object_items.append(item)
            continue
        if data is None or data.chunk is None:
            raise PlanError(f"the write item of the tensor {fqn!r} has no tensor_data or chunk", fqn=fqn)
        kind = (dtype_code(data.properties.dtype, fqn=fqn), tuple(data.size))
        rows.append(tensors.setdefault(fqn, len(kinds)))
        if rows[-1] == len(kinds):
            kinds.append(kind)
            grads.append(bool(data.properties.requires_grad))
        elif kinds[rows[-1]] != kind:
            raise PlanError(f"write items of {fqn!r} in one plan have different dtypes or shapes", fqn=fqn)
        boxes.append(data.chunk)
        tensor_items.append(item)
    names, none = tuple(item.index.fqn for item in object_items), np.zeros(len(object_items), np.int64)
    columns = box_columns(
        list(tensors),
        [code for code, _ in kinds],
        grads,
        [shape for _, shape in kinds],
        rows,
        [box.offsets for box in boxes],
        [box.sizes for box in boxes],
        [item.type == WriteItemType.SHARD for item in tensor_items],
        item_digests=_digests(tensor_items),
        objects=SaveObjects(names, _digests(object_items), none),
        planner_data=plan.planner_data if isinstance(plan.planner_data, Mapping) else None,
        notes=plan.notes if isinstance(plan, NotedPlan) else (),
    )
    return columns, tensor_items, object_items


def _digests(items: Sequence[WriteItem]) -> Any:
    return np.array([getattr(item, "digest", 0) for item in items], np.uint64)


def plan_from_writes(
    plan: SavePlan,
    writes: WriteColumns,
    index: CheckpointIndex,
    tensor_items: Sequence[WriteItem],
    object_items: Sequence[WriteItem],
) -> SavePlan:
    """Return ``plan`` reduced to its rank's writes, in order; items of split boxes name their part."""
    position = {id(item): number for number, item in enumerate(plan.items)}
    hints = writes.chunks - index.chunk_start[index.chunk_tensors[writes.chunks]]
    placed: list[tuple[int, int, WriteItem]] = []
    rows = (writes.sources.tolist(), writes.chunks.tolist(), hints.tolist())
    for row, (number, chunk, hint) in enumerate(zip(*rows, strict=True)):
        item, (offsets, sizes) = tensor_items[number], index.box(chunk)
        changed: dict[str, Any] = {"index": MetadataIndex(item.index.fqn, offsets, hint)}
        data = item.tensor_data
        if data is not None and tuple(data.chunk.sizes) != sizes:
            part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            changed |= {
                "type": WriteItemType.SHARD,
                "tensor_data": dataclasses.replace(data, chunk=part),
            }
        placed.append((position[id(item)], row, dataclasses.replace(item, **changed)))
    for number in writes.objects.tolist():
        item = object_items[number]
        placed.append((position[id(item)], 0, item))
    return dataclasses.replace(
        plan, items=[item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]
    )


def metadata_from_plans(index: CheckpointIndex, plans: Sequence[SavePlan]) -> Metadata:
    """Return torch's metadata of a global plan; tensor properties come from the first item."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for plan in plans:
        for item in plan.items:
            fqn = item.index.fqn
            if fqn in entries:
                continue
            if item.tensor_data is None:
                entries[fqn] = BytesStorageMetadata()
                continue
            boxes = [index.box(chunk) for chunk in index.chunks(index.position[fqn])]
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
            ]
            entries[fqn] = TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, chunks)
    return Metadata(entries, planner_data=index.planner_data)


def read_items(plan: LoadPlan, wanted: HeldBoxes, index: CheckpointIndex) -> list[ReadItem]:
    """Return torch's read items of a load plan.

    Destination offsets are relative to the wanted box, named by the destination index's offset.
    """
    columns = plan.pieces
    names, tensors = wanted.fqns, wanted.item_tensors.tolist()
    start = columns.box_start.tolist()
    chunk_tensors = index.chunk_tensors[columns.chunks]
    hints = (columns.chunks - index.chunk_start[chunk_tensors]).tolist()
    storage, lengths = columns.storage_offsets.tolist(), columns.lengths.tolist()
    dest, local = columns.dest_offsets.tolist(), wanted.item_local_offsets.tolist()
    box_start, box_offsets = wanted.box_start.tolist(), wanted.item_offsets.tolist()
    items = []
    rows = (columns.boxes.tolist(), columns.chunks.tolist(), chunk_tensors.tolist(), hints)
    for row, (box, chunk, stored_tensor, hint) in enumerate(zip(*rows, strict=True)):
        fqn, part = names[tensors[box]], slice(start[row], start[row + 1])
        own = slice(box_start[box], box_start[box + 1])
        relative = [place - begin for place, begin in zip(dest[part], local[own], strict=True)]
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, box_offsets[own]),
                dest_offsets=torch.Size(relative),
                storage_index=MetadataIndex(index.fqns[stored_tensor], index.box(chunk)[0], hint),
                storage_offsets=torch.Size(storage[part]),
                lengths=torch.Size(lengths[part]),
            )
        )
    nothing = torch.Size((0,))
    for stored_object, fqn in zip(plan.objects.tolist(), plan.object_fqns, strict=True):
        where, stored = MetadataIndex(fqn), MetadataIndex(index.objects.fqns[stored_object])
        items.append(ReadItem(LoadItemType.BYTE_IO, where, nothing, stored, nothing, nothing))
    return items
