"""API keys: created, listed and revoked, by the API and its page. Only admins of all roots may."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar, get_args

from fastapi import Response
from pydantic import AfterValidator, Field, ValidationError
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.inputs import Name, Request
from dcp.server.core.answers import IdPath, RecordAnswer, answers
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.pages.requests import Form
from dcp.server.core.problems import ConflictError, ProblemError, UnprocessableError
from dcp.server.core.security import keys
from dcp.server.core.security.principal import Scope
from dcp.server.records.administration import CreatedKey, Key
from dcp.server.records.lists import Items

__all__ = ["feature"]

feature: Final = Feature("keys", __name__)

T = TypeVar("T")
_MAX_SECONDS: Final = 10 * 366 * 86_400


def _distinct(values: list[T]) -> list[T]:
    if len(set(values)) < len(values):
        raise ValueError("one of them is there twice")
    return values


# The name is not Key: schemathesis would link key_id to its answers, and revoke the key it uses.
@answers(Key)
class KeyAnswer(RecordAnswer):
    """A key without its secret."""


class NewKey(Request):
    """The name of the key and what it may. ``roots``: only these; without, all of them."""

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


@feature.get("/keys", tag="keys", scope="admin", all_roots=True, errors=())
def list_keys(ask: Ask) -> Items[Key]:
    """All keys, revoked and expired ones too."""
    return Items(tuple(ask.find(keys.list_keys)))


@feature.post("/keys", tag="keys", scope="admin", all_roots=True, status=201, errors=(409,))
def create_key(body: NewKey, ask: Ask) -> CreatedKey:
    """Create a key. The answer shows it for the only time, so that it is not kept for an Idempotency-Key."""
    unknown = [name for name in body.roots or () if name not in ask.roots]
    if unknown:
        raise UnprocessableError(f"roots: the configuration has no {unknown[0]!r}")
    now = ask.now
    with ask.service.database.write() as connection:
        made = keys.create_key(
            connection,
            name=body.name,
            scopes=body.scopes,
            roots=body.roots,
            expires_seconds=None if body.expires_in_seconds is None else now + body.expires_in_seconds,
            now_seconds=now,
        )
        detail = {"name": body.name, "scopes": sorted(set(body.scopes)), "roots": body.roots}
        audit.record(connection, ask.caller.name, "key.create", f"key:{made.id}", detail, now=now)
    ask.request.state.is_secret = True
    ask.response.headers["Location"] = f"{ask.request.url.path}/{made.id}"
    return made


@feature.get("/keys/{key_id}", tag="keys", scope="admin", all_roots=True)
def get_key(key_id: IdPath, ask: Ask) -> Key:
    """One key."""
    return ask.find(keys.get_key, key_id)


@feature.delete("/keys/{key_id}", tag="keys", scope="admin", all_roots=True)
def revoke_key(key_id: IdPath, ask: Ask) -> Key:
    """End a key at once and for ever; it stays in the list. Again is fine."""
    with ask.service.database.write() as connection:
        return _revoke(connection, key_id, ask)


def _revoke(connection: Connection, key_id: int, ask: Ask) -> Key:
    before = keys.get_key(connection, key_id)
    if before.revoked_at is not None:
        return before
    detail = {"name": before.name}
    audit.record(connection, ask.caller.name, "key.revoke", f"key:{key_id}", detail, now=ask.now)
    return keys.revoke_key(connection, key_id, ask.now)


# -- pages ---------------------------------------------------------------------------------------------------

_ABOUT_SCOPES: Final[dict[str, str]] = {
    "read": "look, download, compute statistics and differences",
    "write": "register, label, pin, verify, scan",
    "convert": "jobs that write to roots",
    "delete": "delete, restore, retention",
    "admin": "keys, webhooks, rules, the audit log, and all of the others",
}
_DAYS: Final[dict[str, str]] = {
    "7": "in a week",
    "30": "in 30 days",
    "90": "in 90 days",
    "365": "in a year",
    "": "never",
}
_FAULTS: Final = {
    "name": "A name has 1 to 128 letters, digits and _./:@+=-, and begins with a letter, a digit or _.",
    "scopes": "Choose at least one scope.",
    "roots": "There is no such root.",
    "expires_in_seconds": "Choose one of the times that are offered.",
}
_SHOWN_ENDED: Final = 100
_UNTYPED: Final[dict[str, Any]] = {"name": "", "scopes": ["read"], "roots": [], "days": "90"}


@feature.page("/keys", "keys.html", scope="admin", all_roots=True)
def keys_page(ask: Ask) -> dict[str, Any]:
    """Show all keys, valid ones first, and the form that creates one."""
    return _values(ask)


@feature.form("/keys", scope="admin", all_roots=True)
def create_key_form(ask: Ask) -> Response:
    """Create a key, and show it on the only page that does: no browser keeps it."""
    try:
        made = create_key(_asked_for(ask.form), ask)
    except (ConflictError, UnprocessableError) as error:
        return ask.page("keys/keys.html", error.status, **_values(ask, fault=error))
    answer = ask.page("keys/keys.html", 201, **_values(ask, made=made))
    answer.headers["Cache-Control"] = "no-store"
    return answer


@feature.page("/keys/{key_id}/revoke", "revoke_key.html", scope="admin", all_roots=True)
def revoke_key_page(key_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Ask for confirmation, with the consequences."""
    admins = [
        key.id
        for key in ask.find(keys.list_keys)
        if keys.is_valid(key, ask.now) and "admin" in key.scopes and key.roots is None
    ]
    key = get_key(key_id, ask)
    return {
        "twin": f"/api/v1/keys/{key_id}",
        "key": key,
        "is_valid": keys.is_valid(key, ask.now),
        "is_last_admin": admins == [key_id],
    }


@feature.form("/keys/{key_id}/revoke", scope="admin", all_roots=True)
def revoke_key_form(key_id: IdPath, ask: Ask) -> str:
    """End the key. After the key of one's own session one has to sign in again."""
    revoke_key(key_id, ask)
    return "/keys?done=revoked"


def _values(ask: Ask, *, made: CreatedKey | None = None, fault: ProblemError | None = None) -> dict[str, Any]:
    found = ask.find(keys.list_keys)[::-1]
    ended = [key for key in found if not keys.is_valid(key, ask.now)]
    return {
        "twin": "/api/v1/keys",
        "valid": [key for key in found if keys.is_valid(key, ask.now)],
        "ended": ended[:_SHOWN_ENDED],
        "ended_count": len(ended),
        "scopes": [(scope, _ABOUT_SCOPES[scope]) for scope in get_args(Scope)],
        "roots": [root.name for root in ask.roots],
        "days": _DAYS,
        "made": made,
        "fault": fault and fault.detail,
        "typed": _typed(ask.form) if fault else _UNTYPED,
    }


def _typed(form: Form) -> dict[str, Any]:
    return {
        "name": form.text("name"),
        "scopes": form.all("scope"),
        "roots": form.all("root"),
        "days": form.text("days"),
    }


def _asked_for(form: Form) -> NewKey:
    days = form.text("days")
    try:
        return NewKey(
            name=form.text("name"),
            scopes=form.all("scope"),  # type: ignore[arg-type]
            roots=form.all("root") or None,
            expires_in_seconds=(float(days) if days in _DAYS else 0.0) * 86_400 if days else None,
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise UnprocessableError(_FAULTS[field], field=field) from None
