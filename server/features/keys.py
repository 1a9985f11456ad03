"""API keys: created, listed, and revoked by admins, with the API and a page.

Admins of some roots see and create keys for these roots only.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar, get_args

from fastapi import Response
from pydantic import AfterValidator, Field, ValidationError
from sqlalchemy import Connection

from dcp.server.catalog.inputs import MAX_ID, Name, Request
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.pages.requests import Form
from dcp.server.core.problems import ConflictError, ForbiddenError, ProblemError, UnprocessableError
from dcp.server.core.security import accounts, keys
from dcp.server.core.security.principal import Scope
from dcp.server.records.administration import ApiKey, CreatedKey
from dcp.server.records.lists import Items

feature: Final = Feature("keys", __name__)

T = TypeVar("T")
_MAX_SECONDS: Final = 10 * 366 * 86_400


def _distinct(values: list[T]) -> list[T]:
    if len(set(values)) < len(values):
        raise ValueError("contains a duplicate")
    return values


class NewKey(Request):
    """Name, scopes, and roots of a new key; without ``roots``, all roots."""

    name: Name = Field(description="Name of the key in the audit log.")
    scopes: Annotated[
        list[Scope],
        AfterValidator(_distinct),
        Field(min_length=1, max_length=5, json_schema_extra={"uniqueItems": True}),
    ] = Field(default_factory=lambda: list[Scope](["read"]), description="Scopes of the key; default: read.")
    roots: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=63)]],
            AfterValidator(_distinct),
            Field(min_length=1, max_length=1000, json_schema_extra={"uniqueItems": True}),
        ]
        | None
    ) = Field(default=None, description="Roots in which the key works; null: all.")
    expires_in_seconds: Annotated[float, Field(gt=0, le=_MAX_SECONDS)] | None = Field(
        default=None, description="Lifetime of the key; null: no expiry."
    )
    account_id: (
        Annotated[int, Field(ge=1, le=MAX_ID, description="Service account of the key; default: none.")]
        | None
    ) = None


@feature.get("/keys", tag="keys", scope="admin", errors=())
def list_keys(ask: Ask) -> Items[ApiKey]:
    """List all keys, including revoked and expired keys. Admins of some roots see keys of these roots."""
    return Items(tuple(ask.find(keys.list_keys, ask.visible)))


@feature.post("/keys", tag="keys", scope="admin", status=201, errors=(409,))
def create_key(body: NewKey, ask: Ask) -> CreatedKey:
    """Create a key. Only this answer shows the key, and an Idempotency-Key does not store it."""
    check_roots(body.roots, ask)
    return make_key(body, ask, body.account_id)


def check_roots(names: list[str] | None, ask: Ask) -> None:
    """Refuse roots that are not configured or not visible to the caller."""
    if names is None and ask.visible is not None:
        raise ForbiddenError(
            "a key for all roots needs the scope 'admin' for all roots: restrict the key with roots=",
            scope="admin",
        )
    unknown = [name for name in names or () if name not in ask.roots or not ask.caller.may_see(name)]
    if unknown:
        raise UnprocessableError(
            f"roots: {unknown[0]!r} is not configured, or your role does not include this root"
        )


def make_key(body: NewKey, ask: Ask, account_id: int | None) -> CreatedKey:
    """Create a key, optionally of an account."""
    now = ask.now
    with ask.service.database.write() as connection:
        if account_id is not None:
            _check_account(connection, account_id, ask)
        made = keys.create_key(
            connection,
            account_id=account_id,
            name=body.name,
            scopes=body.scopes,
            roots=body.roots,
            expires_seconds=None if body.expires_in_seconds is None else now + body.expires_in_seconds,
            now_seconds=now,
            maker=ask.caller.answerable,
        )
        detail: dict[str, Any] = {"name": body.name, "scopes": sorted(set(body.scopes)), "roots": body.roots}
        if made.account is not None:
            detail["account"] = made.account
        _note(connection, "key.create", made, detail, ask)
    ask.request.state.is_secret = True
    ask.response.headers["Location"] = f"{ask.request.url.path}/{made.id}"
    return made


def _check_account(connection: Connection, account_id: int, ask: Ask) -> None:
    """Check the right to create keys: a person creates keys of this person, admins of all roots create keys
    of service accounts."""
    account = accounts.accounts_of(connection, [account_id]).get(account_id)
    if account_id != ask.caller.account_id or ask.caller.key_id is not None:
        if not ask.caller.may_everywhere("admin"):
            raise ForbiddenError("keys of accounts need the scope 'admin' for all roots", scope="admin")
        if account is None or account.kind != "service":
            raise UnprocessableError(f"account_id: service account {account_id} not found")
    if account is None or account.disabled_seconds is not None:
        raise ConflictError(f"account {account_id} is disabled: enable the account first", state="disabled")


def _note(connection: Connection, action: str, key: ApiKey, detail: dict[str, Any], ask: Ask) -> None:
    root = key.roots[0] if key.roots is not None and len(key.roots) == 1 else None
    change = ask.change()
    change.record(connection, action, f"key:{key.id}", detail, root=root)


@feature.get("/keys/{key_id}", tag="keys", scope="admin")
def get_key(key_id: IdPath, ask: Ask) -> ApiKey:
    """Return a key."""
    return ask.find(keys.get_key, key_id, ask.visible)


@feature.delete("/keys/{key_id}", tag="keys", scope="admin")
def revoke_key(key_id: IdPath, ask: Ask) -> ApiKey:
    """Revoke a key immediately and permanently; the list keeps it. Repetitions are allowed."""
    with ask.service.database.write() as connection:
        return end_key(connection, keys.get_key(connection, key_id, ask.visible), ask)


def end_key(connection: Connection, before: ApiKey, ask: Ask) -> ApiKey:
    """Revoke the key ``before``."""
    if before.revoked_at is not None:
        return before
    _note(connection, "key.revoke", before, {"name": before.name}, ask)
    return keys.revoke_key(connection, before.id, ask.now)


# -- pages ---------------------------------------------------------------------------------------------------

_ABOUT_SCOPES: Final[dict[str, str]] = {
    "read": "look, download, compute statistics and differences",
    "write": "register, label, pin, verify, scan",
    "convert": "jobs that write to roots",
    "delete": "delete, restore, retention",
    "admin": "keys, webhooks, rules, the audit log, and the rights of every scope",
}
DAYS: Final[dict[str, str]] = {
    "7": "in a week",
    "30": "in 30 days",
    "90": "in 90 days",
    "365": "in a year",
    "": "never",
}
_FAULTS: Final = {
    "name": "A name has 1 to 128 letters, digits and _./:@+=-, and begins with a letter, a digit or _.",
    "scopes": "Choose at least one scope.",
    "roots": "This root does not exist.",
    "expires_in_seconds": "Choose one of the offered times.",
}
_SHOWN_ENDED: Final = 100
_UNTYPED: Final[dict[str, Any]] = {"name": "", "scopes": ["read"], "roots": [], "days": "90"}


@feature.page("/keys", "keys.html", scope="admin")
def keys_page(ask: Ask) -> dict[str, Any]:
    """Show all keys, valid keys first, and the form for a new key."""
    return _values(ask)


@feature.form("/keys", scope="admin")
def create_key_form(ask: Ask) -> Response:
    """Create a key, and show it on a page that browsers do not store."""
    try:
        made = create_key(ask_for_key(ask.form), ask)
    except (ConflictError, ForbiddenError, UnprocessableError) as error:
        return ask.page("keys/keys.html", error.status, **_values(ask, fault=error))
    answer = ask.page("keys/keys.html", 201, **_values(ask, made=made))
    answer.headers["Cache-Control"] = "no-store"
    return answer


@feature.page("/keys/{key_id}/revoke", "revoke_key.html", scope="admin")
def revoke_key_page(key_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Ask for confirmation, with the consequences."""
    admins = [
        key.id
        for key in ask.find(keys.list_keys)
        if key.account_id is None
        if keys.is_valid(key, ask.now) and "admin" in key.scopes and key.roots is None
    ]
    key = get_key(key_id, ask)
    return {
        "twin": f"/api/v1/keys/{key_id}",
        "key": key,
        "is_valid": keys.is_valid(key, ask.now),
        "is_last_admin": admins == [key_id],
    }


@feature.form("/keys/{key_id}/revoke", scope="admin")
def revoke_key_form(key_id: IdPath, ask: Ask) -> str:
    """Revoke the key. Revoking the key of the current session requires a new sign-in."""
    revoke_key(key_id, ask)
    return "/keys?done=revoked"


def _values(ask: Ask, *, made: CreatedKey | None = None, fault: ProblemError | None = None) -> dict[str, Any]:
    found = ask.find(keys.list_keys, ask.visible)[::-1]
    ended = [key for key in found if not keys.is_valid(key, ask.now)]
    return {
        "twin": "/api/v1/keys",
        "valid": [key for key in found if keys.is_valid(key, ask.now)],
        "ended": ended[:_SHOWN_ENDED],
        "ended_count": len(ended),
        "scopes": [(scope, _ABOUT_SCOPES[scope]) for scope in get_args(Scope)],
        "roots": [root.name for root in ask.roots if ask.caller.may_see(root.name)],
        "needs_roots": ask.visible is not None,
        "actor_of": keys.actor_of_key,
        "days": DAYS,
        "made": made,
        "fault": fault and fault.detail,
        "typed": typed(ask.form) if fault else _UNTYPED,
    }


def typed(form: Form) -> dict[str, Any]:
    """Return the fields of the form, to be shown again."""
    return {
        "name": form.text("name"),
        "scopes": form.all("scope"),
        "roots": form.all("root"),
        "days": form.text("days"),
    }


def ask_for_key(form: Form) -> NewKey:
    """Return the key of the form. Raises UnprocessableError."""
    days = form.text("days")
    try:
        return NewKey(
            name=form.text("name"),
            scopes=form.all("scope"),  # type: ignore[arg-type]
            roots=form.all("root") or None,
            expires_in_seconds=(float(days) if days in DAYS else 0.0) * 86_400 if days else None,
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise UnprocessableError(_FAULTS[field], field=field) from None
