"""Large results. Internal: a writer that is killed between two transactions is reached by no request."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select, update

from dcp.server.database import documents, drafts
from dcp.server.database.documents import (
    abandon_documents,
    ensure_document,
    prepare_document,
    read_document,
    read_items,
    write_document,
)
from dcp.server.database.drafts import forget_drafts
from dcp.server.database.engine import Database
from dcp.server.database.tables import document_parts, jobs
from dcp.server.database.tables import documents as table
from dcp.server.jobs.ledger import JobSpec, submit
from tests.support.written import written_by

pytestmark = pytest.mark.each_database  # their SQL differs

LARGE = {
    "text": "ä" * 200_000,
    "tensors": [{"fqn": f"layers.{n}", "mean": n / 3, "shape": [n]} for n in range(2_345)],
    "none": [],
    "short": "x",
    "total": {"b": [1], "a": None},
}


def read(database: Database, number: int) -> dict[str, Any]:
    """All of a document."""
    with database.read() as connection:
        return read_document(connection, number)


def rows(database: Database) -> tuple[int, int]:
    """How many documents there are, drafts too, and how many parts of them."""
    with database.read() as connection:
        found = [connection.execute(select(func.count()).select_from(t)) for t in (table, document_parts)]
        return found[0].scalar_one(), found[1].scalar_one()


def test_what_was_prepared_is_what_was_written(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many short transactions or in one, in this order, with the same pages; nothing is long."""
    monkeypatch.setattr(documents, "_TRANSACTION_CHARACTERS", 20_000)
    paused: list[float] = []
    with written_by(database) as written:
        prepared = prepare_document(database, LARGE, now=5.0, pause=paused.append)
        database.transact(partial(ensure_document, content=LARGE, prepared=prepared))
    assert 20_000 < written.most < 1.3 * (20_000 + documents._CHARACTERS * len("\\u00e4"))
    assert len(paused) > 5
    at_once = database.transact(partial(write_document, content=LARGE))
    for number in (prepared, at_once):
        found = read(database, number)
        assert found == LARGE
        if database.dialect == "sqlite":  # the other one sorts the names
            assert list(found) == list(LARGE)
        with database.read() as connection:
            for begin, end in ((0, 10), (95, 205), (100, 200), (2_340, 9_999), (3_000, 3_010)):
                page = read_items(connection, number, "tensors", begin, end)
                assert page == LARGE["tensors"][begin:end]  # type: ignore[index]


def test_a_killed_writer_leaves_a_draft(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for nothing, and is removed in time and in short transactions, as what nobody publishes."""
    monkeypatch.setattr(documents, "_TRANSACTION_CHARACTERS", 1_000)

    def killed(_seconds: float) -> None:
        if rows(database)[1] == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_document(database, LARGE, now=1000.0, pause=killed)
    assert rows(database) == (1, 12)
    with database.read() as connection:
        assert connection.execute(select(table.c.name)).scalar_one().startswith("draft-")
    assert database.transact(partial(abandon_documents, now=5000.0)) == 0
    assert forget_drafts(database, 999.0) == 0
    with written_by(database) as written:
        assert forget_drafts(database, 1001.0) == 1
    assert rows(database) == (0, 0)
    assert 0 < written.most_removed <= drafts.DOCUMENTS.rows


def test_what_nothing_refers_to_is_removed(database: Database) -> None:
    """Once what has referred to it does not any more; at a later cleaning, since it may be read right now."""
    spec = JobSpec(kind="stats", params={}, created_by="me")
    job_id = database.transact(lambda connection: submit(connection, spec, 1.0))
    number = database.transact(partial(write_document, content=LARGE))

    def refer(to: int | None) -> None:
        statement = update(jobs).where(jobs.c.id == job_id).values(document_id=to)
        database.transact(lambda connection: connection.execute(statement))

    refer(number)
    assert database.transact(partial(abandon_documents, now=2000.0)) == 0
    refer(None)
    assert database.transact(partial(abandon_documents, now=2000.0)) == 1
    assert database.transact(partial(abandon_documents, now=3000.0)) == 0
    assert forget_drafts(database, 1999.0) == 0
    assert read(database, number) == LARGE
    assert forget_drafts(database, 2001.0) == 1
    assert rows(database) == (0, 0)
    with pytest.raises(LookupError, match=f"document {number} "):
        database.transact(partial(ensure_document, content=LARGE, prepared=number))
