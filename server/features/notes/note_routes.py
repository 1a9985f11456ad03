"""Notes by the API: listed, created, edited and deleted."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query as InQuery
from pydantic import AfterValidator, Field
from sqlalchemy import Connection

from dcp.server.catalog.filters import RootName, check_root
from dcp.server.catalog.inputs import Query, Request, Text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import IfMatch, PageParams, PageQuery
from dcp.server.features.notes import feature, notes
from dcp.server.features.notes.markdown import MAX_CHARACTERS, check_markdown
from dcp.server.features.notes.note_records import Note, NoteVersion
from dcp.server.features.notes.notes import NOTES, subject_of
from dcp.server.records.lists import Items, Page

Markdown = Annotated[
    str,
    # twice the length, because forms send two characters for the end of a line
    Field(min_length=1, max_length=2 * MAX_CHARACTERS, description=f"Markdown, {MAX_CHARACTERS} characters."),
    AfterValidator(check_markdown),
]

feature.finder("note")(notes.find_notes)


class NoteText(Request):
    """The text of a note: CommonMark with tables and strikethrough, without HTML."""

    text: Markdown


class NoteQuery(Query):
    """Notes with a text in them in any case, by an author, in a root."""

    contains: Annotated[
        Annotated[Text, Field(min_length=1, max_length=256)] | None,
        Field(description="Part of the text; case is ignored."),
    ] = None
    author: Annotated[
        Annotated[Text, Field(min_length=1, max_length=128, examples=["key:alice"])] | None,
        Field(description="Account or key that wrote the note."),
    ] = None
    root: Annotated[RootName | None, Field(description="Name of a root.")] = None
    cursor: Annotated[
        Annotated[str, Field(min_length=1, max_length=2048)] | None,
        Field(description="The next_cursor of the previous page."),
    ] = None
    limit: Annotated[int, Field(ge=1, le=500, description="Maximum rows of a page.")] = 50


@feature.get("/notes", tag="notes", errors=())
def list_notes(query: Annotated[NoteQuery, InQuery()], ask: Ask) -> Page[Note]:
    """List visible notes, newest first."""
    with ask.reading() as connection:
        check_root(connection, query.root, ask.visible)
        return notes.list_notes(
            connection,
            ask.visible,
            text=query.contains,
            author=query.author,
            root=query.root,
            cursor=query.cursor,
            limit=query.limit,
        )


@feature.get("/runs/{run_id}/notes", tag="notes")
def list_run_notes(
    run_id: IdPath,
    ask: Ask,
    page: PageQuery,
    with_checkpoints: Annotated[bool, InQuery(description="Include notes on the run's checkpoints.")] = False,
) -> Page[Note]:
    """List the notes on a run, newest first."""
    return _listed(ask, page, run_id=run_id, with_checkpoints=with_checkpoints)


@feature.get("/checkpoints/{checkpoint_id}/notes", tag="notes")
def list_checkpoint_notes(checkpoint_id: IdPath, ask: Ask, page: PageQuery) -> Page[Note]:
    """List the notes on a checkpoint, newest first."""
    return _listed(ask, page, checkpoint_id=checkpoint_id)


def _listed(
    ask: Ask,
    page: PageParams,
    *,
    run_id: int | None = None,
    checkpoint_id: int | None = None,
    with_checkpoints: bool = False,
) -> Page[Note]:
    with ask.reading() as connection:
        return notes.list_notes(
            connection,
            ask.visible,
            subject=subject_of(connection, ask.visible, run_id=run_id, checkpoint_id=checkpoint_id),
            with_checkpoints=with_checkpoints,
            cursor=page.cursor,
            limit=page.limit,
        )


@feature.post("/runs/{run_id}/notes", tag="notes", scope="write", status=201, errors=(404, 409))
def create_run_note(run_id: IdPath, body: NoteText, ask: Ask) -> Note:
    """Add a note to a run."""
    return create_on(ask, body.text, run_id=run_id)


@feature.post("/checkpoints/{checkpoint_id}/notes", tag="notes", scope="write", status=201, errors=(404, 409))
def create_checkpoint_note(checkpoint_id: IdPath, body: NoteText, ask: Ask) -> Note:
    """Add a note to a checkpoint."""
    return create_on(ask, body.text, checkpoint_id=checkpoint_id)


def create_on(ask: Ask, text: str, *, run_id: int | None = None, checkpoint_id: int | None = None) -> Note:
    """Add a note to a run or a checkpoint, whichever is given."""

    def act(connection: Connection) -> Note:
        on = subject_of(connection, ask.visible, run_id=run_id, checkpoint_id=checkpoint_id)
        made = NOTES.answer(ask, notes.add_note(connection, ask, on, text))
        ask.response.headers["Location"] = f"/api/v1/notes/{made.id}"
        return made

    return ask.transact(act)


@feature.get("/notes/{note_id}", tag="notes")
def get_note(note_id: IdPath, ask: Ask) -> Note:
    """Get a note."""
    return NOTES.read(ask, note_id)


@feature.get("/notes/{note_id}/versions", tag="notes")
def list_note_versions(note_id: IdPath, ask: Ask) -> Items[NoteVersion]:
    """List the texts of a note, newest first: the current text, and up to 100 earlier texts."""
    return Items(tuple(ask.find(notes.history_of, note_id, ask.visible)))


@feature.patch("/notes/{note_id}", tag="notes", scope="write", errors=(404, 412))
def change_note(note_id: IdPath, body: NoteText, ask: Ask, match: IfMatch) -> Note:
    """Change the text. Only the author and admins may."""
    return NOTES.answer(
        ask,
        ask.transact(lambda connection: notes.change_text(connection, ask, note_id, match, body.text)),
    )


@feature.delete("/notes/{note_id}", tag="notes", scope="write", status=204, errors=(404, 412))
def delete_note(note_id: IdPath, ask: Ask, match: IfMatch) -> None:
    """Delete a note with all versions. Requires the author or an admin."""
    NOTES.delete(ask, note_id, match)
