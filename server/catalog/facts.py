"""What is known of a checkpoint when it has been looked at: by the scanner, or said by its trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from dcp.server.catalog.contents.structures import StructureFacts
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.values import check_key, check_label, clean_integer, clean_json, clean_text
from dcp.server.formats import catalog_formats
from dcp.server.records.checkpoints import CheckpointDetail, State, Verification
from dcp.server.records.declaring import OwnColumn, fields_of

__all__ = ["END_OF_TIME", "CheckpointFacts", "FoundState", "State", "Upserted", "Verification"]

FoundState = Literal["incomplete", "committed", "unreadable"]

_MAX_STEP: Final = (1 << 63) - 1
_MAX_TEXT: Final = 4000
END_OF_TIME: Final = 253_402_300_799.0  # of the year 9999, the last that dates are written for


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint as it was at ``observed_seconds``.

    ``key`` is relative to the root. What is None was not found out, and leaves what is known. ``save_id``
    names the save, ``fingerprint`` the commit objects; a new save id, or without one a new fingerprint, is
    new content. ``tags`` and ``metrics`` are added to those that it has. ``problem`` is for unreadable ones.
    """

    root: str
    key: str
    format: str
    observed_seconds: float
    state: FoundState = "committed"
    committed_seconds: float | None = None
    step: int | None = None
    save_id: str | None = None
    fingerprint: str | None = None
    bytes: int = 0
    file_count: int = 0
    world_size: int | None = None
    structure: StructureFacts | None = None
    user_metadata: Any = None
    provenance: Any = None
    problem: str | None = None
    is_pinned: bool | None = None
    tags: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_key(self.key)
        if self.format not in catalog_formats():
            raise InvalidQueryError("format", f"{self.format!r} is none of {', '.join(catalog_formats())}")
        if self.state not in get_args(FoundState):
            raise InvalidQueryError("state", f"{self.state!r} is none of {', '.join(get_args(FoundState))}")
        if self.step is not None and not 0 <= self.step <= _MAX_STEP:
            raise InvalidQueryError("step", "from 0 to 2^63 - 1")
        for tag in self.tags:
            check_label("tag", tag)
        for name, value in self.metrics.items():
            check_label("metric", name)
            if not math.isfinite(value):
                raise InvalidQueryError("metric", f"{name} is not a finite number")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def run_key(self) -> str:
        """The key of the run: the folder that holds the checkpoint; "" is the root itself."""
        return self.key.rpartition("/")[0]

    def columns(self) -> dict[str, Any]:
        """The columns of `tables.checkpoints` that these facts give, but for those that refer to others."""
        return {
            field.column: _cleaned(field.stored, getattr(self, field.column))
            for field in fields_of(CheckpointDetail)
            if field.found is not None and field.stored is not None and field.stored.type != "reference"
        }


def _cleaned(stored: OwnColumn, value: Any) -> Any:
    """What was found in foreign files, such that the column takes it."""
    if value is None:
        return None
    match stored.type:
        case "code":
            return clean_text(value)[: stored.size]
        case "text":
            return clean_text(value)[:_MAX_TEXT]
        case "large":
            return clean_integer(value)
        case "integer":
            return min(clean_integer(value), 2**31 - 1)
        case "seconds":
            return _shown(value)
        case "json":
            return clean_json(value)
        case _:
            return value


def _shown(seconds: float) -> float | None:
    # Times of files may be anything; those that no calendar has would spoil every list they are in.
    if not 0 < seconds < math.inf:
        return None
    return min(END_OF_TIME, seconds)


@dataclass(frozen=True, slots=True)
class Upserted:
    """What was done. ``became_committed``: this content is there, whole, for the first time."""

    id: int
    is_new: bool
    is_changed: bool
    became_committed: bool
