"""The one place that decides how a save or load is done.

On columns, where planner and storage are ours and no step of theirs is overridden; else by torch's protocol,
with objects for all of them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from dcp.default_planner import DefaultLoadPlanner
from dcp.features.registry import LoadFeature, SaveFeature, features_of
from dcp.loading.load import ColumnLoad, LoadEngine
from dcp.planners.load.selection import OF_PLANNERS, LoadOptions
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.saving.save import ColumnSave, Save
from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter
from dcp.torch_protocol.load import ProtocolLoad
from dcp.torch_protocol.save import ProtocolSave

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from dcp.ranks.collectives import Ranks
    from dcp.saving.save import SaveOptions


_STEPS: Final[dict[type, str]] = {
    DefaultSavePlanner: "create_local_columns create_local_plan create_global_plan finish_plan resolve_data "
    "lookup_object transform_object",
    FileSystemWriter: "prepare_local_plan prepare_global_plan write_data finish storage_meta",
    DefaultLoadPlanner: "create_local_plan create_global_plan finish_plan load_bytes resolve_bytes "
    "resolve_tensor commit_tensor lookup_tensor transform_tensor",
    FileSystemReader: "read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan read_data",
}
"""Steps of torch's protocol that columns leave out, by our class: who overrides one wants it called."""

_OF_COLUMNS: Final = ("view", "destinations", "boxes")
"""Methods of features that loads on columns alone call."""

_PLAN_OPTIONS: Final = ("dedup_save_to_lowest_rank", "split_bytes", "replica_check")
"""Of a `DefaultSavePlanner`: those that decide on the global plan."""


def make_save(writer: StorageWriter, planner: SavePlanner | None, options: SaveOptions) -> Save:
    """Make a save with ``planner`` (ours, if there is none) and ``writer``.

    Raises OptionError for user metadata that is no plain data, and CheckpointError for any that a user's own
    storage has no place for.
    """
    options.check()
    planner = planner if planner is not None else DefaultSavePlanner()
    ours = planner if isinstance(planner, DefaultSavePlanner) else None
    storage = writer if isinstance(writer, FileSystemWriter) else None
    if options.user_metadata and storage is None:
        raise CheckpointError(
            f"user_metadata needs dcp's FileSystemWriter; {type(writer).__name__} has no place for it"
        )
    chosen = () if ours is None else attrgetter(*_PLAN_OPTIONS)(ours)
    plan_options = dict(zip(_PLAN_OPTIONS, chosen, strict=False))
    common: dict[str, Any] = {"writer": writer, "options": options, "plan_options": plan_options}
    features = features_of(SaveFeature)
    if ours is not None and storage is not None and _keeps_steps(ours) and _keeps_steps(storage):
        return ColumnSave(**common, storage=storage, planner=ours, kinds=features)
    for option in filter(None, (kind.option for kind in features)):
        is_given = getattr(options, option, None) or getattr(writer, option, None)
        if is_given and (option != "apart" or options.step is None):  # a manager's parts are a wish
            raise _needs_columns(option, planner, writer)
    return ProtocolSave(**common, storage=storage, planner=planner, ours=ours)


def refused_save(
    writer: FileSystemWriter, options: SaveOptions, serial: int, *, on_columns: bool = True
) -> Save:
    """Make a save that takes the first step as another rank's does, and fails there by its ``writer``."""
    planner = DefaultSavePlanner()
    common: dict[str, Any] = {
        "writer": writer,
        "storage": writer,
        "options": options,
        "plan_options": {},
        "serial": serial,
        "planner": planner,
    }
    if on_columns:  # no feature is asked
        return ColumnSave(**common)
    return ProtocolSave(**common, ours=planner)


def load_engine(
    reader: StorageReader, planner: LoadPlanner, ranks: Ranks, options: LoadOptions
) -> LoadEngine:
    """Choose the engine that loads with ``planner`` and ``reader``.

    Raises PlanError for options that cannot be meant, and CheckpointError for those that another package's
    planner or reader does not know.
    """
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    if ours is None and not callable(getattr(planner, "set_up_planner", None)):
        raise OptionError(f"planner must be a LoadPlanner, such as dcp.DefaultLoadPlanner(), not {planner!r}")
    storage = reader if isinstance(reader, FileSystemReader) else None
    if options.verify is not None and storage is None:
        raise CheckpointError(
            f"verify needs dcp's FileSystemReader; got {type(reader).__name__}, which checks in its own way"
        )
    options.check()
    given = [] if ours is not None else [name for name in OF_PLANNERS if getattr(options, name) is not None]
    if given:
        raise CheckpointError(
            f"{', '.join(given)} need dcp.DefaultLoadPlanner or a subclass; {type(planner).__name__} decides "
            "that itself"
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
        "map": "dcp.convert(..., map=) does the same to a checkpoint",
        "apart": "dcp prune --rewrite frees the same later",
        "digests": "dcp digest makes them of a checkpoint that has none",
    }
    return OptionError(
        f"{option} needs a planner and a storage of dcp, with none of their steps overridden; {names} work "
        f"by torch's protocol, which has no place for it. {instead.get(option, 'Leave it out')}"
    )


def _keeps_steps(part: object) -> bool:
    """Test that a planner or storage of this package, or of a class derived from one, overrides no step."""
    for base, steps in _STEPS.items():
        if isinstance(part, base):
            for step in steps.split():
                if getattr(type(part), step) is not getattr(base, step) or step in vars(part):
                    return False
    return True
