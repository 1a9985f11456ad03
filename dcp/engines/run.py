"""Select and run the engine for a planner and storage.

Saves and loads run on columns if planner and storage are dcp's without overridden steps, otherwise by torch's
protocol.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcp.calls.arguments import (
    check_top_level,
    choose_reader,
    choose_writer,
    stateful_to_plain,
    works_alone,
)
from dcp.default_planner import DefaultLoadPlanner
from dcp.engines.protocol_load import ProtocolLoad
from dcp.engines.protocol_save import ProtocolSave
from dcp.features.plan_cache import PlanCache, cache_of, remembering
from dcp.features.registry import LoadFeature, SaveFeature, features_of
from dcp.loading.feature import LoadReport, Target
from dcp.loading.load import ColumnLoad, LoadEngine
from dcp.planners.load.selection import OF_PLANNERS, LoadKeywords, LoadOptions, check_names
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.ranks.agreement import raise_on_all_ranks
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.saving.save import ColumnSave, Save, SaveOptions, SaveOutcome, SavingRank
from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner


def save_with(
    state_dict: dict[str, Any],
    options: SaveOptions,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: int = 0,
    has_stateful: bool = True,
    abort: threading.Event | None = None,
    cache: PlanCache | None = None,
) -> tuple[Metadata, SaveOutcome]:
    """Save, and return the metadata with the result on this rank.

    Without ``has_stateful``, `Stateful` values are saved as they are. ``abort`` cancels the save, set by
    another thread on any rank. ``cache`` replaces the plan cache of the writer or planner.
    """
    ranks = Ranks(
        process_group,
        use_dist=not works_alone(process_group, no_dist=no_dist, operation="save"),
        coordinator=coordinator,
        timeout_seconds=options.timeout_seconds,
        operation="save",
        abort=abort,
    )
    with raise_on_all_ranks(ranks):
        writer = choose_writer(storage_writer, checkpoint_id, storage_options)
        if map is not None:
            options = replace(options, map=WeightMap.of(map))
        save = make_save(writer, planner, options)
    if cache is None and storage_writer is not None:
        cache = cache_of(storage_writer)
    elif cache is None and isinstance(planner, DefaultSavePlanner) and planner.enable_plan_caching:
        cache = cache_of(planner)
    if cache is not None:
        save = remembering(save, cache)

    def given() -> Any:
        state = stateful_to_plain(state_dict) if has_stateful else state_dict
        return save.held(state, SavingRank(ranks.rank, ranks.world_size, ranks.is_coordinator))

    return save.run(given, ranks)


def load_with(
    state_dict: dict[str, Any],
    given: LoadKeywords,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    filled: set[str] | None = None,
) -> LoadReport:
    """Load for callers that retry; ``filled`` as for `dcp.loading.load.LoadEngine.load`."""
    check_names("load", given)
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="load")
    with raise_on_all_ranks(ranks):
        chosen: dict[str, Any] = {**given}
        if (weights := given.get("map")) is not None:
            chosen["map"] = WeightMap.of(weights)
        options = LoadOptions(**chosen)
        reader = choose_reader(storage_reader, checkpoint_id, storage_options)
        planner = DefaultLoadPlanner() if planner is None else planner
        engine = load_engine(reader, planner, ranks, options)
        if not isinstance(state_dict, dict):
            check_top_level(state_dict)
        target: Target = engine.features.through("target", Target, Target(state_dict))
    return engine.load(target, filled)


# -- the way -------------------------------------------------------------------------------------------------

_STEPS: Final[dict[type, str]] = {
    DefaultSavePlanner: "create_local_columns create_local_plan create_global_plan finish_plan resolve_data "
    "lookup_object transform_object",
    FileSystemWriter: "prepare_local_plan prepare_global_plan write_data finish storage_meta",
    DefaultLoadPlanner: "create_local_plan create_global_plan finish_plan load_bytes resolve_bytes "
    "resolve_tensor commit_tensor lookup_tensor transform_tensor",
    FileSystemReader: "read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan read_data",
}
"""Steps of torch's protocol that columns skip, by dcp's class; an override selects the protocol."""

_OF_COLUMNS: Final = ("view", "destinations", "boxes")
"""Methods of features called by loads on columns only."""

_PLAN_OPTIONS: Final = ("dedup_save_to_lowest_rank", "split_bytes", "replica_check")
"""Options of a `DefaultSavePlanner` that affect the global plan."""


def make_save(writer: StorageWriter, planner: SavePlanner | None, options: SaveOptions) -> Save:
    """Return a save with ``planner`` (dcp's if None) and ``writer``.

    Raises OptionError for user metadata that is not plain data, and CheckpointError for user metadata that a
    custom storage cannot store.
    """
    options.check()
    planner = planner if planner is not None else DefaultSavePlanner()
    ours = planner if isinstance(planner, DefaultSavePlanner) else None
    storage = writer if isinstance(writer, FileSystemWriter) else None
    if options.user_metadata and storage is None:
        raise CheckpointError(f"user_metadata= requires dcp.FileSystemWriter, not {type(writer).__name__}")
    chosen = () if ours is None else attrgetter(*_PLAN_OPTIONS)(ours)
    plan_options = dict(zip(_PLAN_OPTIONS, chosen, strict=False))
    common: dict[str, Any] = {"writer": writer, "options": options, "plan_options": plan_options}
    features = features_of(SaveFeature)
    if ours is not None and storage is not None and _keeps_steps(ours) and _keeps_steps(storage):
        return ColumnSave(**common, storage=storage, planner=ours, kinds=features)
    for option in filter(None, (kind.option for kind in features)):
        is_given = getattr(options, option, None) or getattr(writer, option, None)
        if is_given and (option != "apart" or options.step is None):  # a manager's parts are optional
            raise _needs_columns(option, planner, writer)
    return ProtocolSave(**common, storage=storage, planner=planner, ours=ours)


def refused_save(
    writer: FileSystemWriter, options: SaveOptions, serial: int, *, on_columns: bool = True
) -> Save:
    """Return a save that takes the first step and fails there by its ``writer``."""
    planner = DefaultSavePlanner()
    common: dict[str, Any] = {
        "writer": writer,
        "storage": writer,
        "options": options,
        "plan_options": {},
        "serial": serial,
        "planner": planner,
    }
    if on_columns:  # features are not called
        return ColumnSave(**common)
    return ProtocolSave(**common, ours=planner)


def load_engine(
    reader: StorageReader, planner: LoadPlanner, ranks: Ranks, options: LoadOptions
) -> LoadEngine:
    """Return the engine for ``planner`` and ``reader``.

    Raises PlanError for invalid options, and CheckpointError for options unsupported by a custom planner or
    reader.
    """
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    if ours is None and not callable(getattr(planner, "set_up_planner", None)):
        raise OptionError(f"planner must be a LoadPlanner, such as dcp.DefaultLoadPlanner(), not {planner!r}")
    storage = reader if isinstance(reader, FileSystemReader) else None
    if options.verify is not None and storage is None:
        raise CheckpointError(f"verify= requires dcp.FileSystemReader, not {type(reader).__name__}")
    options.check()
    given = [] if ours is not None else [name for name in OF_PLANNERS if getattr(options, name) is not None]
    if given:
        raise CheckpointError(
            f"{', '.join(given)}: pass dcp.DefaultLoadPlanner or a subclass, not {type(planner).__name__}"
        )
    features = features_of(LoadFeature)
    if ours is not None and storage is not None and _keeps_steps(ours) and _keeps_steps(storage):
        return ColumnLoad(ranks, options, ours, storage, features)
    for kind in features:
        is_left_out = any(getattr(kind, step) is not getattr(LoadFeature, step) for step in _OF_COLUMNS)
        if kind.option and is_left_out and getattr(options, kind.option, None) is not None:
            raise _needs_columns(kind.option, planner, reader)
    return ProtocolLoad(ranks, options, ours, storage, features, reader=reader, any_planner=planner)


def _needs_columns(option: str, planner: object, storage: object) -> OptionError:
    names = " and ".join(type(each).__name__ for each in (planner, storage))
    instead = {
        "map": "Apply the map with dcp.convert(..., map=) instead",
        "apart": "Use dcp prune --rewrite later instead",
        "digests": "Use dcp digest later instead",
    }
    return OptionError(
        f"{option}= requires dcp's own planner and storage, without overridden methods; {names} use torch's "
        f"protocol, which does not support {option}=. {instead.get(option, 'Omit the option')}"
    )


def _keeps_steps(part: object) -> bool:
    """Return whether dcp's planner or storage, or a subclass, overrides no step."""
    for base, steps in _STEPS.items():
        if isinstance(part, base):
            for step in steps.split():
                if getattr(type(part), step) is not getattr(base, step) or step in vars(part):
                    return False
    return True
