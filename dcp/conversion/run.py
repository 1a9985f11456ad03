"""`convert`: a checkpoint of any format to a checkpoint of any other, in a few buffers of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dcp.calls.plain_errors import plain_errors
from dcp.conversion.contents.entries import TargetDtype
from dcp.conversion.contents.hf_folder import read_hf_folder
from dcp.conversion.copying.batches import BatchSettings, close_all, run_batch
from dcp.conversion.copying.checks import FaultySumsError
from dcp.conversion.copying.executors import open_executor
from dcp.conversion.copying.source_marks import SourceChangedError
from dcp.conversion.copying.tasks import TaskBatch
from dcp.conversion.driver import Conversion
from dcp.conversion.plan import ConversionOptions, LayoutOptions, with_template
from dcp.conversion.report import ConversionReport
from dcp.conversion.targets.job import Chunks
from dcp.conversion.targets.places import TargetPlace, place_of
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback, reporting
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointError, CorruptCheckpointError, OptionError, StorageError
from dcp.storage.formats.opening.sources import Source, open_source
from dcp.storage.stores.opening import OpenWith

__all__ = ["Means", "convert", "run_conversion"]


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
    map: WeightMap | Mapping[str, Any] | str | None = None,
    shard_bytes: int | None = None,
    files: int = 1,
    chunks: Chunks = "keep",
    hf: str | os.PathLike[str] | None = None,
    hf_also: Sequence[str] = (),
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
        target: Where it goes; refused if something else is there, unless ``overwrite``.
        to: "dcp" (a folder that stock torch loads too), "torch" (one file for `torch.load`), or "safetensors"
            (one file if ``target`` ends so, else a Hugging Face folder), or whatever else is registered.
        only: Shell globs on the source's names: what they match, and everything below.
        exclude: The same for what is left out.
        rename: From the source's names to the target's: regular expressions with replacements, or a function.
        dtype: Floating-point tensors are converted to it; one name, or names by glob.
        map: From the source's model definition to another: a ready map's name, as "llama:hf-to-titan", a TOML
            or JSON file, its data, or a `dcp.weight_map`. ``only`` and ``exclude`` choose before it,
            ``rename`` and ``dtype`` have the names after it.
        shard_bytes: The size of a Hugging Face folder's shards.
        files: How many data files a "dcp" target has.
        chunks: "keep" has the source's chunks in a "dcp" target, "split" one of each tensor in each file.
        hf: A Hugging Face folder, or the name of a model of the hub: what ``from_pretrained`` needs besides
            weights is copied from there into a "safetensors" folder, by known names. Of an adapter's the
            weights are called as PEFT has them. Its configuration says what ``map`` needs to know.
        hf_also: Shell globs of further files to be copied from there, such as "*.py".
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
            source. Of one that was finished the target is compared with what it would be, and nothing is
            written.

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
    if not (overwrite or resume or place.is_begun):
        place.refuse_existing()  # before anything is read; else it may be what a killed run has made
    reopen = partial(open_source, source, open_store=opened)
    options = ConversionOptions(
        LayoutOptions(to, files, chunks, shard_bytes, drop_objects),
        only,
        exclude,
        rename,
        dtype,
        () if map is None else (WeightMap.of(map),),
    )
    options = with_hf(options, hf, hf_also)
    means = Means(executor, workers, progress, overwrite=overwrite, verify=verify, resume=resume)
    return run_conversion(reopen, place, options, means, begun)


def with_hf(
    options: ConversionOptions, hf: str | os.PathLike[str] | None, also: Sequence[str]
) -> ConversionOptions:
    """``options`` with what the arguments of these names mean."""
    if hf is not None:
        return with_template(options, read_hf_folder(hf, also))
    if also:
        raise OptionError("hf_also is about hf, which is missing")
    return options


@dataclass(frozen=True)
class Means:
    """How a conversion is carried out: the arguments of `convert` that change nothing of what is written."""

    executor: str | Executor = "processes"
    workers: int | None = None
    progress: bool | ProgressCallback | None = None
    overwrite: bool = False
    verify: Verify = "blocks"
    resume: bool = True


def run_conversion(
    reopen: Callable[[], Source], place: TargetPlace, options: ConversionOptions, means: Means, begun: float
) -> ConversionReport:
    """The conversion of what ``reopen`` opens, here and in other processes; ``begun`` is when it was asked
    for, of `time.perf_counter`."""
    found = reopen()
    if not (found.store.capabilities.is_shared and place.store.capabilities.is_shared):
        means = replace(means, executor="inline")  # a store that is in this process alone
    if means.resume and not (means.overwrite or place.is_begun) and place.exists():
        with Conversion(found, place, options, verify=means.verify) as conversion:
            finished = conversion.of_finished()
        if finished is not None:
            return replace(finished, seconds={"total": time.perf_counter() - begun})
        place.refuse_existing()
    with (
        _changes_told(found, reopen),
        Conversion(found, place, options, overwrite=means.overwrite, verify=means.verify) as conversion,
        _clearing_up(conversion, resume=means.resume),
    ):
        prepared, batches = conversion.prepare(resume=means.resume)
        planned, left = time.perf_counter(), len(batches)
        settings = conversion.settings(prepared, reopen)
        take, expect = partial(conversion.take, prepared), conversion.publisher.expect
        _carry_out(settings, batches, expect, take, means)
        copied = time.perf_counter()
        report = conversion.publish(prepared)
    ended = time.perf_counter()
    seconds = {
        "plan": planned - begun,
        "copy": copied - planned,
        "publish": ended - copied,
        "total": ended - begun,
    }
    return replace(report, tasks_resumed=prepared.batch_count - left, seconds=seconds)


@contextmanager
def _changes_told(found: Source, reopen: Callable[[], Source]) -> Iterator[None]:
    """What fails because the source was saved anew, or has lost a part, since it was ``found``, says so."""
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        if not _is_replaced(found, reopen):
            raise
        raise SourceChangedError(
            f"{found.name} has changed while it was converted: it was saved anew, or a part of it was "
            "dropped; convert it again",
            path=found.name,
        ) from error


def _is_replaced(found: Source, reopen: Callable[[], Source]) -> bool:
    try:
        now = reopen().index
    except CheckpointError:  # gone, or out of reach: what has failed says more
        return False
    before = found.index
    return (now.files, now.provenance.get("save_id")) != (before.files, before.provenance.get("save_id"))


@contextmanager
def _clearing_up(conversion: Conversion, *, resume: bool) -> Iterator[None]:
    """On a failure, or an interruption, nothing stays that the next run could not go on from."""
    try:
        yield
    except (CorruptCheckpointError, SourceChangedError, FaultySumsError):
        # Whatever was read wrong, and when: nothing of it may be believed the next time.
        conversion.discard()
        raise
    except BaseException:
        # Files in a store, which are whole, stay: another conversion could be writing them, too.
        if conversion.place.path is not None and not (resume and conversion.has_progress):
            conversion.discard()
        raise
    finally:
        close_all()


def _carry_out(
    settings: BatchSettings,
    batches: list[TaskBatch],
    expect: Callable[[TaskBatch], None],
    take: Callable[[TaskBatch, bytes], None],
    means: Means,
) -> None:
    """Have ``batches`` done, some at a time: ``expect`` hears of each before, ``take`` gets the results. The
    list is empty then: of many tensors what they are made of takes much memory."""
    executor, workers = means.executor, means.workers
    if workers is None and executor == "processes" and len(batches) < 2:
        executor = "inline"  # a process costs more than one task
    total = sum(batch.size_bytes for batch in batches)
    with (
        reporting(means.progress, "convert", total, show=True) as on_bytes,
        open_executor(executor, workers) as (pool, at_once),
    ):
        batches.reverse()
        pending: dict[Future[bytes], TaskBatch] = {}
        try:
            while True:
                while len(pending) < at_once and batches:
                    batch = batches.pop()
                    expect(batch)
                    pending[pool.submit(run_batch, settings, batch)] = batch
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    batch = pending.pop(future)
                    take(batch, future.result())
                    if on_bytes is not None:
                        on_bytes(batch.size_bytes)
        except BaseException:
            for future in pending:
                future.cancel()
            raise
