"""API keys."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field

from dcp.server.schemas.common import Answer, Name, Request, optional_rfc3339, rfc3339, sorted_names
from dcp.server.security.keys import KeyRecord
from dcp.server.security.principal import Scope

__all__ = ["KeyAnswer", "KeyList", "NewKey", "NewKeyAnswer"]


def _distinct(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError("one of them is there twice")
    return values


_MAX_SECONDS = 10 * 366 * 86_400


class NewKey(Request):
    """What a key is to be for. ``roots``: only these; without, all of them."""

    name: Name
    scopes: Annotated[
        list[Scope], Field(min_length=1, max_length=5, json_schema_extra={"uniqueItems": True})
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


class KeyAnswer(Answer):
    """A key without what it is made of; ``prefix`` is its part that may be shown."""

    id: int
    name: str
    prefix: str
    scopes: list[Scope]
    roots: list[str] | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    used_at: str | None = Field(description="Within a minute or so.")

    @classmethod
    def of(cls, record: KeyRecord) -> Self:
        """As it is listed."""
        return cls.model_validate(_values(record))


class NewKeyAnswer(KeyAnswer):
    """A new key, with the only sight of it."""

    key: str = Field(repr=False, description="Shown now and never again.")

    @classmethod
    def with_secret(cls, record: KeyRecord, secret: str) -> Self:
        """As it is made."""
        return cls.model_validate({**_values(record), "key": secret})


class KeyList(Answer):
    """All keys, revoked ones too."""

    items: list[KeyAnswer]


def _values(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "scopes": sorted(record.scopes),
        "roots": sorted_names(record.roots),
        "created_at": rfc3339(record.created_seconds),
        "expires_at": optional_rfc3339(record.expires_seconds),
        "revoked_at": optional_rfc3339(record.revoked_seconds),
        "used_at": optional_rfc3339(record.used_seconds),
    }
