"""Pages of people: the own account with its keys, all accounts, and an account with its roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, get_args

from fastapi import Query
from fastapi.responses import Response
from pydantic import TypeAdapter, ValidationError

from dcp.server.catalog.inputs import Text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageParams, PageQuery, Precondition
from dcp.server.core.problems import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ProblemError,
    UnprocessableError,
)
from dcp.server.core.security.accounts import ROLES
from dcp.server.core.security.keys import get_key, is_valid, list_keys
from dcp.server.features import keys
from dcp.server.features.people import feature, web
from dcp.server.features.people.accounts import ACCOUNTS, GRANTS
from dcp.server.features.people.settings import role_settings
from dcp.server.records.administration import ApiKey, CreatedKey, Scope
from dcp.server.records.people import Account, AccountKind, Grant, Role

_ANY: Final = Precondition(None)
_ROWS: Final = 100
_MAX_KEYS: Final = 100
_ABOUT: Final[dict[str, str]] = {
    "viewer": "look, download, compare",
    "contributor": "also register, label, pin, verify",
    "operator": "also convert, delete, retention",
    "admin": "also roles, keys, webhooks, rules, audit log",
}
_NEW_ACCOUNT: Final = TypeAdapter(web.NewAccount)
_ALL_ROOTS: Final = "*"


# -- one's own account ---------------------------------------------------------------------------------------


@feature.page("/account", "account.html", scope="any")
def own_account_page(ask: Ask) -> dict[str, Any]:
    """Show the signed-in person with groups, rights, and keys."""
    return _own(ask)


def _own(ask: Ask, made: CreatedKey | None = None, fault: ProblemError | None = None) -> dict[str, Any]:
    number = web.own_account(ask)
    account = ACCOUNTS.read(ask, number)
    found = ask.find(list_keys, account_id=number)[::-1]
    return {
        "account": account,
        "rights": ask.caller.scopes_by_root,
        **_key_form(ask, found, made, fault),
        "scopes": [scope for scope in get_args(Scope) if ask.caller.may(scope)],
        "roots": [root.name for root in ask.roots if ask.caller.may_see(root.name)],
        "may_change": ask.caller.key_id is None,
    }


def _key_form(
    ask: Ask, found: Iterable[ApiKey], made: CreatedKey | None, fault: ProblemError | None
) -> dict[str, Any]:
    return {
        "keys": [key for key in found if is_valid(key, ask.now)],
        "days": keys.DAYS,
        "made": made,
        "fault": fault and fault.detail,
        "typed": keys.typed(ask.form)
        if fault
        else {"name": "", "scopes": ["read"], "roots": [], "days": "90"},
    }


@feature.form("/account/keys", scope="any")
def create_own_key_form(ask: Ask) -> Response:
    """Create a key of the signed-in person. Keys cannot create keys, because a key can have fewer rights."""
    number = _person(ask)
    try:
        new = keys.ask_for_key(ask.form)
        for scope in new.scopes:
            if not ask.caller.may(scope):
                raise ForbiddenError(f"you have no role with the scope {scope!r}", scope=scope)
        unknown = [name for name in new.roots or () if name not in ask.roots or not ask.caller.may_see(name)]
        if unknown:
            raise UnprocessableError(f"root {unknown[0]!r} not found", field="roots")
        if sum(is_valid(key, ask.now) for key in ask.find(list_keys, account_id=number)) >= _MAX_KEYS:
            raise ConflictError(f"you have {_MAX_KEYS} keys, the maximum; revoke some first", state="full")
        made = keys.make_key(new, ask, number)
    except (ConflictError, ForbiddenError, UnprocessableError) as error:
        return ask.page("people/account.html", error.status, **{"twin": None, **_own(ask, fault=error)})
    answer = ask.page("people/account.html", 201, **{"twin": None, **_own(ask, made=made)})
    answer.headers["Cache-Control"] = "no-store"
    return answer


@feature.form("/account/keys/{key_id}/revoke", scope="any")
def revoke_own_key_form(key_id: IdPath, ask: Ask) -> str:
    """Revoke an own key."""
    number = _person(ask)
    with ask.service.database.write() as connection:
        key = get_key(connection, key_id)
        if key.account_id != number:
            raise NotFoundError(f"key {key_id} not found")
        keys.end_key(connection, key, ask)
    return "/account?done=revoked"


def _person(ask: Ask) -> int:
    if ask.caller.key_id is not None:
        raise ForbiddenError("sign in as a person: a key cannot create or revoke other keys")
    return web.own_account(ask)


# -- all accounts --------------------------------------------------------------------------------------------


@feature.page("/people", "people.html", scope="admin")
def people_page(
    ask: Ask,
    page: PageQuery,
    q: Annotated[Text | None, Query()] = None,
    kind: AccountKind | None = None,
) -> dict[str, Any]:
    """List people and service accounts with their roles, and the roles of groups."""
    found = web.list_accounts(ask, PageParams(_ROWS, page.cursor), kind, q)
    grants = _grants(ask)
    return {
        "twin": "/api/v1/accounts",
        "accounts": [(one, _roles(grants, account_id=one.id)) for one in found.items],
        "next_cursor": found.next_cursor,
        "q": q or "",
        "kind": kind,
        "groups": [one for one in grants if one.group is not None],
        "configured": _configured(ask),
        **_choices(ask),
    }


@feature.form("/people", scope="admin", all_roots=True)
def create_account_form(ask: Ask) -> str:
    """Create a service account."""
    given = {"name": ask.form.text("name"), "title": ask.form.text("title")}
    try:
        new = _NEW_ACCOUNT.validate_python(given)
    except ValidationError:
        raise UnprocessableError(
            "name: 1 to 64 letters, digits and _.+@=-, beginning with a letter, a digit or _", field="name"
        ) from None
    return f"/people/{web.create_account(new, ask).id}?done=created"


@feature.form("/people/groups", scope="admin")
def grant_group_form(ask: Ask) -> str:
    """Grant a role to the members of a group."""
    _grant(ask, group=ask.form.text("group"))
    return "/people?done=granted"


# -- one account ---------------------------------------------------------------------------------------------


@feature.page("/people/{account_id}", "person.html", scope="admin")
def person_page(account_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Show an account with groups, roles, rights, and keys."""
    return _shown(account_id, ask)


def _shown(
    account_id: int, ask: Ask, made: CreatedKey | None = None, fault: ProblemError | None = None
) -> dict[str, Any]:
    account: Account = ACCOUNTS.read(ask, account_id)
    grants = _grants(ask)
    caller = ask.service.callers.of_account(account_id)
    rights = {} if caller is None else caller.scopes_by_root
    seen = {name: scopes for name, scopes in rights.items() if name == _ALL_ROOTS or ask.caller.may_see(name)}
    configured = [
        one for one in _configured(ask) if account.kind == "person" and one[0] in (None, *account.groups)
    ]
    return {
        "twin": f"/api/v1/accounts/{account_id}",
        "account": account,
        "rights": seen,
        "grants": _roles(grants, account_id=account_id),
        "from_groups": [one for one in grants if account.kind == "person" and one.group in account.groups],
        "configured": configured,
        "is_own": account_id == ask.caller.account_id,
        "scopes": get_args(Scope),
        **_choices(ask),
        **_key_form(ask, ask.find(list_keys, ask.visible, account_id=account_id)[::-1], made, fault),
    }


@feature.form("/people/{account_id}/grants", scope="admin")
def grant_form(account_id: IdPath, ask: Ask) -> str:
    """Grant a role to the account."""
    _grant(ask, account_id=account_id)
    return f"/people/{account_id}?done=granted"


@feature.form("/people/grants/{grant_id}/revoke", scope="admin")
def revoke_grant_form(grant_id: IdPath, ask: Ask) -> str:
    """Revoke a role."""
    grant = ask.find(GRANTS.find, grant_id, ask.visible)
    web.delete_grant(grant_id, ask, _ANY)
    return "/people?done=revoked" if grant.account_id is None else f"/people/{grant.account_id}?done=revoked"


@feature.form("/people/{account_id}/state", scope="admin", all_roots=True)
def change_state_form(account_id: IdPath, ask: Ask) -> str:
    """Disable or enable the account."""
    is_disabled = ask.form.is_checked("disable")
    web.change_account(account_id, web.AccountChange(is_disabled=is_disabled), ask, _ANY)
    return f"/people/{account_id}?done={'disabled' if is_disabled else 'enabled'}"


@feature.form("/people/{account_id}/sign-out", scope="admin", all_roots=True)
def sign_out_everywhere_form(account_id: IdPath, ask: Ask) -> str:
    """End all sessions of the account."""
    web.sign_out_account(account_id, ask)
    return f"/people/{account_id}?done=signed-out"


@feature.form("/people/{account_id}/keys", scope="admin", all_roots=True)
def create_service_key_form(account_id: IdPath, ask: Ask) -> Response:
    """Create a key of a service account, and show the key once."""
    try:
        new = keys.ask_for_key(ask.form)
        keys.check_roots(new.roots, ask)
        made = keys.make_key(new, ask, account_id)
    except (ConflictError, UnprocessableError) as error:
        return ask.page("people/person.html", error.status, **_shown(account_id, ask, fault=error))
    answer = ask.page("people/person.html", 201, **_shown(account_id, ask, made=made))
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _grant(ask: Ask, **grantee: Any) -> None:
    root = ask.form.text("root")
    given = {"role": ask.form.text("role"), "root": None if root == _ALL_ROOTS else root, **grantee}
    try:
        new = web.NewGrant.model_validate(given)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise UnprocessableError(f"{field}: choose one of the offered values", field=field) from None
    web.create_grant(new, ask)


def _grants(ask: Ask) -> list[Grant]:
    return [GRANTS.record(row, "") for row in ask.find(GRANTS.rows, ask.visible)]


def _roles(grants: Iterable[Grant], account_id: int) -> list[Grant]:
    return [one for one in grants if one.account_id == account_id]


def _configured(ask: Ask) -> list[tuple[str | None, Role, str | None]]:
    """Return the configured roles (group, role, root) in roots administered by the caller."""
    return [
        (one.group, one.role, one.root)
        for one in role_settings(ask.settings).roles
        if ask.visible is None or (one.root is not None and one.root in ask.visible)
    ]


def _choices(ask: Ask) -> dict[str, Any]:
    return {
        "roles": [(role, _ABOUT[role]) for role in ROLES],
        "roots": [root.name for root in ask.roots if ask.caller.may_see(root.name)],
        "is_admin_of_all": ask.visible is None,
    }
