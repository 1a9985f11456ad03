"""The one place that decides how a save or load is done.

On columns, where planner and storage are ours and no step of theirs is overridden; else by torch's protocol,
with objects for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp.loading.columns import ColumnLoad
from dcp.loading.engine import LoadEngine
from dcp.planners.load import planner as load_planner
from dcp.planners.load.options import LoadOptions
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.storage import reader as reading
from dcp.storage.errors import CheckpointError
from dcp.storage.reader import FileSystemReader
from dcp.torch_protocol.load import ProtocolLoad

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

    from dcp.ranks.collectives import Ranks

__all__ = ["load_engine"]


def load_engine(
    reader: StorageReader, planner: LoadPlanner, ranks: Ranks, options: LoadOptions
) -> LoadEngine:
    """What loads with ``planner`` and ``reader``.

    Raises PlanError for options that cannot be meant, and CheckpointError for those that a planner or reader
    of somebody else's does not know.
    """
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    storage = reader if isinstance(reader, FileSystemReader) else None
    if options.verify is not None and storage is None:
        raise CheckpointError(
            f"verify needs a storage of ours; {type(reader).__name__} checks as it sees fit"
        )
    options.check()
    given = options.given_to_planner()
    if given and ours is None:
        raise CheckpointError(
            f"{', '.join(given)} need dcp.DefaultLoadPlanner or a subclass; {type(planner).__name__} decides "
            "that itself"
        )
    on_columns = load_planner.uses_columns(planner) and reading.uses_columns(reader)
    if ours is not None and storage is not None and on_columns:
        return ColumnLoad(storage, ours, ranks, options)
    return ProtocolLoad(reader, planner, ranks, options, ours, storage)
