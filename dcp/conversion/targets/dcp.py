"""Layout of our own format: records in n files, and the index that the manifest and `.metadata` are made of.

Stock torch loads it. Chunks are those of the source, or each tensor is cut along its first dimension into one
chunk a file, as FSDP shards it, which suits as many loading ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from dcp.conversion.contents.entries import Entries, Value
from dcp.conversion.layouts.layout import Copies, Hole, Literal, Literals, TargetLayout
from dcp.conversion.targets.job import Chunks, LayoutJob, Planned
from dcp.storage.engine.write import data_file_name
from dcp.storage.errors import OptionError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns
from dcp.storage.formats.native.record import begin_record
from dcp.storage.formats.registry import DCP
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import Int64, starts
from dcp.version import __version__

__all__ = ["lay_out"]

_SPLIT_ABOVE_BYTES: Final = 64 << 10
"""Smaller tensors are not worth a record for each file."""


class _Chunk(NamedTuple):
    tensor: int
    code: int
    box: Box
    size_bytes: int
    file: int


def lay_out(job: LayoutJob) -> Planned:
    """Lay out the target of a conversion: ``files`` data files of about the same size, or fewer if there
    are not as many chunks. Values keep the bytes that stock torch unpickles."""
    entries, options = job.entries, job.options
    if options.files < 1:
        raise OptionError(f"files must be positive, not {options.files}")
    if options.chunks not in ("keep", "split"):
        raise OptionError(f"chunks must be 'keep' or 'split', not {options.chunks!r}")
    kept, dropped = job.kept({})
    chunks, of_entries = _chunks(entries, options.files, options.chunks)
    encoded = [job.values.blob(value.row) for value in kept]
    filled = _fill(chunks, encoded)
    sizes, at = filled.sizes, filled.places
    names = [data_file_name(0, number, job.save_id) for number in range(len(sizes))]
    rows = np.array([number for own in of_entries for number in own], np.int64)
    records = dict(
        zip(
            ("record_offsets", "record_lengths", "payload_offsets"),
            np.ascontiguousarray(at[rows].T),
            strict=True,
        )
    )
    boxes = [chunks[row].box for row in rows.tolist()]
    written = {*entries.names, *(value.fqn for value in kept)}
    index = CheckpointIndex(
        format=DCP.name,
        **_tensors(entries),
        chunk_start=starts(list(map(len, of_entries))),
        chunk_offsets=np.array([number for box in boxes for number in box.offsets], np.int64),
        chunk_sizes=np.array([number for box in boxes for number in box.sizes], np.int64),
        chunk_files=np.array([chunk.file for chunk in chunks], np.int64)[rows],
        payload_lengths=np.array([chunk.size_bytes for chunk in chunks], np.int64)[rows],
        crc_start=starts([0] * len(rows)),
        **records,
        files=names,
        file_sizes=np.array(sizes, np.int64),
        objects=_objects(job, kept, encoded, filled.blobs),
        planner_data={fqn: path for fqn, path in entries.paths.items() if fqn in written},
        provenance=_provenance(job),
        user=dict(entries.index.user),
    )
    copies = Copies.of_boxes(
        [
            (chunk.tensor, chunk.box, chunk.code, chunk.file, offset, chunk.size_bytes)
            for chunk, offset in zip(chunks, at[:, 2].tolist(), strict=True)
        ]
    )
    layout = TargetLayout(names, sizes, Literals.of(filled.literals), copies, filled.holes, index, rows)
    return Planned(layout, dropped)


class _Filled(NamedTuple):
    """Files that are laid out: their ``sizes``, literal bytes, and holes for checksums that are known later.

    ``places`` has of each chunk offset and length of its record, and the offset of its payload; ``blobs``
    (offset in file 0, CRC-32) of each value's bytes.
    """

    sizes: list[int]
    literals: list[Literal]
    holes: list[Hole]
    places: Int64
    blobs: dict[bytes, tuple[int, int]]


def _fill(chunks: list[_Chunk], encoded: list[bytes]) -> _Filled:
    """Lay out values, equal ones once, and then chunks with their records, in the files of the chunks."""
    sizes = [0] * (max((chunk.file for chunk in chunks), default=0) + 1)
    literals: list[Literal] = []
    holes: list[Hole] = []

    def put(file: int, data: bytes) -> None:
        literals.append(Literal(file, sizes[file], data))
        sizes[file] += len(data)

    blobs: dict[bytes, tuple[int, int]] = {}
    for blob in dict.fromkeys(encoded):
        blobs[blob] = sizes[0], crc32(blob)
        put(0, blob)
    places = []
    for copy, (_, code, box, size, file) in enumerate(chunks):
        record = begin_record(code, box.sizes, size, sizes[file])
        begin = sizes[file]
        put(file, record.prefix)
        places.append((begin, record.record_bytes, sizes[file]))
        sizes[file] += size
        holes += [Hole(copy, file, sizes[file] + at) for at in record.crc_positions]
        put(file, record.suffix(0))
    return _Filled(sizes, literals, holes, np.array(places, np.int64).reshape(-1, 3), blobs)


def _chunks(entries: Entries, files: int, chunks: Chunks) -> tuple[list[_Chunk], list[range]]:
    """Return the chunks of tensors that are not tied to another, each with its file, and by entry which
    are its own: tied ones have those of the first."""
    boxes = {
        number: _boxes(entries, number, files, chunks)
        for number, entry in enumerate(entries.tensors)
        if entry.tied_to == number
    }
    itemsizes = {code: dtype.itemsize for code, dtype in dtypes.BY_CODE.items()}
    tensors = entries.tensors
    sizes = {
        number: [box.volume * itemsizes[tensors[number].dtype_code] for box in own]
        for number, own in boxes.items()
    }
    total, taken = max(1, sum(map(sum, sizes.values()))), 0
    placed: list[_Chunk] = []
    ranges: dict[int, range] = {}
    for number, own in boxes.items():
        split, first = len(own) == files > 1 and chunks == "split", len(placed)
        for part, (box, size) in enumerate(zip(own, sizes[number], strict=True)):
            file = part if split else min(files - 1, taken * files // total)
            placed.append(_Chunk(tensors[number].tensor, tensors[number].dtype_code, box, size, file))
            taken += size
        ranges[number] = range(first, len(placed))
    renumbered = {file: number for number, file in enumerate(sorted({chunk.file for chunk in placed}))}
    placed = [chunk._replace(file=renumbered[chunk.file]) for chunk in placed]
    return placed, [ranges[entry.tied_to] for entry in tensors]


def _boxes(entries: Entries, number: int, files: int, chunks: Chunks) -> list[Box]:
    entry, index, shape = entries.tensors[number], entries.index, entries.shapes[number]
    volume = math.prod(shape)
    if chunks == "keep":
        found = dict.fromkeys(index.box(chunk) for chunk in index.chunks(entry.tensor))
        if found and sum(box.volume for box in found) == volume:  # that all is covered is checked elsewhere
            return list(found)
    elif shape and files > 1 and volume * dtypes.BY_CODE[entry.dtype_code].itemsize >= _SPLIT_ABOVE_BYTES:
        rows, (extent, *rest) = -(-shape[0] // files), shape
        return [
            Box((begin, *(0 for _ in rest)), (min(rows, extent - begin), *rest))
            for begin in range(0, extent, rows)
        ]
    return [Box.whole(shape)]


def _provenance(job: LayoutJob) -> dict[str, Any]:
    index, structure = job.entries.index, job.entries.structure()
    origin = {"url": job.source_url, "format": index.format, "save_id": index.provenance.get("save_id")}
    return {
        "save_id": job.save_id,
        "time": time.time(),
        "dcphub_version": __version__,
        **({} if "merged_from" in job.origin else {"converted_from": origin}),
        **job.origin,
        **({} if structure is None else {"structure": structure}),
    }


def _tensors(entries: Entries) -> dict[str, Any]:
    """Return the columns of an index that are by tensor, and not of chunks. Digests are the source's, of
    what is not cast."""
    index, shapes = entries.index, entries.shapes
    rows, codes = entries.rows.tolist(), entries.codes.tolist()
    orders, own, digests = index.stride_orders, index.dtype_codes.tolist(), index.digests
    kept = (digests[row] if code == own[row] else b"" for row, code in zip(rows, codes, strict=True))
    return {
        "fqns": entries.names,
        "dtype_codes": entries.codes.astype(np.uint8),
        "shape_start": starts(list(map(len, shapes))),
        "shape_values": np.array([extent for shape in shapes for extent in shape], np.int64),
        "requires_grad": index.requires_grad[entries.rows],
        "stride_orders": {at: orders[row] for at, row in enumerate(rows) if row in orders},
        "digests": list(kept) if len(digests) else [],
    }


def _objects(
    job: LayoutJob, kept: Sequence[Value], encoded: Sequence[bytes], blobs: Mapping[bytes, tuple[int, int]]
) -> ObjectColumns:
    """Return values that are no tensors: their torch.save bytes in file 0, and plain data of those that
    are."""
    numbers: dict[bytes, int] = {}
    found = [job.values.encoded(value.row) for value in kept]
    plain = [-1 if one is None else numbers.setdefault(one, len(numbers)) for one in found]
    places = [(*blobs[blob], len(blob)) for blob in encoded]
    offsets, crcs, lengths = np.ascontiguousarray(np.array(places, np.int64).reshape(-1, 3).T)
    return ObjectColumns(
        fqns=[value.fqn for value in kept],
        files=np.zeros(len(kept), np.int64),
        offsets=offsets,
        lengths=lengths,
        crcs=crcs,
        plain=np.array(plain, np.int64),
        values=list(numbers),
    )
