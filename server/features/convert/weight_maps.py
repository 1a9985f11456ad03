"""Weight maps in the parameters of jobs: a ready one, or data; never a file of the service's machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from dcp.planners.weight_maps.weight_map import WeightMap, ready_maps, weight_map
from dcp.server.core.inputs import Plain
from dcp.storage.errors import CheckpointError
from dcp.storage.near_names import close_to

__all__ = ["MapData", "check_map", "map_of"]

_MAX_BYTES: Final = 256 << 10


def _small(data: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(data)) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes of JSON")
    return data


MapData = Annotated[dict[str, Plain], AfterValidator(_small)]


def map_of(
    given: str | Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    sizes: Mapping[str, int] | None,
    *,
    inverse: bool,
    below: str | None,
) -> WeightMap | None:
    """What the parameters mean. OptionError for what is no map."""
    if given is None:
        return None
    found = weight_map(given, config).with_numbers(sizes or {})
    return weight_map(found, inverse=inverse, below=below)


def check_map(
    given: str | Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    sizes: Mapping[str, int] | None,
    *,
    inverse: bool,
    below: str | None,
) -> None:
    """Raise ValueError for parameters that cannot be meant."""
    if given is None:
        if inverse or below or config is not None or sizes is not None:
            raise ValueError("inverse, below, config and sizes are about a map, and there is none")
        return
    if isinstance(given, str) and given not in (ready := ready_maps()):
        near = close_to(given, list(ready)) or list(ready)
        raise ValueError(
            f"map: {given!r} is no ready map; there are {', '.join(near)}. Others are given as data"
        )
    try:
        map_of(given, config, sizes, inverse=inverse, below=below)
    except CheckpointError as error:
        raise ValueError(f"map: {error}") from None
