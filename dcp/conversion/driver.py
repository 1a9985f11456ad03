"""A conversion: prepared, its batches of tasks carried out by whatever executor, published.

`Conversion.prepare` plans what there is to do, once. The batches run in any order, in this process or in
others (`Conversion.run`, `dcp.conversion.copying.batches.run_batch`), and `publish` makes the target exist.
Stages of another process get what they need of the plan as plain data (`to_json`, `of_json`), and refuse a
source that has changed since. No stage needs the machine of another.

Every stage may be repeated, also while an earlier attempt at it still runs: a task writes the same bytes to
the same place, and the target is published once, by one rename or one conditional request.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dcp.conversion.copying.batches import BatchRunner, BatchSettings
from dcp.conversion.copying.checks import ResultChecks, refuse_faults
from dcp.conversion.copying.sinks import Output
from dcp.conversion.copying.source_marks import refuse_changed, source_mark
from dcp.conversion.copying.tasks import TaskBatch, TaskResult, make_batches, make_tasks
from dcp.conversion.layouts.columns import SourceColumns
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.layouts.sources import copy_sources, sum_sources
from dcp.conversion.layouts.terms import TermColumns
from dcp.conversion.plan import (
    ConversionOptions,
    Planned,
    fingerprint,
    plan_target,
    refuse_itself,
)
from dcp.conversion.publishing.publisher import Publisher
from dcp.conversion.report import ConversionReport, report_of
from dcp.conversion.targets.places import TargetPlace
from dcp.conversion.wire import decode_layout, encode_layout
from dcp.storage.closable import Closable
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointConflictError, CheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.format import DCP
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.formats.opening.sources import Source, complete_index

__all__ = ["BATCH_BYTES", "Conversion", "Prepared", "discard_attempt"]

BATCH_BYTES: Final = 512 << 20
"""What a batch of a job writes, about: enough that a process for it does not count beside it."""

_OF_A_RUN: Final = ("time", "dcphub_version")
"""In the provenance of a ``dcp`` target: they differ each time."""

_ATTEMPT: Final = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What publishing goes by; `to_json` and `of_json` are each other's inverse, but for literals.

    ``chunks`` are those of the source that are read. ``inode`` is that of what will be renamed to the target,
    where that is local. ``dropped`` are the values that the target has no place for, ``unmerged`` the tensors
    of a merge that are those of its first source.
    """

    source_mark: str
    layout: TargetLayout
    chunks: tuple[int, ...]
    batch_count: int
    inode: int | None = None
    dropped: tuple[str, ...] = ()
    unmerged: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__} | {"layout": encode_layout(self.layout)}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Prepared:
        """From plain data, whose sequences may be lists."""
        sequences = {name: tuple(data.get(name, ())) for name in ("chunks", "dropped", "unmerged")}
        return cls(**{**data, **sequences, "layout": decode_layout(data["layout"])})


class Conversion(Closable):
    """A conversion of ``source`` to ``target``.

    ``attempt`` is 16 hexadecimal digits, new for each preparation and the same in all stages after it; such a
    target is never replaced, and its stages may be of several processes. Without it all stages are of this
    object, and a ledger beside the target has what is done. Use as a context manager. Raises what
    `dcp.convert` raises, and SourceChangedError.
    """

    def __init__(
        self,
        source: Source,
        target: TargetPlace,
        options: ConversionOptions,
        *,
        attempt: str = "",
        overwrite: bool = False,
        verify: Verify = "blocks",
    ) -> None:
        refuse_itself(source, target)
        self._source = source
        self._options = options
        self.place = _place_of_attempt(target, attempt) if attempt else target
        self._save_id = _save_id_of(attempt) if attempt else uuid.uuid4().hex[:8]
        self.publisher = Publisher(self.place, self._save_id, overwrite=overwrite)
        self._engine = ReadEngine(source.store, complete_index(source.store, source.index), verify=verify)
        self._prepared: Prepared | None = None
        self._checks: ResultChecks | None = None
        self.has_progress = False

    def close(self) -> None:
        """Close the ledger and the source's files."""
        self.publisher.ledger.close()
        self._engine.close()

    # -- the stages ------------------------------------------------------------------------------------------

    def prepare(self, *, batch_bytes: int = 0, resume: bool = True) -> tuple[Prepared, list[TaskBatch]]:
        """Plan what there is to do, and reserve the space for it where that can be done: the batches that are
        left, with ``resume`` without those that an earlier run has done.

        Raises CheckpointConflictError if something is at the target.
        """
        engine, to, by_file = self._engine, self._options.layout.to, self.place.path is None
        mark = source_mark(engine.store, engine.index, to)
        planned = plan_target(engine, self._source, self.place, self._options, self._save_id)
        identity = fingerprint(mark, planned, by_file=by_file) + ("" if resume else self._save_id)
        layout, done = self.publisher.begin(planned.layout, identity)
        mapped, merged = planned.mapped, planned.merged
        sources, terms = _sources(engine, layout, planned)
        codes = (mapped.index if mapped else engine.index).dtype_codes
        tasks = make_tasks(engine.index, layout, sources, codes, terms, by_file=by_file)
        batches = make_batches(tasks, batch_bytes)
        chunks = tuple(np.unique(sources.chunks).tolist())
        unmerged = merged.unmerged if merged is not None else ()
        inode = self.publisher.inode
        prepared = Prepared(mark, layout, chunks, len(batches), inode, planned.dropped, unmerged)
        self._prepared, self._checks = prepared, ResultChecks(engine, layout.copies)
        for result in done:
            self._checks.add(replace(result, bytes_read=0))  # by another run
        self.has_progress = bool(done)
        numbers = {result.number for result in done}
        left = [batch for batch in batches if batch.number not in numbers]
        if left:
            self.publisher.refuse_local()
        return prepared, left

    def run(
        self, batch: TaskBatch, source_mark: str, on_bytes: Callable[[int], None] | None = None
    ) -> TaskResult:
        """Carry ``batch`` out, which was planned for the source of ``source_mark``; what it writes is durable
        when this returns. ``on_bytes`` hears of each window that is written."""
        engine, publisher = self._engine, self.publisher
        self._refuse_changed(source_mark)
        with (
            publisher.noted(batch),
            closing(BatchRunner(engine.store, publisher.output, lambda: engine, engine.verify)) as runner,
        ):
            return runner.run(batch, on_bytes)

    def settings(self, prepared: Prepared, open_source: Callable[[], Source]) -> BatchSettings:
        """For `run_batch` in other processes, which ``open_source`` for themselves."""
        return BatchSettings(
            conversion=self._save_id,
            open_source=open_source,
            store=self._source.store,
            to=self._options.layout.to,
            source_mark=prepared.source_mark,
            output=self.publisher.output,
            verify=self._engine.verify,
        )

    def take(self, prepared: Prepared, batch: TaskBatch, result: bytes) -> None:
        """Note what `run_batch` returned, and compare what was read: CorruptCheckpointError if it differs."""
        self.publisher.ledger.append(result, batch.file_names)
        self.publisher.take(batch)
        self.has_progress = True
        self._checks_of(prepared).add(TaskResult.decode(result))

    def publish(self, prepared: Prepared, results: Iterable[TaskResult] = ()) -> ConversionReport:
        """Compare the last checksums, and make the target exist; fine if an earlier attempt has done so.

        ``results`` are those that were not taken. Raises CheckpointConflictError if something else has come
        into being there.
        """
        engine, publisher, layout = self._engine, self.publisher, prepared.layout
        checks = self._checks_of(prepared)
        for result in results:
            checks.add(result)
        checks.source.finish(prepared.chunks if engine.verify != "none" else ())
        checks.target.check_complete()
        refuse_faults(checks.faults, engine.index)
        if engine.verify == "none" or checks.source.stats.blocks_unverified:
            # What has no checksums must not have been replaced: files of both might be mixed.
            self._refuse_changed(prepared.source_mark)
        if not publisher.is_published(layout, prepared.inode):
            try:
                publisher.publish(layout, checks.target)
            except (CheckpointError, OSError) as error:
                is_committed = isinstance(error, CheckpointError) and error.committed
                if is_committed or not publisher.is_published(layout, prepared.inode):  # by a quicker attempt
                    raise
        publisher.make_durable()
        publisher.clear(prepared.batch_count)
        facts = {"tasks": prepared.batch_count, "dropped_objects": prepared.dropped}
        return self._report(layout, checks, unmerged=prepared.unmerged, **facts)

    def of_finished(self) -> ConversionReport | None:
        """The report on a target that is there, if it is what this conversion would make, to the last byte;
        else None. Writes nothing."""
        engine, store, to = self._engine, self.place.store, self._options.layout.to
        there = None
        if to == DCP.name:
            try:
                there = open_index(store)
            except CheckpointError:
                return None
            self._save_id = str(there.provenance.get("save_id"))
        planned = plan_target(engine, self._source, self.place, self._options, self._save_id)
        layout, mapped = planned.layout, planned.mapped
        publisher = Publisher(self.place, self._save_id)
        inode = self.place.path.stat().st_ino if self.place.path is not None else None
        if not publisher.is_published(layout, inode) or not _is_same(layout.index, there):
            return None
        sources, terms = _sources(engine, layout, planned)
        codes = (mapped.index if mapped else engine.index).dtype_codes
        tasks = make_tasks(engine.index, layout, sources, codes, terms, by_file=True)
        checks = ResultChecks(engine, layout.copies)
        output = Output(store, in_place=False)  # whose files are there, and are compared
        with closing(BatchRunner(engine.store, output, lambda: engine, engine.verify)) as runner:
            for batch in make_batches(tasks, 0):
                try:
                    checks.add(runner.run(batch))
                except CheckpointConflictError:
                    return None
        merged = planned.merged.unmerged if planned.merged is not None else ()
        facts = {"tasks": len(tasks), "tasks_resumed": len(tasks), "dropped_objects": planned.dropped}
        return self._report(layout, checks, unmerged=merged, **facts)

    def _report(self, layout: TargetLayout, checks: ResultChecks, **facts: Any) -> ConversionReport:
        facts |= {"source": self._source.name, "target": self.place.url, "bytes_read": checks.bytes_read}
        facts["format"] = self._options.layout.to
        return report_of(layout, checks.target, checks.source.stats, **facts)

    def discard(self) -> None:
        """Remove what this object has begun."""
        if self.publisher.has_begun:
            self.publisher.discard(0)

    def _refuse_changed(self, mark: str) -> None:
        refuse_changed(self._engine, self._options.layout.to, mark, self._source.name)

    def _checks_of(self, prepared: Prepared) -> ResultChecks:
        if self._checks is None or self._prepared is not prepared:  # by another process
            self._refuse_changed(prepared.source_mark)
            self._engine.resolve(prepared.chunks)
            self._checks = ResultChecks(self._engine, prepared.layout.copies)
        return self._checks


def _sources(
    engine: ReadEngine, layout: TargetLayout, planned: Planned
) -> tuple[SourceColumns, TermColumns | None]:
    if planned.merged is not None:
        merged = planned.merged
        return sum_sources(engine, layout.copies, merged.terms, merged.accumulate, merged.mapped)
    return copy_sources(engine, layout, planned.mapped.tensors if planned.mapped else None), None


def _is_same(made: CheckpointIndex | None, there: CheckpointIndex | None) -> bool:
    """Whether two indexes tell of the same tensors and values at the same places; checksums of blocks and
    digests follow from the bytes."""
    if made is None or there is None:
        return made is there
    made, there = (
        replace(
            index,
            provenance={key: value for key, value in index.provenance.items() if key not in _OF_A_RUN},
            crc_start=np.zeros(len(index.crc_start), np.int64),
            crcs=np.zeros(0, np.uint32),
            digests=(),
            torch_metadata_crc=None,
        )
        for index in (made, there)
    )
    return encode_manifest(made) == encode_manifest(there)


def _save_id_of(attempt: str) -> str:
    """The save id of a ``dcp`` target that the attempt makes."""
    return hashlib.sha256(attempt.encode()).hexdigest()[:8]


def _place_of_attempt(target: TargetPlace, attempt: str) -> TargetPlace:
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt: must be 16 hexadecimal digits, not {attempt!r}")
    return replace(target, attempt=attempt)


def discard_attempt(target: TargetPlace, attempt: str, batches: int) -> None:
    """Remove what a conversion of ``batches`` batches that was given up has written; needs no source.

    A target that was published after all stays as it is. So do objects that are not of this attempt.
    """
    Publisher(_place_of_attempt(target, attempt), _save_id_of(attempt)).discard(batches)
