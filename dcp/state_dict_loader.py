"""`dcp.load`: from a checkpoint into the state dict that every rank holds, whatever its sharding."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torch.distributed.checkpoint.storage import StorageReader
from typing_extensions import deprecated

from dcp.calls.plain_errors import plain_errors
from dcp.calls.positional_storage import takes_storage_second
from dcp.calls.storage_selection import choose_reader
from dcp.loading.engine import ColumnarLoad
from dcp.loading.report import LoadReport
from dcp.loading.targets import GivenState, LoadTargets, Targets
from dcp.planners.load import planner as load_planner
from dcp.planners.load.planner import DefaultLoadPlanner, PerRankLoad, check_options
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.load.unexpected import Unexpected
from dcp.progress import ProgressCallback
from dcp.ranks.collectives import DEFAULT_TIMEOUT_SECONDS, Ranks, works_alone
from dcp.ranks.failures import causes_of, is_damage
from dcp.ranks.handshake import told_to_all
from dcp.storage import reader as columnar
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.near_names import listed
from dcp.storage.reader import FileSystemReader
from dcp.torch_protocol import steps as object_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner

__all__ = ["LoadOptions", "load", "load_state_dict"]

logger = logging.getLogger(__name__)

_MAX_LISTED = 10


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load` about what is loaded and how, for those that hand them on."""

    only: Patterns | None
    exclude: Patterns | None
    rename: Rename | None
    per_rank: PerRankLoad | None
    unexpected: Unexpected | None
    verify: Verify | None
    dtype: Literal["exact", "cast"] | None
    allow_partial_load: bool | None
    weights_only: bool | None
    progress: bool | ProgressCallback | None


@plain_errors
@takes_storage_second("storage_reader")
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    verify: Verify | None = None,
    dtype: Literal["exact", "cast"] | None = None,
    allow_partial_load: bool | None = None,
    weights_only: bool | None = None,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    per_rank: PerRankLoad | None = None,
    unexpected: Unexpected | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    progress: bool | ProgressCallback | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load a checkpoint in place into a sharded state dict; every rank of the process group calls it alike.

    Tensors are filled where they are, with any sharding, device or stride; other values are replaced;
    `Stateful` objects give their ``state_dict()`` to be filled and get it back by ``load_state_dict()``.
    Optimizers that have made no step get the state that the checkpoint has, also those that are attributes of
    such an object. The checkpoint may be of ours or of stock torch, saved by any number of ranks. One that is
    replaced while it is being read is read anew, once.

    Entries of the checkpoint under keys of the top level that ``state_dict`` does not have are not asked for
    and not loaded. But what lies below a key that it has, and has no place in the dict or object there on any
    rank, would be lost: see ``unexpected``. `LoadReport.unexpected` has what was not loaded.

    The arguments up to ``no_dist`` are torch's, with torch's meaning. Given a planner or reader, its own
    settings hold where those of here are None.

    Args:
        state_dict: What is to be filled; nested dicts and lists of tensors, values and `Stateful` objects.
        checkpoint_id: A path or URL: a checkpoint of ours or of stock torch, a torch.save file, a safetensors
            file, or a Hugging Face folder.
        storage_reader: Reads the checkpoint, instead of ours.
        planner: Plans the load, instead of `DefaultLoadPlanner`.
        process_group: The ranks that load together; the default group without it.
        no_dist: Load in this process alone.
        verify: "blocks" (default) compares the checksum of every block that is read whole, "full" also reads
            the rest of blocks needed in part, "none" compares nothing.
        dtype: "exact" (default) refuses another dtype than the stored one, "cast" converts.
        allow_partial_load: What the checkpoint lacks stays as it is, and is in the report.
        weights_only: False allows values of any class, whose pickles may run code: only for files you trust.
        only: Load a part: shell globs on the flat keys of ``state_dict`` (case-sensitive), each for what it
            matches and everything below, so that ``only="model"`` is the whole model. The rest is left as it
            is, and `Stateful` objects of which nothing can be selected are not asked for their state.
        exclude: The same for what is not loaded; it may also name what the checkpoint alone has.
        rename: From the state dict's keys to the checkpoint's: ``{r"^module\\.": ""}`` takes away a prefix
            that the checkpoint lacks; several keys may get one entry. Views of a parameter can be loaded from
            entries of their own (``qkv[:n]`` from ``q``) as long as they are views: ``chunk``, ``split`` and
            indexing of a DTensor copy where they communicate, and the copy is filled, not the parameter;
            nothing tells one from the other.
        per_rank: "exact" (default) wants each rank's own `PerRank` values; "keep" lets them be as they are,
            on all ranks, where another number of ranks saved the checkpoint, or it has none of them. A
            warning names what is kept, and what is left of ranks that are not there any more.
        unexpected: "error" (default) raises UnexpectedKeyError for entries that would be lost, unless
            ``exclude`` leaves them out by name; "ignore" does not.
        timeout_seconds: The longest wait for other ranks.
        progress: True for a bar, or a function that gets `dcp.progress.Progress`.
        storage_options: Those of the file system of a URL, as for `dcp.save`.

    Returns:
        What was loaded, and at what cost.

    Raises:
        CheckpointNotFoundError: Nothing is committed there.
        MissingKeyError: The checkpoint lacks entries.
        UnexpectedKeyError: Entries of the checkpoint would be lost.
        ShapeMismatchError: A tensor has another shape there.
        DtypeMismatchError: A tensor has another dtype there, without ``dtype="cast"``.
        CorruptCheckpointError: Bytes are not those that were committed.
        UnsafeObjectError: A value needs ``weights_only=False``.
        PlanError: An option cannot be meant, a pattern matches nothing, or the ranks are not about the same.
        CollectiveTimeoutError: Ranks did not answer in time.

        These and others of `dcp.errors` are raised on all ranks alike. After an error the tensors of
        ``state_dict`` may be filled in part; no Stateful object has been touched and, unless planner or
        storage are of your own, no other value either. But where a ``load_state_dict()`` fails, others have
        their state already: PlanError if it leaves tensors on the meta device, else CheckpointError that
        names the object.
    """
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="load")
    planner = planner if planner is not None else DefaultLoadPlanner()
    with told_to_all(ranks):
        reader = choose_reader(storage_reader, checkpoint_id, storage_options)
        check_verify(reader, verify)
        options = _planner_options(
            planner,
            dtype=dtype,
            allow_partial_load=allow_partial_load,
            weights_only=weights_only,
            only=only,
            exclude=exclude,
            rename=rename,
            per_rank=per_rank,
            unexpected=unexpected,
        )
    with _set_for_now(planner, options), _set_for_now(reader, {"verify": verify} if verify else {}):
        return _load_top_level(state_dict, reader, ranks, planner, progress)


def _load_top_level(
    state_dict: dict[str, Any],
    reader: StorageReader,
    ranks: Ranks,
    planner: LoadPlanner,
    progress: bool | ProgressCallback | None,
) -> LoadReport:
    """Load into the states of `Stateful` objects, and give them back to those that got something."""
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    targets = LoadTargets(state_dict, ours)
    with _set_for_now(planner, {"unasked": targets.unasked} if ours is not None else {}):
        try:
            report = _load(targets, reader, ranks, planner, progress)
        except BaseException:
            targets.take_back()
            raise
        ranks.all_gather("load_state_dict", partial(_give_back, targets))
    return report


def _give_back(targets: LoadTargets) -> bytes:
    targets.give_back()
    return b""


@deprecated("`load_state_dict` is deprecated; use `load` instead.", category=FutureWarning)
@plain_errors
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """`load` as it was called before torch 2.2; `Stateful` values are not asked for their state."""
    storage_reader.reset()
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """`load` without a look at `Stateful` values: torch's function for a planner that fills an empty dict."""
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, coordinator=coordinator_rank, operation="load")
    planner = planner if planner is not None else DefaultLoadPlanner()
    fill(state_dict, storage_reader, ranks, planner)


@plain_errors
def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """torch's name for `dcp.read`, by names instead of patterns."""
    from dcp.loading.read import read  # which builds on this module

    names = [keys] if isinstance(keys, str) else keys
    only = None if names is None else [re.sub(r"[*?[]", r"[\g<0>]", name) for name in names]
    return read(checkpoint_id, storage_reader=storage_reader, process_group=process_group, only=only)


def _planner_options(planner: LoadPlanner, **options: Any) -> dict[str, Any]:
    """Those of the options that are given; PlanError for what cannot be meant."""
    if options["dtype"] not in ("exact", "cast", None):
        raise OptionError(f'dtype must be "exact" or "cast", not {options["dtype"]!r}')
    check_options(**{name: options[name] for name in ("only", "exclude", "rename", "per_rank", "unexpected")})
    given = {name: value for name, value in options.items() if value is not None}
    if given and not isinstance(planner, DefaultLoadPlanner):
        raise CheckpointError(
            f"{', '.join(given)} need dcp.DefaultLoadPlanner or a subclass; {type(planner).__name__} decides "
            "that itself"
        )
    return given


def check_verify(reader: StorageReader, verify: Verify | None) -> None:
    """Raise CheckpointError where ``reader`` knows no such option."""
    if verify is not None and not isinstance(reader, FileSystemReader):
        raise CheckpointError(
            f"verify needs a storage of ours; {type(reader).__name__} checks as it sees fit"
        )


def fill(
    state_dict: dict[str, Any],
    reader: StorageReader,
    ranks: Ranks,
    planner: LoadPlanner,
    *,
    verify: Verify | None = None,
    progress: bool | ProgressCallback | None = None,
) -> LoadReport:
    """`load` without a look at `Stateful` values: ``planner`` knows what goes into ``state_dict``."""
    with _set_for_now(reader, {"verify": verify} if verify else {}):
        return _load(GivenState(state_dict), reader, ranks, planner, progress)


@contextmanager
def _set_for_now(target: object, options: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes for one load: a planner or reader that is used again has its own settings then."""
    before = {name: getattr(target, name) for name in options}
    vars(target).update(options)
    try:
        yield
    finally:
        vars(target).update(before)


def _load(
    targets: Targets,
    reader: StorageReader,
    ranks: Ranks,
    planner: LoadPlanner,
    progress: bool | ProgressCallback | None = None,
) -> LoadReport:
    """Load into ``targets``, which are asked in a step so that its failure reaches all ranks.

    Once more where the checkpoint was replaced after its index was read, so that files of it are gone.
    """
    try:
        return _load_once(targets, reader, ranks, planner, progress)
    except CheckpointError as error:
        if not isinstance(reader, FileSystemReader) or not all(map(is_damage, causes_of(error))):
            raise
        if not ranks.broadcast("look again", lambda: b"\x01" if reader.was_replaced() else b""):
            raise
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    with _set_for_now(planner, {"must_fill": ours.touched_keys} if ours is not None else {}):
        report = _load_once(targets, reader, ranks, planner, progress)
    return dataclasses.replace(report, attempts=2)


def _load_once(
    targets: Targets,
    reader: StorageReader,
    ranks: Ranks,
    planner: LoadPlanner,
    progress: bool | ProgressCallback | None,
) -> LoadReport:
    report = LoadReport()
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    if ours is not None:
        ours.begin_load(ranks.rank, ranks.world_size)
    try:
        if (
            isinstance(reader, FileSystemReader)
            and columnar.uses_columns(reader)
            and ours is not None
            and load_planner.uses_columns(ours)
        ):
            with _set_for_now(ours, {"stores_later": True}):
                ColumnarLoad(targets, reader, ranks, ours, report, progress).run()
        else:
            object_steps.load(targets, reader, ranks, planner, report)
    finally:
        if ours is not None:
            ours.tell_autograd()
    if ours is not None:
        _warn_of_other_ranks(ours, report, ranks)
    if isinstance(reader, FileSystemReader):
        report.storage = reader.traffic
    return report


def _warn_of_other_ranks(planner: DefaultLoadPlanner, report: LoadReport, ranks: Ranks) -> None:
    """Say which `PerRank` values do not go on where the ranks that saved them were."""
    kept, left = (listed(names, most=_MAX_LISTED) for names in (planner.kept_per_rank, planner.left_per_rank))
    if not kept and not left:
        return
    if report.world_size in (None, ranks.world_size):
        if kept:
            logger.warning("the checkpoint has no %s of rank %d: left as before the load", kept, ranks.rank)
    elif ranks.is_coordinator:
        what = (
            f"{kept} of every rank is left as before the load, such as a data loader at its beginning"
            if kept
            else f"each rank takes its own of {left}, and what the other ranks had is not loaded"
        )
        logger.warning("saved by %s ranks, loaded by %d: %s", report.world_size, ranks.world_size, what)
