"""Pages of notes: the list of a subject, a note with its history, the form, and panels."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query as InQuery
from fastapi import Response
from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import ChangedError
from dcp.server.catalog.inputs import Query
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageParams, Precondition
from dcp.server.core.pages.requests import checked
from dcp.server.core.problems import PreconditionFailedError, UnprocessableError
from dcp.server.features.notes import feature, notes
from dcp.server.features.notes.markdown import MAX_CHARACTERS, html_of
from dcp.server.features.notes.note_records import Note
from dcp.server.features.notes.note_routes import (
    NoteText,
    change_note,
    create_on,
    delete_note,
    get_note,
    list_checkpoint_notes,
    list_note_versions,
    list_run_notes,
)
from dcp.server.features.notes.notes import NOTES, NoteSubject, may_change, subject_of
from dcp.server.records.checkpoints import CheckpointDetail, Run
from dcp.server.records.lists import Page

_SHOWN: Final = 3
"""Notes of a panel."""


class NotesView(Query):
    """The address of a list of notes."""

    cursor: Annotated[str, Field(max_length=2048)] | None = None
    with_checkpoints: bool = False
    done: Annotated[str, Field(max_length=200)] | None = None


@feature.panel("checkpoint", "panel.html", order=35)
def checkpoint_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Show the newest notes on a checkpoint, and a form."""
    return _panel(ask, NoteSubject(found.run_id, found.id), found.root)


@feature.panel("run", "panel.html", order=10)
def run_panel(ask: Ask, found: Run) -> dict[str, Any] | None:
    """Show the newest notes on a run, and a form."""
    return _panel(ask, NoteSubject(found.id), found.root)


def _panel(ask: Ask, subject: NoteSubject, root: str) -> dict[str, Any] | None:
    page = ask.find(notes.list_notes, ask.visible, subject=subject, limit=_SHOWN)
    may_write = ask.caller.may("write", root)
    if not page.items and not may_write:
        return None
    return {**_listed(page), "subject": subject, "most": MAX_CHARACTERS, "may_write": may_write}


def _listed(page: Page[Note]) -> dict[str, Any]:
    """Return the notes of a page with their HTML."""
    return {"notes": [(note, html_of(note.text)) for note in page.items], "next_cursor": page.next_cursor}


@feature.page("/runs/{run_id}/notes", "notes.html")
def run_notes_page(run_id: IdPath, view: Annotated[NotesView, InQuery()], ask: Ask) -> dict[str, Any]:
    """List the notes on a run, optionally with notes on its checkpoints."""
    page = list_run_notes(run_id, ask, PageParams(20, view.cursor), view.with_checkpoints)
    return {**_listed(page), **_about(ask, NoteSubject(run_id)), "view": view}


@feature.page("/checkpoints/{checkpoint_id}/notes", "notes.html")
def checkpoint_notes_page(
    checkpoint_id: IdPath, view: Annotated[NotesView, InQuery()], ask: Ask
) -> dict[str, Any]:
    """List the notes on a checkpoint."""
    page = list_checkpoint_notes(checkpoint_id, ask, PageParams(20, view.cursor))
    on = ask.find(subject_of, ask.visible, checkpoint_id=checkpoint_id)
    return {**_listed(page), **_about(ask, on), "view": view}


@feature.page("/notes/{note_id}", "note.html")
def note_page(note_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Show a note with its history, and links for changes to the author."""
    note = get_note(note_id, ask)
    return {
        "note": note,
        "html": html_of(note.text),
        "versions": [(one, html_of(one.text)) for one in list_note_versions(note_id, ask).items],
        "may_change": _may_change(note_id, ask),
        **_about(ask, NoteSubject(note.run_id, note.checkpoint_id)),
    }


@feature.page("/notes/{note_id}/edit", "write.html", scope="write")
def edit_note_page(note_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Show the form of a note."""
    note = get_note(note_id, ask)
    subject = NoteSubject(note.run_id, note.checkpoint_id)
    return _written(ask, subject, text=note.text, note=note, etag=note.etag)


def _may_change(note_id: int, ask: Ask) -> bool:
    with ask.reading() as connection:
        return may_change(ask, NOTES.find(connection, note_id, ask.visible))


def _about(ask: Ask, subject: NoteSubject) -> dict[str, Any]:
    """Return the run, and the checkpoint of a note, for titles and breadcrumbs."""

    def both(connection: Connection) -> dict[str, Any]:
        number = subject.checkpoint_id
        checkpoint = None if number is None else get_checkpoint(connection, number, ask.visible)
        run = get_run(connection, subject.run_id, ask.visible)
        return {"subject": subject, "run": run, "checkpoint": checkpoint}

    return ask.find(both)


# -- forms ---------------------------------------------------------------------------------------------------


def _written(
    ask: Ask,
    subject: NoteSubject,
    *,
    text: str,
    note: Note | None = None,
    etag: str = "",
    fault: str = "",
    html: str | None = None,
) -> dict[str, Any]:
    """Return the values of the form: the typed text, with a preview or errors."""
    return {
        **_about(ask, subject),
        "text": text,
        "note": note,
        "etag": etag,
        "fault": fault,
        "html": html,
        "most": MAX_CHARACTERS,
    }


def _typed(ask: Ask, subject: NoteSubject, note: Note | None = None) -> NoteText | Response:
    """Return the submitted text; or the page with a preview or errors."""
    typed = ask.form.text("text")
    etag = ask.form.text("etag")
    try:
        body = checked(NoteText, text=typed)
    except UnprocessableError as error:
        fault = error.detail.removeprefix("text: ").removeprefix("Value error, ")
        fault = fault if typed else "a note needs some text"
        shown = _written(ask, subject, text=typed, note=note, etag=etag, fault=fault)
        return ask.page("notes/write.html", error.status, **shown)
    if not ask.form.is_checked("preview"):
        return body
    html = html_of(body.text)
    return ask.page(
        "notes/write.html", **_written(ask, subject, text=body.text, note=note, etag=etag, html=html)
    )


@feature.form("/runs/{run_id}/notes", scope="write")
def create_run_note_form(run_id: IdPath, ask: Ask) -> str | Response:
    """Add a note to a run, or preview the note."""
    return _created(ask, ask.find(subject_of, ask.visible, run_id=run_id))


@feature.form("/checkpoints/{checkpoint_id}/notes", scope="write")
def create_checkpoint_note_form(checkpoint_id: IdPath, ask: Ask) -> str | Response:
    """Add a note to a checkpoint, or preview the note."""
    return _created(ask, ask.find(subject_of, ask.visible, checkpoint_id=checkpoint_id))


def _created(ask: Ask, subject: NoteSubject) -> str | Response:
    body = _typed(ask, subject)
    if isinstance(body, Response):
        return body
    if subject.checkpoint_id is None:
        create_on(ask, body.text, run_id=subject.run_id)
    else:
        create_on(ask, body.text, checkpoint_id=subject.checkpoint_id)
    return f"{subject.path}#notes"


@feature.form("/notes/{note_id}", scope="write")
def change_note_form(note_id: IdPath, ask: Ask) -> str | Response:
    """Change a note, or preview the change. If the note has changed since, show the form again with the typed
    text."""
    note = get_note(note_id, ask)
    subject = NoteSubject(note.run_id, note.checkpoint_id)
    body = _typed(ask, subject, note)
    if isinstance(body, Response):
        return body
    try:
        change_note(note_id, body, ask, Precondition(ask.form.optional("etag")))
    except (ChangedError, PreconditionFailedError):
        editor = note.edited_by or note.author
        fault = f"{editor} has changed the note in the meantime: see below. Saving replaces the changed text"
        shown = _written(ask, subject, text=body.text, note=note, etag=note.etag, fault=fault)
        return ask.page("notes/write.html", 412, **shown, present=html_of(note.text))
    return f"/notes/{note_id}"


@feature.form("/notes/{note_id}/delete", scope="write")
def delete_note_form(note_id: IdPath, ask: Ask) -> str:
    """Delete a note with its history."""
    note = get_note(note_id, ask)
    delete_note(note_id, ask, Precondition(ask.form.optional("etag")))
    return f"{NoteSubject(note.run_id, note.checkpoint_id).path}#notes"
