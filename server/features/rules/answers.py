"""Automation rules."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.inputs import Name, Request
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.features.rules.actions import Action, Condition, RuleEvent
from dcp.server.features.rules.rules import NewRule
from dcp.server.records import administration as records

__all__ = ["RuleAnswer", "RuleChange", "RulePage", "RuleRequest"]


class RuleRequest(Request):
    """On an event, for checkpoints that meet the condition, these jobs are made."""

    name: Name
    event: RuleEvent = "checkpoint.committed"
    condition: Condition = Condition()
    actions: list[Action] = Field(min_length=1, max_length=8)
    is_enabled: bool = True

    def rule(self) -> NewRule:
        """As it is stored."""
        return NewRule(
            name=self.name,
            is_enabled=self.is_enabled,
            event=self.event,
            condition=self.condition,
            actions=tuple(self.actions),
        )


class RuleChange(Request):
    """What is given is changed."""

    name: Name | None = None
    event: RuleEvent | None = None
    condition: Condition | None = None
    actions: list[Action] | None = Field(default=None, min_length=1, max_length=8)
    is_enabled: bool | None = None

    def values(self) -> dict[str, Any]:
        """The fields that are given."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


@answers(records.Rule)
class RuleAnswer(RecordAnswer):
    """A rule."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """As the catalog has it."""
        return super().of(
            found,
            condition=found.condition.model_dump(mode="json", exclude_none=True),
            actions=[action.model_dump(mode="json", exclude_unset=True) for action in found.actions],
            **others,
        )


class RulePage(Answer):
    """Rules by id."""

    items: list[RuleAnswer]
    next_cursor: str | None
