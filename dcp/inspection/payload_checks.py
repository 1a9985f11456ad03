"""Reading all of a checkpoint's data files and comparing it: the larger part of a verification.

What is to be compared is a sequence of parts in the order of the files. Neighbours are read together, in
large pieces and several at a time, since that is what disks and object stores are fast at; what cannot be
read then is read part by part, to find out which of them it is.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from dcp.inspection.findings import Finding, ReportBytes, VerifyReport, kind_of
from dcp.storage.digests import BLOCK_BYTES as DIGEST_BLOCK_BYTES
from dcp.storage.digests import KEY, SUM_BYTES, LogicalPlaces, blocks_of, power, product, run_value
from dcp.storage.engine.memory import item_view
from dcp.storage.engine.requests import coalesce, span_bytes
from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CorruptCheckpointError,
    StorageError,
)
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.record import OpenRecord, begin_record
from dcp.storage.formats.registry import is_of_files
from dcp.storage.formats.torch.archive import (
    LOCAL_SIGNATURE,
    Window,
    check_names,
    entry_start,
    read_directory,
)
from dcp.storage.formats.torch.record_reader import StoredTensor, locate_payload
from dcp.storage.geometry.strides import gather_rows, row_products
from dcp.storage.stores.base import FileInfo, ReadHandle, Store
from dcp.storage.threads import work_off
from dcp.version import __version__

__all__ = ["SPAN_BYTES", "PayloadChecks", "StreamedSums"]


class StreamedSums:
    """The sums of the tensors each of whose chunks is a run of its bytes, and is stored for itself.

    Of the rest, as those cut by columns and tied ones, `sums` has none: they are read again.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        tensors = index.chunk_tensors
        places = LogicalPlaces(
            index.box_start,
            gather_rows(index.shape_values, index.shape_start, tensors),
            index.chunk_offsets,
            index.chunk_sizes,
            index.itemsizes[tensors],
        )
        self._firsts = item_view(places.firsts)
        self._tensors = item_view(tensors)
        sizes = row_products(index.shape_values, index.shape_start)
        volumes = np.zeros_like(sizes)
        np.add.at(volumes, tensors, places.volumes)
        is_streamed = volumes == sizes
        is_fit = (places.is_run & _are_own(index)) | (index.payload_lengths == 0)
        is_streamed[tensors[~is_fit]] = False
        self._blocks = [blocks_of(size) for size in (sizes * index.itemsizes).tolist()]
        self._sums = dict.fromkeys(np.flatnonzero(is_streamed).tolist(), 0)
        self._lock = threading.Lock()
        self.left_bytes = int((sizes * index.itemsizes)[~is_streamed].sum(dtype=np.float64))
        """Of the tensors that it has no sums of."""

    @property
    def sums(self) -> dict[int, bytes]:
        """The sums by tensor row, once all payloads were read."""
        return {row: total.to_bytes(SUM_BYTES, "big") for row, total in self._sums.items()}

    def add(self, chunk: int, begin: int, data: memoryview) -> None:
        """Add the bytes of a chunk's payload from ``begin`` on."""
        row = self._tensors[chunk]
        if row not in self._sums or not len(data):
            return
        first = self._firsts[chunk] + begin
        value = run_value(data, first % DIGEST_BLOCK_BYTES)
        behind = self._blocks[row] - blocks_of(first + len(data))
        if behind:
            value = product(power(KEY, behind), value)
        with self._lock:
            self._sums[row] ^= value


def _are_own(index: CheckpointIndex) -> npt.NDArray[np.bool_]:
    """Return chunks whose record is no other one's, and whose payload, C-ordered, is where that is read."""
    known: npt.NDArray[np.bool_] = index.payload_offsets != UNKNOWN
    filled = np.flatnonzero(index.payload_lengths)
    if not len(filled):
        return known
    stored = np.stack([index.chunk_files[filled], index.record_offsets[filled]])
    _, number, count = np.unique(stored, axis=1, return_inverse=True, return_counts=True)
    known[filled] &= count[number.reshape(-1)] == 1
    known[[*index.payload_strides]] = False
    if is_of_files(index.format):  # whole storages are read there
        known &= index.payload_lengths == index.record_lengths
    return known


SPAN_BYTES: Final = 8 << 20
"""Neighbouring parts are read together up to this; a thread holds one such buffer."""

_GAP_BYTES: Final = 64 << 10
"""Reading over a gap of this size is cheaper than a second request."""

_THREADS: Final = 2

_PICKLE_PROTOCOL: Final = b"\x80"
"""The first byte of a pickle, where torch did not write a zip."""


class _FileSpan:
    """A thread's view of the files: one span in memory, everything else read when it is asked for."""

    def __init__(self, store: Store, names: list[str], listing: Mapping[str, FileInfo]) -> None:
        self._store = store
        self._names = names
        self._listing = listing
        self._file = UNKNOWN
        self._handle: ReadHandle | None = None
        self._begin = self._end = 0
        self._buffer = bytearray()

    def go_to(self, file: int) -> None:
        """Read from this file from now on. One is open at a time, because there may be thousands."""
        if self._handle is not None and self._file == file:
            return
        self.close()
        name = self._names[file]
        self._handle = self._store.open_read(name, expected_bytes=self._listing[name].size_bytes)
        self._file = file

    def load(self, begin: int, end: int) -> memoryview:
        """Have these bytes of the file in memory, in the place of those that were there."""
        length = end - begin
        self._begin = self._end = begin
        if len(self._buffer) < length:  # small checkpoints must not pay for a large buffer
            self._buffer = bytearray(length)
        view = memoryview(self._buffer)[:length]
        self._open_handle.preadv([view], begin)
        self._end = end
        return view

    def take(self, offset: int, length: int) -> memoryview:
        """Return bytes of the file, out of memory if they are there."""
        if self._begin <= offset and offset + length <= self._end:
            return memoryview(self._buffer)[offset - self._begin : offset - self._begin + length]
        return memoryview(self._open_handle.pread(length, offset))

    def read(self, offset: int, length: int) -> bytes:
        """Return the same as bytes."""
        return bytes(self.take(offset, length))

    def steps(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield the same block by block; what is not in memory is read in large pieces."""
        if self._begin <= offset and offset + length <= self._end:
            yield from _blocks(self.take(offset, length))
            return
        for begin in range(offset, offset + length, SPAN_BYTES):
            yield from _blocks(self.load(begin, min(begin + SPAN_BYTES, offset + length)))

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
        self._handle, self._begin, self._end = None, 0, 0

    @property
    def _open_handle(self) -> ReadHandle:
        if self._handle is None:
            raise ValueError("no file is open")
        return self._handle


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), BLOCK_BYTES):
        yield data[begin : begin + BLOCK_BYTES]


@dataclass(slots=True)
class _CheckedRange:
    """Bytes of a file that are checked by themselves; ``fqn`` is the first name for them."""

    file: int
    offset: int
    size_bytes: int
    fqn: str
    check: Callable[[_FileSpan, _CheckedRange], None]

    def __lt__(self, other: _CheckedRange) -> bool:
        return (self.file, self.offset) < (other.file, other.offset)


class PayloadChecks:
    """Compares all payloads, records and objects; findings, counts and progress go through one lock."""

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        listing: Mapping[str, FileInfo],
        report: VerifyReport,
        progress: ReportBytes | None,
        sums: StreamedSums | None = None,
    ) -> None:
        self._sums = sums
        self._store = store
        self._index = index
        self._listing = listing
        self._report = report
        self._progress = progress
        self._lock = threading.Lock()
        self._odd_records: set[int] = set()
        self._done_bytes = 0
        self._total_bytes = 0

    def run(self, threads: int | None) -> None:
        """Check everything by as many threads; None is as many as the store likes."""
        threads = max(1, threads or self._store.read_profile.threads or _THREADS)
        spans = coalesce(
            self._parts(),
            gap_bytes=max(_GAP_BYTES, self._store.read_profile.gap_bytes),
            limit_bytes=SPAN_BYTES,
        )
        work_off(spans, threads, self._check_all)

    def _check_all(self, spans: Iterator[list[_CheckedRange]]) -> None:
        source = _FileSpan(self._store, [*self._index.files], self._listing)
        try:
            for span in spans:
                source.go_to(span[0].file)
                self._check(source, span)
        finally:
            source.close()

    def _check(self, source: _FileSpan, span: list[_CheckedRange]) -> None:
        begin, size_bytes = span[0].offset, span_bytes(span)
        try:
            if size_bytes <= SPAN_BYTES:
                source.load(begin, begin + size_bytes)
            if len(span) == 1:
                span[0].check(source, span[0])
                return
        except (CorruptCheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and self._store.read_profile.scatter:
                raise  # it has been tried again and again: the service is not there, rather than a sector bad
            if len(span) == 1:
                self._found_unreadable(error, span[0])
                return
            for part in span:  # find out which of them it is
                self._check(source, [part])
            return
        for part in span:
            part.check(source, part)

    # -- what to read -------------------------------------------------------------------------------

    def _parts(self) -> Iterator[_CheckedRange]:
        index, objects = self._index, self._index.objects
        present = [file for file, name in enumerate(index.files) if name in self._listing]
        rows = np.stack([index.chunk_files, index.record_offsets, index.record_lengths])
        chunks = np.unique(rows, axis=1, return_index=True)[1] if index.chunk_count else np.zeros(0, np.int64)
        chunks = chunks[np.isin(index.chunk_files[chunks], present)]
        places = zip(objects.files.tolist(), objects.offsets.tolist(), objects.lengths.tolist(), strict=True)
        blobs = {place: row for row, place in enumerate(places) if place[0] in {*present}}
        stored = index.record_lengths if is_of_files(index.format) else index.payload_lengths
        self._total_bytes = int(stored[chunks].sum()) + sum(blob[2] for blob in blobs)
        return heapq.merge(self._tensors(chunks.tolist()), self._objects(blobs))

    def _tensors(self, chunks: Iterable[int]) -> Iterator[_CheckedRange]:
        index = self._index
        crcs, crc_start = index.crcs.tolist(), index.crc_start.tolist()
        files, tensors = index.chunk_files.tolist(), index.chunk_tensors.tolist()
        offsets, lengths = index.payload_offsets.tolist(), index.payload_lengths.tolist()
        record_offsets, record_lengths = index.record_offsets.tolist(), index.record_lengths.tolist()
        for chunk in chunks:
            file, fqn = files[chunk], index.fqns[tensors[chunk]]
            record, payload = record_offsets[chunk], offsets[chunk]
            end, payload_end = record + record_lengths[chunk], payload + lengths[chunk]
            if is_of_files(index.format):
                # A storage of a torch.save file, whatever views of it there are, or a safetensors tensor.
                check = partial(self._check_range, index.record_crcs.get(chunk), chunk, record - payload)
                yield _CheckedRange(file, record, end - record, fqn, check)
                continue
            if payload == UNKNOWN:
                yield _CheckedRange(file, record, end - record, fqn, partial(self._check_foreign, chunk))
                continue
            row, row_end = crc_start[chunk], crc_start[chunk + 1]
            if (
                payload_end - payload <= BLOCK_BYTES
                and end - record > payload_end - payload
                and row < row_end
            ):
                check = partial(self._check_record, chunk, crcs[row])
                yield _CheckedRange(file, record, end - record, fqn, check)
                continue
            if payload > record:
                yield _CheckedRange(file, record, payload - record, fqn, partial(self._check_frame, chunk))
            for begin in range(payload, payload_end, BLOCK_BYTES):
                crc = crcs[row] if row < row_end else None
                length = min(BLOCK_BYTES, payload_end - begin)
                check = partial(self._check_range, crc, chunk, begin - payload)
                yield _CheckedRange(file, begin, length, fqn, check)
                row += 1
            if end > payload_end:
                yield _CheckedRange(
                    file, payload_end, end - payload_end, fqn, partial(self._check_frame, chunk)
                )

    def _objects(self, blobs: Mapping[tuple[int, int, int], int]) -> Iterator[_CheckedRange]:
        objects = self._index.objects
        for (file, offset, length), row in sorted(blobs.items()):
            crc = int(objects.crcs[row])
            check = self._check_blob
            if crc != UNKNOWN:
                check = partial(self._check_range, crc, UNKNOWN, 0)
            yield _CheckedRange(file, offset, length, objects.fqns[row], check)

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_range(
        self, expected: int | None, chunk: int, position: int, source: _FileSpan, part: _CheckedRange
    ) -> None:
        """Check all of a range: of a chunk's payload from ``position`` on, or (`UNKNOWN`) of none."""
        self._check_bytes(source, part, part.offset, part.size_bytes, expected, chunk, position)

    def _check_bytes(
        self,
        source: _FileSpan,
        part: _CheckedRange,
        offset: int,
        size_bytes: int,
        expected: int | None,
        chunk: int = UNKNOWN,
        position: int = 0,
    ) -> None:
        """Compare bytes of the file with their checksum, if there is one."""
        got = 0
        for data in source.steps(offset, size_bytes):
            got = crc32(data, got)
            if chunk != UNKNOWN and self._sums is not None:
                self._sums.add(chunk, position, data)
            position += len(data)
            self._count(len(data), checked=expected is not None)
        if expected not in (None, got):
            self._found_mismatch(part, offset, size_bytes, int(expected or 0), got)

    def _check_record(self, chunk: int, expected: int, source: _FileSpan, part: _CheckedRange) -> None:
        """Check all of a record of the native format whose payload is one block."""
        record, data = self._record(chunk), source.take(part.offset, part.size_bytes)
        begin, length = int(self._index.payload_offsets[chunk]), record.payload_bytes
        head = begin - part.offset
        got = crc32(data[head : head + length])
        if self._sums is not None:
            self._sums.add(chunk, 0, data[head : head + length])
        self._count(length)
        if got != expected:
            self._found_mismatch(part, begin, length, expected, got)
        if data[:head] != record.prefix or data[head + length :] != record.suffix(expected):
            self._frame_differs(chunk, expected, source, part)

    def _check_frame(self, chunk: int, source: _FileSpan, part: _CheckedRange) -> None:
        """Compare the frame of a native payload, which stock torch goes by, with that which is written."""
        index = self._index
        record, whole = self._record(chunk), 0
        length = record.payload_bytes
        for number, crc in enumerate(index.block_crcs(chunk).tolist()):
            whole = crc32_combine(whole, crc, min(BLOCK_BYTES, length - number * BLOCK_BYTES))
        is_first = part.offset == int(index.record_offsets[chunk])
        if source.take(part.offset, part.size_bytes) != (record.prefix if is_first else record.suffix(whole)):
            self._frame_differs(chunk, whole, source, part)

    def _record(self, chunk: int) -> OpenRecord:
        """Return the record that is written around a payload there."""
        index = self._index
        dtype_code = int(index.dtype_codes[index.chunk_tensors[chunk]])
        length, offset = int(index.payload_lengths[chunk]), int(index.record_offsets[chunk])
        return begin_record(dtype_code, index.box(chunk)[1], length, offset)

    def _frame_differs(self, chunk: int, whole: int, source: _FileSpan, part: _CheckedRange) -> None:
        index = self._index
        sizes, dtype_code = index.box(chunk)[1], int(index.dtype_codes[index.chunk_tensors[chunk]])
        offset = int(index.record_offsets[chunk])
        with self._lock:
            if chunk in self._odd_records:
                return
            self._odd_records.add(chunk)
        if index.provenance.get("dcphub_version") != __version__:  # other versions may write other headers
            stored = self._locate(chunk, source, part)
            expected = sizes, dtype_code, int(index.payload_offsets[chunk]), whole
            if (
                stored is None
                or (stored.sizes, stored.dtype_code, stored.payload_offset, stored.crc32) == expected
            ):
                return
        message = "the zip around the tensor's bytes, which stock torch goes by, is damaged"
        self._found("record", message, part, offset, int(index.record_lengths[chunk]))

    def _check_foreign(self, chunk: int, source: _FileSpan, part: _CheckedRange) -> None:
        index = self._index
        stored = self._locate(chunk, source, part)
        if stored is None:
            return
        sizes, dtype = index.box(chunk)[1], index.dtype(int(index.chunk_tensors[chunk]))
        if stored.sizes != sizes or stored.dtype_code != dtype.code:
            message = f"the record is not the {dtype.name} {sizes} of the metadata"
            self._found("record", message, part, part.offset)
            return
        self._check_bytes(source, part, stored.payload_offset, stored.payload_bytes, stored.crc32)

    def _check_blob(self, source: _FileSpan, part: _CheckedRange) -> None:
        """Check an object of a foreign checkpoint: a zip with a CRC for each entry, or a bare pickle with
        none."""
        offset, length = part.offset, part.size_bytes
        head = source.read(offset, min(length, len(LOCAL_SIGNATURE)))
        if head[:1] == _PICKLE_PROTOCOL:
            self._check_bytes(source, part, offset, length, None)
            return
        checked = True
        try:
            if head != LOCAL_SIGNATURE:
                raise CheckpointFormatError("it is neither a zip nor a pickle")
            window = Window(source.read, offset, length)
            entries = read_directory(window)
            check_names(entries)
            for entry in entries.values():
                begin = entry_start(window, entry)
                if begin + entry.size > length:
                    raise CheckpointFormatError("an entry of the object's zip reaches outside of it")
                got = _crc(source, offset + begin, entry.size)
                checked &= entry.crc32 != 0 or got == 0
                if entry.crc32 not in (0, got):
                    self._found_mismatch(part, offset + begin, entry.size, entry.crc32, got)
        except CheckpointFormatError as error:
            self._found("record", f"the object cannot be read: {error}", part, offset, length)
        self._count(length, checked=checked)

    def _locate(self, chunk: int, source: _FileSpan, part: _CheckedRange) -> StoredTensor | None:
        index = self._index
        offset, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
        try:
            return locate_payload(source.read, offset, length, fqn=part.fqn)
        except StorageError:
            raise
        except CheckpointError as error:
            kind = "record" if isinstance(error, CheckpointFormatError) else "unreadable"
            self._found(kind_of(error, kind), f"the record cannot be read: {error}", part, offset, length)
            return None

    # -- results ---------------------------------------------------------------------------------------------

    def _count(self, size_bytes: int, *, checked: bool = True) -> None:
        with self._lock:
            self._report.blocks += 1
            self._report.bytes += size_bytes
            if not checked:
                self._report.unchecked_bytes += size_bytes
            self._done_bytes += size_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, max(self._total_bytes, self._done_bytes))

    def _found(
        self, kind: str, message: str, part: _CheckedRange, offset: int, length: int | None = None
    ) -> None:
        file = self._index.files[part.file]
        with self._lock:
            self._report.findings.append(
                Finding(
                    kind, f"{file}: {part.fqn!r} at byte {offset}: {message}", file, part.fqn, offset, length
                )
            )

    def _found_mismatch(self, part: _CheckedRange, offset: int, length: int, expected: int, got: int) -> None:
        message = (
            f"{length} bytes differ from what was committed (CRC-32 {got:08x}, should be {expected:08x})"
        )
        self._found("checksum", message, part, offset, length)

    def _found_unreadable(self, error: CheckpointError, part: _CheckedRange) -> None:
        message = f"{part.size_bytes} bytes cannot be read: {error}"
        self._found("unreadable", message, part, part.offset, part.size_bytes)


def _crc(source: _FileSpan, offset: int, length: int) -> int:
    crc = 0
    for data in source.steps(offset, length):
        crc = crc32(data, crc)
    return crc
