"""A checkpoint as its readers see it: open files, where payloads are, and whether their bytes are right.

What is read together and by which thread is said by `dcp.storage.engine.read`.

Foreign records (torch.save zips, safetensors blobs) name neither payload offset nor block checksums in the
index. They are opened once each; their payloads may be dense but permuted (channels_last, a saved
transpose), which becomes a permutation of the wanted box. Payloads of torch.save files may have any strides,
which their index names. The one CRC-32 that either has is compared when all blocks were read.
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
    """The CRC-32 of bytes ``begin`` to ``end`` of payload (or copy) number ``owner``; in one block of it."""

    owner: int
    begin: int
    end: int
    crc: int


def within_blocks(size_bytes: int, position: int, other: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of parts of ``size_bytes`` that lie in one block each: of the payload of which they
    are the bytes from ``position`` on, and of another one of which they are those from ``other`` on."""
    begin, shift = 0, 0 if other is None else other - position
    while begin < size_bytes:
        at = position + begin
        left = BLOCK_BYTES - max(at % BLOCK_BYTES, (at + shift) % BLOCK_BYTES)
        end = min(size_bytes, begin + left)
        yield begin, end
        begin = end


@dataclass(slots=True)
class _Block:
    """End and CRC-32 of each fragment, by its begin; positions count from the block's."""

    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    covered_bytes: int = 0
    is_complete: bool = False


class Fragments:
    """The blocks that are not read in one piece. Thread-safe.

    A block that comes in more than ``limit`` pieces is not worth combining.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._lock = threading.Lock()

    def add(self, fragment: Fragment, owner_bytes: int) -> int | None:
        """Return the CRC-32 of the fragment's block, once the first time that it is known; ``owner_bytes`` is
        the size of the payload. For a fragment that is a whole block it is returned each time."""
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
        """Return (owner, block) of those that have bytes which were not read."""
        with self._lock:
            return [key for key, block in self._blocks.items() if not block.is_complete]

    def end(self) -> int:
        """Forget all; return how many blocks have bytes that were not read."""
        count = len(self.incomplete())
        self._blocks.clear()
        return count


def _combined(parts: dict[int, tuple[int, int]], block_bytes: int) -> int | None:
    """Return the CRC-32 of the whole; None if the parts overlap instead of following one another."""
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
"""Records whose ends are worth holding at a time: 32 MiB."""

_EDGE_BYTES = 4096
"""`torch.save` has its pickle and the payload's header within the first, its directory within the last."""


class Payloads:
    """Payload positions of the chunks that a read needs.

    ``fetch`` carries out pieces together, where requests are too dear to open records one by one.
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
        """Absolute file offset of a resolved chunk's payload."""
        return self._offset_view[chunk]

    def is_permuted(self, chunk: int) -> bool:
        """Return whether the payload is stored in another way than C order."""
        return chunk in self._orders or chunk in self._index.payload_strides

    @property
    def permuted_chunks(self) -> Int64:
        """The rows of the resolved chunks that `is_permuted` holds for."""
        return np.array([*self._orders, *self._index.payload_strides], np.int64)

    def order(self, chunk: int) -> tuple[int, ...] | None:
        """Return dimensions from slowest to fastest where a foreign record has them dense, but not in C
        order."""
        return self._orders.get(chunk)

    def layout(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (dimensions from slowest to fastest, bytes from one element to the next along each of them).

        The last ones may have no bytes between their elements: expanded dimensions.
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
        """Open the records of those ``chunks`` whose payload offset is not known yet."""
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
                f"{name}: the record of {fqn!r} ends at byte {begin + length}, the file at "
                f"{handle.size_bytes}; it was truncated",
                path=name,
                fqn=fqn,
            )
        try:
            stored = locate_payload(
                read or (lambda at, count: handle.pread(count, at)), begin, length, fqn=fqn
            )
        except (UnsupportedFormatError, UnsafeObjectError):
            raise  # what it needs is refused; its bytes are not found to be damaged
        except CheckpointFormatError as error:
            raise CorruptCheckpointError(
                f"{name}: the record of {fqn!r} at byte {begin} cannot be read: {error}", path=name, fqn=fqn
            ) from error
        sizes = index.box(chunk)[1]
        if stored.sizes != sizes or stored.dtype_code != int(index.dtype_codes[tensor]):
            raise CorruptCheckpointError(
                f"{name}: the record of {fqn!r} holds shape {stored.sizes}, dtype code "
                f"{stored.dtype_code}; the checkpoint's metadata says {sizes}, {index.dtype(tensor).name}",
                path=name,
                fqn=fqn,
            )
        order = dense_order(sizes, stored.strides) if len(stored.strides) == len(sizes) else None
        if order is None:
            raise UnsupportedFormatError(
                f"{name}: {fqn!r} is stored with strides {stored.strides} for shape {sizes}, which are not "
                "dense",
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
        """Keep a block's CRC towards the whole payload's; False where the record has none to compare with."""
        if chunk not in self._whole_crcs:
            whole = self._index.payload_crc(chunk)
            if whole is None:
                return False
            self._whole_crcs[chunk] = whole
        with self._lock:
            self._block_crcs.setdefault(chunk, {})[block] = crc
        return True

    def verify_whole(self) -> int:
        """Compare the payloads of which all blocks were read with the one CRC-32 their records have.

        Returns the number of blocks that belong to others and could not be compared.
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
                    f"{name}: tensor {fqn!r} is damaged: CRC-32 {total:08x}, its record says "
                    f"{self._whole_crcs[chunk]:08x}. Resume from another checkpoint",
                    alternative="load the bytes as they are",
                    argument="verify='none'",
                    path=name,
                    fqn=fqn,
                )
        self._block_crcs.clear()
        return uncompared


class _Edges:
    """The ends of the records of ``chunks``, as far as their files reach; `pieces` is what is to be read."""

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
                continue  # whoever opens the record says what is wrong
            for at, count in _ends(begin, length):
                put = partial(self._keep, (file, at))
                self.pieces.append(RequestPiece(file, at, count, NO_CHUNK, 0, 0, put))
        self.pieces.sort(key=lambda piece: piece[:3])

    def reader(self, index: CheckpointIndex, chunk: int) -> Callable[[int, int], bytes]:
        """Reads (offset, length) of the chunk's file: from what is here, or else from the file."""
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
    """Offset and length of a record's both ends, or of all of it."""
    if length <= 2 * _EDGE_BYTES:
        return [(begin, length)]
    return [(begin, _EDGE_BYTES), (begin + length - _EDGE_BYTES, _EDGE_BYTES)]


class OpenFiles:
    """Files by number, as many open as the process can afford. ``facts`` has name and committed size of a
    number, the size `UNKNOWN` where none was noted. Thread-safe."""

    def __init__(self, store: Store, facts: Mapping[int, tuple[str, int]]) -> None:
        self._store = store
        self._facts = facts
        self._handles: dict[int, ReadHandle] = {}
        self._gates: dict[int, threading.Lock] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # a quarter of what the process may open: a checkpoint of many ranks has more files than that
        self._max_handles = max(8, (limit if limit != resource.RLIM_INFINITY else 1 << 20) // 4)
        self._lock = threading.Lock()

    def __contains__(self, file: int) -> bool:
        """Return whether it is open."""
        return file in self._handles

    def close(self) -> None:
        """Close all; no thread may be reading."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def handle(self, file: int) -> ReadHandle:
        """Return the open file number ``file``; its size must be the committed one.

        Files are opened beside each other, because that may take a request; one file by one thread.
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
                        # Dropped, not closed: another thread may be reading it; the last to let go closes.
                        del self._handles[next(iter(self._handles))]
                    self._handles[file] = handle
        return handle

    def check(self, file: int) -> None:
        """Raise CorruptCheckpointError unless the file number ``file`` is there with its committed size."""
        self._open(*self._facts[file], asks=True).close()

    def _open(self, name: str, expected: int, *, asks: bool = False) -> ReadHandle:
        """Open a file. ``asks``: also where the store would take its size as given, without a request."""
        expected_bytes = None if asks or expected == UNKNOWN else expected
        try:
            handle = self._store.open_read(name, expected_bytes=expected_bytes)
        except CheckpointNotFoundError:  # a cache of names on a network file system may be behind
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
        """Raise damage for a missing file: the checkpoint is there. That may show only when it is
        read."""
        try:
            yield
        except CheckpointNotFoundError as error:
            path = error.path or self._store.url
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {path.rpartition('/')[2]} is missing, though the checkpoint "
                "refers to it; restore the file or take another checkpoint",
                path=path,
            ) from error
