"""Reading a task's tensors into a buffer: ranges straight to their place, strided boxes through scratch
memory.

Each byte is read once, neighbours together, and each source byte's checksum is taken on the way: as CRC-32s
of `Fragment`s, which whoever knows them all combines to those of whole blocks
(`dcp.conversion.copying.checks`). So a block that two tasks have halves of is verified too, and nobody reads
more than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.conversion.layouts.pieces import SourcePart, Transfer, transfer_of
from dcp.storage.engine.memory import item_dtype
from dcp.storage.engine.reading.coalescing import coalesce, span_bytes
from dcp.storage.engine.reading.fragments import Fragment, within_blocks
from dcp.storage.engine.reading.receiving import SCRATCH
from dcp.storage.engine.reading.source import OpenFiles
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.geometry.lattices import parts_between
from dcp.storage.geometry.payload_parts import box_parts, is_sparse
from dcp.storage.stores.base import Store
from dcp.storage.threads import work_off

__all__ = ["SCRATCH_BYTES", "RangeReader", "Wanted"]

SCRATCH_BYTES: Final = 8 << 20
NO_CHUNK: Final = -1
"""Of reads whose bytes have no checksum of their own."""

_SPARSE: Final = 4
_RUN_COST_BYTES: Final = 8 << 10
"""Reading a run of its own costs about as much as that many bytes."""
_STEP_BYTES: Final = 1 << 20
"""Bytes read before they are checksummed, so that the checksum finds them in the cache."""


class Wanted(NamedTuple):
    """Elements ``first`` to ``last`` (C order) of a copy made of ``sources``, to ``target``.

    ``copy`` and ``position`` say which bytes of the output they are, if they go there as they are; with
    ``copy`` -1 they do not.
    """

    target: memoryview
    itemsize: int
    sources: Sequence[SourcePart]
    first: int
    last: int
    copy: int
    position: int


class _Read(NamedTuple):
    """One range of a file. ``transfer`` None: it is ``target`` itself, else elements are copied to it."""

    file: int
    offset: int
    size_bytes: int
    chunk: int
    position: int
    target: memoryview
    transfer: Transfer | None
    itemsize: int
    copy: int
    copy_position: int
    place: int
    """Where in the range the first element is."""


class RangeReader:
    """Reads from the files of one source. ``files`` maps numbers to (name, size in bytes)."""

    def __init__(self, store: Store, *, verify: bool) -> None:
        self._verify = verify
        self._profile = store.read_profile
        self._facts: dict[int, tuple[str, int]] = {}
        self._files = OpenFiles(store, self._facts.__getitem__)
        self.bytes_read = 0
        self.sources: list[Fragment] = []
        self.targets: list[Fragment] = []

    @property
    def scatters(self) -> bool:
        """Whether a request is dear, so that there should be few."""
        return self._profile.scatter

    def begin(self, files: dict[int, tuple[str, int]]) -> None:
        """Forget the last task's findings; ``files`` are those of the next."""
        self._facts.update(files)
        self.bytes_read = 0
        self.sources, self.targets = [], []

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill all targets."""
        profile = self._profile
        reads = sorted((read for want in wanted for read in self._reads(want)), key=_place)
        groups = [
            *coalesce(
                reads,
                gap_bytes=profile.gap_bytes,
                limit_bytes=min(profile.request_bytes, SCRATCH_BYTES),
                join_below_bytes=profile.join_below_bytes,
            )
        ]
        self.bytes_read += sum(map(span_bytes, groups))
        threads = min(8, profile.threads or 8, len(groups)) if profile.scatter else 1
        work_off(groups, threads, self._work, "dcp-convert")

    def _work(self, groups: Iterator[list[_Read]]) -> None:
        scratch = SCRATCH.get()
        for group in groups:
            if span_bytes(group) > len(scratch) and _needs_scratch(group):
                scratch = SCRATCH.get(span_bytes(group))
            self._carry_out(group, scratch if _needs_scratch(group) else None)
        SCRATCH.put(scratch)

    # -- what to read ----------------------------------------------------------------------------------------

    def _reads(self, want: Wanted) -> Iterator[_Read]:
        for source in want.sources:
            low, high = want.first - source.target, want.last - source.target
            for part in parts_between(source.lengths, source.target_strides, low, high):
                transfer = transfer_of(source, part, want.first, want.itemsize)
                size = math.prod(count for _, count in part) * want.itemsize
                yield from self._transfers(want, source, transfer, size)

    def _transfers(self, want: Wanted, source: SourcePart, transfer: Transfer, size: int) -> Iterator[_Read]:
        base = source.payload_offset
        if transfer.is_run:
            limit = SCRATCH_BYTES if not self._profile.scatter else BLOCK_BYTES
            for at in range(0, size, limit):
                count, begin = min(limit, size - at), transfer.begin + at
                target = want.target[transfer.target + at : transfer.target + at + count]
                position = want.position + transfer.target + at
                yield _Read(
                    source.file,
                    base + begin,
                    count,
                    source.chunk,
                    begin,
                    target,
                    None,
                    1,
                    want.copy,
                    position,
                    0,
                )
            return
        # Of a large transposed tensor each window has a little of everything. Reading all between, again for
        # every window, would be quadratic; such payloads are compared apart.
        itemsize, lengths, own = want.itemsize, transfer.lengths, transfer.source_strides
        gap_bytes = max(_RUN_COST_BYTES, (_SPARSE - 1) * transfer.run_bytes(itemsize))
        chunk = NO_CHUNK if is_sparse(lengths, own, itemsize, gap_bytes) else source.chunk
        for part in box_parts(
            transfer.begin, lengths, own, itemsize, limit_bytes=SCRATCH_BYTES, gap_bytes=gap_bytes
        ):
            begin, end = part.begin, part.end
            if self._verify and chunk != NO_CHUNK and end - begin != math.prod(part.lengths) * itemsize:
                # What is read beside the wanted is read again by others: whole blocks can be compared alone.
                begin = begin // BLOCK_BYTES * BLOCK_BYTES
                end = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, source.payload_bytes)
            yield _Read(
                source.file,
                base + begin,
                end - begin,
                chunk,
                begin,
                want.target,
                transfer.part(part),
                itemsize,
                -1,
                0,
                part.begin - begin,
            )

    # -- reading ---------------------------------------------------------------------------------------------

    def _carry_out(self, group: Sequence[_Read], scratch: memoryview | None) -> None:
        handle = self._files.handle(group[0].file)
        if scratch is None:
            read = group[0]
            step = _STEP_BYTES if not self._profile.scatter else read.size_bytes
            for at in range(0, read.size_bytes, step):
                part = read.target[at : at + step]
                handle.preadv([part], read.offset + at)
                self._note(read, part, at)
            return
        begin, size = group[0].offset, span_bytes(group)
        handle.preadv([scratch[:size]], begin)
        for read in group:
            data = scratch[read.offset - begin : read.offset - begin + read.size_bytes]
            self._note(read, data, 0)
            if read.transfer is None:
                read.target[:] = data
            else:
                _copy_elements(read, data)

    def _note(self, read: _Read, data: memoryview, at: int) -> None:
        """Take the checksums of bytes at ``at`` of a range; one pass serves both sides where it can."""
        verify = self._verify and read.chunk != NO_CHUNK
        own, copied = read.position + at, read.copy_position + at
        if not verify and read.copy < 0:
            return
        for begin, end in within_blocks(
            len(data), own if verify else copied, copied if read.copy >= 0 else None
        ):
            crc = crc32(data[begin:end])
            if verify:
                self.sources.append(Fragment(read.chunk, own + begin, own + end, crc))
            if read.copy >= 0:
                self.targets.append(Fragment(read.copy, copied + begin, copied + end, crc))


def _place(read: _Read) -> tuple[int, int]:
    return read.file, read.offset


def _needs_scratch(group: Sequence[_Read]) -> bool:
    return len(group) > 1 or group[0].transfer is not None


def _copy_elements(read: _Read, data: memoryview) -> None:
    transfer = read.transfer
    if transfer is None:
        return
    kind = item_dtype(read.itemsize)
    source: npt.NDArray[Any] = np.ndarray(transfer.lengths, kind, data, read.place, transfer.source_strides)
    target: npt.NDArray[Any] = np.ndarray(
        transfer.lengths, kind, read.target, transfer.target, transfer.target_strides
    )
    np.copyto(target, source)
