"""A conversion in stages of which each may be carried out by another process, and again after a crash.

`StagedConversion.prepare` finds out what there is to do, `run` does a part of it, `publish` makes the target
exist. Between them go a few numbers and checksums (plain JSON): each stage makes the layout anew from the
source, and refuses a source that has changed since. So nothing that was read from a storage is trusted, and
no stage needs the machine of another.

Every stage may be repeated, also while an earlier attempt at it still runs: a part writes the same bytes to
the same place, and the target is published once, by one rename or one conditional request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from dcp.conversion.checks import SourceChecks, TargetChecksums
from dcp.conversion.entries import TargetDtype, choose_entries
from dcp.conversion.gather import Gatherer
from dcp.conversion.parts import PartResult
from dcp.conversion.plan import (
    LayoutOptions,
    Planned,
    SourceChangedError,
    fingerprint,
    plan_layout,
)
from dcp.conversion.report import ConversionReport
from dcp.conversion.sources import copy_sources
from dcp.conversion.staged_targets import save_id_of, staged_target
from dcp.conversion.targets.places import TargetPlace
from dcp.conversion.tasks import Task, TaskResult, carry_out, make_tasks
from dcp.planners.load.selection import Patterns, Rename
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointError, OptionError, StorageError
from dcp.storage.formats.sources import Source, complete_index

__all__ = [
    "PART_BYTES",
    "Prepared",
    "SourceChangedError",
    "StageOptions",
    "StagedConversion",
    "discard_attempt",
]

PART_BYTES: Final = 512 << 20
"""What a part writes, about: enough that making the layout anew does not count beside it."""

_MAX_PARTS: Final = 512
_ATTEMPT: Final = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of `dcp.convert` that decide what the target holds."""

    layout: LayoutOptions
    only: Patterns | None = None
    exclude: Patterns | None = None
    rename: Rename | None = None
    dtype: TargetDtype = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all later stages go by; `to_json` and `of_json` are each other's inverse.

    ``parts`` are (first task, last task, bytes): independent of each other. ``attempt`` names this
    preparation. ``inode`` is that of what will be renamed to the target, where that is local.
    """

    attempt: str
    seconds: float
    fingerprint: str
    parts: tuple[tuple[int, int, int], ...]
    inode: int | None = None
    dropped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Prepared:
        """From plain data, whose sequences may be lists."""
        parts = tuple((int(first), int(last), int(size)) for first, last, size in data["parts"])
        return cls(**{**data, "parts": parts, "dropped": tuple(data["dropped"])})


@dataclass
class _Layout:
    """What every stage has to find out again."""

    planned: Planned
    tasks: list[Task]
    chunks: list[int]
    fingerprint: str


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
        options: StageOptions,
        *,
        attempt: str,
        seconds: float,
        verify: Verify = "blocks",
    ) -> None:
        if not _ATTEMPT.fullmatch(attempt):
            raise ValueError(f"attempt: must be 16 hexadecimal digits, not {attempt!r}")
        if source.store.url == target.store.url and source.file == target.file_name:
            raise OptionError(f"source and target are both {target.url}; convert to another place")
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

    # -- the layout ------------------------------------------------------------------------------------------

    @cached_property
    def _layout(self) -> _Layout:
        options, engine, place = self._options, self._engine, self._target.place
        entries = choose_entries(
            engine.index,
            only=options.only,
            exclude=options.exclude,
            rename=options.rename,
            dtype=options.dtype,
        )
        planned = plan_layout(entries, engine, place, options.layout, self._save_id)
        planned.layout.check()
        if planned.layout.index is not None:
            index = planned.layout.index
            provenance = {**index.provenance, "time": self._seconds}
            planned = replace(
                planned, layout=replace(planned.layout, index=replace(index, provenance=provenance))
            )
        by_file = place.path is None
        sources = copy_sources(engine, planned.layout)
        mark = fingerprint(engine.store, engine.index, planned.layout, options.layout.to, by_file=by_file)
        return _Layout(
            planned,
            make_tasks(engine.index, planned.layout, sources, by_file=by_file),
            np.unique(sources.chunks).tolist(),
            mark,
        )

    def _check_unchanged(self, prepared: Prepared) -> None:
        if self._layout.fingerprint != prepared.fingerprint:
            raise SourceChangedError(
                f"{self._source.name} has changed since its conversion was prepared; convert it again",
                path=self._source.name,
            )

    # -- the stages ------------------------------------------------------------------------------------------

    def prepare(self) -> Prepared:
        """Find out what there is to do, and reserve the space for it where that can be done.

        Raises CheckpointConflictError if something is at the target.
        """
        layout = self._layout
        inode = self._target.reserve(layout.planned.layout, layout.fingerprint)
        return Prepared(
            self._attempt,
            self._seconds,
            layout.fingerprint,
            _parts(layout.tasks),
            inode,
            layout.planned.dropped,
        )

    def run(
        self,
        prepared: Prepared,
        part: int,
        on_bytes: Callable[[int], None] | None = None,
        *,
        number: int | None = None,
    ) -> PartResult:
        """Carry out ``prepared.parts[part]``; what it writes is durable when this returns.

        ``number`` is that of the part among all, where ``prepared`` has only some of them. ``on_bytes`` hears
        of each stretch that is written. Source checksums that are complete within the part
        are compared before a file of an object store appears.
        """
        self._check_unchanged(prepared)
        first, last, _ = prepared.parts[part]
        checks = SourceChecks(self._engine)
        result = PartResult(part if number is None else number)
        gatherer = Gatherer(self._source.store, verify=self._engine.verify != "none")
        try:
            for task in self._layout.tasks[first : last + 1]:
                done = self._carry_out(task, gatherer, checks, on_bytes, is_all=len(self._layout.tasks) == 1)
                result.add(done)
            self._target.note(result.part, [task.name for task in self._layout.tasks[first : last + 1]])
        finally:
            gatherer.close()
        return result

    def _carry_out(
        self,
        task: Task,
        gatherer: Gatherer,
        checks: SourceChecks,
        on_bytes: Callable[[int], None] | None,
        *,
        is_all: bool,
    ) -> TaskResult:
        def check(result: TaskResult) -> None:
            checks.add(result.sources)
            if is_all:  # behind an object store the file is the target, and appears now
                self._finish_checks(checks)

        try:
            return carry_out(task, gatherer, self._target.sink(task), on_bytes=on_bytes, check=check)
        except StorageError:
            # Another attempt at this part has been quicker, and its file is what ours would have been.
            if not self._target.is_written(task):
                raise
            return carry_out(task, gatherer, self._target.sink(task), check=check)

    def _finish_checks(self, checks: SourceChecks) -> None:
        checks.finish(self._layout.chunks if self._engine.verify != "none" else ())

    def publish(self, prepared: Prepared, results: Sequence[PartResult]) -> ConversionReport:
        """Compare the last checksums, and make the target exist; fine if an earlier attempt has done so.

        Raises CheckpointConflictError if something else has come into being there.
        """
        self._check_unchanged(prepared)
        checks = SourceChecks(self._engine)
        checksums = TargetChecksums(self._layout.planned.layout.copies)
        for result in results:
            checks.add(result.sources)
            checksums.add(result.targets)
        target, layout = self._target, self._layout.planned.layout
        if not target.is_published(layout, prepared.inode):
            self._finish_checks(checks)
            checksums.check_complete()
            try:
                target.publish(layout, checksums)
            except (CheckpointError, OSError):
                if not target.is_published(layout, prepared.inode):  # by another attempt, which was quicker
                    raise
        target.clear(len(prepared.parts))
        return self._report(prepared, results, checks, checksums)

    def _report(
        self,
        prepared: Prepared,
        results: Sequence[PartResult],
        checks: SourceChecks,
        checksums: TargetChecksums,
    ) -> ConversionReport:
        layout = self._layout.planned.layout
        return ConversionReport(
            source=self._source.name,
            target=self._target.place.url,
            format=self._options.layout.to,
            files=(*layout.file_names, *layout.last_files),
            tensor_count=len(layout.tensor_copies) if layout.index is None else layout.index.tensor_count,
            bytes_read=sum(result.bytes_read for result in results),
            bytes_written=sum(layout.file_sizes),
            tasks=len(prepared.parts),
            blocks_verified=checks.stats.blocks_verified,
            blocks_unverified=checks.stats.blocks_unverified,
            dropped_objects=prepared.dropped,
            checksums={fqn: checksums.whole(copy) for fqn, copy in layout.tensor_copies.items()},
        )


def _parts(tasks: Sequence[Task]) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring tasks together, of about `PART_BYTES`, or of more if they were too many."""
    total = sum(task.end - task.begin for task in tasks)
    wanted = max(PART_BYTES, -(-total // _MAX_PARTS))
    parts: list[tuple[int, int, int]] = []
    first = size = 0
    for task in tasks:
        size += task.end - task.begin
        if size >= wanted or task.number == len(tasks) - 1:
            parts.append((first, task.number, size))
            first, size = task.number + 1, 0
    return tuple(parts)


def discard_attempt(target: TargetPlace, attempt: str, parts: int) -> None:
    """Remove what a conversion of ``parts`` parts that was given up has written; needs no source.

    A target that was published after all stays as it is. So do objects that are not of this attempt.
    """
    staged_target(target, attempt).discard(parts)
