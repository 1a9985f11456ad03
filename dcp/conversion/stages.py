"""A conversion in stages of which each may be carried out by another process, and again after a crash.

`StagedConversion.prepare` plans what there is to do, `run` does a part of it, `publish` makes the target
exist. Each gets what it needs of the plan as plain data (`dcp.conversion.wire`), and refuses a source that
has changed since. No stage needs the machine of another.

Every stage may be repeated, also while an earlier attempt at it still runs: a part writes the same bytes to
the same place, and the target is published once, by one rename or one conditional request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from dcp.conversion.copying.checks import SourceChecks, TargetChecksums
from dcp.conversion.copying.gather import RangeReader
from dcp.conversion.copying.tasks import Task, TaskResult, carry_out, make_tasks
from dcp.conversion.layouts.sources import copy_sources
from dcp.conversion.plan import (
    ConversionOptions,
    Planned,
    SourceChangedError,
    fingerprint,
    plan_target,
    refuse_itself,
    source_mark,
)
from dcp.conversion.publishing.staged_targets import save_id_of, staged_target
from dcp.conversion.report import ConversionReport, report_of
from dcp.conversion.targets.places import TargetPlace
from dcp.conversion.wire import decode_layout, decode_tasks, encode_layout, encode_tasks
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointError, StorageError
from dcp.storage.formats.sources import Source, complete_index

__all__ = [
    "PART_BYTES",
    "Prepared",
    "SourceChangedError",
    "StagedConversion",
    "TaskBatch",
    "discard_attempt",
]

PART_BYTES: Final = 512 << 20
"""What a part writes, about: enough that a process for it does not count beside it."""

_MAX_PARTS: Final = 512
_ATTEMPT: Final = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Number ``number`` of the independent parts: its ``tasks`` (see `encode_tasks`), which write
    ``size_bytes``. ``source_mark`` is that of the source that they were planned for, ``is_all`` whether there
    is just one task."""

    number: int
    is_all: bool
    source_mark: str
    size_bytes: int
    tasks: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """What publishing goes by; `to_json` and `of_json` are each other's inverse.

    ``layout`` as `encode_layout` makes it; ``chunks`` are those of the source that are read. ``inode`` is
    that of what will be renamed to the target, where that is local.
    """

    source_mark: str
    layout: str
    chunks: tuple[int, ...]
    part_count: int
    inode: int | None = None
    dropped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Prepared:
        """From plain data, whose sequences may be lists."""
        return cls(**{**data, "chunks": tuple(data["chunks"]), "dropped": tuple(data["dropped"])})


class StagedConversion:
    """A conversion of ``source`` to ``target``, where nothing may be yet; one stage of it is carried out.

    ``attempt`` is 16 hexadecimal digits, new for each preparation and the same in all stages after it;
    ``seconds`` is the time that the target says it was made at. Use as a context manager. Raises what
    `dcp.convert` raises, and SourceChangedError.
    """

    def __init__(
        self,
        source: Source,
        target: TargetPlace,
        options: ConversionOptions,
        *,
        attempt: str,
        seconds: float,
        verify: Verify = "blocks",
    ) -> None:
        if not _ATTEMPT.fullmatch(attempt):
            raise ValueError(f"attempt: must be 16 hexadecimal digits, not {attempt!r}")
        refuse_itself(source, target)
        self._source = source
        self._target = staged_target(target, attempt)
        self._options = options
        self._attempt = attempt
        self._save_id = save_id_of(attempt)
        self._seconds = seconds
        self._engine = ReadEngine(source.store, complete_index(source.store, source.index), verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.__exit__(kind, error, trace)

    # -- the stages ------------------------------------------------------------------------------------------

    def prepare(self) -> tuple[Prepared, list[TaskBatch]]:
        """Plan what there is to do, and reserve the space for it where that can be done.

        Raises CheckpointConflictError if something is at the target.
        """
        engine, to, by_file = self._engine, self._options.layout.to, self._target.place.path is None
        mark = source_mark(engine.store, engine.index, to)
        planned = self._plan()
        layout = planned.layout
        sources = copy_sources(engine, layout)
        parts = _parts(make_tasks(engine.index, layout, sources, by_file=by_file), mark)
        inode = self._target.reserve(
            layout, fingerprint(engine.store, engine.index, layout, to, by_file=by_file)
        )
        chunks = tuple(np.unique(sources.chunks).tolist())
        return Prepared(mark, encode_layout(layout), chunks, len(parts), inode, planned.dropped), parts

    def _plan(self) -> Planned:
        planned = plan_target(self._engine, self._target.place, self._options, self._save_id)
        index = planned.layout.index
        if index is None:
            return planned
        index = replace(index, provenance={**index.provenance, "time": self._seconds})
        return replace(planned, layout=replace(planned.layout, index=index))

    def run(self, part: TaskBatch, on_bytes: Callable[[int], None] | None = None) -> TaskResult:
        """Carry out ``part``; what it writes is durable when this returns.

        ``on_bytes`` hears of each window that is written. Source checksums that are complete within the part
        are compared before a file of an object store appears.
        """
        self._check_unchanged(part.source_mark)
        tasks = decode_tasks(part.tasks)
        chunks = np.unique(np.concatenate([task.copies.sources.chunks for task in tasks]))
        self._engine.resolve(chunks)
        checks = SourceChecks(self._engine)
        result = TaskResult(part.number)
        reader = RangeReader(self._source.store, verify=self._engine.verify != "none")
        try:
            for task in tasks:
                whole = chunks.tolist() if part.is_all else None
                result.add(self._carry_out(task, reader, checks, on_bytes, whole))
            self._target.note(part.number, [task.name for task in tasks])
        finally:
            reader.close()
        return result

    def _check_unchanged(self, mark: str) -> None:
        engine = self._engine
        if source_mark(engine.store, engine.index, self._options.layout.to) != mark:
            raise SourceChangedError(
                f"{self._source.name} has changed since its conversion was prepared; convert it again",
                path=self._source.name,
            )

    def _carry_out(
        self,
        task: Task,
        reader: RangeReader,
        checks: SourceChecks,
        on_bytes: Callable[[int], None] | None,
        whole: list[int] | None,
    ) -> TaskResult:
        def check(result: TaskResult) -> None:
            checks.add(result.sources)
            if whole is not None:  # behind an object store the file is the target, and appears now
                self._finish_checks(checks, whole)

        try:
            return carry_out(task, reader, self._target.sink(task), on_bytes=on_bytes, check=check)
        except StorageError:
            # Another attempt at this part has been quicker, and its file is what ours would have been.
            if not self._target.is_written(task):
                raise
            return carry_out(task, reader, self._target.sink(task), check=check)

    def _finish_checks(self, checks: SourceChecks, chunks: Sequence[int]) -> None:
        checks.finish(chunks if self._engine.verify != "none" else ())

    def publish(self, prepared: Prepared, results: Sequence[TaskResult]) -> ConversionReport:
        """Compare the last checksums, and make the target exist; fine if an earlier attempt has done so.

        Raises CheckpointConflictError if something else has come into being there.
        """
        self._check_unchanged(prepared.source_mark)
        self._engine.resolve(prepared.chunks)
        target, layout = self._target, decode_layout(prepared.layout)
        checks, checksums = SourceChecks(self._engine), TargetChecksums(layout.copies)
        for result in results:
            checks.add(result.sources)
            checksums.add(result.targets)
        if not target.is_published(layout, prepared.inode):
            self._finish_checks(checks, prepared.chunks)
            checksums.check_complete()
            try:
                target.publish(layout, checksums)
            except (CheckpointError, OSError):
                if not target.is_published(layout, prepared.inode):  # by another attempt, which was quicker
                    raise
        target.clear(prepared.part_count)
        return report_of(
            layout,
            checksums,
            checks.stats,
            source=self._source.name,
            target=target.place.url,
            format=self._options.layout.to,
            bytes_read=sum(result.bytes_read for result in results),
            tasks=prepared.part_count,
            dropped_objects=prepared.dropped,
        )


def _parts(tasks: Sequence[Task], mark: str) -> list[TaskBatch]:
    """Neighbouring tasks together, of about `PART_BYTES`, or of more if they were too many."""
    total = sum(task.end - task.begin for task in tasks)
    wanted = max(PART_BYTES, -(-total // _MAX_PARTS))
    parts: list[TaskBatch] = []
    own: list[Task] = []
    size = 0
    for task in tasks:
        own.append(task)
        size += task.end - task.begin
        if size >= wanted or task is tasks[-1]:
            parts.append(TaskBatch(len(parts), len(tasks) == 1, mark, size, encode_tasks(own)))
            own, size = [], 0
    return parts


def discard_attempt(target: TargetPlace, attempt: str, parts: int) -> None:
    """Remove what a conversion of ``parts`` parts that was given up has written; needs no source.

    A target that was published after all stays as it is. So do objects that are not of this attempt.
    """
    staged_target(target, attempt).discard(parts)
