"""Job ``purge``: removes the bytes of a deleted checkpoint after its grace period.

Removes files known to the catalog; files of a newer checkpoint with the same key stay. A restore cancels a
queued purge, and is refused after the purge has begun.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field
from sqlalchemy import Connection, Select, exists, select

from dcp.server.catalog import audit
from dcp.server.catalog.changes import set_state
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import StateError
from dcp.server.catalog.runs import root_row
from dcp.server.catalog.source_facts import fingerprint_of, marks_of
from dcp.server.core.jobs.kind import (
    CheckpointId,
    JobContext,
    JobPlan,
    Kind,
    Parameters,
    PermanentJobError,
    ReportProgress,
)
from dcp.server.core.jobs.ledger.rows import JobSpec, Json, TaskSpec
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.jobs.subjects import (
    Subject,
    find_subject,
    fingerprint_at,
    open_place,
    storage_errors,
)
from dcp.server.core.problems import ForbiddenError, UnavailableError
from dcp.server.core.security.principal import SYSTEM, Principal
from dcp.server.core.settings import Settings
from dcp.server.database.tables import checkpoints, jobs, roots
from dcp.server.features.retention.deletion import purge_dedup_key
from dcp.server.records.administration import Scope
from dcp.server.records.jobs import Job
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.opening import SourcePlace, index_at
from dcp.storage.formats.registry import format_of, formats
from dcp.storage.stores.base import FileInfo, Store

if TYPE_CHECKING:  # imported lazily: the API process only creates the jobs
    from dcp.manager.removal import Removed
    from dcp.steps import Commit

_MAX_PURGES: Final = 200
_RETRY_SECONDS: Final = 3600.0
"""Interval before a failed purge is submitted again."""

_Weight = tuple[str, int, float]
"""Name, size in bytes and time of the last change: they identify the content of a file."""


class PurgeParams(Parameters):
    """Deleted checkpoint; without ``now``, its grace period must be over."""

    checkpoint_id: CheckpointId
    now: bool = Field(default=False, description="Do not wait for the end of the grace period.")


class PurgeKind(Kind[PurgeParams]):
    """Removal by one task, repeatable from any point."""

    name: ClassVar[str] = "purge"
    about: ClassVar[str] = "Remove the files of a deleted checkpoint after its grace period."
    scope: ClassVar[Scope] = "delete"
    params = PurgeParams
    preload: ClassVar[tuple[str, ...]] = ("dcp.manager.removal",)
    max_attempts: ClassVar[int] = 5

    @classmethod
    def dedup_key(cls, params: PurgeParams) -> str:
        """As `Kind.dedup_key`: one per checkpoint at a time."""
        return purge_dedup_key(params.checkpoint_id)

    @classmethod
    def of_subject(cls, subject: Subject, params: PurgeParams, created_by: str) -> JobSpec:
        """Make the job."""
        return cls.new_job(params, created_by, root=subject.root, checkpoint_id=subject.id)

    def specify(
        self, connection: Connection, params: PurgeParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        subject = find_subject(connection, params.checkpoint_id, caller.roots, state="deleted")
        if subject.root in settings.roots and settings.roots[subject.root].readonly:
            raise ForbiddenError(f"root {subject.root} is read-only")
        self._check_due(connection, params)
        return self.of_subject(subject, params, caller.name)

    def prepare(self, connection: Connection, params: PurgeParams) -> Json:
        """As `Kind.prepare`."""
        try:
            subject = find_subject(connection, params.checkpoint_id, state="deleted")
            self._check_due(connection, params)
        except StateError as error:
            raise PermanentJobError(str(error)) from error
        return {"subject": subject.to_json(), "in_doubt": root_row(connection, subject.root).lost > 0}

    @staticmethod
    def _check_due(connection: Connection, params: PurgeParams) -> None:
        query = select(checkpoints.c.purge_after_seconds).where(checkpoints.c.id == params.checkpoint_id)
        after = connection.execute(query).scalar_one()
        if not params.now and after is not None and after > time.time():
            raise StateError(
                f"the grace period of checkpoint {params.checkpoint_id} has not ended", state="deleted"
            )

    def plan(self, context: JobContext, params: PurgeParams) -> JobPlan:
        """Choose the files to remove, once: a partly removed checkpoint can no longer be identified."""
        subject = Subject(**context.prepared["subject"])
        root, place = open_place(context, subject)
        with storage_errors(root):
            is_there = place.file is not None or bool(place.store.list())
            if not is_there and (context.prepared["in_doubt"] or root.is_empty()):
                # On a wrongly mounted disk, the files would stay forever while the checkpoint is marked as
                # purged.
                raise UnavailableError(
                    f"root {root.name} has lost many or all checkpoints: see dcp roots list"
                )
            weights = _weights(place, subject)
        shared = {"subject": subject.to_json(), "weights": weights}
        return JobPlan(
            tasks=[TaskSpec(payload=shared, weight_bytes=subject.bytes)], plan_data={"id": subject.id}
        )

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        from dcp.manager.removal import Removed

        subject = Subject(**payload["subject"])
        root, place = open_place(context, subject)
        if root.readonly:
            raise PermanentJobError(f"root {root.name} is read-only")
        with storage_errors(root):
            if payload["weights"] is None:
                removed = _remove_commit(place, subject)
            elif payload["weights"]:
                removed = _remove_files(place.store, payload["weights"])
            else:
                removed = Removed("replaced")
        return {
            "outcome": removed.outcome,
            "files": removed.files,
            "bytes": removed.size_bytes,
            "left": list(removed.left[:20]),
        }

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return {**results[0], "checkpoint_id": plan_data["id"]}

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Mark the checkpoint as purged; restore its previous state if it was pinned in storage."""
        number, now = result["checkpoint_id"], time.time()
        detail = {name: result[name] for name in ("outcome", "files", "bytes")}
        audit.record(connection, job.created_by, "checkpoint.purge", f"checkpoint:{number}", detail, now=now)
        if get_checkpoint(connection, number).state != "deleted":  # saved again, and found by a scan
            return
        state, problem = {
            "deleted": ("purged", None),
            "absent": ("purged", None),
            "pinned": ("committed", "not purged: the checkpoint is pinned in its folder"),
            "replaced": ("vanished", "not purged: replaced by another save"),
        }[result["outcome"]]
        set_state(
            connection,
            number,
            state,  # type: ignore[arg-type]  # one of the four states above
            actor=job.created_by,
            now=now,
            problem=problem,
        )


def _remove_commit(place: SourcePlace, subject: Subject) -> Removed:
    from dcp.manager.removal import remove_checkpoint

    def is_meant(commit: Commit) -> bool:
        if subject.save_id is not None:
            return commit.save_id == subject.save_id
        if subject.fingerprint is not None:
            return subject.fingerprint == fingerprint_at(place)
        return _is_older(marks_of(place.store.list()), subject)

    return remove_checkpoint(place.store, time.time(), is_meant=is_meant)


def _weights(place: SourcePlace, subject: Subject) -> list[_Weight] | None:
    """Return files of weights without a commit, the index first. Empty if the files differ from the
    subject's; None if the checkpoint has or had a commit."""
    listing, known = {info.name: info for info in place.store.list()}, format_of(subject.format)
    if place.file is None and (
        (known is not None and known.has_commit) or any(is_commit_object(name) for name in listing)
    ):
        return None
    marks = [info for name, info in listing.items() if name == place.file]
    marks = marks if place.file is not None else marks_of(listing.values())
    if subject.fingerprint is None:
        is_meant = _is_older(marks, subject)
    else:
        is_meant = subject.fingerprint == fingerprint_of(marks)
    if not is_meant:
        return []
    try:
        names = list(index_at(place).files)
    except CheckpointFormatError:  # damage may be the reason for the deletion
        names = [info.name for info in marks]
    indexes = [] if place.file is not None else [name for name in listing if _lists_others(name)]
    return [_weight(listing[name]) for name in dict.fromkeys([*indexes, *names]) if name in listing]


def _lists_others(name: str) -> bool:
    """Recognize the index of a folder of weights, which is removed first."""
    return any(one.is_in_folder(name) and one.suffixes and not one.has_suffix(name) for one in formats())


def _weight(info: FileInfo) -> _Weight:
    return info.name, info.size_bytes, info.modified_seconds


def _is_older(marks: Sequence[FileInfo], subject: Subject) -> bool:
    """Return True if nothing was written since the deletion, for checkpoints without another identity."""
    newest = max((info.modified_seconds for info in marks), default=0.0)
    return subject.deleted_seconds is not None and newest <= subject.deleted_seconds


def _remove_files(store: Store, files: Sequence[_Weight]) -> Removed:
    """Remove the first file separately: without the index, nothing loads an incomplete checkpoint.

    Files written after the plan stay: the next export uses the same names and sizes.
    """
    from dcp.manager.removal import Removed

    there = {info.name: info for info in store.list()}
    gone = [
        weight[0] for weight in files if weight[0] in there and _weight(there[weight[0]]) == tuple(weight)
    ]
    if not gone:  # an earlier attempt has removed the files, and possibly the folder
        is_replaced = any(weight[0] in there for weight in files)
        return Removed("replaced" if is_replaced else "deleted", left=tuple(there))
    for name in gone[:1]:
        store.delete(name)
    store.sync()
    for error in store.delete_all(gone[1:]).values():
        raise error
    store.remove_root()
    left = tuple(info.name for info in store.list())
    return Removed("deleted", len(gone), sum(there[name].size_bytes for name in gone), left)


# -- once the grace is over ----------------------------------------------------------------------------------


def is_purge_due(connection: Connection, context: ScheduleContext) -> bool:
    """Return True if `submit_purges` has work."""
    return connection.execute(_due(context).limit(1)).first() is not None


def submit_purges(context: ScheduleContext) -> None:
    """Submit purges of checkpoints after their grace period."""
    context.database.transact(lambda connection: _submit(connection, context))


def _submit(connection: Connection, context: ScheduleContext) -> None:
    for number in connection.execute(_due(context)).scalars().all():
        subject = find_subject(connection, number, state="deleted")
        submit_or_join(
            connection,
            PurgeKind.of_subject(subject, PurgeParams(checkpoint_id=number), SYSTEM.name),
            context.now,
        )


def _due(context: ScheduleContext) -> Select[Any]:
    """Select deleted checkpoints of writable roots; checkpoints of read-only roots could block the queue
    forever. Recent failures wait."""
    lately = exists().where(
        jobs.c.checkpoint_id == checkpoints.c.id,
        jobs.c.kind == PurgeKind.name,
        jobs.c.state != "cancelled",
        jobs.c.finished_seconds.is_(None) | (jobs.c.finished_seconds > context.now - _RETRY_SECONDS),
    )
    return (
        select(checkpoints.c.id)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(
            checkpoints.c.state == "deleted",
            checkpoints.c.purge_after_seconds <= context.now,
            roots.c.name.in_(sorted(context.settings.writable_roots)),
            ~lately,
        )
        .order_by(checkpoints.c.id)
        .limit(_MAX_PURGES)
    )
