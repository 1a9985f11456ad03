"""Tasks of a conversion, each a range of one target file that is made of parts of the source. Picklable.

A task needs nothing of the others and may be run again: it writes the same bytes to the same place. Memory is
bounded by a few buffers. The checksums of what it read and wrote, which it returns, are for the ledger.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.conversion.contents.casting import cast
from dcp.conversion.copying.gather import RangeReader, Wanted
from dcp.conversion.copying.sums import BadElements, Sums
from dcp.conversion.layouts.layout import Hole, TargetLayout
from dcp.conversion.layouts.sources import SourceColumns, TaskCopies, TaskCopy, TermColumns
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.storage.closable import Closable
from dcp.storage.engine.source import Fragment, within_blocks
from dcp.storage.errors import CheckpointConflictError, CheckpointError, CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32, crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.strides import Int64
from dcp.storage.packing import pack, unpack
from dcp.storage.stores.base import Buffer, ReadHandle, Store, WriteHandle
from dcp.storage.stores.posix.files import PosixWriteHandle, step

__all__ = [
    "TASK_BYTES",
    "TASK_COPIES",
    "WINDOW_BYTES",
    "ComparedFile",
    "Output",
    "ReservedRange",
    "Task",
    "TaskBatch",
    "TaskReader",
    "TaskResult",
    "announce",
    "make_batches",
    "make_tasks",
    "observers",
    "run_task",
]

observers: Final[list[Callable[[str, str], None]]] = []
"""Called with (step, file name) before everything that changes storage: crash tests kill there."""


def announce(op: str, path: str | os.PathLike[str]) -> None:
    """Tell the observers what is about to happen."""
    for observer in observers:
        observer(op, Path(path).name)


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

    def abort(self) -> None:
        """Leave what was written undefined; the file is not this range's to remove."""
        if self._state == "open":
            self._stop()
            self._close("aborted")

    def _flush_to_end(self) -> None:
        """fdatasync: the size does not change any more."""
        while self._in_flight:
            self._pool.give(self._await_oldest())
        with step(announce, "fdatasync", self._path):
            os.fdatasync(self._descriptor)


class ComparedFile(WriteHandle):
    """A file that is there already: nothing is written.

    Raises CheckpointConflictError if it has not the very bytes that would be.
    """

    def __init__(self, there: ReadHandle, path: str, size_bytes: int) -> None:
        self.name = there.name
        self._path = path
        self._there = there
        self._position = 0
        if there.size_bytes != size_bytes:
            raise self._conflict()

    @property
    def position(self) -> int:
        """The offset at which the next bytes are compared."""
        return self._position

    def write(self, data: Buffer) -> None:
        """Compare it with what is there."""
        if self._there.pread(len(data), self._position) != data:
            raise self._conflict()
        self._position += len(data)

    def finish(self) -> int:
        """Close the file, which was the same."""
        self._there.close()
        return self._position

    def abort(self) -> None:
        """Close the file, which stays."""
        self._there.close()

    def _conflict(self) -> CheckpointConflictError:
        self._there.close()
        return CheckpointConflictError(
            f"{self._path} is there already, and not of this conversion; give another target, or delete it",
            path=self._path,
        )


# -- tasks ---------------------------------------------------------------------------------------------------


TASK_BYTES: Final = 64 << 20
TASK_COPIES: Final = 5_000
"""Of very small tensors the columns take more memory than the bytes."""
WINDOW_BYTES: Final = 8 << 20
"""Of a file, made in one buffer and written at once."""

_WINDOW_COPIES: Final = 2_000
_MAX_BATCHES: Final = 512


@dataclass(frozen=True)
class Task:
    """Bytes ``begin`` to ``end`` of the target file ``name``, of ``file_bytes``.

    ``literals`` are (offset, bytes) in the file, ``copies`` all that reach into the range, both in order.
    ``source_files`` has (name, size) by number. ``holes`` are those a whole file has, where it is written
    front to back: then the task fills them itself.
    """

    number: int
    name: str
    file_bytes: int
    begin: int
    end: int
    literals: tuple[tuple[int, bytes], ...]
    copies: TaskCopies
    source_files: dict[int, tuple[str, int]]
    holes: tuple[Hole, ...] = ()


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """Neighbouring tasks that are carried out together, and write ``size_bytes``. ``is_all``: the conversion
    has no other task."""

    number: int
    tasks: tuple[Task, ...]
    size_bytes: int
    is_all: bool

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files that the tasks write, or write ranges of."""
        return tuple(dict.fromkeys(task.name for task in self.tasks))

    @property
    def chunks(self) -> Int64:
        """The chunks of the source that are read."""
        return np.unique(np.concatenate([task.copies.chunks for task in self.tasks]))


@dataclass
class TaskResult:
    """The result of a task or a batch of them: checksums of what it read and wrote, by payload and by copy.
    ``faults`` are of what was computed, which may then not be published. Pickled as it is packed."""

    number: int
    bytes_read: int = 0
    sources: list[Fragment] = field(default_factory=list)
    targets: list[Fragment] = field(default_factory=list)
    faults: list[BadElements] = field(default_factory=list)

    def add(self, other: TaskResult) -> None:
        """Take what another task did, too."""
        self.bytes_read += other.bytes_read
        self.sources += other.sources
        self.targets += other.targets
        self.faults += other.faults

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskResult.decode, (self.encode(),)

    def encode(self) -> bytes:
        """Pack it: differences from row to row, because neighbours hardly differ."""
        columns = []
        for found in (self.sources, self.targets, self.faults):
            rows = np.array(found, np.int64).reshape(-1, 4)
            columns.append(np.diff(rows, axis=0, prepend=np.int64(0)).T)
        return pack([self.number, self.bytes_read, *columns])

    @classmethod
    def decode(cls, data: bytes) -> TaskResult:
        """Return the inverse of `encode`. Raises CheckpointFormatError for anything else."""
        try:
            number, bytes_read, *columns = unpack(data)
            sources, targets, faults = (np.cumsum(one.T, axis=0).tolist() for one in columns)
            parts = list(starmap(Fragment, sources)), list(starmap(Fragment, targets))
            return cls(number, bytes_read, *parts, list(starmap(BadElements, faults)))
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointFormatError("what was noted of a conversion is not to be read") from error


# -- making tasks --------------------------------------------------------------------------------------------


@garbage_collection_paused()
def make_tasks(
    index: CheckpointIndex,
    layout: TargetLayout,
    sources: SourceColumns,
    dtype_codes: npt.NDArray[np.uint8],
    terms: TermColumns | None = None,
    *,
    by_file: bool,
) -> list[Task]:
    """Make the tasks of a layout; ``sources`` are the parts of its copies, ``dtype_codes`` are those of
    what is copied, by row. With ``terms`` copies are sums of these. ``by_file``: one for each file."""
    tasks: list[Task] = []
    copies = layout.copies
    source_codes = dtype_codes[copies.tensors].astype(np.int64)
    for file, (name, size) in enumerate(zip(layout.file_names, layout.file_sizes, strict=True)):
        literals = layout.literals.of_file(file)
        rows = np.flatnonzero((copies.files == file) & (copies.size_bytes > 0))
        rows = rows[np.argsort(copies.offsets[rows], kind="stable")]
        begins, ends = copies.offsets[rows], copies.offsets[rows] + copies.size_bytes[rows]
        starts = list(map(itemgetter(0), literals))
        stops = [offset + len(data) for offset, data in literals]
        holes = tuple(hole for hole in layout.holes if hole.file == file) if by_file else ()
        many = begins[TASK_COPIES::TASK_COPIES].tolist()
        cuts = [0, size] if by_file else sorted({*range(0, size, TASK_BYTES), *many, size, 0})
        for begin, end in pairwise(cuts):
            chosen = rows[np.searchsorted(ends, begin, "right") : np.searchsorted(begins, end, "left")]
            own = TaskCopies.of(copies, chosen, source_codes, sources, terms)
            parts = literals[bisect_right(stops, begin) : bisect_left(starts, end)]
            for place in {0, len(parts) - 1} if parts else ():  # those between are in the range whole
                parts[place] = _clipped(*parts[place], begin, end)
            numbers = np.unique(own.sources.rows[:, 1]).tolist()
            files = {}
            for number in numbers:
                files[number] = index.files[number], int(index.file_sizes[number])
            tasks.append(Task(len(tasks), name, size, begin, end, tuple(parts), own, files, holes))
    return tasks


def make_batches(tasks: Sequence[Task], batch_bytes: int) -> list[TaskBatch]:
    """Make batches of about ``batch_bytes``, or of more if they were too many; with 0 each task is one."""
    batches: list[TaskBatch] = []
    own: list[Task] = []
    size = wanted = 0
    if batch_bytes:
        total = sum(task.end - task.begin for task in tasks)
        wanted = max(batch_bytes, -(-total // _MAX_BATCHES))
    for task in tasks:
        own.append(task)
        size += task.end - task.begin
        if size >= wanted or task is tasks[-1]:
            batches.append(TaskBatch(len(batches), tuple(own), size, len(tasks) == 1))
            own, size = [], 0
    return batches


def _clipped(offset: int, data: bytes, begin: int, end: int) -> tuple[int, bytes]:
    if begin <= offset and offset + len(data) <= end:
        return offset, data
    first = max(begin, offset)
    return first, data[first - offset : min(end, offset + len(data)) - offset]


# -- running them --------------------------------------------------------------------------------------------


def run_task(
    task: Task,
    store: Store,
    sink: WriteHandle,
    *,
    verify: bool,
    on_bytes: Callable[[int], None] | None = None,
    check: Callable[[TaskResult], None] | None = None,
) -> TaskResult:
    """Read what ``task`` needs from the source's ``store``, and write it to ``sink``, which it ends.

    ``on_bytes`` gets the size of each window. ``check`` is called with the result while the sink can still be
    aborted, and raises what is wrong with it.
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


class TaskReader(Closable):
    """The bytes of ``task`` from its ``begin`` on, window by window. Use as a context manager; for one thread
    at a time."""

    def __init__(self, store: Store, task: Task, *, verify: bool) -> None:
        self.position = task.begin
        self._task = task
        self._reader = RangeReader(store, task.source_files, verify=verify)
        self._literal_begins = list(map(itemgetter(0), task.literals))
        self._literal_ends = [offset + len(data) for offset, data in task.literals]
        self._holes = sorted(task.holes, key=lambda hole: hole.offset)
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
        begin, end = self.position, self.position + len(buffer)
        if end > self._task.end:
            raise ValueError(f"byte {end} is behind the end of the task, {self._task.end}")
        later: list[Callable[[], None]] = []
        wanted: list[Wanted] = []
        for copy in self._task.copies.between(begin, end):
            self._want(copy, buffer, begin, end, wanted, later)
        literals = slice(bisect_right(self._literal_ends, begin), bisect_left(self._literal_begins, end))
        for offset, data in self._task.literals[literals]:
            first, last = max(begin, offset), min(end, offset + len(data))
            buffer[first - begin : last - begin] = data[first - offset : last - offset]
        self._reader.read(wanted)
        for action in later:
            action()
        if self._sums is not None:
            self._sums.flush()
        if self._holes:
            self._fill_holes(buffer, begin, end)
        self.position = end

    def _want(
        self,
        copy: TaskCopy,
        buffer: memoryview,
        begin: int,
        end: int,
        wanted: list[Wanted],
        later: list[Callable[[], None]],
    ) -> None:
        """Ask for the part of ``copy`` that belongs to bytes ``begin`` to ``end`` of the file."""
        low, high = max(begin, copy.begin) - copy.begin, min(end, copy.begin + copy.size_bytes) - copy.begin
        place = buffer[low + copy.begin - begin : high + copy.begin - begin]
        if copy.terms and self._sums is not None:
            self._sums.add(copy, place, low, lambda: self._note(copy.copy, low, place))
            return
        size, out = dtypes.BY_CODE[copy.source_code].itemsize, dtypes.BY_CODE[copy.target_code].itemsize
        is_even = not low % out and not high % out
        # An element across two windows: then all of the copy is read for each, which is small.
        first, last = (low // out, high // out) if is_even else (0, copy.elements)
        if copy.is_padded:
            place[:] = bytes(len(place))
        if copy.source_code == copy.target_code and is_even:
            is_exact = not copy.is_padded and all(source.is_run(size) for source in copy.sources)
            wanted.append(Wanted(place, size, copy.sources, first, last, copy.copy if is_exact else -1, low))
            if not is_exact:
                later.append(lambda: self._note(copy.copy, low, place))
            return
        scratch = memoryview(bytearray((last - first) * size))
        wanted.append(Wanted(scratch, size, copy.sources, first, last))

        def convert() -> None:
            data: Any = scratch
            if copy.source_code != copy.target_code:
                data = cast(scratch, copy.source_code, copy.target_code).data
            place[:] = data[low - first * out : high - first * out]
            self._note(copy.copy, low, place)

        later.append(convert)

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
        for hole in self._holes[first : bisect_left(self._holes, end, key=lambda hole: hole.offset)]:
            data = _whole(self._fragments.get(hole.copy, [])).to_bytes(4, "little")
            for at in range(
                max(0, begin - hole.offset), min(4, end - hole.offset)
            ):  # it may be in two windows
                buffer[hole.offset + at - begin] = data[at]


def _whole(fragments: Sequence[Fragment]) -> int:
    """Return the CRC-32 of a copy whose fragments are all there."""
    total = position = 0
    for fragment in sorted(fragments):
        if fragment.begin != position:
            raise CheckpointError("a copy was not written in order; this is an error of dcphub")
        total = crc32_combine(total, fragment.crc, fragment.end - fragment.begin)
        position = fragment.end
    return total
