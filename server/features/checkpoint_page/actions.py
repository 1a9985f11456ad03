"""Forms of a checkpoint's page: what they do is what the API does, with its scopes and its conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from pydantic import TypeAdapter, ValidationError

from dcp.server.catalog.errors import MissingError
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import AskDep
from dcp.server.core.http.dependencies import Author, Caller, Db, Precondition, ServiceDep, requires
from dcp.server.core.inputs import Name
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import Form, FormDep
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.answers import CheckpointDetailAnswer
from dcp.server.features.labels import api
from dcp.server.features.labels.answers import AliasChange
from dcp.server.features.retention import web as retention_web
from dcp.server.features.roots import api as roots_api
from dcp.server.features.roots.answers import RootAnswer

__all__ = ["Undo", "router", "undo_of", "writable_roots"]

router = pages_router()


_CHECKPOINT = "/checkpoints/{checkpoint_id}"
_WRITE, _DELETE = [requires("write")], [requires("delete")]
_ANY = Precondition(None)
"""Labels are given whatever else has changed."""
_NAME: Final[TypeAdapter[str]] = TypeAdapter(Name)


def writable_roots(service: ServiceDep, caller: Caller) -> list[RootAnswer]:
    """Where something can be made."""
    found = roots_api.list_all(service, caller).items
    return [root for root in found if root.is_configured and not root.readonly]


def _back(checkpoint_id: int, done: str) -> Response:
    return RedirectResponse(f"/checkpoints/{checkpoint_id}?{urlencode({'done': done})}", 303)


def _seen(form: Form) -> Precondition:
    """The state that the page has shown: 412 if somebody changed it since."""
    return Precondition(form.optional("etag"))


def _name(form: Form, what: str) -> str:
    try:
        return _NAME.validate_python(form.text(what))
    except ValidationError:
        raise UnprocessableError(
            f"{what}: 1 to 128 letters, digits and _./:@+=-, beginning with a letter, a digit or _",
            field=what,
        ) from None


@router.post(_CHECKPOINT + "/tags", dependencies=_WRITE)
def change_tags_form(checkpoint_id: IdPath, form: FormDep, database: Db, author: Author) -> Response:
    """Give a tag, or take one away."""
    if form.text("remove"):
        api.remove_tag(checkpoint_id, _name(form, "remove"), database, author, _ANY, Response())
        return _back(checkpoint_id, "untagged")
    api.add_tag(checkpoint_id, _name(form, "tag"), database, author, _ANY, Response())
    return _back(checkpoint_id, "tagged")


@router.post(_CHECKPOINT + "/pin", dependencies=_WRITE)
def change_pin_form(checkpoint_id: IdPath, form: FormDep, database: Db, author: Author) -> Response:
    """Keep it whatever retention says, or let it go again."""
    act = api.pin_checkpoint if form.is_checked("pinned") else api.unpin_checkpoint
    act(checkpoint_id, database, author, _ANY, Response())
    return _back(checkpoint_id, "pinned" if form.is_checked("pinned") else "unpinned")


@router.post(_CHECKPOINT + "/alias", dependencies=_WRITE)
def set_alias_form(
    checkpoint_id: IdPath, form: FormDep, request: Request, database: Db, author: Author, caller: Caller
) -> Response:
    """Let an alias of the run name this checkpoint; one that names another is moved after asking."""
    name = _name(form, "alias")
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    etag = form.optional("alias_etag")
    try:
        present = api.get_alias(found.run_id, name, database, caller, Response())
    except MissingError:
        present = None
    if present is not None and present.checkpoint_id == checkpoint_id:
        return _back(checkpoint_id, "aliased")
    if present is not None and etag is None:
        holder = checkpoints_api.get_checkpoint(present.checkpoint_id, database, caller, Response())
        return page(request, "move_alias.html", found=found, holder=holder, alias=present)
    change = AliasChange(checkpoint_id=checkpoint_id)
    api.set_alias(found.run_id, name, change, database, author, caller, Precondition(etag), Response())
    if present is None:
        return _back(checkpoint_id, "aliased")
    return _back(checkpoint_id, f"moved:{present.checkpoint_id}:{name}")


@router.post(_CHECKPOINT + "/unalias", dependencies=_WRITE)
def delete_alias_form(
    checkpoint_id: IdPath, form: FormDep, database: Db, author: Author, caller: Caller
) -> Response:
    """Remove an alias that names this checkpoint."""
    name = _name(form, "alias")
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    present = api.get_alias(found.run_id, name, database, caller, Response())
    if present.checkpoint_id == checkpoint_id:
        api.delete_alias(found.run_id, name, database, author, caller, Precondition(present.etag))
    return _back(checkpoint_id, f"unaliased:{checkpoint_id}:{name}")


@dataclass(frozen=True, slots=True)
class Undo:
    """What takes the change of an alias back: it names ``holder`` again. ``etag`` is the alias's, "" if there
    is none now."""

    alias: str
    holder: CheckpointDetailAnswer
    etag: str


def undo_of(done: str | None, found: CheckpointDetailAnswer, database: Db, caller: Caller) -> Undo | None:
    """By what the page's address says was ``done``, if the catalog still is as that left it."""
    what, number, name = [*(done or "").split(":", 2), "", ""][:3]
    if what not in ("moved", "unaliased") or not number.isdecimal() or len(number) > 15:
        return None
    try:
        holder = checkpoints_api.get_checkpoint(int(number), database, caller, Response())
    except MissingError:
        return None
    if holder.run_id != found.run_id or holder.state in ("deleted", "purged"):
        return None
    try:
        present = api.get_alias(found.run_id, name, database, caller, Response())
    except MissingError:
        return Undo(name, holder, "") if what == "unaliased" else None
    is_as_left = what == "moved" and present.checkpoint_id == found.id != holder.id
    return Undo(name, holder, present.etag) if is_as_left else None


@router.post(_CHECKPOINT + "/delete", dependencies=_DELETE)
def delete_form(checkpoint_id: IdPath, form: FormDep, ask: AskDep) -> Response:
    """Delete it; until the grace is over that can be taken back."""
    retention_web.delete_checkpoint(checkpoint_id, ask, _seen(form))
    return _back(checkpoint_id, "deleted")


@router.post(_CHECKPOINT + "/restore", dependencies=_DELETE)
def restore_form(checkpoint_id: IdPath, form: FormDep, ask: AskDep) -> Response:
    """Take the deletion back."""
    retention_web.restore_checkpoint(checkpoint_id, ask, _seen(form))
    return _back(checkpoint_id, "restored")
