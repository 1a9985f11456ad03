"""Registration behind training: whatever the catalog does, training is not disturbed, and nothing is lost."""

from __future__ import annotations

import json
import logging
import os
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
from tests.support.scripted_service import Answer, Asked, scripted_service
from tests.support.sockets import listening

HANG_SECONDS = 120.0
STATE = {"w": torch.ones(4)}


def spooled(folder: Path) -> list[dict[str, Any]]:
    """The notes that wait on disk, in order."""
    paths = sorted(folder.rglob("[0-9]*.json"))
    return [json.loads(path.read_bytes()) for path in paths]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens."""
    with refusing_port() as port:
        yield port


def saved(root: Path, url: str, steps: range, **options: Any) -> dcp.CheckpointManager:
    """A closed manager that has saved these steps, and given the catalog so long at its end."""
    settings: dict[str, Any] = {"spool": root / "spool", "close_seconds": HANG_SECONDS}
    catalog = dcp.CatalogRegistration(url, **(settings | options))
    with dcp.CheckpointManager(root / "run", mode="sync", catalog=catalog) as manager:
        for step in steps:
            manager.save(step, STATE, force=True)
    return manager


def test_a_run_is_registered(tmp_path: Path) -> None:
    """Each commit and each deletion, with where it is, step, save id and tags, by the key; once it has
    arrived nothing is left on disk."""
    with scripted_service() as service:
        catalog = dcp.CatalogRegistration(service.url, key="dcp_secret", tags=("nightly",))
        with dcp.CheckpointManager(tmp_path, keep=dcp.Retention(last=1), catalog=catalog) as manager:
            for step in (1, 2):
                manager.save(step, STATE, metrics={"loss": 0.5}, force=True)
                assert manager.wait(HANG_SECONDS)
        bodies = service.bodies()
        assert {asked.path for asked in service.asked} == {"/api/v1/checkpoints"}
        assert {asked.headers["Authorization"] for asked in service.asked} == {"Bearer dcp_secret"}
    saved = [body for body in bodies if "save_id" in body]
    assert [body["key"] for body in saved] == ["step-00000001", "step-00000002"]
    ids = [dcp.open_index(tmp_path / "step-00000002").provenance["save_id"]]
    assert saved[1] == {
        "root_url": str(tmp_path),
        "key": "step-00000002",
        "step": 2,
        "save_id": ids[0],
        "tags": ["nightly"],
    }
    assert [body for body in bodies if body.get("deleted")] == [
        {"root_url": str(tmp_path), "key": "step-00000001", "step": 1, "deleted": True}
    ]
    assert spooled(tmp_path) == []


def test_by_the_name_of_a_root(tmp_path: Path) -> None:
    """The service may see the storage elsewhere: then root and folder say where the run is."""
    with scripted_service() as service:
        catalog = dcp.CatalogRegistration(service.url, root="prod", folder="/llama/7/")
        with dcp.CheckpointManager(tmp_path, mode="sync", catalog=catalog) as manager:
            manager.save(3, STATE, force=True)
        assert [(body["root"], body["key"]) for body in service.bodies()] == [
            ("prod", "llama/7/step-00000003")
        ]
        assert "Authorization" not in service.asked[0].headers


def test_a_catalog_that_is_away(tmp_path: Path, closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Saves and close succeed, one warning says so, the note stays, and the next manager sends it."""
    with caplog.at_level(logging.WARNING, "dcp.manager.catalog.registration"):
        manager = saved(tmp_path, f"http://127.0.0.1:{closed_port}", range(1, 3), close_seconds=0.5)
    assert manager.all_steps() == [1, 2]
    assert [body["step"] for body in spooled(tmp_path)] == [1, 2]
    assert sum("cannot be told" in text for text in caplog.messages) <= 1
    assert sum("next manager" in text for text in caplog.messages) == 1
    with scripted_service() as service:
        saved(tmp_path, service.url, range(0))
        assert [body["step"] for body in service.bodies()] == [1, 2]
    assert spooled(tmp_path) == []


def test_a_catalog_that_hangs(tmp_path: Path) -> None:
    """A request without an answer holds up neither saves nor, beyond its bound, close."""
    with scripted_service(lambda asked: Answer(hang=True)) as service:
        catalog = dcp.CatalogRegistration(service.url, request_seconds=60, close_seconds=0.2)
        with dcp.CheckpointManager(tmp_path, catalog=catalog) as manager:
            for step in range(1, 4):
                future = manager.save(step, STATE, force=True)
                assert future is not None
                future.result(HANG_SECONDS)
            service.wait_for(1)
        assert len(service.asked) == 1
    assert [body["step"] for body in spooled(tmp_path)] == [1, 2, 3]


def test_a_trainer_that_is_killed(tmp_path: Path, closed_port: int) -> None:
    """What was committed while the catalog was away survives SIGKILL, and is sent by the next start."""
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


def test_it_is_tried_again_or_let_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors of the service, and a checkpoint that it does not see yet, are asked about again, in order; what
    it does not take is logged with its reason and removed, and the next one is sent."""
    statuses = iter([429, 404, 201, 422, 201])

    def answer(asked: Asked) -> Answer:
        return Answer(next(statuses), {"detail": "not such a key"}, headers={"Retry-After": "0"})

    with (
        scripted_service(answer) as service,
        caplog.at_level(logging.WARNING, "dcp.manager.catalog.registration"),
    ):
        saved(tmp_path, service.url, range(1, 2))
        saved(tmp_path, service.url, range(2, 4))
        assert [body["step"] for body in service.bodies()] == [1, 1, 1, 2, 3]
    assert "not such a key" in caplog.text
    assert spooled(tmp_path) == []


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """The key goes to the service that was named, and to no other."""
    with scripted_service() as other:
        redirect = Answer(307, headers={"Location": f"{other.url}/api/v1/checkpoints"})
        with scripted_service(lambda asked: redirect) as service:
            saved(tmp_path, service.url, range(1, 2), key="dcp_secret", close_seconds=0.5)
            service.wait_for(1)
        assert other.asked == []
    assert len(spooled(tmp_path)) == 1


def test_only_the_last_of_a_checkpoint_is_sent(tmp_path: Path, closed_port: int) -> None:
    """A deletion makes the note of the commit moot, if that has not been sent yet; of too many notes the
    oldest go."""
    url = f"http://127.0.0.1:{closed_port}"
    catalog = dcp.CatalogRegistration(url, spool=tmp_path / "spool", close_seconds=0)
    keep = dcp.Retention(last=1)
    with dcp.CheckpointManager(tmp_path / "run", mode="sync", catalog=catalog, keep=keep) as manager:
        for step in (1, 2):
            manager.save(step, STATE, force=True)
            assert manager.wait(HANG_SECONDS)
    assert [(body["step"], body.get("deleted")) for body in spooled(tmp_path)] == [(2, None), (1, True)]
    saved(tmp_path, url, range(3, 9), close_seconds=0, spool_notes=3)
    assert [body["step"] for body in spooled(tmp_path)] == [6, 7, 8]


def test_a_spool_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then notes are in memory only, and are sent all the same."""
    (tmp_path / "file").write_bytes(b"")
    with scripted_service() as service:
        saved(tmp_path, service.url, range(1, 2), spool=tmp_path / "file" / "spool")
        assert [body["step"] for body in service.bodies()] == [1]
    assert "in memory only" in caplog.text


def test_rests_in_a_spool_are_not_sent(tmp_path: Path, closed_port: int) -> None:
    """Half-written, foreign and damaged files: damaged notes are removed, what is another's stays."""
    saved(tmp_path, f"http://127.0.0.1:{closed_port}", range(1, 2), close_seconds=0)
    (good,) = (tmp_path / "spool").glob("[0-9]*.json")
    aside = good.with_name(f".tmp-{good.name}")
    aside.write_bytes(b"{")
    os.utime(aside, (1e9, 1e9))
    good.with_name("notes.txt").write_bytes(b"mine")
    for number, data in enumerate((b"", b"{", b"[]", b'{"key": 7}', b"\xff" * 70_000)):
        good.with_name(f"{number:020d}-0000abcd-000000.json").write_bytes(data)
    with scripted_service() as service:
        saved(tmp_path, service.url, range(0))
        assert [body["step"] for body in service.bodies()] == [1]
    assert [path.name for path in good.parent.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("localhost:8470", {}),
        ("ftp://host/", {}),
        ("http://", {}),
        ("http://host", {"folder": "a"}),
        ("http://host", {"spool_notes": 0}),
        ("http://host", {"key": "s\u00fcss-secret"}),
    ],
)
def test_what_cannot_be_meant(url: str, options: dict[str, Any]) -> None:
    """Is refused when the manager is made; the key is in no message."""
    with pytest.raises(ValueError, match="catalog") as caught:
        dcp.CatalogRegistration(url, **options)
    assert "secret" not in str(caught.value)


def test_the_key_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is given it is DCP_CATALOG_KEY, which scripts need not know; no key is in a repr."""
    assert "dcp_secret" not in repr(dcp.CatalogRegistration("http://host", key="dcp_secret"))
    monkeypatch.setenv("DCP_CATALOG_KEY", "dcp_fromenv")
    with scripted_service() as service:
        saved(tmp_path, service.url, range(1, 2))
        assert service.asked[0].headers["Authorization"] == "Bearer dcp_fromenv"


def test_a_run_in_the_catalog(tmp_path: Path) -> None:
    """Steps, metrics, run and tags are there once the manager is closed; what retention deleted is gone; what
    another run saves names the step that it was resumed from."""
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
