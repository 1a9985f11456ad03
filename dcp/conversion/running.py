"""Batches of tasks, carried out by any process: windows of files are made of the source, and written.

Memory is bounded by a few buffers. The checksums of what was read and written, which a batch returns, are for
the ledger.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from dcp.conversion.casting import cast
from dcp.conversion.gather import RangeReader, Wanted
from dcp.conversion.layout import TaskCopy
from dcp.conversion.sums import BadElements, Sums
from dcp.conversion.tasks import (
    TASK_BYTES,
    TASK_COPIES,
    SourceChecks,
    Task,
    TaskBatch,
    TaskResult,
    literals_between,
    refuse_faults,
)
from dcp.storage.closable import Closable
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import Verify
from dcp.storage.engine.source import Fragment, within_blocks
from dcp.storage.errors import CheckpointConflictError, CheckpointError, StorageError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32, crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, complete_index
from dcp.storage.formats.plain import encode_plain
from dcp.storage.stores.base import Buffer, ReadHandle, Store, WriteHandle
from dcp.storage.stores.posix.files import PosixWriteHandle, step
from dcp.version import __version__

WINDOW_BYTES: Final = 8 << 20
"""Of a file, made in one buffer and written at once."""

_WINDOW_COPIES: Final = 2_000

observers: Final[list[Callable[[str, str], None]]] = []
"""Called with (step, file name) before everything that changes storage: crash tests kill there."""


def announce(op: str, path: str | os.PathLike[str]) -> None:
    """Tell the observers what is about to happen."""
    for observer in observers:
        observer(op, Path(path).name)


# -- where the bytes go --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """The output of all tasks of a conversion.

    ``in_place``: ``store`` is a folder of this machine whose files have their sizes, and tasks write ranges
    of them. Else each task writes a whole file, which appears when it is finished, with ``replace`` in place
    of one that is there.
    """

    store: Store
    in_place: bool
    replace: bool = False

    def open(self, name: str, begin: int, size_bytes: int) -> WriteHandle:
        """Return the range from ``begin`` on of a file of ``size_bytes``, or the file. A file that is
        there already, since a run before this one wrote it, need only be compared."""
        if self.in_place:
            return ReservedRange(Path(self.store.url) / name, begin)
        if self.is_written(name):
            return ComparedFile(self.store.open_read(name), self.store.path_of(name), size_bytes)
        return self.store.create(name, durable=True, expected_bytes=size_bytes, replace=self.replace)

    def is_written(self, name: str) -> bool:
        """Return whether a task's file is there, and may not be replaced."""
        return not (self.in_place or self.replace) and self.store.stat(name) is not None


class ReservedRange(PosixWriteHandle):
    """A range of a file that has its size, while others write other ranges of it."""

    def __init__(self, path: Path, begin: int) -> None:
        with step(None, "open", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        super().__init__(path, descriptor, announce)
        self._flushed_bytes = begin

    def lend(self, size_bytes: int) -> memoryview:
        """Return page-aligned memory, which `write` takes back filled, without a copy."""
        self._check_usable()
        if self._buffer is None:
            self._take_buffer()
        return self._view[:size_bytes]

    def write(self, data: Buffer) -> None:
        """Write in a thread what `lend` gave memory for; waits for the one before the last."""
        self._fill_bytes = len(data)
        self._send()

    def _throw_away(self) -> None:
        """Leave what was written undefined; the file is not this range's to remove."""
        self._release()

    def _flush_to_end(self) -> None:
        """fdatasync: the size does not change any more."""
        self._drain()
        with step(announce, "fdatasync", self._path):
            os.fdatasync(self._descriptor)


class ComparedFile(WriteHandle):
    """A file that is there already: nothing is written.

    Raises CheckpointConflictError if it has not the very bytes that would be.
    """

    def __init__(self, there: ReadHandle, path: str, size_bytes: int) -> None:
        self.name, self._path, self._there, self._position = there.name, path, there, 0
        self._require(there.size_bytes == size_bytes)

    @property
    def position(self) -> int:
        """The offset at which the next bytes are compared."""
        return self._position

    def write(self, data: Buffer) -> None:
        """Compare it with what is there."""
        self._require(self._there.pread(len(data), self._position) == data)
        self._position += len(data)

    def finish(self) -> int:
        """Close the file, which was the same."""
        self._there.close()
        return self._position

    def abort(self) -> None:
        """Close the file, which stays."""
        self._there.close()

    def _require(self, is_same: bool) -> None:
        if not is_same:
            self._there.close()
            raise CheckpointConflictError(
                f"{self._path} is there already, and not of this conversion; give another target, or delete "
                "it",
                path=self._path,
            )


# -- one task ------------------------------------------------------------------------------------------------


class TaskReader(Closable):
    """The bytes of ``task`` from its ``begin`` on, window by window. Use as a context manager; for one thread
    at a time."""

    def __init__(self, store: Store, task: Task, *, verify: bool) -> None:
        self.position = task.begin
        self._task = task
        self._reader = RangeReader(store, task.source_files, verify=verify)
        self._holes = sorted(task.holes, key=attrgetter("offset"))
        self._seen = 0
        self._fragments: dict[int, list[Fragment]] = {}
        self._faults: list[BadElements] = []
        terms = task.copies.terms
        self._sums = None if terms is None else Sums(self._reader, terms.accumulate, self._faults)

    def close(self) -> None:
        """Close the source's files."""
        self._reader.close()

    def result(self) -> TaskResult:
        """Return checksums of all that was read and made so far, and its faults."""
        reader = self._reader
        return TaskResult(self._task.number, reader.bytes_read, reader.sources, reader.targets, self._faults)

    def take_sources(self) -> list[Fragment]:
        """Return checksums of what was read since the last call; those of what is made are dropped."""
        found, self._reader.sources = self._reader.sources, []
        if not self._holes:
            self._reader.targets = []
        return found

    def fill(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with the next ``len(buffer)`` bytes of the file; ValueError behind the end of
        the task."""
        task, begin, end = self._task, self.position, self.position + len(buffer)
        if end > task.end:
            raise ValueError(f"byte {end} is behind the end of the task, {task.end}")
        later: list[Callable[[], None]] = []
        wanted: list[Wanted] = []
        for copy in task.copies.between(begin, end):
            low, high = max(0, begin - copy.begin), min(end - copy.begin, copy.size_bytes)
            place = buffer[copy.begin + low - begin : copy.begin + high - begin]
            if copy.terms and self._sums is not None:
                self._sums.add(copy, place, low, partial(self._note, copy.copy, low, place))
            else:
                wanted.append(self._wanted(copy, place, low, high, later))
        for offset, data in literals_between(task.literals, begin, end):
            buffer[offset - begin : offset - begin + len(data)] = data
        self._reader.read(wanted)
        for action in later:
            action()
        if self._sums is not None:
            self._sums.flush()
        if self._holes:
            self._fill_holes(buffer, begin, end)
        self.position = end

    def _wanted(
        self, copy: TaskCopy, place: memoryview, low: int, high: int, later: list[Callable[[], None]]
    ) -> Wanted:
        """Return the request for bytes ``low`` to ``high`` of a copy; ``later`` gets what is to be done once
        they are read, if that is not all."""
        size, out = dtypes.BY_CODE[copy.source_code].itemsize, dtypes.BY_CODE[copy.target_code].itemsize
        is_even = not low % out and not high % out
        # An element across two windows: then all of the copy is read for each, which is small.
        first, last = (low // out, high // out) if is_even else (0, copy.size_bytes // out)
        if copy.is_padded:
            place[:] = bytes(len(place))
        if copy.source_code == copy.target_code and is_even:
            is_exact = not copy.is_padded and all(source.is_run(size) for source in copy.sources)
            if not is_exact:
                later.append(partial(self._note, copy.copy, low, place))
            return Wanted(place, size, copy.sources, first, last, copy.copy if is_exact else -1, low)
        scratch = memoryview(bytearray((last - first) * size))

        def convert() -> None:
            data: Any = scratch
            if copy.source_code != copy.target_code:
                data = cast(scratch, copy.source_code, copy.target_code).data
            place[:] = data[low - first * out : high - first * out]
            self._note(copy.copy, low, place)

        later.append(convert)
        return Wanted(scratch, size, copy.sources, first, last)

    def _note(self, copy: int, position: int, data: memoryview) -> None:
        for begin, end in within_blocks(len(data), position):
            crc = crc32(data[begin:end])
            self._reader.targets.append(Fragment(copy, position + begin, position + end, crc))

    def _fill_holes(self, buffer: memoryview, begin: int, end: int) -> None:
        """Put checksums into a file that is written front to back: the copies of its holes stand before
        them."""
        for fragment in self._reader.targets[self._seen :]:
            self._fragments.setdefault(fragment.owner, []).append(fragment)
        self._seen = len(self._reader.targets)
        first = bisect_left(self._holes, begin, key=lambda hole: hole.offset + 3)
        for hole in self._holes[first : bisect_left(self._holes, end, key=attrgetter("offset"))]:
            data = _whole(self._fragments.get(hole.copy, [])).to_bytes(4, "little")
            low, high = max(begin, hole.offset), min(end, hole.offset + 4)  # it may be in two windows
            buffer[low - begin : high - begin] = data[low - hole.offset : high - hole.offset]


def _whole(fragments: Sequence[Fragment]) -> int:
    """Return the CRC-32 of a copy whose fragments are all there."""
    total = position = 0
    for fragment in sorted(fragments):
        if fragment.begin != position:
            raise CheckpointError("a copy was not written in order; this is an error of dcphub")
        total = crc32_combine(total, fragment.crc, fragment.end - fragment.begin)
        position = fragment.end
    return total


def _run_task(
    task: Task,
    store: Store,
    sink: WriteHandle,
    *,
    verify: bool,
    on_bytes: Callable[[int], None] | None,
    check: Callable[[TaskResult], None] | None,
) -> TaskResult:
    """Read what ``task`` needs from the source's ``store``, and write it to ``sink``, which it ends.

    ``check`` is called with the result while the sink can still be aborted, and raises what is wrong with it.
    """
    with sink, TaskReader(store, task, verify=verify) as reader:
        own = memoryview(b"")
        if not isinstance(sink, ReservedRange):  # which lends memory, to write it without a copy
            own = memoryview(bytearray(min(WINDOW_BYTES, task.end - task.begin)))
        while (begin := reader.position) < task.end:
            last = task.copies.end_of(begin, _WINDOW_COPIES) or task.end
            size = min(WINDOW_BYTES, last - begin, task.end - begin)
            buffer = sink.lend(size) if isinstance(sink, ReservedRange) else own[:size]
            reader.fill(buffer)
            announce("window", task.name)
            sink.write(buffer)
            if on_bytes is not None:
                on_bytes(size)
        result = reader.result()
        if check is not None:
            check(result)
        announce("finish", task.name)
    announce("finished", task.name)
    return result


# -- a batch of them -----------------------------------------------------------------------------------------


class SourceChangedError(CheckpointConflictError):
    """The source has changed since the conversion was planned: it has to be converted anew."""


def source_mark(store: Store, index: CheckpointIndex, to: str) -> str:
    """Return a text that changes with the source's files, and with how this version converts to ``to``."""
    names = frozenset(index.files)
    files = sorted((info for info in store.list() if info.name in names), key=attrgetter("name"))
    facts = [(info.name, info.size_bytes, info.modified_seconds) for info in files]
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
            run = partial(_run_task, task, settings.store, verify=verify, check=check)
            try:
                found = run(output.open(*place), on_bytes=on_bytes)
            except StorageError:
                # Another attempt at this task has been quicker, and its file is what ours would have been.
                if not output.is_written(task.name):
                    raise
                found = run(output.open(*place), on_bytes=None)
            result.add(found)
    if not output.in_place:
        output.store.sync()
    return result


def _comparison(batch: TaskBatch, engine: ReadEngine) -> Callable[[TaskResult], None]:
    """Return a function that compares all that is complete within the batch, before its files appear."""
    verifies, checks = engine.verify != "none", SourceChecks(engine)
    chunks = np.unique(np.concatenate([task.copies.sources.chunks for task in batch.tasks]))
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
