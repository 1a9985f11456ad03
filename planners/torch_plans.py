"""Between columns and torch's plan objects, for planners and storages that speak torch's interface."""

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

from dcp.planners.layout.local import DTYPE_CODES
from dcp.planners.load.plan import LoadPlan
from dcp.planners.rank_state import HeldBoxes, SaveColumns, SaveObjects
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import ContainerNote
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, starts
from dcp.storage.formats.torch.format import TORCH_DCP
from dcp.storage.geometry.boxes import Box
from dcp.storage.torch_compat import tensor_properties
from dcp.storage.torch_storage.metadata import LazyMetadata

_TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class ComparedItem(WriteItem):
    """A `WriteItem` with a digest of what it names (0: not known), so that replicas can be compared."""

    digest: int = dataclasses.field(default=0, compare=False)


@dataclass(frozen=True)
class NotedPlan(SavePlan):
    """A `SavePlan` with notes on the containers of the state dict, which its paths do not tell."""

    notes: Sequence[ContainerNote] = dataclasses.field(default=(), compare=False)


def write_items(
    columns: SaveColumns, sources: Sequence[torch.Tensor], order: Sequence[str]
) -> list[WriteItem]:
    """Make an item for each box and each object, in the order of the names ``order``. ``sources`` are by
    source number."""
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
            # one object an item, because planners change it in place
            properties=tensor_properties(_TORCH_DTYPES[codes[tensor]], bool(grads[tensor]), strides),
            size=torch.Size(shapes[shape_start[tensor] : shape_start[tensor + 1]]),
        )
        kind = WriteItemType.SHARD if columns.item_sharded[item] else WriteItemType.TENSOR
        item_object = ComparedItem(MetadataIndex(fqn, offset), kind, tensor_data=data, digest=digests[item])
        boxes.setdefault(fqn, []).append(item_object)
    for fqn, digest in zip(columns.objects.fqns, columns.objects.digests.tolist(), strict=True):
        boxes[fqn] = [ComparedItem(MetadataIndex(fqn), WriteItemType.BYTE_IO, digest=digest)]
    return [item for fqn in order for item in boxes.get(fqn, ())]


@dataclass
class _Tensors:
    """Columns under construction, from objects that agree on a tensor's dtype and shape."""

    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    kinds: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    grads: list[bool] = dataclasses.field(default_factory=list)

    def row(self, fqn: str, dtype: torch.dtype, shape: Sequence[int], *, requires_grad: bool) -> int:
        code = DTYPE_CODES.get(dtype)
        if code is None:
            raise PlanError(f"tensor {fqn!r}: dtype {dtype} cannot be stored", fqn=fqn)
        kind = (code, tuple(shape))
        row = self.rows.setdefault(fqn, len(self.kinds))
        if row == len(self.kinds):
            self.kinds.append(kind)
            self.grads.append(requires_grad)
        elif self.kinds[row] != kind:
            raise PlanError(f"one plan has boxes of {fqn!r} with different dtypes or shapes", fqn=fqn)
        return row

    def columns(self) -> dict[str, Any]:
        return {
            "fqns": tuple(self.rows),
            "dtype_codes": np.array([code for code, _ in self.kinds], np.uint8),
            "requires_grad": np.array(self.grads, np.uint8),
            "shape_start": starts([len(shape) for _, shape in self.kinds]),
            "shape_values": np.array([size for _, shape in self.kinds for size in shape], np.int64),
        }


def columns_from_plan(plan: SavePlan) -> tuple[SaveColumns, list[WriteItem], list[WriteItem]]:
    """Return (columns, items by item row, items by object row) of a plan made of objects, whoever made it.

    ``planner_data`` is carried over only where it maps names to paths.
    """
    tensors, tensor_items, object_items = _Tensors(), [], []
    item_tensors: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    sharded: list[bool] = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            object_items.append(item)
            continue
        data = item.tensor_data
        if data is None or data.chunk is None:
            raise PlanError(
                f"the plan's item {item.index.fqn!r} is a tensor without a box", fqn=item.index.fqn
            )
        properties = data.properties
        row = tensors.row(
            item.index.fqn, properties.dtype, data.size, requires_grad=bool(properties.requires_grad)
        )
        tensor_items.append(item)
        item_tensors.append(row)
        offsets.extend(data.chunk.offsets)
        sizes.extend(data.chunk.sizes)
        sharded.append(item.type == WriteItemType.SHARD)
    count, none = len(tensor_items), np.zeros(len(object_items), np.int64)
    columns = SaveColumns(
        **tensors.columns(),
        item_tensors=np.array(item_tensors, np.int64),
        item_offsets=np.array(offsets, np.int64),
        item_sizes=np.array(sizes, np.int64),
        item_local_offsets=np.zeros(len(offsets), np.int64),
        item_sources=np.arange(count, dtype=np.int64),
        item_sharded=np.array(sharded, np.uint8),
        item_digests=_digests(tensor_items),
        item_ties=np.full(count, -1, np.int64),
        objects=SaveObjects(tuple(item.index.fqn for item in object_items), _digests(object_items), none),
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
    """Reduce ``plan`` to what its rank writes, in its order; items of split boxes name their part."""
    position = {id(item): number for number, item in enumerate(plan.items)}
    hints = writes.chunks - index.chunk_start[index.chunk_tensors[writes.chunks]]
    placed: list[tuple[int, int, WriteItem]] = []
    rows = (writes.sources.tolist(), writes.chunks.tolist(), hints.tolist())
    for row, (number, chunk, hint) in enumerate(zip(*rows, strict=True)):
        item = tensor_items[number]
        placed.append((position[id(item)], row, _placed(item, index.box(chunk), hint)))
    for number in writes.objects.tolist():
        item = object_items[number]
        placed.append((position[id(item)], 0, item))
    return dataclasses.replace(
        plan, items=[item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]
    )


def _placed(item: WriteItem, box: Box, hint: int) -> WriteItem:
    index = MetadataIndex(item.index.fqn, box.offsets, hint)
    data = item.tensor_data
    if data is None or tuple(data.chunk.sizes) == box.sizes:
        return dataclasses.replace(item, index=index)
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    return dataclasses.replace(
        item, index=index, type=WriteItemType.SHARD, tensor_data=dataclasses.replace(data, chunk=chunk)
    )


def metadata_from_plans(index: CheckpointIndex, plans: Sequence[SavePlan]) -> Metadata:
    """Return torch's metadata of a global plan. A tensor's properties are those of its first item in a local
    plan."""
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


def index_from_metadata(metadata: Metadata) -> CheckpointIndex:
    """Convert torch's metadata to columns of names, shapes and boxes, without the places of bytes."""
    tensors, objects = _Tensors(), []
    counts: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            objects.append(fqn)
            continue
        tensors.row(
            fqn, entry.properties.dtype, entry.size, requires_grad=bool(entry.properties.requires_grad)
        )
        counts.append(len(entry.chunks))
        for chunk in entry.chunks:
            offsets.extend(chunk.offsets)
            sizes.extend(chunk.sizes)
    chunk_files = np.zeros(sum(counts), np.int64)
    return CheckpointIndex(
        format=TORCH_DCP.name,
        **tensors.columns(),
        chunk_start=starts(counts),
        chunk_offsets=np.array(offsets, np.int64),
        chunk_sizes=np.array(sizes, np.int64),
        chunk_files=chunk_files,
        objects=ObjectColumns(fqns=tuple(objects)),
        planner_data=metadata.planner_data,
        provenance=known_provenance(metadata),
    )


def known_provenance(metadata: Metadata) -> Mapping[str, Any]:
    """Return who saved it, if our reader read it; torch's own metadata does not say."""
    return metadata.index.provenance if isinstance(metadata, LazyMetadata) and metadata.has_index else {}


def read_items(plan: LoadPlan, wanted: HeldBoxes, index: CheckpointIndex) -> list[ReadItem]:
    """Return torch's read items of a load plan.

    Destination offsets are relative to the wanted box, which the destination index names by its offset.
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
