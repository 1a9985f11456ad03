"""``/keys``: who may use the service. Only for keys with the scope "admin" that are for all roots."""

from __future__ import annotations

from fastapi import Request, Response

from dcp.server.catalog import audit
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Caller, Db, ServiceDep, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.problems import NotFoundError, UnprocessableError
from dcp.server.core.security import keys
from dcp.server.features.keys.answers import KeyAnswer, KeyList, NewKey, NewKeyAnswer

__all__ = ["router"]

router = api_router("/keys", tags=["keys"], dependencies=[requires("admin", all_roots=True)])


@router.get("")
def list_keys(database: Db) -> KeyList:
    """All keys, revoked and expired ones too."""
    with database.read() as connection:
        return KeyList(items=[KeyAnswer.of(record) for record in keys.list_keys(connection)])


@router.post("", status_code=201, responses=problems(409))
def create_key(
    body: NewKey, service: ServiceDep, caller: Caller, request: Request, response: Response
) -> NewKeyAnswer:
    """Make a key. The answer shows it for the only time, so that it is not kept for an Idempotency-Key."""
    now_seconds = service.clock()
    unknown = [name for name in body.roots or () if name not in service.roots]
    if unknown:
        raise UnprocessableError(f"roots: the configuration has no {unknown[0]!r}")
    expires_seconds = None if body.expires_in_seconds is None else now_seconds + body.expires_in_seconds
    with service.database.write() as connection:
        record, secret = keys.create_key(
            connection,
            name=body.name,
            scopes=body.scopes,
            roots=body.roots,
            expires_seconds=expires_seconds,
            now_seconds=now_seconds,
        )
        detail = {"name": body.name, "scopes": sorted(set(body.scopes)), "roots": body.roots}
        audit.record(connection, caller.name, "key.create", f"key:{record.id}", detail, now=now_seconds)
    request.state.is_secret = True
    response.headers["Location"] = f"{request.url.path}/{record.id}"
    return NewKeyAnswer.of(record, key=secret)


@router.get("/{key_id}", responses=problems(404))
def get_key(key_id: IdPath, database: Db) -> KeyAnswer:
    """One key."""
    with database.read() as connection:
        record = keys.get_key(connection, key_id)
    if record is None:
        raise NotFoundError(f"there is no key {key_id}")
    return KeyAnswer.of(record)


@router.delete("/{key_id}", responses=problems(404))
def revoke_key(key_id: IdPath, service: ServiceDep, caller: Caller) -> KeyAnswer:
    """End a key at once and for ever; it stays in the list. Again is fine."""
    now_seconds = service.clock()
    with service.database.write() as connection:
        before = keys.get_key(connection, key_id)
        if before is None:
            raise NotFoundError(f"there is no key {key_id}")
        if before.revoked_seconds is not None:
            return KeyAnswer.of(before)
        record = keys.revoke_key(connection, key_id, now_seconds)
        audit.record(
            connection, caller.name, "key.revoke", f"key:{key_id}", {"name": record.name}, now=now_seconds
        )
    return KeyAnswer.of(record)
