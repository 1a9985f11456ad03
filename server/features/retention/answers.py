"""Retention policies, and what they would do."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dcp.manager.retention import Retention
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.names import check_pattern
from dcp.server.core.answers import Answer
from dcp.server.core.inputs import Finite, Name, Request, Text
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.features.retention.policies import NewPolicy
from dcp.server.records import administration as records

__all__ = [
    "DecisionAnswer",
    "Keep",
    "KeepBest",
    "KeepPart",
    "PolicyAnswer",
    "PolicyChange",
    "PolicyPage",
    "PolicyRequest",
    "PreviewPage",
    "PreviewRequest",
    "RunPreview",
    "TensorBytesAnswer",
    "TotalsAnswer",
]


def _checked_glob(glob: str) -> str:
    try:
        return check_pattern("parts", glob)
    except InvalidQueryError as error:
        raise ValueError(str(error)) from error


_DAY: float = 86_400.0
_Count = Annotated[int, Field(ge=1, le=2**53 - 1)]
_Grace = Annotated[Finite, Field(ge=0, le=3660 * _DAY, description="How long what goes can be restored.")]
_Interval = Annotated[Finite, Field(ge=60, le=366 * _DAY, description="How often it is applied.")]
_RootName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
_PartGlob = Annotated[Text, Field(min_length=1, max_length=250), AfterValidator(_checked_glob)]
_Glob = Annotated[Text, Field(min_length=1, max_length=256, description="Of keys of runs; `*` is any text.")]


class KeepBest(Request):
    """The ``count`` best steps by a metric."""

    metric: Name
    count: _Count = 1
    mode: Literal["min", "max"] = "min"


class KeepPart(Request):
    """Which steps keep a part, such as the optimizer: any of these rules keeps it; at least one is given."""

    last: _Count | None = Field(default=None, description="The newest n.")
    every_steps: _Count | None = Field(default=None, description="Steps that are multiples of it.")
    best: list[KeepBest] | None = Field(default=None, min_length=1, max_length=16)
    younger_than_seconds: Annotated[Finite, Field(gt=0)] | None = None


class Keep(KeepPart):
    """A step is kept if any of these keeps it; at least one is given, or rules for a part, and then all are.
    The newest good one is kept anyway, whole."""

    optimizer: KeepPart | None = Field(
        default=None, description="Which steps keep their optimizer; the others keep the rest."
    )
    parts: dict[_PartGlob, KeepPart] | None = Field(
        default=None, min_length=1, max_length=16, description="The same by globs on names of entries."
    )

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


@answers(records.RetentionPolicy)
class PolicyAnswer(RecordAnswer):
    """A policy."""


class PolicyPage(Answer):
    """Policies by id."""

    items: list[PolicyAnswer]
    next_cursor: str | None


@answers(records.RetentionDecision)
class DecisionAnswer(RecordAnswer):
    """A checkpoint, and why it is kept; it goes if there are no reasons, and loses the parts in drops."""


@answers(records.RetentionPreview)
class RunPreview(RecordAnswer):
    """What would become of the checkpoints of a run."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """As it was planned."""
        gone = found.deleted
        losing = found.dropped
        whole = (one for one in found.decisions if one.reasons and not one.drops)
        ordered = [*gone, *losing, *whole]
        return super().of(
            found,
            kept=len(found.decisions) - len(gone),
            deleted=len(gone),
            deleted_bytes=sum(one.bytes for one in gone),
            dropped=len(losing),
            dropped_bytes=sum(one.dropped_bytes for one in losing),
            checkpoints=ordered[:1000],
            **others,
        )


@answers(records.RetentionTotals)
class TotalsAnswer(RecordAnswer):
    """What would become of all runs together."""


@answers(records.TensorBytes)
class TensorBytesAnswer(RecordAnswer):
    """What some tensors of older checkpoints take."""


class PreviewPage(Answer):
    """Runs by key."""

    items: list[RunPreview]
    next_cursor: str | None
