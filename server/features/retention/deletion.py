"""Deleting with grace: marked as deleted, restorable until its bytes are purged."""

from __future__ import annotations

from sqlalchemy import Connection, select

from dcp.server.catalog.checkpoints import CheckpointDetail, get_checkpoint, set_state
from dcp.server.catalog.details import lock_checkpoint
from dcp.server.catalog.errors import StateError
from dcp.server.catalog.labels import Change
from dcp.server.core.jobs.ledger.rows import lock_job, unfinished_job
from dcp.server.core.jobs.ledger.transitions import request_cancel
from dcp.server.database.tables import aliases

__all__ = ["delete_softly", "purge_dedup_key", "restore"]


def purge_dedup_key(checkpoint_id: int) -> str:
    """One at a time of a checkpoint."""
    return f"purge:{checkpoint_id}"


def delete_softly(
    connection: Connection, checkpoint_id: int, grace_seconds: float, change: Change
) -> CheckpointDetail:
    """Mark it as deleted; its bytes stay for ``grace_seconds``. Deleting it again changes nothing.

    Raises MissingError, ChangedError, and StateError if it is pinned, an alias names it, or it is purged.
    """
    row = lock_checkpoint(connection, checkpoint_id, change.visible, change.expected_version)
    if row["state"] == "deleted":
        return get_checkpoint(connection, checkpoint_id)
    query = select(aliases.c.name).where(aliases.c.checkpoint_id == checkpoint_id).order_by(aliases.c.name)
    named = list(connection.execute(query).scalars())
    if named:
        raise StateError(
            f"checkpoint {checkpoint_id} is {named[0]!r} of its run: move or remove that alias first",
            state=row["state"],
        )
    now = change.at_seconds
    return set_state(
        connection,
        checkpoint_id,
        "deleted",
        actor=change.actor,
        now=now,
        purge_after_seconds=now + grace_seconds,
    )


def restore(connection: Connection, checkpoint_id: int, change: Change) -> CheckpointDetail:
    """Undo a deletion whose purge has not begun. Its bytes are looked at by the next scan.

    Raises MissingError, ChangedError, and StateError if it is not deleted, or is being purged.
    """
    row = lock_checkpoint(connection, checkpoint_id, change.visible, change.expected_version)
    if row["state"] != "deleted":
        raise StateError(f"checkpoint {checkpoint_id} is {row['state']}, not deleted", state=row["state"])
    job_id = unfinished_job(connection, purge_dedup_key(checkpoint_id))
    if job_id is not None:
        job = lock_job(connection, job_id)
        if job.state == "queued" and job.attempt == 0:
            request_cancel(connection, job_id, change.at_seconds, change.actor)
        elif not job.is_final:
            raise StateError(f"checkpoint {checkpoint_id} is being purged by job {job_id}", state="deleted")
    return set_state(connection, checkpoint_id, "committed", actor=change.actor, now=change.at_seconds)
