"""`merge`: several checkpoints added up to one, in a few buffers of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dcp.calls.plain_errors import plain_errors
from dcp.conversion.adapters import open_adapter
from dcp.conversion.arithmetic import Arithmetic, Weight, weights_of_adapters, weights_of_sources
from dcp.conversion.driver import ConversionReport
from dcp.conversion.entries import TargetDtype
from dcp.conversion.merging import open_joined
from dcp.conversion.run import RunOptions, run_conversion
from dcp.conversion.targets.job import Chunks, ConversionOptions, place_of
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.steps import StepFolders
from dcp.storage.engine.requests import Verify
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, OptionError, PlanError
from dcp.storage.formats.opening import Source, open_source
from dcp.storage.formats.registry import target_named, target_names
from dcp.storage.near_names import listed
from dcp.storage.stores import type_of_place
from dcp.storage.stores.base import place_text
from dcp.storage.stores.opening import OpenWith

_NAME: Final = "step-{step:08d}"
_MAX_LISTED: Final = 10

_Place = str | os.PathLike[str]
Map = WeightMap | Mapping[str, Any] | str | os.PathLike[str]


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
    if run is None:
        if last is not None or decay is not None:
            raise OptionError("last and decay are about the steps of a run, which is missing")
        given = _places("sources", sources)
    elif sources or weights is not None or formula is not None or last is None:
        raise OptionError("run: goes with last, and not with sources, weights or a formula")
    else:
        given = last_steps(run, last, name=name, storage_options=storage_options)
    own = weights_of_sources(len(given), weights, formula, decay)
    added = _places("adapters", adapters)
    maps = _maps(map, len(given), len(added))
    arithmetic = Arithmetic(own, weights_of_adapters(len(added), adapter_weights), accumulate)
    members = [partial(open_source, one, open_store=_opened(one, storage_options)) for one in given]
    members += [partial(open_adapter, one, open_store=_opened(one, storage_options)) for one in added]
    reopen = partial(open_joined, members)
    kind = to or _format_of(place_text(target), members[0])
    place = place_of(target, kind, OpenWith(target_options))
    options = ConversionOptions(
        to=kind,
        files=files,
        chunks=chunks,
        shard_bytes=shard_bytes,
        drop_objects=drop_objects,
        only=only,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        weight_maps=maps,
        arithmetic=arithmetic,
    )
    report = run_conversion(
        reopen,
        place,
        options.with_hf(hf, hf_also),
        begun,
        RunOptions(executor, workers, overwrite, verify, progress, resume),
    )
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
