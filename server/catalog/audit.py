"""Audit log: a row per requested change, with actor, time and target."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, insert, select

from dcp.server.catalog.cursors import read_page
from dcp.server.catalog.inputs import clean_json, clean_text
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import audit, checkpoints, job_roots, jobs, roots, runs
from dcp.server.records.administration import AuditEntry
from dcp.server.records.lists import Page

_TABLES: Final[dict[str, Table]] = {"checkpoint": checkpoints, "run": runs, "job": jobs}
"""Tables with the root of a target, by the kind of the target."""


def record(
    connection: Connection,
    actor: str,
    action: str,
    target: str,
    detail: Mapping[str, Any] | None = None,
    *,
    now: float | None = None,
    request_id: str | None = None,
    address: str | None = None,
    root: str | None = None,
) -> None:
    """Write one entry without secrets; the entry becomes visible with the transaction.

    ``root`` is the root of the target, for its admins; the root of a checkpoint, run or job is looked up.
    Admins of some roots can read the detail of a job if they administer all roots of the job.
    """
    connection.execute(
        insert(audit).values(
            at_seconds=time.time() if now is None else now,
            actor=clean_text(actor)[:128],
            action=clean_text(action)[:64],
            target=clean_text(target)[:512],
            detail=None if detail is None else clean_json(detail),
            request_id=None if request_id is None else clean_text(request_id)[:64],
            address=None if address is None else clean_text(address)[:64],
            root=root or _root_of(connection, target),
            other_roots=_other_roots(connection, target) or None,
        )
    )


def _root_of(connection: Connection, target: str) -> str | None:
    kind, _, number = target.partition(":")
    if kind not in _TABLES or not number.isdecimal():
        return None
    table = _TABLES[kind]
    query = select(roots.c.name).join(table, table.c.root_id == roots.c.id).where(table.c.id == int(number))
    return connection.execute(query).scalar_one_or_none()


def _other_roots(connection: Connection, target: str) -> list[str]:
    """Return the further roots of a job. The entry stores them because it outlives the job."""
    kind, _, number = target.partition(":")
    if kind != "job" or not number.isdecimal():
        return []
    query = select(roots.c.name).join(job_roots, job_roots.c.root_id == roots.c.id)
    return list(connection.execute(query.where(job_roots.c.job_id == int(number))).scalars())


def last_removal(connection: Connection, checkpoint_id: int) -> AuditEntry | None:
    """Return the entry of the last deletion of the checkpoint; None if the log has none."""
    to = audit.c.detail["to"].as_string()
    query = (
        select(audit)
        .where(audit.c.target == f"checkpoint:{checkpoint_id}")
        .where(audit.c.action == "checkpoint.state", to == "deleted")
        .order_by(audit.c.id.desc())
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else record_of_row(AuditEntry, row)


def audit_page(
    connection: Connection,
    *,
    actor: str | None = None,
    action: str | None = None,
    target: str | None = None,
    root: str | None = None,
    visible: frozenset[str] | None = None,
    since_seconds: float | None = None,
    until_seconds: float | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[AuditEntry]:
    """Return entries of this actor, action, target and root (exact matches), newest first.

    Times range from ``since_seconds`` to before ``until_seconds``. Only entries in ``visible`` roots appear,
    without details of other roots.
    """
    query = select(audit)
    for name, value in {"actor": actor, "action": action, "target": target, "root": root}.items():
        if value is not None:
            query = query.where(audit.c[name] == value)
    if visible is not None:
        query = query.where(audit.c.root.in_(sorted(visible)))
    if since_seconds is not None:
        query = query.where(audit.c.at_seconds >= since_seconds)
    if until_seconds is not None:
        query = query.where(audit.c.at_seconds < until_seconds)

    def entry(row: Row[Any]) -> AuditEntry:
        is_whole = visible is None or visible.issuperset(row.other_roots or ())
        return record_of_row(AuditEntry, row, **({} if is_whole else {"detail": None}))

    key = (audit.c.id, int)
    return read_page(connection, query, entry, "audit", key, cursor=cursor, limit=limit, descending=True)
