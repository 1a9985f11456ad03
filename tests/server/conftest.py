"""Fixtures of the service's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

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


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """What `configure_logs` changes is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
