"""Lists of records: all of them, or page after page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from dcp.server.records.declaring import Shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Items(Generic[T]):
    """All of them."""

    items: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page. ``next_cursor`` asks for the next one; None after the last."""

    items: tuple[T, ...]
    next_cursor: str | None


_WHY = "Why something may be missing: a root's first scan has not ended, its last one failed."


@dataclass(frozen=True, slots=True)
class NotedPage(Generic[T]):
    """A page. ``notes``: why something may be missing."""

    items: tuple[T, ...]
    next_cursor: str | None
    notes: Annotated[tuple[str, ...], Shown(_WHY, may_be_absent=True)] = ()
