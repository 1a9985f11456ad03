"""Stages by the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import Query as InQuery
from pydantic import Field
from sqlalchemy import Connection, Row

from dcp.server.catalog.inputs import MAX_ID, Id, Name, Query, Request, Text
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath, NamePath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import IfMatch, PageQuery
from dcp.server.features.stages import feature, stages
from dcp.server.features.stages.stage_records import (
    RequestState,
    Stage,
    StageEntry,
    StageHolder,
    StageRequest,
)
from dcp.server.features.stages.stages import REQUESTS, Rules
from dcp.server.records.lists import Items, Page

Reason = Annotated[Text, Field(min_length=1, max_length=1000)]

_REQUEST: Final = "/stage-requests/{request_id}"
_CHANGE: Final[dict[str, Any]] = {"tag": "stages", "scope": "write", "errors": (404, 409, 412)}


class PromotionRequest(Request):
    """Stage to promote the checkpoint to, and the reason, for approvers and the history."""

    stage: Name = Field(description="Name of the stage.")
    reason: Reason | None = Field(default=None, description="Text for approvers and the history.")


class Decision(Request):
    """A remark for the history."""

    reason: Reason | None = Field(default=None, description="Text for the history.")


class Rejection(Request):
    """The reason, which is required."""

    reason: Reason


class Demotion(Request):
    """Checkpoint in the stage, to protect a newer checkpoint from the demotion."""

    checkpoint_id: Annotated[int, Field(ge=1, le=MAX_ID)]
    reason: Reason | None = None


class StageRequestQuery(Query):
    """Requests of a run, of a checkpoint, for a stage, in a state."""

    run_id: Annotated[Id | None, Field(description="The `id` of a run.")] = None
    checkpoint_id: Annotated[Id | None, Field(description="The `id` of a checkpoint.")] = None
    stage: Annotated[Name | None, Field(description="Requested stage.")] = None
    state: Annotated[RequestState | None, Field(description="requested: open requests.")] = None
    cursor: Annotated[
        Annotated[str, Field(min_length=1, max_length=2048)] | None,
        Field(description="The next_cursor of the previous page."),
    ] = None
    limit: Annotated[int, Field(ge=1, le=500, description="Maximum rows of a page.")] = 50


@feature.get("/stages", tag="stages", errors=())
def list_stages(ask: Ask) -> Items[Stage]:
    """List the stages from lowest to highest, with rules and the caller's rights."""
    return Items(tuple(Rules(ask).shown()))


@feature.get("/runs/{run_id}/stages", tag="stages")
def list_run_stages(run_id: IdPath, ask: Ask) -> Items[StageHolder]:
    """List the checkpoints of a run in stages, highest stage last."""
    with ask.reading() as connection:
        get_run(connection, run_id, ask.visible)
        found = stages.holders_of(connection, run_id)
    order = [*Rules(ask).order, *found]
    return Items(tuple(sorted(found.values(), key=lambda holder: order.index(holder.stage))))


@feature.get("/runs/{run_id}/stages/history", tag="stages")
def list_stage_history(run_id: IdPath, ask: Ask, page: PageQuery) -> Page[StageEntry]:
    """List requests, decisions, and changes of a run's stages, newest first."""
    return ask.find(stages.history_of, run_id, ask.visible, page.cursor, page.limit)


@feature.get("/stage-requests", tag="stages", errors=())
def list_stage_requests(query: Annotated[StageRequestQuery, InQuery()], ask: Ask) -> Page[StageRequest]:
    """List requests, newest first. The state `requested` means open."""
    return ask.find(stages.list_requests, ask.visible, **query.model_dump())


@feature.get(_REQUEST, tag="stages")
def get_stage_request(request_id: IdPath, ask: Ask) -> StageRequest:
    """Get a request."""
    return REQUESTS.read(ask, request_id)


@feature.post("/checkpoints/{checkpoint_id}/stage-requests", status=201, **_CHANGE)
def request_stage(checkpoint_id: IdPath, body: PromotionRequest, ask: Ask, match: IfMatch) -> StageRequest:
    """Request the promotion of a checkpoint to a stage. A stage without approvals promotes immediately."""

    def act(connection: Connection) -> StageRequest:
        made = stages.request_promotion(connection, ask, checkpoint_id, body.stage, body.reason, match)
        ask.response.headers["Location"] = f"/api/v1/stage-requests/{made.id}"
        return REQUESTS.answer(ask, made)

    return ask.transact(act)


@feature.post(_REQUEST + "/approve", **_CHANGE)
def approve_stage_request(request_id: IdPath, body: Decision, ask: Ask, match: IfMatch) -> StageRequest:
    """Approve a request. The last required approval promotes the checkpoint. The answer is 409 if the content
    has changed since the request."""
    return _decided(ask, lambda connection: stages.approve(connection, ask, request_id, body.reason, match))


@feature.post(_REQUEST + "/reject", **_CHANGE)
def reject_stage_request(request_id: IdPath, body: Rejection, ask: Ask, match: IfMatch) -> StageRequest:
    """Reject a request. Requires the right to approve."""
    return _decided(ask, lambda connection: stages.reject(connection, ask, request_id, body.reason, match))


@feature.post(_REQUEST + "/withdraw", **_CHANGE)
def withdraw_stage_request(request_id: IdPath, body: Decision, ask: Ask, match: IfMatch) -> StageRequest:
    """Withdraw an own request. Admins can withdraw any request."""
    return _decided(ask, lambda connection: stages.withdraw(connection, ask, request_id, body.reason, match))


def _decided(ask: Ask, act: Callable[[Connection], Row[Any]]) -> StageRequest:
    return ask.transact(lambda connection: REQUESTS.answer(ask, act(connection)))


@feature.post("/runs/{run_id}/stages/{stage:path}/demote", status=204, **(_CHANGE | {"errors": (404, 409)}))
def demote_checkpoint(
    run_id: IdPath,
    stage: Annotated[NamePath, Field(description="Name of the stage.")],
    body: Demotion,
    ask: Ask,
) -> None:
    """Take a checkpoint out of a stage, and remove the alias. Requires the right to approve; for stages
    without approvals, the right to request."""
    ask.transact(
        lambda connection: stages.demote(connection, ask, run_id, stage, body.checkpoint_id, body.reason)
    )
