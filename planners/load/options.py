"""Options of a load, as one value that is handed down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from dcp.planners.load.selection import Patterns, Rename, Selection, renamer
from dcp.storage.engine.requests import Verify
from dcp.storage.errors import OptionError

if TYPE_CHECKING:  # maps are made of what this folder finds
    from dcp.planners.weight_maps.weight_map import WeightMap

__all__ = ["LoadDtype", "LoadOptions", "PerRankLoad", "Unexpected"]

PerRankLoad = Literal["exact", "keep"]
"""What to do about `PerRank` values: each rank's own one is there, or they may stay as they are."""

LoadDtype = Literal["exact", "cast"]

Unexpected = Literal["error", "ignore"]
"""What to do about entries of the checkpoint that nobody takes, below what was asked for."""

_OF_PLANNERS = (
    "dtype",
    "allow_partial_load",
    "weights_only",
    "only",
    "exclude",
    "rename",
    "per_rank",
    "unexpected",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Options of `dcp.load`, whose page has their meaning. None: as planner and reader have it."""

    only: Patterns | None = None
    exclude: Patterns | None = None
    rename: Rename | None = None
    per_rank: PerRankLoad | None = None
    unexpected: Unexpected | None = None
    dtype: LoadDtype | None = None
    allow_partial_load: bool | None = None
    weights_only: bool | None = None
    verify: Verify | None = None
    map: WeightMap | None = None
    progress: bool | Callable[[Any], None] | None = None

    def check(self) -> LoadOptions:
        """These. Raises OptionError for what cannot be meant."""
        if self.dtype is not None and self.dtype not in get_args(LoadDtype):
            raise OptionError(f'dtype must be "exact" or "cast", not {self.dtype!r}')
        Selection.of(self.only, self.exclude)
        renamer(self.rename)
        if self.per_rank is not None and self.per_rank not in get_args(PerRankLoad):
            raise OptionError(f'per_rank must be "exact" or "keep", not {self.per_rank!r}')
        if self.unexpected is not None and self.unexpected not in get_args(Unexpected):
            raise OptionError(f'unexpected must be "error" or "ignore", not {self.unexpected!r}')
        return self

    def given_to_planner(self) -> list[str]:
        """Return names of those that are given and that a planner decides on."""
        return [name for name in _OF_PLANNERS if getattr(self, name) is not None]

    def over(self, settings: object) -> LoadOptions:
        """These, and for a planner's that are None the attributes of ``settings``."""
        own: dict[str, Any] = {}
        for name in _OF_PLANNERS:
            if getattr(self, name) is None:
                own[name] = getattr(settings, name)
        return replace(self, **own)
