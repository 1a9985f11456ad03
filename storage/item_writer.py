"""Writing the items of torch's plan objects: what a custom planner resolves, record by record."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp.storage.engine.write import DataFile, file_bytes
from dcp.storage.errors import PlanError
from dcp.storage.tensors import byte_pieces, dtype_code

if TYPE_CHECKING:
    from dcp.storage.writer import FileSystemWriter

__all__ = ["ItemWriter", "StoredChunk"]


class StoredChunk(NamedTuple):
    """Where one written item is: the ``storage_data`` of its WriteResult, plain enough for any collective."""

    file: str
    record_offset: int
    record_length: int
    payload_offset: int
    payload_length: int
    crcs: tuple[int, ...]
    dtype_code: int


class ItemWriter:
    """Writes the items of torch's plan objects, as a planner resolves them."""

    def __init__(self, writer: FileSystemWriter, planner: SavePlanner) -> None:
        self._writer = writer
        self._planner = planner
        self._file: DataFile | None = None
        self._results: list[WriteResult] = []

    def write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Write all of ``items``; complete files, or none and the error."""
        finished: list[DataFile] = []
        try:
            single = self._writer.single_file_per_rank
            for item in items:
                if self._file is None:
                    self._file = self._writer.new_file(self._expected_bytes(items if single else [item]))
                file = self._file
                self._results.append(self._write_item(file, item))
                if not self._writer.single_file_per_rank:
                    file.finish()
                    finished.append(file)
                    self._file = None
            if self._file is not None:
                self._file.finish()
            if self._writer.sync_files:
                self._writer.store.sync()
        except BaseException:
            for file in [*finished, *([self._file] if self._file else [])]:
                file.abort()
            raise
        return self._results

    def _expected_bytes(self, items: Sequence[WriteItem]) -> int:
        """The size of a file with ``items``; those that are no tensors are small, and known only later."""
        payload_bytes = 0
        for item in items:
            if item.tensor_data is not None:
                elements = math.prod(item.tensor_data.chunk.sizes)
                payload_bytes += elements * item.tensor_data.properties.dtype.itemsize
        return file_bytes(payload_bytes, len(items), torch_compatible=self._writer.torch_compatible)

    def _write_item(self, file: DataFile, item: WriteItem) -> WriteResult:
        data = self._planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise PlanError(
                    f"the planner resolved {item.index.fqn!r} to {type(data).__name__}, not BytesIO",
                    fqn=item.index.fqn,
                )
            blob = data.getvalue()
            offset, length, crc = file.blob(blob)
            place = StoredChunk(file.name, offset, length, offset, length, (crc,), 0)
            return WriteResult(item.index, length, place)
        return self._write_tensor(file, item, data)

    def _write_tensor(self, file: DataFile, item: WriteItem, data: object) -> WriteResult:
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
        row = file.tensor(code, sizes, tensor.nbytes, byte_pieces(tensor))
        rows = file.rows
        place = StoredChunk(
            file.name,
            rows.record_offsets[row],
            rows.record_lengths[row],
            rows.payload_offsets[row],
            rows.payload_lengths[row],
            tuple(rows.crcs[rows.crc_starts[row] :]),
            code,
        )
        return WriteResult(item.index, tensor.nbytes, place)
