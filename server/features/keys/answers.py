"""API keys."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from dcp.server.core.answers import Answer
from dcp.server.core.inputs import Name, Request
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import administration as records
from dcp.server.records.administration import Scope

__all__ = ["KeyAnswer", "KeyList", "NewKey", "NewKeyAnswer", "WhoamiAnswer"]

T = TypeVar("T")


def _distinct(values: list[T]) -> list[T]:
    if len(set(values)) < len(values):
        raise ValueError("one of them is there twice")
    return values


_MAX_SECONDS = 10 * 366 * 86_400


class NewKey(Request):
    """What a key is to be for. ``roots``: only these; without, all of them."""

    name: Name
    scopes: Annotated[
        list[Scope],
        AfterValidator(_distinct),
        Field(min_length=1, max_length=5, json_schema_extra={"uniqueItems": True}),
    ] = Field(default_factory=lambda: list[Scope](["read"]))
    roots: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=63)]],
            AfterValidator(_distinct),
            Field(min_length=1, max_length=1000, json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = None
    expires_in_seconds: Annotated[float, Field(gt=0, le=_MAX_SECONDS)] | None = None


@answers(records.Key)
class KeyAnswer(RecordAnswer):
    """A key without what it is made of; ``prefix`` is its part that may be shown."""


@answers(records.CreatedKey)
class NewKeyAnswer(KeyAnswer):
    """A new key, with the only sight of it."""


@answers(records.Whoami)
class WhoamiAnswer(RecordAnswer):
    """Who asks, and what that one may."""


class KeyList(Answer):
    """All keys, revoked ones too."""

    items: list[KeyAnswer]
