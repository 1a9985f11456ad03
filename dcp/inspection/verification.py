"""Verification of a checkpoint: compare every byte with the committed checksums. Does not need torch.

Checks cover the index, files (missing, wrong size, unknown), payloads, record frames (used by stock torch),
`.metadata` against the manifest, and digests. Digests use the same bytes; only tied tensors and tensors cut
across rows are read again.

Data files are read in order, neighbours together, in large pieces and several at a time. After a failed read,
parts are read separately to locate the fault.
"""

from __future__ import annotations

import heapq
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.values.digests import CheckpointDigests, digest_of_sum, digests, sums_of
from dcp.inspection.values.tensor_reading import ReportBytes, TensorReader
from dcp.planners.load.selection import Patterns
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, NOTES_NAME
from dcp.storage.digests import BLOCK_BYTES as DIGEST_BLOCK_BYTES
from dcp.storage.digests import (
    KEY,
    SUM_BYTES,
    LogicalPlaces,
    blocks_of,
    digest_of_all,
    power,
    product,
    run_value,
)
from dcp.storage.engine.memory import item_view
from dcp.storage.engine.requests import coalesce, span_bytes
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
    StorageError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.native.record import OpenRecord, begin_record
from dcp.storage.formats.opening import (
    MAX_TORCH_METADATA_BYTES,
    SourcePlace,
    index_at,
    locate,
    naming_near_places,
)
from dcp.storage.formats.registry import TORCH_DCP, is_of_files
from dcp.storage.formats.torch.archive import (
    LOCAL_SIGNATURE,
    Window,
    check_names,
    entry_start,
    locate_payload,
    read_directory,
)
from dcp.storage.formats.torch.pickle_reader import TensorPickle
from dcp.storage.geometry.boxes import BoxSet, cut_overlaps, overlapping_pairs
from dcp.storage.geometry.strides import expand_ranges, gather_rows, row_products
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, ReadHandle, Store
from dcp.storage.stores.opening import OpenWith
from dcp.storage.threads import work_off
from dcp.version import __version__

SPAN_BYTES: Final = 8 << 20
"""Neighbouring parts are read together up to this size, one buffer for each thread."""

_GAP_BYTES: Final = 64 << 10
"""Gaps up to this size are read, because a second request is slower."""

_THREADS: Final = 2

_PICKLE_PROTOCOL: Final = b"\x80"
"""First byte of a pickle outside of a zip."""
_MOST_AGAIN: Final = 4
_SMALL_BYTES: Final = 64 << 20
_RANK_LOCAL = re.compile(r"__[0-9]+(\.manifest\.msgpack|\.metadata)")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, or a note (`is_note`).

    Attributes:
        kind: "index", "missing-file", "file-size", "stray-file", "checksum", "record", "unreadable",
            "metadata", "digest" (a tensor differs from the manifest's digest or from the compared
            checkpoint), or "unsupported" (a newer format version).
        offset: First byte in the file; ``length`` is the size.
        fqn: Name of the affected entry.
    """

    kind: str
    message: str
    file: str | None = None
    fqn: str | None = None
    offset: int | None = None
    length: int | None = None

    @property
    def is_note(self) -> bool:
        """Return True for a file that the checkpoint does not refer to, which does not affect a load.

        Killed saves and power cuts leave such files.
        """
        return self.kind == "stray-file"


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`. ``unchecked_bytes`` were read, but the format stores no checksum.

    ``digest`` covers all tensors, as in `dcp digest`, if requested and nothing is wrong.
    """

    url: str
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    blocks: int = 0
    bytes: int = 0
    unchecked_bytes: int = 0
    digest: str | None = None

    @property
    def ok(self) -> bool:
        """Return True without faults; notes are allowed."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        """Findings except notes."""
        return [found for found in self.findings if not found.is_note]


def kind_of(error: CheckpointError, otherwise: str) -> str:
    """Return the kind of a finding: "unsupported" for newer format versions, else ``otherwise``."""
    return "unsupported" if isinstance(error, UnsupportedFormatError) else otherwise


@plain_errors
def verify(
    checkpoint_id: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    only: Patterns | None = None,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options_of_against: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Read every byte of a checkpoint and compare the checksums; each fault becomes a `Finding`.

    Args:
        checkpoint_id: Path or URL of a checkpoint, torch.save file, safetensors file or Hugging Face folder.
        against: Another checkpoint of any format and sharding, compared by digests.
        only: Names or shell globs in ``against`` that must be present, such as the weights of a training
            state. None: all.
        threads: Number of threads, each with up to 8 MiB of memory. None: chosen by the store, 2 on a disk.
        progress: Function of (bytes done, total bytes).
        storage_options: Options of the URLs' file systems, as for `dcp.save`.
        options_of_against: Options for ``against`` alone.

    Returns:
        Counts and findings; damage does not raise.

    Raises:
        CheckpointNotFoundError: No committed checkpoint exists there.
        CheckpointConflictError: The checkpoint was replaced during verification.
        PlanError: ``only`` selects nothing, or the other checkpoint has nothing to compare.
        StorageError: The store cannot be read at all.
    """
    if only is not None and against is None:
        raise OptionError("only= requires against=")
    opener = OpenWith(storage_options)
    with naming_near_places(checkpoint_id, opener):
        place = locate(checkpoint_id, open_store=opener)
        if against is None:
            return verify_place(place, threads=threads, progress=progress)
        options = storage_options if options_of_against is None else options_of_against
        other = partial(digests, against, only=only, storage_options=options)
        return verify_place(place, threads=threads, progress=progress, against=other)


def verify_place(
    place: SourcePlace,
    *,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    against: Callable[[], CheckpointDigests] | None = None,
    with_digest: bool = False,
) -> VerifyReport:
    """Verify the checkpoint at ``place``, and compare ``against`` if all bytes are right.

    ``with_digest`` adds the digest of all tensors, unless much more than the stored bytes would be read
    again.
    """
    store, report = place.store, VerifyReport(place.url)
    try:
        index = index_at(place)
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        report.findings.append(Finding(kind_of(error, "index"), str(error), error.path or None))
        return report
    listing = {file.name: file for file in store.list()}
    if is_of_files(index.format):  # other files are ignored
        listing = {name: listing[name] for name in index.files if name in listing}
    report.files, report.tensors = len(index.files), index.tensor_count
    report.findings += _check_metadata(store, index, listing)
    report.findings += check_files(index, listing)
    report.findings += _check_parts(index)
    sums = StreamedSums(index) if with_digest or against is not None or any(index.digests) else None
    try:
        PayloadChecks(store, index, listing, report, progress, sums).run(threads)
    except CheckpointNotFoundError as error:  # deleted since it was listed
        name = error.path.rpartition("/")[2]
        report.findings.append(Finding("missing-file", f"{name} is missing", name or None))
    if report.ok and sums is not None:
        with_digest = with_digest and sums.left_bytes <= _MOST_AGAIN * report.bytes + _SMALL_BYTES
        other = None if against is None else against()
        try:
            with TensorReader(store, index, verify="full", name=place.url) as reader:
                report.digest = _check_digests(reader, sums.sums, other, report, is_all=with_digest)
        except CorruptCheckpointError as error:  # including tensors with missing parts
            report.findings.append(Finding(kind_of(error, "index"), str(error), fqn=error.fqn or None))
    is_same = True
    if report.findings:  # a missing or damaged checkpoint was not replaced
        with suppress(CheckpointError):
            is_same = encode_manifest(index_at(place)) == encode_manifest(index)
        if not is_same:
            raise CheckpointConflictError(
                f"{place.url} was replaced during the verification; verify it again", path=place.url
            )
    report.findings.sort(key=lambda found: (found.file or "", found.offset or 0))
    return report


def _check_metadata(store: Store, index: CheckpointIndex, listing: dict[str, FileInfo]) -> Iterator[Finding]:
    if MANIFEST_NAME not in listing:
        return
    name, message = METADATA_NAME, None
    if index.format == TORCH_DCP.name:
        name = MANIFEST_NAME
        message = f"stock torch has overwritten this checkpoint; {name} of the previous save is ignored"
    elif index.torch_metadata_crc is not None and name not in listing:
        message = f"{name} is missing: stock torch cannot load this"
    elif index.torch_metadata_crc is not None:
        crc = crc32(store.read(name, limit_bytes=MAX_TORCH_METADATA_BYTES))
        if crc != index.torch_metadata_crc:
            what = "differs from the committed file: it is damaged, and stock torch would read it"
            if crc == index.replaced_torch_metadata_crc:
                what = "belongs to the replaced checkpoint, which stock torch would load"
            message = f"{name} {what}"
    if message is not None:
        yield Finding("metadata", message, name)


def _check_digests(
    reader: TensorReader,
    sums: Mapping[int, bytes],
    other: CheckpointDigests | None,
    report: VerifyReport,
    *,
    is_all: bool,
) -> str | None:
    """Compare tensors of ``reader`` with its manifest's digests and with ``other``; return the digest of all
    if right.

    Tensors missing in ``sums`` are read if they have a digest, or all with ``other`` or ``is_all``.
    """
    index = reader.index
    noted = {row: digest for row in range(index.tensor_count) if (digest := index.digest(row)) is not None}
    rows = [*noted] if other is None and not is_all else [*range(index.tensor_count)]
    read = sums_of(reader, [row for row in rows if row not in sums])
    own = {row: digest_of_sum(index, row, (sums if row in sums else read)[row]) for row in rows}
    wrong = {
        index.fqns[row]: f"has the digest {own[row]}, but the manifest says {digest}, used in comparisons"
        for row, digest in noted.items()
        if own[row] != digest
    }
    found = [*wrong.items(), *(() if other is None else _differing(index, own, other))]
    report.findings += [Finding("digest", f"{fqn!r} {what}", fqn=fqn) for fqn, what in found]
    named = ((index.fqns[row], digest) for row, digest in own.items())
    return digest_of_all(named) if report.ok and len(own) == index.tensor_count else None


def _differing(
    index: CheckpointIndex, own: Mapping[int, str], other: CheckpointDigests
) -> Iterator[tuple[str, str]]:
    """Yield names of tensors that differ, with the reason."""
    theirs = {tensor.fqn: tensor for tensor in other.tensors}
    for row, digest in own.items():
        fqn, same = index.fqns[row], theirs.pop(index.fqns[row], None)
        if same is None:
            yield fqn, f"is missing from {other.url}"
        elif same.digest != digest:
            here, there = (
                f"{dtype} {'x'.join(map(str, shape)) or 'scalar'} {shown}"
                for dtype, shape, shown in (
                    (index.dtype(row).name, index.shape(row), digest),
                    (same.dtype, same.shape, same.digest),
                )
            )
            yield fqn, f"differs from {other.url}: {here} here, {there} there"
    yield from ((fqn, f"is only in {other.url}") for fqn in theirs)


def _check_parts(index: CheckpointIndex) -> Iterator[Finding]:
    """Yield tensors with missing elements, such as a lost rank's part."""
    held = np.zeros(index.tensor_count, np.int64)
    several = np.diff(index.chunk_start)[index.chunk_tensors] > 1
    once = np.flatnonzero(~several)
    volumes = row_products(index.chunk_sizes, index.box_start)
    held[index.chunk_tensors[once]] = volumes[once]
    ndims = index.ndims[index.chunk_tensors]
    for ndim in np.unique(ndims[several]).tolist():
        rows = np.flatnonzero(several & (ndims == ndim))
        flat = expand_ranges(index.box_start[rows], ndims[rows])
        low = index.chunk_offsets[flat].reshape(-1, ndim)
        boxes = BoxSet(index.chunk_tensors[rows], low, low + index.chunk_sizes[flat].reshape(-1, ndim))
        try:
            _, parts = cut_overlaps(boxes, *overlapping_pairs(boxes))  # possible in some foreign checkpoints
        except PlanError as error:
            yield Finding("index", f"{error}")
            return
        np.add.at(held, parts.groups, np.prod(parts.high - parts.low, axis=1, dtype=np.int64))
    sizes = row_products(index.shape_values, index.shape_start)
    for row in np.flatnonzero(held < sizes).tolist():
        missing = int(sizes[row] - held[row])
        shown = f"{index.fqns[row]!r}: {missing:,} of {int(sizes[row]):,} elements are in no file"
        yield Finding("index", shown, fqn=index.fqns[row])


def check_files(index: CheckpointIndex, listing: Mapping[str, FileInfo]) -> Iterator[Finding]:
    """Compare present files with committed files."""
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        if name not in listing:
            yield Finding("missing-file", f"{name} is missing", name)
        elif size not in (UNKNOWN, listing[name].size_bytes):
            found = listing[name].size_bytes
            yield Finding("file-size", f"{name} has {found} bytes, expected {size}", name)
    for name in sorted(listing.keys() - set(index.files) - {MANIFEST_NAME, METADATA_NAME, NOTES_NAME}):
        if name.startswith(TEMPORARY_PREFIX):
            yield Finding("stray-file", f"{name} is left over from an interrupted publish", name)
        elif not _RANK_LOCAL.fullmatch(name):
            yield Finding("stray-file", f"{name} does not belong to the checkpoint", name)


# -- payloads ------------------------------------------------------------------------------------------------


class StreamedSums:
    """Sums of tensors whose chunks are separate contiguous parts.

    Other tensors, such as column shards and tied tensors, are missing in `sums` and are read again.
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
        """The sums by tensor row, after all payloads were read."""
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
    """Return chunks with an unshared record and a C-ordered payload."""
    known: npt.NDArray[np.bool_] = index.payload_offsets != UNKNOWN
    filled = np.flatnonzero(index.payload_lengths)
    if not len(filled):
        return known
    stored = np.stack([index.chunk_files[filled], index.record_offsets[filled]])
    _, number, count = np.unique(stored, axis=1, return_inverse=True, return_counts=True)
    known[filled] &= count[number.reshape(-1)] == 1
    known[[*index.payload_strides]] = False
    if is_of_files(index.format):  # whole storages are read in this case
        known &= index.payload_lengths == index.record_lengths
    return known


class _FileSpan:
    """A thread's view of a file: one span in memory, other bytes on demand."""

    def __init__(self, handle: ReadHandle) -> None:
        self._handle = handle
        self._begin = self._end = 0
        self._buffer = bytearray()

    def load(self, begin: int, end: int) -> memoryview:
        """Load these bytes of the file into memory."""
        self._begin = self._end = begin
        if len(self._buffer) < end - begin:  # small checkpoints must not pay for a large buffer
            self._buffer = bytearray(end - begin)
        view = memoryview(self._buffer)[: end - begin]
        self._handle.preadv([view], begin)
        self._end = end
        return view

    def take(self, offset: int, length: int) -> memoryview:
        """Return bytes of the file, from memory if loaded."""
        if self._begin <= offset and offset + length <= self._end:
            return memoryview(self._buffer)[offset - self._begin : offset - self._begin + length]
        return memoryview(self._handle.pread(length, offset))

    def read(self, offset: int, length: int) -> bytes:
        """Return the same as bytes."""
        return bytes(self.take(offset, length))

    def steps(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield bytes block by block; other bytes are read in large pieces."""
        is_there = self._begin <= offset and offset + length <= self._end
        for begin in range(offset, offset + length, max(length, 1) if is_there else SPAN_BYTES):
            end = min(begin + SPAN_BYTES, offset + length)
            data = self.take(offset, length) if is_there else self.load(begin, end)
            yield from (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))


@dataclass(slots=True)
class _CheckedRange:
    """Bytes of a file with a separate check; ``fqn`` is their first name."""

    file: int
    offset: int
    size_bytes: int
    fqn: str
    check: Callable[[_FileSpan, _CheckedRange], None]

    def __lt__(self, other: _CheckedRange) -> bool:
        return (self.file, self.offset) < (other.file, other.offset)


class PayloadChecks:
    """Compare all payloads, records and objects. A lock protects findings, counts and progress."""

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        listing: Mapping[str, FileInfo],
        report: VerifyReport,
        progress: ReportBytes | None = None,
        sums: StreamedSums | None = None,
    ) -> None:
        self._store, self._index, self._listing = store, index, listing
        self._report, self._progress, self._sums = report, progress, sums
        self._lock = threading.Lock()
        self._odd_records: set[int] = set()
        self._done_bytes = self._total_bytes = 0

    def run(self, threads: int | None) -> None:
        """Check everything in ``threads`` threads; None: as many as the store recommends."""
        profile = self._store.read_profile
        gap_bytes = max(_GAP_BYTES, profile.gap_bytes)
        spans = coalesce(self._parts(), gap_bytes=gap_bytes, limit_bytes=SPAN_BYTES)
        work_off(spans, max(1, threads or profile.threads or _THREADS), self._check_all)

    def _check_all(self, spans: Iterator[list[_CheckedRange]]) -> None:
        for file, some in groupby(
            spans, lambda span: span[0].file
        ):  # keep one file open, because there may be thousands
            name = self._index.files[file]
            size_bytes = self._listing[name].size_bytes
            with closing(self._store.open_read(name, expected_bytes=size_bytes)) as handle:
                source = _FileSpan(handle)
                for span in some:
                    self._check(source, span)

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
                raise  # all retries failed: the service is down, not a sector
            if len(span) == 1:
                self._found("unreadable", f"{size_bytes} bytes cannot be read: {error}", span[0])
                return
            for part in span:  # find the part that cannot be read
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
        values = []
        for place, row in sorted(blobs.items()):
            crc = int(objects.crcs[row])
            check = self._check_blob if crc == UNKNOWN else partial(self._check_range, crc, UNKNOWN, 0)
            values.append(_CheckedRange(*place, objects.fqns[row], check))
        return heapq.merge(self._tensors(chunks), values)

    def _tensors(self, chunks: npt.NDArray[np.int64]) -> Iterator[_CheckedRange]:
        index, of_files = self._index, is_of_files(self._index.format)
        crcs = index.crcs.tolist()
        columns = [index.chunk_files, index.chunk_tensors, index.record_offsets, index.record_lengths]
        columns += [index.payload_offsets, index.payload_lengths, index.crc_start, index.crc_start[1:]]
        rows = zip(chunks.tolist(), *(column[chunks].tolist() for column in columns), strict=True)
        for chunk, file, tensor, record, record_bytes, payload, payload_bytes, row, row_end in rows:
            part = partial(_CheckedRange, file, fqn=index.fqns[tensor])
            end, payload_end = record + record_bytes, payload + payload_bytes
            frame = partial(self._check_frame, chunk)
            if of_files:
                # A storage of a torch.save file, with any views, or a safetensors tensor.
                check = partial(self._check_range, index.record_crcs.get(chunk), chunk, record - payload)
                yield part(record, record_bytes, check=check)
            elif payload == UNKNOWN:
                yield part(record, record_bytes, check=partial(self._check_foreign, chunk))
            elif payload_bytes <= BLOCK_BYTES and record_bytes > payload_bytes and row < row_end:
                yield part(record, record_bytes, check=partial(self._check_record, chunk, crcs[row]))
            else:
                if payload > record:
                    yield part(record, payload - record, check=frame)
                for number, begin in enumerate(range(payload, payload_end, BLOCK_BYTES), row):
                    crc = crcs[number] if number < row_end else None
                    check = partial(self._check_range, crc, chunk, begin - payload)
                    yield part(begin, min(BLOCK_BYTES, payload_end - begin), check=check)
                if end > payload_end:
                    yield part(payload_end, end - payload_end, check=frame)

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_range(
        self, expected: int | None, chunk: int, position: int, source: _FileSpan, part: _CheckedRange
    ) -> None:
        """Check all of a range: of a chunk's payload from ``position`` on, or (`UNKNOWN`) of none."""
        got = 0
        for data in source.steps(part.offset, part.size_bytes):
            got = crc32(data, got)
            if chunk != UNKNOWN and self._sums is not None:
                self._sums.add(chunk, position, data)
            position += len(data)
            self._count(len(data), checked=expected is not None)
        if expected is not None:
            self._compare(part, part.offset, part.size_bytes, expected, got)

    def _check_record(self, chunk: int, expected: int, source: _FileSpan, part: _CheckedRange) -> None:
        """Check a whole native record with a single-block payload."""
        record, data = self._record(chunk), source.take(part.offset, part.size_bytes)
        begin, length = int(self._index.payload_offsets[chunk]), record.payload_bytes
        head = begin - part.offset
        payload = data[head : head + length]
        if self._sums is not None:
            self._sums.add(chunk, 0, payload)
        self._count(length)
        self._compare(part, begin, length, expected, crc32(payload))
        if data[:head] != record.prefix or data[head + length :] != record.suffix(expected):
            self._frame_differs(chunk, expected, source, part)

    def _check_frame(self, chunk: int, source: _FileSpan, part: _CheckedRange) -> None:
        """Compare a native payload's frame, used by stock torch, with the expected frame."""
        record, whole = self._record(chunk), self._index.payload_crc(chunk) or 0
        is_first = part.offset == int(self._index.record_offsets[chunk])
        if source.take(part.offset, part.size_bytes) != (record.prefix if is_first else record.suffix(whole)):
            self._frame_differs(chunk, whole, source, part)

    def _record(self, chunk: int) -> OpenRecord:
        """Return the expected record around a payload."""
        index = self._index
        length, offset = int(index.payload_lengths[chunk]), int(index.record_offsets[chunk])
        return begin_record(*self._type(chunk), length, offset)

    def _type(self, chunk: int) -> tuple[int, tuple[int, ...]]:
        index = self._index
        return int(index.dtype_codes[index.chunk_tensors[chunk]]), index.box(chunk).sizes

    def _frame_differs(self, chunk: int, whole: int, source: _FileSpan, part: _CheckedRange) -> None:
        index = self._index
        with self._lock:
            if chunk in self._odd_records:
                return
            self._odd_records.add(chunk)
        if index.provenance.get("dcphub_version") != __version__:  # other versions may write other headers
            stored = self._locate(chunk, source, part)
            expected = (*self._type(chunk), int(index.payload_offsets[chunk]), whole)
            if stored is None:
                return
            if (stored.dtype_code, stored.sizes, stored.payload_offset, stored.crc32) == expected:
                return
        message = "the zip around the tensor's bytes, which stock torch reads, is damaged"
        self._found("record", message, self._whole(chunk, part))

    def _whole(self, chunk: int, part: _CheckedRange) -> _CheckedRange:
        offset, length = self._index.record_offsets[chunk], self._index.record_lengths[chunk]
        return replace(part, offset=int(offset), size_bytes=int(length))

    def _check_foreign(self, chunk: int, source: _FileSpan, part: _CheckedRange) -> None:
        stored = self._locate(chunk, source, part)
        if stored is None:
            return
        if (stored.dtype_code, stored.sizes) != self._type(chunk):
            dtype = self._index.dtype(int(self._index.chunk_tensors[chunk])).name
            message = f"the record is not the {dtype} {self._type(chunk)[1]} of the metadata"
            self._found("record", message, part)
            return
        payload = replace(part, offset=stored.payload_offset, size_bytes=stored.storage_bytes)
        self._check_range(stored.crc32, UNKNOWN, 0, source, payload)

    def _check_blob(self, source: _FileSpan, part: _CheckedRange) -> None:
        """Check an object of a foreign checkpoint: a zip with a CRC for each entry, or a bare pickle with
        none."""
        offset, length = part.offset, part.size_bytes
        head = source.read(offset, min(length, len(LOCAL_SIGNATURE)))
        if head[:1] == _PICKLE_PROTOCOL:
            self._check_range(None, UNKNOWN, 0, source, part)
            return
        checked = True
        try:
            if head != LOCAL_SIGNATURE:
                raise CheckpointFormatError("it is neither a zip nor a pickle")
            window = Window(source.read, offset, length)
            entries = read_directory(window)
            check_names(entries)
            for entry in entries.values():
                begin, got = entry_start(window, entry), 0
                if begin + entry.size > length:
                    raise CheckpointFormatError("an entry of the object's zip exceeds the object")
                for data in source.steps(offset + begin, entry.size):
                    got = crc32(data, got)
                checked &= entry.crc32 != 0 or got == 0
                self._compare(part, offset + begin, entry.size, entry.crc32 or got, got)
        except CheckpointFormatError as error:
            self._found("record", f"the object cannot be read: {error}", part)
        self._count(length, checked=checked)

    def _locate(self, chunk: int, source: _FileSpan, part: _CheckedRange) -> TensorPickle | None:
        whole = self._whole(chunk, part)
        try:
            return locate_payload(source.read, whole.offset, whole.size_bytes, fqn=part.fqn)
        except StorageError:
            raise
        except CheckpointError as error:
            kind = "record" if isinstance(error, CheckpointFormatError) else "unreadable"
            self._found(kind_of(error, kind), f"the record cannot be read: {error}", whole)
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

    def _compare(self, part: _CheckedRange, offset: int, length: int, expected: int, got: int) -> None:
        if got != expected:
            crcs = f"(CRC-32 {got:08x}, should be {expected:08x})"
            message = f"{length} bytes differ from the committed bytes {crcs}"
            self._found("checksum", message, replace(part, offset=offset, size_bytes=length))

    def _found(self, kind: str, message: str, part: _CheckedRange) -> None:
        file = self._index.files[part.file]
        message = f"{file}: {part.fqn!r} at byte {part.offset}: {message}"
        with self._lock:
            found = Finding(kind, message, file, part.fqn, part.offset, part.size_bytes)
            self._report.findings.append(found)
