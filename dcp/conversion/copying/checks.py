"""Checksums made of fragments: those of the source are compared, those of the target are recorded.

Fragments come in any order, from any task, and more than once. A block is known once they cover it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from dcp.conversion.copying.sums import NOT_FINITE, BadElements
from dcp.conversion.copying.tasks import TaskResult
from dcp.conversion.layouts.layout import Copies
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.fragments import Fragment, Fragments
from dcp.storage.engine.reading.requests import ReadStats
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.near_names import listed

__all__ = ["FaultySumsError", "ResultChecks", "SourceChecks", "TargetChecksums", "refuse_faults"]

_MAX_LISTED: Final = 10


class FaultySumsError(PlanError):
    """Sums that cannot be: nothing that was written is of any use."""


class SourceChecks:
    """Compares what was read with what the source says of it. Thread-safe.

    CorruptCheckpointError, with file, tensor and offset, as soon as a block is complete and differs.
    ``blocks_verified`` and ``blocks_unverified`` (nothing to compare with) are counted.
    """

    def __init__(self, engine: ReadEngine) -> None:
        self._engine = engine
        self._blocks = Fragments()
        self._seen: set[int] = set()  # numbers of chunk and block, of which there may be millions
        self._lock = threading.Lock()
        self.stats = ReadStats()

    def add(self, fragments: Iterable[Fragment]) -> None:
        """Take what a task found."""
        lengths = self._engine.payload_lengths
        with self._lock:
            for fragment in fragments:
                chunk, block = fragment.owner, fragment.begin // BLOCK_BYTES
                if (number := chunk << 32 | block) in self._seen:
                    continue
                crc = self._blocks.add(fragment, int(lengths[chunk]))
                if crc is not None:
                    self._seen.add(number)
                    self._engine.check_block(self.stats, chunk, block, crc)

    def finish(self, chunks: Iterable[int]) -> None:
        """Read what no task had whole of the payloads of ``chunks``, and compare what has one checksum for
        all of it."""
        for chunk in chunks:
            for block in range(-(-int(self._engine.payload_lengths[chunk]) // BLOCK_BYTES)):
                if chunk << 32 | block not in self._seen:
                    self._read_block(chunk, block)
        uncompared = self._engine.payloads.verify_whole()
        self.stats.blocks_verified -= uncompared
        self.stats.blocks_unverified += uncompared

    def finish_begun(self) -> None:
        """As `finish`, of those blocks alone of which a part was read: for a range of the target."""
        for chunk, block in self._blocks.incomplete():
            self._read_block(chunk, block)
        self._engine.payloads.verify_whole()

    def _read_block(self, chunk: int, block: int) -> None:
        engine, begin = self._engine, block * BLOCK_BYTES
        handle, origin = engine.locate(chunk)
        size = min(BLOCK_BYTES, int(engine.payload_lengths[chunk]) - begin)
        engine.check_block(self.stats, chunk, block, crc32(handle.pread(size, origin + begin)))


class ResultChecks:
    """The checks of all results of a conversion: ``source`` is compared, ``target`` is recorded for
    publishing, and so are ``faults``."""

    def __init__(self, engine: ReadEngine, copies: Copies) -> None:
        self.source, self.target = SourceChecks(engine), TargetChecksums(copies)
        self.bytes_read = 0
        self.faults: list[BadElements] = []

    def add(self, result: TaskResult) -> None:
        """Take what was found. Raises CorruptCheckpointError as soon as a block differs."""
        self.source.add(result.sources)
        self.target.add(result.targets)
        self.bytes_read += result.bytes_read
        self.faults += result.faults


class TargetChecksums:
    """CRC-32s of what was written: by block, and whole, for each copy."""

    def __init__(self, copies: Copies) -> None:
        self._sizes = copies.size_bytes
        counts = -(-copies.size_bytes // BLOCK_BYTES)
        self._start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._crcs = np.zeros(int(self._start[-1]), np.uint32)
        self._known = np.zeros(len(self._crcs), bool)
        self._blocks = Fragments()

    def add(self, fragments: Iterable[Fragment]) -> None:
        """Take what a task wrote."""
        for fragment in fragments:
            crc = self._blocks.add(fragment, int(self._sizes[fragment.owner]))
            if crc is not None:
                place = int(self._start[fragment.owner]) + fragment.begin // BLOCK_BYTES
                self._crcs[place] = crc
                self._known[place] = True

    def check_complete(self) -> None:
        """Raise CheckpointError if a block of the output has no checksum: it was not written."""
        if not self._known.all():
            raise CheckpointError(
                f"{int((~self._known).sum())} blocks of the output were not written; this is an error of "
                "dcphub"
            )

    def blocks(self, copy: int) -> npt.NDArray[np.uint32]:
        """CRC-32 of each block of a copy."""
        return self._crcs[self._start[copy] : self._start[copy + 1]]

    def whole(self, copy: int) -> int:
        """CRC-32 of all of a copy; its blocks must be known."""
        total, size = 0, int(self._sizes[copy])
        for number, crc in enumerate(self.blocks(copy).tolist()):
            total = crc32_combine(total, crc, min(BLOCK_BYTES, size - number * BLOCK_BYTES))
        return total


def refuse_faults(faults: Iterable[BadElements], index: CheckpointIndex) -> None:
    """FaultySumsError that names all tensors of ``faults``, by the source's ``index``; fine without any."""
    counts: Counter[tuple[str, int]] = Counter()
    for fault in faults:
        row = int(index.chunk_tensors[fault.chunk])
        counts[index.fqns[row].partition("/")[2], fault.kind] += fault.elements
    if not counts:
        return
    told = [
        f"{name!r} ({count:,} {'NaN or infinite' if kind == NOT_FINITE else 'too large for its dtype'})"
        for (name, kind), count in sorted(counts.items())
    ]
    names = sorted({name for name, _ in counts})
    raise FaultySumsError(
        f"{len(names)} of the sums have elements that are no numbers, or that no element of the target can "
        f"be: {listed(told, most=_MAX_LISTED, show=str)}. Nothing was published. Leave these tensors out, or "
        "give them a wider dtype",
        fqns=names,
        problems=told,
    )
