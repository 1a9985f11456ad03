"""Checkpoints as they are shown: a row with its labels, and all that is known of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Select, select, update

from dcp.server.catalog.errors import ChangedError, MissingError
from dcp.server.catalog.values import NONFINITE
from dcp.server.database.records import record_of_row, shown_columns
from dcp.server.database.tables import aliases, checkpoints, metadata, metrics, roots, runs, structures, tags
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail
from dcp.steps import PARTIAL, partial_of

__all__ = [
    "Checkpoint",
    "CheckpointDetail",
    "get_checkpoint",
    "joined",
    "keys_of",
    "lock_checkpoint",
    "row_columns",
    "with_labels",
]

C = TypeVar("C", bound=Checkpoint)

_NOTED_METRICS: Final = "noted_metrics"
_NOTED_PARTS: Final = "noted_parts"
"""What the user metadata say of metrics, which may not be finite, and of a partial save."""


def row_columns(record: type[Checkpoint] = Checkpoint) -> list[Any]:
    """The columns of a `Checkpoint` but for its labels, of the tables that `joined` joins."""
    user = checkpoints.c.user_metadata
    noted = user["metrics"].label(_NOTED_METRICS), user[PARTIAL].label(_NOTED_PARTS)
    return [*shown_columns(record, "checkpoints", metadata), *noted]


def joined(query: Select[Any]) -> Select[Any]:
    """``query`` on checkpoints, with the root, the run and the structure of each."""
    return (
        query.join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .outerjoin(structures, structures.c.id == checkpoints.c.structure_id)
    )


def get_checkpoint(
    connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None
) -> CheckpointDetail:
    """All of a checkpoint; `MissingError` if there is none that may be seen."""
    query = joined(select(*row_columns(CheckpointDetail))).where(checkpoints.c.id == checkpoint_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or (visible is not None and row["root"] not in visible):
        raise MissingError("checkpoint", checkpoint_id)
    return _made(CheckpointDetail, row, labels_of(connection, [checkpoint_id])[checkpoint_id])


def keys_of(
    connection: Connection, numbers: Iterable[int], visible: frozenset[str] | None = None
) -> dict[int, str]:
    """The keys of some checkpoints, of those that may be seen."""
    columns = (checkpoints.c.id, checkpoints.c.key, roots.c.name)
    query = joined(select(*columns)).where(checkpoints.c.id.in_(sorted(set(numbers))))
    rows = connection.execute(query)
    return {number: key for number, key, root in rows if visible is None or root in visible}


def with_labels(connection: Connection, rows: Sequence[Mapping[Any, Any]]) -> list[Checkpoint]:
    """Rows of `row_columns` as checkpoints, in the same order."""
    labels = labels_of(connection, [row["id"] for row in rows])
    return [_made(Checkpoint, row, labels[row["id"]]) for row in rows]


def _made(record: type[C], row: Mapping[Any, Any], labels: Mapping[str, Any]) -> C:
    noted = row[_NOTED_METRICS] if isinstance(row[_NOTED_METRICS], dict) else {}
    missing = noted.keys() - labels["metrics"].keys()
    return record_of_row(
        record,
        row,
        **labels,
        nonfinite_metrics={name: noted[name] for name in sorted(missing) if noted[name] in NONFINITE},
        partial=partial_of({PARTIAL: row[_NOTED_PARTS]}),
        etag=f'"c{row["id"]}-{row["version"]}"',
    )


def lock_checkpoint(
    connection: Connection,
    checkpoint_id: int,
    visible: frozenset[str] | None = None,
    expected_version: int | None = None,
) -> Mapping[Any, Any]:
    """The row with ``root`` and ``run``; nobody else changes it before this transaction ends.

    Raises `MissingError`, and `ChangedError` if it is not in ``expected_version``.
    """
    query = (
        select(checkpoints, roots.c.name.label("root"), runs.c.key.label("run"))
        .join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .where(checkpoints.c.id == checkpoint_id)
        .with_for_update(of=checkpoints)
    )
    row = connection.execute(query).mappings().one_or_none()
    if row is None or (visible is not None and row["root"] not in visible):
        raise MissingError("checkpoint", checkpoint_id)
    if expected_version is not None and row["version"] != expected_version:
        raise ChangedError("checkpoint", checkpoint_id, expected=expected_version, version=row["version"])
    return row


def bump(connection: Connection, checkpoint_id: int, now: float) -> None:
    """Something about the checkpoint has changed: another version."""
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.id == checkpoint_id)
        .values(version=checkpoints.c.version + 1, updated_seconds=now)
    )


def labels_of(connection: Connection, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
    """The labels by id: ``tags`` and ``aliases`` (sorted), and ``metrics``."""
    wanted = list(numbers)
    found: dict[int, dict[str, Any]] = {
        number: {"tags": (), "aliases": (), "metrics": {}} for number in wanted
    }
    if not wanted:
        return found
    tagged = select(tags.c.checkpoint_id, tags.c.tag).where(tags.c.checkpoint_id.in_(wanted))
    for number, tag in connection.execute(tagged):
        found[number]["tags"] += (tag,)
    named = select(aliases.c.checkpoint_id, aliases.c.name).where(aliases.c.checkpoint_id.in_(wanted))
    for number, name in connection.execute(named):
        found[number]["aliases"] += (name,)
    measured = select(metrics.c.checkpoint_id, metrics.c.name, metrics.c.value)
    for number, metric, value in connection.execute(measured.where(metrics.c.checkpoint_id.in_(wanted))):
        found[number]["metrics"][metric] = value
    for labels in found.values():
        labels["tags"] = tuple(sorted(labels["tags"]))
        labels["aliases"] = tuple(sorted(labels["aliases"]))
        labels["metrics"] = dict(sorted(labels["metrics"].items()))
    return found
