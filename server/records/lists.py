"""Records of lists: complete, or as pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from dcp.server.records.declaring import Shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Items(Generic[T]):
    """A complete list."""

    items: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list. ``next_cursor`` requests the next page and is None after the last."""

    items: tuple[T, ...]
    next_cursor: Annotated[
        str | None, Shown("`cursor` of the request for the next page; null: this is the last page.")
    ]


_WHY = "Reasons for missing entries, such as an unfinished first scan or a failed last scan of a root."


@dataclass(frozen=True, slots=True)
class NotedPage(Generic[T]):
    """A page of a list with ``notes``: reasons for missing entries."""

    items: tuple[T, ...]
    next_cursor: Annotated[
        str | None, Shown("`cursor` of the request for the next page; null: this is the last page.")
    ]
    notes: Annotated[tuple[str, ...], Shown(_WHY, may_be_absent=True)] = ()
