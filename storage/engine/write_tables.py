"""One rank's share of a save as tables: boxes to write, places and checksums of what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, Int64, itemsizes, starts
from dcp.storage.geometry.ragged import expand_ranges, row_products
from dcp.storage.packing import pack, unpack

CHUNK_COLUMNS: Final = 5
"""Of each chunk: offset and length of its record, offset and length of its payload, number of block CRCs."""

OBJECT_COLUMNS: Final = 3
"""Of each object: offset, length, CRC-32."""


@dataclass(frozen=True, eq=False)
class WriteColumns:
    """The rows that one rank has to write, in the order of its file.

    Row i is a box of local tensor number ``sources[i]``: where it begins and its extent are the values of
    ``local_offsets`` and ``sizes`` from ``box_start[i]`` on. ``chunks`` is the chunk's row in the
    checkpoint's index. ``shares`` is the row (in these columns) whose payload this one shares, -1 for an own
    one. ``objects`` are rows of the rank's values to write, ``object_rows`` their rows in the index.
    """

    sources: Int64
    box_start: Int64
    sizes: Int64
    local_offsets: Int64
    chunks: Int64
    shares: Int64
    objects: Int64
    object_rows: Int64

    @cached_property
    def own_rows(self) -> Int64:
        """Return the rows that are written."""
        return np.flatnonzero(self.shares < 0)

    def payload_bytes(self, dtype_codes: npt.NDArray[np.uint8]) -> Int64:
        """Return the bytes of each row; ``dtype_codes`` are those of the local tensors."""
        return row_products(self.sizes, self.box_start) * itemsizes(dtype_codes[self.sources])


class EncodedObjects(NamedTuple):
    """Values as they are stored: torch.save bytes, and plain msgpack bytes or None. Equal blobs are stored
    once."""

    blobs: Sequence[bytes]
    plain: Sequence[bytes | None]


@dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """Places of one rank's chunks and objects, for the coordinator's index.

    Row i of ``chunks`` belongs to row i of the rank's `WriteColumns`: its file, a number in ``files``, and
    `CHUNK_COLUMNS`; the last one says how many of ``crcs`` are row i's. A row of ``objects`` is a file and
    `OBJECT_COLUMNS`. ``found`` is what observers saw, by feature, ``traffic`` as `Store.traffic` has it.
    """

    files: list[str] = field(default_factory=list)
    file_sizes: list[int] = field(default_factory=list)
    chunks: Int64 = field(default_factory=lambda: np.zeros((0, 1 + CHUNK_COLUMNS), np.int64))
    crcs: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    objects: Int64 = field(default_factory=lambda: np.zeros((0, 1 + OBJECT_COLUMNS), np.int64))
    object_values: list[bytes | None] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return packed bytes for the way to the coordinator."""
        return pack(dict(vars(self)))

    @classmethod
    def decode(cls, data: bytes) -> WriteOutcome:
        """Return the inverse of `encode`."""
        return cls(**unpack(data))


def assemble_index(
    planned: CheckpointIndex, writes: Sequence[WriteColumns], outcomes: Sequence[WriteOutcome]
) -> CheckpointIndex:
    """Return ``planned`` with its file, record, payload and CRC columns filled in, from what each rank had to
    write and what it wrote.

    Raises PlanError if any chunk or object of the plan has no place.
    """
    first_files, files = np.zeros(len(outcomes), np.int64), list[str]()
    file_sizes, encoded = list[int](), list[bytes | None]()
    for rank, outcome in enumerate(outcomes):
        first_files[rank] = len(files)
        files += outcome.files
        file_sizes += outcome.file_sizes
        encoded += outcome.object_values
    rows = np.concatenate(list(map(attrgetter("chunks"), writes)))
    tables = list(map(attrgetter("chunks"), outcomes))
    chunks = _scattered(len(planned.chunk_files), rows, tables, first_files)
    if (chunks[0] < 0).any():
        missing = int(np.flatnonzero(chunks[0] < 0)[0])
        fqn = planned.fqns[int(planned.chunk_tensors[missing])]
        raise PlanError(f"no rank wrote chunk {planned.box(missing)} of {fqn!r}", fqn=fqn)
    crc_start = starts(chunks[5])
    crcs = np.zeros(int(crc_start[-1]), np.uint32)
    written = np.concatenate(list(map(attrgetter("crcs"), outcomes)))
    crcs[expand_ranges(crc_start[:-1][rows], chunks[5][rows])] = written
    values = planned.objects
    rows = np.concatenate(list(map(attrgetter("object_rows"), writes)))
    objects = _scattered(len(values), rows, list(map(attrgetter("objects"), outcomes)), first_files)
    if (objects[0] < 0).any():
        fqn = values.fqns[int(np.flatnonzero(objects[0] < 0)[0])]
        raise PlanError(f"no rank wrote object {fqn!r}", fqn=fqn)
    plain, numbers = np.full(len(values), -1, np.int64), dict[bytes, int]()
    for row, value in zip(rows.tolist(), encoded, strict=True):
        if value is not None:
            plain[row] = numbers.setdefault(value, len(numbers))
    return replace(
        planned,
        chunk_files=chunks[0],
        record_offsets=chunks[1],
        record_lengths=chunks[2],
        payload_offsets=chunks[3],
        payload_lengths=chunks[4],
        crc_start=crc_start,
        crcs=crcs,
        files=files,
        file_sizes=np.array(file_sizes, np.int64),
        objects=replace(
            values,
            files=objects[0],
            offsets=objects[1],
            lengths=objects[2],
            crcs=objects[3],
            plain=plain,
            values=list(numbers),
        ),
    )


def _scattered(count: int, rows: Int64, tables: Sequence[Int64], first_files: Int64) -> Int64:
    """Return the columns of all ranks' ``tables``, with their rows at ``rows``; -1 where there is none. Files
    are numbered from ``first_files`` of each rank on."""
    found = np.full((count, tables[0].shape[1]), -1, np.int64)
    found[rows] = np.concatenate(tables)
    found[rows, 0] += np.repeat(first_files, list(map(len, tables)))
    return np.ascontiguousarray(found.T)
