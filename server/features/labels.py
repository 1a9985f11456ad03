"""Tags, pins, and metrics of checkpoints, and aliases of runs: by the API, and on a checkpoint's page.

Changes accept ``If-Match``. Moving or removing an existing alias requires ``If-Match``, so two programs
cannot overwrite each other's alias unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Response
from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy import Connection

from dcp.server.catalog import labels
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.inputs import Finite, Id, Name, Request
from dcp.server.catalog.labels import Alias
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath, NamePath
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.http.dependencies import IfMatch, Precondition
from dcp.server.core.problems import ConflictError, UnprocessableError
from dcp.server.features import features
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.lists import Items

feature: Final = Feature("labels", __name__)

_CHECKPOINT: Final = "/checkpoints/{checkpoint_id}"
_ALIAS: Final = "/runs/{run_id}/aliases/{name:path}"
_CHANGE: Final = (404, 409, 412)


class MetricsChange(Request):
    """Metrics by name; null removes a metric, other metrics stay."""

    metrics: Annotated[dict[Name, Finite | None], Field(min_length=1, max_length=256)] = Field(
        description="Values by name; null removes a metric."
    )


TagPath = Annotated[NamePath, Field(description="Name of the tag.")]
AliasPath = Annotated[NamePath, Field(description="Name of the alias.")]


class AliasChange(Request):
    """Checkpoint of the run for the alias; ``is_protected`` needs the scope admin."""

    checkpoint_id: Id = Field(description="Checkpoint of the run to which the alias points.")
    is_protected: bool | None = Field(
        default=None, description="True: only admins move the alias; null: no change."
    )


@feature.put(_CHECKPOINT + "/tags/{tag:path}", tag="labels", scope="write", errors=_CHANGE)
def add_tag(checkpoint_id: IdPath, tag: TagPath, ask: Ask, if_match: IfMatch) -> CheckpointDetail:
    """Add a tag. Adding an existing tag changes nothing."""
    return _changed(ask, if_match, checkpoint_id, labels.add_tags, [tag])


@feature.delete(_CHECKPOINT + "/tags/{tag:path}", tag="labels", scope="write", errors=_CHANGE)
def remove_tag(checkpoint_id: IdPath, tag: TagPath, ask: Ask, if_match: IfMatch) -> CheckpointDetail:
    """Remove a tag. Removing a missing tag changes nothing."""
    return _changed(ask, if_match, checkpoint_id, labels.remove_tags, [tag])


@feature.put(_CHECKPOINT + "/pin", tag="labels", scope="write", errors=_CHANGE)
def pin_checkpoint(checkpoint_id: IdPath, ask: Ask, if_match: IfMatch) -> CheckpointDetail:
    """Protect the checkpoint from deletion, also by retention."""
    return _changed(ask, if_match, checkpoint_id, labels.set_pinned, True)


@feature.delete(_CHECKPOINT + "/pin", tag="labels", scope="write", errors=_CHANGE)
def unpin_checkpoint(checkpoint_id: IdPath, ask: Ask, if_match: IfMatch) -> CheckpointDetail:
    """Unpin a checkpoint and allow its deletion."""
    return _changed(ask, if_match, checkpoint_id, labels.set_pinned, False)


@feature.patch(_CHECKPOINT + "/metrics", tag="labels", scope="write", errors=_CHANGE)
def change_metrics(
    checkpoint_id: IdPath, body: MetricsChange, ask: Ask, if_match: IfMatch
) -> CheckpointDetail:
    """Set metrics, or remove them."""
    return _changed(ask, if_match, checkpoint_id, labels.set_metrics, body.metrics)


def _changed(
    ask: Ask, if_match: Precondition, checkpoint_id: int, act: Callable[..., CheckpointDetail], value: Any
) -> CheckpointDetail:
    change = ask.change(if_match.version(f"c{checkpoint_id}"))
    return ask.tagged(ask.transact(lambda connection: act(connection, checkpoint_id, value, change)))


# -- aliases -------------------------------------------------------------------------------------------------


@feature.get("/runs/{run_id}/aliases", tag="labels")
def list_aliases(run_id: IdPath, ask: Ask) -> Items[Alias]:
    """List all aliases of a run by name."""
    with ask.reading() as connection:
        get_run(connection, run_id, ask.visible)
        return Items(tuple(labels.list_aliases(connection, run_id, ask.visible)))


@feature.get(_ALIAS, tag="labels")
def get_alias(run_id: IdPath, name: AliasPath, ask: Ask) -> Alias:
    """Return the checkpoint of the alias."""
    return ask.tagged(ask.find(labels.get_alias, run_id, name, ask.visible))


@feature.put(_ALIAS, tag="labels", scope="write", errors=(404, 409, 412, 428))
def set_alias(run_id: IdPath, name: AliasPath, body: AliasChange, ask: Ask, if_match: IfMatch) -> Alias:
    """Point the alias at this checkpoint of the run. Without If-Match, the alias must be new."""

    def act(connection: Connection) -> Alias:
        labels.lock_aliases(connection, run_id)
        expected = _expected(connection, run_id, name, if_match, ask)
        _check_free(connection, run_id, name, ask)
        return labels.set_alias(
            connection,
            run_id,
            name,
            body.checkpoint_id,
            ask.change(expected),
            is_admin=ask.caller.may("admin", get_run(connection, run_id, ask.visible).root),
            is_protected=body.is_protected,
        )

    return ask.tagged(ask.transact(act))


@feature.delete(_ALIAS, tag="labels", scope="write", status=204, errors=(404, 409, 412, 428))
def delete_alias(run_id: IdPath, name: AliasPath, ask: Ask, if_match: IfMatch) -> None:
    """Remove an alias; the checkpoint stays. Needs If-Match."""

    def act(connection: Connection) -> None:
        labels.lock_aliases(connection, run_id)
        labels.get_alias(connection, run_id, name, ask.visible)
        if_match.required()
        _check_free(connection, run_id, name, ask)
        change = ask.change(_expected(connection, run_id, name, if_match, ask))
        labels.delete_alias(
            connection,
            run_id,
            name,
            change,
            is_admin=ask.caller.may("admin", get_run(connection, run_id, ask.visible).root),
        )

    ask.transact(act)


def _check_free(connection: Connection, run_id: int, name: str, ask: Ask) -> None:
    """Raise ConflictError for an alias kept by another feature."""
    reason = _why_held(connection, run_id, name, ask)
    if reason is not None:
        raise ConflictError(reason, state="held")


def _why_held(connection: Connection, run_id: int, name: str, ask: Ask) -> str | None:
    guards = (guard for one in features() for guard in one.alias_guards)
    reasons = (guard(connection, ask.settings, run_id, name) for guard in guards)
    return next((reason for reason in reasons if reason is not None), None)


def _expected(connection: Connection, run_id: int, name: str, if_match: Precondition, ask: Ask) -> int | None:
    """Return the alias version expected by the request; 0 for a missing alias."""
    get_run(connection, run_id, ask.visible)
    try:
        present = labels.get_alias(connection, run_id, name, ask.visible)
    except MissingError:
        if_match.nothing(f"alias {name} not found")
        return 0
    if_match.required()
    # The tag includes the checkpoint: an alias that was removed and recreated has another tag.
    return if_match.version(f"a{run_id}-{present.checkpoint_id}")


# -- the page of a checkpoint --------------------------------------------------------------------------------

_ANY: Final = Precondition(None)
"""Labels are set regardless of other changes."""
_NAME: Final[TypeAdapter[str]] = TypeAdapter(Name)


@dataclass(frozen=True, slots=True)
class Undo:
    """Form that undoes a change of an alias by pointing it at ``holder``. ``etag`` is the alias's, "" for a
    missing alias."""

    alias: str
    holder: CheckpointDetail
    etag: str


@feature.panel("checkpoint", "labels.html", order=20)
def labels_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Show tags and aliases, and forms for changes."""
    if not (ask.caller.may("write", found.root) or found.tags or found.aliases):
        return None
    with ask.reading() as connection:
        held = [name for name in found.aliases if _why_held(connection, found.run_id, name, ask)]
    return {"held": held}


@feature.panel("checkpoint.notices", "labels_notice.html", order=10)
def labels_notice(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """Confirm a submitted form from the page's address, with a form for undo."""
    done = ask.request.query_params.get("done")
    return {"undo": _undo(done or "", found, ask)}


def _undo(done: str, found: CheckpointDetail, ask: Ask) -> Undo | None:
    """Return the undo of a change if the catalog has not changed since."""
    what, number, name = [*done.split(":", 2), "", ""][:3]
    if what not in ("moved", "unaliased") or not number.isdecimal() or len(number) > 15:
        return None
    try:
        holder = ask.find(get_checkpoint, int(number), ask.visible)
    except MissingError:
        return None
    if holder.run_id != found.run_id or holder.state in ("deleted", "purged"):
        return None
    present = _alias(found.run_id, name, ask)
    if present is None:
        return Undo(name, holder, "") if what == "unaliased" else None
    is_as_left = what == "moved" and present.checkpoint_id == found.id != holder.id
    return Undo(name, holder, present.etag) if is_as_left else None


@feature.form(_CHECKPOINT + "/tags", scope="write")
def change_tags_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Add or remove a tag."""
    if ask.form.text("remove"):
        remove_tag(checkpoint_id, _name(ask, "remove"), ask, _ANY)
        return _page(checkpoint_id, "untagged")
    add_tag(checkpoint_id, _name(ask, "tag"), ask, _ANY)
    return _page(checkpoint_id, "tagged")


@feature.form(_CHECKPOINT + "/pin", scope="write")
def change_pin_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Protect the checkpoint from deletion, or remove the protection."""
    if ask.form.is_checked("pinned"):
        pin_checkpoint(checkpoint_id, ask, _ANY)
        return _page(checkpoint_id, "pinned")
    unpin_checkpoint(checkpoint_id, ask, _ANY)
    return _page(checkpoint_id, "unpinned")


@feature.form(_CHECKPOINT + "/alias", scope="write")
def set_alias_form(checkpoint_id: IdPath, ask: Ask) -> str | Response:
    """Point an alias of the run at this checkpoint; confirm before moving an existing alias."""
    name = _name(ask, "alias")
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    etag = ask.form.optional("alias_etag")
    present = _alias(found.run_id, name, ask)
    if present is not None and present.checkpoint_id == checkpoint_id:
        return _page(checkpoint_id, "aliased")
    if present is not None and etag is None:
        holder = ask.find(get_checkpoint, present.checkpoint_id, ask.visible)
        return ask.page("labels/move_alias.html", found=found, holder=holder, alias=present)
    set_alias(found.run_id, name, AliasChange(checkpoint_id=checkpoint_id), ask, Precondition(etag))
    if present is None:
        return _page(checkpoint_id, "aliased")
    return _page(checkpoint_id, f"moved:{present.checkpoint_id}:{name}")


@feature.form(_CHECKPOINT + "/unalias", scope="write")
def delete_alias_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Remove an alias of this checkpoint."""
    name = _name(ask, "alias")
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    present = get_alias(found.run_id, name, ask)
    if present.checkpoint_id == checkpoint_id:
        delete_alias(found.run_id, name, ask, Precondition(present.etag))
    return _page(checkpoint_id, f"unaliased:{checkpoint_id}:{name}")


def _alias(run_id: int, name: str, ask: Ask) -> Alias | None:
    try:
        return ask.find(labels.get_alias, run_id, name, ask.visible)
    except MissingError:
        return None


def _page(checkpoint_id: int, done: str) -> str:
    return f"/checkpoints/{checkpoint_id}?{urlencode({'done': done})}"


def _name(ask: Ask, field: str) -> str:
    try:
        return _NAME.validate_python(ask.form.text(field))
    except ValidationError:
        raise UnprocessableError(
            f"{field}: 1 to 128 letters, digits and _./:@+=-, beginning with a letter, a digit or _",
            field=field,
        ) from None
