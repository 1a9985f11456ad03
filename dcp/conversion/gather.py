"""Read a task's tensors into a buffer: ranges directly, strided boxes through scratch memory.

Each byte is read once, with neighbours in one request, and checksummed in the same pass: CRC-32s of
`Fragment`s are later combined to CRC-32s of blocks (`dcp.conversion.running`). Blocks shared by two tasks are
verified without extra reads. The same pass computes the target's checksums, which the read engine of loads
does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from operator import attrgetter, mul
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.conversion.layout import SourcePart
from dcp.storage.engine.memory import item_dtype
from dcp.storage.engine.read import SCRATCH
from dcp.storage.engine.requests import coalesce, span_bytes
from dcp.storage.engine.source import Fragment, OpenFiles, within_blocks
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.geometry.strides import AxisPart, box_parts, is_sparse, parts_between
from dcp.storage.packing import pack, unpack
from dcp.storage.stores.base import ReadHandle, Store
from dcp.storage.threads import work_off

SCRATCH_BYTES: Final = 8 << 20
NO_CHUNK: Final = -1
"""Marks reads without a checksum."""

_SPARSE: Final = 4
_RUN_COST_BYTES: Final = 8 << 10
"""A separate request costs about as much as reading this many bytes."""
_STEP_BYTES: Final = 1 << 20
"""Bytes read before each checksum, to stay within the cache."""


class Wanted(NamedTuple):
    """Elements ``first`` to ``last`` (C order) of a copy made of ``sources``, to write to ``target``.

    ``copy`` and ``position`` locate the bytes in the output; ``copy`` is -1 for intermediate data.
    """

    target: memoryview
    itemsize: int
    sources: Sequence[SourcePart]
    first: int
    last: int
    copy: int = -1
    position: int = 0


class _Box(NamedTuple):
    """Elements to copy from a read at byte ``begin`` to ``target``, with byte strides, slowest dimension
    first."""

    begin: int
    target: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    target_strides: tuple[int, ...]


class _Read(NamedTuple):
    """A range of a file, read into ``target``, or through a ``box`` copied to ``target``.

    ``chunk``, ``position``, ``copy`` and ``copy_position`` locate the bytes for checksums.
    """

    file: int
    offset: int
    size_bytes: int
    chunk: int
    position: int
    target: memoryview
    copy: int = -1
    copy_position: int = 0
    itemsize: int = 1
    box: _Box | None = None


class BadElements(NamedTuple):
    """Number of ``elements`` of a copy that are NaN, infinite or too large for the type (``kind``); ``chunk``
    is one source."""

    copy: int
    chunk: int
    elements: int
    kind: int


@dataclass
class TaskResult:
    """Result of tasks: checksums of bytes read and written, by payload and by copy.

    ``faults`` prevent publication. Pickled in packed form.
    """

    number: int
    bytes_read: int = 0
    sources: list[Fragment] = field(default_factory=list)
    targets: list[Fragment] = field(default_factory=list)
    faults: list[BadElements] = field(default_factory=list)

    def add(self, other: TaskResult) -> None:
        """Add the result of another task."""
        self.bytes_read += other.bytes_read
        self.sources += other.sources
        self.targets += other.targets
        self.faults += other.faults

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskResult.decode, (self.encode(),)

    def encode(self) -> bytes:
        """Pack as differences between rows, which compress well."""
        columns = []
        for found in (self.sources, self.targets, self.faults):
            rows = np.array(found, np.int64).reshape(-1, 4)
            columns.append(np.diff(rows, axis=0, prepend=np.int64(0)).T)
        return pack([self.number, self.bytes_read, *columns])

    @classmethod
    def decode(cls, data: bytes) -> TaskResult:
        """Return the inverse of `encode`. Raises CheckpointFormatError for invalid data."""
        try:
            number, bytes_read, *columns = unpack(data)
            sources, targets, faults = (np.cumsum(one.T, axis=0).tolist() for one in columns)
            parts = list(starmap(Fragment, sources)), list(starmap(Fragment, targets))
            return cls(number, bytes_read, *parts, list(starmap(BadElements, faults)))
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointFormatError(
                "the progress record of the conversion is damaged; convert again"
            ) from error


class RangeReader:
    """Read for task ``number`` from the files of one source, (name, size in bytes) by number.

    ``result`` receives checksums of all bytes read, and of bytes copied unchanged to the target.
    """

    def __init__(
        self, store: Store, number: int, files: Mapping[int, tuple[str, int]], *, verify: bool
    ) -> None:
        self._verify = verify
        self.profile = store.read_profile
        self._files = OpenFiles(store, files)
        self.close = self._files.close
        self.result = TaskResult(number)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill all targets."""
        profile = self.profile
        reads = sorted(chain.from_iterable(map(self._reads, wanted)), key=_PLACE)
        joined = coalesce(
            reads,
            gap_bytes=profile.gap_bytes,
            limit_bytes=min(profile.request_bytes, SCRATCH_BYTES),
            join_below_bytes=profile.join_below_bytes,
        )
        groups = list(joined)
        self.result.bytes_read += sum(map(span_bytes, groups))
        threads = min(8, profile.threads or 8, len(groups)) if profile.scatter else 1
        work_off(groups, threads, self._work, "dcp-convert")

    # -- what to read ----------------------------------------------------------------------------------------

    def _reads(self, want: Wanted) -> Iterator[_Read]:
        limit = SCRATCH_BYTES if not self.profile.scatter else BLOCK_BYTES
        for source in want.sources:
            low, high = want.first - source.target, want.last - source.target
            for part in parts_between(source.lengths, source.target_strides, low, high):
                box = _box_of(source, part, want.first, want.itemsize)
                if not box.strides == box.target_strides == (want.itemsize,):
                    yield from self._strided(want, source, box)
                    continue
                size = box.lengths[0] * want.itemsize
                for at in range(0, size, limit):
                    count, begin, to = min(limit, size - at), box.begin + at, box.target + at
                    place = source.file, source.payload_offset + begin, count, source.chunk, begin
                    yield _Read(*place, want.target[to : to + count], want.copy, want.position + to)

    def _strided(self, want: Wanted, source: SourcePart, box: _Box) -> Iterator[_Read]:
        # Each window of a large transposed tensor needs bytes of the whole payload. Reading everything
        # between, again for every window, would be quadratic. Checksums of such payloads are verified
        # separately.
        itemsize, (first, target, lengths, strides, target_strides) = want.itemsize, box
        run_bytes = lengths[-1] * itemsize if strides[-1] == itemsize else itemsize
        gap_bytes = max(_RUN_COST_BYTES, (_SPARSE - 1) * run_bytes)
        chunk = NO_CHUNK if is_sparse(lengths, strides, itemsize, gap_bytes) else source.chunk
        limits = {"limit_bytes": SCRATCH_BYTES, "gap_bytes": gap_bytes}
        for part in box_parts(first, lengths, strides, itemsize, **limits):
            begin, end = part.begin, part.end
            if self._verify and chunk != NO_CHUNK and end - begin != math.prod(part.lengths) * itemsize:
                # Other tasks read the adjacent bytes, so only whole blocks can be verified here.
                begin = begin // BLOCK_BYTES * BLOCK_BYTES
                end = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, source.payload_bytes)
            to = target + sum(map(mul, part.offsets, target_strides))
            own = _Box(part.begin - begin, to, part.lengths, strides, target_strides)
            place = source.file, source.payload_offset + begin, end - begin, chunk, begin
            yield _Read(*place, want.target, itemsize=itemsize, box=own)

    # -- reading ---------------------------------------------------------------------------------------------

    def _work(self, groups: Iterator[list[_Read]]) -> None:
        scratch = SCRATCH.get()
        for group in groups:
            handle, read, size = self._files.handle(group[0].file), group[0], span_bytes(group)
            if len(group) > 1 or read.box is not None:
                if size > len(scratch):
                    scratch = SCRATCH.get(size)
                self._read_apart(handle, group, scratch[:size])
                continue
            step = _STEP_BYTES if not self.profile.scatter else size
            for at in range(0, size, step):
                part = read.target[at : at + step]
                handle.preadv([part], read.offset + at)
                self._note(read, part, at)
        SCRATCH.put(scratch)

    def _read_apart(self, handle: ReadHandle, group: Sequence[_Read], scratch: memoryview) -> None:
        begin = group[0].offset
        handle.preadv([scratch], begin)
        for read in group:
            data = scratch[read.offset - begin : read.offset - begin + read.size_bytes]
            self._note(read, data, 0)
            if read.box is None:
                read.target[:] = data
                continue
            kind, (place, to, lengths, strides, target_strides) = item_dtype(read.itemsize), read.box
            source: npt.NDArray[Any] = np.ndarray(lengths, kind, data, place, strides)
            target: npt.NDArray[Any] = np.ndarray(lengths, kind, read.target, to, target_strides)
            np.copyto(target, source)

    def _note(self, read: _Read, data: memoryview, at: int) -> None:
        """Checksum bytes at ``at`` of a range, for source and target in one pass where possible."""
        verify = self._verify and read.chunk != NO_CHUNK
        own, copied = read.position + at, read.copy_position + at
        if not verify and read.copy < 0:
            return
        other = copied if read.copy >= 0 else None
        for begin, end in within_blocks(len(data), own if verify else copied, other):
            crc = crc32(data[begin:end])
            if verify:
                self.result.sources.append(Fragment(read.chunk, own + begin, own + end, crc))
            if read.copy >= 0:
                self.result.targets.append(Fragment(read.copy, copied + begin, copied + end, crc))


_PLACE: Final = attrgetter("file", "offset")


def _box_of(source: SourcePart, part: Sequence[AxisPart], first: int, itemsize: int) -> _Box:
    """Return the copy of ``part`` from a payload to a buffer that begins with element ``first``; contiguous
    dimensions are joined."""
    begin, target = source.begin, (source.target - first) * itemsize
    lengths: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    run = itemsize
    axes = zip(part, source.strides, source.target_strides, strict=True)
    for (low, n), s, step in reversed(list(axes)):
        t = step * itemsize
        begin += low * s
        target += low * t
        if n == 1:
            continue
        if not lengths and s == t == run:
            run *= n
        elif lengths and s == sources[-1] * lengths[-1] and t == targets[-1] * lengths[-1]:
            lengths[-1] *= n
        else:
            lengths.append(n)
            sources.append(s)
            targets.append(t)
    if run > itemsize or not lengths:  # the innermost run becomes a separate dimension again
        lengths.insert(0, run // itemsize)
        sources.insert(0, itemsize)
        targets.insert(0, itemsize)
    if len(lengths) > 1:
        order = sorted(range(len(lengths)), key=lambda d: (-sources[d], -d))
        lengths, sources, targets = ([column[d] for d in order] for column in (lengths, sources, targets))
    return _Box(begin, target, tuple(lengths), tuple(sources), tuple(targets))
