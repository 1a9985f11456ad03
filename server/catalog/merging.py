"""What becomes of a row when its checkpoint has been looked at again. Decides only; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp.server.catalog.facts import CheckpointFacts

__all__ = ["Merge", "merge"]

_KEPT_IF_NONE: Final = ("save_id", "fingerprint", "committed_seconds", "world_size", "structure_id", "step")
_OPTIONAL: Final = ("is_pinned", "user_metadata", "provenance")
_BY_ORDER: Final = frozenset({"deleted", "purged"})


@dataclass(frozen=True, slots=True)
class Merge:
    """The columns to set (none: nothing is new), and what that means."""

    columns: dict[str, Any]
    became_committed: bool
    is_replaced: bool
    """Other content under the same key: what was said of the old one does not hold any more."""


_NOTHING: Final = Merge({}, became_committed=False, is_replaced=False)


def merge(row: Mapping[str, Any], facts: CheckpointFacts, columns: Mapping[str, Any]) -> Merge:
    """What ``facts`` (with their ``columns``) change in ``row``, one of `tables.checkpoints`.

    What is deleted by order stays so while its bytes wait to be purged; only a new save to the same key
    brings it back, and only if it was seen after the order.
    """
    replaced = _is_replaced(row, facts)
    if row["state"] in _BY_ORDER and not (replaced and facts.observed_seconds > row["updated_seconds"]):
        return _NOTHING
    given = dict(columns)
    if not replaced:
        for name in _KEPT_IF_NONE:
            if given[name] is None:
                given[name] = row[name]
    for name in _OPTIONAL:
        if given[name] is None:
            given[name] = False if replaced and name == "is_pinned" else row[name]
    if given["committed_seconds"] is None:
        given["committed_seconds"] = facts.observed_seconds
    if given["state"] == "committed" and given["problem"] is None and not replaced:
        given["problem"] = row["problem"] if row["verification"] == "damaged" else None
    if replaced:
        given |= {"verification": "unverified", "verified_seconds": None}
    if row["state"] in _BY_ORDER:
        given |= {"deleted_seconds": None, "purge_after_seconds": None}
    changed = {name: value for name, value in given.items() if row[name] != value}
    committed = given["state"] == "committed" and (replaced or row["state"] in ("incomplete", "unreadable"))
    return Merge(changed, became_committed=committed, is_replaced=replaced)


def _is_replaced(row: Mapping[str, Any], facts: CheckpointFacts) -> bool:
    if facts.state != "committed":
        return False
    if row["save_id"] is not None and facts.save_id is not None:
        return bool(row["save_id"] != facts.save_id)
    if row["fingerprint"] is None or facts.fingerprint is None:
        return False
    return bool(row["fingerprint"] != facts.fingerprint)
