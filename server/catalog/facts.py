"""Facts of a checkpoint, and the row changes that follow from them. Pure functions without I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.inputs import (
    catalog_formats,
    check_key,
    check_label,
    clean_integer,
    clean_json,
    clean_text,
)
from dcp.server.catalog.structures import StructureFacts
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import OwnColumn, fields_of

FoundState = Literal["incomplete", "committed", "unreadable"]

_MAX_STEP: Final = (1 << 63) - 1
_MAX_TEXT: Final = 4000
END_OF_TIME: Final = 253_402_300_799.0  # end of the year 9999, the last year of datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint as observed at ``observed_seconds`` by the scanner or a trainer.

    Fields that are None were not observed and keep known values. ``key`` is relative to the root.
    ``save_id`` identifies the save, ``resumed_from`` the save from which training resumed, ``fingerprint``
    the commit objects. A new save id, or else a new fingerprint, means new content. ``content_digest``
    covers all tensors. ``tags`` and ``metrics`` are added to existing ones. ``problem`` describes unreadable
    checkpoints. ``registered_by`` is the first registrant, for the account ``owner``.
    """

    root: str
    key: str
    format: str
    observed_seconds: float
    state: FoundState = "committed"
    committed_seconds: float | None = None
    step: int | None = None
    save_id: str | None = None
    resumed_from: str | None = None
    fingerprint: str | None = None
    content_digest: str | None = None
    bytes: int = 0
    file_count: int = 0
    world_size: int | None = None
    structure: StructureFacts | None = None
    user_metadata: Any = None
    provenance: Any = None
    problem: str | None = None
    is_pinned: bool | None = None
    registered_by: str | None = None
    owner: str | None = None
    tags: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_key(self.key)
        if self.format not in catalog_formats():
            raise InvalidQueryError("format", f"{self.format!r} is not one of {', '.join(catalog_formats())}")
        if self.state not in get_args(FoundState):
            raise InvalidQueryError(
                "state", f"{self.state!r} is not one of {', '.join(get_args(FoundState))}"
            )
        if self.step is not None and not 0 <= self.step <= _MAX_STEP:
            raise InvalidQueryError("step", "must be from 0 to 2^63 - 1")
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
        """The key of the folder that holds the checkpoint; "" is the root."""
        return self.key.rpartition("/")[0]

    def columns(self) -> dict[str, Any]:
        """Return the columns of `tables.checkpoints` given by the facts, without references."""
        return {
            field.column: _cleaned(field.stored, getattr(self, field.column))
            for field in fields_of(CheckpointDetail)
            if field.found is not None and field.stored is not None and field.stored.type != "reference"
        }


def _cleaned(stored: OwnColumn, value: Any) -> Any:
    """Return a value of a foreign file in a form that the column accepts."""
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
    # File times may be arbitrary; times outside of the calendar would break every list.
    if not 0 < seconds < math.inf:
        return None
    return min(END_OF_TIME, seconds)


@dataclass(frozen=True, slots=True)
class Upserted:
    """The result of an upsert. ``became_committed``: the content is complete for the first time."""

    id: int
    is_new: bool
    is_changed: bool
    became_committed: bool


_KEPT: Final = {
    keeps: [
        field.column
        for field in fields_of(CheckpointDetail)
        if field.found is not None and field.found.keeps == keeps
    ]
    for keeps in ("of the same content", "the first", "always")
}
_BY_ORDER: Final = frozenset({"deleted", "purged"})


@dataclass(frozen=True, slots=True)
class RowChange:
    """The columns to set (empty: no change), and the meaning of the change."""

    columns: dict[str, Any]
    became_committed: bool = False
    is_other_save: bool = False
    """Another save replaced the key: measurements of the old save are invalid."""
    is_ignored: bool = False
    """The facts are older than the row, or the checkpoint is deleted."""


def change_of(row: Mapping[str, Any], facts: CheckpointFacts, columns: Mapping[str, Any]) -> RowChange:
    """Return the change of ``row``, a row of `tables.checkpoints`, by ``facts`` with their ``columns``.

    Facts older than the row change nothing: a scan may write its batch after a trainer registered a newer
    save. A deleted checkpoint stays deleted until the purge; only a new save to its key restores it. Content
    is announced once.
    """
    is_new = is_new_content(row, facts, columns)
    is_older = facts.observed_seconds < row["observed_seconds"]
    if is_older or (row["state"] in _BY_ORDER and not is_new):
        return RowChange({}, is_ignored=True)
    replaced = is_new and row["announced"] is not None
    given = dict(columns)
    for name in (*_KEPT["always"], *(() if replaced else _KEPT["of the same content"])):
        if given[name] is None:
            given[name] = row[name]
    if not replaced and row["owner"] is not None:
        given |= {name: row[name] for name in _KEPT["the first"]}
    if given["committed_seconds"] is None:
        given["committed_seconds"] = facts.observed_seconds
    if is_new:
        given |= {"announced": announcement(columns), "verification": "unverified", "verified_seconds": None}
    else:
        if facts.state == "committed" and columns["save_id"] is not None:
            given["announced"] = columns["save_id"]  # later registrations may change the fingerprint
        elif row["announced"] == "":
            given["announced"] = announcement(columns)
        if given["problem"] is None and row["verification"] == "damaged":
            given["problem"] = row["problem"]
    if row["state"] in _BY_ORDER:
        given |= {"deleted_seconds": None, "purge_after_seconds": None}
    changed = {name: value for name, value in given.items() if row[name] != value}
    if changed:
        changed["observed_seconds"] = facts.observed_seconds
    is_other_save = replaced and row["save_id"] is not None and facts.save_id is not None
    return RowChange(changed, became_committed=is_new, is_other_save=is_other_save)


def announcement(columns: Mapping[str, Any]) -> str:
    """Return the name of the content with these columns."""
    return str(columns["save_id"] or columns["fingerprint"] or "")


def is_new_content(row: Mapping[str, Any], facts: CheckpointFacts, columns: Mapping[str, Any]) -> bool:
    """Return True if the content is complete and not announced yet."""
    if facts.state != "committed":
        return False
    if row["announced"] is None:
        return True
    names = {columns["save_id"], columns["fingerprint"]} - {None}
    if row["announced"] == "" and row["state"] not in ("incomplete", "unreadable"):
        # Announced before it had a fingerprint: compare time and size.
        return any(row[name] != columns[name] for name in ("committed_seconds", "bytes"))
    if not names or row["announced"] in names:
        return False
    # Same commit objects, read with or without a save id.
    is_same_object = (
        row["state"] not in ("incomplete", "unreadable")
        and columns["fingerprint"] is not None
        and columns["fingerprint"] == row["fingerprint"]
    )
    has_other_id = columns["save_id"] is not None and row["save_id"] not in (None, columns["save_id"])
    return has_other_id or not is_same_object
