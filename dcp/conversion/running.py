"""Tasks of a conversion: ranges of target files, made from parts of the source by any process.

Tasks are independent and repeatable: they write equal bytes to equal places. Checksums consist of fragments,
which may arrive in any order, from any task, and repeatedly. Once fragments cover a block, source blocks are
verified and target blocks recorded. Memory is bounded by a few buffers.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.conversion.casting import cast
from dcp.conversion.gather import BadElements, RangeReader, TaskResult, Wanted
from dcp.conversion.layout import Copies, Hole, SourceColumns, TargetLayout, TaskCopies, TaskCopy, TermColumns
from dcp.conversion.sums import NOT_FINITE, Sums
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import ReadStats, Verify
from dcp.storage.engine.source import Fragment, Fragments, within_blocks
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    PlanError,
    StorageError,
)
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, complete_index
from dcp.storage.formats.plain import encode_plain
from dcp.storage.geometry.strides import Int64, starts
from dcp.storage.near_names import listed
from dcp.storage.stores.base import Buffer, Closable, ReadHandle, Store, WriteHandle
from dcp.storage.stores.posix.files import PosixWriteHandle, step
from dcp.version import __version__

TASK_BYTES: Final = 64 << 20
TASK_COPIES: Final = 5_000
"""Number of copies of a task at most: for very small tensors the columns take more memory than the bytes."""

_MAX_BATCHES: Final = 512
_MAX_LISTED: Final = 10
_UNKNOWN: Final = -1


@dataclass(frozen=True)
class Task:
    """Bytes ``begin`` to ``end`` of the target file ``name``, of ``file_bytes``.

    ``literals`` are (offset, bytes) in the file, ``copies`` overlap the range, both in order.
    ``source_files`` has (name, size) by number. ``holes`` are set for a file written from front to back; the
    task fills them.
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
    """Neighbouring tasks in one batch that writes ``size_bytes``. ``is_all``: the conversion has no other
    task."""

    number: int
    tasks: tuple[Task, ...]
    size_bytes: int
    is_all: bool


# -- making tasks --------------------------------------------------------------------------------------------


@garbage_collection_paused()
def make_tasks(
    index: CheckpointIndex,
    layout: TargetLayout,
    dtype_codes: npt.NDArray[np.uint8],
    sources: SourceColumns,
    terms: TermColumns | None = None,
    *,
    by_file: bool,
) -> list[Task]:
    """Make the tasks of a layout.

    ``sources`` are the parts of its copies, ``dtype_codes`` the source types by row. With ``terms`` copies
    are sums. ``by_file``: one task for each file.
    """
    tasks: list[Task] = []
    copies = layout.copies
    source_codes = dtype_codes[copies.tensors].astype(np.int64)
    for file, (name, size) in enumerate(zip(layout.file_names, layout.file_sizes, strict=True)):
        own = np.flatnonzero(layout.literals.files == file)
        own = own[np.argsort(layout.literals.offsets[own], kind="stable")]
        data = map(layout.literals.data.__getitem__, own.tolist())
        literals = list(zip(layout.literals.offsets[own].tolist(), data, strict=True))
        rows = np.flatnonzero((copies.files == file) & (copies.size_bytes > 0))
        rows = rows[np.argsort(copies.offsets[rows], kind="stable")]
        begins, ends = copies.offsets[rows], copies.offsets[rows] + copies.size_bytes[rows]
        holes = tuple(hole for hole in layout.holes if hole.file == file) if by_file else ()
        many = begins[TASK_COPIES::TASK_COPIES].tolist()
        cuts = [0, size] if by_file else sorted({*range(0, size, TASK_BYTES), *many, size, 0})
        for begin, end in pairwise(cuts):
            chosen = rows[np.searchsorted(ends, begin, "right") : np.searchsorted(begins, end, "left")]
            made = TaskCopies.of(copies, chosen, source_codes, sources, terms)
            parts = tuple(literals_between(literals, begin, end))
            numbers = np.unique(made.sources.rows[:, 1]).tolist()
            files = {number: (index.files[number], int(index.file_sizes[number])) for number in numbers}
            tasks.append(Task(len(tasks), name, size, begin, end, parts, made, files, holes))
    return tasks


def literals_between(
    literals: Sequence[tuple[int, bytes]], begin: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of ordered literals within bytes ``begin`` to ``end``."""
    first = max(0, bisect_right(literals, begin, key=itemgetter(0)) - 1)
    for offset, data in literals[first : bisect_left(literals, end, key=itemgetter(0))]:
        if (low := max(begin, offset)) < offset + len(data):
            yield low, data[low - offset : end - offset]


def make_batches(tasks: Sequence[Task], batch_bytes: int) -> list[TaskBatch]:
    """Make batches of about ``batch_bytes``, or more to limit their number; 0 makes a batch of each task."""
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


# -- checksums -----------------------------------------------------------------------------------------------


class SourceChecks:
    """Verify source checksums. Thread-safe.

    Raises CorruptCheckpointError, with file, tensor and offset, as soon as a complete block differs. Counts
    ``blocks_verified`` and ``blocks_unverified`` (without a checksum).
    """

    def __init__(self, engine: ReadEngine) -> None:
        self._engine = engine
        self._blocks = Fragments()
        self._seen: set[int] = set()  # by numbers of chunk and block; there may be millions
        self._lock = threading.Lock()
        self.stats = ReadStats()

    def add(self, fragments: Iterable[Fragment]) -> None:
        """Add the fragments of a task."""
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
        """Read blocks of the payloads of ``chunks`` that no task read completely, and verify whole-payload
        checksums."""
        for chunk in chunks:
            for block in range(-(-int(self._engine.payload_lengths[chunk]) // BLOCK_BYTES)):
                if chunk << 32 | block not in self._seen:
                    self._read_block(chunk, block)
        uncompared = self._engine.payloads.verify_whole()
        self.stats.blocks_verified -= uncompared
        self.stats.blocks_unverified += uncompared

    def finish_begun(self) -> None:
        """Finish partly read blocks only, for a range of the target."""
        for chunk, block in self._blocks.incomplete():
            self._read_block(chunk, block)
        self._engine.payloads.verify_whole()

    def _read_block(self, chunk: int, block: int) -> None:
        engine, begin = self._engine, block * BLOCK_BYTES
        handle, origin = engine.locate(chunk)
        size = min(BLOCK_BYTES, int(engine.payload_lengths[chunk]) - begin)
        engine.check_block(self.stats, chunk, block, crc32(handle.pread(size, origin + begin)))


class ResultChecks(SourceChecks):
    """Check all results of a conversion: verify source checksums, record target checksums and ``faults`` for
    publication."""

    def __init__(self, engine: ReadEngine, copies: Copies) -> None:
        super().__init__(engine)
        self.bytes_read = 0
        self.faults: list[BadElements] = []
        self._sizes = copies.size_bytes
        self._start = starts(-(-copies.size_bytes // BLOCK_BYTES))
        self._crcs = np.full(int(self._start[-1]), _UNKNOWN, np.int64)
        self._written = Fragments()

    def take(self, result: TaskResult) -> None:
        """Add a result. Raises CorruptCheckpointError as soon as a block differs."""
        self.add(result.sources)
        for fragment in result.targets:
            crc = self._written.add(fragment, int(self._sizes[fragment.owner]))
            if crc is not None:
                self._crcs[self._start[fragment.owner] + fragment.begin // BLOCK_BYTES] = crc
        self.bytes_read += result.bytes_read
        self.faults += result.faults

    def check_complete(self) -> None:
        """Raise CheckpointError for output blocks that were not written, and FaultySumsError for invalid
        sums."""
        if missing := int((self._crcs == _UNKNOWN).sum()):
            raise CheckpointError(
                f"{missing} blocks of the output were not written; please report this bug of dcphub"
            )
        if self.faults:
            refuse_faults(self.faults, self._engine.index)

    def blocks(self, copy: int) -> Int64:
        """Return CRC-32 of each block of a copy."""
        return self._crcs[self._start[copy] : self._start[copy + 1]]

    def whole(self, copy: int) -> int:
        """Return the CRC-32 of a whole copy with known blocks."""
        total, size = 0, int(self._sizes[copy])
        for number, crc in enumerate(self.blocks(copy).tolist()):
            total = crc32_combine(total, crc, min(BLOCK_BYTES, size - number * BLOCK_BYTES))
        return total


class FaultySumsError(PlanError):
    """Sums are NaN, infinite or too large: the output is invalid."""


def refuse_faults(faults: Iterable[BadElements], index: CheckpointIndex) -> None:
    """Raise FaultySumsError with all tensors of ``faults``, named by the source's ``index``."""
    counts: Counter[tuple[str, int]] = Counter()
    for fault in faults:
        row = int(index.chunk_tensors[fault.chunk])
        counts[index.fqns[row].partition("/")[2], fault.kind] += fault.elements
    shown = [
        f"{name!r} ({count:,} {'NaN or infinite' if kind == NOT_FINITE else 'too large for its dtype'})"
        for (name, kind), count in sorted(counts.items())
    ]
    names = sorted({name for name, _ in counts})
    raise FaultySumsError(
        f"{len(names)} of the merged tensors would get NaN or infinite elements, or elements out of the "
        f"range of the target's dtype: {listed(shown, most=_MAX_LISTED, show=str)}. Nothing was published. "
        "Exclude these tensors, or use a wider dtype",
        fqns=names,
        problems=shown,
    )


# -- windows and files --------------------------------------------------------------------------------------

WINDOW_BYTES: Final = 8 << 20
"""Bytes of a file made in one buffer and written at once."""

_WINDOW_COPIES: Final = 2_000

observers: Final[list[Callable[[str, str], None]]] = []
"""Called with (step, file name) before every change of storage; crash tests use these calls."""


def announce(op: str, path: str | os.PathLike[str]) -> None:
    """Notify the observers before a change."""
    for observer in observers:
        observer(op, Path(path).name)


# -- where the bytes go --------------------------------------------------------------------------------------


class ReservedRange(PosixWriteHandle):
    """A range of a preallocated file; other ranges are written concurrently."""

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
        """Write lent memory in a thread, after the write before the last has ended."""
        self._fill_bytes = len(data)
        self._send()

    def _throw_away(self) -> None:
        """Leave written bytes undefined; other ranges still use the file."""
        self._release()

    def _flush_to_end(self) -> None:
        """fdatasync: the size does not change any more."""
        self._drain()
        with step(announce, "fdatasync", self._path):
            os.fdatasync(self._descriptor)


class ComparedFile(WriteHandle):
    """An existing file, compared instead of written.

    Raises CheckpointConflictError if bytes differ.
    """

    def __init__(self, there: ReadHandle, path: str, size_bytes: int) -> None:
        self.name, self._path, self._there, self._position = there.name, path, there, 0
        self._require(there.size_bytes == size_bytes)

    @property
    def position(self) -> int:
        """Offset of the next comparison."""
        return self._position

    def write(self, data: Buffer) -> None:
        """Compare bytes with the file."""
        self._require(self._there.pread(len(data), self._position) == data)
        self._position += len(data)

    def finish(self) -> int:
        """Close the file, which had equal bytes."""
        self._there.close()
        return self._position

    def abort(self) -> None:
        """Close and keep the file."""
        self._there.close()

    def _require(self, is_same: bool) -> None:
        if not is_same:
            self._there.close()
            raise CheckpointConflictError(
                f"{self._path} already exists and was not written by this conversion; "
                "choose another target, or delete it",
                path=self._path,
            )


# -- one task ------------------------------------------------------------------------------------------------


class TaskReader(Closable):
    """Read the bytes of ``task`` window by window; ``result`` holds checksums and faults.

    Use as a context manager, in one thread at a time.
    """

    def __init__(self, store: Store, task: Task, *, verify: bool) -> None:
        self.position = task.begin
        self._task = task
        self._reader = RangeReader(store, task.number, task.source_files, verify=verify)
        self.result = self._reader.result
        self._holes = sorted(task.holes, key=attrgetter("offset"))
        self._seen = 0
        self._fragments: dict[int, list[Fragment]] = {}
        terms = task.copies.terms
        self._sums = None if terms is None else Sums(self._reader, terms.accumulate)

    def close(self) -> None:
        """Close the source's files."""
        self._reader.close()

    def take_sources(self) -> list[Fragment]:
        """Return checksums of bytes read since the last call, and drop checksums of the output."""
        found, self.result.sources = self.result.sources, []
        if not self._holes:
            self.result.targets = []
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
        """Return the request for bytes ``low`` to ``high`` of a copy; ``later`` receives work to do after the
        read."""
        size, out = dtypes.BY_CODE[copy.source_code].itemsize, dtypes.BY_CODE[copy.target_code].itemsize
        is_even = not low % out and not high % out
        # If an element spans two windows, the whole copy is read for both; such copies are small.
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
            self.result.targets.append(Fragment(copy, position + begin, position + end, crc))

    def _fill_holes(self, buffer: memoryview, begin: int, end: int) -> None:
        """Insert checksums into a file written from front to back; copies precede their holes."""
        for fragment in self.result.targets[self._seen :]:
            self._fragments.setdefault(fragment.owner, []).append(fragment)
        self._seen = len(self.result.targets)
        first = bisect_left(self._holes, begin, key=lambda hole: hole.offset + 3)
        for hole in self._holes[first : bisect_left(self._holes, end, key=attrgetter("offset"))]:
            crc = position = 0
            for fragment in sorted(self._fragments.get(hole.copy, [])):
                if fragment.begin != position:
                    raise CheckpointError("a copy was not written in order; please report this bug of dcphub")
                crc, position = crc32_combine(crc, fragment.crc, fragment.end - position), fragment.end
            data = crc.to_bytes(4, "little")
            low, high = max(begin, hole.offset), min(end, hole.offset + 4)  # a hole may span two windows
            buffer[low - begin : high - begin] = data[low - hole.offset : high - hole.offset]


def _run_task(
    task: Task,
    store: Store,
    sink: WriteHandle,
    *,
    verify: bool,
    on_bytes: Callable[[int], None] | None,
    check: Callable[[TaskResult], None] | None,
) -> TaskResult:
    """Read ``task`` from the source's ``store`` and write to ``sink``, which is ended.

    ``check`` receives the result before the end of the sink, and raises to abort.
    """
    with sink, TaskReader(store, task, verify=verify) as reader:
        own = memoryview(b"")
        if not isinstance(sink, ReservedRange):  # a ReservedRange lends memory, which avoids a copy
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
        if check is not None:
            check(reader.result)
        announce("finish", task.name)
    announce("finished", task.name)
    return reader.result


# -- a batch of them -----------------------------------------------------------------------------------------


class SourceChangedError(CheckpointConflictError):
    """The source changed after the plan: the conversion has to start again."""


def source_mark(store: Store, index: CheckpointIndex, to: str) -> str:
    """Return a text that changes with the source's files and with this version's conversion to ``to``."""
    names = frozenset(index.files)
    found = (info for info in store.list() if info.name in names)
    facts = sorted(map(attrgetter("name", "size_bytes", "modified_seconds"), found))
    sizes = [TASK_BYTES, TASK_COPIES, WINDOW_BYTES]
    head = [__version__, store.url, to, *sizes, index.provenance.get("save_id"), facts]
    return hashlib.sha256(encode_plain(head, limit_bytes=1 << 30) or b"").hexdigest()


@dataclass(frozen=True)
class BatchSettings:
    """Settings of all batches of a conversion, for other processes.

    ``open_source`` opens ``store``, whose mark for the format ``to`` is ``source_mark``. ``in_place``:
    ``output`` is a local folder of preallocated files, and tasks write ranges. Otherwise each task writes a
    whole file, visible when finished; ``replace`` allows existing files.
    """

    open_source: Callable[[], Source]
    store: Store
    to: str
    source_mark: str
    verify: Verify
    output: Store
    in_place: bool
    replace: bool = False

    def open_engine(self) -> ReadEngine:
        """Open the source with verification. Raises SourceChangedError."""
        found = self.open_source()
        engine = ReadEngine(found.store, complete_index(found.store, found.index), verify=self.verify)
        self.refuse_changed(engine, found.name)
        return engine

    def refuse_changed(self, engine: ReadEngine, name: str) -> None:
        """Raise SourceChangedError unless ``engine`` reads the planned source."""
        if source_mark(engine.store, engine.index, self.to) != self.source_mark:
            raise SourceChangedError(f"{name} changed during the conversion; convert again", path=name)

    def open_output(self, task: Task) -> WriteHandle:
        """Return a range of a task's file, or the file; files of an earlier run are compared."""
        output, name = self.output, task.name
        if self.in_place:
            return ReservedRange(Path(output.url) / name, task.begin)
        if self.is_written(name):
            return ComparedFile(output.open_read(name), output.path_of(name), task.file_bytes)
        return output.create(name, durable=True, expected_bytes=task.file_bytes, replace=self.replace)

    def is_written(self, name: str) -> bool:
        """Test for an existing file of a task that may not be replaced."""
        return not (self.in_place or self.replace) and self.output.stat(name) is not None


def run_batch(
    settings: BatchSettings,
    batch: TaskBatch,
    engine: ReadEngine | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> TaskResult:
    """Carry out ``batch`` durably. ``engine`` is an open source; ``on_bytes`` receives the size of each
    window."""
    verify, result = settings.verify != "none", TaskResult(batch.number)
    with ExitStack() as stack:
        check = None
        # Files written in place are not visible yet; publication verifies all results.
        if not settings.in_place and (verify or batch.is_all):
            check = _comparison(batch, engine or stack.enter_context(settings.open_engine()))
        for task in batch.tasks:
            run = partial(_run_task, task, settings.store, verify=verify, check=check)
            try:
                found = run(settings.open_output(task), on_bytes=on_bytes)
            except StorageError:
                # A faster attempt at this task has written the same file.
                if not settings.is_written(task.name):
                    raise
                found = run(settings.open_output(task), on_bytes=None)
            result.add(found)
    if not settings.in_place:
        settings.output.sync()
    return result


def _comparison(batch: TaskBatch, engine: ReadEngine) -> Callable[[TaskResult], None]:
    """Return a function that verifies complete blocks of the batch before files become visible."""
    verifies, checks = engine.verify != "none", SourceChecks(engine)
    chunks = np.unique(np.concatenate([task.copies.sources.chunks for task in batch.tasks]))
    if verifies:
        engine.resolve(chunks)

    def check(result: TaskResult) -> None:
        if verifies:
            checks.add(result.sources)
        if batch.is_all:  # no other batch completes these blocks
            if verifies:
                checks.finish(chunks.tolist())
            if result.faults:
                refuse_faults(result.faults, engine.index)

    return check
