"""`Rescale` values of a load by another number of ranks: the states of all, and what rules make of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from dcp.loading.objects import load_objects
from dcp.loading.whole import WholePlanner
from dcp.planners.per_rank import rank_key
from dcp.planners.rescale import rescaled_value
from dcp.storage.formats.index import Path
from dcp.storage.torch_storage.metadata import LazyMetadata

if TYPE_CHECKING:
    from dcp.planners.load.planner import DefaultLoadPlanner
    from dcp.planners.load.rescaling import StatesOfRanks
    from dcp.storage.engine.reading.engine import ReadEngine
    from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["rescale"]

_GLOB = re.compile(r"[*?[]")


def rescale(
    planner: DefaultLoadPlanner, reader: FileSystemReader, engine: ReadEngine, *, weights_only: bool | None
) -> None:
    """Give ``planner`` what the rules make of the states that its `Rescale` values have in the checkpoint.

    Raises CheckpointError for a rule that fails, and what a load raises that reads the states whole.
    """
    wanted = [value for value in planner.rescaled if value.target.rule != "keep"]
    if not wanted:
        return
    whole = WholePlanner(
        only=[_GLOB.sub(r"[\g<0>]", value.stored) for value in wanted],
        exclude=None,
        rename=None,
        dtype=None,
        device=torch.device("cpu"),
        weights_only=weights_only,
    )
    rank, world_size = planner.rank or 0, planner.world_size or 1
    whole.begin_load(rank, world_size)
    flat: dict[str, Any] = {}
    whole.set_up_planner(flat, LazyMetadata.of(lambda: engine.index))
    columns, memory = whole.create_load_columns(engine.index)
    reader.read_columns(engine, columns, memory)
    load_objects(whole, reader, engine, columns)
    state, paths = whole.nested(flat), whole.paths
    for value in wanted:
        states = _states(value, state, paths)
        made = rescaled_value(value.name, value.target.rule, states, rank, world_size)
        planner.store_rescaled(value, made)


def _states(value: StatesOfRanks, state: Any, paths: Mapping[str, Path]) -> list[Any]:
    keys = [rank_key(number) for number in range(value.ranks)]
    below = next(path for name, path in paths.items() if name.startswith(f"{value.stored}.{keys[0]}"))
    depth = next(
        depth
        for depth, key in enumerate(below)
        if key == keys[0] and ".".join(map(str, below[:depth])) == value.stored
    )
    holder = reduce(lambda container, key: container[key], below[:depth], state)
    return [holder[key] for key in keys]
