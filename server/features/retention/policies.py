"""Retention policies: as they are asked for and stored."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from sqlalchemy import delete, select

from dcp.manager.retention import Retention
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.inputs import Finite, Name, Request, Text
from dcp.server.catalog.names import check_pattern
from dcp.server.core.resource import Resource
from dcp.server.core.settings import Settings
from dcp.server.database.records import record_of_row
from dcp.server.database.tables import retention_policies, roots, schedules
from dcp.server.records.administration import RetentionPolicy

__all__ = [
    "POLICIES",
    "Keep",
    "KeepBest",
    "KeepPart",
    "PolicyChange",
    "PolicyRequest",
    "PreviewRequest",
    "writable_roots",
]

POLICIES: Final = Resource(
    retention_policies,
    what="retention policy",
    noun="retention",
    tag="p{id}",
    record=lambda row, etag: record_of_row(RetentionPolicy, row, etag=etag),
    detail=lambda row: {"name": row.name, "root": row.root, "run_glob": row.run_glob, "keep": row.keep},
    query=select(retention_policies, roots.c.name.label("root")).join(
        roots, roots.c.id == retention_policies.c.root_id
    ),
    is_visible=lambda row, visible: visible is None or row.root in visible,
    forget=lambda connection, number: connection.execute(
        delete(schedules).where(schedules.c.name == f"retention:{number}")
    ),
)


def writable_roots(settings: Settings) -> frozenset[str]:
    """List the names of roots that are configured and not read-only."""
    return frozenset(name for name, root in settings.roots.items() if not root.readonly)


def _checked_glob(glob: str) -> str:
    try:
        return check_pattern("parts", glob)
    except InvalidQueryError as error:
        raise ValueError(str(error)) from error


_DAY: float = 86_400.0
_Count = Annotated[int, Field(ge=1, le=2**53 - 1)]
_Grace = Annotated[
    Finite, Field(ge=0, le=3660 * _DAY, description="How long deleted checkpoints can be restored.")
]
_Interval = Annotated[Finite, Field(ge=60, le=366 * _DAY, description="How often it is applied.")]
_RootName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
_PartGlob = Annotated[Text, Field(min_length=1, max_length=250), AfterValidator(_checked_glob)]
_Glob = Annotated[
    Text, Field(min_length=1, max_length=256, description="Matches keys of runs; `*` is any text.")
]


class KeepBest(Request):
    """The ``count`` best steps by a metric."""

    metric: Name
    count: _Count = 1
    mode: Literal["min", "max"] = "min"


class KeepPart(Request):
    """The steps that keep a part, such as the optimizer: any of these rules keeps it, one at least."""

    last: _Count | None = Field(default=None, description="The newest n.")
    every_steps: _Count | None = Field(default=None, description="Steps that are multiples of it.")
    best: list[KeepBest] | None = Field(default=None, min_length=1, max_length=16)
    younger_than_seconds: Annotated[Finite, Field(gt=0)] | None = None


class Keep(KeepPart):
    """The steps that are kept: any of these rules keeps one. At least one rule is given, or rules for parts
    alone, and then all steps are kept. The newest good one is always kept, whole."""

    optimizer: KeepPart | None = Field(
        default=None, description="The steps that keep their optimizer; the others keep the rest."
    )
    parts: dict[_PartGlob, KeepPart] | None = Field(
        default=None, min_length=1, max_length=16, description="The same by globs on names of entries."
    )

    @model_validator(mode="after")
    def _keeps(self) -> Self:
        Retention.from_dict(self.document())
        return self

    def document(self) -> dict[str, Any]:
        """Return the members that are given, as they are stored."""
        return self.model_dump(exclude_none=True)


class PreviewRequest(Request):
    """A policy to preview."""

    root: _RootName
    run_glob: _Glob = "*"
    keep: Keep


class PolicyRequest(PreviewRequest):
    """A new policy."""

    name: Name
    grace_seconds: _Grace | None = Field(default=None, description="None: as the service is configured.")
    interval_seconds: _Interval = 3600.0
    is_enabled: bool = True


class PolicyChange(Request):
    """The fields to change."""

    name: Name | None = None
    run_glob: _Glob | None = None
    keep: Keep | None = None
    grace_seconds: _Grace | None = None
    interval_seconds: _Interval | None = None
    is_enabled: bool | None = None
