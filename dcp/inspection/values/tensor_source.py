"""The chunks of a checkpoint's tensors: how each is stored, its checksum, and reads of several at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from dcp.planners.load.selection import Patterns, Selection
from dcp.storage.closable import Closable
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import BoxRequest, ByteRuns, ReadStats, Verify, put_at
from dcp.storage.errors import CorruptCheckpointError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.record_reader import locate_payload
from dcp.storage.formats.torch.zip_reader import Window
from dcp.storage.geometry.boxes import Box
from dcp.storage.stores.base import Store

__all__ = ["TensorSource"]

_OPENED_BYTES: Final = 1 << 20
"""Where requests are dear, to read a payload below this takes no longer than to open its record for the
checksum."""


class TensorSource(Closable):
    """One checkpoint and the engine that reads it. Use as a context manager; thread-safe.

    ``name`` is what the checkpoint is called in messages, if not by its store.
    """

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        *,
        verify: Verify = "blocks",
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        self.store = store
        self.index = index
        self.name = name or store.url
        threads = threads or store.read_profile.threads or 2
        self._engine = ReadEngine(store, index, verify=verify, threads=threads)
        self._running = threading.Lock()
        self._other_bytes = 0

    def close(self) -> None:
        """Close the files."""
        self._engine.close()

    def rows(self, only: Patterns | None, exclude: Patterns | None) -> list[int]:
        """The rows of the tensors that these patterns select. PlanError if they select none."""
        selection = Selection.of(only, exclude)
        rows = [row for row, fqn in enumerate(self.index.fqns) if selection is None or selection.selects(fqn)]
        if not rows and selection is not None:
            raise PlanError(
                f"{self.name}: only={only!r}, exclude={exclude!r} select none of its "
                f"{self.index.tensor_count} tensors; patterns are shell globs such as 'model.*' or '*.bias'"
            )
        return rows

    @property
    def stats(self) -> ReadStats:
        """What was read so far."""
        return self._engine.stats

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from storage so far; of records opened for their checksums, those asked for."""
        return self._engine.stats.bytes_read + self._other_bytes

    def count_bytes(self, size_bytes: int) -> None:
        """Note bytes of the checkpoint that were read by other means, for `bytes_read`."""
        self._other_bytes += size_bytes

    def window(self, file: int, offset: int, length: int) -> Window:
        """The bytes of a record, read and counted as they are asked for."""
        handle = self._engine.handle(file)

        def read(at: int, count: int) -> bytes:
            self._other_bytes += count
            return handle.pread(count, at)

        return Window(read, offset, length)

    def blob(self, file: int, offset: int, length: int) -> bytes:
        """The bytes of a value's record."""
        return self._engine.read_blob(file, offset, length)

    # -- checksums -------------------------------------------------------------------------------------------

    def is_c_ordered(self, chunk: int) -> bool:
        """Whether a chunk's elements are stored in C order; may have to open its record."""
        return self.layout_of(chunk) is None

    def layout_of(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """None for C order; else dimensions from slowest to fastest, and the bytes from one element to the
        next along each. May have to open the chunk's record."""
        payloads = self._engine.payloads
        self._engine.resolve([chunk])
        return payloads.layout(chunk) if payloads.is_permuted(chunk) else None

    def payload_crc(self, chunk: int) -> int | None:
        """CRC-32 of a chunk's payload as it is stored, None where nobody noted it. No payload is read, but in
        a foreign checkpoint the record is opened."""
        index = self.index
        if index.payload_offsets[chunk] != UNKNOWN:
            return index.payload_crc(chunk)
        if self._engine.joins and index.payload_lengths[chunk] < _OPENED_BYTES:
            return None
        handle = self._engine.handle(int(index.chunk_files[chunk]))

        def read(offset: int, length: int) -> bytes:
            self._other_bytes += length
            return handle.pread(length, offset)

        begin, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
        stored = locate_payload(read, begin, length, fqn=index.fqns[int(index.chunk_tensors[chunk])])
        fills = stored.storage_offset_elements == 0 and stored.payload_bytes == index.payload_lengths[chunk]
        return stored.crc32 if fills else None

    def box(self, chunk: int, box: Box, address: int, strides: Sequence[int]) -> BoxRequest:
        """A box of a chunk, to memory at ``address`` with these ``strides`` in bytes."""
        self._engine.resolve([chunk])
        elements, order = self._engine.elements(chunk, *box)
        itemsize = self._engine.itemsize(chunk)
        return BoxRequest(elements, put_at(address, itemsize, [strides[d] for d in order]))

    def run(self, runs: ByteRuns, boxes: Sequence[BoxRequest]) -> None:
        """Have the engine carry out a request; one at a time."""
        with self._running:
            self._engine.run(runs, boxes)

    def block_end(self, chunk: int, position: int) -> int:
        """The end of the block that has the payload byte before ``position``. It is the payload's end if
        so little is left that the engine would not compare its checksum."""
        payload_bytes = int(self.index.payload_lengths[chunk])
        end = -(-position // BLOCK_BYTES) * BLOCK_BYTES
        small_bytes = min(self.store.read_profile.join_below_bytes, BLOCK_BYTES)
        return payload_bytes if payload_bytes - end <= small_bytes else end

    def is_checked_whole(self, chunk: int) -> bool:
        """Whether a payload has no checksums of blocks, so that one for all of it is to be compared."""
        return self._engine.verify != "none" and not len(self.index.block_crcs(chunk))

    def check_whole(self, chunk: int, got: int) -> None:
        """Compare the checksum of a payload that was read in several requests, if anybody noted one."""
        expected = self.payload_crc(chunk)
        if expected not in (None, got):
            fqn = self.index.fqns[int(self.index.chunk_tensors[chunk])]
            name = self.index.files[int(self.index.chunk_files[chunk])]
            raise CorruptCheckpointError(
                f"{self.name}: tensor {fqn!r} is damaged: CRC-32 {got:08x} of its bytes in {name}, "
                f"which says {expected:08x}. Take another checkpoint.",
                path=f"{self.store.url}/{name}",
                fqn=fqn,
            )
