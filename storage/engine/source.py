"""Checkpoint source: open files, payload positions and checksum verification.

`dcp.storage.engine.read` decides the requests and threads.

Foreign records (torch.save zips, safetensors blobs) have no payload offsets and block checksums in the
index. Each record is opened once. Payloads may be dense but permuted (channels_last, transposed), which
permutes the wanted box; payloads of torch.save files may have arbitrary strides from their index. Their
single CRC-32 is compared after all blocks were read.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from dcp.storage.engine.memory import item_view
from dcp.storage.engine.requests import NO_CHUNK, RequestPiece
from dcp.storage.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32_combine
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.archive import locate_payload
from dcp.storage.geometry.strides import Int64, c_strides, dense_order
from dcp.storage.stores.base import ReadHandle, Store


class Fragment(NamedTuple):
    """CRC-32 of bytes ``begin`` to ``end`` of payload (or copy) number ``owner``, within a block."""

    owner: int
    begin: int
    end: int
    crc: int


def within_blocks(size_bytes: int, position: int, other: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of parts of ``size_bytes`` within single blocks of two payloads, at ``position``
    of one and ``other`` of the other.
    """
    begin, shift = 0, 0 if other is None else other - position
    while begin < size_bytes:
        at = position + begin
        left = BLOCK_BYTES - max(at % BLOCK_BYTES, (at + shift) % BLOCK_BYTES)
        end = min(size_bytes, begin + left)
        yield begin, end
        begin = end


@dataclass(slots=True)
class _Block:
    """End and CRC-32 of each fragment by start, relative to the block."""

    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    covered_bytes: int = 0
    is_complete: bool = False


class Fragments:
    """Blocks that are read in several pieces. Thread-safe.

    Blocks in more than ``limit`` pieces are not combined.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._lock = threading.Lock()

    def add(self, fragment: Fragment, owner_bytes: int) -> int | None:
        """Add a fragment; return the CRC-32 of its block when first complete, else None.

        ``owner_bytes`` is the payload size. A fragment of a whole block returns its CRC each time.
        """
        owner, first, last, crc = fragment
        block, begin = divmod(first, BLOCK_BYTES)
        end = begin + last - first
        block_bytes = min(BLOCK_BYTES, owner_bytes - block * BLOCK_BYTES)
        if end - begin == block_bytes:
            known = self._blocks.get((owner, block))
            if known is not None:
                known.is_complete = True
            return crc
        with self._lock:
            known = self._blocks.setdefault((owner, block), _Block())
            if known.is_complete or begin in known.parts or len(known.parts) == self._limit:
                return None
            known.parts[begin] = end, crc
            known.covered_bytes += end - begin
            if known.covered_bytes < block_bytes:
                return None
            total = _combined(known.parts, block_bytes)
            known.is_complete = total is not None
            if known.is_complete:
                known.parts = {}
            return total

    def incomplete(self) -> list[tuple[int, int]]:
        """Return (owner, block) of incomplete blocks."""
        with self._lock:
            return [key for key, block in self._blocks.items() if not block.is_complete]

    def end(self) -> int:
        """Reset, and return the number of incomplete blocks."""
        count = len(self.incomplete())
        self._blocks.clear()
        return count


def _combined(parts: dict[int, tuple[int, int]], block_bytes: int) -> int | None:
    """Return the CRC-32 of the whole; None if the parts overlap."""
    position = total = 0
    while position < block_bytes:
        part = parts.get(position)
        if part is None:
            return None
        end, crc = part
        total = crc32_combine(total, crc, end - position) if position else crc
        position = end
    return total


_MAX_RECORDS = 4096
"""Maximum number of record ends in memory: 32 MiB."""

_EDGE_BYTES = 4096
"""Size of both ends of a `torch.save` record: pickle and payload header at the start, directory at the end.
"""


class Payloads:
    """Payload positions of the chunks of a read.

    ``fetch`` reads pieces together, for stores with expensive requests.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        handle: Callable[[int], ReadHandle],
        fetch: Callable[[Sequence[RequestPiece]], None] | None = None,
    ) -> None:
        self._index = index
        self._handle = handle
        self._fetch = fetch
        self._foreign = bool((index.payload_offsets == UNKNOWN).any())
        self.offsets = index.payload_offsets.copy() if self._foreign else index.payload_offsets
        self._offset_view = item_view(self.offsets)
        self._orders: dict[int, tuple[int, ...]] = {}
        self._whole_crcs: dict[int, int] = {}
        self._block_crcs: dict[int, dict[int, int]] = {}
        self._lock = threading.Lock()

    def offset(self, chunk: int) -> int:
        """Return the file offset of a resolved chunk's payload."""
        return self._offset_view[chunk]

    def is_permuted(self, chunk: int) -> bool:
        """Return True if the payload is not in C order."""
        return chunk in self._orders or chunk in self._index.payload_strides

    @property
    def permuted_chunks(self) -> Int64:
        """Rows of the resolved chunks with `is_permuted`."""
        return np.array([*self._orders, *self._index.payload_strides], np.int64)

    def order(self, chunk: int) -> tuple[int, ...] | None:
        """Return the dimensions from slowest to fastest of a dense permuted record, else None."""
        return self._orders.get(chunk)

    def layout(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (dimensions from slowest to fastest, strides in bytes by dimension).

        Trailing dimensions may have stride 0 (expanded).
        """
        sizes = self._index.box(chunk)[1]
        itemsize = int(self._index.itemsizes[self._index.chunk_tensors[chunk]])
        strides = self._index.payload_strides.get(chunk)
        if strides is not None:
            order = tuple(sorted(range(len(sizes)), key=lambda d: -strides[d]))
            return order, tuple(strides[d] * itemsize for d in order)
        order = self._orders.get(chunk) or tuple(range(len(sizes)))
        return order, c_strides([sizes[d] for d in order], itemsize)

    def resolve(self, chunks: Int64) -> None:
        """Open the records of ``chunks`` with unknown payload offsets."""
        if not self._foreign:
            return
        unknown = np.unique(chunks[self.offsets[chunks] == UNKNOWN]).tolist()
        if self._fetch is None:
            for chunk in unknown:
                self._open_record(chunk, None)
            return
        for first in range(0, len(unknown), _MAX_RECORDS):
            batch = unknown[first : first + _MAX_RECORDS]
            edges = _Edges(self._index, batch, self._handle)
            self._fetch(edges.pieces)
            for chunk in batch:
                self._open_record(chunk, edges.reader(self._index, chunk))

    def _open_record(self, chunk: int, read: Callable[[int, int], bytes] | None) -> None:
        index = self._index
        tensor = int(index.chunk_tensors[chunk])
        fqn, name = index.own_name(tensor), index.files[int(index.chunk_files[chunk])]
        handle = self._handle(int(index.chunk_files[chunk]))
        begin, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
        if begin + length > handle.size_bytes:
            raise CorruptCheckpointError(
                f"{name}: the record of {fqn!r} ends at byte {begin + length}, but the file has "
                f"{handle.size_bytes}: it was truncated; load another checkpoint",
                path=name,
                fqn=fqn,
            )
        try:
            stored = locate_payload(
                read or (lambda at, count: handle.pread(count, at)), begin, length, fqn=fqn
            )
        except (UnsupportedFormatError, UnsafeObjectError):
            raise  # the contents are refused; the bytes are not damaged
        except CheckpointFormatError as error:
            raise CorruptCheckpointError(
                f"{name}: the record of {fqn!r} at byte {begin} cannot be read: {error}", path=name, fqn=fqn
            ) from error
        sizes = index.box(chunk)[1]
        if stored.sizes != sizes or stored.dtype_code != int(index.dtype_codes[tensor]):
            raise CorruptCheckpointError(
                f"{name}: the record of {fqn!r} has shape {stored.sizes} and dtype code {stored.dtype_code}, "
                f"but the metadata has {sizes} and {index.dtype(tensor).name}: the files are from different "
                "saves",
                path=name,
                fqn=fqn,
            )
        order = dense_order(sizes, stored.strides) if len(stored.strides) == len(sizes) else None
        if order is None:
            raise UnsupportedFormatError(
                f"{name}: {fqn!r} is stored with strides {stored.strides} for shape {sizes}, which are not "
                "dense: load the checkpoint with stock torch, and save a contiguous() tensor",
                fqn=fqn,
            )
        itemsize = index.dtype(tensor).itemsize
        whole = stored.storage_offset == 0 and stored.storage_bytes == math.prod(sizes) * itemsize
        if order != tuple(range(len(sizes))):
            self._orders[chunk] = order
        if stored.crc32 is not None and whole:
            self._whole_crcs[chunk] = stored.crc32
        self.offsets[chunk] = stored.payload_offset + stored.storage_offset * itemsize

    def note_block(self, chunk: int, block: int, crc: int) -> bool:
        """Keep the CRC of a block for the payload's CRC; return False if the record has no CRC."""
        if chunk not in self._whole_crcs:
            whole = self._index.payload_crc(chunk)
            if whole is None:
                return False
            self._whole_crcs[chunk] = whole
        with self._lock:
            self._block_crcs.setdefault(chunk, {})[block] = crc
        return True

    def verify_whole(self) -> int:
        """Compare the CRC-32 of payloads whose blocks were all read.

        Returns:
            The number of blocks of other payloads, which could not be compared.
        """
        uncompared = 0
        for chunk, blocks in self._block_crcs.items():
            size = int(self._index.payload_lengths[chunk])
            if len(blocks) != -(-size // BLOCK_BYTES):
                uncompared += len(blocks)
                continue
            total = blocks[0]
            for block in range(1, len(blocks)):
                total = crc32_combine(total, blocks[block], min(BLOCK_BYTES, size - block * BLOCK_BYTES))
            if total != self._whole_crcs[chunk]:
                fqn = self._index.own_name(int(self._index.chunk_tensors[chunk]))
                name = self._index.files[int(self._index.chunk_files[chunk])]
                raise CorruptCheckpointError(
                    f"{name}: tensor {fqn!r} is damaged: CRC-32 {total:08x}, expected "
                    f"{self._whole_crcs[chunk]:08x}. Resume from another checkpoint",
                    alternative="load the bytes as they are",
                    argument="verify='none'",
                    path=name,
                    fqn=fqn,
                )
        self._block_crcs.clear()
        return uncompared


class _Edges:
    """Ends of the records of ``chunks``; `pieces` are the ranges to read."""

    def __init__(
        self, index: CheckpointIndex, chunks: Iterable[int], handle: Callable[[int], ReadHandle]
    ) -> None:
        self._handle = handle
        self._parts: dict[tuple[int, int], bytes] = {}
        self._others: dict[tuple[int, int, int], bytes] = {}
        self.pieces: list[RequestPiece] = []
        for chunk in chunks:
            file = int(index.chunk_files[chunk])
            begin, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
            if begin + length > handle(file).size_bytes:
                continue  # opening the record reports the error
            for at, count in _ends(begin, length):
                put = partial(self._keep, (file, at))
                self.pieces.append(RequestPiece(file, at, count, NO_CHUNK, 0, 0, put))
        self.pieces.sort(key=lambda piece: piece[:3])

    def reader(self, index: CheckpointIndex, chunk: int) -> Callable[[int, int], bytes]:
        """Return a reader (offset, length) of the chunk's file: from memory or the file."""
        file = int(index.chunk_files[chunk])
        ends = _ends(int(index.record_offsets[chunk]), int(index.record_lengths[chunk]))
        parts = [(at, data) for at, _ in ends if (data := self._parts.get((file, at))) is not None]

        def read(offset: int, length: int) -> bytes:
            for at, data in parts:
                if at <= offset and offset + length <= at + len(data):
                    return data[offset - at : offset - at + length]
            key = file, offset, length
            if key not in self._others:  # one header serves all records of a safetensors blob
                self._others[key] = self._handle(file).pread(length, offset)
            return self._others[key]

        return read

    def _keep(self, key: tuple[int, int], data: memoryview) -> None:
        self._parts[key] = bytes(data)


def _ends(begin: int, length: int) -> Sequence[tuple[int, int]]:
    """Return offset and length of both ends of a record, or of the whole record."""
    if length <= 2 * _EDGE_BYTES:
        return [(begin, length)]
    return [(begin, _EDGE_BYTES), (begin + length - _EDGE_BYTES, _EDGE_BYTES)]


class OpenFiles:
    """Open files by number, limited by the process's descriptors. ``facts`` returns name and committed
    size, or `UNKNOWN`. Thread-safe.
    """

    def __init__(self, store: Store, facts: Mapping[int, tuple[str, int]]) -> None:
        self._store = store
        self._facts = facts
        self._handles: dict[int, ReadHandle] = {}
        self._gates: dict[int, threading.Lock] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # a quarter of the descriptors; checkpoints of many ranks have more files
        self._max_handles = max(8, (limit if limit != resource.RLIM_INFINITY else 1 << 20) // 4)
        self._lock = threading.Lock()

    def __contains__(self, file: int) -> bool:
        """Return True if the file is open."""
        return file in self._handles

    def close(self) -> None:
        """Close all files; no thread may be reading."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def handle(self, file: int) -> ReadHandle:
        """Return the open file with number ``file`` after a check of its committed size.

        Different files open in parallel; each file is opened by a single thread.
        """
        handle = self._handles.get(file)
        if handle is not None:
            return handle
        with self._lock:
            gate = self._gates.setdefault(file, threading.Lock())
        with gate:
            handle = self._handles.get(file)
            if handle is None:
                handle = self._open(*self._facts[file])
                with self._lock:
                    if len(self._handles) >= self._max_handles:
                        # Dropped, not closed: another thread may be reading; the last reference closes.
                        del self._handles[next(iter(self._handles))]
                    self._handles[file] = handle
        return handle

    def check(self, file: int) -> None:
        """Raise CorruptCheckpointError unless the file exists with its committed size."""
        self._open(*self._facts[file], asks=True).close()

    def _open(self, name: str, expected: int, *, asks: bool = False) -> ReadHandle:
        """Open a file; with ``asks``, check the size by a request."""
        expected_bytes = None if asks or expected == UNKNOWN else expected
        try:
            handle = self._store.open_read(name, expected_bytes=expected_bytes)
        except CheckpointNotFoundError:  # the name cache of a network file system may be stale: try again
            with self.missing_is_damage():
                handle = self._store.open_read(name, expected_bytes=expected_bytes)
        if expected not in (UNKNOWN, handle.size_bytes):
            size = handle.size_bytes
            handle.close()
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {name} has {size} bytes, {expected} were committed; "
                "it was truncated, replaced or extended",
                path=self._store.path_of(name),
            )
        return handle

    @contextmanager
    def missing_is_damage(self) -> Iterator[None]:
        """Convert a missing file to CorruptCheckpointError, because the checkpoint exists."""
        try:
            yield
        except CheckpointNotFoundError as error:
            path = error.path or self._store.url
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {path.rpartition('/')[2]} of the checkpoint is missing; "
                "restore the file or use another checkpoint",
                path=path,
            ) from error
