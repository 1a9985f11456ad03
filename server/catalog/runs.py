"""Roots, configured now or earlier, and their runs: folders of checkpoints.

Sums of runs, and sums of roots by registering account, are updated with each change of a checkpoint, so
reading a sum takes a few rows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from sqlalchemy import Column, Connection, Select, bindparam, false, func, select, true, tuple_, update

from dcp.server.catalog.cursors import query_mark, read_page
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.names import check_pattern, contains, matches
from dcp.server.database.engine import dialect_insert, insert_missing
from dcp.server.database.mapping import record_of_row, shown_columns
from dcp.server.database.tables import checkpoints, kept, metadata, roots, runs
from dcp.server.records.checkpoints import Run
from dcp.server.records.lists import Page

LIVING: Final = ("committed", "unreadable", "incomplete")
"""States of checkpoints assumed to exist in storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootRow:
    """A root. ``scan_state`` belongs to the scanner."""

    id: int
    name: str
    url: str
    is_configured: bool
    scan_state: Any
    scanned_seconds: float | None
    scan_error: str | None
    created_seconds: float

    @property
    def lost(self) -> int:
        """The number of checkpoints that the last scan missed without marking them as vanished."""
        found = self._noted("lost")
        return found if type(found) is int else 0

    @property
    def doubted_runs(self) -> frozenset[str]:
        """Runs with missed checkpoints."""
        found = self._noted("doubted_runs")
        return frozenset(found) if isinstance(found, list) else frozenset()

    @property
    def is_other_place(self) -> bool:
        """True if the last scan found no known checkpoint."""
        return self._noted("is_other_place") is True

    def _noted(self, name: str) -> Any:
        # another version of the service may have written the value
        return self.scan_state.get(name) if isinstance(self.scan_state, dict) else None


def sync_roots(connection: Connection, urls: Mapping[str, str], *, now: float | None = None) -> None:
    """Create the configured roots by name, and mark removed ones.

    A root with a new URL is scanned from the start; the scan marks missing checkpoints.
    """
    created = time.time() if now is None else now
    insert_missing(
        connection,
        roots,
        [{"name": name, "url": url, "created_seconds": created} for name, url in sorted(urls.items())],
    )
    for row in connection.execute(select(roots.c.id, roots.c.name, roots.c.url, roots.c.is_configured)):
        url = urls.get(row.name)
        if url is None and row.is_configured:
            _update(connection, row.id, is_configured=false())
        elif url is not None and url != row.url:
            _update(connection, row.id, is_configured=true(), url=url, scan_state=None)
        elif url is not None and not row.is_configured:
            _update(connection, row.id, is_configured=true())


def root_id(connection: Connection, name: str) -> int:
    """Return the number of a root. Raises `MissingError` for an unknown name."""
    found = connection.execute(select(roots.c.id).where(roots.c.name == name)).scalar()
    if found is None:
        raise MissingError("root", name)
    return int(found)


def root_row(connection: Connection, name: str) -> RootRow:
    """Return a root. Raises `MissingError` for an unknown name."""
    row = connection.execute(select(roots).where(roots.c.name == name)).one_or_none()
    if row is None:
        raise MissingError("root", name)
    return RootRow(**row._mapping)


def has_living(connection: Connection, name: str) -> bool:
    """Return True if the catalog knows existing checkpoints in the root."""
    query = (
        select(checkpoints.c.id)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(roots.c.name == name, checkpoints.c.state.in_(LIVING))
        .limit(1)
    )
    return connection.execute(query).first() is not None


def list_roots(connection: Connection, visible: frozenset[str] | None = None) -> list[RootRow]:
    """Return all visible roots, by name."""
    rows = connection.execute(select(roots).order_by(roots.c.name)).all()
    return [RootRow(**row._mapping) for row in rows if visible is None or row.name in visible]


def set_scanned(
    connection: Connection, name: str, *, state: Any, error: str | None = None, now: float
) -> None:
    """Store the end of a scan: the state for the next scan, and the error of a failed one."""
    number = root_id(connection, name)
    _update(connection, number, scan_state=state, scan_error=error, scanned_seconds=now)


def _update(connection: Connection, number: int, **values: Any) -> None:
    connection.execute(update(roots).where(roots.c.id == number).values(**values))


RunSort = Literal["latest", "-latest", "key", "-key", "bytes", "-bytes", "checkpoints", "-checkpoints"]
"""Sort orders; a minus means descending. Runs without committed checkpoints are the oldest."""

_SORTS: Final[Mapping[str, tuple[Column[Any], type]]] = {
    "latest": (runs.c.latest_order, float),
    "key": (runs.c.key, str),
    "bytes": (runs.c.bytes, int),
    "checkpoints": (runs.c.checkpoint_count, int),
}
_CHUNK: Final = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Filter of runs by root, part of the key and glob; all given filters must match."""

    root: str | None = None
    contains: str | None = None
    glob: str | None = None

    def __post_init__(self) -> None:
        for name in ("contains", "glob"):
            if (pattern := getattr(self, name)) is not None:
                check_pattern(name, pattern)

    def apply(self, connection: Connection, query: Select[Any]) -> Select[Any]:
        """Restrict ``query``, which includes `runs` and `roots`."""
        if self.root is not None:
            query = query.where(roots.c.name == self.root)
        if self.contains is not None:
            query = query.where(contains(connection, runs.c.key, self.contains))
        if self.glob is not None:
            query = query.where(matches(connection, runs.c.key, self.glob))
        return query


def ensure_runs(
    connection: Connection, places: Iterable[tuple[int, str]], *, now: float
) -> dict[tuple[int, str], int]:
    """Return the ids of runs by root id and key, creating missing runs."""
    wanted = sorted(set(places))
    known = _ids(connection, wanted)
    missing = [place for place in wanted if place not in known]
    if missing:
        rows = [
            {"root_id": root, "key": key, "created_seconds": now, "updated_seconds": now}
            for root, key in missing
        ]
        insert_missing(connection, runs, rows)
        known |= _ids(connection, missing)
    return known


def get_run(connection: Connection, run_id: int, visible: frozenset[str] | None = None) -> Run:
    """Return a run. Raises `MissingError` if none is visible."""
    row = connection.execute(select_runs(visible).where(runs.c.id == run_id)).one_or_none()
    if row is None:
        raise MissingError("run", run_id)
    return record_of_row(Run, row)


def list_runs(
    connection: Connection,
    run_filter: RunFilter,
    sort: RunSort = "-latest",
    cursor: str | None = None,
    limit: int = 50,
    visible: frozenset[str] | None = None,
) -> Page[Run]:
    """Return a page of runs. Raises `InvalidQueryError` for a cursor of another query."""
    column, value_type = _SORTS[sort.removeprefix("-")]
    mark = query_mark("runs", run_filter, sort, visible if visible is None else sorted(visible))
    query = run_filter.apply(connection, select_runs(visible))
    return read_page(
        connection,
        query,
        partial(record_of_row, Run),
        mark,
        (column, value_type),
        (runs.c.id, int),
        cursor=cursor,
        limit=limit,
        descending=sort.startswith("-"),
    )


def touch_run(connection: Connection, run_id: int, now: float) -> None:
    """Set ``updated_seconds`` after a change of a label, metric or verification.

    Values derived from a run compare ``updated_seconds`` to detect changes.
    """
    connection.execute(update(runs).where(runs.c.id == run_id).values(updated_seconds=now))


def select_runs(visible: frozenset[str] | None) -> Select[Any]:
    """Return a query of the columns of `Run` for visible runs."""
    columns = shown_columns(Run, "runs", metadata)
    query = select(*columns).join_from(runs, roots, roots.c.id == runs.c.root_id)
    return query if visible is None else query.where(roots.c.name.in_(sorted(visible)))


def _ids(connection: Connection, places: Sequence[tuple[int, str]]) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for start in range(0, len(places), _CHUNK):
        query = select(runs.c.root_id, runs.c.key, runs.c.id).where(
            tuple_(runs.c.root_id, runs.c.key).in_(places[start : start + _CHUNK])
        )
        found |= {(row.root_id, row.key): row.id for row in connection.execute(query)}
    return found


# -- sums ----------------------------------------------------------------------------------------------------

NO_ACCOUNT: Final = ""


class SumChanges:
    """Changes of counts and bytes by run, and by root and account; `write` adds them to the sums."""

    def __init__(self) -> None:
        self._of_runs: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._kept: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])

    def touch(self, run_id: int) -> None:
        """Note another change of a checkpoint of the run."""
        self._of_runs[run_id]

    def count(self, before: Mapping[Any, Any] | None, after: Mapping[Any, Any] | None) -> None:
        """Note a row of ``checkpoints`` as ``before`` and ``after``; None: absent."""
        for sign, row in ((-1, before), (1, after)):
            if row is not None:
                self.touch(row["run_id"])
            if row is not None and row["state"] == "committed":
                kept = self._kept[row["root_id"], row["owner"] or NO_ACCOUNT]
                for added in (self._of_runs[row["run_id"]], kept):
                    added[0] += sign
                    added[1] += sign * row["bytes"]

    def write(self, connection: Connection, *, now: float) -> None:
        """Write the sums in the transaction of the change; the cost is independent of the number of runs."""
        if not self._of_runs:
            return
        of_run = (checkpoints.c.run_id == bindparam("number"), checkpoints.c.state == "committed")

        def latest(value: Column[Any], order: Column[Any]) -> Any:
            return select(value).where(*of_run).order_by(order.desc()).limit(1).scalar_subquery()

        connection.execute(
            update(runs)
            .where(runs.c.id == bindparam("number"))
            .values(
                checkpoint_count=runs.c.checkpoint_count + bindparam("more_checkpoints"),
                bytes=runs.c.bytes + bindparam("more_bytes"),
                latest_step=latest(checkpoints.c.step, checkpoints.c.step_order),
                latest_seconds=latest(checkpoints.c.committed_seconds, checkpoints.c.committed_seconds),
                updated_seconds=now,
            ),
            [
                {"number": number, "more_checkpoints": count, "more_bytes": size}
                for number, (count, size) in sorted(self._of_runs.items())
            ],
        )
        rows = [
            {"root_id": root, "owner": owner, "checkpoint_count": count, "bytes": size}
            for (root, owner), (count, size) in sorted(self._kept.items())
            if count or size
        ]
        if rows:
            statement = dialect_insert(connection, kept)
            more = {name: kept.c[name] + statement.excluded[name] for name in ("checkpoint_count", "bytes")}
            keys = ["root_id", "owner"]
            connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=more), rows)


def bytes_kept_of(connection: Connection, *, owner: str | None = None, root: str | None = None) -> int:
    """Return the bytes of committed checkpoints registered by an account, or of a root."""
    query = select(func.coalesce(func.sum(kept.c.bytes), 0))
    if owner is not None:
        query = query.where(kept.c.owner == owner)
    if root is not None:
        query = query.where(
            kept.c.root_id == select(roots.c.id).where(roots.c.name == root).scalar_subquery()
        )
    return int(connection.execute(query).scalar_one())


def kept_by_account(connection: Connection) -> dict[str, int]:
    """Return the bytes by account."""
    query = select(kept.c.owner, func.sum(kept.c.bytes)).where(kept.c.owner != NO_ACCOUNT)
    return {owner: int(size) for owner, size in connection.execute(query.group_by(kept.c.owner))}


def kept_by_root(connection: Connection) -> dict[str, int]:
    """Return the bytes by root."""
    query = select(roots.c.name, func.sum(kept.c.bytes)).join_from(kept, roots, roots.c.id == kept.c.root_id)
    return {root: int(size) for root, size in connection.execute(query.group_by(roots.c.name))}


# -- for the scanner -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """The state from which the scanner decides to inspect a checkpoint again."""

    state: str
    fingerprint: str | None


def known_of_run(connection: Connection, root: str, run_key: str) -> dict[str, Known]:
    """Return the checkpoints of a run by name, including removed ones; empty for an unknown run.

    Raises `MissingError` for an unknown root.
    """
    query = (
        select(checkpoints.c.name, checkpoints.c.state, checkpoints.c.fingerprint)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .where(runs.c.root_id == root_id(connection, root), runs.c.key == run_key)
    )
    return {name: Known(state, fingerprint) for name, state, fingerprint in connection.execute(query)}


def run_keys(connection: Connection, root: str) -> list[str]:
    """Return the keys of all runs of a root, sorted."""
    query = select(runs.c.key).where(runs.c.root_id == root_id(connection, root))
    return sorted(connection.execute(query).scalars())
