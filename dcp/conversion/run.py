"""`convert`: a checkpoint of any format to a checkpoint of any other; `merge`: several added up to one. In a
few buffers of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dcp.calls.plain_errors import plain_errors
from dcp.conversion.adapters import open_adapter
from dcp.conversion.arithmetic import Arithmetic, Weight, weights_of_adapters, weights_of_sources
from dcp.conversion.driver import Conversion, ConversionReport
from dcp.conversion.executors import check_executor
from dcp.conversion.merging import open_joined
from dcp.conversion.running import SourceChangedError
from dcp.conversion.targets.job import Chunks, ConversionOptions, TargetPlace, place_of
from dcp.inspection.entries import TargetDtype
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.steps import StepFolders
from dcp.storage.engine.requests import Verify
from dcp.storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
    StorageError,
    check_flags,
)
from dcp.storage.formats.opening import Source, open_source
from dcp.storage.formats.registry import target_named, target_names
from dcp.storage.near_names import listed
from dcp.storage.stores import type_of_place
from dcp.storage.stores.base import place_text
from dcp.storage.stores.opening import OpenWith

_NAME: Final = "step-{step:08d}"
_MAX_LISTED: Final = 10

_Place = str | os.PathLike[str]
_How = tuple[str | Executor, int | None, bool, Verify, bool | ProgressCallback | None, bool]
"""The arguments ``executor``, ``workers``, ``overwrite``, ``verify``, ``progress`` and ``resume``."""

Map = WeightMap | Mapping[str, Any] | str | os.PathLike[str]


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
        rename: From the source's names to the target's: regular expressions with replacements, of which each
            must change a name, or a function.
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
        OptionError: The target's suffix is another format's.
        PlanError: An option cannot be meant, or the format cannot hold a value.
        StorageError: The storage failed; `StorageFullError` where it is full.
    """
    begun = time.perf_counter()
    check_flags(overwrite=overwrite, drop_objects=drop_objects, resume=resume, progress=progress)
    place = place_of(target, to, OpenWith(target_options))
    if not (overwrite or resume or place.is_begun):
        place.refuse_existing()  # before anything is read; else it may be what a killed run has made
    maps = () if map is None else (WeightMap.of(map),)
    chosen = ConversionOptions(
        to, only, exclude, rename, dtype, maps, files, chunks, shard_bytes, drop_objects
    ).with_hf(hf, hf_also)
    reopen = partial(open_source, source, open_store=OpenWith(storage_options))
    how: _How = executor, workers, overwrite, verify, progress, resume
    return _run(reopen, place, chosen, how, begun)


@plain_errors
def merge(
    sources: Sequence[_Place],
    target: _Place,
    *,
    to: str | None = None,
    weights: Sequence[Weight] | None = None,
    formula: str | None = None,
    run: _Place | None = None,
    last: int | None = None,
    decay: Weight | None = None,
    name: str | Callable[[int], str] = _NAME,
    adapters: Sequence[_Place] = (),
    adapter_weights: Sequence[Weight] | None = None,
    accumulate: str = "float32",
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: TargetDtype = None,
    map: Map | Sequence[Map | None] | None = None,
    shard_bytes: int | None = None,
    files: int = 1,
    chunks: Chunks = "keep",
    hf: _Place | None = None,
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
    """Write the weighted sum of ``sources`` as ``target``; none of them needs to fit into memory.

    Each tensor of floating-point numbers is the sum of those of its name, each times its source's weight and
    rounded, added in this order in the type ``accumulate``; then what adapters add; then rounded once, to
    the nearest, ties to even. From the first source come tensors of whole numbers, values that are no
    tensors, names of nested state and, unless ``dtype`` says others, the target's dtypes.

    Args:
        sources: Checkpoints of any formats and shardings. None with ``run``.
        target: Where it goes.
        to: The format; by default that of the target's suffix or, without one, of the first source.
        weights: One for each source, used as they are; by default equal ones that add up to 1. Finite numbers
            of Python, `fractions` or numpy, or tensors without dimensions.
        formula: Instead of weights: ``A + 0.4 * (B - C)``, where A is the first source.
        run: Instead of sources: the folder of a run, as `dcp.CheckpointManager` has it, whose steps are
            averaged.
        last: How many of them, the newest first.
        decay: Of an exponential moving average over these: the weight of the k-th newest is ``decay**k``,
            divided by the sum of all. Without it they are the same.
        name: Of the run's folders, as for `dcp.CheckpointManager`.
        adapters: Folders of low-rank adapters in the layout of peft, which are added to the sum.
        adapter_weights: One for each, beside what its configuration says; by default 1.
        accumulate: "float32" or "float64".
        only: Shell globs on each source's names: what they match, and everything below.
        exclude: The same for what is left out.
        rename: From each source's names to the target's, which must be the same then.
        dtype: Of the target, as for `dcp.convert`.
        map: The result is under another model definition, as for `dcp.convert`; without ``dtype`` it is, bit
            for bit, what merging and then converting makes. Where the sources are under different definitions
            themselves a list, with a map for each, or None for those that are under the target's; tensors
            are compared and added after the maps. Not with adapters.
        shard_bytes: As for `dcp.convert`.
        files: As for `dcp.convert`.
        chunks: As for `dcp.convert`, of the first source.
        hf: As for `dcp.convert`.
        hf_also: As for `dcp.convert`.
        drop_objects: As for `dcp.convert`.
        overwrite: Replace what is at the target.
        executor: As for `dcp.convert`.
        workers: As for `dcp.convert`.
        storage_options: Of the file systems of the sources' URLs.
        target_options: Of the file system of the target's.
        verify: "none" compares no checksums of the sources.
        progress: As for `dcp.convert`.
        resume: Continue a merge that was killed, where it was called in the same way on unchanged sources.

    Returns:
        What was written, and at what cost; with the ``weights``.

    Raises:
        OptionError: Weights, a formula or an option that cannot be.
        PlanError: Tensors that do not go together (all of them are named, before anything is written), or
            sums that are no numbers or too large for their dtype (as well; nothing is published).
        UnsupportedFormatError: An adapter of another kind.
        CheckpointNotFoundError: A source is not there, or a run has fewer steps.
        CheckpointConflictError: The target exists, or a source changed meanwhile.
        CorruptCheckpointError: Bytes of a source are not those that were committed.
        MissingKeyError: A pattern matches nothing in any source.
        StorageError: The storage failed.
    """
    begun = time.perf_counter()
    check_flags(overwrite=overwrite, drop_objects=drop_objects, resume=resume, progress=progress)
    if run is None and (last is not None or decay is not None):
        raise OptionError("last and decay are about the steps of a run, which is missing")
    if run is not None and (sources or weights is not None or formula is not None or last is None):
        raise OptionError("run: goes with last, and not with sources, weights or a formula")
    if run is None or last is None:
        given = _places("sources", sources)
    else:
        given = last_steps(run, last, name=name, storage_options=storage_options)
    own, added = weights_of_sources(len(given), weights, formula, decay), _places("adapters", adapters)
    maps = _maps(map, len(given), len(added))
    arithmetic = Arithmetic(own, weights_of_adapters(len(added), adapter_weights), accumulate)
    members = [partial(open_source, one, open_store=_opened(one, storage_options)) for one in given]
    members += [partial(open_adapter, one, open_store=_opened(one, storage_options)) for one in added]
    kind = to or _format_of(place_text(target), members[0])
    place = place_of(target, kind, OpenWith(target_options))
    chosen = ConversionOptions(
        kind, only, exclude, rename, dtype, maps, files, chunks, shard_bytes, drop_objects, arithmetic
    ).with_hf(hf, hf_also)
    how: _How = executor, workers, overwrite, verify, progress, resume
    report = _run(partial(open_joined, members), place, chosen, how, begun)
    shown = zip([*given, *added], [*own, *arithmetic.adapter_weights], strict=True)
    return replace(report, weights=tuple(shown))


def _maps(
    given: Map | Sequence[Map | None] | None, sources: int, adapters: int
) -> tuple[WeightMap | None, ...]:
    """Return one for all sources, or one for each. OptionError for another number, and for adapters, whose
    products have the shapes that weights have before a map."""
    if given is None:
        return ()
    if adapters:
        raise OptionError("map: adapters are added before it: merge first, then convert")
    if isinstance(given, WeightMap | Mapping | str | os.PathLike):
        return (WeightMap.of(given),)
    if len(given) != sources:
        raise OptionError(f"map: {len(given)} are given for {sources} sources; give one, or one for each")
    return tuple(None if one is None else WeightMap.of(one) for one in given)


def _places(what: str, given: Sequence[_Place]) -> list[str]:
    if isinstance(given, str | os.PathLike):
        raise OptionError(f"{what}: {given!r} is one; give a list, [{given!r}]")
    return [place_text(one) for one in given]


def _opened(place: str, storage_options: Mapping[str, Any] | None) -> OpenWith:
    """Return a function that opens a place, with the options if it takes some."""
    return OpenWith(storage_options if "://" in place and type_of_place(place).takes_options else None)


def _format_of(target: str, first: Callable[[], Source]) -> str:
    """Return the format of a target for which none was given."""
    kinds = {kind: target_named(kind)[0] for kind in target_names()}
    for kind, one in kinds.items():
        if one.has_suffix(target.rstrip("/")):
            return kind
    found = first().index.format
    return next((kind for kind, one in kinds.items() if one.name == found), "dcp")


def last_steps(
    run: _Place,
    last: int,
    *,
    name: str | Callable[[int], str] = _NAME,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the checkpoints of the ``last`` committed steps of a run, the newest first.

    PlanError that names those of them that are damaged or not the whole state; CheckpointNotFoundError for
    fewer.
    """
    if not isinstance(last, int) or last < 1:
        raise OptionError(f"last must be a number of steps, not {last!r}")
    steps = StepFolders(run, name, open_store=_opened(place_text(run), storage_options))
    newest = [step for step, _ in zip(steps.newest_first(), range(last), strict=False)]
    if len(newest) < last:
        raise CheckpointNotFoundError(
            f"{steps.root.url}: there are {len(newest)} committed steps, and {last} are asked for"
        )
    problems = {step: problem for step in newest if (problem := _problem(steps, step))}
    if problems:
        shown = [f"step {step} {problem}" for step, problem in problems.items()]
        raise PlanError(
            f"{steps.root.url}: {listed(shown, most=_MAX_LISTED, show=str)}. Give the steps that are to be "
            "averaged as sources",
            problems=shown,
        )
    return [steps.checkpoint_id(step) for step in newest]


def _problem(steps: StepFolders, step: int) -> str:
    """Return the reason not to average a step; "" if it is."""
    try:
        facts = steps.facts(step)
    except CheckpointError as error:
        if isinstance(error, OSError):
            raise
        return f"is damaged ({error})"
    verified = steps.notes(step).verified_of(facts.save_id)
    if verified is not None and not verified.ok:
        return "was found damaged when it was verified"
    return f"has only {', '.join(facts.partial)}" if facts.partial else ""


def _run(
    reopen: Callable[[], Source], place: TargetPlace, options: ConversionOptions, how: _How, begun: float
) -> ConversionReport:
    """Carry out the conversion of what ``reopen`` opens, here and in other processes; ``begun`` is when it
    was asked for, of `time.perf_counter`."""
    executor, workers, overwrite, verify, progress, resume = how
    check_executor(executor, workers)
    source = reopen()
    checks: dict[str, Any] = {"overwrite": overwrite, "verify": verify, "resume": resume}
    with (
        _source_changes_reported(source, reopen),
        Conversion(source, place, options, open_source=reopen, **checks) as conversion,
    ):
        if resume and not (overwrite or place.is_begun) and place.exists():
            if (finished := conversion.of_finished()) is not None:
                return replace(finished, seconds={"total": time.perf_counter() - begun})
            place.refuse_existing()
        prepared, batches = conversion.prepare()
        planned, left = time.perf_counter(), len(batches)
        conversion.carry_out(prepared.source_mark, batches, executor, workers, progress)
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
        now = then = found.index
        with suppress(CheckpointError):  # it is gone, or out of reach: what has failed says more
            now = reopen().index
        save_ids = {repr(index.provenance.get("save_id")) for index in (now, then)}
        if now.files == then.files and len(save_ids) == 1:
            raise
        raise SourceChangedError(
            f"{found.name} has changed while it was converted: it was saved anew, or a part of it was "
            "dropped; convert it again",
            path=found.name,
        ) from error
