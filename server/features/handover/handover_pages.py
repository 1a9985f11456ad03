"""Handovers of a checkpoint by the API, and a panel of its page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from sqlalchemy import Connection

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import Request
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.jobs.ledger.reading import last_job
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.handover import feature
from dcp.server.features.handover.destinations import TARGETS, Target
from dcp.server.features.handover.handing import HandoverKind, HandoverParams, options_of, rows_of
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import OneOf, Shown, moment
from dcp.server.records.jobs import Job, JobFailure, JobWaiting
from dcp.server.records.lists import Items

HandoverState = Literal["none", "waiting", "failed", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Handover of a checkpoint to one target, and its last job."""

    target: Annotated[str, OneOf(Target)]
    state: Annotated[str, OneOf(HandoverState), Shown("Of the last job; none: not handed over yet.")]
    name: Annotated[str | None, Shown("Of the registered model, or of the artifact.")] = None
    version: Annotated[str | None, Shown("Null before a synchronization.")] = None
    link: Annotated[str | None, Shown("Page at the target.")] = None
    handed_over_at: Annotated[datetime | None, Shown("null: not handed over yet.")] = None
    is_marked_deleted: Annotated[bool, Shown("The target marks the checkpoint as deleted.")] = False
    job_id: Annotated[int | None, Shown("The last job.")] = None
    error: Annotated[str | None, Shown("Error of the last job, if failed or waiting for a retry.")] = None
    next_attempt_at: Annotated[datetime | None, Shown("Time of the retry; null: none.")] = None


class HandoverRequest(Request):
    """Target for a reference to the checkpoint."""

    target: Target


@feature.get("/checkpoints/{checkpoint_id}/handovers", tag="data")
def list_handovers(checkpoint_id: IdPath, ask: Ask) -> Items[Handover]:
    """List the handovers to all configured and earlier targets."""
    configured = options_of(ask.settings).targets

    def read(connection: Connection) -> list[Handover]:
        get_checkpoint(connection, checkpoint_id, ask.visible)
        rows = rows_of(connection, checkpoint_id)
        return [
            _handover(target, rows.get(target), _last_job(connection, checkpoint_id, target, ask))
            for target in TARGETS
            if target in configured or target in rows
        ]

    return Items(tuple(ask.find(read)))


@feature.post(
    "/checkpoints/{checkpoint_id}/handovers", tag="data", scope="write", status=202, errors=(404, 409)
)
def hand_over(checkpoint_id: IdPath, body: HandoverRequest, ask: Ask) -> Job:
    """Submit a job that registers the checkpoint at a target by URL. Repetitions create no second version."""
    return ask.submit(HandoverKind, HandoverParams(checkpoint_id=checkpoint_id, target=body.target))


@feature.form("/checkpoints/{checkpoint_id}/handovers", scope="write")
def hand_over_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Register the checkpoint at a target, as a job."""
    target = next((one for one in TARGETS if one == ask.form.text("target")), None)
    if target is None:
        raise UnprocessableError(f"target: one of {', '.join(TARGETS)}", field="target")
    return f"/jobs/{hand_over(checkpoint_id, HandoverRequest(target=target), ask).id}"


@feature.panel("checkpoint", "handovers.html", order=45)
def handovers_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Show handovers, and buttons for new handovers."""
    items = list_handovers(found.id, ask).items
    options = options_of(ask.settings)
    unsent = ["wandb"] if options.wandb is not None and options.wandb.folder is not None else []
    return {"handovers": items, "targets": options.targets, "unsent": unsent} if items else None


def _last_job(connection: Connection, checkpoint_id: int, target: Target, ask: Ask) -> Job | None:
    params = HandoverParams(checkpoint_id=checkpoint_id, target=target)
    return last_job(connection, HandoverKind.result_key(params), ask.visible)


def _handover(target: Target, row: Any, job: Job | None) -> Handover:
    state = "none" if row is None else "done"
    why: JobWaiting | JobFailure | None = None
    if job is not None and not job.is_final:
        state, why = "waiting", job.waiting
    elif job is not None and job.state == "failed" and (row is None or job.id > row.job_id):
        state, why = "failed", job.error
    return Handover(
        target=target,
        state=state,
        name=row and row.name,
        version=row and row.version,
        link=row and row.link,
        handed_over_at=row and moment(row.handed_over_seconds),
        is_marked_deleted=bool(row and row.is_marked_deleted),
        job_id=job.id if job is not None else row and row.job_id,
        error=None if why is None else why.detail,
        next_attempt_at=None if job is None or job.waiting is None else job.waiting.next_attempt_at,
    )
