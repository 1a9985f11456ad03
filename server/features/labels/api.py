"""Tags, pins and metrics of checkpoints, and the aliases of runs.

Each takes ``If-Match``; an alias that there is already is moved and removed only with it, because two
programs that both think theirs is the best checkpoint must not overwrite each other unseen.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Response
from sqlalchemy import Connection

from dcp.server.catalog import labels
from dcp.server.catalog.details import CheckpointDetail
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.labels import Change
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath, NamePath, problems
from dcp.server.core.http.dependencies import Author, Caller, Db, IfMatch, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.checkpoints.answers import CheckpointDetailAnswer
from dcp.server.features.labels.answers import AliasAnswer, AliasChange, AliasList, MetricsChange

__all__ = ["router"]

router = api_router(tags=["labels"])

_CHECKPOINT = "/checkpoints/{checkpoint_id}"
_ALIAS = "/runs/{run_id}/aliases/{name:path}"
_CHANGE = problems(404, 409, 412)


@router.put(_CHECKPOINT + "/tags/{tag:path}", dependencies=[requires("write")], responses=_CHANGE)
def add_tag(
    checkpoint_id: IdPath, tag: NamePath, database: Db, author: Author, if_match: IfMatch, response: Response
) -> CheckpointDetailAnswer:
    """Give a tag; one that it has is fine."""
    change = author.change(if_match.version(f"c{checkpoint_id}"))
    return _changed(database, response, lambda c: labels.add_tags(c, checkpoint_id, [tag], change))


@router.delete(_CHECKPOINT + "/tags/{tag:path}", dependencies=[requires("write")], responses=_CHANGE)
def remove_tag(
    checkpoint_id: IdPath, tag: NamePath, database: Db, author: Author, if_match: IfMatch, response: Response
) -> CheckpointDetailAnswer:
    """Take a tag away; one that it has not is fine."""
    change = author.change(if_match.version(f"c{checkpoint_id}"))
    return _changed(database, response, lambda c: labels.remove_tags(c, checkpoint_id, [tag], change))


@router.put(_CHECKPOINT + "/pin", dependencies=[requires("write")], responses=_CHANGE)
def pin_checkpoint(
    checkpoint_id: IdPath, database: Db, author: Author, if_match: IfMatch, response: Response
) -> CheckpointDetailAnswer:
    """Neither retention nor anybody deletes it."""
    change = author.change(if_match.version(f"c{checkpoint_id}"))
    return _changed(database, response, lambda c: labels.set_pinned(c, checkpoint_id, True, change))


@router.delete(_CHECKPOINT + "/pin", dependencies=[requires("write")], responses=_CHANGE)
def unpin_checkpoint(
    checkpoint_id: IdPath, database: Db, author: Author, if_match: IfMatch, response: Response
) -> CheckpointDetailAnswer:
    """It may be deleted again."""
    change = author.change(if_match.version(f"c{checkpoint_id}"))
    return _changed(database, response, lambda c: labels.set_pinned(c, checkpoint_id, False, change))


@router.patch(_CHECKPOINT + "/metrics", dependencies=[requires("write")], responses=_CHANGE)
def change_metrics(
    checkpoint_id: IdPath,
    body: MetricsChange,
    database: Db,
    author: Author,
    if_match: IfMatch,
    response: Response,
) -> CheckpointDetailAnswer:
    """Set metrics, or take them away."""
    change = author.change(if_match.version(f"c{checkpoint_id}"))
    return _changed(database, response, lambda c: labels.set_metrics(c, checkpoint_id, body.metrics, change))


def _changed(
    database: Db, response: Response, act: Callable[[Connection], CheckpointDetail]
) -> CheckpointDetailAnswer:
    detail = database.transact(act)
    response.headers["ETag"] = detail.etag
    return CheckpointDetailAnswer.of(detail)


@router.get("/runs/{run_id}/aliases", dependencies=[requires("read")], responses=problems(404))
def list_aliases(run_id: IdPath, database: Db, caller: Caller) -> AliasList:
    """The aliases of a run."""
    with database.read() as connection:
        get_run(connection, run_id, caller.roots)
        found = labels.list_aliases(connection, run_id, caller.roots)
    return AliasList(items=[AliasAnswer.of(alias) for alias in found])


@router.get(_ALIAS, dependencies=[requires("read")], responses=problems(404))
def get_alias(
    run_id: IdPath, name: NamePath, database: Db, caller: Caller, response: Response
) -> AliasAnswer:
    """Which checkpoint the alias names."""
    with database.read() as connection:
        alias = labels.get_alias(connection, run_id, name, caller.roots)
    response.headers["ETag"] = alias.etag
    return AliasAnswer.of(alias)


@router.put(_ALIAS, dependencies=[requires("write")], responses=problems(404, 409, 412, 428))
def set_alias(
    run_id: IdPath,
    name: NamePath,
    body: AliasChange,
    database: Db,
    author: Author,
    caller: Caller,
    if_match: IfMatch,
    response: Response,
) -> AliasAnswer:
    """Let the alias name this checkpoint of the run. Without If-Match only if there is no such alias yet."""

    def act(connection: Connection) -> labels.AliasRow:
        expected = _expected(connection, run_id, name, if_match, author.change(None))
        return labels.set_alias(
            connection,
            run_id,
            name,
            body.checkpoint_id,
            author.change(expected),
            is_admin=caller.may("admin"),
            is_protected=body.is_protected,
        )

    alias = database.transact(act)
    response.headers["ETag"] = alias.etag
    return AliasAnswer.of(alias)


@router.delete(_ALIAS, status_code=204, dependencies=[requires("write")], responses=problems(404, 412, 428))
def delete_alias(
    run_id: IdPath, name: NamePath, database: Db, author: Author, caller: Caller, if_match: IfMatch
) -> None:
    """Remove an alias; the checkpoint stays. Needs If-Match."""

    def act(connection: Connection) -> None:
        labels.get_alias(connection, run_id, name, caller.roots)
        if_match.required()
        expected = _expected(connection, run_id, name, if_match, author.change(None))
        change = author.change(expected)
        labels.delete_alias(connection, run_id, name, change, is_admin=caller.may("admin"))

    database.transact(act)


def _expected(
    connection: Connection, run_id: int, name: str, if_match: IfMatch, change: Change
) -> int | None:
    """The version of the alias that the request is about; 0 is none."""
    get_run(connection, run_id, change.visible)
    try:
        present = labels.get_alias(connection, run_id, name, change.visible)
    except MissingError:
        if_match.nothing(f"there is no alias {name}")
        return 0
    if_match.required()
    # The tag names the checkpoint, too: an alias that was removed and made anew is another one.
    return if_match.version(f"a{run_id}-{present.checkpoint_id}")
