"""Stages on pages: cards of a checkpoint and a run, the history of a run, open requests, and their forms."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query as InQuery
from pydantic import Field

from dcp.server.catalog.inputs import Query
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath, NamePath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import Precondition
from dcp.server.core.pages.requests import checked
from dcp.server.features.stages import feature, stages
from dcp.server.features.stages.stage_records import RequestState, StageHolder
from dcp.server.features.stages.stage_routes import (
    Decision,
    Demotion,
    PromotionRequest,
    Rejection,
    approve_stage_request,
    demote_checkpoint,
    get_stage_request,
    list_run_stages,
    reject_stage_request,
    request_stage,
    withdraw_stage_request,
)
from dcp.server.features.stages.stages import Rules, may_decide
from dcp.server.records.checkpoints import CheckpointDetail, Run

_SHOWN: Final = 20


class HistoryView(Query):
    """The address of the history of a run."""

    cursor: Annotated[str, Field(max_length=2048)] | None = None


class RequestsView(Query):
    """Query of the requests of all runs; default: open requests."""

    state: RequestState = "requested"
    cursor: Annotated[str, Field(max_length=2048)] | None = None


@feature.panel("checkpoint", "checkpoint.html", order=22)
def checkpoint_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Show the stage of a checkpoint, its open requests, and the caller's forms."""
    rules = Rules(ask, found.root)
    holders = {one.stage: one for one in list_run_stages(found.run_id, ask).items}
    own = next((one for one in holders.values() if one.checkpoint_id == found.id), None)
    is_here = found.state == "committed"
    targets = [name for name in rules.order if is_here and rules.may_request(name)]
    if own is not None:
        above = rules.order.index(own.stage) if own.stage in rules.order else len(rules.order)
        targets = targets if own.is_changed else [name for name in targets if rules.order.index(name) > above]
    requests = _open(ask, checkpoint_id=found.id)
    asked = {one.stage for one, _, _ in requests if not one.is_changed}
    targets = [name for name in targets if name not in asked]
    if own is None and not targets and not requests:
        return None
    return {
        "own": own,
        "may_demote": own is not None and rules.may_demote(own.stage),
        "targets": [(name, holders.get(name), rules.rule(name)) for name in targets],
        "requests": requests,
    }


@feature.panel("checkpoint.notices", "notice.html", order=15)
def stage_notice(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """Confirm a submitted form, and warn about a checkpoint changed since its promotion."""
    holders = ask.find(stages.holders_of, found.run_id)
    changed = [one.stage for one in holders.values() if one.checkpoint_id == found.id and one.is_changed]
    return {"changed": changed}


@feature.panel("run", "run.html", order=5)
def run_panel(ask: Ask, found: Run) -> dict[str, Any] | None:
    """Show the checkpoints of a run in stages, and open requests."""
    holders = list_run_stages(found.id, ask).items[::-1]
    requests = _open(ask, run_id=found.id)
    return {"holders": holders, "requests": requests} if holders or requests else None


def _open(ask: Ask, **of: Any) -> list[tuple[Any, int, dict[str, bool]]]:
    """Return open requests with the required number of approvals, and the caller's rights."""
    page = ask.find(stages.list_requests, ask.visible, state="requested", limit=_SHOWN, **of)
    return _with_rights(ask, page.items)


def _with_rights(ask: Ask, requests: Any) -> list[tuple[Any, int, dict[str, bool]]]:
    rules = Rules(ask)
    return [(one, rules.rule(one.stage).approvals, ask.find(may_decide, ask, one.id)) for one in requests]


@feature.page("/runs/{run_id}/stages", "stages.html")
def run_stages_page(run_id: IdPath, view: Annotated[HistoryView, InQuery()], ask: Ask) -> dict[str, Any]:
    """Show the stages of a run, open requests, and the history."""
    history = ask.find(stages.history_of, run_id, ask.visible, view.cursor, _SHOWN)
    holders: dict[str, StageHolder] = {one.stage: one for one in list_run_stages(run_id, ask).items}
    rules = Rules(ask)
    return {
        "run": ask.find(get_run, run_id, ask.visible),
        "stages": [
            (name, holders.get(name)) for name in [*rules.order, *sorted(holders.keys() - set(rules.order))]
        ],
        "requests": _open(ask, run_id=run_id),
        "history": history,
        "view": view,
    }


@feature.page("/stage-requests", "requests.html")
def stage_requests_page(view: Annotated[RequestsView, InQuery()], ask: Ask) -> dict[str, Any]:
    """List requests of all visible runs."""
    page = ask.find(stages.list_requests, ask.visible, state=view.state, cursor=view.cursor, limit=_SHOWN)
    return {"requests": _with_rights(ask, page.items), "next_cursor": page.next_cursor, "view": view}


# -- forms ---------------------------------------------------------------------------------------------------


@feature.form("/checkpoints/{checkpoint_id}/stage-requests", scope="write")
def request_stage_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Request a promotion."""
    body = checked(PromotionRequest, stage=ask.form.text("stage"), reason=ask.form.optional("reason"))
    made = request_stage(checkpoint_id, body, ask, Precondition(ask.form.optional("etag")))
    return _page(checkpoint_id, made.state)


@feature.form("/stage-requests/{request_id}/approve", scope="write")
def approve_stage_form(request_id: IdPath, ask: Ask) -> str:
    """Approve a request."""
    found = get_stage_request(request_id, ask)
    body = checked(Decision, reason=ask.form.optional("reason"))
    done = approve_stage_request(request_id, body, ask, _match(ask))
    return _page(found.checkpoint_id, "approved" if done.state == "requested" else done.state)


@feature.form("/stage-requests/{request_id}/reject", scope="write")
def reject_stage_form(request_id: IdPath, ask: Ask) -> str:
    """Reject a request."""
    found = get_stage_request(request_id, ask)
    reject_stage_request(request_id, checked(Rejection, reason=ask.form.text("reason")), ask, _match(ask))
    return _page(found.checkpoint_id, "rejected")


@feature.form("/stage-requests/{request_id}/withdraw", scope="write")
def withdraw_stage_form(request_id: IdPath, ask: Ask) -> str:
    """Withdraw a request."""
    found = get_stage_request(request_id, ask)
    withdraw_stage_request(request_id, Decision(), ask, _match(ask))
    return _page(found.checkpoint_id, "withdrawn")


@feature.form("/runs/{run_id}/stages/{stage:path}/demote", scope="write")
def demote_form(run_id: IdPath, stage: NamePath, ask: Ask) -> str:
    """Take a checkpoint out of a stage."""
    number = ask.form.text("checkpoint_id")
    body = checked(
        Demotion,
        checkpoint_id=int(number) if number.isdecimal() and len(number) < 17 else 0,
        reason=ask.form.optional("reason"),
    )
    demote_checkpoint(run_id, stage, body, ask)
    return _page(body.checkpoint_id, "demoted")


def _match(ask: Ask) -> Precondition:
    return Precondition(ask.form.optional("etag"))


def _page(checkpoint_id: int, done: str) -> str:
    return f"/checkpoints/{checkpoint_id}?done=stage-{done}"
