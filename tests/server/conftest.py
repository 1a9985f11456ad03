"""Fixtures of the service's tests."""

from __future__ import annotations

from tests.support.databases import (
    _sqlite_template,
    database,
    empty_database,
    make_database,
    postgres_server,
    shared_database,
)

__all__ = [
    "_sqlite_template",
    "database",
    "empty_database",
    "make_database",
    "postgres_server",
    "shared_database",
]
