"""Runs: the folders that hold checkpoints, with sums that are kept as checkpoints come and go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, select, tuple_, update

from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.sql import insert_missing
from dcp.server.database.tables import checkpoints, roots, runs

__all__ = ["Run", "RunChange", "ensure_run", "ensure_runs", "get_run", "refresh_runs"]


_CHUNK: Final = 250
_OWN: Final = (
    "key",
    "checkpoint_count",
    "latest_step",
    "latest_seconds",
    "bytes",
    "created_seconds",
    "updated_seconds",
)


@dataclass(slots=True)
class RunChange:
    """What has been added to a run; negative for what has been taken away."""

    checkpoints: int = 0
    bytes: int = 0

    def count(self, before: tuple[str, int] | None, after: tuple[str, int]) -> None:
        """A checkpoint's state and bytes were ``before``, and are ``after``."""
        for sign, found in ((-1, before), (1, after)):
            if found is not None and found[0] == "committed":
                self.checkpoints += sign
                self.bytes += sign * found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run; counts, sums and the latest are of its committed checkpoints."""

    id: int
    root: str
    key: str
    checkpoint_count: int
    latest_step: int | None
    latest_seconds: float | None
    bytes: int
    created_seconds: float
    updated_seconds: float


def ensure_run(connection: Connection, root_id: int, key: str, *, now: float) -> int:
    """The id of the run, which is made if it is not there."""
    return ensure_runs(connection, [(root_id, key)], now=now)[root_id, key]


def ensure_runs(
    connection: Connection, places: Iterable[tuple[int, str]], *, now: float
) -> dict[tuple[int, str], int]:
    """The ids of runs by root id and key; those that are not there are made."""
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
    """A run; `MissingError` if there is none that may be seen."""
    row = connection.execute(select_runs(visible).where(runs.c.id == run_id)).one_or_none()
    if row is None:
        raise MissingError("run", run_id)
    return Run(**row._mapping)


def refresh_runs(connection: Connection, changes: Mapping[int, RunChange], *, now: float) -> None:
    """Keep the sums of runs whose checkpoints have changed; the cost does not grow with the runs."""
    if not changes:
        return
    of_run = (checkpoints.c.run_id == bindparam("number"), checkpoints.c.state == "committed")
    latest_step = select(checkpoints.c.step).where(*of_run).order_by(checkpoints.c.step_order.desc()).limit(1)
    latest_seconds = (
        select(checkpoints.c.committed_seconds)
        .where(*of_run)
        .order_by(checkpoints.c.committed_seconds.desc())
        .limit(1)
    )
    connection.execute(
        update(runs)
        .where(runs.c.id == bindparam("number"))
        .values(
            checkpoint_count=runs.c.checkpoint_count + bindparam("more_checkpoints"),
            bytes=runs.c.bytes + bindparam("more_bytes"),
            latest_step=latest_step.scalar_subquery(),
            latest_seconds=latest_seconds.scalar_subquery(),
            updated_seconds=now,
        ),
        [
            {"number": number, "more_checkpoints": change.checkpoints, "more_bytes": change.bytes}
            for number, change in sorted(changes.items())
        ],
    )


def select_runs(visible: frozenset[str] | None) -> Select[Any]:
    """The columns of `Run`, of those that may be seen."""
    query = select(
        runs.c.id,
        roots.c.name.label("root"),
        *(runs.c[name] for name in _OWN),
    ).join_from(runs, roots, roots.c.id == runs.c.root_id)
    return query if visible is None else query.where(roots.c.name.in_(sorted(visible)))


def _ids(connection: Connection, places: Sequence[tuple[int, str]]) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for start in range(0, len(places), _CHUNK):
        query = select(runs.c.root_id, runs.c.key, runs.c.id).where(
            tuple_(runs.c.root_id, runs.c.key).in_(places[start : start + _CHUNK])
        )
        found |= {(row.root_id, row.key): row.id for row in connection.execute(query)}
    return found
