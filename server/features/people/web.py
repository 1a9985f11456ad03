"""``/accounts`` and ``/grants``: people, service accounts, and roles by root.

Admins of all roots change accounts and all grants. Admins of some roots see people, and change grants of
these roots.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query
from pydantic import Field, StringConstraints
from sqlalchemy import Connection, Row

from dcp.server.catalog.inputs import MAX_ID, Request, Text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import IfMatch, PageQuery
from dcp.server.core.problems import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnprocessableError,
)
from dcp.server.core.security.accounts import ALL_ROOTS, grantee_of
from dcp.server.core.security.callers import end_sessions
from dcp.server.core.security.keys import list_keys
from dcp.server.features.people import feature
from dcp.server.features.people.accounts import ACCOUNTS, GRANTS
from dcp.server.records.administration import ApiKey
from dcp.server.records.lists import Items, Page
from dcp.server.records.people import Account, AccountKind, Grant, Role

_ADMIN: Final[dict[str, Any]] = {"tag": "people", "scope": "admin"}
_ALL: Final[dict[str, Any]] = {**_ADMIN, "all_roots": True}
_ACCOUNT: Final = "/accounts/{account_id}"
_GRANT: Final = "/grants/{grant_id}"

AccountName = Annotated[
    str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+@=-]*$")
]
Group = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
RootName = Annotated[str, StringConstraints(min_length=1, max_length=63)]


class NewAccount(Request):
    """Service account for programs, which use its keys. New accounts have no rights before a grant."""

    name: AccountName = Field(description="Unique name of the service account.")
    title: Annotated[Text, Field(max_length=256, description="Its purpose.")] = ""


class AccountChange(Request):
    """The fields to change."""

    is_disabled: bool | None = Field(default=None, description="True: sessions and keys stop working.")
    title: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        default=None, description="Of a service account."
    )


class NewGrant(Request):
    """Role for an account or group, in one root or in all."""

    account_id: Annotated[int, Field(ge=1, le=MAX_ID)] | None = Field(
        default=None, description="Account that gets the role; otherwise `group` is required."
    )
    group: Group | None = Field(default=None, description="Group whose members get the role.")
    role: Role = Field(
        description="viewer: read. contributor: also write. operator: also convert and delete. "
        "admin: all scopes."
    )
    root: RootName | None = Field(default=None, description="null: all.")


class GrantChange(Request):
    """The new role."""

    role: Role


# -- accounts ------------------------------------------------------------------------------------------------


@feature.get("/accounts", **_ADMIN, errors=())
def list_accounts(
    ask: Ask,
    page: PageQuery,
    kind: Annotated[AccountKind | None, Query(description="Only people, or only service accounts.")] = None,
    q: Annotated[Text | None, Query(description="Part of the name, the full name or the address.")] = None,
) -> Page[Account]:
    """List people and service accounts, by id."""
    values: dict[str, Any] = {} if kind is None else {"kind": kind}
    return ACCOUNTS.page(ask, page, matches=_matching(q), **values)


def _matching(text: str | None) -> Any:
    wanted = (text or "").lower()
    return lambda row: wanted in f"{row.name}\n{row.title}\n{row.email or ''}".lower()


@feature.post("/accounts", **_ALL, status=201, errors=(409,))
def create_account(body: NewAccount, ask: Ask) -> Account:
    """Create a service account."""
    values = {"kind": "service", "name": body.name, "title": body.title, "groups": []}

    def act(connection: Connection) -> Account:
        if ACCOUNTS.has(connection, name=body.name):
            raise ConflictError(f"account {body.name!r} already exists", state="exists")
        return ACCOUNTS.answer(ask, ACCOUNTS.insert(connection, ask, values), is_new=True)

    return ask.transact(act)


@feature.get(_ACCOUNT, **_ADMIN)
def get_account(account_id: IdPath, ask: Ask) -> Account:
    """Get a person or a service account."""
    return ACCOUNTS.read(ask, account_id)


@feature.patch(_ACCOUNT, **_ALL, errors=(404, 409, 412))
def change_account(account_id: IdPath, body: AccountChange, ask: Ask, match: IfMatch) -> Account:
    """Disable or enable an account. Sessions and keys of a disabled account do not work."""

    def act(connection: Connection) -> Row[Any]:
        row = ACCOUNTS.lock(connection, ask, account_id, match)
        values: dict[str, Any] = {}
        action = "change"
        if body.title is not None:
            if row.kind != "service":
                raise UnprocessableError("title: the title of a person comes from the provider")
            values["title"] = body.title
        if body.is_disabled is not None and body.is_disabled != (row.disabled_seconds is not None):
            if row.id == ask.caller.account_id:
                raise ConflictError("you cannot disable your own account", state="own")
            values["disabled_seconds"] = ask.now if body.is_disabled else None
            action = "disable" if body.is_disabled else "enable"
            end_sessions(connection, account_id)
        return ACCOUNTS.update(connection, ask, row, values, action) if values else row

    return ACCOUNTS.answer(ask, ask.transact(act))


@feature.post(_ACCOUNT + "/sign-out", **_ALL, status=204)
def sign_out_account(account_id: IdPath, ask: Ask) -> None:
    """End all sessions of an account. Keys stay valid."""

    def act(connection: Connection) -> None:
        row = ACCOUNTS.find(connection, account_id)
        end_sessions(connection, account_id)
        ACCOUNTS.audit(connection, ask, "sign-out", row)

    ask.transact(act)


@feature.get(_ACCOUNT + "/keys", **_ADMIN)
def list_account_keys(account_id: IdPath, ask: Ask) -> Items[ApiKey]:
    """List the keys of an account, including revoked and expired keys (in the admin's roots)."""
    ask.find(ACCOUNTS.find, account_id)
    return Items(tuple(ask.find(list_keys, ask.visible, account_id=account_id)))


# -- grants --------------------------------------------------------------------------------------------------


@feature.get("/grants", **_ADMIN, errors=())
def list_grants(
    ask: Ask,
    page: PageQuery,
    account_id: Annotated[int | None, Query(ge=1, le=MAX_ID, description="The `id` of an account.")] = None,
    group: Annotated[Text | None, Query(description="Name of a group of the provider.")] = None,
) -> Page[Grant]:
    """List grants by id; admins of some roots see grants of these roots."""
    values: dict[str, Any] = {"account_id": account_id, "group_name": group}
    return GRANTS.page(ask, page, **{name: value for name, value in values.items() if value is not None})


@feature.post("/grants", **_ADMIN, status=201, errors=(403, 404, 409))
def create_grant(body: NewGrant, ask: Ask) -> Grant:
    """Grant a role. An account or group has at most one role per root, and one for all roots."""
    if (body.account_id is None) == (body.group is None):
        raise UnprocessableError("pass either account_id or group")
    _check_root(body.root, ask)
    root = ALL_ROOTS if body.root is None else body.root
    values = {
        "account_id": body.account_id,
        "group_name": body.group,
        "grantee": grantee_of(body.account_id, body.group),
        "role": body.role,
        "root": root,
        "created_by": ask.caller.name,
    }

    def act(connection: Connection) -> Grant:
        if body.account_id is not None and not ACCOUNTS.has(connection, id=body.account_id):
            raise UnprocessableError(f"account_id: account {body.account_id} not found")
        if GRANTS.has(connection, grantee=values["grantee"], root=root):
            raise ConflictError(
                "the account or group already has a role in this root; change or revoke this role",
                state="exists",
            )
        return GRANTS.answer(ask, GRANTS.insert(connection, ask, values), is_new=True)

    return ask.transact(act)


def _check_root(root: str | None, ask: Ask) -> None:
    if root is None:
        if ask.visible is not None:
            raise ForbiddenError("a role in all roots needs the scope 'admin' for all roots", scope="admin")
    elif root not in ask.roots or not ask.caller.may_see(root):
        raise NotFoundError(f"root {root[:63]!r} not found")


@feature.get(_GRANT, **_ADMIN)
def get_grant(grant_id: IdPath, ask: Ask) -> Grant:
    """Get a grant."""
    return GRANTS.read(ask, grant_id)


@feature.patch(_GRANT, **_ADMIN, errors=(404, 412))
def change_grant(grant_id: IdPath, body: GrantChange, ask: Ask, match: IfMatch) -> Grant:
    """Change the role."""
    return GRANTS.change(ask, grant_id, match, {"role": body.role})


@feature.delete(_GRANT, **_ADMIN, status=204, errors=(404, 412))
def delete_grant(grant_id: IdPath, ask: Ask, match: IfMatch) -> None:
    """Revoke a role immediately, also for keys and sessions."""
    GRANTS.delete(ask, grant_id, match)


# -- one's own account ---------------------------------------------------------------------------------------


@feature.get("/account", tag="people", scope="any", errors=(404,))
def get_own_account(ask: Ask) -> Account:
    """Return the account of the caller; `/whoami` has the rights."""
    return ACCOUNTS.read(ask, own_account(ask))


@feature.get("/account/keys", tag="people", scope="any", errors=(404,))
def list_own_keys(ask: Ask) -> Items[ApiKey]:
    """List the keys of the caller's account, including revoked and expired keys."""
    return Items(tuple(ask.find(list_keys, account_id=own_account(ask))))


def own_account(ask: Ask) -> int:
    """Return the id of the caller's account. Raises NotFoundError."""
    if ask.caller.account_id is None:
        raise NotFoundError("the key does not belong to an account")
    return ask.caller.account_id
