"""Single checkpoints: lookup by id, key, step or alias, with labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Select, select, update

from dcp.server.catalog.errors import ChangedError, InvalidQueryError, MissingError
from dcp.server.catalog.inputs import NONFINITE
from dcp.server.database.mapping import record_of_row, shown_columns
from dcp.server.database.tables import aliases, checkpoints, metadata, metrics, roots, runs, structures, tags
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail
from dcp.steps import PARTIAL, partial_of

C = TypeVar("C", bound=Checkpoint)

_NOTED_METRICS: Final = "noted_metrics"
_NOTED_PARTS: Final = "noted_parts"
"""Keys of user metadata that describe non-finite metrics and partial saves."""


def row_columns(record: type[Checkpoint] = Checkpoint) -> list[Any]:
    """Return the columns of a `Checkpoint` without labels, from the tables that `joined` joins."""
    user = checkpoints.c.user_metadata
    noted = user["metrics"].label(_NOTED_METRICS), user[PARTIAL].label(_NOTED_PARTS)
    return [*shown_columns(record, "checkpoints", metadata), *noted]


def joined(query: Select[Any]) -> Select[Any]:
    """Join root, run and structure to a ``query`` on checkpoints."""
    return (
        query.join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .outerjoin(structures, structures.c.id == checkpoints.c.structure_id)
    )


def get_checkpoint(
    connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None
) -> CheckpointDetail:
    """Return all details of a checkpoint. Raises `MissingError` if none is visible."""
    query = joined(select(*row_columns(CheckpointDetail))).where(checkpoints.c.id == checkpoint_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or (visible is not None and row["root"] not in visible):
        raise MissingError("checkpoint", checkpoint_id)
    return _made(CheckpointDetail, row, labels_of(connection, [checkpoint_id])[checkpoint_id])


def keys_of(
    connection: Connection, numbers: Iterable[int], visible: frozenset[str] | None = None
) -> dict[int, str]:
    """Return the keys of the visible checkpoints among these."""
    columns = (checkpoints.c.id, checkpoints.c.key, roots.c.name)
    query = joined(select(*columns)).where(checkpoints.c.id.in_(sorted(set(numbers))))
    rows = connection.execute(query)
    return {number: key for number, key, root in rows if visible is None or root in visible}


def with_labels(connection: Connection, rows: Sequence[Mapping[Any, Any]]) -> list[Checkpoint]:
    """Return rows of `row_columns` as checkpoints with labels, in order."""
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
    """Return the row with ``root`` and ``run``, locked until the transaction ends.

    Raises `MissingError`, and `ChangedError` if the version is not ``expected_version``.
    """
    query = joined(select(checkpoints, roots.c.name.label("root"), runs.c.key.label("run")))
    query = query.where(checkpoints.c.id == checkpoint_id).with_for_update(of=checkpoints)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or (visible is not None and row["root"] not in visible):
        raise MissingError("checkpoint", checkpoint_id)
    if expected_version is not None and row["version"] != expected_version:
        raise ChangedError("checkpoint", checkpoint_id, expected=expected_version, version=row["version"])
    return row


def bump(connection: Connection, checkpoint_id: int, now: float, **values: Any) -> None:
    """Increment the version of the checkpoint, and set the ``values`` of other columns."""
    statement = update(checkpoints).where(checkpoints.c.id == checkpoint_id)
    values |= {"version": checkpoints.c.version + 1, "updated_seconds": now}
    connection.execute(statement.values(**values))


def labels_of(connection: Connection, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return ``tags``, ``aliases`` (sorted) and ``metrics`` by checkpoint id."""
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


# -- by name -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointName:
    """The name of a checkpoint: a ``key``, or a ``run`` with a ``step``, an ``alias`` or neither (the latest
    step).

    ``root`` selects among equal names. Raises `InvalidQueryError` for other combinations.
    """

    root: str | None = None
    key: str | None = None
    run: str | None = None
    step: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) == (self.run is None):
            raise InvalidQueryError("key", "pass either key or run")
        if self.key is not None and (self.step is not None or self.alias is not None):
            raise InvalidQueryError("key", "step and alias require run, not key")
        if self.step is not None and self.alias is not None:
            raise InvalidQueryError("step", "pass step or alias, not both")
        for field in ("root", "key", "run", "alias"):
            if "\x00" in (getattr(self, field) or ""):
                raise InvalidQueryError(field, "must not contain NUL")

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def find_checkpoint(
    connection: Connection, name: CheckpointName, visible: frozenset[str] | None = None
) -> CheckpointDetail:
    """Return the checkpoint with this name.

    Among several, such as in other roots or formats, committed ones come first, then the newest. Raises
    `MissingError` if none is visible.
    """
    query = _matching(name)
    if name.root is not None:
        query = query.where(roots.c.name == name.root)
    if visible is not None:
        query = query.where(roots.c.name.in_(sorted(visible)))
    is_other = checkpoints.c.state != "committed"
    order = [is_other, checkpoints.c.committed_seconds.desc(), checkpoints.c.id.desc()]
    if name.run is not None and name.step is None and name.alias is None:
        order.insert(1, checkpoints.c.step_order.desc())
    number = connection.execute(query.order_by(*order).limit(1)).scalar()
    if number is None:
        raise MissingError("checkpoint", str(name))
    return get_checkpoint(connection, number, visible)


def _matching(name: CheckpointName) -> Select[Any]:
    query = select(checkpoints.c.id).join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
    if name.key is not None:
        last = name.key.rpartition("/")[2]  # indexed
        return query.where(checkpoints.c.name == last, checkpoints.c.key == name.key)
    query = query.join(runs, runs.c.id == checkpoints.c.run_id).where(runs.c.key == name.run)
    if name.step is not None:
        return query.where(checkpoints.c.step_order == name.step)
    if name.alias is not None:
        query = query.join(aliases, aliases.c.checkpoint_id == checkpoints.c.id)
        return query.where(aliases.c.run_id == runs.c.id, aliases.c.name == name.alias)
    return query
