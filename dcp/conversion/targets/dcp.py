"""Layout of our own format: records in n files, and the index that the manifest and `.metadata` are made of.

Stock torch loads it. Chunks are those of the source, or each tensor is cut along its first dimension into one
chunk a file, as FSDP shards it, which suits as many loading ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from dcp.conversion.contents.entries import Entries, Value
from dcp.conversion.layouts.layout import CopyBuilder, Hole, Literals, TargetLayout
from dcp.conversion.layouts.layout import Literal as Bytes
from dcp.conversion.targets.job import Chunks, LayoutJob, Planned
from dcp.storage.engine.write import data_file_name
from dcp.storage.errors import OptionError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, Int64, ObjectColumns, starts
from dcp.storage.formats.native.format import DCP
from dcp.storage.formats.native.record import begin_record
from dcp.storage.geometry.boxes import Box
from dcp.version import __version__

__all__ = ["EncodedValue", "dcp_layout", "lay_out"]

_SPLIT_ABOVE_BYTES: Final = 64 << 10
"""Smaller tensors are not worth a record for each file."""


class EncodedValue(NamedTuple):
    """A value that is no tensor: the torch.save bytes for stock torch, and plain data (None if it is not)."""

    value: Value
    blob: bytes
    plain: bytes | None


class _TargetChunk(NamedTuple):
    entry: int
    box: Box
    size_bytes: int
    file: int


def lay_out(job: LayoutJob) -> Planned:
    """The target of a conversion; values keep the bytes that stock torch unpickles."""
    entries, values, index = job.entries, job.values, job.entries.index
    kept, dropped = job.kept({})
    origin = {
        "url": job.source_url,
        "format": index.format,
        "save_id": index.provenance.get("save_id"),
    }
    provenance: dict[str, Any] = {
        "save_id": job.save_id,
        "time": time.time(),
        "dcphub_version": __version__,
        **({} if "merged_from" in job.origin else {"converted_from": origin}),
        **job.origin,
    }
    structure = entries.structure()
    if structure is not None:
        provenance["structure"] = structure
    layout = dcp_layout(
        entries,
        [EncodedValue(value, values.blob(value.row), values.encoded(value.row)) for value in kept],
        files=job.options.files,
        chunks=job.options.chunks,
        save_id=job.save_id,
        provenance=provenance,
        user=index.user,
    )
    return Planned(layout, dropped)


def dcp_layout(
    entries: Entries,
    values: Sequence[EncodedValue],
    *,
    files: int,
    chunks: Chunks,
    save_id: str,
    provenance: Mapping[str, Any],
    user: Mapping[str, Any],
) -> TargetLayout:
    """``files`` data files of about the same size; fewer if there are not as many chunks."""
    if files < 1:
        raise OptionError(f"files must be positive, not {files}")
    if chunks not in ("keep", "split"):
        raise OptionError(f"chunks must be 'keep' or 'split', not {chunks!r}")
    placed = _place(entries, files, chunks)
    count = max((chunk.file for chunk in placed), default=0) + 1
    writer = _RecordLayout(count)
    blobs = writer.add_blobs(values)
    places = writer.add_chunks(entries, placed)
    names = [data_file_name(0, number, save_id) for number in range(count)]
    index = _index(entries, placed, places, values, blobs, names, writer.sizes)
    written = {*index.fqns, *index.objects.fqns}
    paths = {fqn: path for fqn, path in entries.paths.items() if fqn in written}
    return TargetLayout(
        file_names=names,
        file_sizes=writer.sizes,
        literals=Literals.of(writer.literals),
        copies=writer.copies.build(),
        holes=writer.holes,
        index=_with_facts(index, paths, provenance, user),
        chunk_copies=np.array([place.copy for place in places], np.int64),
        tensor_copies={},
    )


def _place(entries: Entries, files: int, chunks: Chunks) -> list[_TargetChunk]:
    """The chunks of all entries in their order, with the file of each. Tied ones are with their first."""
    boxes = [_boxes(entries, number, files, chunks) for number in range(len(entries.tensors))]
    sizes = [_box_sizes(entries, number, boxes[number]) for number in range(len(boxes))]
    own = [number for number, entry in enumerate(entries.tensors) if entry.tied_to == number]
    total = max(1, sum(sum(sizes[number]) for number in own))
    taken, placed = 0, {}
    for number in own:
        row = []
        split = len(boxes[number]) == files > 1 and chunks == "split"
        for part, (box, size) in enumerate(zip(boxes[number], sizes[number], strict=True)):
            file = part if split else min(files - 1, taken * files // total)
            row.append(_TargetChunk(number, box, size, file))
            taken += size
        placed[number] = row
    result = []
    for number, entry in enumerate(entries.tensors):
        result += [chunk._replace(entry=number) for chunk in placed[entry.tied_to]]
    used = sorted({chunk.file for chunk in result})
    renumbered = {file: number for number, file in enumerate(used)}
    return [chunk._replace(file=renumbered[chunk.file]) for chunk in result]


def _boxes(entries: Entries, number: int, files: int, chunks: Chunks) -> list[Box]:
    entry = entries.tensors[number]
    index, shape = entries.index, entries.shape(entry)
    if chunks == "keep":
        found = dict.fromkeys(index.box(chunk) for chunk in index.chunks(entry.tensor))
        if _are_disjoint(list(found), shape):
            return list(found)
    elif (
        shape
        and files > 1
        and math.prod(shape) * dtypes.BY_CODE[entry.dtype_code].itemsize >= _SPLIT_ABOVE_BYTES
    ):
        rows = -(-shape[0] // files)
        rest = shape[1:]
        return [
            Box((begin, *(0 for _ in rest)), (min(rows, shape[0] - begin), *rest))
            for begin in range(0, shape[0], rows)
        ]
    return [Box.whole(shape)]


def _are_disjoint(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether the volumes add up to the tensor's. That all is covered is checked elsewhere."""
    return sum(box.volume for box in boxes) == math.prod(shape) and bool(boxes)


def _box_sizes(entries: Entries, number: int, boxes: Sequence[Box]) -> list[int]:
    itemsize = dtypes.BY_CODE[entries.tensors[number].dtype_code].itemsize
    return [box.volume * itemsize for box in boxes]


class _ChunkPlace(NamedTuple):
    copy: int
    file: int
    record_offset: int
    record_bytes: int
    payload_offset: int


class _RecordLayout:
    """Appends records to files that are only counted."""

    def __init__(self, files: int) -> None:
        self.sizes = [0] * files
        self.literals: list[Bytes] = []
        self.holes: list[Hole] = []
        self.copies = CopyBuilder()

    def add_blobs(self, values: Sequence[EncodedValue]) -> list[tuple[int, int]]:
        """(offset, CRC-32) in file 0 of each value's bytes; equal ones are stored once."""
        known: dict[bytes, tuple[int, int]] = {}
        for encoded in values:
            if encoded.blob not in known:
                known[encoded.blob] = self.sizes[0], crc32(encoded.blob)
                self._put(0, encoded.blob)
        return [known[encoded.blob] for encoded in values]

    def add_chunks(self, entries: Entries, chunks: Sequence[_TargetChunk]) -> list[_ChunkPlace]:
        """Where each chunk is; those of tied entries are where the first one's are."""
        places: dict[tuple[int, Box], _ChunkPlace] = {}
        for chunk in chunks:
            entry = entries.tensors[chunk.entry]
            if entry.tied_to == chunk.entry:
                places[chunk.entry, chunk.box] = self._add(entry.tensor, entry.dtype_code, chunk)
        return [places[entries.tensors[chunk.entry].tied_to, chunk.box] for chunk in chunks]

    def _add(self, tensor: int, code: int, chunk: _TargetChunk) -> _ChunkPlace:
        begin = self.sizes[chunk.file]
        record = begin_record(code, chunk.box[1], chunk.size_bytes, begin)
        self._put(chunk.file, record.prefix)
        payload = self.sizes[chunk.file]
        copy = self.copies.add(tensor, chunk.box, code, chunk.file, payload)
        self.sizes[chunk.file] += chunk.size_bytes
        end = self.sizes[chunk.file]
        self._put(chunk.file, record.suffix(0))
        self.holes += [Hole(copy, chunk.file, end + at) for at in record.crc_positions]
        return _ChunkPlace(copy, chunk.file, begin, record.record_bytes, payload)

    def _put(self, file: int, data: bytes) -> None:
        self.literals.append(Bytes(file, self.sizes[file], data))
        self.sizes[file] += len(data)


def _index(
    entries: Entries,
    chunks: Sequence[_TargetChunk],
    places: Sequence[_ChunkPlace],
    values: Sequence[EncodedValue],
    blobs: Sequence[tuple[int, int]],
    names: Sequence[str],
    sizes: Sequence[int],
) -> CheckpointIndex:
    def column(numbers: Sequence[int]) -> Int64:
        return np.array(numbers, dtype=np.int64)

    tensors = entries.tensors
    shapes = [entries.shape(entry) for entry in tensors]
    counts = np.bincount(column([chunk.entry for chunk in chunks]), minlength=len(tensors))
    orders = entries.index.stride_orders
    return CheckpointIndex(
        format=DCP.name,
        fqns=[entry.fqn for entry in tensors],
        dtype_codes=np.array([entry.dtype_code for entry in tensors], dtype=np.uint8),
        shape_start=starts([len(shape) for shape in shapes]),
        shape_values=column([extent for shape in shapes for extent in shape]),
        requires_grad=entries.index.requires_grad[column([entry.tensor for entry in tensors])],
        chunk_start=starts(counts),
        chunk_offsets=column([value for chunk in chunks for value in chunk.box[0]]),
        chunk_sizes=column([value for chunk in chunks for value in chunk.box[1]]),
        chunk_files=column([place.file for place in places]),
        record_offsets=column([place.record_offset for place in places]),
        record_lengths=column([place.record_bytes for place in places]),
        payload_offsets=column([place.payload_offset for place in places]),
        payload_lengths=column([chunk.size_bytes for chunk in chunks]),
        crc_start=starts([0] * len(chunks)),
        files=names,
        file_sizes=column(sizes),
        objects=_objects(values, blobs),
        digests=_kept_digests(entries),
        stride_orders={
            row: orders[entry.tensor] for row, entry in enumerate(tensors) if entry.tensor in orders
        },
    )


def _kept_digests(entries: Entries) -> list[bytes]:
    """The sums that the source has, of what is not cast."""
    index = entries.index
    if not len(index.digests):
        return []
    codes = index.dtype_codes.tolist()
    return [
        index.digests[entry.tensor] if entry.dtype_code == codes[entry.tensor] else b""
        for entry in entries.tensors
    ]


def _objects(values: Sequence[EncodedValue], blobs: Sequence[tuple[int, int]]) -> ObjectColumns:
    numbers: dict[bytes, int] = {}
    plain = [-1 if value.plain is None else numbers.setdefault(value.plain, len(numbers)) for value in values]
    return ObjectColumns(
        fqns=[encoded.value.fqn for encoded in values],
        files=np.zeros(len(values), np.int64),
        offsets=np.array([offset for offset, _ in blobs], np.int64),
        lengths=np.array([len(encoded.blob) for encoded in values], np.int64),
        crcs=np.array([crc for _, crc in blobs], np.int64),
        plain=np.array(plain, np.int64),
        values=list(numbers),
    )


def _with_facts(
    index: CheckpointIndex,
    paths: Mapping[str, tuple[str | int, ...]],
    provenance: Mapping[str, Any],
    user: Mapping[str, Any],
) -> CheckpointIndex:
    return replace(index, planner_data=dict(paths), provenance=dict(provenance), user=dict(user))
