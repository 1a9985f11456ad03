"""Settings of stages: their order, and who may request and approve each."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dcp.server.catalog.inputs import Name
from dcp.server.records.administration import Scope

_Names = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class StageRule(BaseModel):
    """Conditions for the promotion to a stage.

    Requests are for callers with ``request_scope``, or only for ``requesters``: accounts and keys by their
    names as in the audit log, and ``group:NAME``; approvals in the same way. ``self_approval``: who requests
    may be one of those who approve.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    approvals: int = Field(default=0, ge=0, le=10)
    request_scope: Scope = "write"
    requesters: _Names = ()
    approve_scope: Scope = "admin"
    approvers: _Names = ()
    self_approval: bool = False
    requires_verified: bool = False
    requires_previous: bool = False  # it has to be in the stage before this one

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        known = len(set(self.approvers))
        has_groups = any(name.startswith("group:") for name in self.approvers)
        if 0 < known < self.approvals and not has_groups:
            raise ValueError(f"{self.approvals} approvals cannot be reached with {known} approvers")
        return self


_DEFAULTS: Final = {"production": StageRule(approvals=1, requires_verified=True)}


class StagesSettings(BaseModel):
    """Stages from the lowest to the highest. ``reserved``: no alias of these names is set by hand in any run;
    else only where one of them has been promoted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    order: tuple[Name, ...] = Field(
        default=("candidate", "staging", "production"), min_length=1, max_length=20
    )
    rules: dict[str, StageRule] = Field(default_factory=dict)
    reserved: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if len(set(self.order)) < len(self.order):
            raise ValueError("order: a stage is there twice")
        unknown = sorted(self.rules.keys() - set(self.order))
        if unknown:
            raise ValueError(f"rules: {unknown[0]!r} is none of the stages {', '.join(self.order)}")
        return self

    def rule(self, stage: str) -> StageRule:
        """Return the rule of a stage, by default without approvals, except for one called production."""
        return self.rules.get(stage) or _DEFAULTS.get(stage) or StageRule()
