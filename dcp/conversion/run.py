"""`convert`: a checkpoint of any format to a checkpoint of any other, in a few buffers of memory."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.conversion.contents.entries import TargetDtype
from dcp.conversion.copying.checks import SourceChecks, TargetChecksums
from dcp.conversion.copying.executors import open_executor
from dcp.conversion.copying.tasks import Task, TaskResult, TaskSettings, close_all, make_tasks, run_task
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.layouts.sources import SourceColumns, copy_sources
from dcp.conversion.plan import (
    ConversionOptions,
    LayoutOptions,
    SourceChangedError,
    fingerprint,
    plan_target,
    refuse_itself,
    with_save_id,
)
from dcp.conversion.publishing.publish import Publisher, publisher_of
from dcp.conversion.report import ConversionReport, report_of
from dcp.conversion.targets.job import Chunks
from dcp.conversion.targets.places import TargetPlace, place_of
from dcp.planners.load.selection import Patterns, Rename
from dcp.progress import ProgressCallback, reporting
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError
from dcp.storage.formats.sources import complete_index, open_source
from dcp.storage.stores.opening import OpenWith
from dcp.storage.stores.posix import PosixStore

__all__ = ["convert"]


@plain_errors
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: TargetDtype = None,
    shard_bytes: int | None = None,
    files: int = 1,
    chunks: Chunks = "keep",
    drop_objects: bool = False,
    overwrite: bool = False,
    executor: str | Executor = "processes",
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    verify: Verify = "blocks",
    progress: bool | ProgressCallback | None = None,
    resume: bool = True,
) -> ConversionReport:
    """Write the checkpoint ``source`` as ``target`` in the format ``to``; neither needs to fit into memory.

    The target is published in one step where its storage allows that. Source checksums are compared on the
    way. Values that are no plain data cannot go to ``torch`` and ``safetensors`` without running their
    pickles.

    Args:
        source: A path or URL: a checkpoint of ours or of stock torch, a torch.save file, a safetensors file,
            or a Hugging Face folder.
        target: Where it goes; refused if something is there, unless ``overwrite``.
        to: "dcp" (a folder that stock torch loads too), "torch" (one file for `torch.load`), or "safetensors"
            (one file if ``target`` ends so, else a Hugging Face folder), or whatever else is registered.
        only: Shell globs on the source's names: what they match, and everything below.
        exclude: The same for what is left out.
        rename: From the source's names to the target's: regular expressions with replacements, or a function.
        dtype: Floating-point tensors are converted to it; one name, or names by glob.
        shard_bytes: The size of a Hugging Face folder's shards.
        files: How many data files a "dcp" target has.
        chunks: "keep" has the source's chunks in a "dcp" target, "split" one of each tensor in each file.
        drop_objects: Leave out values that are no plain data, instead of refusing them.
        overwrite: Replace what is at the target.
        executor: "processes", "inline", "dask://host:port", or a `concurrent.futures.Executor` whose workers
            see both places.
        workers: How many processes; by default as many as cores, up to four.
        storage_options: Of the file system of the source's URL.
        target_options: Of the file system of the target's.
        verify: "none" compares no checksums of the source.
        progress: True for a bar, or a function that gets `dcp.progress.Progress`.
        resume: Go on with a conversion that was killed, where it was called in the same way on an unchanged
            source.

    Returns:
        What was written, and at what cost.

    Raises:
        CheckpointNotFoundError: There is no source.
        CheckpointConflictError: The target exists, or the source changed meanwhile.
        CorruptCheckpointError: Bytes of the source are not those that were committed.
        MissingKeyError: A pattern matches nothing.
        PlanError: An option cannot be meant, or the format cannot hold a value.
        StorageError: The storage failed; `StorageFullError` where it is full.
    """
    begun = time.perf_counter()
    opened = OpenWith(storage_options)
    place = place_of(target, to, OpenWith(target_options))
    if place.path is not None and not overwrite:
        place.refuse_existing()
    found = open_source(source, open_store=opened)
    store, index = found.store, complete_index(found.store, found.index)
    refuse_itself(found, place)
    layout = LayoutOptions(to, files, chunks, shard_bytes, drop_objects)
    options = ConversionOptions(layout, only, exclude, rename, dtype)
    with ReadEngine(store, index, verify=verify) as engine:
        save_id = uuid.uuid4().hex[:8]
        planned = plan_target(engine, place, options, save_id)
        publisher = publisher_of(place, overwrite=overwrite)
        work = _Work(engine, place, planned.layout, save_id, to, publisher, found.name)
        if not (store.capabilities.is_shared and place.store.capabilities.is_shared):
            executor = "inline"  # a store that is in this process alone
        try:
            with work.clearing_up(resume=resume):
                work.begin(resume=resume, overwrite=overwrite)
                work.plan(copy_sources(engine, work.layout))
                settings = TaskSettings(
                    source_url=store.url,
                    open_source=opened,
                    target_folder=publisher.folder,
                    open_target=OpenWith(target_options),
                    is_local=place.path is not None,
                    verify=verify != "none",
                    replace=overwrite,
                )
                work.run(settings, executor, workers, progress)
            work.finish()
        finally:
            work.publisher.ledger.close()
            close_all()
    work.seconds["total"] = time.perf_counter() - begun
    return work.report(planned.dropped)


def _results(entries: list[bytes]) -> list[TaskResult] | None:
    """What a ledger has noted; None if that is not to be read."""
    try:
        return [TaskResult.decode(entry) for entry in entries]
    except CheckpointFormatError:
        return None


@dataclass
class _Work:
    """One conversion on its way."""

    engine: ReadEngine
    place: TargetPlace
    layout: TargetLayout
    save_id: str
    to: str
    publisher: Publisher
    source: str
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begun = time.perf_counter()
        self._planned = self.layout
        self._tasks: list[Task] = []
        self._done: dict[int, TaskResult] = {}
        self._resumed = 0
        self._bytes_read = 0
        self._is_open = self._has_progress = False

    @contextmanager
    def clearing_up(self, *, resume: bool) -> Iterator[None]:
        """On a failure, or an interruption, nothing stays that the next run could not go on from."""
        try:
            yield
        except BaseException:
            # Files in a store, which are whole, stay: another conversion could be writing them, too.
            if self._is_open and self.place.path is not None and not (resume and self._has_progress):
                self._discard()
            raise

    def _discard(self) -> None:
        self._is_open = False
        self.publisher.discard()

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        """Find out what is done already, and have files to write to."""
        ledger = self.publisher.ledger
        mark = self._mark = self._fingerprint()
        if self.place.path is not None:
            PosixStore(self.place.path.parent).make_root()
        resumed = ledger.open(mark if resume else f"{mark}-{self.save_id}", self.save_id)
        self._is_open = True
        if not resumed and not overwrite:
            self.place.refuse_existing()
        layout = with_save_id(self.layout, self.save_id, ledger.save_id)
        done = _results(ledger.done)
        if done is None or not self.publisher.prepare(layout, resumed=resumed):
            ledger.remove()
            ledger.open(mark, self.save_id)
            done, layout = [], self.layout
            self.publisher.prepare(layout, resumed=False)
        self.layout = layout
        self._done = {result.number: result for result in done}
        self._has_progress = bool(self._done)

    def _fingerprint(self) -> str:
        engine, by_file = self.engine, self.place.path is None
        return fingerprint(engine.store, engine.index, self._planned, self.to, by_file=by_file)

    def plan(self, sources: SourceColumns) -> None:
        """Cut the work into tasks."""
        self._chunks = np.unique(sources.chunks).tolist()
        self._tasks = make_tasks(self.engine.index, self.layout, sources, by_file=self.place.path is None)
        self._checks = SourceChecks(self.engine)
        self._checksums = TargetChecksums(self.layout.copies)
        self._resumed = len(self._done)
        for result in self._done.values():
            self._checks.add(result.sources)
            self._checksums.add(result.targets)
        self.seconds["plan"] = time.perf_counter() - self._begun

    def run(
        self,
        settings: TaskSettings,
        executor: str | Executor,
        workers: int | None,
        progress: bool | ProgressCallback | None,
    ) -> None:
        """Carry out what is not done."""
        begun = time.perf_counter()
        todo = [task for task in self._tasks if task.number not in self._done]
        total = sum(task.end - task.begin for task in todo)
        if workers is None and executor == "processes" and len(todo) < 2:
            executor = "inline"  # a process costs more than one task
        with (
            reporting(progress, "convert", total, show=True) as on_bytes,
            open_executor(executor, workers) as (pool, at_once),
        ):
            waiting = iter(todo)
            pending: dict[Future[bytes], Task] = {}
            try:
                while True:
                    while len(pending) < at_once and (task := next(waiting, None)) is not None:
                        pending[pool.submit(run_task, settings, task)] = task
                    if not pending:
                        break
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        task = pending.pop(future)
                        self._take(future.result(), task.name)
                        if on_bytes is not None:
                            on_bytes(task.end - task.begin)
            except BaseException:
                for future in pending:
                    future.cancel()
                raise
        self.seconds["copy"] = time.perf_counter() - begun

    def _take(self, data: bytes, file: str) -> None:
        result = TaskResult.decode(data)
        try:
            self._checks.add(result.sources)
        except CorruptCheckpointError:
            # Whatever was read wrong, and when: nothing of it may be believed the next time.
            self._discard()
            raise
        self.publisher.ledger.append(data, file)
        self._has_progress = True
        self._checksums.add(result.targets)
        self._bytes_read += result.bytes_read

    def finish(self) -> None:
        """Compare the last checksums, and publish."""
        begun = time.perf_counter()
        try:
            self._checks.finish(self._chunks if self.engine.verify != "none" else ())
        except CorruptCheckpointError:
            self.publisher.discard()
            raise
        self._checksums.check_complete()
        self._check_source()
        self.publisher.publish(self.layout, self._checksums)
        self.publisher.ledger.remove()
        self.seconds["publish"] = time.perf_counter() - begun

    def _check_source(self) -> None:
        """What has no checksums must not have been replaced while it was read: files of both might be
        mixed."""
        compared = self.engine.verify != "none" and not self._checks.stats.blocks_unverified
        if compared or self._fingerprint() == self._mark:
            return
        self.publisher.discard()
        raise SourceChangedError(
            f"{self.source} has changed while it was converted; convert it again", path=self.source
        )

    def report(self, dropped: tuple[str, ...]) -> ConversionReport:
        """What was done."""
        return report_of(
            self.layout,
            self._checksums,
            self._checks.stats,
            source=self.source,
            target=self.place.url,
            format=self.to,
            bytes_read=self._bytes_read,
            tasks=len(self._tasks),
            tasks_resumed=self._resumed,
            dropped_objects=dropped,
            seconds=dict(self.seconds),
        )
