"""A training run and the real service: what is saved is in the catalog, with what the trainer noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.server.client import Client
from tests.support.app import running_app
from tests.support.pages import Browser
from tests.support.ports import refusing_port
from tests.support.sockets import listening


def test_a_run_in_the_catalog(tmp_path: Path) -> None:
    """Steps, metrics, run and tags are there once the manager is closed; what retention deleted is gone."""
    database = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(database, tmp_path) as app, listening(app.app) as url:
        catalog = dcp.CatalogRegistration(url, key=app.key("write"), tags=("nightly",), close_seconds=120)
        with dcp.CheckpointManager(
            tmp_path / "main" / "llama", keep=dcp.Retention(last=2), run="seven", catalog=catalog
        ) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"w": torch.ones(4) * step}, metrics={"loss": 1 / step}, force=True)
                assert manager.wait(120)
        with Client(url, key=app.key("read")) as client:
            found = {each.step: each for each in client.checkpoints(state="any", run="llama")}
            detail = client.checkpoint(found[3].id)
    assert {step: each.state for step, each in found.items()} | {1: "vanished"} == {
        1: "vanished",
        2: "committed",
        3: "committed",
    }
    assert found[2].metrics == {"loss": 0.5} and found[2].tags == ("nightly",)
    assert detail.user_metadata["run"] == "seven"


@pytest.mark.parametrize("mode", ["sync", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_what_a_run_was_resumed_from_is_in_the_catalog(tmp_path: Path, mode: Any) -> None:
    """API and page name it for each save that follows, in whatever order they are found, and for no other."""
    root, state = tmp_path / "main", {"w": torch.ones(4)}
    with dcp.CheckpointManager(root / "base", mode=mode) as manager:
        for step in (1, 2):
            manager.save(step, state, force=True)
    with dcp.CheckpointManager(root / "base", mode=mode) as manager:
        manager.restore(state, 1)
        for step in (3, 4):
            manager.save(step, state, force=True)
    provenance = dcp.open_index(root / "base" / "step-00000004").provenance
    parent = dcp.open_index(root / "base" / "step-00000001").provenance
    url = str(root / "base" / "step-00000001")
    assert provenance["resumed_from"] == {"url": url, "step": 1, "save_id": parent["save_id"]}
    assert "resumed_from" not in parent
    database = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(database, tmp_path) as app, listening(app.app) as address:
        with Client(address, key=app.key("write")) as client:
            for step in (4, 2, 1):
                client.register(f"base/step-0000000{step}", root="main")
        key = app.key("read")
        with Client(address, key=key) as client:
            found = {each.step: each.id for each in client.checkpoints()}
            assert client.checkpoint(found[4]).resumed_from == parent["save_id"]
            (edge,) = client.lineage(found[4]).edges
            assert client.lineage(found[2]).edges == ()
        browser = Browser(app.client())
        browser.sign_in(key)
        assert "resumed from step-00000001" in browser.page(f"/checkpoints/{found[4]}/lineage").text
    assert (edge.child_id, edge.parent_id, edge.kind) == (found[4], found[1], "resumed_from")


def test_a_service_that_comes_later(tmp_path: Path) -> None:
    """What a run has saved while there was no service is in the catalog after the next run's start."""
    root = tmp_path / "main" / "run"
    with refusing_port() as port:
        away = dcp.CatalogRegistration(f"http://127.0.0.1:{port}", close_seconds=0, spool=tmp_path / "spool")
        with dcp.CheckpointManager(root, catalog=away) as manager:
            manager.save(1, {"w": torch.ones(4)}, force=True)
    database = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(database, tmp_path) as app, listening(app.app) as url:
        there = dcp.CatalogRegistration(
            url, key=app.key("write"), close_seconds=120, spool=tmp_path / "spool", root="main", folder="run"
        )
        with dcp.CheckpointManager(root, catalog=there):
            pass
        with Client(url, key=app.key("read")) as client:
            assert [each.key for each in client.checkpoints()] == ["run/step-00000001"]
