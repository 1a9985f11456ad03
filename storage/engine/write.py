"""Write engine: a rank's boxes as tables, data files, and observers of the written bytes.

Records are appended in order; checksums and observers run while the bytes are in the cache.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointError, CheckpointFormatError, PlanError, StorageError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine, crc32_rows
from dcp.storage.formats.index import CheckpointIndex, itemsizes
from dcp.storage.formats.native.record import begin_record
from dcp.storage.geometry.strides import Int64, expand_ranges, row_products, starts
from dcp.storage.stores.base import Store
from dcp.storage.threads import clearing_up

logger = logging.getLogger(__name__)


class Observer:
    """Observer of the bytes that a rank writes; rows are those of its `WriteColumns`.

    Called by the writing threads, for each row by a single thread and in order. The memory is read-only and
    valid during the call. ``name`` appears in messages.
    """

    name = ""

    def see(self, row: int, position: int, data: memoryview) -> None:
        """Process the bytes from ``position`` of a row's payload, at most 1 MiB. Not called for empty
        payloads.
        """

    def see_many(self, rows: Int64, payloads: npt.NDArray[np.uint8]) -> None:
        """Process whole payloads of rows of equal dtype and shape, one per row."""
        for row, payload in zip(rows.tolist(), payloads, strict=True):
            self.see(row, 0, payload.data)

    def finish(self) -> Any:
        """Return the result for the coordinator, packable by `dcp.storage.packing.pack`."""


def see_all(observers: Sequence[Observer], row: int, position: int, data: memoryview) -> None:
    """Pass bytes to all ``observers``, read-only and valid during the call."""
    for observer in observers:
        shown = data.toreadonly()
        try:
            observer.see(row, position, shown)
        except Exception as error:
            raise _failed(observer, "see", error) from error
        try:
            shown.release()
        except BufferError:
            raise CheckpointError(
                f"the feature {type(observer).__name__} keeps a reference to the buffer passed to see(), "
                f"which is reused: copy the needed bytes"
            ) from None


def see_many_in_all(observers: Sequence[Observer], rows: Int64, payloads: npt.NDArray[np.uint8]) -> None:
    """Pass whole payloads to all ``observers``, read-only."""
    shown = payloads.view()
    shown.flags.writeable = False
    for observer in observers:
        try:
            observer.see_many(rows, shown)
        except Exception as error:
            raise _failed(observer, "see_many", error) from error


def _failed(observer: Observer, method: str, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    name = observer.name or type(observer).__name__
    return CheckpointError(f"the feature {name!r} failed in {method}(): {type(error).__name__}: {error}")


_CHUNK_FIELDS: Final = (
    "chunk_files",
    "record_offsets",
    "record_lengths",
    "payload_offsets",
    "payload_lengths",
)
CHUNK_COLUMNS: Final = 5
"""Columns per chunk: offset and length of the record, offset and length of the payload, number of block
CRCs.
"""

_OBJECT_FIELDS: Final = ("files", "offsets", "lengths", "crcs")
OBJECT_COLUMNS: Final = 3
"""Columns per object: offset, length, CRC-32."""


@dataclass(frozen=True, eq=False)
class WriteColumns:
    """Rows that a rank has to write, in file order.

    Row i is a box of local tensor ``sources[i]``, with begin and extent in ``local_offsets`` and ``sizes``
    from ``box_start[i]``. ``chunks`` is the chunk's row in the index. ``shares`` is the row with the same
    payload, -1 for none. ``objects`` are rows of the rank's values, ``object_rows`` their rows in the
    index.
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
        """Rows with a payload to write."""
        return np.flatnonzero(self.shares < 0)

    def payload_bytes(self, dtype_codes: npt.NDArray[np.uint8]) -> Int64:
        """Return the bytes of each row; ``dtype_codes`` are those of the local tensors."""
        return row_products(self.sizes, self.box_start) * itemsizes(dtype_codes[self.sources])


@dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """Positions of a rank's chunks and objects, for the coordinator's index.

    Row i of ``chunks`` describes row i of the rank's `WriteColumns`: file (a number in ``files``) and
    `CHUNK_COLUMNS`, where the last column counts the row's ``crcs``. A row of ``objects`` is a file and
    `OBJECT_COLUMNS`. ``found`` are observer results by feature, ``traffic`` is `Store.traffic`.
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


def assemble_index(
    planned: CheckpointIndex, writes: Sequence[WriteColumns], outcomes: Sequence[WriteOutcome]
) -> CheckpointIndex:
    """Return ``planned`` with file, record, payload and CRC columns from the outcomes of all ranks.

    Raises:
        PlanError: If a chunk or object of the plan was not written.
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
    *places, crc_counts = _scattered(len(planned.chunk_files), rows, tables, first_files)
    chunks = dict(zip(_CHUNK_FIELDS, places, strict=True))
    if (chunks["chunk_files"] < 0).any():
        missing = int(np.flatnonzero(chunks["chunk_files"] < 0)[0])
        fqn = planned.fqns[int(planned.chunk_tensors[missing])]
        raise PlanError(f"no rank wrote chunk {planned.box(missing)} of {fqn!r}", fqn=fqn)
    crc_start = starts(crc_counts)
    crcs = np.zeros(int(crc_start[-1]), np.uint32)
    written = np.concatenate(list(map(attrgetter("crcs"), outcomes)))
    crcs[expand_ranges(crc_start[:-1][rows], crc_counts[rows])] = written
    values = planned.objects
    rows = np.concatenate(list(map(attrgetter("object_rows"), writes)))
    tables = list(map(attrgetter("objects"), outcomes))
    objects = dict(zip(_OBJECT_FIELDS, _scattered(len(values), rows, tables, first_files), strict=True))
    if (objects["files"] < 0).any():
        fqn = values.fqns[int(np.flatnonzero(objects["files"] < 0)[0])]
        raise PlanError(f"no rank wrote object {fqn!r}", fqn=fqn)
    plain, numbers = np.full(len(values), -1, np.int64), dict[bytes, int]()
    for row, value in zip(rows.tolist(), encoded, strict=True):
        if value is not None:
            plain[row] = numbers.setdefault(value, len(numbers))
    return replace(
        planned,
        **chunks,
        crc_start=crc_start,
        crcs=crcs,
        files=files,
        file_sizes=np.array(file_sizes, np.int64),
        objects=replace(values, **objects, plain=plain, values=list(numbers)),
    )


def _scattered(count: int, rows: Int64, tables: Sequence[Int64], first_files: Int64) -> Int64:
    """Return the columns of all ranks' ``tables`` at ``rows``; -1 for missing rows. File numbers start at
    each rank's ``first_files``.
    """
    found = np.full((count, tables[0].shape[1]), -1, np.int64)
    found[rows] = np.concatenate(tables)
    found[rows, 0] += np.repeat(first_files, list(map(len, tables)))
    return np.ascontiguousarray(found.T)


_RECORD_BYTES = 640
"""Bytes of a record beside its payload: 440 to 530 for typical tensors."""

JOINED_BYTES = 4 << 10
"""Maximum payload size joined with neighbors into one write."""

_JOINED_BLOBS = 256
"""Maximum size of objects joined with neighbors."""

WHOLE_BYTES = 1 << 20
"""Bytes per step: checksums read memory, the following copy reads the cache."""


Payload = tuple[int, int, tuple[int, ...], bytes | memoryview]
"""Tensor in contiguous memory of at most WHOLE_BYTES: row for observers, dtype code, sizes, bytes."""


def data_file_name(rank: int, number: int, save_id: str) -> str:
    """Return a unique data file name, never reused by a committed checkpoint."""
    return f"__{rank}_{number}.{save_id}.distcp"


class DataFile:
    """Data file of a save.

    Add records with `whole`, `tensor`, `alike` and `blobs`; `finish` completes the file (durably if
    requested), `abort` removes it. ``torch_compatible=False`` writes bare payloads without torch.save
    containers. Space for ``payload_bytes`` in ``records`` may be reserved.

    ``chunks`` has `CHUNK_COLUMNS` of each tensor, ``crcs`` the checksums of their blocks.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        durable: bool,
        torch_compatible: bool = True,
        payload_bytes: int = 0,
        records: int = 0,
    ) -> None:

        self.name = name
        self.chunks, self.crcs = array("q"), array("q")
        self._store = store
        self._torch_compatible = torch_compatible
        expected_bytes = payload_bytes + records * _RECORD_BYTES if torch_compatible else payload_bytes
        self._handle = store.create(name, durable=durable, expected_bytes=expected_bytes)
        self._position = 0
        self.size_bytes = 0

    def whole(
        self, payloads: Sequence[Payload], see: Callable[[int, int, memoryview], None] | None = None
    ) -> None:
        """Append tensors in contiguous memory in one write.

        ``see`` receives the row, 0 and the bytes of each non-empty tensor.
        """
        position, parts = self._position, list[bytes | memoryview]()
        chunks, crcs, prefix, suffix = self.chunks, self.crcs, b"", b""
        for row, dtype_code, sizes, data in payloads:
            size, crc = len(data), crc32(data)
            if see is not None and size:  # after the checksum, so that the data is in the cache
                see(row, 0, memoryview(data))
            if self._torch_compatible:
                record = begin_record(dtype_code, sizes, size, position)
                prefix, suffix = record.prefix, record.suffix(crc)
            if size <= JOINED_BYTES:
                parts.append(b"".join((prefix, data, suffix)))
            else:
                parts += (prefix, data, suffix)
            begin = position + len(prefix)
            end = begin + size + len(suffix)
            chunks.extend((position, end - position, begin, size, size > 0))
            if size:
                crcs.append(crc)
            position = end
        self._handle.write_many(parts)
        self._position = position

    def tensor(
        self,
        dtype_code: int,
        sizes: tuple[int, ...],
        payload_bytes: int,
        pieces: Iterable[bytes | memoryview],
        on_bytes: Callable[[int], None] | None = None,
        see: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        """Append a tensor; ``pieces`` are its bytes in C order.

        Each piece is consumed before the next is requested, and may reuse a buffer. ``on_bytes`` receives
        the number of payload bytes written, ``see`` each position and portion.

        Raises:
            PlanError: If the pieces have more or fewer than ``payload_bytes``.
        """
        begin, prefix, suffix = self._position, b"", b""
        if self._torch_compatible:
            record = begin_record(dtype_code, sizes, payload_bytes, begin)
            prefix = record.prefix
        self._handle.write(prefix)
        crcs, written = self._stream(pieces, on_bytes, see)
        if written != payload_bytes:
            raise PlanError(
                f"a tensor has {written} bytes, but its write plan has {payload_bytes}: it changed since",
                expected=payload_bytes,
                got=written,
            )
        if self._torch_compatible:
            suffix = record.suffix(_combine(crcs, payload_bytes))
        self._handle.write(suffix)
        payload_offset = begin + len(prefix)
        self._position = payload_offset + payload_bytes + len(suffix)
        self.chunks.extend((begin, self._position - begin, payload_offset, payload_bytes, len(crcs)))
        self.crcs.extend(crcs)

    def alike(
        self,
        dtype_code: int,
        sizes: tuple[int, ...],
        payloads: npt.NDArray[np.uint8],
    ) -> None:
        """Append tensors of equal dtype and shape, one per row, like `tensor` for each.

        Payloads are smaller than ALIGNED_PAYLOAD_BYTES; records differ only in bytes and checksum.
        """
        count, size = payloads.shape
        crcs = crc32_rows(payloads)
        prefix, suffix, crc_at = b"", b"", tuple[int, ...]()
        if self._torch_compatible:
            record = begin_record(dtype_code, sizes, size, self._position)
            prefix, suffix, crc_at = record.prefix, record.suffix(0), record.crc_positions
        length = len(prefix) + size + len(suffix)
        records = np.empty((count, length), np.uint8)
        records[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        records[:, len(prefix) : len(prefix) + size] = payloads
        records[:, len(prefix) + size :] = np.frombuffer(suffix, np.uint8)
        crc_bytes = crcs.astype("<u4").view(np.uint8).reshape(count, 4)
        for position in crc_at:
            begin = len(prefix) + size + position
            records[:, begin : begin + 4] = crc_bytes
        self._handle.write(records.reshape(-1).data)
        chunks = np.empty((count, CHUNK_COLUMNS), np.int64)
        chunks[:, 0] = self._position + length * np.arange(count)
        chunks[:, 1] = length
        chunks[:, 2] = chunks[:, 0] + len(prefix)
        chunks[:, 3] = size
        chunks[:, 4] = size > 0
        self._position += count * length
        self.chunks.frombytes(chunks.tobytes())
        if size:
            self.crcs.frombytes(crcs.astype(np.int64).tobytes())

    def blobs(self, blobs: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Append bytes of objects, small neighbors in one write; return (offset, length, CRC-32) of each."""
        places = []
        for begin in range(0, len(blobs), _JOINED_BLOBS):
            part = blobs[begin : begin + _JOINED_BLOBS]
            position = self._position
            for data in part:
                places.append((position, len(data), crc32(data)))
                position += len(data)
            if position - self._position <= _JOINED_BLOBS * JOINED_BYTES:
                part = [b"".join(part)]
            for data in part:
                self._handle.write(data)
            self._position = position
        return places

    def finish(self) -> int:
        """Complete the file and return the size in bytes."""
        size = self._handle.finish()
        if size != self._position:
            raise CheckpointFormatError(
                f"{self.name}: the stored file has {size} bytes, but {self._position} were written",
                path=self.name,
            )
        self.size_bytes = size
        return size

    def abort(self) -> None:
        """Remove the file. Failures are logged, to keep the original error."""

        try:
            with clearing_up():
                self._handle.abort()
                self._store.delete(self.name)
        except StorageError as error:
            logger.warning("%s could not be removed: %s", self._store.path_of(self.name), error)

    def _stream(
        self,
        pieces: Iterable[bytes | memoryview],
        on_bytes: Callable[[int], None] | None,
        see: Callable[[int, memoryview], None] | None,
    ) -> tuple[list[int], int]:
        """Write ``pieces``; return the CRC of each block and the number of bytes."""
        crcs: list[int] = []
        crc = in_block = total = 0
        for piece in pieces:
            size, position = len(piece), 0
            while position < size:
                step = min(size - position, WHOLE_BYTES, BLOCK_BYTES - in_block)
                part = memoryview(piece)[position : position + step]
                crc = crc32(part, crc)
                if see is not None:
                    see(total + position, part)
                self._handle.write(part)
                if on_bytes is not None:
                    on_bytes(step)
                position += step
                in_block += step
                if in_block == BLOCK_BYTES:
                    crcs.append(crc)
                    crc = in_block = 0
            total += size
        if in_block:
            crcs.append(crc)
        return crcs, total


def _combine(crcs: Sequence[int], payload_bytes: int) -> int:
    total = crcs[0] if crcs else 0
    for number, crc in enumerate(crcs[1:], start=1):
        total = crc32_combine(total, crc, min(BLOCK_BYTES, payload_bytes - number * BLOCK_BYTES))
    return total
