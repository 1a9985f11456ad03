"""The application, or a catalog, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app import App, running_app
from tests.support.catalog import catalog
from tests.support.databases import MakeDatabase

__all__ = ["catalog"]


@pytest.fixture
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """The application with keys, on SQLite and on PostgreSQL."""
    with running_app(make_database(), tmp_path) as running:
        yield running
