"""Fixtures for the tests of the service."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import structlog

from tests.support.catalog import catalog
from tests.support.databases import database, empty_database, make_database, postgres_server, share_statements

__all__ = ["catalog", "database", "empty_database", "make_database", "postgres_server"]


_KINDS: Final = ("postgresql", "sqlite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each test on one database, three of four on SQLite, and in the exhaustive runs on the other too.
    Tests marked ``each_database`` always run on both; each set of parameters counts as a test."""
    tried: dict[tuple[str, str], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("each_database"):
            continue
        test, _, values = item.nodeid.removesuffix("]").partition("[")
        for kind in _KINDS:
            if kind in (others := values.split("-")):
                others.remove(kind)
                tried[test, "-".join(others)][kind] = item
    turns: Counter[Path] = Counter()
    for on in tried.values():
        if len(on) == len(_KINDS) and not any(item.get_closest_marker("exhaustive") for item in on.values()):
            path = on[_KINDS[0]].path
            on[_KINDS[turns[path] % 4 == 3]].add_marker(pytest.mark.exhaustive)
            turns[path] += 1


@pytest.fixture(scope="session", autouse=True)
def _cheap_services() -> None:
    """Render tracebacks plainly, as the service does: structlog's own rendering takes seconds for each."""
    share_statements()
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """Undo the changes of `configure_logs`."""
    root, logs = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**logs)
