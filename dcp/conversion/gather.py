"""Reading a task's tensors into a buffer: ranges straight to their place, strided boxes through scratch
memory.

Each byte is read once, neighbours together, and each source byte's checksum is taken on the way: as CRC-32s
of `Fragment`s, which whoever knows them all combines to those of whole blocks (`dcp.conversion.checks`). So a
block that two tasks have halves of is verified too, and nobody reads more than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.conversion.pieces import SourceBox, Transfer, transfer_of
from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.geometry.boxes import range_boxes
from dcp.storage.geometry.payload_parts import box_parts, is_sparse
from dcp.storage.geometry.strides import c_strides
from dcp.storage.stores.base import ReadHandle, Store
from dcp.storage.threads import WorkerThreads

__all__ = ["SCRATCH_BYTES", "Fragment", "Gatherer", "Wanted"]

SCRATCH_BYTES: Final = 8 << 20
NO_CHUNK: Final = -1
"""Of reads whose bytes have no checksum of their own."""

_SPARSE: Final = 4
_RUN_COST_BYTES: Final = 8 << 10
"""Reading a run of its own costs about as much as that many bytes."""
_STEP_BYTES: Final = 1 << 20
"""Bytes read before they are checksummed, so that the checksum finds them in the cache."""

_UINTS: Final[dict[int, str]] = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


class Fragment(NamedTuple):
    """The CRC-32 of bytes ``begin`` to ``end`` of payload (or copy) number ``owner``; in one block of it."""

    owner: int
    begin: int
    end: int
    crc: int


class Wanted(NamedTuple):
    """Elements ``first`` to ``last`` (C order) of a box of ``shape`` made of ``sources``, to ``target``.

    ``copy`` and ``position`` say which bytes of the output they are, if they go there as they are; with
    ``copy`` -1 they do not.
    """

    target: memoryview
    shape: tuple[int, ...]
    itemsize: int
    sources: Sequence[SourceBox]
    first: int
    last: int
    copy: int
    position: int


class _Read(NamedTuple):
    """One range of a file. ``transfer`` None: it is ``target`` itself, else elements are copied to it."""

    file: int
    offset: int
    size: int
    chunk: int
    position: int
    target: memoryview
    transfer: Transfer | None
    itemsize: int
    copy: int
    copy_position: int
    place: int
    """Where in the range the first element is."""


class Gatherer:
    """Reads from the files of one source. ``files`` maps numbers to (name, size in bytes)."""

    def __init__(self, store: Store, *, verify: bool) -> None:
        self._store = store
        self._verify = verify
        self._profile = store.read_profile
        self._handles: dict[int, ReadHandle] = {}
        self._files: dict[int, tuple[str, int]] = {}
        self._scratch = memoryview(bytearray(0))
        self._pool: WorkerThreads | None = None
        self.bytes_read = 0
        self.sources: list[Fragment] = []
        self.targets: list[Fragment] = []

    def begin(self, files: dict[int, tuple[str, int]]) -> None:
        """Forget the last task's findings; ``files`` are those of the next."""
        self._files.update(files)
        self.bytes_read = 0
        self.sources, self.targets = [], []

    def close(self) -> None:
        """Close all files."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill all targets."""
        reads = sorted((read for want in wanted for read in self._reads(want)), key=_place)
        groups = list(self._groups(reads))
        self.bytes_read += sum(map(_span, groups))
        if not self._profile.scatter or len(groups) < 2:
            for group in groups:
                self._carry_out(group, self._room(_span(group)) if _needs_scratch(group) else None)
            return
        if self._pool is None:
            self._pool = WorkerThreads(min(8, self._profile.threads or 8), "dcp-convert")
        futures = []
        for group in groups:
            scratch = memoryview(bytearray(_span(group))) if _needs_scratch(group) else None
            futures.append(self._pool.submit(self._carry_out, group, scratch))
        try:
            wait(futures)  # all of them: they write to memory that is used again
        except KeyboardInterrupt:
            self._pool.call_off()
            raise
        for future in futures:
            future.result()

    # -- what to read ----------------------------------------------------------------------------------------

    def _reads(self, want: Wanted) -> Iterator[_Read]:
        strides = c_strides(want.shape, want.itemsize)
        origin = want.first * want.itemsize
        for box in range_boxes(want.shape, want.first, want.last):
            for source in want.sources:
                part = box.intersection(source.box)
                if part is not None:
                    transfer = transfer_of(part, source, strides, origin, want.itemsize)
                    yield from self._transfers(want, source, transfer, part.volume * want.itemsize)

    def _transfers(self, want: Wanted, source: SourceBox, transfer: Transfer, size: int) -> Iterator[_Read]:
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
        # Of a large transposed tensor each stretch has a little of everything. Reading all between, again for
        # every stretch, would be quadratic; such payloads are compared apart.
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

    def _groups(self, reads: Sequence[_Read]) -> Iterator[list[_Read]]:
        """Neighbours that are read together."""
        profile = self._profile
        limit = min(profile.request_bytes, SCRATCH_BYTES)
        group: list[_Read] = []
        begin = end = 0
        for read in reads:
            if group and (
                read.file != group[0].file
                or not 0 <= read.offset - end <= profile.gap_bytes
                or read.size > profile.join_below_bytes
                or read.offset + read.size - begin > limit
            ):
                yield group
                group = []
            if not group:
                begin = read.offset
            group.append(read)
            end = read.offset + read.size
            if read.size > profile.join_below_bytes:
                yield group
                group = []
        if group:
            yield group

    # -- reading ---------------------------------------------------------------------------------------------

    def _carry_out(self, group: Sequence[_Read], scratch: memoryview | None) -> None:
        handle = self._handle(group[0].file)
        if scratch is None:
            read = group[0]
            step = _STEP_BYTES if not self._profile.scatter else read.size
            for at in range(0, read.size, step):
                part = read.target[at : at + step]
                handle.preadv([part], read.offset + at)
                self._note(read, part, at)
            return
        begin, size = group[0].offset, _span(group)
        handle.preadv([scratch[:size]], begin)
        for read in group:
            data = scratch[read.offset - begin : read.offset - begin + read.size]
            self._note(read, data, 0)
            if read.transfer is None:
                read.target[:] = data
            else:
                _copy_elements(read, data)

    def _note(self, read: _Read, data: memoryview, at: int) -> None:
        """Take the checksums of bytes at ``at`` of a range; one pass serves both sides where it can."""
        position, size, done = read.position + at, len(data), 0
        copy_position = read.copy_position + at
        verify = self._verify and read.chunk != NO_CHUNK
        if not verify and read.copy < 0:
            return
        while done < size:
            step = min(size - done, BLOCK_BYTES - (position + done) % BLOCK_BYTES)
            if read.copy >= 0:
                step = min(step, BLOCK_BYTES - (copy_position + done) % BLOCK_BYTES)
            crc = crc32(data[done : done + step])
            if verify:
                self.sources.append(Fragment(read.chunk, position + done, position + done + step, crc))
            if read.copy >= 0:
                begin = copy_position + done
                self.targets.append(Fragment(read.copy, begin, begin + step, crc))
            done += step

    def _handle(self, file: int) -> ReadHandle:
        handle = self._handles.get(file)
        if handle is not None:
            return handle
        name, size = self._files[file]
        try:
            handle = self._store.open_read(name, expected_bytes=size if size >= 0 else None)
        except CheckpointNotFoundError as error:
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {name} is missing, though the checkpoint refers to it; "
                "restore the "
                "file or convert another checkpoint",
                path=self._store.path_of(name),
            ) from error
        if size not in (-1, handle.size_bytes):
            found = handle.size_bytes
            handle.close()
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {name} has {found} bytes, {size} were committed; it was "
                "truncated, "
                "replaced or extended",
                path=self._store.path_of(name),
            )
        if len(self._handles) >= 64:
            # Dropped, not closed: another thread may be reading it; the last to let go closes.
            del self._handles[next(iter(self._handles))]
        self._handles[file] = handle
        return handle

    def _room(self, size: int) -> memoryview:
        if size > len(self._scratch):
            self._scratch = memoryview(bytearray(max(size, min(SCRATCH_BYTES, 1 << 20))))
        return self._scratch


def _place(read: _Read) -> tuple[int, int]:
    return read.file, read.offset


def _span(group: Sequence[_Read]) -> int:
    return group[-1].offset + group[-1].size - group[0].offset


def _needs_scratch(group: Sequence[_Read]) -> bool:
    return len(group) > 1 or group[0].transfer is not None


def _copy_elements(read: _Read, data: memoryview) -> None:
    transfer = read.transfer
    if transfer is None:
        return
    kind = np.dtype(_UINTS[read.itemsize])
    source: npt.NDArray[Any] = np.ndarray(transfer.lengths, kind, data, read.place, transfer.source_strides)
    target: npt.NDArray[Any] = np.ndarray(
        transfer.lengths, kind, read.target, transfer.target, transfer.target_strides
    )
    np.copyto(target, source)
