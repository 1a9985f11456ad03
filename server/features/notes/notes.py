"""Notes as they are stored, found and changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, cast, delete, func, insert, select

from dcp.server.catalog.cursors import query_mark, read_page
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.events import emit
from dcp.server.catalog.names import check_text, contains, fold
from dcp.server.catalog.runs import get_run
from dcp.server.catalog.search import SearchHit
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import Precondition
from dcp.server.core.problems import ConflictError, ForbiddenError
from dcp.server.core.resource import Resource
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import checkpoints, roots, runs
from dcp.server.features.notes.markdown import plain_of
from dcp.server.features.notes.note_records import Note, NoteVersion
from dcp.server.features.notes.note_tables import note_versions, notes
from dcp.server.records.declaring import moment
from dcp.server.records.lists import Page

MAX_NOTES: Final = 1_000
"""Limit per run or checkpoint."""
_KEPT_VERSIONS: Final = 100
_SEARCHED: Final = 10_000
"""Newest notes examined by a search."""

_QUERY: Final = (
    select(
        notes,
        roots.c.name.label("root"),
        roots.c.id.label("root_id"),
        runs.c.key.label("run"),
        checkpoints.c.key.label("checkpoint_key"),
        checkpoints.c.step.label("step"),
    )
    .join_from(notes, runs, runs.c.id == notes.c.run_id)
    .join(roots, roots.c.id == runs.c.root_id)
    .outerjoin(checkpoints, checkpoints.c.id == notes.c.checkpoint_id)
)


def _note(row: Row[Any], etag: str) -> Note:
    edited_at = moment(row.updated_seconds) if row.version > 1 else None
    return record_of_row(Note, row, edited_at=edited_at, etag=etag)


def may_change(ask: Ask, row: Row[Any]) -> bool:
    """Return True if the caller may edit and delete a note: the author, or admins of the root."""
    is_author = ask.caller.owner[:256] == row.owner
    return ask.caller.may("write", row.root) and (is_author or ask.caller.may("admin", row.root))


def _check_author(ask: Ask, row: Row[Any]) -> None:
    if not may_change(ask, row):
        raise ForbiddenError(f"only the author ({row.author}) and admins may change note {row.id}")


NOTES: Final = Resource(
    notes,
    what="note",
    noun="note",
    tag="n{id}",
    record=_note,
    detail=lambda row: {"root": row.root, "run": row.run, "checkpoint": row.checkpoint_id},
    query=_QUERY,
    is_visible=lambda row, visible: visible is None or row.root in visible,
    root=lambda row: row.root,
    check=_check_author,
    forget=lambda connection, number: connection.execute(
        delete(note_versions).where(note_versions.c.note_id == number)
    ),
)


class NoteSubject(NamedTuple):
    """Run or checkpoint of a note."""

    run_id: int
    checkpoint_id: int | None = None

    @property
    def path(self) -> str:
        """The page of the run or the checkpoint."""
        if self.checkpoint_id is None:
            return f"/runs/{self.run_id}"
        return f"/checkpoints/{self.checkpoint_id}"


def subject_of(
    connection: Connection,
    visible: frozenset[str] | None,
    *,
    run_id: int | None = None,
    checkpoint_id: int | None = None,
) -> NoteSubject:
    """Find the subject by one of the ids. Raises MissingError unless a visible subject exists."""
    if checkpoint_id is not None:
        return NoteSubject(get_checkpoint(connection, checkpoint_id, visible).run_id, checkpoint_id)
    return NoteSubject(get_run(connection, run_id or 0, visible).id)


def _on(subject: NoteSubject, with_checkpoints: bool = False) -> list[ColumnElement[bool]]:
    if subject.checkpoint_id is not None:
        return [notes.c.checkpoint_id == subject.checkpoint_id]
    of_run = notes.c.run_id == subject.run_id
    return [of_run] if with_checkpoints else [of_run, notes.c.checkpoint_id.is_(None)]


def list_notes(
    connection: Connection,
    visible: frozenset[str] | None,
    *,
    subject: NoteSubject | None = None,
    with_checkpoints: bool = False,
    text: str | None = None,
    author: str | None = None,
    root: str | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[Note]:
    """List visible notes, newest first, optionally of a subject or with ``text``, ignoring case."""
    query = _seen(visible)
    if subject is not None:
        query = query.where(*_on(subject, with_checkpoints))
    if author is not None:
        query = query.where(notes.c.author == author)
    if root is not None:
        query = query.where(roots.c.name == root)
    if text is not None:
        query = query.where(_has(connection, text))
    mark = query_mark("notes", subject, with_checkpoints, text, author, root)
    key = (notes.c.id, int)
    return read_page(connection, query, NOTES.shown, mark, key, cursor=cursor, limit=limit, descending=True)


def _seen(visible: frozenset[str] | None) -> Select[Any]:
    return _QUERY if visible is None else _QUERY.where(roots.c.name.in_(sorted(visible)))


def _has(connection: Connection, text: str) -> ColumnElement[bool]:
    is_sqlite = connection.dialect.name == "sqlite"
    folded = func.lower(notes.c.text if is_sqlite else cast(notes.c.text, Text).collate("C"))
    return contains(connection, folded, fold(check_text("contains", text)))


def find_notes(
    connection: Connection, text: str, visible: frozenset[str] | None, limit: int
) -> Iterator[SearchHit]:
    """Find notes for the search of the service, among the newest notes."""
    newest = select(notes.c.id).order_by(notes.c.id.desc()).offset(_SEARCHED).limit(1)
    oldest = connection.execute(newest).scalar() or 0
    typed = text.strip()
    query = _seen(visible).where(notes.c.id > oldest, _has(connection, typed))
    for row in connection.execute(query.order_by(notes.c.id.desc()).limit(limit)):
        yield SearchHit(
            "note",
            plain_of(row.text, typed),
            3,
            row.root,
            row.run,
            row.run_id,
            row.checkpoint_id,
            row.checkpoint_key,
            row.step,
            href=f"/notes/{row.id}",
        )


def add_note(connection: Connection, ask: Ask, subject: NoteSubject, text: str) -> Row[Any]:
    """Add a note, and emit its event. Raises ConflictError at the limit."""
    counted = select(func.count()).select_from(notes).where(*_on(subject))
    if connection.execute(counted).scalar_one() >= MAX_NOTES:
        raise ConflictError(f"the maximum of {MAX_NOTES:,} notes is reached: delete some notes", state="full")
    author = ask.caller
    values = {**subject._asdict(), "text": text, "author": author.name[:128], "owner": author.owner[:256]}
    row = NOTES.insert(connection, ask, values)
    data = {"note_id": row.id, "run_id": row.run_id, "run": row.run, "author": row.author}
    emit(
        connection,
        "note.created",
        root_id=row.root_id,
        checkpoint_id=row.checkpoint_id,
        data=data,
        now=ask.now,
    )
    return row


def change_text(connection: Connection, ask: Ask, number: int, match: Precondition, text: str) -> Row[Any]:
    """Change the text, and keep the previous text. An equal text changes nothing."""
    row = NOTES.lock(connection, ask, number, match)
    if row.text == text:
        return row
    before = {
        "note_id": row.id,
        "version": row.version,
        "text": row.text,
        "author": row.edited_by or row.author,
        "at_seconds": row.updated_seconds,
    }
    connection.execute(insert(note_versions).values(before))
    old = note_versions.c.version <= row.version - _KEPT_VERSIONS
    connection.execute(delete(note_versions).where(note_versions.c.note_id == row.id, old))
    return NOTES.update(connection, ask, row, {"text": text, "edited_by": ask.caller.name[:128]})


def history_of(connection: Connection, number: int, visible: frozenset[str] | None) -> list[NoteVersion]:
    """List the texts of a note, the newest first."""
    row = NOTES.find(connection, number, visible)
    author, at = row.edited_by or row.author, moment(row.updated_seconds)
    query = select(note_versions).where(note_versions.c.note_id == number)
    earlier = connection.execute(query.order_by(note_versions.c.version.desc()))
    return [
        NoteVersion(version=row.version, text=row.text, author=author, at=at),
        *(record_of_row(NoteVersion, one) for one in earlier),
    ]
