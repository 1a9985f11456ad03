"""Weight maps as callers of saves and loads give them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup

from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.ranks.alone import works_alone
from dcp.ranks.collectives import Ranks
from dcp.ranks.handshake import raise_on_all_ranks

__all__ = ["map_on_all"]


def map_on_all(
    given: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None,
    operation: str,
    process_group: ProcessGroup | None,
    *,
    no_dist: bool,
    timeout_seconds: float,
) -> WeightMap | None:
    """Return the map that is meant. An error of one rank, as of a file that its host lacks, is raised on
    all."""
    try:
        return None if given is None else WeightMap.of(given)
    except Exception:
        alone = works_alone(process_group, no_dist=no_dist, operation=operation)
        ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation=operation)
        with raise_on_all_ranks(ranks):
            raise
