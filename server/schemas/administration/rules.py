"""Automation rules."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.automation.actions import Action, Condition, RuleEvent
from dcp.server.automation.rules import NewRule, Rule
from dcp.server.schemas.common import Answer, Name, Request, rfc3339

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


class RuleAnswer(Answer):
    """A rule."""

    id: int
    name: str
    event: str
    condition: dict[str, Any]
    actions: list[dict[str, Any]]
    is_enabled: bool
    version: int
    created: str
    updated: str
    etag: str = Field(description="For If-Match.")

    @classmethod
    def of(cls, rule: Rule) -> Self:
        """As the catalog has it."""
        return cls(
            id=rule.id,
            name=rule.name,
            event=rule.event,
            condition=rule.condition.model_dump(mode="json", exclude_none=True),
            actions=[action.model_dump(mode="json", exclude_unset=True) for action in rule.actions],
            is_enabled=rule.is_enabled,
            version=rule.version,
            created=rfc3339(rule.created_seconds),
            updated=rfc3339(rule.updated_seconds),
            etag=rule.etag,
        )


class RulePage(Answer):
    """Rules by id."""

    items: list[RuleAnswer]
    next_cursor: str | None
