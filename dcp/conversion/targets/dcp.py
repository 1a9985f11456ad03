"""Layout of the dcp format: records in n files, with the index for the manifest and `.metadata`.

Stock torch can load the result. Chunks are those of the source, or each tensor is divided along dimension 0
into one chunk for each file, as FSDP does, which suits as many loading ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from dcp.conversion.layout import Copies, Hole, Literal, Literals, TargetLayout
from dcp.conversion.targets.job import Chunks, LayoutJob, Planned
from dcp.inspection.entries import Entries, Value
from dcp.storage.engine.write import data_file_name
from dcp.storage.errors import OptionError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, itemsizes
from dcp.storage.formats.native.record import begin_record
from dcp.storage.formats.registry import DCP
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import Int64, gather_rows, row_products, starts
from dcp.version import __version__

_SPLIT_ABOVE_BYTES: Final = 64 << 10
"""Smaller tensors are not worth a record for each file."""


def lay_out(job: LayoutJob) -> Planned:
    """Lay out ``files`` data files of similar size, or fewer with few chunks. Values keep bytes that stock
    torch unpickles."""
    entries, options = job.entries, job.options
    if options.files < 1:
        raise OptionError(f"files must be positive, not {options.files}")
    if options.chunks not in ("keep", "split"):
        raise OptionError(f"chunks must be 'keep' or 'split', not {options.chunks!r}")
    kept, dropped = job.kept({})
    encoded = [job.blob(value.row) for value in kept]
    copies, of_entries = _chunks(entries, options.files, options.chunks)
    sizes, literals, holes, places = _fill(copies, list(dict.fromkeys(encoded)))
    copies = replace(copies, offsets=places[2])
    names = [data_file_name(0, number, job.save_id) for number in range(len(sizes))]
    rows = np.array([number for own in of_entries for number in own], np.int64)
    written = {*entries.names, *(value.fqn for value in kept)}
    index = CheckpointIndex(
        format=DCP.name,
        **_tensors(entries),
        chunk_start=starts(list(map(len, of_entries))),
        chunk_offsets=gather_rows(copies.box_offsets, copies.box_start, rows),
        chunk_sizes=gather_rows(copies.box_sizes, copies.box_start, rows),
        chunk_files=copies.files[rows],
        payload_lengths=copies.size_bytes[rows],
        crc_start=starts([0] * len(rows)),
        record_offsets=places[0][rows],
        record_lengths=places[1][rows],
        payload_offsets=places[2][rows],
        files=names,
        file_sizes=np.array(sizes, np.int64),
        objects=_objects(job, kept, encoded),
        planner_data={fqn: path for fqn, path in entries.paths.items() if fqn in written},
        provenance=_provenance(job),
        user=dict(entries.index.user),
    )
    return Planned(TargetLayout(names, sizes, Literals.of(literals), copies, holes, index, rows), dropped)


def _chunks(entries: Entries, files: int, chunks: Chunks) -> tuple[Copies, list[range]]:
    """Return chunks of untied tensors with their files, and the chunks of each entry; tied entries share the
    first one's. Positions follow later."""
    boxes: list[Box] = []
    owners: list[int] = []
    parts: list[int] = []  # the file of a part of a split tensor, else -1
    ranges: list[range] = []
    for number, entry in enumerate(entries.tensors):
        if entry.tied_to != number:
            ranges.append(ranges[entry.tied_to])
            continue
        own = _boxes(entries, number, files, chunks)
        ranges.append(range(len(boxes), len(boxes) + len(own)))
        boxes += own
        owners += [number] * len(own)
        parts += range(files) if len(own) == files > 1 and chunks == "split" else [-1] * len(own)
    box_start = starts([len(box.sizes) for box in boxes])
    begins, extents = (np.array([n for box in boxes for n in box[side]], np.int64) for side in (0, 1))
    codes = entries.codes[owners]
    sizes = row_products(extents, box_start) * itemsizes(codes.astype(np.uint8))
    ends = starts(sizes)
    placed = np.minimum(files - 1, ends[:-1] * files // max(1, int(ends[-1])))
    split = np.array(parts, np.int64)
    placed = np.unique(np.where(split < 0, placed, split), return_inverse=True)[1].astype(np.int64)
    rows, unplaced = entries.rows[owners], np.zeros(len(boxes), np.int64)
    return Copies(rows, box_start, begins, extents, codes, placed, unplaced, sizes), ranges


def _boxes(entries: Entries, number: int, files: int, chunks: Chunks) -> list[Box]:
    index, shape, volume = entries.index, entries.shapes[number], int(entries.elements[number])
    if chunks == "keep":
        found = dict.fromkeys(index.box(chunk) for chunk in index.chunks(entries.tensors[number].tensor))
        # the read engine checks that chunks cover the tensor
        if found and sum(box.volume for box in found) == volume:
            return list(found)
    elif shape and files > 1 and entries.size_bytes[number] >= _SPLIT_ABOVE_BYTES:
        rows, (extent, *rest) = -(-shape[0] // files), shape
        return [
            Box((begin, *(0 for _ in rest)), (min(rows, extent - begin), *rest))
            for begin in range(0, extent, rows)
        ]
    return [Box.whole(shape)]


def _fill(copies: Copies, blobs: Sequence[bytes]) -> tuple[list[int], list[Literal], list[Hole], Int64]:
    """Lay out values, then chunks with their records, in the files.

    Returns file sizes, literal bytes, holes for later checksums, and by chunk the begin and length of the
    record and the begin of the payload.
    """
    sizes = [0] * (int(copies.files.max(initial=0)) + 1)
    literals: list[Literal] = []
    holes: list[Hole] = []
    places: list[tuple[int, int, int]] = []

    def put(file: int, data: bytes) -> None:
        literals.append(Literal(file, sizes[file], data))
        sizes[file] += len(data)

    for blob in blobs:
        put(0, blob)
    extents, bounds = copies.box_sizes.tolist(), pairwise(copies.box_start.tolist())
    columns = (column.tolist() for column in (copies.dtype_codes, copies.size_bytes, copies.files))
    for copy, ((low, high), code, size, file) in enumerate(zip(bounds, *columns, strict=True)):
        begin = sizes[file]
        record = begin_record(code, tuple(extents[low:high]), size, begin)
        put(file, record.prefix)
        places.append((begin, record.record_bytes, sizes[file]))
        sizes[file] += size
        holes += [Hole(copy, file, sizes[file] + at) for at in record.crc_positions]
        put(file, record.suffix(0))
    return sizes, literals, holes, np.ascontiguousarray(np.array(places, np.int64).reshape(-1, 3).T)


def _provenance(job: LayoutJob) -> dict[str, Any]:
    index, structure = job.entries.index, job.entries.structure()
    origin = {"url": job.engine.store.url, "format": index.format, "save_id": index.provenance.get("save_id")}
    return {
        "save_id": job.save_id,
        "time": time.time(),
        "dcphub_version": __version__,
        **({} if "merged_from" in job.origin else {"converted_from": origin}),
        **job.origin,
        **({} if structure is None else {"structure": structure}),
    }


def _tensors(entries: Entries) -> dict[str, Any]:
    """Return the index columns by tensor. Unchanged tensors keep their digests."""
    index, rows = entries.index, entries.rows
    orders, digests = index.stride_orders, index.digests
    is_cast = (entries.codes != index.dtype_codes[rows]).tolist()
    kept = (b"" if cast else digests[row] for row, cast in zip(rows.tolist(), is_cast, strict=True))
    return {
        "fqns": entries.names,
        "dtype_codes": entries.codes.astype(np.uint8),
        "shape_start": starts(index.ndims[rows]),
        "shape_values": gather_rows(index.shape_values, index.shape_start, rows),
        "requires_grad": index.requires_grad[rows],
        "stride_orders": {at: orders[row] for at, row in enumerate(rows.tolist()) if row in orders},
        "digests": [*kept] if len(digests) else [],
    }


def _objects(job: LayoutJob, kept: Sequence[Value], encoded: Sequence[bytes]) -> ObjectColumns:
    """Return objects: unique torch.save bytes, at the begin of file 0, and plain data where possible."""
    blobs = list(dict.fromkeys(encoded))
    ends = starts(list(map(len, blobs))).tolist()
    places = {blob: (begin, len(blob), crc32(blob)) for blob, begin in zip(blobs, ends, strict=False)}
    offsets, lengths, crcs = np.array([places[blob] for blob in encoded], np.int64).reshape(-1, 3).T.copy()
    numbers: dict[bytes, int] = {}
    found = [job.encoded(value.row) for value in kept]
    plain = [-1 if one is None else numbers.setdefault(one, len(numbers)) for one in found]
    return ObjectColumns(
        fqns=[value.fqn for value in kept],
        files=np.zeros(len(kept), np.int64),
        offsets=offsets,
        lengths=lengths,
        crcs=crcs,
        plain=np.array(plain, np.int64),
        values=list(numbers),
    )
