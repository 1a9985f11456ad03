"""Checks of filters: an unknown root, run or metric is refused, since an empty page would look fine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, func, select

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.filters import CheckpointFilter, Sort
from dcp.server.catalog.roots import RootRow, list_roots
from dcp.server.database.tables import checkpoints, metrics, roots, runs
from dcp.storage.near_names import close_to, listed

__all__ = ["check_filter", "check_root", "notes_of"]

_LOOKED_AT: Final = 5_000
_METRICS: Final = 200


def check_filter(
    connection: Connection, wanted: CheckpointFilter, sort: Sort, visible: frozenset[str] | None
) -> None:
    """Raises InvalidQueryError for a root, a run or a metric that is named and is not there, with near names.

    What may be seen counts alone. As long as a root has not been looked through for the first time, a run or
    a metric that is not known may yet come.
    """
    seen = list_roots(connection, visible)
    _check_root(wanted.root, seen)
    mine = [row for row in seen if wanted.root in (None, row.name)]
    if any(_is_new(row) for row in mine):
        return
    if wanted.run is not None or wanted.run_id is not None:
        _check_run(connection, wanted, [row.id for row in mine])
    for name in {condition.name for condition in wanted.metrics} | ({sort.metric} - {None}):
        if name is not None:
            _check_metric(connection, name, visible)


def check_root(connection: Connection, root: str | None, visible: frozenset[str] | None) -> None:
    """Raises InvalidQueryError for a root that there is not, or that may not be seen."""
    if root is not None:
        _check_root(root, list_roots(connection, visible))


def notes_of(connection: Connection, root: str | None, visible: frozenset[str] | None) -> list[str]:
    """Reasons why rows may be missing in a list of one root, or of all."""
    notes = []
    for row in list_roots(connection, visible):
        if root not in (None, row.name) or not row.is_configured:
            continue
        if _is_new(row):
            notes.append(f"the first scan of root {row.name} has not ended: what is in it may be missing")
        elif row.scan_error is not None:
            notes.append(f"the last scan of root {row.name}: {row.scan_error}")
    return notes


def _is_new(row: RootRow) -> bool:
    return row.is_configured and row.scanned_seconds is None


def _check_root(root: str | None, seen: Iterable[RootRow]) -> None:
    names = [row.name for row in seen]
    if root is not None and root not in names:
        raise _unknown("root", root, names)


def _check_run(connection: Connection, wanted: CheckpointFilter, root_ids: list[int]) -> None:
    mine = runs.c.root_id.in_(root_ids)
    if wanted.run_id is not None:
        query = select(runs.c.id).where(runs.c.id == wanted.run_id, mine)
        if connection.execute(query).first() is None:
            raise InvalidQueryError("run_id", f"there is no run {wanted.run_id}")
    if wanted.run is None:
        return
    if connection.execute(select(runs.c.id).where(runs.c.key == wanted.run, mine).limit(1)).first() is None:
        newest = select(runs.c.key).where(mine).order_by(runs.c.id.desc()).limit(_LOOKED_AT)
        raise _unknown("run", wanted.run, list(connection.execute(newest).scalars()))


def _check_metric(connection: Connection, name: str, visible: frozenset[str] | None) -> None:
    if not _has_metric(connection, name, visible):
        names = [near for near in _names_of_metrics(connection) if _has_metric(connection, near, visible)]
        raise _unknown("metric", name, names)


def _has_metric(connection: Connection, name: str, visible: frozenset[str] | None) -> bool:
    query = select(metrics.c.name).where(metrics.c.name == name).limit(1)
    if visible is not None:
        query = query.join(checkpoints, checkpoints.c.id == metrics.c.checkpoint_id)
        query = query.join(roots, roots.c.id == checkpoints.c.root_id)
        query = query.where(roots.c.name.in_(sorted(visible)))
    return connection.execute(query).first() is not None


def _names_of_metrics(connection: Connection) -> list[str]:
    """By as many steps through the index as there are names, since each is there many thousand times."""
    names: list[str] = []
    while len(names) < _METRICS:
        query = select(func.min(metrics.c.name))
        found = connection.execute(query.where(metrics.c.name > names[-1]) if names else query).scalar()
        if found is None:
            break
        names.append(found)
    return names


def _unknown(what: str, name: str, names: list[str]) -> InvalidQueryError:
    last = name.rpartition("/")[2]
    same = [other for other in names if other.rpartition("/")[2] == last] if last else []
    near = list(dict.fromkeys([*same, *close_to(name, names)]))
    told = f"; did you mean {listed(near)}?" if near else ""
    return InvalidQueryError(what, f"there is no {what} {name[:200]!r}{told}")
