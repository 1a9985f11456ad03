"""Records of notes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from dcp.server.records.declaring import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Note on a run or checkpoint."""

    id: int
    root: str
    run_id: int
    run: Annotated[str, Shown("Key of the run.")]
    checkpoint_id: Annotated[int | None, Shown("null: the note is on the run as a whole.")]
    checkpoint_key: Annotated[str | None, Shown("null: the note is on the run.")]
    text: Annotated[str, Shown("Markdown: CommonMark with tables and strikethrough.")]
    author: Annotated[str, Shown(examples=("key:alice",))]
    created_at: datetime
    edited_at: Annotated[datetime | None, Shown("null: never edited.")]
    edited_by: Annotated[str | None, Shown("null: never edited.")]
    version: int
    etag: Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteVersion:
    """Current or earlier text of a note."""

    version: int
    text: str
    author: Annotated[str, Shown("The author of this text.")]
    at: datetime
