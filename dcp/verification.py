"""Whether a checkpoint's bytes are those that were committed: every block is read, torch is not needed.

Checked are the index itself, the files (missing, of the wrong size, unknown), every payload against its
checksums, what surrounds it in its record (stock torch goes by that), and `.metadata` against the manifest.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from dcp.manager.notes import NOTES_NAME
from dcp.storage.errors import CheckpointError, CheckpointFormatError, CorruptCheckpointError, StorageError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.manifest import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.open import MAX_TORCH_METADATA_BYTES, open_index
from dcp.storage.formats.record import begin_record
from dcp.storage.formats.record_reader import StoredTensor, locate_payload
from dcp.storage.formats.torch_zip import (
    LOCAL_SIGNATURE,
    Window,
    check_names,
    entry_start,
    read_directory,
)
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, ReadHandle, Store
from dcp.storage.stores.opening import OpenWith
from dcp.version import __version__

__all__ = ["Finding", "Progress", "VerifyReport", "verify", "verify_store"]

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read in all), from any thread, one call at a time."""

_SPAN_BYTES: Final = 8 << 20
"""Neighbouring blocks are read together up to this; a thread holds one such buffer."""

_GAP_BYTES: Final = 64 << 10
"""Reading over a gap of this size is cheaper than a second request."""

_PICKLE_PROTOCOL: Final = b"\x80"
"""What a pickle begins with where torch was told not to write a zip."""

_RANK_LOCAL = re.compile(r"__[0-9]+(\.manifest\.msgpack|\.metadata)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    ``kind`` is "index", "missing-file", "file-size", "stray-file", "checksum", "record", "unreadable" or
    "metadata". ``offset`` and ``length`` (bytes) say where in the file, ``fqn`` whose bytes they are.
    """

    kind: str
    message: str
    file: str | None = None
    fqn: str | None = None
    offset: int | None = None
    length: int | None = None


@dataclass(slots=True)
class VerifyReport:
    """What `verify` did and found. ``unchecked_bytes`` were read, but their format records no checksum."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    blocks: int = 0
    bytes: int = 0
    unchecked_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of a file with one checksum (UNKNOWN where there is none); ``fqn`` is the first name for them."""

    file: int
    offset: int
    length: int
    crc: int
    fqn: str


def verify(
    checkpoint_id: str | os.PathLike[str],
    *,
    threads: int = 2,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Read and check everything of a checkpoint; what is wrong becomes a `Finding`.

    ``storage_options`` are those of a URL's file system, as for `dcp.load`. Memory is bounded by 8 MiB a
    thread. Raises `CheckpointNotFoundError` where nothing is committed, and `StorageError` where the store as
    a whole cannot be read.
    """
    return verify_store(OpenWith(storage_options)(checkpoint_id), threads=threads, progress=progress)


def verify_store(store: Store, *, threads: int = 2, progress: Progress | None = None) -> VerifyReport:
    """`verify` of the checkpoint in ``store``."""
    report = VerifyReport(store.url)
    try:
        index = open_index(store)
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        report.findings.append(Finding("index", str(error), error.facts.get("path")))
        return report
    listing = {file.name: file for file in store.list()}
    report.files, report.tensors = len(index.files), index.tensor_count
    report.findings += _check_metadata(store, index, listing)
    report.findings += _check_files(index, listing)
    _Reader(store, index, listing, report, progress).run(threads)
    report.findings.sort(key=lambda found: (found.file or "", found.offset or 0))
    return report


def _check_metadata(store: Store, index: CheckpointIndex, listing: dict[str, FileInfo]) -> Iterator[Finding]:
    if MANIFEST_NAME not in listing:
        return
    if index.format == "torch_dcp":
        yield Finding(
            "metadata",
            f"stock torch has saved over this checkpoint; {MANIFEST_NAME} is of the save before and ignored",
            MANIFEST_NAME,
        )
    elif index.torch_metadata_crc is not None:
        if METADATA_NAME not in listing:
            yield Finding(
                "metadata", f"{METADATA_NAME} is missing: stock torch cannot load this", METADATA_NAME
            )
            return
        crc = crc32(store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES))
        if crc == index.torch_metadata_crc:
            return
        if crc == index.replaced_torch_metadata_crc:
            what = "is still that of the save which this one replaced: stock torch would load that one"
        else:
            what = "differs from what was committed: it is damaged, and stock torch would trust it"
        yield Finding("metadata", f"{METADATA_NAME} {what}", METADATA_NAME)


def _check_files(index: CheckpointIndex, listing: dict[str, FileInfo]) -> Iterator[Finding]:
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        if name not in listing:
            yield Finding("missing-file", f"{name} is missing", name)
        elif size not in (UNKNOWN, listing[name].size_bytes):
            found = listing[name].size_bytes
            yield Finding("file-size", f"{name} has {found} bytes, committed were {size}", name)
    for name in sorted(listing.keys() - set(index.files) - {MANIFEST_NAME, METADATA_NAME, NOTES_NAME}):
        if name.startswith(TEMPORARY_PREFIX):
            yield Finding("stray-file", f"{name} is left over from an interrupted publish", name)
        elif not _RANK_LOCAL.fullmatch(name):
            yield Finding("stray-file", f"{name} does not belong to the checkpoint", name)


class _OfThread(threading.local):
    """What a thread keeps from one unit to the next."""

    def __init__(self) -> None:
        self.file = UNKNOWN
        self.handle: ReadHandle | None = None
        self._buffer = bytearray()

    def buffer(self, length: int) -> memoryview:
        """Memory to read into, the same each time; small checkpoints must not pay for a large one."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        return memoryview(self._buffer)[:length]


class _Reader:
    """Reads all payloads and objects; findings, counts and progress go through one lock."""

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        listing: dict[str, FileInfo],
        report: VerifyReport,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._index = index
        self._present = [file for file, name in enumerate(index.files) if name in listing]
        self._report = report
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0
        self._own = _OfThread()

    def run(self, threads: int) -> None:
        units = self._units()
        with ThreadPoolExecutor(threads) as pool:
            workers = [pool.submit(self._drain, units) for _ in range(threads)]
        for worker in workers:
            worker.result()

    def _drain(self, units: Iterator[Callable[[], None]]) -> None:
        try:
            while True:
                with self._lock:
                    unit = next(units, None)
                if unit is None:
                    return
                unit()
        finally:
            if self._own.handle is not None:
                self._own.handle.close()

    def _handle(self, file: int) -> ReadHandle:
        """One open file a thread, because units come in the order of files, and there may be thousands."""
        if self._own.handle is None or self._own.file != file:
            if self._own.handle is not None:
                self._own.handle.close()
            self._own.file, self._own.handle = file, self._store.open_read(self._index.files[file])
        return self._own.handle

    # -- what there is to read -------------------------------------------------------------------------------

    def _units(self) -> Iterator[Callable[[], None]]:
        index, objects = self._index, self._index.objects
        rows = np.stack([index.chunk_files, index.record_offsets, index.record_lengths])
        chunks = np.unique(rows, axis=1, return_index=True)[1] if index.chunk_count else np.zeros(0, np.int64)
        chunks = chunks[np.isin(index.chunk_files[chunks], self._present)]
        present = set(self._present)
        blobs = {
            (file, offset, length): row
            for row, (file, offset, length) in enumerate(
                zip(objects.files.tolist(), objects.offsets.tolist(), objects.lengths.tolist(), strict=True)
            )
            if file in present
        }
        known = index.payload_offsets[chunks] != UNKNOWN
        self._total_bytes = int(index.payload_lengths[chunks].sum()) + sum(blob[2] for blob in blobs)
        return self._lazily(chunks[known].tolist(), chunks[~known].tolist(), sorted(blobs.values()))

    def _lazily(
        self, known: list[int], foreign: list[int], objects: list[int]
    ) -> Iterator[Callable[[], None]]:
        for span in _spans(self._blocks(known)):
            yield partial(self._check_span, span)
        index = self._index
        lengths = index.record_lengths.tolist(), index.payload_lengths.tolist()
        for chunk in known:
            if lengths[0][chunk] != lengths[1][chunk]:
                yield partial(self._check_record, chunk)
        for chunk in foreign:
            yield partial(self._check_foreign, chunk)
        for row in objects:
            yield partial(self._check_object, row)

    def _blocks(self, chunks: Iterable[int]) -> Iterator[_Block]:
        index = self._index
        crcs, crc_start = index.crcs.tolist(), index.crc_start.tolist()
        files, tensors = index.chunk_files.tolist(), index.chunk_tensors.tolist()
        offsets, lengths = index.payload_offsets.tolist(), index.payload_lengths.tolist()
        for chunk in chunks:
            row, end = crc_start[chunk], crc_start[chunk + 1]
            for begin in range(0, lengths[chunk], BLOCK_BYTES):
                length = min(BLOCK_BYTES, lengths[chunk] - begin)
                crc = crcs[row] if row < end else UNKNOWN
                yield _Block(files[chunk], offsets[chunk] + begin, length, crc, index.fqns[tensors[chunk]])
                row += 1

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_span(self, span: list[_Block]) -> None:
        handle = self._handle(span[0].file)
        begin, end = span[0].offset, max(block.offset + block.length for block in span)
        buffer = self._own.buffer(end - begin)
        try:
            handle.preadv([buffer], begin)
        except (CorruptCheckpointError, StorageError) as error:
            if len(span) > 1:  # find out which of them it is
                for block in span:
                    self._check_span([block])
                return
            self._found_unreadable(error, handle.name, span[0].fqn, begin, end - begin)
            return
        for block in span:
            at = block.offset - begin
            got = crc32(buffer[at : at + block.length])
            if block.crc == UNKNOWN:
                self._count(block.length, checked=False)
            else:
                self._count(block.length)
                if got != block.crc:
                    self._found_mismatch(handle.name, block.fqn, block.offset, block.length, block.crc, got)

    def _check_record(self, chunk: int) -> None:
        """Compare the bytes around a payload of ours, which stock torch goes by, with what we write there."""
        index = self._index
        name, fqn, offset = self._place(chunk)
        sizes, dtype_code = index.box(chunk)[1], int(index.dtype_codes[index.chunk_tensors[chunk]])
        payload_offset, length = int(index.payload_offsets[chunk]), int(index.payload_lengths[chunk])
        end = offset + int(index.record_lengths[chunk])
        whole = 0
        for number, crc in enumerate(index.block_crcs(chunk).tolist()):
            whole = crc32_combine(whole, crc, min(BLOCK_BYTES, length - number * BLOCK_BYTES))
        record = begin_record(dtype_code, sizes, length, offset)
        handle = self._handle(int(index.chunk_files[chunk]))
        try:
            before = handle.pread(payload_offset - offset, offset)
            after = handle.pread(end - payload_offset - length, payload_offset + length)
        except (CorruptCheckpointError, StorageError) as error:
            self._found_unreadable(error, name, fqn, offset, end - offset)
            return
        if (before, after) == (record.prefix, record.suffix(whole)):
            return
        if index.provenance.get("dcphub_version") != __version__:  # other versions may write other headers
            stored = self._locate(chunk)
            if stored is None or (stored.sizes, stored.dtype_code, stored.payload_offset, stored.crc32) == (
                sizes,
                dtype_code,
                payload_offset,
                whole,
            ):
                return
        message = "the zip around the tensor's bytes, which stock torch goes by, is damaged"
        self._found("record", message, name, fqn, offset, end - offset)

    def _check_foreign(self, chunk: int) -> None:
        index = self._index
        name, fqn, offset = self._place(chunk)
        stored = self._locate(chunk)
        if stored is None:
            return
        sizes, dtype = index.box(chunk)[1], index.dtype(int(index.chunk_tensors[chunk]))
        if stored.sizes != sizes or stored.dtype_code != dtype.code:
            self._found(
                "record", f"the record is not the {dtype.name} {sizes} of the metadata", name, fqn, offset
            )
            return
        handle = self._handle(int(index.chunk_files[chunk]))
        got = 0
        for begin in range(0, stored.payload_bytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, stored.payload_bytes - begin)
            at = stored.payload_offset + begin
            try:
                got = crc32(handle.pread(length, at), got)
            except (CorruptCheckpointError, StorageError) as error:
                self._found_unreadable(error, name, fqn, at, length)
                return
            self._count(length, checked=stored.crc32 is not None)
        if stored.crc32 not in (None, got):
            self._found_mismatch(
                name, fqn, stored.payload_offset, stored.payload_bytes, int(stored.crc32 or 0), got
            )

    def _check_object(self, row: int) -> None:
        objects = self._index.objects
        handle, fqn = self._handle(int(objects.files[row])), objects.fqns[row]
        offset, length, expected = (
            int(objects.offsets[row]),
            int(objects.lengths[row]),
            int(objects.crcs[row]),
        )
        try:
            if expected == UNKNOWN:
                self._check_blob(handle, fqn, offset, length)
                return
            got = self._read_crc(handle, offset, length)
        except (CorruptCheckpointError, StorageError) as error:
            self._found_unreadable(error, handle.name, fqn, offset, length)
            return
        self._count(length)
        if got != expected:
            self._found_mismatch(handle.name, fqn, offset, length, expected, got)

    def _check_blob(self, handle: ReadHandle, fqn: str, offset: int, length: int) -> None:
        """An object of a foreign checkpoint: a zip with a CRC for each entry, or a bare pickle with none."""
        head = handle.pread(min(length, len(LOCAL_SIGNATURE)), offset)
        if head[:1] == _PICKLE_PROTOCOL:
            self._read_crc(handle, offset, length)
            self._count(length, checked=False)
            return
        checked = True
        try:
            if head != LOCAL_SIGNATURE:
                raise CheckpointFormatError("it is neither a zip nor a pickle")
            window = Window(lambda at, count: handle.pread(count, at), offset, length)
            entries = read_directory(window)
            check_names(entries)
            for entry in entries.values():
                begin = entry_start(window, entry)
                if begin + entry.size > length:
                    raise CheckpointFormatError("an entry of the object's zip reaches outside of it")
                got = self._read_crc(handle, offset + begin, entry.size)
                checked &= entry.crc32 != 0 or got == 0
                if entry.crc32 not in (0, got):
                    self._found_mismatch(handle.name, fqn, offset + begin, entry.size, entry.crc32, got)
        except CheckpointFormatError as error:
            self._found("record", f"the object cannot be read: {error}", handle.name, fqn, offset, length)
        self._count(length, checked=checked)

    def _read_crc(self, handle: ReadHandle, offset: int, length: int) -> int:
        crc = 0
        for begin in range(offset, offset + length, BLOCK_BYTES):
            crc = crc32(handle.pread(min(BLOCK_BYTES, offset + length - begin), begin), crc)
        return crc

    def _place(self, chunk: int) -> tuple[str, str, int]:
        index = self._index
        name = index.files[int(index.chunk_files[chunk])]
        return name, index.fqns[int(index.chunk_tensors[chunk])], int(index.record_offsets[chunk])

    def _locate(self, chunk: int) -> StoredTensor | None:
        index = self._index
        handle = self._handle(int(index.chunk_files[chunk]))
        name, fqn, offset = self._place(chunk)
        length = int(index.record_lengths[chunk])
        try:
            return locate_payload(lambda at, count: handle.pread(count, at), offset, length, fqn=fqn)
        except CheckpointError as error:
            kind = "record" if isinstance(error, CheckpointFormatError) else "unreadable"
            self._found(kind, f"the record cannot be read: {error}", name, fqn, offset, length)
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
        self, kind: str, message: str, file: str, fqn: str, offset: int, length: int | None = None
    ) -> None:
        with self._lock:
            self._report.findings.append(
                Finding(kind, f"{file}: {fqn!r} at byte {offset}: {message}", file, fqn, offset, length)
            )

    def _found_mismatch(self, file: str, fqn: str, offset: int, length: int, expected: int, got: int) -> None:
        message = (
            f"{length} bytes differ from what was committed (CRC-32 {got:08x}, should be {expected:08x})"
        )
        self._found("checksum", message, file, fqn, offset, length)

    def _found_unreadable(
        self, error: CheckpointError, file: str, fqn: str, offset: int, length: int
    ) -> None:
        self._found("unreadable", f"{length} bytes cannot be read: {error}", file, fqn, offset, length)


def _spans(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Neighbours in a file that are worth one read; ``blocks`` come in file order."""
    span: list[_Block] = []
    begin = end = 0
    for block in blocks:
        joins = span and span[0].file == block.file and 0 <= block.offset - end <= _GAP_BYTES
        if not joins or block.offset + block.length - begin > _SPAN_BYTES:
            if span:
                yield span
            span, begin = [], block.offset
        span.append(block)
        end = block.offset + block.length
    if span:
        yield span
