"""Tasks of a conversion, each a range of one target file that is made of parts of the source. Picklable.

A task needs nothing of the others and may be run again: it writes the same bytes to the same place. Checksums
of what it read and wrote are made of fragments, which come in any order, from any task, and more than once. A
block is known once they cover it: those of the source are compared then, those of the target are recorded.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.conversion.layout import Copies, Hole, SourceColumns, TargetLayout, TaskCopies, TermColumns
from dcp.conversion.sums import NOT_FINITE, BadElements
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import ReadStats
from dcp.storage.engine.source import Fragment, Fragments
from dcp.storage.errors import CheckpointError, CheckpointFormatError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.strides import Int64, starts
from dcp.storage.near_names import listed
from dcp.storage.packing import pack, unpack

TASK_BYTES: Final = 64 << 20
TASK_COPIES: Final = 5_000
"""Of very small tensors the columns take more memory than the bytes."""

_MAX_BATCHES: Final = 512
_MAX_LISTED: Final = 10
_UNKNOWN: Final = -1


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
    dtype_codes: npt.NDArray[np.uint8],
    sources: SourceColumns,
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
        holes = tuple(hole for hole in layout.holes if hole.file == file) if by_file else ()
        many = begins[TASK_COPIES::TASK_COPIES].tolist()
        cuts = [0, size] if by_file else sorted({*range(0, size, TASK_BYTES), *many, size, 0})
        for begin, end in pairwise(cuts):
            chosen = rows[np.searchsorted(ends, begin, "right") : np.searchsorted(begins, end, "left")]
            own = TaskCopies.of(copies, chosen, source_codes, sources, terms)
            parts = tuple(literals_between(literals, begin, end))
            numbers = np.unique(own.sources.rows[:, 1]).tolist()
            files = {number: (index.files[number], int(index.file_sizes[number])) for number in numbers}
            tasks.append(Task(len(tasks), name, size, begin, end, parts, own, files, holes))
    return tasks


def literals_between(
    literals: Sequence[tuple[int, bytes]], begin: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of what literals, in their order, have of bytes ``begin`` to ``end``."""
    first = bisect_right(literals, begin, key=lambda one: one[0] + len(one[1]))
    for offset, data in literals[first : bisect_left(literals, end, key=itemgetter(0))]:
        low = max(begin, offset)
        yield low, data[low - offset : end - offset]


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


# -- checksums -----------------------------------------------------------------------------------------------


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
        """Raise CheckpointError if a block of the output has no checksum, because it was not written, and
        FaultySumsError for sums that cannot be."""
        if missing := int((self._crcs == _UNKNOWN).sum()):
            raise CheckpointError(
                f"{missing} blocks of the output were not written; this is an error of dcphub"
            )
        refuse_faults(self.faults, self._engine.index)

    def blocks(self, copy: int) -> Int64:
        """Return CRC-32 of each block of a copy."""
        return self._crcs[self._start[copy] : self._start[copy + 1]]

    def whole(self, copy: int) -> int:
        """Return CRC-32 of all of a copy; its blocks must be known."""
        total, size = 0, int(self._sizes[copy])
        for number, crc in enumerate(self.blocks(copy).tolist()):
            total = crc32_combine(total, crc, min(BLOCK_BYTES, size - number * BLOCK_BYTES))
        return total


class FaultySumsError(PlanError):
    """Sums that cannot be: nothing that was written is of any use."""


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
