"""Finding checkpoints: counts beside a list's filters, and hits of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dcp.server.records.declaring import OneOf, Shown

__all__ = ["CheckpointFacets", "Facet", "FacetName", "FacetValue", "HitKind", "SearchHit", "SearchResult"]

FacetName = Literal["state", "verification", "format", "pinned", "root", "run", "tag", "dtype"]
"""As the filters of the list are called."""
HitKind = Literal["run", "checkpoint", "alias", "tag", "tensor"]


@dataclass(frozen=True, slots=True)
class FacetValue:
    """A value of a filter, and how many checkpoints it would leave. ``root`` and ``run_id`` are of a run."""

    value: str
    count: int
    root: str | None = None
    run_id: int | None = None


@dataclass(frozen=True, slots=True)
class Facet:
    """The values of one filter, the most frequent first; ``is_cut``: there are more."""

    name: Annotated[str, OneOf(FacetName)]
    values: tuple[FacetValue, ...]
    is_cut: Annotated[bool, Shown("There are more values than are shown.")]


@dataclass(frozen=True, slots=True)
class CheckpointFacets:
    """Checkpoints that a list would have (``count``), and by the values of each filter those that it would
    have with another value of that filter."""

    count: int
    is_cut: Annotated[bool, Shown("Always false: all checkpoints are counted.")]
    facets: tuple[Facet, ...]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """Something whose name has what was searched for. ``rank``: 0 is the same name, 1 begins with it, 2 has
    it at the beginning of a word, 3 anywhere.

    ``checkpoint_id`` is the one that is meant, or the newest one of a tensor. ``count``: checkpoints with the
    tag, or tensors of one structure whose names differ by numbers only.
    """

    kind: Annotated[str, OneOf(HitKind)]
    text: Annotated[str, Shown("The name that was found.")]
    rank: Annotated[int, Shown("0: the same name; 1: begins with it; 2: at a word's beginning; 3: anywhere.")]
    root: str | None = None
    run: str | None = None
    run_id: int | None = None
    checkpoint_id: int | None = None
    key: str | None = None
    step: int | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best hits of each kind, the best of all first."""

    items: tuple[SearchHit, ...]
