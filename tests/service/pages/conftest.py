"""The application whose pages are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app import App, running_app

_SETTINGS = {"rate_limit": "100000/minute"}


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """Without keys, as on a laptop."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path, auth="off", **_SETTINGS) as made:
        yield made


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[App]:
    """With keys."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, **_SETTINGS) as made:
        yield made
