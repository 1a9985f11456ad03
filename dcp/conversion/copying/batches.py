"""Batches of tasks, carried out: by a stage of a job, or by a process that others give them to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from dcp.conversion.copying.checks import SourceChecks, refuse_faults
from dcp.conversion.copying.sinks import Output
from dcp.conversion.copying.tasks import (
    TASK_BYTES,
    TASK_COPIES,
    WINDOW_BYTES,
    Task,
    TaskBatch,
    TaskResult,
    run_task,
)
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointConflictError, StorageError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening.sources import Source, complete_index
from dcp.storage.formats.plain import encode_plain
from dcp.storage.stores.base import Store
from dcp.version import __version__

__all__ = ["BatchSettings", "SourceChangedError", "run_batch", "source_mark"]


class SourceChangedError(CheckpointConflictError):
    """The source has changed since the conversion was planned: it has to be converted anew."""


def source_mark(store: Store, index: CheckpointIndex, to: str) -> str:
    """Changes with the source's files, and with how this version converts to ``to``."""
    listing = {info.name: info for info in store.list()}
    facts = [
        (name, listing[name].size_bytes, listing[name].modified_seconds)
        for name in index.files
        if name in listing
    ]
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
        """The source, for whoever has to compare with its checksums. Raises SourceChangedError."""
        found = self.open_source()
        engine = ReadEngine(found.store, complete_index(found.store, found.index), verify=self.verify)
        self.refuse_changed(engine, found.name)
        return engine

    def refuse_changed(self, engine: ReadEngine, name: str) -> None:
        """SourceChangedError unless ``engine`` reads the source that the conversion was planned for."""
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
    output, result = settings.output, TaskResult(batch.number)
    with ExitStack() as stack:
        check = None
        # A file that is written in place has no name yet: whoever has all results compares in time.
        if not output.in_place and (settings.verify != "none" or batch.is_all):
            check = _comparison(settings, batch, engine or stack.enter_context(settings.open_engine()))
        for task in batch.tasks:
            result.add(_run_task(settings, task, on_bytes, check))
    if not output.in_place:
        output.store.sync()
    return result


def _comparison(
    settings: BatchSettings, batch: TaskBatch, engine: ReadEngine
) -> Callable[[TaskResult], None]:
    """Compares what is complete within the batch, before its files appear."""
    verifies, chunks, checks = settings.verify != "none", batch.chunks, SourceChecks(engine)
    if verifies:
        engine.resolve(chunks)

    def check(result: TaskResult) -> None:
        if verifies:
            checks.add(result.sources)
        if batch.is_all:  # nobody else reads the rest of a block, nor makes the rest of the target
            if verifies:
                checks.finish(chunks.tolist())
            refuse_faults(result.faults, engine.index)

    return check


def _run_task(
    settings: BatchSettings,
    task: Task,
    on_bytes: Callable[[int], None] | None,
    check: Callable[[TaskResult], None] | None,
) -> TaskResult:
    output, verify = settings.output, settings.verify != "none"
    place = task.name, task.begin, task.file_bytes
    try:
        sink = output.open(*place)
        return run_task(task, settings.store, sink, verify=verify, on_bytes=on_bytes, check=check)
    except StorageError:
        # Another attempt at this task has been quicker, and its file is what ours would have been.
        if not output.is_written(task.name):
            raise
        return run_task(task, settings.store, output.open(*place), verify=verify, check=check)
