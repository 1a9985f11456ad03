"""Records of stages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from dcp.server.records.administration import Scope
from dcp.server.records.checkpoints import State, Verdict
from dcp.server.records.declaring import OneOf, Shown

RequestState = Literal["requested", "promoted", "rejected", "withdrawn", "outdated", "expired"]
"""outdated: the content of the checkpoint changed, and a new request was made; expired: open for longer than
``request_days``."""
StageAction = Literal[
    "requested",
    "approved",
    "rejected",
    "withdrawn",
    "outdated",
    "expired",
    "promoted",
    "replaced",
    "moved",
    "demoted",
]
"""replaced: another checkpoint took its place; moved: promoted to another stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage with its rule and the caller's rights."""

    name: str
    approvals: Annotated[int, Shown("Approvals required for a promotion.")]
    request_scope: Annotated[
        str, OneOf(Scope), Shown("Scope that may request a promotion, unless requesters are named.")
    ]
    requesters: Annotated[tuple[str, ...], Shown("Allowed requesters; empty: all callers with the scope.")]
    approve_scope: Annotated[
        str, OneOf(Scope), Shown("Scope that may approve requests, unless approvers are named.")
    ]
    approvers: Annotated[tuple[str, ...], Shown("Allowed approvers; empty: all callers with the scope.")]
    self_approval: Annotated[bool, Shown("Requesters may approve their own requests.")]
    requires_verified: Annotated[bool, Shown("The last verification of the checkpoint must be good.")]
    requires_previous: Annotated[bool, Shown("Only from the stage before.")]
    may_request: Annotated[bool, Shown("Right of the caller.")]
    may_approve: Annotated[bool, Shown("Right of the caller; own requests may be excluded.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHolder:
    """Checkpoint of a run in a stage."""

    stage: str
    checkpoint_id: int
    checkpoint_key: Annotated[str, Shown("Key of the checkpoint.")]
    step: int | None
    request_id: Annotated[int, Shown("The request by which the checkpoint was promoted.")]
    promoted_by: str
    promoted_at: datetime
    is_changed: Annotated[bool, Shown("The content has changed since the promotion.")]
    state: Annotated[str, OneOf(State)]
    verification: Annotated[str, OneOf(Verdict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A request to promote a checkpoint to a stage."""

    id: int
    root: str
    run_id: int
    run: Annotated[str, Shown("Key of the run.")]
    checkpoint_id: int
    checkpoint_key: Annotated[str, Shown("Key of the checkpoint.")]
    step: int | None
    stage: str
    state: Annotated[
        str, OneOf(RequestState), Shown("outdated: the checkpoint was changed or deleted. expired: too old.")
    ]
    reason: Annotated[str | None, Shown("Text of the requester.")]
    requested_by: str
    approved_by: Annotated[tuple[str, ...], Shown("Accounts and keys that approved.")]
    is_changed: Annotated[bool, Shown("The content has changed since the request.")]
    created_at: datetime
    updated_at: datetime
    version: int
    etag: Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """A line of the history of a run."""

    id: int
    stage: str
    checkpoint_id: int
    checkpoint_key: Annotated[str, Shown("Key of the checkpoint.")]
    step: int | None
    request_id: Annotated[int | None, Shown("The request of this entry; null: none.")]
    action: Annotated[
        str,
        OneOf(StageAction),
        Shown("replaced: another checkpoint took the stage. moved: the checkpoint went to another stage."),
    ]
    by: Annotated[str, Shown("Account or key.")]
    reason: Annotated[str | None, Shown("Text given with the action.")]
    at: datetime
