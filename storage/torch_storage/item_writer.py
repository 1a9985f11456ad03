"""Writing the items of torch's plan objects: what a custom planner resolves, record by record."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp.storage.engine.write import CHUNK_COLUMNS, DataFile
from dcp.storage.errors import PlanError
from dcp.storage.tensors import byte_pieces, dtype_code

__all__ = ["WrittenItem", "write_items"]


class WrittenItem(NamedTuple):
    """The place of one written item: the ``storage_data`` of its WriteResult, plain enough for any
    collective."""

    file: str
    record_offset: int
    record_length: int
    payload_offset: int
    payload_length: int
    crcs: tuple[int, ...]
    dtype_code: int


def write_items(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    new_file: Callable[[int, int], DataFile],
    sync: Callable[[], None] | None,
    *,
    single_file: bool,
) -> list[WriteResult]:
    """Write the items of a plan, as ``planner`` resolves them; complete files, or none and the error.

    ``new_file`` makes one for so many payload bytes in so many records, ``sync`` is called when all are
    complete; ``single_file`` takes one for all.
    """
    results: list[WriteResult] = []
    files: list[DataFile] = []
    try:
        for part in [items] if single_file else [[item] for item in items]:
            if part:
                files.append(new_file(_payload_bytes(part), len(part)))
                results += [_write_item(files[-1], planner, item) for item in part]
                files[-1].finish()
        if sync is not None:
            sync()
    except BaseException:
        for file in files:
            file.abort()
        raise
    return results


def _payload_bytes(items: Sequence[WriteItem]) -> int:
    """Return the bytes of the tensors; values are small, and known only later."""
    tensors = [item.tensor_data for item in items if item.tensor_data is not None]
    return sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in tensors)


def _write_item(file: DataFile, planner: SavePlanner, item: WriteItem) -> WriteResult:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise PlanError(
                f"the planner resolved {item.index.fqn!r} to {type(data).__name__}, not BytesIO",
                fqn=item.index.fqn,
            )
        ((offset, length, crc),) = file.blobs([data.getvalue()])
        place = WrittenItem(file.name, offset, length, offset, length, (crc,), 0)
        return WriteResult(item.index, length, place)
    return _write_tensor(file, item, data)


def _write_tensor(file: DataFile, item: WriteItem, data: object) -> WriteResult:
    fqn, planned = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or planned is None:
        raise PlanError(f"the planner resolved tensor {fqn!r} to {type(data).__name__}", fqn=fqn)
    tensor = data.detach()
    sizes = tuple(planned.chunk.sizes)
    if tuple(tensor.shape) != sizes or tensor.dtype != planned.properties.dtype:
        raise PlanError(
            f"the planner resolved {fqn!r} to {tensor.dtype} {tuple(tensor.shape)}, its plan says "
            f"{planned.properties.dtype} {sizes}; change the item's properties or chunk in "
            "create_local_plan too",
            fqn=fqn,
        )
    code = dtype_code(tensor.dtype, fqn=fqn)
    file.tensor(code, sizes, tensor.nbytes, byte_pieces(tensor))
    record_offset, record_length, payload_offset, payload_length, count = file.chunks[-CHUNK_COLUMNS:]
    crcs = tuple(file.crcs[len(file.crcs) - count :])
    place = WrittenItem(file.name, record_offset, record_length, payload_offset, payload_length, crcs, code)
    return WriteResult(item.index, tensor.nbytes, place)
