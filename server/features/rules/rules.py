"""Rules as they are declared and stored: an event, a condition, and the jobs to submit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from dcp.server.catalog.formats import SourceFormat
from dcp.server.catalog.inputs import Name
from dcp.server.core.jobs.kind import Parameters, PlainText
from dcp.server.core.resource import Resource
from dcp.server.database.records import record_of_row
from dcp.server.database.tables import rules
from dcp.server.features.convert.options import ConvertOptions, ConvertParams
from dcp.server.records.administration import Rule

__all__ = [
    "ACTIONS",
    "RULES",
    "Action",
    "Condition",
    "ConvertAction",
    "RuleEvent",
    "StatsAction",
    "VerifyAction",
]

RuleEvent = Literal["checkpoint.committed", "checkpoint.verified", "checkpoint.tagged"]

_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_EXAMPLE: Final = {"root": "r", "run": "a/b", "name": "step-1", "stem": "step-1", "step": 1, "id": 1}

RULES: Final = Resource(
    rules,
    what="rule",
    noun="rule",
    tag="r{id}",
    record=lambda row, etag: record_of_row(Rule, row, etag=etag),
    detail=lambda row: {
        "name": row.name,
        "event": row.event,
        "actions": [action["kind"] for action in row.actions],
    },
)


class Condition(Parameters):
    """The checkpoints that a rule is for: all that is given must hold.

    ``run`` is a glob on the key of the run. ``tag``: it has the tag, or gets it later. ``every_steps``: its
    step is a multiple.
    """

    root: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    run: PlainText | None = None
    tag: Name | None = None
    formats: Annotated[tuple[SourceFormat, ...], Field(min_length=1, max_length=4, strict=False)] | None = (
        None
    )
    every_steps: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None


class VerifyAction(Parameters):
    """Compare all bytes with their checksums."""

    kind: Literal["verify"]


class StatsAction(Parameters):
    """Compute statistics of the values."""

    kind: Literal["stats"]


class ConvertAction(ConvertOptions):
    """Convert it to ``target_key``, with the fields ``{run}``, ``{name}``, ``{stem}`` (the name without its
    suffix), ``{step}``, ``{root}`` and ``{id}``. Results of conversions are not converted again."""

    kind: Literal["convert"]
    target_key: Annotated[str, Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _expands(self) -> Self:
        self.params(1, _EXAMPLE)
        return self

    def params(self, checkpoint_id: int, fields: Mapping[str, object]) -> ConvertParams:
        """Make the parameters of the job for this checkpoint. Raises ValueError for a field that is missing,
        and as the parameters do."""
        given: dict[str, Any] = self.model_dump(exclude={"kind", "target_key"}, exclude_unset=True)
        key = _expanded(self.target_key, fields)
        return ConvertParams.model_validate({**given, "checkpoint_id": checkpoint_id, "target_key": key})


Action = Annotated[VerifyAction | StatsAction | ConvertAction, Field(discriminator="kind")]
ACTIONS: Final[TypeAdapter[tuple[Action, ...]]] = TypeAdapter(tuple[Action, ...])


def _expanded(template: str, fields: Mapping[str, object]) -> str:
    """Fill in the fields of ``template``; an empty run leaves no slash. Raises ValueError."""

    def value(match: re.Match[str]) -> str:
        found = fields.get(match[1])
        if found is None:
            known = ", ".join(f"{{{name}}}" for name in _EXAMPLE)
            if match[1] not in _EXAMPLE:
                raise ValueError(f"target_key: {match[0]} is none of {known}")
            raise ValueError(f"target_key: the checkpoint has no {match[1]}")
        return str(found)

    expanded = _FIELD.sub(value, template)
    if "{" in expanded or "}" in expanded:
        raise ValueError("target_key: braces are for fields only")
    return re.sub(r"/{2,}", "/", expanded).lstrip("/") if "{run}" in template else expanded
