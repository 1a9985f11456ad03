"""Settings of stages: order, and rights to request and approve."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dcp.server.catalog.inputs import Name
from dcp.server.records.administration import Scope

_Names = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class StageRule(BaseModel):
    """Conditions for the promotion to a stage.

    Lists of names contain accounts and keys as in the audit log, and ``group:NAME``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    approvals: int = Field(default=0, ge=0, le=10, description="Approvals that a promotion needs.")
    request_scope: Scope = Field(default="write", description="Scope that may request a promotion.")
    requesters: _Names = Field(
        default=(), description="Names that may request a promotion, instead of `request_scope`."
    )
    approve_scope: Scope = Field(default="admin", description="Scope that may approve requests.")
    approvers: _Names = Field(
        default=(), description="Names that may approve requests, instead of `approve_scope`."
    )
    self_approval: bool = Field(default=False, description="Requesters may approve their own requests.")
    requires_verified: bool = Field(
        default=False, description="The last verification of the checkpoint must be good."
    )
    requires_previous: bool = Field(
        default=False, description="The checkpoint must be in the previous stage."
    )

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        approvers, requesters = set(self.approvers), set(self.requesters)
        if not approvers or any(name.startswith("group:") for name in approvers):
            return self
        alone = len(requesters) == 1 and not self.self_approval
        known = len(approvers - requesters if alone else approvers)
        if known < self.approvals:
            why = ", one of whom is the only requester: set self_approval" if known < len(approvers) else ""
            raise ValueError(f"approvals: {self.approvals} are impossible with {known} approvers{why}")
        return self


_ANY: Final = StageRule()
_DEFAULTS: Final = {"production": StageRule(approvals=1, requires_verified=True)}


class StagesSettings(BaseModel):
    """Stages of checkpoints, and rules for the promotion to a stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    order: tuple[Name, ...] = Field(
        default=("candidate", "staging", "production"),
        min_length=1,
        max_length=20,
        description="Names of the stages, from lowest to highest.",
    )
    rules: dict[str, StageRule] = Field(
        default_factory=dict,
        description="Rules by stage. Default for `production`: one approval and a good verification.",
    )
    reserved: bool = Field(
        default=False,
        description="Refuse aliases with names of stages; default: only in runs with a promotion.",
    )
    request_days: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="Age at which open requests expire; 0: never."
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        if len(set(self.order)) < len(self.order):
            raise ValueError("order: contains a stage twice")
        unknown = sorted(self.rules.keys() - set(self.order))
        if unknown:
            raise ValueError(f"rules: {unknown[0]!r} is not one of the stages {', '.join(self.order)}")
        return self

    def expired_before(self, now: float) -> float | None:
        """Return the time before which open requests have expired; None if none does."""
        return now - self.request_days * 86_400.0 if self.request_days else None

    def rule(self, stage: str) -> StageRule:
        """Return the rule of a stage, with the defaults of `StageRule`; a stage called production has other
        defaults."""
        default, given = _DEFAULTS.get(stage, _ANY), self.rules.get(stage, _ANY)
        return default.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})
