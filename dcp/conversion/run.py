"""Convert a checkpoint to another format, or merge several checkpoints, in bounded memory."""

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
    """Convert the checkpoint ``source`` to the format ``to`` and write the result to ``target``.

    Data is streamed: neither checkpoint needs to fit into memory. Source checksums are verified during the
    copy. The target is published in one step where the storage allows this. Pickles are never executed.

    Args:
        source: Path or URL of a checkpoint of dcp or stock torch, a torch.save file, a safetensors file or a
            Hugging Face folder.
        target: Path or URL to write.
        to: "dcp" (a folder, readable by stock torch), "torch" (one file for `torch.load`), "safetensors" (one
            file if ``target`` has this suffix, else a Hugging Face folder), or the name of a registered
            format.
        only: Names or shell globs of the tensors to convert; a name includes everything below.
        exclude: Names or shell globs to leave out.
        rename: Map from regular expressions to replacements, or a function from source names to target names.
            Each expression must change a name.
        dtype: Target dtype of floating-point tensors, or a map from globs to dtypes.
        map: Weight map to another model definition: a ready map such as "llama:hf-to-titan", a TOML or JSON
            file, data, or a `dcp.weight_map`. ``only`` and ``exclude`` match names before the map, ``rename``
            and ``dtype`` match names after the map.
        shard_bytes: Size of the shards of a Hugging Face folder, in bytes.
        files: Number of data files of a "dcp" target.
        chunks: "keep" copies the source's chunks to a "dcp" target; "split" divides each tensor over all
            files.
        hf: Hugging Face folder, or name of a model of the hub. Its configuration and tokenizer files are
            copied to a "safetensors" folder. The configuration also gives the sizes for ``map``. With an
            adapter, weights get PEFT's file name.
        hf_also: Shell globs of further files to copy from ``hf``, such as "*.py".
        drop_objects: Leave out values that the format cannot hold, instead of raising `PlanError`.
        overwrite: Replace an existing target.
        executor: "processes", "inline", "dask://host:port", or a `concurrent.futures.Executor` with access to
            both places.
        workers: Number of processes; default: one for each core, up to four.
        storage_options: Options of the source URL's file system.
        target_options: Options of the target URL's file system.
        verify: "none" skips the source's checksums.
        progress: True for a progress bar, or a function that receives `dcp.progress.Progress`.
        resume: Continue an interrupted conversion with the same arguments. A finished target is compared and
            not written again.

    Returns:
        Names, sizes and checksums of the output, with times.

    Raises:
        CheckpointNotFoundError: No checkpoint exists at ``source``.
        CheckpointConflictError: The target exists, or the source changed during the conversion.
        CorruptCheckpointError: Stored bytes differ from the committed checksums.
        MissingKeyError: A pattern matches nothing.
        OptionError: The target's suffix belongs to another format.
        PlanError: Options contradict each other, or the format cannot hold a value.
        StorageError: The storage failed; `StorageFullError` if full.

    Examples:
        >>> dcp.convert("run/step-00001000", "model.safetensors", to="safetensors", only=["model"])
    """
    begun = time.perf_counter()
    check_flags(overwrite=overwrite, drop_objects=drop_objects, resume=resume, progress=progress)
    place = place_of(target, to, OpenWith(target_options))
    if not (overwrite or resume or place.is_begun):
        place.refuse_existing()  # before any read; otherwise a killed run may have made the target
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
    """Write the weighted sum of ``sources`` to ``target``.

    Data is streamed: no checkpoint needs to fit into memory. Each floating-point tensor is multiplied by its
    source's weight and added in the order of the sources, with rounding to ``accumulate``. Adapters are added
    next. The sum is rounded once to the target's dtype (to nearest, ties to even). Integer and bool tensors,
    other values, nesting and default dtypes come from the first source.

    Args:
        sources: Paths or URLs of checkpoints of any format and sharding; empty with ``run``.
        target: Path or URL to write.
        to: Format; default: the format of the target's suffix, else of the first source.
        weights: One finite number for each source, used unchanged; default: equal weights with sum 1. Python
            numbers, `fractions`, numpy numbers and tensors without dimensions are accepted.
        formula: Replaces ``weights``, as ``A + 0.4 * (B - C)``, where A is the first source.
        run: Folder of a `dcp.CheckpointManager`; replaces ``sources`` by committed steps.
        last: Number of newest steps of ``run``.
        decay: Decay of an exponential moving average: the k-th newest step weighs ``decay**k``, normalized to
            sum 1. Default: equal weights.
        name: Format of the run's folder names, as in `dcp.CheckpointManager`.
        adapters: Folders of PEFT adapters to add to the sum.
        adapter_weights: One number for each adapter, multiplied with the adapter's own scale; default 1.
        accumulate: "float32" or "float64".
        only: Names or shell globs of tensors of each source.
        exclude: Names or shell globs to leave out of each source.
        rename: Rules from each source's names to the target's; renamed sources must have equal names.
        dtype: As for `dcp.convert`.
        map: As for `dcp.convert`. Pass a list with one map (or None) for each source if sources have
            different model definitions; sums are computed after the maps. Not allowed with adapters.
        shard_bytes: As for `dcp.convert`.
        files: As for `dcp.convert`.
        chunks: As for `dcp.convert`, of the first source.
        hf: As for `dcp.convert`.
        hf_also: As for `dcp.convert`.
        drop_objects: As for `dcp.convert`.
        overwrite: Replace an existing target.
        executor: As for `dcp.convert`.
        workers: As for `dcp.convert`.
        storage_options: Options of the source URLs' file systems.
        target_options: Options of the target URL's file system.
        verify: "none" skips the sources' checksums.
        progress: As for `dcp.convert`.
        resume: Continue an interrupted merge with the same arguments.

    Returns:
        Names, sizes and checksums of the output, with times and ``weights``.

    Raises:
        OptionError: Invalid weights, formula or option.
        PlanError: Tensors do not match (all names, raised before any write), or sums are NaN, infinite or too
            large for the dtype (nothing is published).
        UnsupportedFormatError: An adapter is not a plain LoRA adapter.
        CheckpointNotFoundError: A source is missing, or the run has fewer steps.
        CheckpointConflictError: The target exists, or a source changed during the merge.
        CorruptCheckpointError: Stored bytes differ from the committed checksums.
        MissingKeyError: A pattern matches nothing in any source.
        StorageError: The storage failed.
    """
    begun = time.perf_counter()
    check_flags(overwrite=overwrite, drop_objects=drop_objects, resume=resume, progress=progress)
    if run is None and (last is not None or decay is not None):
        raise OptionError("last and decay require run")
    if run is not None and (sources or weights is not None or formula is not None or last is None):
        raise OptionError("run requires last, and excludes sources, weights and formula")
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
    """Return one map for all sources, or one map for each. OptionError for a wrong count or with adapters."""
    if given is None:
        return ()
    if adapters:
        raise OptionError("map and adapters exclude each other: merge the adapters first, then convert")
    if isinstance(given, WeightMap | Mapping | str | os.PathLike):
        return (WeightMap.of(given),)
    if len(given) != sources:
        raise OptionError(f"map: got {len(given)} maps for {sources} sources; pass one, or one for each")
    return tuple(None if one is None else WeightMap.of(one) for one in given)


def _places(what: str, given: Sequence[_Place]) -> list[str]:
    if isinstance(given, str | os.PathLike):
        raise OptionError(f"{what} must be a list: pass [{given!r}]")
    return [place_text(one) for one in given]


def _opened(place: str, storage_options: Mapping[str, Any] | None) -> OpenWith:
    """Return a function that opens a place with these options."""
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

    PlanError names damaged and partial steps; CheckpointNotFoundError for fewer steps.
    """
    if not isinstance(last, int) or last < 1:
        raise OptionError(f"last must be a positive number of steps, not {last!r}")
    steps = StepFolders(run, name, open_store=_opened(place_text(run), storage_options))
    newest = [step for step, _ in zip(steps.newest_first(), range(last), strict=False)]
    if len(newest) < last:
        raise CheckpointNotFoundError(
            f"{steps.root.url} has {len(newest)} committed steps, fewer than last={last}"
        )
    problems = {step: problem for step in newest if (problem := _problem(steps, step))}
    if problems:
        shown = [f"step {step} {problem}" for step, problem in problems.items()]
        raise PlanError(
            f"{steps.root.url}: {listed(shown, most=_MAX_LISTED, show=str)}. Pass the intact steps as "
            "sources instead",
            problems=shown,
        )
    return [steps.checkpoint_id(step) for step in newest]


def _problem(steps: StepFolders, step: int) -> str:
    """Return the reason not to average a step, or ""."""
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
    """Carry out a conversion in this process and others; ``begun`` is the `time.perf_counter` at the call."""
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
    """Raise SourceChangedError instead of a failure if the source was replaced since ``found``."""
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        now = then = found.index
        with suppress(CheckpointError):  # missing or unreachable: the original error says more
            now = reopen().index
        save_ids = {repr(index.provenance.get("save_id")) for index in (now, then)}
        if now.files == then.files and len(save_ids) == 1:
            raise
        raise SourceChangedError(
            f"{found.name} changed during the conversion: a save replaced it, or "
            "a part was dropped; convert again",
            path=found.name,
        ) from error
