"""Keys: who may use the service; a new one is shown once, and revoking asks first."""

from __future__ import annotations

from typing import Any, Final, get_args

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from dcp.server.core.answers import IdPath, rfc3339
from dcp.server.core.http.dependencies import Caller, Db, ServiceDep, requires
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import Form, FormDep
from dcp.server.core.problems import ConflictError, ProblemError, UnprocessableError
from dcp.server.core.security.principal import Scope
from dcp.server.features.keys import api
from dcp.server.features.keys.answers import KeyAnswer, NewKey

__all__ = ["router"]

router = pages_router()

_ADMIN: Final[list[Any]] = [requires("admin", all_roots=True)]
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
    "scopes": "Choose what the key may.",
    "roots": "There is no such root.",
    "expires_in_seconds": "Choose one of the times that are offered.",
}
_SHOWN_ENDED: Final = 100


@router.get("/keys", dependencies=_ADMIN)
def keys_page(request: Request, service: ServiceDep, database: Db) -> Response:
    """All keys, those that count first, and the form that makes one."""
    return _page(request, service, database)


@router.post("/keys", dependencies=_ADMIN)
def create_key_form(
    request: Request, service: ServiceDep, database: Db, caller: Caller, form: FormDep
) -> Response:
    """The only page that shows the new key: no browser keeps it, and its address says nothing of it."""
    try:
        made = api.create_key(_asked_for(form), service, caller, request, Response())
    except (ConflictError, UnprocessableError) as error:
        return _page(request, service, database, error.status, fault=error, form=form)
    answer = _page(request, service, database, 201, made=made)
    answer.headers["Cache-Control"] = "no-store"
    return answer


@router.get("/keys/{key_id}/revoke", dependencies=_ADMIN)
def revoke_key_page(key_id: IdPath, request: Request, service: ServiceDep, database: Db) -> Response:
    """Asks, and says whom it locks out."""
    key = api.get_key(key_id, database)
    now = rfc3339(service.clock())
    admins = [one for one in api.list_keys(database).items if _is_valid(one, now) and _may_all(one)]
    return page(
        request,
        "revoke_key.html",
        twin=f"/api/v1/keys/{key_id}",
        key=key,
        is_valid=_is_valid(key, now),
        is_last_admin=[one.id for one in admins] == [key.id],
    )


@router.post("/keys/{key_id}/revoke", dependencies=_ADMIN)
def revoke_key_form(key_id: IdPath, service: ServiceDep, caller: Caller, form: FormDep) -> Response:
    """End it. Whoever revokes the key of the own session is asked to sign in again."""
    api.revoke_key(key_id, service, caller)
    return RedirectResponse("/keys?done=revoked", 303)


def _page(
    request: Request,
    service: ServiceDep,
    database: Db,
    status: int = 200,
    *,
    made: Any = None,
    fault: ProblemError | None = None,
    form: Form | None = None,
) -> HTMLResponse:
    keys = api.list_keys(database).items[::-1]
    now = rfc3339(service.clock())
    ended = [key for key in keys if not _is_valid(key, now)]
    return page(
        request,
        "keys.html",
        status,
        twin="/api/v1/keys",
        valid=[key for key in keys if _is_valid(key, now)],
        ended=ended[:_SHOWN_ENDED],
        ended_count=len(ended),
        scopes=[(scope, _ABOUT_SCOPES[scope]) for scope in get_args(Scope)],
        roots=[root.name for root in service.roots],
        days=_DAYS,
        made=made,
        fault=None if fault is None else fault.detail,
        typed=_typed(form),
    )


def _typed(form: Form | None) -> dict[str, Any]:
    """What was asked for, so that nobody types it again."""
    if form is None:
        return {"name": "", "scopes": ["read"], "roots": [], "days": "90"}
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


def _is_valid(key: KeyAnswer, now: str) -> bool:
    return key.revoked_at is None and (key.expires_at is None or bool(now < key.expires_at))


def _may_all(key: KeyAnswer) -> bool:
    return "admin" in key.scopes and key.roots is None
