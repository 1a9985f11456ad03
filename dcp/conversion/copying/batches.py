"""Batches of tasks carried out: by a stage of a job, or by a process that others give them to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from dcp.conversion.copying.checks import SourceChecks, refuse_faults
from dcp.conversion.copying.gather import RangeReader
from dcp.conversion.copying.sinks import Output
from dcp.conversion.copying.source_marks import refuse_changed
from dcp.conversion.copying.tasks import Task, TaskBatch, TaskResult, carry_out
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import StorageError
from dcp.storage.formats.opening.sources import Source, complete_index
from dcp.storage.stores.base import Store

__all__ = ["BatchRunner", "BatchSettings", "close_all", "run_batch"]

Check = Callable[[TaskResult], None]


class BatchRunner:
    """Carries out batches of one conversion, one at a time. ``open_engine`` is for who has to compare."""

    def __init__(
        self, store: Store, output: Output, open_engine: Callable[[], ReadEngine], verify: Verify
    ) -> None:
        self._output = output
        self._open_engine = open_engine
        self._verifies = verify != "none"
        self._reader = RangeReader(store, verify=self._verifies)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def run(self, batch: TaskBatch, on_bytes: Callable[[int], None] | None = None) -> TaskResult:
        """What ``batch`` writes is durable when this returns. ``on_bytes`` hears of each window."""
        # A file that is written in place has no name yet: whoever has all results compares in time.
        check = None if self._output.in_place else self._comparison(batch)
        result = TaskResult(batch.number)
        for task in batch.tasks:
            result.add(self._carry_out(task, on_bytes, check))
        if not self._output.in_place:
            self._output.store.sync()
        return result

    def _comparison(self, batch: TaskBatch) -> Check:
        """Compares what is complete within the batch, before its files appear."""
        if not self._verifies:
            return lambda result: self._refuse_faults(batch, result)
        engine, chunks = self._open_engine(), batch.chunks
        engine.resolve(chunks)
        checks = SourceChecks(engine)

        def check(result: TaskResult) -> None:
            checks.add(result.sources)
            if batch.is_all:  # nobody else reads the rest of a block: it must not appear before that
                checks.finish(chunks.tolist())
            self._refuse_faults(batch, result)

        return check

    def _refuse_faults(self, batch: TaskBatch, result: TaskResult) -> None:
        """Of a file that is the whole target, before it appears; else whoever publishes has all of them."""
        if batch.is_all and result.faults:
            refuse_faults(result.faults, self._open_engine().index)

    def _carry_out(
        self, task: Task, on_bytes: Callable[[int], None] | None, check: Check | None
    ) -> TaskResult:
        place = task.name, task.begin, task.file_bytes
        try:
            return carry_out(task, self._reader, self._output.open(*place), on_bytes=on_bytes, check=check)
        except StorageError:
            # Another attempt at this task has been quicker, and its file is what ours would have been.
            if not self._output.is_written(task.name):
                raise
            return carry_out(task, self._reader, self._output.open(*place), check=check)


@dataclass(frozen=True)
class BatchSettings:
    """What all batches of a conversion share, for processes that know no more of it.

    ``conversion`` names it in a process that has to do with several; ``store`` is the one of the source that
    ``open_source`` opens, whose mark, as a source of the format ``to``, is ``source_mark``.
    """

    conversion: str
    open_source: Callable[[], Source]
    store: Store
    to: str
    source_mark: str
    output: Output
    verify: Verify


class _ProcessRunner(BatchRunner):
    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        super().__init__(settings.store, settings.output, lambda: self._engine, settings.verify)

    @cached_property
    def _engine(self) -> ReadEngine:
        settings = self._settings
        found = settings.open_source()
        engine = ReadEngine(found.store, complete_index(found.store, found.index), verify=settings.verify)
        refuse_changed(engine, settings.to, settings.source_mark, found.name)
        return engine

    def close(self) -> None:
        super().close()
        if "_engine" in vars(self):
            self._engine.close()


_idle: dict[str, list[_ProcessRunner]] = {}
"""What this process has open for the conversion at hand, and no batch is using."""

_lock = threading.Lock()


def run_batch(settings: BatchSettings, batch: TaskBatch) -> bytes:
    """Carry ``batch`` out; the encoded `TaskResult`."""
    with _runner(settings) as runner:
        return runner.run(batch).encode()


def close_all() -> None:
    """Close what batches have left open in this process."""
    with _lock:
        left = [runner for runners in _idle.values() for runner in runners]
        _idle.clear()
    for runner in left:
        runner.close()


@contextmanager
def _runner(settings: BatchSettings) -> Iterator[BatchRunner]:
    """One of the conversion, for this batch alone: other threads may be at others."""
    with _lock:
        known = settings.conversion in _idle
        free = _idle.setdefault(settings.conversion, [])
        runner = free.pop() if free else None
    if not known and len(_idle) > 1:  # a worker of a cluster goes from one to the next
        close_all()
    if runner is None:
        runner = _ProcessRunner(settings)
    try:
        yield runner
    except BaseException:
        runner.close()
        raise
    with _lock:
        _idle.setdefault(settings.conversion, []).append(runner)
