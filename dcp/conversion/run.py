"""`convert`: a checkpoint of any format to a checkpoint of any other, in a few buffers of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dcp.calls.plain_errors import plain_errors
from dcp.conversion.driver import Conversion, ConversionReport
from dcp.conversion.entries import TargetDtype
from dcp.conversion.executors import check_executor
from dcp.conversion.running import SourceChangedError
from dcp.conversion.targets.job import Chunks, ConversionOptions, TargetPlace, place_of
from dcp.conversion.tasks import FaultySumsError
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.storage.engine.requests import Verify
from dcp.storage.errors import CheckpointError, CorruptCheckpointError, StorageError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, open_source
from dcp.storage.stores.opening import OpenWith


class RunOptions(NamedTuple):
    """The arguments of `convert` that say how it is carried out, and not what the target holds."""

    executor: str | Executor
    workers: int | None
    overwrite: bool
    verify: Verify
    progress: bool | ProgressCallback | None
    resume: bool


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
        source: A path or URL: a checkpoint of dcp or of stock torch, a torch.save file, a safetensors file,
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
        resume: Continue a conversion that was killed, where it was called in the same way on an unchanged
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
    place = place_of(target, to, OpenWith(target_options))
    if not (overwrite or resume or place.is_begun):
        place.refuse_existing()  # before anything is read; else it may be what a killed run has made
    maps = () if map is None else (WeightMap.of(map),)
    options = ConversionOptions(
        to=to,
        files=files,
        chunks=chunks,
        shard_bytes=shard_bytes,
        drop_objects=drop_objects,
        only=only,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        weight_maps=maps,
    )
    return run_conversion(
        partial(open_source, source, open_store=OpenWith(storage_options)),
        place,
        options.with_hf(hf, hf_also),
        begun,
        RunOptions(executor, workers, overwrite, verify, progress, resume),
    )


def run_conversion(
    reopen: Callable[[], Source],
    place: TargetPlace,
    options: ConversionOptions,
    begun: float,
    how: RunOptions,
) -> ConversionReport:
    """Carry out the conversion of what ``reopen`` opens, here and in other processes; ``begun`` is when it
    was asked for, of `time.perf_counter`."""
    check_executor(how.executor, how.workers)
    source, resume, overwrite = reopen(), how.resume, how.overwrite
    with (
        _source_changes_reported(source, reopen),
        Conversion(
            source, place, options, open_source=reopen, overwrite=overwrite, verify=how.verify
        ) as conversion,
    ):
        if resume and not (overwrite or place.is_begun) and place.exists():
            finished = conversion.of_finished()
            if finished is None:
                place.refuse_existing()
            else:
                return replace(finished, seconds={"total": time.perf_counter() - begun})
        with _clearing_up(conversion, resume=resume):
            prepared, batches = conversion.prepare(resume=resume)
            planned, left = time.perf_counter(), len(batches)
            conversion.carry_out(prepared.source_mark, batches, how.executor, how.workers, how.progress)
            copied = time.perf_counter()
            report = conversion.publish(prepared)
    ended = time.perf_counter()
    seconds = {"plan": planned - begun, "copy": copied - planned, "publish": ended - copied}
    seconds["total"] = ended - begun
    return replace(report, tasks_resumed=prepared.batch_count - left, seconds=seconds)


@contextmanager
def _source_changes_reported(found: Source, reopen: Callable[[], Source]) -> Iterator[None]:
    """Raise SourceChangedError in place of a failure, if the source was replaced since it was ``found``."""
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        now, then = None, found.index
        with suppress(CheckpointError):  # it is gone, or out of reach: what has failed says more
            now = reopen().index
        if now is None or (now.files == then.files and _save_id(now) == _save_id(then)):
            raise
        raise SourceChangedError(
            f"{found.name} has changed while it was converted: it was saved anew, or a part of it was "
            "dropped; convert it again",
            path=found.name,
        ) from error


def _save_id(index: CheckpointIndex) -> object:
    return index.provenance.get("save_id")


@contextmanager
def _clearing_up(conversion: Conversion, *, resume: bool) -> Iterator[None]:
    """Remove, on a failure or an interruption, what the next run could not resume."""
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
