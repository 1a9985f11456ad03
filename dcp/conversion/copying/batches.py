"""Batches of tasks, carried out by any process, and the checksums of what they read and wrote.

Checksums are made of fragments, which come in any order, from any task, and more than once. A block is known
once they cover it: those of the source are compared then, those of the target are recorded.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np

from dcp.conversion.copying.sums import NOT_FINITE, BadElements
from dcp.conversion.copying.tasks import (
    TASK_BYTES,
    TASK_COPIES,
    WINDOW_BYTES,
    Output,
    TaskBatch,
    TaskResult,
    run_task,
)
from dcp.conversion.layouts.layout import Copies
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import ReadStats, Verify
from dcp.storage.engine.source import Fragment, Fragments
from dcp.storage.errors import CheckpointConflictError, CheckpointError, PlanError, StorageError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, complete_index
from dcp.storage.formats.plain import encode_plain
from dcp.storage.geometry.strides import Int64, starts
from dcp.storage.near_names import listed
from dcp.storage.stores.base import Store
from dcp.version import __version__

__all__ = [
    "BatchSettings",
    "FaultySumsError",
    "ResultChecks",
    "SourceChangedError",
    "SourceChecks",
    "refuse_faults",
    "run_batch",
    "source_mark",
]

_MAX_LISTED: Final = 10
_UNKNOWN: Final = -1


class SourceChangedError(CheckpointConflictError):
    """The source has changed since the conversion was planned: it has to be converted anew."""


def source_mark(store: Store, index: CheckpointIndex, to: str) -> str:
    """Return a text that changes with the source's files, and with how this version converts to ``to``."""
    facts, names = [], frozenset(index.files)
    for info in sorted(store.list(), key=attrgetter("name")):
        if info.name in names:
            facts.append((info.name, info.size_bytes, info.modified_seconds))
    sizes = [TASK_BYTES, TASK_COPIES, WINDOW_BYTES]
    head = [__version__, store.url, to, *sizes, index.provenance.get("save_id"), facts]
    return hashlib.sha256(encode_plain(head, limit_bytes=1 << 30) or b"").hexdigest()


@dataclass(frozen=True)
class BatchSettings:
    """All that the batches of a conversion share, for processes that know no more of it.

    ``store`` is the one of the source that ``open_source`` opens, whose mark, as a source of the format
    ``to``, is ``source_mark``.
    """

    open_source: Callable[[], Source]
    store: Store
    to: str
    source_mark: str
    output: Output
    verify: Verify

    def open_engine(self) -> ReadEngine:
        """Open the source, to compare with its checksums. Raises SourceChangedError."""
        found = self.open_source()
        engine = ReadEngine(found.store, complete_index(found.store, found.index), verify=self.verify)
        self.refuse_changed(engine, found.name)
        return engine

    def refuse_changed(self, engine: ReadEngine, name: str) -> None:
        """Raise SourceChangedError unless ``engine`` reads the source that the conversion was planned for."""
        if source_mark(engine.store, engine.index, self.to) != self.source_mark:
            raise SourceChangedError(
                f"{name} has changed while it was converted; convert it again", path=name
            )


def run_batch(
    settings: BatchSettings,
    batch: TaskBatch,
    engine: ReadEngine | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> TaskResult:
    """Carry ``batch`` out; what it writes is durable when this returns. ``engine`` reads the source, where
    the caller has it open; ``on_bytes`` gets the size of each window that is written."""
    output, verify, result = settings.output, settings.verify != "none", TaskResult(batch.number)
    with ExitStack() as stack:
        check = None
        # A file that is written in place has no name yet: what publishes it, with all results, compares.
        if not output.in_place and (verify or batch.is_all):
            check = _comparison(batch, engine or stack.enter_context(settings.open_engine()))
        for task in batch.tasks:
            place = task.name, task.begin, task.file_bytes
            try:
                sink = output.open(*place)
                found = run_task(task, settings.store, sink, verify=verify, on_bytes=on_bytes, check=check)
            except StorageError:
                # Another attempt at this task has been quicker, and its file is what ours would have been.
                if not output.is_written(task.name):
                    raise
                found = run_task(task, settings.store, output.open(*place), verify=verify, check=check)
            result.add(found)
    if not output.in_place:
        output.store.sync()
    return result


def _comparison(batch: TaskBatch, engine: ReadEngine) -> Callable[[TaskResult], None]:
    """Return a function that compares all that is complete within the batch, before its files appear."""
    verifies, chunks, checks = engine.verify != "none", batch.chunks, SourceChecks(engine)
    if verifies:
        engine.resolve(chunks)

    def check(result: TaskResult) -> None:
        if verifies:
            checks.add(result.sources)
        if batch.is_all:  # no other batch reads the rest of a block, or makes the rest of the target
            if verifies:
                checks.finish(chunks.tolist())
            refuse_faults(result.faults, engine.index)

    return check


# -- checksums -----------------------------------------------------------------------------------------------


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
        """Finish as `finish` does those blocks alone of which a part was read: for a range of the target."""
        for chunk, block in self._blocks.incomplete():
            self._read_block(chunk, block)
        self._engine.payloads.verify_whole()

    def _read_block(self, chunk: int, block: int) -> None:
        engine, begin = self._engine, block * BLOCK_BYTES
        handle, origin = engine.locate(chunk)
        size = min(BLOCK_BYTES, int(engine.payload_lengths[chunk]) - begin)
        engine.check_block(self.stats, chunk, block, crc32(handle.pread(size, origin + begin)))


class ResultChecks(SourceChecks):
    """Checks of all results of a conversion: checksums of sources are compared, those of the target recorded
    for publishing, by block and whole, for each copy; and so are ``faults``."""

    def __init__(self, engine: ReadEngine, copies: Copies) -> None:
        super().__init__(engine)
        self.bytes_read = 0
        self.faults: list[BadElements] = []
        self._sizes = copies.size_bytes
        self._start = starts(-(-copies.size_bytes // BLOCK_BYTES))
        self._crcs = np.full(int(self._start[-1]), _UNKNOWN, np.int64)
        self._written = Fragments()

    def take(self, result: TaskResult) -> None:
        """Take what was found. Raises CorruptCheckpointError as soon as a block differs."""
        self.add(result.sources)
        for fragment in result.targets:
            crc = self._written.add(fragment, int(self._sizes[fragment.owner]))
            if crc is not None:
                self._crcs[self._start[fragment.owner] + fragment.begin // BLOCK_BYTES] = crc
        self.bytes_read += result.bytes_read
        self.faults += result.faults

    def check_complete(self) -> None:
        """Raise CheckpointError if a block of the output has no checksum: it was not written."""
        if missing := int((self._crcs == _UNKNOWN).sum()):
            raise CheckpointError(
                f"{missing} blocks of the output were not written; this is an error of dcphub"
            )

    def blocks(self, copy: int) -> Int64:
        """Return CRC-32 of each block of a copy."""
        return self._crcs[self._start[copy] : self._start[copy + 1]]

    def whole(self, copy: int) -> int:
        """Return CRC-32 of all of a copy; its blocks must be known."""
        total, size = 0, int(self._sizes[copy])
        for number, crc in enumerate(self.blocks(copy).tolist()):
            total = crc32_combine(total, crc, min(BLOCK_BYTES, size - number * BLOCK_BYTES))
        return total


def refuse_faults(faults: Iterable[BadElements], index: CheckpointIndex) -> None:
    """Raise FaultySumsError that names all tensors of ``faults``, by the source's ``index``; fine without
    any."""
    counts: Counter[tuple[str, int]] = Counter()
    for fault in faults:
        row = int(index.chunk_tensors[fault.chunk])
        counts[index.fqns[row].partition("/")[2], fault.kind] += fault.elements
    if not counts:
        return
    shown = [
        f"{name!r} ({count:,} {'NaN or infinite' if kind == NOT_FINITE else 'too large for its dtype'})"
        for (name, kind), count in sorted(counts.items())
    ]
    names = sorted({name for name, _ in counts})
    raise FaultySumsError(
        f"{len(names)} of the sums have elements that are no numbers, or that no element of the target can "
        f"be: {listed(shown, most=_MAX_LISTED, show=str)}. Nothing was published. Leave these "
        "tensors out, or give them a wider dtype",
        fqns=names,
        problems=shown,
    )
