"""Labels: tags, pins, metrics, and aliases such as "best" that move within a run.

Each change increments the version of the checkpoint, writes an audit entry, and can require an expected
version. Unchanged labels write nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from sqlalchemy import Connection, Row, Select, delete, insert, select, text, update

from dcp.server.catalog import audit
from dcp.server.catalog.details import bump, get_checkpoint, lock_checkpoint
from dcp.server.catalog.errors import (
    ChangedError,
    InvalidQueryError,
    MissingError,
    ProtectedError,
    StateError,
)
from dcp.server.catalog.events import checkpoint_event, emit_all
from dcp.server.catalog.inputs import check_label
from dcp.server.catalog.runs import touch_run
from dcp.server.database.engine import insert_or_update
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import aliases, checkpoints, metrics, roots, runs, tags
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import Shown


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that moves between checkpoints of a run. ``is_protected``: only admins move the alias."""

    run_id: int
    name: Annotated[str, Shown("Name of the alias, such as best.")]
    checkpoint_id: int
    is_protected: Annotated[bool, Shown("Only admins move the alias.")]
    updated_at: datetime
    updated_by: Annotated[str | None, Shown("Account or key of the last change.")]
    etag: Annotated[str, Shown("For If-Match.")]


MAX_LABELS: Final = 256
_ALIASES_LOCK: Final = 0x616C_6961 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change with actor, time and conditions.

    ``expected_version`` None accepts any version; ``visible`` None is all roots. ``detail`` joins the audit
    entry.
    """

    actor: str
    now: float | None = None
    expected_version: int | None = None
    visible: frozenset[str] | None = None
    request_id: str | None = None
    address: str | None = None

    @property
    def at_seconds(self) -> float:
        """Return ``now``, or else the current time."""
        return time.time() if self.now is None else self.now

    def record(
        self,
        connection: Connection,
        action: str,
        target: str,
        detail: Mapping[str, Any] | None,
        root: str | None = None,
    ) -> None:
        """Write the audit entry; ``root`` as for `audit.record`."""
        audit.record(
            connection,
            self.actor,
            action,
            target,
            detail,
            now=self.at_seconds,
            request_id=self.request_id,
            address=self.address,
            root=root,
        )


def add_tags(
    connection: Connection, checkpoint_id: int, names: Iterable[str], change: Change
) -> CheckpointDetail:
    """Add tags, and emit "checkpoint.tagged" with the new ones. Raises like `set_pinned`."""
    wanted = sorted({check_label("tag", name) for name in names})

    def act(row: Mapping[Any, Any]) -> Mapping[str, Any] | None:
        has = _tags(connection, checkpoint_id)
        new = [name for name in wanted if name not in has]
        if not new:
            return None
        if len(has) + len(new) > MAX_LABELS:
            raise InvalidQueryError("tag", f"a checkpoint has {MAX_LABELS} tags at most")
        connection.execute(
            insert(tags),
            [
                {"checkpoint_id": checkpoint_id, "tag": name, "created_seconds": change.at_seconds}
                for name in new
            ],
        )
        event = checkpoint_event("checkpoint.tagged", row, tags=new)
        emit_all(connection, [event], now=change.at_seconds)
        return {"tags": new}

    return _changed(connection, checkpoint_id, "checkpoint.tag", change, act)


def remove_tags(
    connection: Connection, checkpoint_id: int, names: Iterable[str], change: Change
) -> CheckpointDetail:
    """Remove tags; absent tags are ignored. Raises like `set_pinned`."""
    wanted = {check_label("tag", name) for name in names}

    def act(_row: Mapping[Any, Any]) -> Mapping[str, Any] | None:
        gone = sorted(wanted & _tags(connection, checkpoint_id))
        if not gone:
            return None
        connection.execute(delete(tags).where(tags.c.checkpoint_id == checkpoint_id, tags.c.tag.in_(gone)))
        return {"tags": gone}

    return _changed(connection, checkpoint_id, "checkpoint.untag", change, act)


def set_pinned(
    connection: Connection, checkpoint_id: int, is_pinned: bool, change: Change
) -> CheckpointDetail:
    """Pin the checkpoint against deletion, or unpin it.

    Raises `MissingError`, `ChangedError` (another version), or `StateError` (deleted or purged).
    """

    def act(row: Mapping[Any, Any]) -> Mapping[str, Any] | None:
        if row["is_pinned"] == is_pinned:
            return None
        connection.execute(
            update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(is_pinned=is_pinned)
        )
        return {}

    return _changed(
        connection, checkpoint_id, "checkpoint.pin" if is_pinned else "checkpoint.unpin", change, act
    )


def set_metrics(
    connection: Connection, checkpoint_id: int, values: Mapping[str, float | None], change: Change
) -> CheckpointDetail:
    """Set finite metrics; None removes a metric, and other metrics stay. Raises like `set_pinned`."""
    for name, value in values.items():
        check_label("metric", name)
        if value is not None and not math.isfinite(value):
            raise InvalidQueryError("metric", f"{name} is not a finite number")

    def act(_row: Mapping[Any, Any]) -> Mapping[str, Any] | None:
        query = select(metrics.c.name, metrics.c.value).where(metrics.c.checkpoint_id == checkpoint_id)
        has = {row.name: row.value for row in connection.execute(query)}
        new = {name: value for name, value in sorted(values.items()) if has.get(name) != value}
        if not new:
            return None
        if len(has | new) > MAX_LABELS:
            raise InvalidQueryError("metric", f"a checkpoint has {MAX_LABELS} metrics at most")
        rows = [
            {"checkpoint_id": checkpoint_id, "name": name, "value": float(value)}
            for name, value in new.items()
            if value is not None
        ]
        insert_or_update(connection, metrics, rows)
        gone = [name for name, value in new.items() if value is None]
        connection.execute(
            delete(metrics).where(metrics.c.checkpoint_id == checkpoint_id, metrics.c.name.in_(gone))
        )
        return {"metrics": new}

    return _changed(connection, checkpoint_id, "checkpoint.metrics", change, act)


def _changed(
    connection: Connection,
    checkpoint_id: int,
    action: str,
    change: Change,
    act: Callable[[Mapping[Any, Any]], Mapping[str, Any] | None],
) -> CheckpointDetail:
    row = lock_checkpoint(connection, checkpoint_id, change.visible, change.expected_version)
    if row["state"] in ("deleted", "purged"):
        raise StateError(f"checkpoint {checkpoint_id} is {row['state']}", state=row["state"])
    detail = act(row)
    if detail is not None:
        bump(connection, checkpoint_id, change.at_seconds)
        touch_run(connection, row["run_id"], change.at_seconds)
        about = {"root": row["root"], "key": row["key"], **detail}
        change.record(connection, action, f"checkpoint:{checkpoint_id}", about)
    return get_checkpoint(connection, checkpoint_id)


def _tags(connection: Connection, checkpoint_id: int) -> set[str]:
    query = select(tags.c.tag).where(tags.c.checkpoint_id == checkpoint_id)
    return set(connection.execute(query).scalars())


# -- aliases -------------------------------------------------------------------------------------------------


def get_alias(connection: Connection, run_id: int, name: str, visible: frozenset[str] | None = None) -> Alias:
    """Return one alias. Raises `MissingError` if none is visible."""
    row = connection.execute(
        _select(visible).where(aliases.c.run_id == run_id, aliases.c.name == name)
    ).first()
    if row is None:
        raise MissingError("alias", name)
    return _alias(row)


def list_aliases(connection: Connection, run_id: int, visible: frozenset[str] | None = None) -> list[Alias]:
    """Return the aliases of a run, by name."""
    query = _select(visible).where(aliases.c.run_id == run_id)
    return sorted(map(_alias, connection.execute(query)), key=lambda alias: alias.name)


def lock_aliases(connection: Connection, run_id: int) -> None:
    """Lock the aliases of a run until the transaction ends; SQLite serializes all writers."""
    if connection.dialect.name == "postgresql":
        key = _ALIASES_LOCK + run_id % (1 << 32)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def set_alias(
    connection: Connection,
    run_id: int,
    name: str,
    checkpoint_id: int,
    change: Change,
    *,
    is_admin: bool = False,
    is_protected: bool | None = None,
) -> Alias:
    """Create the alias or move it to this checkpoint of the run. Emits "checkpoint.aliased".

    ``change.expected_version`` is the version of the alias; 0 means absent. ``is_protected`` None keeps the
    protection; only admins set it and move protected aliases. Raises `MissingError`, `ChangedError`,
    `ProtectedError`, and `StateError` for a deleted or purged checkpoint.
    """
    check_label("alias", name)
    lock_aliases(connection, run_id)
    row = lock_checkpoint(connection, checkpoint_id, change.visible)
    if row["run_id"] != run_id:
        raise MissingError("checkpoint", checkpoint_id)
    if row["state"] in ("deleted", "purged"):
        raise StateError(f"checkpoint {checkpoint_id} is {row['state']}", state=row["state"])
    present = _locked(connection, run_id, name)
    _check(present, name, change)
    was_protected = present is not None and present.is_protected
    wants_protection = is_protected is not None and is_protected != was_protected
    if not is_admin and (wants_protection or was_protected):
        raise ProtectedError(name)
    if present is not None and present.checkpoint_id == checkpoint_id and not wants_protection:
        return _alias(present)
    values: dict[str, Any] = {
        "checkpoint_id": checkpoint_id,
        "updated_seconds": change.at_seconds,
        "updated_by": change.actor[:128],
    }
    if is_protected is not None:
        values["is_protected"] = is_protected
    if present is None:
        connection.execute(insert(aliases).values(run_id=run_id, name=name, **values))
    else:
        named = update(aliases).where(aliases.c.run_id == run_id, aliases.c.name == name)
        connection.execute(named.values(**values, version=aliases.c.version + 1))
    for number in sorted({checkpoint_id, checkpoint_id if present is None else present.checkpoint_id}):
        bump(connection, number, change.at_seconds)
    _record(connection, "alias.set", name, row, change, before=present, after=checkpoint_id)
    if present is None or present.checkpoint_id != checkpoint_id:
        event = checkpoint_event("checkpoint.aliased", row, alias=name)
        emit_all(connection, [event], now=change.at_seconds)
    return get_alias(connection, run_id, name)


def delete_alias(
    connection: Connection, run_id: int, name: str, change: Change, *, is_admin: bool = False
) -> None:
    """Remove an alias. Raises `MissingError`, `ChangedError` and `ProtectedError`."""
    get_alias(connection, run_id, name, change.visible)
    present = _locked(connection, run_id, name)
    if present is None:
        raise MissingError("alias", name)
    _check(present, name, change)
    if present.is_protected and not is_admin:
        raise ProtectedError(name)
    row = lock_checkpoint(connection, present.checkpoint_id)
    connection.execute(delete(aliases).where(aliases.c.run_id == run_id, aliases.c.name == name))
    bump(connection, present.checkpoint_id, change.at_seconds)
    _record(connection, "alias.delete", name, row, change, before=present, after=None)


def _select(visible: frozenset[str] | None) -> Select[Any]:
    query = select(aliases)
    if visible is None:
        return query
    return (
        query.join_from(aliases, runs, runs.c.id == aliases.c.run_id)
        .join(roots, roots.c.id == runs.c.root_id)
        .where(roots.c.name.in_(sorted(visible)))
    )


def _alias(row: Row[Any]) -> Alias:
    return record_of_row(Alias, row, etag=f'"a{row.run_id}-{row.checkpoint_id}-{row.version}"')


def _locked(connection: Connection, run_id: int, name: str) -> Row[Any] | None:
    query = select(aliases).where(aliases.c.run_id == run_id, aliases.c.name == name).with_for_update()
    return connection.execute(query).first()


def _check(present: Row[Any] | None, name: str, change: Change) -> None:
    version = 0 if present is None else present.version
    if change.expected_version is not None and change.expected_version != version:
        raise ChangedError("alias", name, expected=change.expected_version, version=version)


def _record(
    connection: Connection,
    action: str,
    name: str,
    row: Mapping[Any, Any],
    change: Change,
    *,
    before: Row[Any] | None,
    after: int | None,
) -> None:
    detail = {
        "alias": name,
        "root": row["root"],
        "run": row["run"],
        "from": None if before is None else before.checkpoint_id,
        "to": after,
    }
    change.record(connection, action, f"run:{row['run_id']}", detail)
