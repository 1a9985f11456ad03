"""Registration in the catalog: a failing catalog does not disturb training, and no registration is lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.server.client import Client
from tests.support.app import running_app
from tests.support.ports import refusing_port
from tests.support.programs import run_program
from tests.support.scripted_service import Answer, Request, scripted_service
from tests.support.sockets import listening

HANG_SECONDS = 120.0
STATE = {"w": torch.ones(4)}


def spooled(folder: Path) -> list[dict[str, Any]]:
    """Return the registrations that wait on disk, in order."""
    paths = sorted(folder.rglob("[0-9]*.json"))
    return [json.loads(path.read_bytes()) for path in paths]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Yield a port without a listener."""
    with refusing_port() as port:
        yield port


def saved(root: Path, url: str, steps: range, **options: Any) -> dcp.CheckpointManager:
    """Save these steps by a manager with a catalog, close the manager, and return it."""
    settings: dict[str, Any] = {"spool": root / "spool", "close_seconds": HANG_SECONDS}
    catalog = dcp.CatalogRegistration(url, **(settings | options))
    with dcp.CheckpointManager(root / "run", mode="sync", catalog=catalog) as manager:
        for step in steps:
            manager.save(step, STATE, force=True)
    return manager


def test_an_unreachable_catalog(tmp_path: Path, closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """With an unreachable catalog saves and `close` succeed with one warning; the next manager registers."""
    with caplog.at_level(logging.WARNING, "dcp.manager.catalog"):
        manager = saved(tmp_path, f"http://127.0.0.1:{closed_port}", range(1, 3), close_seconds=0.5)
    assert manager.all_steps() == [1, 2]
    assert [body["step"] for body in spooled(tmp_path)] == [1, 2]
    assert sum("cannot be reached" in text for text in caplog.messages) <= 1
    assert sum("next manager" in text for text in caplog.messages) == 1
    with scripted_service() as service:
        saved(tmp_path, service.url, range(0))
        assert [body["step"] for body in service.bodies()] == [1, 2]
    assert spooled(tmp_path) == []


def test_a_hanging_catalog(tmp_path: Path) -> None:
    """A request without an answer delays no save, and `close` by at most close_seconds."""
    with scripted_service(lambda request: Answer(hang=True)) as service:
        catalog = dcp.CatalogRegistration(service.url, request_seconds=60, close_seconds=0.2)
        with dcp.CheckpointManager(tmp_path, catalog=catalog) as manager:
            for step in range(1, 4):
                future = manager.save(step, STATE, force=True)
                assert future is not None
                future.result(HANG_SECONDS)
            service.wait_for(1)
        assert len(service.requests) == 1
    assert [body["step"] for body in spooled(tmp_path)] == [1, 2, 3]


def test_registrations_of_a_killed_trainer(tmp_path: Path, closed_port: int) -> None:
    """Registrations of a trainer killed by SIGKILL are on disk, and the next manager sends them."""
    script = f"""
import os, signal, time, torch, dcp
from pathlib import Path
catalog = dcp.CatalogRegistration("http://127.0.0.1:{closed_port}", spool={str(tmp_path / "spool")!r})
manager = dcp.CheckpointManager({str(tmp_path / "run")!r}, catalog=catalog)
manager.save(7, {{"w": torch.ones(2)}}, force=True).result()
deadline = time.monotonic() + 60
while not list(Path({str(tmp_path / "spool")!r}).glob("[0-9]*.json")) and time.monotonic() < deadline:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_program("-c", script).returncode == -9
    with scripted_service() as service:
        saved(tmp_path, service.url, range(0))
        assert [(body["key"], body["root_url"]) for body in service.bodies()] == [
            ("step-00000007", str(tmp_path / "run"))
        ]


def test_registrations_are_retried_or_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request is repeated in order after a temporary error, or while the service does not see the
    checkpoint. A rejected registration is logged with the reason and removed, and the next is sent."""
    statuses = iter([403, 429, 404, 201, 422, 201])

    def answer(request: Request) -> Answer:
        return Answer(next(statuses), {"detail": "not such a key"}, headers={"Retry-After": "0"})

    with scripted_service(answer) as service, caplog.at_level(logging.WARNING, "dcp.manager.catalog"):
        saved(tmp_path, service.url, range(1, 2))
        saved(tmp_path, service.url, range(2, 4))
        assert [body["step"] for body in service.bodies()] == [1, 1, 1, 1, 2, 3]
    assert "refuses the key" in caplog.text and "step-00000002 was not registered: 422" in caplog.text
    assert spooled(tmp_path) == []


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """A redirect is not followed, so that the key reaches only the configured service."""
    with scripted_service() as other:
        redirect = Answer(307, headers={"Location": f"{other.url}/api/v1/checkpoints"})
        with scripted_service(lambda request: redirect) as service:
            saved(tmp_path, service.url, range(1, 2), key="dcp_secret", close_seconds=0.5)
            service.wait_for(1)
        assert other.requests == []
    assert len(spooled(tmp_path)) == 1


def test_the_catalog_has_the_run(tmp_path: Path) -> None:
    """After `close` the catalog has steps, metrics, run and tags, without the steps that retention deleted. A
    resumed run's step names the step that it was resumed from."""
    root, database = tmp_path / "main" / "llama", f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(database, tmp_path) as app, listening(app.app) as url:
        catalog = dcp.CatalogRegistration(url, key=app.key("write"), tags=("nightly",), close_seconds=120)
        with dcp.CheckpointManager(root, keep=dcp.Retention(last=2), run="seven", catalog=catalog) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"w": torch.ones(4) * step}, metrics={"loss": 1 / step}, force=True)
                assert manager.wait(120)
        with dcp.CheckpointManager(root, catalog=catalog) as manager:
            restored = manager.restore({"w": torch.zeros(4)}, 2)
            manager.save(4, STATE, force=True)
        with Client(url, key=app.key("read")) as client:
            found = {each.step: each for each in client.checkpoints(state="any", run="llama")}
            first, last = client.checkpoint(found[3].id), client.checkpoint(found[4].id)
            (edge,) = client.lineage(last.id).edges
            assert client.lineage(first.id).edges == ()
    assert {step: each.state for step, each in found.items()} | {1: "vanished"} == {
        1: "vanished",
        **dict.fromkeys((2, 3, 4), "committed"),
    }
    assert found[2].metrics == {"loss": 0.5} and found[2].tags == ("nightly",)
    assert first.user_metadata["run"] == "seven" and restored is not None
    assert (edge.child_id, edge.parent_id, edge.kind) == (last.id, found[2].id, "resumed_from")
    parent = dcp.open_index(restored.checkpoint_id).provenance["save_id"]
    stored = dcp.open_index(root / "step-00000004").provenance["resumed_from"]
    assert stored == {"url": restored.checkpoint_id, "step": 2, "save_id": last.resumed_from}
    assert parent == last.resumed_from and first.resumed_from is None
