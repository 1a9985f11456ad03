"""docs/api.md. Internal: the page is compared with what the code declares.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp.server.app import API
from dcp.server.http.access import access_of, walk_routes
from dcp.server.http.dependencies import Public, Requires
from dcp.server.jobs.kinds import KINDS
from dcp.server.schemas.queries import CheckpointQuery
from dcp.server.security.principal import ALL_SCOPES
from dcp.server.webhooks.hooks import ALL_EVENTS
from dcp.server.webhooks.ledger import MAX_ATTEMPTS, RETRY_SECONDS
from dcp.server.webhooks.signing import headers_for, new_secret
from tests.support.app import App, running_app

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
ROUTE = re.compile(r"^\| `(?P<method>[A-Z]+) (?P<path>/[^`]*)` \| (?P<scope>[^|]+) \|", re.MULTILINE)
BY_KIND = {("POST", "/jobs"), ("POST", "/jobs/{job_id}/cancel"), ("POST", "/jobs/{job_id}/retry")}
"""Who may is decided by the kind of the job."""


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """On SQLite: documentation does not differ between the databases."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as running:
        yield running


def section(heading: str) -> str:
    """From one heading to the next."""
    return re.split(r"^## ", TEXT.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_column(text: str) -> list[str]:
    """All names in the first column of tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_route_is_there_with_its_scope(app: App) -> None:
    """Those that there are are documented, and those that are documented are there."""
    below = TEXT.split("\n## Outside")[0]
    documented = {
        (match["method"], match["path"]): match["scope"].strip().strip("`") for match in ROUTE.finditer(below)
    }
    found: dict[tuple[str, str], Any] = {}
    for route in walk_routes(app.app):
        path, access = str(route.path_format), access_of(route)
        if path.startswith(API):
            assert isinstance(access, Requires)
            for method in set(route.methods or ()) - {"HEAD"}:
                key = (method, path.removeprefix(API))
                found[key] = "by kind" if key in BY_KIND else access.scope
    assert documented == found


def test_what_lies_outside_is_there(app: App) -> None:
    """Routes for everybody, and those of the documentation."""
    outside = section("Outside of `/api/v1`")
    parts = {"/docs/static/{name}", "/sign-in", "/sign-out", "/static/{digest}/{name:path}", "/theme"}
    found = {
        str(route.path) for route in walk_routes(app.app) if isinstance(access_of(route), Public)
    } - parts
    assert {name.removeprefix("GET ") for name in first_column(outside)} == found


def test_parameters_scopes_kinds_and_events_are_all_there() -> None:
    """As many as there are in the code, called so."""
    catalog = section("The catalog").split("`GET /checkpoints` takes these")[1]
    assert set(first_column(catalog)) == set(CheckpointQuery.model_fields)
    conventions = section("Conventions")
    assert {name for name in first_column(conventions) if name.isalpha()} == ALL_SCOPES
    kinds = dict(re.findall(r"^\| `([a-z]+)` \| `([a-z]+)` \| `", section("Jobs"), re.MULTILINE))
    assert kinds == {name: kind.scope for name, kind in KINDS.items()}
    events = [name for name in first_column(section("Webhooks")) if name.startswith("checkpoint.")]
    assert sorted(events) == sorted(ALL_EVENTS)


def test_parameters_of_jobs_are_theirs() -> None:
    """Each parameter that the table names is one of the kind's."""
    for name, text in re.findall(r"^\| `([a-z]+)` \| `[a-z]+` \| (`.*) \|$", section("Jobs"), re.MULTILINE):
        fields = set(KINDS[name].params.model_fields)
        named = {
            word for word in re.findall(r"`([a-z_]+)`", text) if word not in ("dcp", "torch", "safetensors")
        }
        assert named <= fields, name


def test_pauses_are_as_they_are_said() -> None:
    """The repetitions of deliveries, and how often."""
    assert RETRY_SECONDS == (10, 60, 300, 1800, 3600, 7200, 14_400, 28_800, 43_200)
    assert "after 10 s, 1 and 5 min, half an hour, 1, 2, 4, 8 and 12 hours" in TEXT.lower()
    assert MAX_ATTEMPTS == 10
    assert "After ten attempts" in TEXT
    assert 26 * 3600 < sum(RETRY_SECONDS) < 28 * 3600  # "over 27 hours" in docs/operations.md


def test_a_receiver_can_verify_as_the_example_does() -> None:
    """The code of the page takes our signatures, and refuses others', changed ones and old ones."""
    blocks = re.findall(r"^```python\n(.*?)^```", section("Webhooks"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "api.md", "exec"), names)
    verify = names["verify"]
    old, new = new_secret(), new_secret()
    body = json.dumps({"type": "checkpoint.committed"}).encode()
    headers = headers_for([new, old], "evt_5", time.time(), body)
    assert verify(new, headers, body) == verify(old, headers, body) == "evt_5"
    for secret, given, content in (
        (new_secret(), headers, body),
        (new, headers, body + b" "),
        (new, headers | {"webhook-id": "evt_6"}, body),
        (new, headers_for([new], "evt_5", time.time() - 301, body), body),
    ):
        with pytest.raises(ValueError):
            verify(secret, given, content)
