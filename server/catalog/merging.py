"""What becomes of a row when its checkpoint has been looked at again. Decides only; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import fields_of

__all__ = ["Merge", "announcement", "is_new_content", "merge"]

_KEPT: Final = {
    keeps: [
        field.column
        for field in fields_of(CheckpointDetail)
        if field.found is not None and field.found.keeps == keeps
    ]
    for keeps in ("of the same content", "always")
}
_BY_ORDER: Final = frozenset({"deleted", "purged"})


@dataclass(frozen=True, slots=True)
class Merge:
    """The columns to set (none: nothing is new), and what that means."""

    columns: dict[str, Any]
    became_committed: bool = False
    is_other_save: bool = False
    """Another save to the same key: what was measured of the old one does not hold any more."""
    is_ignored: bool = False
    """The facts are older than the row, or it is deleted by order."""


def merge(row: Mapping[str, Any], facts: CheckpointFacts, columns: Mapping[str, Any]) -> Merge:
    """What ``facts`` (with their ``columns``) change in ``row``, one of `tables.checkpoints`.

    What was observed before the row was changes nothing: a scan may write its batch after the trainer has
    told of the commit that ended a save. What is deleted by order stays so while its bytes wait to be purged;
    only a new save to the same key brings it back. Content is announced as committed once.
    """
    is_new = is_new_content(row, facts, columns)
    is_older = facts.observed_seconds < row["observed_seconds"]
    if is_older or (row["state"] in _BY_ORDER and not is_new):
        return Merge({}, is_ignored=True)
    replaced = is_new and row["announced"] is not None
    given = dict(columns)
    for name in (*_KEPT["always"], *(() if replaced else _KEPT["of the same content"])):
        if given[name] is None:
            given[name] = row[name]
    if given["committed_seconds"] is None:
        given["committed_seconds"] = facts.observed_seconds
    if is_new:
        given |= {"announced": announcement(columns), "verification": "unverified", "verified_seconds": None}
    else:
        if facts.state == "committed" and columns["save_id"] is not None:
            given["announced"] = columns["save_id"]  # from now on notes may change the fingerprint
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
    return Merge(changed, became_committed=is_new, is_other_save=is_other_save)


def announcement(columns: Mapping[str, Any]) -> str:
    """What tells the content with these columns apart."""
    return str(columns["save_id"] or columns["fingerprint"] or "")


def is_new_content(row: Mapping[str, Any], facts: CheckpointFacts, columns: Mapping[str, Any]) -> bool:
    """Whether the content is whole, and has not been announced yet."""
    if facts.state != "committed":
        return False
    if row["announced"] is None:
        return True
    names = {columns["save_id"], columns["fingerprint"]} - {None}
    if row["announced"] == "" and row["state"] not in ("incomplete", "unreadable"):
        # It was too young for a fingerprint when it was told of: its time and size have to do.
        return any(row[name] != columns[name] for name in ("committed_seconds", "bytes"))
    if not names or row["announced"] in names:
        return False
    # Read again, without or with a save id that the first one had not told: the commit objects are the same.
    is_same_object = (
        row["state"] not in ("incomplete", "unreadable")
        and columns["fingerprint"] is not None
        and columns["fingerprint"] == row["fingerprint"]
    )
    has_other_id = columns["save_id"] is not None and row["save_id"] not in (None, columns["save_id"])
    return has_other_id or not is_same_object
