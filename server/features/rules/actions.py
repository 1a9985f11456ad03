"""What a rule is: when it fires, on which checkpoints, and the jobs that it makes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from dcp.server.catalog.formats import SourceFormat
from dcp.server.core.inputs import Name
from dcp.server.core.jobs.parameters import Parameters, PlainText
from dcp.server.features.convert.options import ConvertOptions, ConvertParams

__all__ = [
    "Action",
    "Condition",
    "ConvertAction",
    "RuleEvent",
    "StatsAction",
    "VerifyAction",
    "expand_key",
]

RuleEvent = Literal["checkpoint.committed", "checkpoint.verified", "checkpoint.tagged"]

_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_EXAMPLE: Final = {"root": "r", "run": "a/b", "name": "step-1", "stem": "step-1", "step": 1, "id": 1}


class Condition(Parameters):
    """Which checkpoints; what is not given is any. All that is given must hold.

    ``run`` is a glob on the key of the run. ``tag``: it has it, or gets it later. ``every_steps``: its step
    is a multiple of that.
    """

    root: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    run: PlainText | None = None
    tag: Name | None = None
    formats: (
        Annotated[
            tuple[SourceFormat, ...],
            Field(min_length=1, max_length=4, strict=False),
        ]
        | None
    ) = None
    every_steps: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None


class VerifyAction(Parameters):
    """All bytes are compared with their checksums."""

    kind: Literal["verify"]


class StatsAction(Parameters):
    """The values are described."""

    kind: Literal["stats"]


class ConvertAction(ConvertOptions):
    """It is converted to ``target_key``, in which ``{run}``, ``{name}``, ``{stem}`` (the name without a
    suffix), ``{step}``, ``{root}`` and ``{id}`` are filled in. What was converted itself is left alone."""

    kind: Literal["convert"]
    target_key: Annotated[str, Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _expands(self) -> Self:
        self.params(1, _EXAMPLE)
        return self

    def params(self, checkpoint_id: int, fields: Mapping[str, object]) -> ConvertParams:
        """The parameters of the job for this checkpoint. Raises ValueError for a field that is not there,
        and what the parameters refuse."""
        given: dict[str, Any] = self.model_dump(exclude={"kind", "target_key"}, exclude_unset=True)
        key = expand_key(self.target_key, fields)
        return ConvertParams.model_validate({**given, "checkpoint_id": checkpoint_id, "target_key": key})


Action = Annotated[VerifyAction | StatsAction | ConvertAction, Field(discriminator="kind")]


def expand_key(template: str, fields: Mapping[str, object]) -> str:
    """``template`` with its fields filled in; of an empty run no slash is left. ValueError for other fields,
    and for those that the checkpoint has not."""

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
