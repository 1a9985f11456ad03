"""Fixtures: applications and signed-in browsers for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app import App, running_app
from tests.support.pages import Browser

_SETTINGS: dict[str, Any] = {"rate_limit": "100000/minute"}


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """Start the application without keys, as on a laptop."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, auth="off", **_SETTINGS) as made:
        yield made


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[App]:
    """Start the application with keys."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, **_SETTINGS) as made:
        yield made


@pytest.fixture
def browser(app: App) -> Browser:
    """Return a browser of the application without keys."""
    return Browser(app.client())


@pytest.fixture
def reader(keyed: App) -> Browser:
    """Return a browser signed in with a key that reads."""
    made = Browser(keyed.client())
    made.sign_in(keyed.key("read"))
    return made


@pytest.fixture
def of_main(keyed: App) -> Browser:
    """Return a browser signed in with a key that reads the root main."""
    made = Browser(keyed.client())
    made.sign_in(keyed.key("read", roots=["main"], name="of-main"))
    return made
