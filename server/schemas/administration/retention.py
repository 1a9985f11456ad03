"""Retention policies, and what they would do."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dcp.manager.cleanup.retention import Retention
from dcp.server.retention.planning import RunPlan
from dcp.server.retention.policies import NewPolicy, RetentionPolicy
from dcp.server.schemas.common import Answer, Finite, Name, Request, Text, rfc3339

__all__ = [
    "DecisionAnswer",
    "Keep",
    "KeepBest",
    "PolicyAnswer",
    "PolicyChange",
    "PolicyPage",
    "PolicyRequest",
    "PreviewPage",
    "PreviewRequest",
    "RunPreview",
]

_DAY: float = 86_400.0
_Count = Annotated[int, Field(ge=1, le=2**53 - 1)]
_Grace = Annotated[Finite, Field(ge=0, le=3660 * _DAY, description="How long what goes can be restored.")]
_Interval = Annotated[Finite, Field(ge=60, le=366 * _DAY, description="How often it is applied.")]
_RootName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
_Glob = Annotated[Text, Field(min_length=1, max_length=256, description="Of keys of runs; `*` is any text.")]


class KeepBest(Request):
    """The ``count`` best steps by a metric."""

    metric: Name
    count: _Count = 1
    mode: Literal["min", "max"] = "min"


class Keep(Request):
    """A step is kept if any of these keeps it; at least one is given. The newest good one is kept anyway."""

    last: _Count | None = Field(default=None, description="The newest n.")
    every_steps: _Count | None = Field(default=None, description="Steps that are multiples of it.")
    best: list[KeepBest] | None = Field(default=None, min_length=1, max_length=16)
    younger_than_seconds: Annotated[Finite, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _keeps(self) -> Self:
        Retention.from_dict(self.document())
        return self

    def document(self) -> dict[str, Any]:
        """As it is stored."""
        return self.model_dump(exclude_none=True)


class PreviewRequest(Request):
    """A policy that is tried out."""

    root: _RootName
    run_glob: _Glob = "*"
    keep: Keep


class PolicyRequest(PreviewRequest):
    """A policy."""

    name: Name
    grace_seconds: _Grace | None = Field(default=None, description="None: as the service has it.")
    interval_seconds: _Interval = 3600.0
    is_enabled: bool = True

    def policy(self, grace_seconds: float) -> NewPolicy:
        """As it is stored; the grace is that of the service unless it is given."""
        return NewPolicy(
            name=self.name,
            root=self.root,
            run_glob=self.run_glob,
            keep=self.keep.document(),
            grace_seconds=grace_seconds if self.grace_seconds is None else self.grace_seconds,
            interval_seconds=self.interval_seconds,
            is_enabled=self.is_enabled,
        )


class PolicyChange(Request):
    """What is given is changed."""

    name: Name | None = None
    run_glob: _Glob | None = None
    keep: Keep | None = None
    grace_seconds: _Grace | None = None
    interval_seconds: _Interval | None = None
    is_enabled: bool | None = None

    def values(self) -> dict[str, Any]:
        """Columns."""
        found = self.model_dump(exclude_none=True)
        if self.keep is not None:
            found["keep"] = self.keep.document()
        return found


class PolicyAnswer(Answer):
    """A policy."""

    id: int
    name: str
    root: str
    run_glob: str
    keep: dict[str, Any]
    grace_seconds: float
    interval_seconds: float
    is_enabled: bool
    version: int
    created: str
    updated: str
    etag: str = Field(description="For If-Match.")

    @classmethod
    def of(cls, policy: RetentionPolicy) -> Self:
        """As the catalog has it."""
        return cls(
            id=policy.id,
            name=policy.name,
            root=policy.root,
            run_glob=policy.run_glob,
            keep=dict(policy.keep),
            grace_seconds=policy.grace_seconds,
            interval_seconds=policy.interval_seconds,
            is_enabled=policy.is_enabled,
            version=policy.version,
            created=rfc3339(policy.created_seconds),
            updated=rfc3339(policy.updated_seconds),
            etag=policy.etag,
        )


class PolicyPage(Answer):
    """Policies by id."""

    items: list[PolicyAnswer]
    next_cursor: str | None


class DecisionAnswer(Answer):
    """A checkpoint, and why it is kept; it goes if there are no reasons."""

    checkpoint_id: int
    key: str
    step: int | None
    bytes: int
    reasons: list[str]


class RunPreview(Answer):
    """What would become of the checkpoints of a run."""

    run_id: int
    run: str
    kept: int
    deleted: int
    deleted_bytes: int
    checkpoints: list[DecisionAnswer] = Field(description="Up to 1,000; those that go come first.")
    unjudged: list[str] = Field(description="On each rule by a metric that nothing has: it keeps all.")

    @classmethod
    def of(cls, plan: RunPlan) -> Self:
        """As it was planned."""
        gone = plan.deleted
        ordered = [*gone, *(one for one in plan.decisions if one.reasons)]
        return cls(
            run_id=plan.run_id,
            run=plan.run,
            kept=len(plan.decisions) - len(gone),
            deleted=len(gone),
            deleted_bytes=sum(one.bytes for one in gone),
            checkpoints=[
                DecisionAnswer(
                    checkpoint_id=one.checkpoint_id,
                    key=one.key,
                    step=one.step,
                    bytes=one.bytes,
                    reasons=list(one.reasons),
                )
                for one in ordered[:1000]
            ],
            unjudged=list(plan.unjudged),
        )


class PreviewPage(Answer):
    """Runs by key."""

    items: list[RunPreview]
    next_cursor: str | None
