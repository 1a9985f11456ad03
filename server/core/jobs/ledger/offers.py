"""Kinds of jobs that workers offer, so that a job which none of them does is shown as such."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection, delete, select

from dcp.server.database.engine import insert_or_update
from dcp.server.database.tables import workers
from dcp.server.records.jobs import Job

NOTE_SECONDS: Final = 15.0
_GONE_SECONDS: Final = 60.0
"""After the last note of a worker, which writes one every `NOTE_SECONDS`."""


def note_offer(connection: Connection, owner: str, kinds: Iterable[str], now: float) -> None:
    """Note that a worker runs and does jobs of ``kinds``; forget those that have gone."""
    row = {"owner": owner, "kinds": sorted(kinds), "seen_seconds": now}
    insert_or_update(connection, workers, [row])
    connection.execute(delete(workers).where(workers.c.seen_seconds < now - 10 * _GONE_SECONDS))


def withdraw_offer(connection: Connection, owner: str) -> None:
    """Forget a worker that ends."""
    connection.execute(delete(workers).where(workers.c.owner == owner))


def with_offers(connection: Connection, jobs: Sequence[Job], now: float) -> list[Job]:
    """Return ``jobs`` with ``is_unserved`` set on those that have not ended and that no worker does."""
    if all(job.is_final for job in jobs):
        return list(jobs)
    query = select(workers.c.kinds).where(workers.c.seen_seconds >= now - _GONE_SECONDS)
    offered = {kind for kinds in connection.execute(query).scalars() for kind in kinds}
    return [job if job.is_final else replace(job, is_unserved=job.kind not in offered) for job in jobs]
