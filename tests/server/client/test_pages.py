"""Lists to their end where the service gives up searching before a page is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.server.catalog.queries import listing, planning
from dcp.server.client import Client
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from tests.support.app import running_app
from tests.support.both_clients import KINDS, client_of
from tests.support.catalog_rows import add_checkpoint
from tests.support.sockets import listening

COUNT = 12


@pytest.fixture(params=KINDS)
def client(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """Of a service that tests two rows, then one, and then answers with what it has."""
    monkeypatch.setattr(planning, "FEW", 0)
    monkeypatch.setattr(listing, "WINDOWS", (2, 1))
    database = Database(f"sqlite:///{tmp_path / 'catalog.sqlite'}")
    upgrade(database)
    for step in range(1, COUNT + 1):
        metrics = {"loss": 1.0} if step in (1, 2) else {}
        add_checkpoint(database, f"run/step-{step}", metrics=metrics)
    database.close()
    with (
        running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, auth="off") as app,
        listening(app.app) as url,
        client_of(request.param, url) as made,
    ):
        yield made


def test_pages_may_be_empty_and_the_list_goes_on(client: Client) -> None:
    """What is found last is found: by iterating, as a whole, and as the first one."""
    found = client.checkpoints(metric="loss<2", min_step=1)
    pages = [[each.step for each in page] for page in found.pages()]
    assert pages[:2] == [[], []]
    assert [step for page in pages for step in page] == [2, 1]
    assert [each.step for each in found] == [each.step for each in found.all()] == [2, 1]
    first = found.first()
    assert first is not None and first.step == 2


def test_nothing_is_found_in_all_of_it(client: Client) -> None:
    """The end is where there is no cursor."""
    found = client.checkpoints(metric="loss<2", min_step=3)
    assert found.all() == [] and found.first() is None
    assert len(list(found.pages())) > 1
