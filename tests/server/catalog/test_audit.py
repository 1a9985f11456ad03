"""The audit log: everything about somebody, something, or a time, newest first, page by page."""

from __future__ import annotations

import pytest

from dcp.server.catalog.audit import audit_page, record
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.database.engine import Database


def test_entries_are_found_by_who_what_and_when(database: Database) -> None:
    """Each filter alone and together; pages end where the entries do."""
    with database.write() as connection:
        for number in range(20):
            record(
                connection,
                f"key:{number % 2}",
                f"act.{number % 4}",
                f"checkpoint:{number % 5}",
                {"number": number},
                now=float(number),
            )

        def numbers(**wanted: object) -> list[int]:
            return [entry.detail["number"] for entry in audit_page(connection, **wanted).entries]  # type: ignore[arg-type]

        assert numbers() == list(range(19, -1, -1))
        assert numbers(actor="key:1") == list(range(19, 0, -2))
        assert numbers(action="act.3") == [19, 15, 11, 7, 3]
        assert numbers(target="checkpoint:2") == [17, 12, 7, 2]
        assert numbers(since_seconds=17.0) == [19, 18, 17]
        assert numbers(until_seconds=2.0) == [1, 0]
        assert numbers(actor="key:1", action="act.3", target="checkpoint:2") == [7]
        found: list[int] = []
        cursor = None
        for _ in range(4):
            page = audit_page(connection, actor="key:0", cursor=cursor, limit=3)
            found += [entry.detail["number"] for entry in page.entries]
            cursor = page.next_cursor
        assert (found, cursor) == (list(range(18, -1, -2)), None)
        with pytest.raises(InvalidQueryError, match="cursor"):
            audit_page(connection, cursor="AAAA")


def test_entries_bear_whatever_comes(database: Database) -> None:
    """Names of any length, with characters that no database takes."""
    with database.write() as connection:
        record(
            connection,
            "k" * 500,
            "a\x00",
            "t" * 1000,
            {"x": float("nan")},
            request_id="\ud800",
            address="a" * 99,
        )
        (entry,) = audit_page(connection).entries
    assert (len(entry.actor), len(entry.target), entry.action) == (128, 512, "a\\x00")
    assert entry.detail == {"x": "nan"}
